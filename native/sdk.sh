#!/usr/bin/env bash
# Makes a virtual environment with a Python package that the tests use.
#
# usage: native/sdk.sh FOLDER REQUIREMENT
#
# Debian's python3 may come without ensurepip: then the system's pip installs into an environment that has none.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=native/lib.sh
. "$here/lib.sh"
[ $# = 2 ] || fail "usage: native/sdk.sh FOLDER REQUIREMENT"

require_pip
say "installing $2 for the tests"
rm -rf "$1"
if python3 -m venv "$1" >/dev/null 2>&1; then
  install=("$1/bin/python3" -m pip)
  where=()
else
  rm -rf "$1"
  python3 -m venv --without-pip "$1" ||
    fail "python3 cannot make a virtual environment" "on Debian: apt-get install -y python3-venv"
  install=(python3 -m pip)
  where=(--target "$("$1/bin/python3" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')")
fi
"${install[@]}" --disable-pip-version-check install --quiet --no-warn-script-location ${where[@]+"${where[@]}"} "$2" >&2 ||
  fail "could not install $2 with pip (see its message above)"
