"""The benchmark of copies and codecs on a GPU: its bars and its limit, over a driver without a device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import bench_gpu
from harness import Row
from support import gpu_limits
from support.daemons import Daemon
from support.fake_cuda import FakeCuda

KIB = 1 << 10


def test_each_copy_in_the_chosen_way_has_a_bar(
    shared_daemon: Daemon, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_gpu, "TRANSFER_BYTES", 1 << 20)
    monkeypatch.setattr(bench_gpu, "BLOCK_BYTES", 128 * KIB)
    copier = fake_cuda.copier(monkeypatch)
    memory = bench_gpu.Memory(copier.driver)
    with shared_daemon.connect() as client:
        for piece, bar in ((16 * KIB, "0.6"), (64 * KIB, "0.9")):
            rows = bench_gpu.copies(client, copier, memory, piece, 1)
            assert {row.more["chosen"] for row in rows} == {True, False}
            for row in rows:
                assert row.bar == (f">= {bar}" if row.more["chosen"] else "")
                assert (row.ok is not None) == row.more["chosen"]
    driver = copier.driver
    driver.try_call("cuMemFree_v2", memory.device)
    driver.free_pinned(memory.pinned)
    driver.try_call("cuStreamDestroy_v2", memory.stream)
    copier.close()
    driver.close()


def test_what_does_not_fit_into_a_run_misses_its_bar() -> None:
    times = iter([0.0, 0.0, 9.0, 10.0, 11.0])
    done: list[str] = []

    def part(name: str) -> list[Row]:
        done.append(name)
        return [Row(name, 1.0, "x")]

    names = ("first", "second", "third", "fourth")
    parts = [(name, lambda name=name: part(name)) for name in names]
    rows = bench_gpu.in_time(parts, 10.0, lambda: next(times))
    assert done == ["first", "second"]
    assert [row.ok for row in rows] == [None, None, False, False]


def test_the_limits_of_all_tests_fit_into_one_run() -> None:
    """A borrowed machine runs one command for ten minutes at most."""
    codecs = len(gpu_limits.FILES) * gpu_limits.CODECS_S
    sanitizers = len(gpu_limits.TOOLS) * gpu_limits.SANITIZER_S + gpu_limits.PAGES_S
    assert codecs + sanitizers + gpu_limits.OTHERS_S <= gpu_limits.RUN_S <= bench_gpu.RUN_S < 600
