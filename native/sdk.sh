#!/usr/bin/env bash
# Makes a virtual environment with Python packages that the tests or the benches use.
#
# usage: native/sdk.sh FOLDER REQUIREMENT…
#
# Debian's python3 may come without ensurepip: then the system's pip installs into an environment that has none.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=native/lib.sh
. "$here/lib.sh"
[ $# -ge 2 ] || fail "usage: native/sdk.sh FOLDER REQUIREMENT…"

folder=$1
shift
require_pip
say "installing $*"
rm -rf "$folder"
if python3 -m venv "$folder" >/dev/null 2>&1; then
  install=("$folder/bin/python3" -m pip)
  where=()
else
  rm -rf "$folder"
  python3 -m venv --without-pip "$folder" ||
    fail "python3 cannot make a virtual environment" "on Debian: apt-get install -y python3-venv"
  install=(python3 -m pip)
  where=(--target "$("$folder/bin/python3" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')")
fi
"${install[@]}" --disable-pip-version-check install --quiet --no-warn-script-location ${where[@]+"${where[@]}"} "$@" >&2 ||
  fail "could not install $* with pip (see its message above)"
