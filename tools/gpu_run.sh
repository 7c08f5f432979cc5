#!/usr/bin/env bash
# Prove what needs a GPU on a machine that is borrowed for ten minutes, and measure it there.
#
#     tools/gpu_run.sh prepare           here: put wheels into build/gpu/wheels, for the machine with the GPU
#     tools/gpu_run.sh [STAGE ...]       there: run all stages, or some, in at most nine minutes
#     tools/gpu_run.sh emulated [STAGE ...]   here: the same stages over the driver without a device
#
# The machine with the GPU needs this tree with build/gpu/wheels, a driver, and PYTHON (default: python3), which is
# Python 3.12 with torch and NumPy; it needs no network. nvcc, compute-sanitizer and transformers are used if they
# are there. Results are in benchmarks/results/gpu.json (OUT=FILE: there), a row as soon as it is known; the status is
# 1 if a stage failed or a bar was missed.
set -euo pipefail
cd "$(dirname "$0")/.."
wheels=build/gpu/wheels
out=(--out "${OUT:-benchmarks/results/gpu.json}" ${LOG:+--log "$LOG"})

case "${1:-}" in
prepare)
    # PYTHON is that of the other machine: its version is in the names of the wheels.
    python=${PYTHON:-python3.12}
    rm -rf build/gpu
    mkdir -p "$wheels"
    "$python" -m venv build/gpu/venv
    venv=build/gpu/venv/bin/python
    "$venv" tools/requirements.py build | "$venv" -m pip install --quiet --disable-pip-version-check -r /dev/stdin
    "$venv" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$wheels" .
    # What the daemon, the clients and the tests import, with their dependencies; NumPy is there with torch.
    "$venv" tools/requirements.py | "$venv" -m pip download --quiet --only-binary :all: --dest "$wheels" \
        -r /dev/stdin 'pytest>=9' 'hypothesis>=6.150' blake3 xxhash
    # kvikio without its own: CuPy and the CUDA libraries are there.
    "$venv" -m pip download --quiet --only-binary :all: --no-deps --dest "$wheels" \
        kvikio-cu13 libkvikio-cu13 rapids-logger nanobind scikit-build-core
    rm -rf build/gpu/venv
    git describe --always --dirty --exclude='*' >"$wheels/commit"
    ls -l "$wheels"
    du -sh "$wheels"
    ;;
emulated)
    shift
    exec .venv/bin/python benchmarks/gpu_run.py --emulated "${out[@]}" "$@"
    ;;
*)
    python=${PYTHON:-python3}
    if [ -d "$wheels" ]; then
        started=$(date +%s.%N)
        rm -rf build/gpu/site
        "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target build/gpu/site "$wheels"/*.whl
        PYTHONPATH=$PWD/build/gpu/site
        export PYTHONPATH
        GPU_INSTALL_S=$(awk "BEGIN { print $(date +%s.%N) - $started }")
        GPU_COMMIT=$(cat "$wheels/commit")
        export GPU_INSTALL_S GPU_COMMIT
    fi
    exec "$python" benchmarks/gpu_run.py "${out[@]}" "$@"
    ;;
esac
