"""Copies in the memory of a real GPU: `kvtier hold-gpu`, a daemon, and engines that are killed or end."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.daemons import Daemon
from support.device_engine import DeviceEngine
from support.fake_engine import BLOCK, LAYERS
from support.hold_gpu import PROMPT, HoldGpu, arena, settled, start

pytestmark = pytest.mark.gpu
CONFIG = '[hot]\nsizes = ["default=4MiB"]\n'
ENGINE = Path(__file__).parents[1] / "support" / "hold_gpu.py"


@pytest.fixture
def daemon(daemon_of: Callable[..., Daemon]) -> Daemon:
    return daemon_of(warm="16MiB", config=CONFIG)


@pytest.fixture
def holder(gpu: Any, daemon: Daemon, tmp_path: Path) -> Iterator[HoldGpu]:
    one = HoldGpu(tmp_path, daemon.socket, os.environ)
    daemon.wait_for(lambda stats: stats["hot"]["arena"]["capacity_bytes"] > 0)
    yield one
    one.end()


@pytest.fixture
def engine(gpu: Any, daemon: Daemon, holder: HoldGpu) -> Iterator[DeviceEngine]:
    one = DeviceEngine(gpu, daemon.socket)
    start(one)
    yield one
    one.close()


def test_a_prompt_is_loaded_from_the_copies_of_its_save(
    daemon: Daemon, engine: DeviceEngine
) -> None:
    engine.serve(PROMPT)
    settled(daemon, engine)
    before = arena(daemon)
    assert before["blocks"] >= 8
    assert engine.serve(PROMPT).cached == 8 * BLOCK and not engine.early
    after = arena(daemon)
    assert (after["found"], after["absent"]) == (before["found"] + 8, before["absent"])
    engine.settle()


def test_the_bytes_of_a_load_come_from_the_memory_of_the_gpu(
    daemon: Daemon, engine: DeviceEngine
) -> None:
    """Bytes that the test writes there arrive in the engine's pages."""
    engine.serve(PROMPT)
    settled(daemon, engine)
    device = engine.workers[0].state.device
    assert device is not None and device.shared._hot is not None
    [mapped] = device.shared._hot._memory.values()
    zeros = engine.driver.pinned_memory(mapped.nbytes)
    ctypes.memset(zeros, 0x5A, mapped.nbytes)
    engine.driver.copy(mapped.address, ctypes.addressof(zeros), mapped.nbytes, engine.stream)
    engine.driver.call("cuStreamSynchronize", engine.stream)
    engine.driver.free_pinned(zeros)
    request = engine.run(engine.add(PROMPT))
    assert len(engine.wrong_pages(request)) == 8 * LAYERS
    engine.finish(request)
    engine.settle()


def test_the_copies_of_an_engine_that_is_killed_are_loaded_by_another_one(
    gpu: Any, daemon: Daemon, holder: HoldGpu
) -> None:
    folder = str(Path(__file__).parents[1])
    places = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(ENGINE), daemon.socket]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=places) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "saved\n"
        killed.kill()
    engine = DeviceEngine(gpu, daemon.socket)
    start(engine)
    settled(daemon, engine)
    before = arena(daemon)
    assert engine.serve(PROMPT).cached == 8 * BLOCK and not engine.early
    after = arena(daemon)
    assert (after["found"], after["absent"]) == (before["found"] + 8, before["absent"])
    engine.settle()
    engine.close()


def test_a_killed_holder_costs_no_request_and_the_next_one_is_used(
    daemon: Daemon, holder: HoldGpu, engine: DeviceEngine, tmp_path: Path
) -> None:
    engine.serve(PROMPT)
    settled(daemon, engine)
    holder.process.kill()
    holder.process.wait()
    assert engine.serve(PROMPT).cached == 8 * BLOCK
    daemon.wait_for(lambda stats: not stats["hot"]["arena"]["gpus"])
    assert engine.serve(PROMPT).cached == 8 * BLOCK
    engine.settle()
    again = HoldGpu(tmp_path, daemon.socket, os.environ)
    try:
        daemon.wait_for(lambda stats: stats["hot"]["arena"]["capacity_bytes"] > 0)
        start(engine)
        for _ in range(2):
            assert engine.serve(PROMPT).cached == 8 * BLOCK and not engine.early
            settled(daemon, engine)
        assert arena(daemon)["found"] >= 8
    finally:
        again.end()
