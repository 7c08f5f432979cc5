"""Reads that measure the store, with a driver of the test."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from kvtier_daemon.planning import DiskLink
from kvtier_daemon.tiers.remote.messages import DONE, Answer
from kvtier_daemon.tiers.remote.probing import StoreProbes
from kvtier_daemon.tiers.remote.space_in_buffer import BufferSpace

ROOM = 1 << 20
GUESS_BYTES_S = 1e8


class Driver:
    """A store with memory for two reads."""

    is_on = True

    def __init__(self) -> None:
        self.child = SimpleNamespace(reads=BufferSpace(0, 2 * ROOM))
        self.asked: list[Callable[[Answer], None]] = []

    def next_id(self) -> int:
        return len(self.asked) + 1

    def ask(self, _: object, answered: Callable[[Answer], None]) -> None:
        self.asked.append(answered)

    def answer(self, nbytes: int) -> None:
        self.asked.pop()(Answer(1, DONE, nbytes=nbytes))


class Pumped(list[int | None]):
    """What memory is free at each call."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self._driver = driver

    def __call__(self) -> None:
        reads = self._driver.child.reads
        self.append(at := reads.take(ROOM))
        if at is not None:
            reads.give(at, ROOM)


def make() -> tuple[Driver, DiskLink, StoreProbes, Pumped, SimpleNamespace]:
    driver, clock = Driver(), SimpleNamespace(now=100.0)
    pumped = Pumped(driver)
    link = DiskLink(lambda: clock.now, GUESS_BYTES_S, is_remote=True)
    probes = StoreProbes(cast(Any, driver), link, pumped, lambda: clock.now)
    return driver, link, probes, pumped, clock


def test_reads_of_requests_go_on_when_a_probe_gives_its_memory_back() -> None:
    driver, _, probes, pumped, _ = make()
    probes.begin(["a", "b", "c"], ROOM)
    assert len(probes) == len(driver.asked) == 2 and driver.child.reads.take(ROOM) is None
    driver.answer(ROOM)
    driver.answer(ROOM)
    assert len(pumped) == 2 and None not in pumped and not len(probes)


def test_a_probe_measures_the_bytes_that_it_read() -> None:
    driver, link, probes, _, clock = make()
    probes.begin(["a"], ROOM)
    clock.now += 0.5
    driver.answer(ROOM // 64)
    assert not link.is_guessed
    assert link.bytes_s == ROOM / 64 / 0.5


def test_a_probe_without_memory_for_it_is_tried_again_when_there_is_some() -> None:
    driver, _, probes, _, _ = make()
    taken = [driver.child.reads.take(ROOM) for _ in range(2)]
    probes.begin(["a"], ROOM)
    assert not driver.asked
    for at in taken:
        assert at is not None
        driver.child.reads.give(at, ROOM)
    probes.begin(["a"], ROOM)
    assert len(driver.asked) == 1
