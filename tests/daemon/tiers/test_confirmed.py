"""How long a forget waits for a disk that does not confirm it, with a clock of the test."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from kvtier_daemon.tiers.cold.tombstones import FORGET_S, PURGE_S, TombstoneWriter


class SteppedSelector(selectors.SelectSelector):
    """Does not sleep: the clock advances."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "it would wait for ever"
        self.now += timeout
        return super().select(0)


class SteppedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = SteppedSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def answers(
    asked_at: Sequence[tuple[float, bool]], confirmed_at: float
) -> Mapping[int, tuple[float, str]]:
    """When each forget was answered, and how. Each is asked at a time, and is patient or not."""

    async def work() -> Mapping[int, tuple[float, str]]:
        loop = asyncio.get_running_loop()
        on_disk, all_answered = asyncio.Event(), asyncio.Event()
        loop.call_at(confirmed_at, on_disk.set)
        found: dict[int, tuple[float, str]] = {}

        async def nothing(*_: object) -> None: ...

        async def flush() -> str:
            await on_disk.wait()
            return ""

        recovered = asyncio.Event()
        recovered.set()
        cold = SimpleNamespace(
            recovery=SimpleNamespace(complete=recovered), writer=SimpleNamespace(settled=nothing),
            table=SimpleNamespace(tombstone=lambda _: None), flush=flush, count_forgets=nothing,
            directories=SimpleNamespace(unknown=""), failure="",
        )  # fmt: skip
        segments = SimpleNamespace(take_dead_frames=bytearray, all_found=lambda: None)
        writer = TombstoneWriter(
            "t", cast(Any, SimpleNamespace(segments=segments)), cast(Any, cold)
        )
        for number, (at, is_patient) in enumerate(asked_at):

            def done(failure: str, number: int = number) -> None:
                found[number] = (round(loop.time(), 3), failure)
                if len(found) == len(asked_at):
                    all_answered.set()

            loop.call_at(at, writer.forget, cast(Any, None), b"", done, is_patient)
        await all_answered.wait()
        return found

    loop = SteppedLoop()
    try:
        return loop.run_until_complete(work())
    finally:
        loop.close()


def test_each_forget_is_answered_within_its_own_time() -> None:
    """One that is asked during the wait for another does not wait for twice the time."""
    found = answers([(0.0, False), (0.5, False), (1.0, True), (2.5, False)], 10.0)
    for number, asked_at in ((0, 0.0), (1, 0.5), (3, 2.5)):
        at, failure = found[number]
        assert failure and abs(at - asked_at - FORGET_S) < 0.02
    assert found[2] == (10.0, "")


def test_a_forget_does_not_wait_for_a_patient_one() -> None:
    found = answers([(0.0, True), (0.5, False)], 10.0)
    assert abs(found[1][0] - 0.5 - FORGET_S) < 0.02
    assert found[0] == (10.0, "")


def test_a_patient_forget_is_given_up_too() -> None:
    at, failure = answers([(0.0, True)], 10 * PURGE_S)[0]
    assert failure and abs(at - PURGE_S) < 0.02


def test_forgets_that_the_disk_confirms_are_answered_at_once() -> None:
    assert answers([(0.0, False), (1.0, True)], 2.0) == {0: (2.0, ""), 1: (2.0, "")}
