"""Fixtures with real daemons, and the order of the tests if several processes run them."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before NumPy is imported, also by the processes that tests start: threads of its BLAS that wait for work
# occupy processors, and double the CPU time of small products.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from hypothesis import settings

from kvtier_daemon.tiers.cold import index_process
from kvtier_daemon.tiers.remote import driver
from support.daemons import Daemon, start_daemon, start_forked
from support.disks import Shim
from support.effort import effort
from support.fake_cuda import FakeCuda, build, toolkit
from support.object_store import ObjectStore
from support.rings import WHY_NO_RING

# The tests and their modules stay: a garbage collection while they are collected finds nothing.
if "PYTEST_XDIST_WORKER" in os.environ:  # the first process collects none
    gc.disable()

# Those of the developer's own daemon; they would override what a test configures.
for _name in ("KVTIER_SOCKET", "KVTIER_STATE"):
    os.environ.pop(_name, None)

# Files that take long: WHOLE first, then those with the longest tests. The processes begin with these, and
# share the tests of each file, except for WHOLE, whose module fixtures are costly. One process runs all tests
# of any other file: these files are short, so that no process is the last one for long.
WHOLE = (
    "tests/engines/test_vllm_faults.py",
    "tests/engines/test_vllm_printed.py",
    "tests/engines/test_examples.py",
    "tests/engines/test_vllm_pressure.py",
    "tests/engines/test_vllm_observe.py",
    "tests/engines/test_vllm_hits.py",
    "tests/engines/test_vllm_lossy.py",
    "tests/e2e/test_archive.py",
    "tests/daemon/tiers/test_remote_tier.py",
    "tests/faults/test_daemon_crash.py",
    "tests/kernels/test_cuda_lanes.py",
    "tests/kernels/test_fuzz_codecs.py",
    "tests/e2e/test_partial_disk.py",
    "tests/e2e/test_remote_orders.py",
    "tests/e2e/test_remote.py",
    "tests/e2e/test_resharding.py",
    "tests/faults/test_remote_faults.py",
    "tests/e2e/test_shown.py",
    "tests/e2e/test_mooncake.py",
)
LONGEST = (
    "tests/gpu/test_gpu_run.py",
    "tests/e2e/test_installed.py",
    "tests/e2e/test_systemd.py",
    *WHOLE,
    "tests/engines/test_gpu_model.py",
    "tests/engines/test_vllm_alone.py",
    "tests/engines/test_vllm_models.py",
    "tests/engines/test_vllm_scheduling.py",
    "tests/engines/test_transformers_offload.py",
    "tests/engines/test_transformers_models.py",
    "tests/engines/test_transformers_calls.py",
    "tests/faults/test_cold_disks.py",
    "tests/faults/test_hostile_clients.py",
    "tests/simulation/test_simulation.py",
    "tests/e2e/test_warm_up.py",
    "tests/daemon/tools/test_benching.py",
    "tests/faults/test_engine_faults.py",
    "tests/faults/test_killed_adoption.py",
    "tests/faults/test_remote_storm.py",
    "tests/kernels/test_store_machine.py",
    "tests/test_bench_codec.py",
    "tests/test_pages.py",
    "tests/test_documents.py",
    "tests/e2e/test_demo_fleet.py",
    "tests/e2e/test_demo.py",
    "tests/e2e/test_tiers.py",
    "tests/e2e/test_lossy.py",
    "tests/e2e/test_cold_tier.py",
    "tests/e2e/test_operating.py",
    "tests/e2e/test_self_heal.py",
    "tests/daemon/catalog/test_policies.py",
    "tests/daemon/tiers/test_tier_cold.py",
    "tests/daemon/test_chart.py",
    "tests/e2e/test_reconnecting.py",
    "tests/e2e/test_embedded.py",
    "tests/e2e/test_odd_spaces.py",
    "tests/e2e/test_waiting_saves.py",
    "tests/e2e/test_direct_reads.py",
    "tests/e2e/test_warm_restart.py",
    "tests/e2e/test_remote_limits.py",
    "tests/e2e/test_explain.py",
    "tests/e2e/test_damaged_index.py",
    "tests/faults/test_failing_directories.py",
    "tests/faults/test_killed_clients.py",
    "tests/faults/test_resharding_faults.py",
    "tests/faults/test_cap.py",
    "tests/faults/test_cold_crash.py",
    "tests/kernels/test_disk.py",
    "tests/kernels/test_calibrated.py",
    "tests/kernels/test_codecs.py",
    "tests/kernels/test_quantized.py",
    "tests/daemon/planning/test_planning.py",
    "tests/daemon/tiers/test_encoded.py",
    "tests/daemon/tiers/test_lossy_tier.py",
    "tests/daemon/tiers/test_cold_edges.py",
    "tests/daemon/tiers/test_cold.py",
    "tests/plugins/test_direct_kvikio.py",
    "tests/plugins/test_vllm_bursts.py",
    "tests/plugins/test_vllm_cuda.py",
    "tests/plugins/test_vllm_direct.py",
    "tests/plugins/test_vllm_disk_waits.py",
    "tests/plugins/test_vllm_hot.py",
    "tests/plugins/test_vllm_observe.py",
    "tests/plugins/test_vllm_sides.py",
    "tests/plugins/test_direct.py",
)

# The implementations of a codec. One process runs a test for all of them: it has the results of the model.
LEVEL = re.compile(r"\b(scalar|avx\w+|neon|cuda)\b")

index_process.start_child = driver.start_child = start_forked  # type: ignore[assignment]

# No deadline for an example: the machine may be busy.
settings.register_profile("tests", deadline=None, max_examples=effort(40, 100, 100))
settings.load_profile("tests")

# Background jobs of a shell and their children ignore SIGINT, with which tests interrupt commands.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    of: dict[str, list[pytest.Item]] = {}
    for item in items:
        # Of the functions alone: a search of all classes and files would take a tenth of the collection.
        if any(mark.name == "sampled" for mark in item.own_markers):
            of.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in of.values():
        (many,) = group[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        kept = {number * len(group) // many for number in range(many)}
        for number, item in enumerate(group):
            if number not in kept:
                item.add_marker(pytest.mark.slow)
    if WHY_NO_RING:
        for item in items:
            wanted = getattr(getattr(item, "callspec", None), "params", {}).get("engine")
            if (wanted or getattr(getattr(item, "cls", None), "engine", "")) == "io_uring":
                item.add_marker(pytest.mark.skip(reason=WHY_NO_RING))
    if hasattr(config, "workerinput"):
        ranks = {name: rank for rank, name in enumerate(LONGEST)}
        items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))


def pytest_collection_finish() -> None:
    """Keep the tests and their modules out of each later garbage collection, which would take 0.2 s, as this
    one would."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return LEVEL.sub("", nodeid) if file in LONGEST and file not in WHOLE else file

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """An S3 server that the tests of a module share."""
    store = ObjectStore(tmp_path_factory.mktemp("store"))
    yield store
    store.stop()


