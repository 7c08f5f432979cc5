"""The flusher sleeps while there is no block to write, and each event that may change this wakes it."""

from __future__ import annotations

import asyncio
import errno
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier.wire import GRANTED, WRITING
from kvtier_daemon.catalog import Catalog, SessionId
from kvtier_daemon.catalog.demotion import Demotion
from kvtier_daemon.catalog.frames import FramedBlocks
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.tiers.cold import flusher
from kvtier_daemon.tiers.cold.disk import FAULTS_TO_OFF, DiskLane
from kvtier_daemon.tiers.cold.frames import Outgoing, Wrote
from kvtier_daemon.tiers.cold.mover import DECLINED_S, Mover
from kvtier_kernels import Store
from support.cold_bench import BLOCK, SPACE, SPEC, Bench, key, run
from support.specs import spec_of

SLOTS = 64
ALL = 4 * SLOTS * BLOCK  # a quota of which the coldest part is the whole arena
ME = SessionId(1)
TURNS = 100


def keys(first: int, count: int) -> bytes:
    return b"".join(key(number) for number in range(first, first + count))


class Desk:
    """A mover with an arena. `tend` runs only when a test calls it."""

    def __init__(
        self, bench: Bench, quota_bytes: int = ALL, *, through: bool = False, daily_bytes: int = 0,
        admission: str = "auto",
    ) -> None:  # fmt: skip
        self.now = 1000.0
        self.bench = bench
        self.catalog = Catalog(Store(), make("lru"))
        self.catalog.add_extent(SLOTS * BLOCK, bytearray(8 * SLOTS * BLOCK // 4096))
        self.mover = Mover(
            "t", self.catalog, bench.tier, quota_bytes, through=through, daily_bytes=daily_bytes,
            admission=admission, clock=lambda: self.now,
        )  # fmt: skip
        self.mover.extents.append(bench.extent)
        self.space = self.catalog.spaces.open(SPACE, SPEC, ME)
        self.moving = asyncio.create_task(self.mover.run())

    def save(self, first: int, count: int = 1, told: bool = True) -> bytes:
        """Save blocks in memory only. Without `told`, the mover does not learn of them."""
        granted = self.catalog.reserve(ME, self.space, 0, 0, b"", keys(first, count))
        ids = self.catalog.commit(ME, granted.lease, 0, count, b"")
        if told:
            self.mover.writes.saved(ids)
        return ids

    def save_large(self, first: int, count: int) -> None:
        """Save blocks that are larger than a segment, in memory only."""
        large = spec_of("large", layers=80)  # 1.25 MiB, in segments of 1 MiB
        space = self.catalog.spaces.open(b"large".ljust(32), large, ME)
        granted = self.catalog.reserve(ME, space, 0, 0, b"", keys(first, count))
        self.catalog.commit(ME, granted.lease, 0, count, b"")

    async def rest(self) -> None:
        """Wait until all pending work is done."""
        for _ in range(TURNS):
            await asyncio.sleep(0)

    async def written(self, count: int) -> None:
        """Wait until `count` blocks are on disk."""
        async with asyncio.timeout(60):
            while self.mover.counts["written"] < count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    def spend_budget(self, left: int) -> None:
        """Leave this many bytes of the budget."""
        budget = self.mover._budget
        budget.spend(int(budget.left()) - left)

    async def end(self) -> None:
        self.moving.cancel()
        await asyncio.gather(self.moving, return_exceptions=True)
        await self.bench.tier.close()


async def desk_in(folder: Path, quota_bytes: int = ALL, **ways: bool | int | str) -> Desk:
    bench = Bench([folder])
    await bench.recover()
    desk = Desk(bench, quota_bytes, **ways)  # type: ignore[arg-type]
    # The first segment wakes a writer when its head is on disk, which a busy machine delays.
    await until(lambda: bench.first.stores["t"].log.open is not None)
    await desk.rest()
    # While the disk does its first work, writers look again and again.
    await until(lambda: not desk.mover.writes.waiting._pausing)
    return desk


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each time that the flusher planned: whether it found a block to write."""
    seen: list[bool] = []
    plan = flusher.Flusher._plan

    def counted(self: flusher.Flusher) -> Demotion | None:
        found = plan(self)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(flusher.Flusher, "_plan", counted)
    return seen


def test_the_flusher_sleeps_while_no_block_is_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[bool]
) -> None:
    monkeypatch.setattr(flusher, "PAUSE_S", 0.0)  # a polling task plans at each turn

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


def test_one_writer_polls_for_all_while_no_block_is_urgent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[bool]
) -> None:
    """The budget is low, and dirty blocks are not among the coldest: they may become so at any time."""
    monkeypatch.setattr(flusher, "PAUSE_S", 0.0)

    async def work() -> None:
        desk = await desk_in(tmp_path, quota_bytes=4 * BLOCK, daily_bytes=24 * 100 * BLOCK)
        desk.spend_budget(75 * BLOCK)
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


def test_one_save_makes_one_plan(tmp_path: Path, looks: list[bool]) -> None:
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
def test_a_save_wakes_the_flusher(tmp_path: Path, through: bool) -> None:
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


def test_many_blocks_wake_all_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flusher, "WRITE_BLOCKS", 8)
    at_once: list[int] = []
    held: list[Callable[[], None]] | None = []

    async def work() -> None:
        nonlocal held
        desk = await desk_in(tmp_path, quota_bytes=0, through=True)
        write = desk.bench.tier.writer.write

        def begin(tenant: str, blocks: Sequence[Outgoing], done: Wrote) -> int:
            at_once.append(desk.catalog.demotions.writing)

            def wrote(*results: Any) -> None:
                if held is None:
                    done(*results)
                else:
                    held.append(partial(done, *results))

            return write(tenant, blocks, wrote)

        monkeypatch.setattr(desk.bench.tier.writer, "write", begin)
        desk.save(100, 16)
        for _ in range(TURNS):  # no write ends meanwhile, however fast the disk is
            await asyncio.sleep(0)
        ended, held = held, None
        for tell in ended:
            tell()
        await desk.written(16)
        assert max(at_once) == 16
        await desk.end()

    run(work())


def test_a_promotion_wakes_the_flusher(tmp_path: Path) -> None:
    """The promotion evicted other blocks, so the coldest blocks are different."""

    async def work() -> None:
        desk = await desk_in(tmp_path)
        desk.save(100, 8)
        await desk.written(8)
        desk.catalog.abort(
            ME, desk.catalog.reserve(ME, desk.space, 0, 0, b"", keys(900, SLOTS)).lease
        )
        await desk.rest()
        desk.save(200, 2, told=False)
        assert desk.mover.reads.promote(desk.space, keys(100, 8), 8)[0] == 8
        await desk.written(10)
        await desk.end()

    run(work())


def test_a_drain_wakes_the_flusher(tmp_path: Path) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path, quota_bytes=0, daily_bytes=24 * 100 * BLOCK)
        desk.spend_budget(0)
        desk.save(100, 8)
        await desk.rest()
        assert not desk.mover.counts["written"], "the blocks were written before the drain"
        desk.mover.writes.drain.begin()
        await desk.written(8)
        await until(lambda: desk.mover.writes.drain.is_done)
        # Blocks that become dirty later are found without a notification.
        desk.save(200, 2, told=False)
        await desk.written(10)
        await desk.end()

    run(work())


def test_a_drain_ends_without_blocks_that_are_larger_than_a_segment(tmp_path: Path) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path)
        desk.save(100, 8, told=False)
        desk.save_large(200, 2)
        desk.mover.writes.drain.begin()
        await until(lambda: desk.mover.writes.drain.is_done)
        assert desk.mover.counts["written"] == 8
        assert not desk.mover.writes.drain.left_blocks
        await desk.end()

    run(work())


def test_a_drain_ends_though_saves_outrun_the_disk(tmp_path: Path) -> None:
    """For each block that reaches the disk another one is saved, so the flusher always has work."""

    async def work() -> None:
        desk = await desk_in(tmp_path, quota_bytes=0, daily_bytes=24 * 100 * BLOCK)
        desk.spend_budget(0)
        asked = array("I", desk.save(100, SLOTS // 2))
        await desk.rest()
        asked += array("I", desk.save(500, SLOTS // 4))
        settle, saves = desk.mover.writes._settle, 0
        on_disk: set[int] = set()

        def saved_meanwhile(blocks: FramedBlocks, failed: list[int]) -> None:
            nonlocal saves
            settle(blocks, failed)
            for number, _, _ in blocks:
                on_disk.add(number)
                saves += 1
                desk.save(10_000 + saves)

        desk.mover.writes._settle = saved_meanwhile  # type: ignore[method-assign]
        desk.mover.writes.drain.begin()
        assert desk.mover.writes.drain.left_blocks == len(asked)
        await until(lambda: desk.mover.writes.drain.is_done)
        assert desk.catalog.demotions.in_memory_alone, "saves have outrun the disk"
        assert not desk.mover.writes.drain.left_blocks
        assert set(asked) <= on_disk
        await desk.end()

    run(work())


def test_a_drain_ends_after_failed_writes_were_repeated(tmp_path: Path) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path, quota_bytes=0, daily_bytes=24 * 100 * BLOCK)
        desk.spend_budget(0)
        desk.save(100, 8)
        await desk.rest()
        write, refused = desk.bench.tier.writer.write, 0

        def refuse(tenant: str, blocks: Sequence[Outgoing], done: Wrote) -> int:
            nonlocal refused
            refused += 1
            if refused > 2:
                return write(tenant, blocks, done)
            return write(
                tenant,
                blocks,
                lambda landed, _: done(FramedBlocks(), [one for one, _, _ in landed]),
            )

        desk.bench.tier.writer.write = refuse  # type: ignore[method-assign]
        desk.mover.writes.drain.begin()
        await until(lambda: desk.mover.writes.drain.is_done)
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


def test_a_tend_finds_changes_without_a_notification(tmp_path: Path) -> None:
    """A lease ends, or other blocks become the coldest."""

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
def test_a_new_budget_wakes_the_flusher(tmp_path: Path, looks: list[bool], cause: Cause) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path, daily_bytes=24 * BLOCK)
        desk.save(100, 1)
        await desk.written(1)
        desk.save(200, 1)
        await desk.rest()
        looks.clear()
        desk.mover.tend()
        await desk.rest()
        assert not looks, "a spent budget wakes no writer"
        cause(desk)
        desk.mover.tend()
        await desk.written(2)
        await desk.end()

    run(work())


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("cause", [switched_on, mended])
def test_a_tier_that_accepts_again_wakes_the_flusher(
    tmp_path: Path, looks: list[bool], cause: Cause, through: bool
) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path, through=through)
        if cause is switched_on:
            desk.save(100)  # it is not yet written when the tier stops accepting
            desk.bench.tier.writer.accepts = False
        else:
            lane = desk.bench.first.disk.writes = DiskLane("writing", lambda: desk.now)
            desk.save(100)
            for _ in range(FAULTS_TO_OFF):
                lane.fault("it is broken", errno.EIO)
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


def test_a_reused_segment_wakes_the_flusher(tmp_path: Path) -> None:
    """Its blocks that are in memory become dirty."""

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
def test_a_writer_that_was_blocked_continues_without_a_notification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Urgent reads, or a segment that is not yet free."""

    async def work() -> None:
        desk = await desk_in(tmp_path)
        with monkeypatch.context() as patch:
            checks: list[str] = []
            patch.setattr(desk.bench.tier.writer, what, lambda *_: checks.append(what) is not None)
            desk.save(100)
            await until(lambda: len(checks) >= 6)
            assert not desk.mover.counts["written"]
        await desk.written(1)
        await desk.rest()
        desk.save(200)  # wakes one of the waiting writers
        await desk.written(2)
        await desk.end()

    run(work())


def test_a_save_wakes_a_pausing_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a writer that paused before."""

    wait, pauses = flusher.WaitingWriters.wait, dict[object, float | None]()

    async def waiting(writers: flusher.WaitingWriters, seconds: float | None) -> None:
        pauses[asyncio.current_task()] = seconds
        await wait(writers, seconds)

    monkeypatch.setattr(flusher.WaitingWriters, "wait", waiting)

    async def work() -> None:
        desk = await desk_in(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(desk.bench.tier.writer, "may_write", lambda: False)
            patch.setattr(flusher, "PAUSE_S", 0.001)
            for number in range(flusher.WRITES_AT_ONCE):
                desk.save(100 + number)
            await until(lambda: 0.001 in pauses.values())
            patch.setattr(flusher, "PAUSE_S", 3600.0)
            await until(lambda: 3600.0 in pauses.values() and 0.001 not in pauses.values())
        assert not desk.mover.counts["written"]
        desk.save(200)
        await desk.written(flusher.WRITES_AT_ONCE + 1)
        await desk.end()

    run(work())


def test_a_new_segment_wakes_a_pausing_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "PAUSE_S", 3600.0)
    monkeypatch.setattr(flusher, "BEGIN_TRIES", 1)  # it pauses at once

    async def work() -> None:
        desk = await desk_in(tmp_path, through=True)
        for number in range(3):  # more than a segment in total
            desk.save(100 * (number + 1), 12)
            await desk.written(12 * (number + 1))
        await desk.end()

    run(work())


def test_a_writer_that_can_not_write_does_not_wake_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[bool]
) -> None:
    """Otherwise they would wake each other endlessly."""

    async def work() -> None:
        desk = await desk_in(tmp_path)
        monkeypatch.setattr(desk.bench.tier.writer, "fits", lambda *_: False)
        looks.clear()
        desk.save(100, 2)
        await desk.rest()
        assert 1 <= len(looks) <= flusher.WRITES_AT_ONCE + 1
        await desk.end()

    run(work())


def test_a_stopped_writer_is_not_woken(tmp_path: Path) -> None:
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


# --- ahead of evictions -----------------------------------------------------------------------


class Written:
    """The keys of the blocks in the order in which their writes were submitted."""

    def __init__(self, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: list[bytes] = []
        write = desk.bench.tier.writer.write

        def begin(tenant: str, blocks: Sequence[Outgoing], done: Wrote) -> int:
            count = write(tenant, blocks, done)
            self.keys += [block.key for block in blocks[:count]]
            return count

        monkeypatch.setattr(desk.bench.tier.writer, "write", begin)


def test_bursts_of_half_of_the_memory_are_written_before_they_are_evicted(tmp_path: Path) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path, quota_bytes=SLOTS * BLOCK)
        for burst in range(1, 7):
            desk.save(1000 * burst, SLOTS // 2)
            await desk.written(burst * SLOTS // 2)
        assert not sum(desk.catalog.blocks.unwritten.values())
        await desk.end()

    run(work())


@pytest.mark.parametrize("fits", [True, False])
def test_a_save_waits_only_for_blocks_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path)
        writer = desk.bench.tier.writer
        tried: list[object] = []
        monkeypatch.setattr(writer, "fits", lambda block: tried.append(block) or fits)
        monkeypatch.setattr(writer, "has_place", lambda _: False)
        desk.save(100, SLOTS)
        await until(lambda: bool(tried) and not desk.catalog.demotions.writing)
        for at in range(3):
            asked = desk.catalog.reserve(ME, desk.space, 0, 0, b"", keys(200 + at, 1), waits=True)
            assert asked.outcomes == bytes([WRITING if fits else GRANTED])
            await desk.rest()
        await desk.end()

    run(work())


def test_the_head_of_a_chain_is_written_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "WRITE_BLOCKS", 4)
    monkeypatch.setattr(flusher, "WRITES_AT_ONCE", 1)

    async def work() -> None:
        desk = await desk_in(tmp_path)
        order = Written(desk, monkeypatch)
        desk.save(100, 16)
        desk.save(200, 16)
        await desk.written(32)
        assert order.keys == [key(at) for first in (100, 200) for at in range(first, first + 16)]
        await desk.end()

    run(work())


def test_a_write_is_no_use_of_a_block(tmp_path: Path) -> None:
    """Otherwise the head of a chain, which is written first, would be evicted before the rest."""

    async def work() -> None:
        desk = await desk_in(tmp_path, through=True)
        desk.save(100, 16)
        desk.save(200, 16)
        victims = desk.catalog.blocks.policy.victims(32)
        await desk.written(32)
        await desk.rest()
        assert desk.catalog.blocks.policy.victims(32) == victims
        await desk.end()

    run(work())


def test_a_held_block_is_written_and_can_be_evicted_later(tmp_path: Path) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path)
        desk.bench.tier.writer.accepts = False
        desk.save(100, 4)
        found = desk.catalog.load(ME, desk.space, keys(100, 4), 1e9, range(1), 0.0)
        desk.bench.tier.writer.accepts = True
        desk.mover.tend()
        await desk.written(4)
        await desk.rest()
        assert not len(desk.catalog.blocks.policy)
        desk.catalog.release(ME, found.lease)
        assert len(desk.catalog.blocks.policy) == 4
        await desk.end()

    run(work())


def test_a_low_budget_is_left_for_blocks_that_are_close_to_eviction(tmp_path: Path) -> None:
    async def work() -> None:
        desk = await desk_in(
            tmp_path, quota_bytes=16 * BLOCK, daily_bytes=24 * 100 * BLOCK, admission="all"
        )
        desk.spend_budget(75 * BLOCK)
        desk.save(100, 16)
        await desk.written(4)
        desk.mover.tend()
        await desk.rest()
        assert desk.mover.counts["written"] == 4, "more than the coldest quarter was written"
        desk.now += 3600
        desk.mover.tend()
        await desk.written(16)
        await desk.end()

    run(work())


def test_a_disk_that_is_too_slow_for_requests_gets_no_writes_ahead(tmp_path: Path) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path, quota_bytes=16 * BLOCK)
        desk.mover.reads._declined_at = desk.now
        desk.save(100, 16)
        await desk.written(4)
        desk.mover.tend()
        await desk.rest()
        assert desk.mover.counts["written"] == 4, "more than the coldest quarter was written"
        desk.now += DECLINED_S
        desk.mover.tend()
        await desk.written(16)
        await desk.end()

    run(work())


def test_blocks_that_left_the_queue_are_found_by_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "LIMIT_SAVED", 4)

    async def work() -> None:
        desk = await desk_in(tmp_path, quota_bytes=0)
        desk.bench.tier.writer.accepts = False
        desk.save(100, 16)
        desk.bench.tier.writer.accepts = True

        def written(count: int) -> bool:
            desk.now += flusher.SWEEP_S
            desk.mover.tend()  # continues the search
            return desk.mover.counts["written"] == count

        await until(lambda: written(16))
        desk.save(200, 2, told=False)
        await until(lambda: written(18))
        await desk.end()

    run(work())


def test_an_idle_daemon_does_not_write_a_memory_that_is_larger_than_its_disk_in_turn(
    tmp_path: Path,
) -> None:
    """Each write would reuse a segment, whose blocks are then only in memory and would be written again,
    without an end. The coldest blocks are written, up to half of the disk."""

    async def work() -> None:
        bench = Bench([tmp_path], share=1 / 10)
        await bench.recover()
        disk_bytes = bench.first.stores["t"].files.most_bytes
        assert disk_bytes <= SLOTS * BLOCK
        desk = Desk(bench, SLOTS * BLOCK)
        desk.save(100, SLOTS, told=False)
        desk.mover.tend()
        await desk.written(1)
        for _ in range(20):
            desk.now += flusher.SWEEP_S
            desk.mover.tend()
            await asyncio.sleep(0.005)
            await bench.tier.writer.settled("t")
        assert desk.mover.counts["written"] * BLOCK <= disk_bytes // 2
        await desk.end()

    run(work())


def test_the_last_writes_begin_with_the_newest_chain_and_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "WRITE_BLOCKS", 4)
    monkeypatch.setattr(flusher, "WRITES_AT_ONCE", 1)

    async def work() -> None:
        desk = await desk_in(tmp_path, through=True)
        desk.bench.tier.writer.accepts = False
        for first in (100, 200, 300):
            desk.save(first, 8)
        order = Written(desk, monkeypatch)
        desk.bench.tier.writer.accepts = True
        desk.mover.writes.drain.begin_last(20 * BLOCK)
        await desk.written(20)
        newest = [key(at) for first in (300, 200) for at in range(first, first + 8)]
        assert order.keys[:20] == [*newest, *(key(at) for at in range(100, 104))]
        await desk.end()

    run(work())
