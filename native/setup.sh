#!/usr/bin/env bash
# Makes MLX usable by Cargo where the mlx-sys crate cannot build it itself, that is on Linux. See native/README.md.
#
# usage: native/setup.sh [PROJECT]      build once for this user, then write PROJECT/.cargo/config.toml
#        native/setup.sh --print-lib    the folder of libmlx.so
#        native/setup.sh --print-prefix the folder of everything built here
#
# PROJECT is Greenroom itself by default, or an application that embeds it. A second run does no work and needs no network.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
# shellcheck source=native/lib.sh
. "$here/lib.sh"

# mlx-c inside mlx-sys is written against exactly this MLX: they move together, with bindings.rs.
mlx_version=0.32.2
mlx_sys_version=0.7.0
sources=(setup.sh lib.sh mlxc_prefix.hpp mach_time.cpp bindings.rs)
without_mlx="or build without MLX: cargo build --release --no-default-features --features cpu"

usage() {
  sed -n '4,8s/^# \{0,1\}//p' "$here/setup.sh" >&2
  exit 64
}

# What the wheel was built for: glibc 2.35 or newer on x86_64 or aarch64.
check_platform() {
  case $(uname -m) in
    x86_64 | aarch64) ;;
    *) fail "there is no MLX for $(uname -m) on Linux" "$without_mlx" ;;
  esac
  local glibc
  glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2) || true
  [ -n "$glibc" ] || fail "MLX needs glibc 2.35 or newer; this system has another C library" "$without_mlx"
  if [ "$(printf '%s\n2.35\n' "$glibc" | sort -V | head -n1)" != 2.35 ]; then
    fail "MLX needs glibc 2.35 or newer; this system has $glibc" "$without_mlx"
  fi
}

# finished PREFIX: whether a complete build lies there, by a record that was written last. Reads sizes, no contents.
finished() {
  [ -f "$1/complete" ] && [ "$(cat "$1/complete")" = "$(record "$1" "$1")" ]
}

# record FOLDER PREFIX: what a finished build in FOLDER looks like once it lies at PREFIX (its libraries know their place).
record() {
  local file
  printf '%s\n' "$2"
  for file in lib/libmlxc.a lib/libmlxc.so mlx/mlx/lib/libmlx.so bindings/bindings.rs include/mlx/c/mlx.h; do
    printf '%s %s\n' "$file" "$(size_of "$1/$file")"
  done
}

# The folder of the mlx-sys crate as Cargo resolves it for $project; Cargo downloads it where it must.
mlx_sys_folder() {
  (cd "$project" && cargo metadata --format-version 1 --all-features) | python3 -c '
import json, os, sys
want = sys.argv[1]
found = {p["version"]: p["manifest_path"] for p in json.load(sys.stdin)["packages"] if p["name"] == "mlx-sys"}
if want not in found:
    sys.exit("greenroom: the project uses mlx-sys %s, this set-up is for %s" % (", ".join(found) or "not at all", want))
print(os.path.dirname(found[want]))' "$mlx_sys_version"
}

# compile_mlx_c CRATE WORK: object files of mlx-c into WORK/objects. cuda.cpp needs a CUDA build of MLX.
compile_mlx_c() {
  local source jobs flags
  # MLX_STATIC keeps MLX's export macro empty; the headers are the wheel's, not the crate's.
  flags=(-std=c++20 -O1 -fPIC -DMLX_STATIC= -I"$2/mlx/mlx/include" -I"$1/src/mlx-c")
  mkdir "$2/objects"
  cp "$here/mlxc_prefix.hpp" "$2/objects/prefix.hpp"
  g++ "${flags[@]}" -x c++-header "$2/objects/prefix.hpp" -o "$2/objects/prefix.hpp.gch" || return
  for source in "$1"/src/mlx-c/mlx/c/*.cpp "$here/mach_time.cpp"; do
    [ "${source##*/}" = cuda.cpp ] || printf '%s\0' "$source"
  done >"$2/objects/sources"
  jobs=$(nproc 2>/dev/null || echo 2)
  xargs -0 -P "$jobs" -n 1 sh -c '
    for source; do :; done
    objects=$1 && shift
    name=${source##*/}
    exec g++ -include "$objects/prefix.hpp" -c -o "$objects/${name%.cpp}.o" "$@"' \
    sh "$2/objects" "${flags[@]}" <"$2/objects/sources"
}