@pytest.fixture
def daemon_of(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Start daemons, each in its own folder unless `folder` is given; stop them at the end."""
    running: list[Daemon] = []

    def start(**options: Any) -> Daemon:
        folder = options.pop("folder", None) or tmp_path / f"daemon-{len(running)}"
        folder.mkdir(exist_ok=True)
        running.append(start_daemon(folder, **options))
        return running[-1]

    yield start
    for daemon in running:
        daemon.end()


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[Shim]:
    """Provide a folder `disk` whose calls fail, hang or take long as the test says."""
    disk = tmp_path / "disk"
    disk.mkdir()
    one = Shim(tmp_path, disk)
    yield one
    one.close()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Provide a folder that every user can enter, unlike tmp_path; it is removed after its daemon."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Provide one daemon for all tests of a module; they must leave nothing in it."""
    daemon = start_daemon(tmp_path_factory.mktemp("daemon"), warm="64MiB")
    yield daemon
    daemon.end()


@pytest.fixture(scope="session")
def cuda_library() -> Path:
    if toolkit() is None:
        pytest.skip("no cuda.h: NOTHING OF CUDA IS TESTED HERE")
    return build()


@pytest.fixture
def fake_cuda(cuda_library: Path) -> Iterator[FakeCuda]:
    """Provide a CUDA driver without a device. At the end, no object is left and no copy used wrong memory."""
    fake = FakeCuda(cuda_library)
    yield fake
    fake.hold(False)
    gc.collect()
    broken, left = fake.broken, fake.live()
    fake.forget()
    assert not broken
    # kvikio keeps streams and pinned memory of its own until its process ends.
    assert "kvikio" in sys.modules or not any(left.values()), left
