"""Who writes to the disks rests while there is nothing to write, and is woken by whatever changes that."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from daemon.tiers.test_cold import BLOCK, SPACE, SPEC, Bench, key, run
from kvtier_daemon.catalog import Catalog, SessionId
from kvtier_daemon.catalog.demotion import Demotion
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.tiers.cold import flusher
from kvtier_daemon.tiers.cold.disk import FAULTS_TO_OFF, DiskLane
from kvtier_daemon.tiers.cold.mover import Mover
from kvtier_daemon.tiers.cold.transfers import Landed, Outgoing, Wrote
from kvtier_kernels import Store

SLOTS = 64
ALL = 4 * SLOTS * BLOCK  # a quota of which the coldest part is all that there is
ME = SessionId(1)
TURNS = 100


def keys(first: int, count: int) -> bytes:
    return b"".join(key(number) for number in range(first, first + count))


class Desk:
    """A mover at work, with the memory that it moves from; nobody tends it but who says so."""

    def __init__(
        self, bench: Bench, quota_bytes: int = ALL, *, through: bool = False, daily_bytes: int = 0
    ) -> None:
        self.now = 1000.0
        self.bench = bench
        self.catalog = Catalog(Store(), make("lru"))
        self.catalog.add_extent(SLOTS * BLOCK, bytearray(8 * SLOTS * BLOCK // 4096))
        self.mover = Mover(
            "t", self.catalog, bench.tier, quota_bytes, through=through, daily_bytes=daily_bytes,
            clock=lambda: self.now,
        )  # fmt: skip
        self.mover.extents.append(bench.extent)
        self.space = self.catalog.open(SPACE, SPEC, ME)
        self.moving = asyncio.create_task(self.mover.run())

    def save(self, first: int, count: int = 1, told: bool = True) -> bytes:
        """Blocks that are in memory alone; where that is not `told`, nobody wakes who writes."""
        granted = self.catalog.reserve(ME, self.space, 0, 0, b"", keys(first, count))
        ids = self.catalog.commit(ME, granted.lease, 0, count, b"")
        if told:
            self.mover.saved(ids)
        return ids

    async def rest(self) -> None:
        """Until all that is to be done now is done."""
        for _ in range(TURNS):
            await asyncio.sleep(0)

    async def written(self, count: int) -> None:
        """Until so many blocks are on disk."""
        async with asyncio.timeout(60):
            while self.mover.counts["written"] < count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def end(self) -> None:
        self.moving.cancel()
        await asyncio.gather(self.moving, return_exceptions=True)
        await self.bench.tier.close()


async def desk_in(folder: Path, quota_bytes: int = ALL, **ways: bool | int) -> Desk:
    bench = Bench([folder])
    await bench.recover()
    desk = Desk(bench, quota_bytes, **ways)  # type: ignore[arg-type]
    await desk.rest()
    return desk


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether there was something to write, each time that somebody looked."""
    seen: list[bool] = []
    plan = flusher.Flusher._plan

    def counted(self: flusher.Flusher) -> Demotion | None:
        found = plan(self)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(flusher.Flusher, "_plan", counted)
    return seen


def test_nobody_looks_while_nothing_is_in_memory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[bool]
) -> None:
    monkeypatch.setattr(flusher, "PAUSE_S", 0.0)  # who polls does so at every turn

    async def work() -> None:
        desk = await desk_in(tmp_path)
        desk.save(100, 8)
        await desk.written(8)
        await desk.rest()
        looks.clear()
        for _ in range(TURNS):
            desk.mover.tend()
            await asyncio.sleep(0)
        assert not looks
        await desk.end()

    run(work())


def test_one_looks_for_all_when_what_is_there_has_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[bool]
) -> None:
    """Blocks in memory alone that are not among the coldest: others may become so at any time."""
    monkeypatch.setattr(flusher, "PAUSE_S", 0.0)

    async def work() -> None:
        desk = await desk_in(tmp_path, quota_bytes=4 * BLOCK)
        desk.save(100, 8)
        await desk.written(1)
        await desk.rest()
        looks.clear()
        for _ in range(5):
            desk.mover.tend()
            await desk.rest()
        assert looks == [False] * 5
        await desk.end()

    run(work())


def test_one_save_is_looked_for_once(tmp_path: Path, looks: list[bool]) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path, quota_bytes=0, through=True)
        looks.clear()
        desk.save(100)
        await desk.rest()
        assert looks.count(True) == 1
        await desk.written(1)
        await desk.end()

    run(work())