# build WORK PREFIX: everything into WORK, with PREFIX as the place where it will lie.
build() {
  local work=$1 final=$2 crate wheels
  say "setting up MLX $mlx_version in $final (once, takes a minute or two)"
  check_platform
  command -v cargo >/dev/null 2>&1 || fail "cargo is missing" "install Rust: https://rustup.rs"
  command -v g++ >/dev/null 2>&1 || install_packages g++
  require_pip
  crate=$(mlx_sys_folder) || fail "could not find the source of mlx-sys $mlx_sys_version for $project (see above)"

  say "downloading MLX $mlx_version"
  download_wheel "mlx-cpu==$mlx_version" "$work"
  wheels=("$work"/mlx_cpu-*.whl)
  python3 -m zipfile -e "${wheels[0]}" "$work/mlx" || fail "the downloaded wheel of MLX is damaged" "run the same command again"
  rm -f "${wheels[@]}"

  say "compiling mlx-c from mlx-sys $mlx_sys_version"
  compile_mlx_c "$crate" "$work" ||
    fail "mlx-c did not compile (see above)" "g++ 12 or newer is needed; this is $(g++ -dumpfullversion)"
  mkdir -p "$work/lib" "$work/bindings" "$work/include/mlx"
  ar rcs "$work/lib/libmlxc.a" "$work"/objects/*.o
  # An absolute path as its name: whoever links this library finds it, and through it libmlx.so, without an rpath.
  g++ -shared -o "$work/lib/libmlxc.so" "$work"/objects/*.o -L"$work/mlx/mlx/lib" -lmlx \
    -Xlinker -soname -Xlinker "$final/lib/libmlxc.so" -Xlinker -rpath -Xlinker "$final/mlx/mlx/lib"
  cp -R "$crate/src/mlx-c/mlx/c" "$work/include/mlx/c"
  cp "$here/bindings.rs" "$work/bindings/bindings.rs"
  rm -rf "$work/objects"
  record "$work" "$final" >"$work/complete"
}

# Builds in a folder of its own and renames it into place, so that a prefix is whole or not there.
ensure_built() {
  finished "$prefix" && return
  make_folder "$home/native"
  hold_lock "$home/native/.lock"
  finished "$prefix" && return # another clone has just done it
  # The lock is ours: whatever an interrupted run left is abandoned.
  if lock_works; then rm -rf "$home/native"/.building-*; fi
  work=$(mktemp -d "$home/native/.building-XXXXXX") || fail "cannot write to $home/native"
  chmod 755 "$work"
  trap 'rm -rf "$work"' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  build "$work" "$prefix"
  rm -rf "$prefix"
  mv "$work" "$prefix"
  finished "$prefix" || fail "the build in $prefix is not complete" "remove that folder and run the same command again"
}

# toml TEXT: as a TOML string.
toml() {
  local text=${1//\\/\\\\}
  printf '"%s"' "${text//\"/\\\"}"
}

# The build-script override of Cargo's configuration: mlx-sys then runs no build script, and includes OUT_DIR/bindings.rs.
# Greenroom links mlx-c into itself and its build.rs sets the rpath; an application that embeds it cannot get an rpath from a
# dependency, so it links the shared mlx-c, which knows where it lies.
override() {
  local triple=$1 libraries
  if [ "$project" = "$root" ]; then
    libraries='"static=mlxc", "dylib=mlx", "dylib=stdc++"'
  else
    libraries='"dylib=mlxc"'
  fi
  printf '%s\n' "$mark_begin"
  printf '[target.%s.mlx]\n' "$triple"
  printf 'rustc-link-search = [%s, %s]\n' "$(toml "native=$prefix/lib")" "$(toml "native=$prefix/mlx/mlx/lib")"
  printf 'rustc-link-lib = [%s]\n' "$libraries"
  printf 'rustc-env = { OUT_DIR = %s }\n' "$(toml "$prefix/bindings")"
  printf 'include = %s\n' "$(toml "$prefix/mlx/mlx/include:$prefix/include")"
  printf 'library = %s\n' "$(toml "$prefix/mlx/mlx/lib")"
  printf 'version = %s\n' "$(toml "$mlx_version")"
  printf '%s\n' "$mark_end"
}

mark_begin="# >>> greenroom: written by native/setup.sh, replaced as a whole"
mark_end="# <<< greenroom"

# Puts the override into PROJECT/.cargo/config.toml; lines outside the marks stay, and an unchanged file is not touched.
write_config() {
  local triple=$1 folder="$project/.cargo" config others new
  config="$folder/config.toml"
  [ ! -f "$folder/config" ] || fail "Cargo reads $folder/config and would ignore config.toml" "run: mv $folder/config $config"
  mkdir -p "$folder"
  others=
  if [ -f "$config" ]; then
    others=$(awk -v begin="$mark_begin" -v end="$mark_end" '
      $0 == begin { inside = 1 } !inside { print } $0 == end { inside = 0 }' "$config")
    if printf '%s\n' "$others" | grep -E "^[[:space:]]*\[target\.\"?$triple\"?\.\"?mlx\"?\]" >/dev/null; then
      fail "$config has a section [target.$triple.mlx] of its own" "remove that section and run the same command again"
    fi
  fi
  new="$config.$$"
  { [ -z "$others" ] || printf '%s\n\n' "$others"; override "$triple"; } >"$new"
  if [ -f "$config" ] && cmp -s "$new" "$config"; then
    rm "$new"
  else
    mv "$new" "$config"
    say "wrote $config"
  fi
}

# A lock file that names another mlx-sys would otherwise show as hundreds of compiler errors.
check_lock_file() {
  local other
  [ -f "$project/Cargo.lock" ] || return 0
  other=$(awk -v want="$mlx_sys_version" '
    /^name = "mlx-sys"$/ { getline; gsub(/version = |"/, ""); if ($0 != want) print }' "$project/Cargo.lock")
  [ -z "$other" ] || fail "$project/Cargo.lock has mlx-sys $other; this set-up is for $mlx_sys_version" \
    "use mlx-sys $mlx_sys_version, or move native/ to the other version (native/README.md)"
}

# On a Mac the crate builds MLX, with Metal; it only needs its tools.
set_up_mac() {
  command -v cmake >/dev/null 2>&1 || fail "cmake is needed to build MLX" "run: brew install cmake"
  xcrun --sdk macosx --find metal >/dev/null 2>&1 ||
    fail "Xcode with its Metal compiler is needed to build MLX" "install Xcode, then run: xcodebuild -downloadComponent MetalToolchain"
  say "macOS: nothing to set up, Cargo builds MLX from the mlx-sys crate"
}

action=write
project=$root
case ${1:-} in
  --print-lib | --print-prefix) action=${1#--print-} && shift ;;
  -*) usage ;;
  ?*) project=$1 && shift ;;
esac
[ $# -eq 0 ] || usage
given=$project
project=$(cd "$given" 2>/dev/null && pwd -P) || fail "no such folder: $given"
root=$(cd "$root" && pwd -P)

case $(uname -s) in
  Linux) ;;
  Darwin)
    [ "$action" = write ] || fail "on macOS MLX is part of the executable: there is no folder of its own"
    set_up_mac
    exit 0
    ;;
  *) fail "MLX runs on macOS and Linux only" "$without_mlx" ;;
esac

home=$(greenroom_home)
stamp="mlx-$mlx_version-sys-$mlx_sys_version-$(uname -m)-$(cd "$here" && cat "${sources[@]}" | sha256_of | cut -c1-12)"
prefix="$home/native/$stamp"

if [ "$action" != write ]; then
  finished "$prefix" || fail "MLX is not set up yet" "run: make native"
  if [ "$action" = lib ]; then printf '%s\n' "$prefix/mlx/mlx/lib"; else printf '%s\n' "$prefix"; fi
  exit 0
fi

[ -f "$project/Cargo.toml" ] || fail "no Cargo.toml in $project: give the folder of a Cargo project"
check_lock_file
triple=$(cd "$project" && rustc -vV 2>/dev/null | sed -n 's/^host: //p')
[ -n "$triple" ] || fail "rustc does not work in $project" "install Rust: https://rustup.rs"
ensure_built
write_config "$triple"
