# Shared by setup.sh and model.sh: where Greenroom keeps its own data, how missing system packages are dealt with, locks.
# Sourced, never run. Works in bash 3.2, which is what a Mac has. Everything a person reads goes to stderr.

say() { printf 'greenroom: %s\n' "$*" >&2; }

# fail MESSAGE [MORE LINES…]: the last line says what to do.
fail() {
  local line
  for line in "$@"; do say "$line"; done
  exit 1
}

# The folder of Greenroom's own data, absolute. GREENROOM_HOME wins.
greenroom_home() {
  local home=${GREENROOM_HOME:-}
  if [ -z "$home" ]; then
    [ -n "${HOME:-}" ] || fail "neither GREENROOM_HOME nor HOME is set: set GREENROOM_HOME to a folder for models and native libraries"
    if [ "$(uname -s)" = Darwin ]; then
      home="$HOME/Library/Application Support/greenroom"
    else
      home="$HOME/.local/share/greenroom"
    fi
  fi
  case $home in
    /*) ;;
    *) home="$PWD/$home" ;;
  esac
  # A colon separates search paths, and a line break ends a line of the files written here: neither can be escaped.
  case $home in
    *:* | *$'\n'*) fail "GREENROOM_HOME must not contain a colon or a line break: $home" ;;
  esac
  printf '%s\n' "$home"
}

# make_folder PATH: creates it or says what to do.
make_folder() {
  mkdir -p "$1" 2>/dev/null || fail "cannot create the folder $1" "set GREENROOM_HOME to a folder that you may write to"
}

# install_packages PACKAGE…: by apt-get when root on Debian or a relative of it; else prints the command and ends.
install_packages() {
  if ! command -v apt-get >/dev/null 2>&1; then
    fail "missing on this system: $*" "install these (Debian's names) with your package manager, then try again"
  fi
  if [ "$(id -u)" != 0 ]; then
    fail "missing on this system: $*" "run: sudo apt-get update && sudo apt-get install -y $*"
  fi
  say "installing the system packages $*"
  # The lists of a fresh image are empty or old, hence the second try after an update.
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" >&2 </dev/null && return
  apt-get update >&2 </dev/null || true
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" >&2 </dev/null ||
    fail "apt-get could not install $*" "run: apt-get update && apt-get install -y $*"
}

# Downloads come from PyPI, by whatever index and mirror pip is set up for.
require_pip() {
  if ! command -v python3 >/dev/null 2>&1 || ! python3 -m pip --version >/dev/null 2>&1; then
    if [ "$(uname -s)" = Darwin ]; then
      fail "python3 with pip is needed for downloads" "run: xcode-select --install"
    fi
    install_packages python3 python3-pip
  fi
  python3 -m pip --version >/dev/null 2>&1 ||
    fail "python3 -m pip does not work" "run: python3 -m ensurepip --upgrade"
}

# download_wheel REQUIREMENT FOLDER: one wheel without its dependencies. Progress goes to stderr.
download_wheel() {
  python3 -m pip --disable-pip-version-check download --no-deps --only-binary :all: --no-cache-dir --dest "$2" "$1" >&2 ||
    fail "could not download $1 with pip (see its message above)" \
      "check the network (or PIP_INDEX_URL, PIP_PROXY), then run the same command again"
}

# hold_lock FILE: one set-up at a time; held on descriptor 9 until this process and what it started have ended.
# Without flock (a Mac) nothing is held: both do the work, and the rename at the end decides.
hold_lock() {
  exec 9>"$1" || fail "cannot write $1"
  command -v flock >/dev/null 2>&1 || return 0
  flock -n 9 && return
  say "another set-up is at work in $(dirname "$1"); waiting for it"
  flock 9
}

# lock_works: whether what another run left behind is certainly abandoned while the lock is held.
lock_works() { command -v flock >/dev/null 2>&1; }

sha256_of() {
  if command -v sha256sum >/dev/null 2>&1; then
    sha256sum "$@"
  else
    shasum -a 256 "$@"
  fi | cut -d' ' -f1
}

# size_of FILE: bytes, or nothing where there is no such file.
size_of() { [ ! -f "$1" ] || wc -c <"$1" | tr -d ' '; }
