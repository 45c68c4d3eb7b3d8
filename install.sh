#!/usr/bin/env bash
# Builds the library and installs it for C and C++ programs.
#
# usage: install.sh [--prefix FOLDER] [--destdir FOLDER] [--profile release|dev] [--no-build]
#
#   include/oeq.h
#   lib/liboeq_native.so                        the shared library
#   lib/libjcn_ffi_openequivariance.so          the same, under the name that chemtrain-deploy's connector looks for
#   lib/liboeq_native.a                         the static library
#   lib/oeq_native.o                            all of the static library as one object, of which only our symbols are
#                                               visible: for programs that hold other Rust code, or link whole archives
#   lib/pkgconfig/oeq_native.pc                 pkg-config --libs (--static) oeq_native
#   lib/cmake/oeq_native/*.cmake                find_package(oeq_native): oeq_native::shared, ::static, ::object
#
# The prefix is /usr/local by default. The installed files find each other: the prefix may be moved as a whole.
# Folders that are not absolute are seen from where the script is called.
set -euo pipefail
from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"
prefix=/usr/local
destination=
profile=release
build=1
while [ $# -gt 0 ]; do
  case $1 in
    --prefix) prefix=$2; shift ;;
    --destdir) destination=$2; shift ;;
    --profile) profile=$2; shift ;;
    --no-build) build=0 ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | head -n -1 >&2; exit 2 ;;
  esac
  shift
done
absolute() { case $1 in /* | "") echo "$1" ;; *) echo "$from/$1" ;; esac; }
destination=$(absolute "$destination") prefix=$(absolute "$prefix")
[ "$(uname -s)" = Linux ] || { echo "error: install.sh is for Linux" >&2; exit 1; }
folder=$profile
[ "$profile" = dev ] && folder=debug
built=${CARGO_TARGET_DIR:-target}/$folder
[ "$build" = 0 ] || cargo build --quiet --lib --profile "$profile"
for library in liboeq_native.so liboeq_native.a; do
  [ -f "$built/$library" ] || { echo "error: $built/$library is not there; run without --no-build" >&2; exit 1; }
done
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
# What the Rust standard library needs of the system; `rustc --print native-static-libs` lists the same.
system="-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc"

root=$destination$prefix
install -d "$root/include" "$root/lib/pkgconfig" "$root/lib/cmake/oeq_native"
install -m 644 ffi-headers/oeq.h "$root/include/oeq.h"
install -m 755 "$built/liboeq_native.so" "$root/lib/liboeq_native.so"
ln -sf liboeq_native.so "$root/lib/libjcn_ffi_openequivariance.so"
install -m 644 "$built/liboeq_native.a" "$root/lib/liboeq_native.a"

# Everything in one object; then all names but ours become its own.
object=$(mktemp --suffix .o)
trap 'rm -f "$object" "$object.names"' EXIT
${LD:-ld} -r --force-group-allocation --whole-archive "$built/liboeq_native.a" -o "$object"
readelf --syms --wide "$object" | awk '$5 == "GLOBAL" && $7 != "UND" && $8 ~ /^(oeq_|RegisterFFi$)/ { print $8 }' |
  sort -u >"$object.names"
[ -s "$object.names" ] || { echo "error: the static library shows no symbol of ours" >&2; exit 1; }
${OBJCOPY:-objcopy} --strip-debug --remove-section=.llvmbc --remove-section=.llvmcmd --keep-global-symbols="$object.names" "$object" "$root/lib/oeq_native.o"

cat >"$root/lib/pkgconfig/oeq_native.pc" <<PKGCONFIG
prefix=\${pcfiledir}/../..
libdir=\${prefix}/lib
includedir=\${prefix}/include

Name: oeq_native
Description: OpenEquivariance kernels for exported JAX models, in any XLA
Version: $version
Cflags: -I\${includedir}
Libs: -L\${libdir} -loeq_native
Libs.private: $system
PKGCONFIG

cat >"$root/lib/cmake/oeq_native/oeq_native-config.cmake" <<'CMAKE'
# find_package(oeq_native) defines
#   oeq_native::shared   the shared library
#   oeq_native::static   the static library
#   oeq_native::object   the static library as one object with no visible symbols but ours
if(TARGET oeq_native::shared)
  return()
endif()
get_filename_component(_oeq_native_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(_oeq_native_system gcc_s util rt pthread m dl c)

add_library(oeq_native::shared SHARED IMPORTED)
set_target_properties(oeq_native::shared PROPERTIES
  IMPORTED_LOCATION "${_oeq_native_prefix}/lib/liboeq_native.so"
  IMPORTED_SONAME liboeq_native.so
  INTERFACE_INCLUDE_DIRECTORIES "${_oeq_native_prefix}/include")

add_library(oeq_native::static STATIC IMPORTED)
set_target_properties(oeq_native::static PROPERTIES
  IMPORTED_LOCATION "${_oeq_native_prefix}/lib/liboeq_native.a"
  INTERFACE_INCLUDE_DIRECTORIES "${_oeq_native_prefix}/include"
  INTERFACE_LINK_LIBRARIES "${_oeq_native_system}")

add_library(oeq_native::object INTERFACE IMPORTED)
set_target_properties(oeq_native::object PROPERTIES
  INTERFACE_INCLUDE_DIRECTORIES "${_oeq_native_prefix}/include"
  INTERFACE_LINK_LIBRARIES "${_oeq_native_prefix}/lib/oeq_native.o;${_oeq_native_system}")

unset(_oeq_native_prefix)
unset(_oeq_native_system)
CMAKE

cat >"$root/lib/cmake/oeq_native/oeq_native-config-version.cmake" <<CMAKE
set(PACKAGE_VERSION "$version")
# Below 1.0 the minor version says what fits.
if(PACKAGE_FIND_VERSION VERSION_GREATER PACKAGE_VERSION OR
   NOT "\${PACKAGE_FIND_VERSION_MAJOR}.\${PACKAGE_FIND_VERSION_MINOR}" MATCHES "^(|.|${version%.*})\$")
  set(PACKAGE_VERSION_COMPATIBLE FALSE)
else()
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
  if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
    set(PACKAGE_VERSION_EXACT TRUE)
  endif()
endif()
CMAKE
echo "installed oeq_native $version in $root"