@pytest.mark.parametrize("through", [False, True])
def test_a_save_wakes(tmp_path: Path, through: bool) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path, through=through)
        desk.save(100)
        await desk.written(1)
        await desk.rest()
        desk.save(200, 2)
        await desk.written(3)
        await desk.end()

    run(work())


def test_a_save_while_others_are_written_is_written(tmp_path: Path) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path, through=True)
        for first in range(100, 140):
            desk.save(first)
            await asyncio.sleep(0)
        await desk.written(40)
        await desk.end()

    run(work())


def test_much_wakes_all_who_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flusher, "WRITE_BLOCKS", 8)
    at_once: list[int] = []

    async def work() -> None:
        desk = await desk_in(tmp_path, quota_bytes=0, through=True)
        write = desk.bench.tier.writer.write

        def begin(tenant: str, blocks: Sequence[Outgoing], done: Wrote) -> int:
            at_once.append(desk.catalog.demotions.writing)
            return write(tenant, blocks, done)

        monkeypatch.setattr(desk.bench.tier.writer, "write", begin)
        desk.save(100, 16)
        await desk.written(16)
        assert max(at_once) == 16
        await desk.end()

    run(work())


def test_a_promotion_wakes(tmp_path: Path) -> None:
    """Others went for what is promoted, so others are the coldest."""

    async def work() -> None:
        desk = await desk_in(tmp_path)
        desk.save(100, 8)
        await desk.written(8)
        desk.catalog.abort(
            ME, desk.catalog.reserve(ME, desk.space, 0, 0, b"", keys(900, SLOTS)).lease
        )
        await desk.rest()
        desk.save(200, 2, told=False)
        assert desk.mover.promote(desk.space, keys(100, 8), 8)[0] == 8
        await desk.written(10)
        await desk.end()

    run(work())


def test_a_drain_wakes(tmp_path: Path) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path, quota_bytes=0)
        desk.save(100, 8)
        await desk.rest()
        assert not desk.mover.counts["written"], "what is to be drained was written before"
        desk.mover.drain(True)
        await desk.written(8)
        await until(lambda: desk.mover.is_drained)
        # What is in memory alone by then is found without being told of.
        desk.save(200, 2, told=False)
        await desk.written(10)
        await desk.end()

    run(work())


