"""Staging, the memory for encoded blocks: it is bounded and shared, and waiting tasks are served in order."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvtier.frame import PAGE
from kvtier_daemon.app import App
from kvtier_daemon.observing.metrics import families
from kvtier_daemon.tiers.cold import encoder as module
from kvtier_daemon.tiers.cold.encoder import EncodeBuffer
from support.apps import served

MOST = 64 * PAGE


class Room:
    """An allocator without memory. It records the requested sizes and returns more than was requested."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def __call__(self, nbytes: int) -> tuple[int, int]:
        self.made.append(nbytes)
        return len(self.made) - 1, nbytes + 8 * PAGE


def on(test: Callable[[EncodeBuffer, Room], Awaitable[None]]) -> None:
    async def work() -> None:
        room = Room()
        await test(EncodeBuffer(asyncio.get_running_loop(), room, MOST), room)

    asyncio.run(work())


async def waiting(staging: EncodeBuffer, nbytes: int) -> asyncio.Task[tuple[int, int] | None]:
    task = asyncio.create_task(staging.take(nbytes))
    await asyncio.sleep(0)
    return task


def test_the_smallest_sufficient_hole_is_used() -> None:
    async def test(staging: EncodeBuffer, room: Room) -> None:
        places = [await staging.take(n * PAGE) for n in (8, 1, 4, 1, 50)]
        for number, size in ((0, 8), (2, 4)):
            place = places[number]
            assert place is not None
            staging.give(*place, size * PAGE)
        assert await staging.take(3 * PAGE) == places[2]
        assert await staging.take(5 * PAGE) == places[0]
        assert room.made == [MOST]

    on(test)


def test_a_later_task_does_not_overtake_a_waiting_one() -> None:
    async def test(staging: EncodeBuffer, _: Room) -> None:
        some, other = await staging.take(40 * PAGE), await staging.take(20 * PAGE)
        assert some is not None and other is not None
        large, small = await waiting(staging, 30 * PAGE), await waiting(staging, PAGE)
        staging.give(*other, 20 * PAGE)
        await asyncio.sleep(0)
        assert not large.done() and not small.done() and staging.waited == 2
        staging.give(*some, 40 * PAGE)
        assert await large == some and await small is not None
        assert staging.used == 31 * PAGE

    on(test)


def test_a_waiting_task_gives_up_after_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks behind one that timed out or was cancelled get the free memory."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)

    async def test(staging: EncodeBuffer, _: Room) -> None:
        all_of_it = await staging.take(MOST - PAGE)
        assert all_of_it is not None
        assert await staging.take(2 * PAGE) is None and staging.refused == 1
        monkeypatch.setattr(module, "PATIENCE_S", 60.0)
        last = await staging.take(PAGE)
        assert last is not None
        staging.give(*last, PAGE)
        first, second = await waiting(staging, 2 * PAGE), await waiting(staging, PAGE)
        first.cancel()
        assert await second is not None
        third = await waiting(staging, PAGE)
        staging.give(*all_of_it, MOST - PAGE)
        third.cancel()  # a piece is already assigned to it
        with pytest.raises(asyncio.CancelledError):
            await third
        assert staging.used == PAGE

    on(test)


def test_a_request_larger_than_the_staging_gets_separate_memory_one_at_a_time() -> None:
    async def test(staging: EncodeBuffer, room: Room) -> None:
        large = await staging.take(2 * MOST)
        assert large is not None
        next_one = await waiting(staging, 2 * MOST)
        assert not next_one.done()
        staging.give(*large, 2 * MOST)
        assert await next_one == large and room.made == [2 * MOST]
        assert await staging.take(PAGE) != large and room.made == [2 * MOST, MOST]

    on(test)


def test_a_failed_allocation_is_an_error_and_is_retried() -> None:
    async def test(staging: EncodeBuffer, room: Room) -> None:
        def refuse(_: int) -> tuple[int, int]:
            raise OSError(errno.ENOMEM, "no memory")

        staging._room = refuse
        with pytest.raises(OSError, match="no memory"):
            await staging.take(PAGE)
        staging._room = room
        assert await staging.take(PAGE) == (0, 0)

    on(test)


def test_pieces_never_overlap_and_all_memory_is_returned() -> None:
    async def test(staging: EncodeBuffer, room: Room) -> None:
        chance, mine = random.Random(4), dict[int, int]()
        for _ in range(2000):
            if mine and chance.random() < 0.5:
                at = chance.choice(list(mine))
                staging.give(0, at, mine.pop(at))
                continue
            size = chance.randrange(1, 12) * PAGE
            if (place := staging._cut(size)) is None:
                continue
            _, at = place
            assert all(at + size <= other or other + n <= at for other, n in mine.items())
            assert 0 <= at <= MOST - size
            mine[at] = size
            assert staging.used == sum(mine.values())
        for at, size in mine.items():
            staging.give(0, at, size)
        assert staging._holes == {0: {0: MOST}} and room.made == [MOST]

    on(test)


def test_after_a_timeout_no_task_waits_until_memory_is_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory of a disk that hangs is not returned: otherwise the other disks would write one piece
    every six seconds."""

    async def test(staging: EncodeBuffer, _: Room) -> None:
        some, other = await staging.take(40 * PAGE), await staging.take(24 * PAGE)
        assert some is not None and other is not None
        monkeypatch.setattr(module, "PATIENCE_S", 0.01)
        assert await staging.take(8 * PAGE) is None
        monkeypatch.setattr(module, "PATIENCE_S", 1000)
        for _ in range(3):
            assert await asyncio.wait_for(staging.take(8 * PAGE), 20) is None
        assert (staging.waited, staging.refused) == (4, 4)
        staging.give(other[0], other[1], 4 * PAGE)
        task = await waiting(staging, 8 * PAGE)
        assert not task.done()
        staging.give(other[0], other[1] + 4 * PAGE, 20 * PAGE)
        assert await task == other

    on(test)


def test_used_memory_and_waiting_tasks_are_in_the_metrics(tmp_path: Path) -> None:
    async def work(app: App) -> None:
        assert app.lower.tier is not None
        staging = app.lower.tier.coding.staging
        staging.used, staging.waited, staging.refused = PAGE, 3, 2
        told = {
            family.name: family.samples[0].value
            for family in families(app._figures.of(None))
            if family.name.startswith("kvtier_stag")
        }
        assert told == {
            "kvtier_staged_bytes": PAGE, "kvtier_staged_limit_bytes": staging.most,
            "kvtier_staging_waits": 3, "kvtier_staging_refusals": 2,
        }  # fmt: skip

    served(tmp_path, work)