def test_a_drain_ends_though_saves_outrun_the_disk(tmp_path: Path) -> None:
    """For each block that comes to the disk another one is saved: there is always something to write."""

    async def work() -> None:
        desk = await desk_in(tmp_path, quota_bytes=0)
        asked = array("I", desk.save(100, SLOTS // 2))
        await desk.rest()
        asked += array("I", desk.save(500, SLOTS // 4))
        landed, saves = desk.mover._flusher._landed, 0
        on_disk: set[int] = set()

        def saved_meanwhile(blocks: list[Landed]) -> None:
            nonlocal saves
            landed(blocks)
            for one in blocks:
                on_disk.add(one.id)
                saves += 1
                desk.save(10_000 + saves)

        desk.mover._flusher._landed = saved_meanwhile  # type: ignore[method-assign]
        desk.mover.drain(True)
        assert desk.mover.left_to_drain == len(asked)
        await until(lambda: desk.mover.is_drained or saves > 20 * SLOTS)
        assert desk.mover.is_drained
        assert desk.catalog.demotions.in_memory_alone, "saves have outrun the disk"
        assert not desk.mover.left_to_drain
        assert set(asked) <= on_disk
        await desk.end()

    run(work())


def test_a_drain_is_not_over_before_what_could_not_be_written_at_first(tmp_path: Path) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path, quota_bytes=0)
        desk.save(100, 8)
        await desk.rest()
        write, refused = desk.bench.tier.writer.write, 0

        def refuse(tenant: str, blocks: Sequence[Outgoing], done: Wrote) -> int:
            nonlocal refused
            refused += 1
            if refused > 2:
                return write(tenant, blocks, done)
            return write(tenant, blocks, lambda landed, _: done([], [one.id for one in landed]))

        desk.bench.tier.writer.write = refuse  # type: ignore[method-assign]
        desk.mover.drain(True)
        await until(lambda: desk.mover.is_drained)
        assert refused > 2 and not desk.catalog.demotions.in_memory_alone
        await desk.end()

    run(work())


Cause = Callable[[Desk], None]


def lifted(desk: Desk) -> None:
    desk.mover.reconfigure(through=False, daily_bytes=0, admission="all", codec="raw", codecs=())


def an_hour_later(desk: Desk) -> None:
    desk.now += 3600


def switched_on(desk: Desk) -> None:
    desk.bench.tier.writer.accepts = True


def mended(desk: Desk) -> None:
    desk.now += 6


def test_a_tend_finds_what_nobody_tells_of(tmp_path: Path) -> None:
    """A lease that ends, or another that becomes the coldest."""

    async def work() -> None:
        desk = await desk_in(tmp_path)
        desk.save(100, told=False)
        await desk.rest()
        assert not desk.mover.counts["written"]
        desk.mover.tend()
        await desk.written(1)
        await desk.end()

    run(work())


@pytest.mark.parametrize("cause", [lifted, an_hour_later])
def test_a_budget_wakes(tmp_path: Path, looks: list[bool], cause: Cause) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path, daily_bytes=24 * BLOCK)
        desk.save(100, 1)
        await desk.written(1)
        desk.save(200, 1)
        await desk.rest()
        looks.clear()
        desk.mover.tend()
        await desk.rest()
        assert not looks, "a budget that is spent wakes nobody"
        cause(desk)
        desk.mover.tend()
        await desk.written(2)
        await desk.end()

    run(work())


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("cause", [switched_on, mended])
def test_a_tier_that_takes_again_wakes(
    tmp_path: Path, looks: list[bool], cause: Cause, through: bool
) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path, through=through)
        if cause is switched_on:
            desk.save(100)  # it is still to be written when the tier takes nothing
            desk.bench.tier.writer.accepts = False
        else:
            lane = desk.bench.first.disk.writes = DiskLane("writing", lambda: desk.now)
            desk.save(100)
            for _ in range(FAULTS_TO_OFF):
                lane.fault("it is broken")
        await desk.rest()
        looks.clear()
        desk.mover.tend()
        await desk.rest()
        assert not looks and not desk.mover.counts["written"]
        cause(desk)
        desk.mover.tend()
        await desk.written(1)
        await desk.end()

    run(work())


def test_a_segment_that_is_used_again_wakes(tmp_path: Path) -> None:
    """What of it is in memory is there alone from then on."""

    async def work() -> None:
        desk = await desk_in(tmp_path)
        desk.save(100)
        await desk.written(1)
        await desk.rest()
        for number in range(len(desk.bench.tier.table.segments)):
            desk.catalog.segments.drop_segment(number)
        desk.mover.tend()
        await desk.written(2)
        await desk.end()

    run(work())


@pytest.mark.parametrize("what", ["may_write", "has_place"])
def test_what_is_in_the_way_of_writes_need_not_say_when_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Reads that go first, or a segment that is yet to be free."""

    async def work() -> None:
        desk = await desk_in(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(desk.bench.tier.writer, what, lambda *_: False)
            desk.save(100)
            await asyncio.sleep(3 * flusher.PAUSE_S)
            assert not desk.mover.counts["written"]
        await desk.written(1)
        await desk.rest()
        desk.save(200)  # wakes one of those who wait now
        await desk.written(2)
        await desk.end()

    run(work())


def test_a_save_wakes_who_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that has paused before."""

    async def work() -> None:
        desk = await desk_in(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(desk.bench.tier.writer, "may_write", lambda: False)
            patch.setattr(flusher, "PAUSE_S", 0.001)
            for number in range(flusher.WRITES_AT_ONCE):
                desk.save(100 + number)
            await asyncio.sleep(0.05)
            patch.setattr(flusher, "PAUSE_S", 3600.0)
            await asyncio.sleep(0.05)
        assert not desk.mover.counts["written"]
        desk.save(200)
        await desk.written(flusher.WRITES_AT_ONCE + 1)
        await desk.end()

    run(work())


def test_who_can_write_nothing_has_nobody_else_try_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[bool]
) -> None:
    """They would wake each other for ever."""

    async def work() -> None:
        desk = await desk_in(tmp_path)
        monkeypatch.setattr(desk.bench.tier.writer, "fits", lambda *_: False)
        looks.clear()
        desk.save(100, 2)
        await desk.rest()
        assert 1 <= len(looks) <= flusher.WRITES_AT_ONCE + 1
        await desk.end()

    run(work())


def test_who_was_stopped_is_woken_no_more(tmp_path: Path) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path)
        await desk.end()
        desk.save(100)
        desk.mover.tend()
        await desk.rest()
        assert not desk.mover.counts["written"]

    run(work())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
