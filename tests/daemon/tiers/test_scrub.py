"""The scrub finds damage before a read does, repairs blocks that are in memory, and yields to reads."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.tiers.test_mover import keys, places
from kvtier.frame import PAGE
from kvtier_daemon.catalog import Catalog, SessionId
from kvtier_daemon.catalog.frames import FRAME
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.tiers.cold.frames import Incoming
from kvtier_daemon.tiers.cold.mover import Mover
from kvtier_daemon.tiers.cold.scrub import Scrubber
from kvtier_daemon.tiers.cold.segment_log import Segment, Stage
from kvtier_daemon.tiers.cold.segment_store import SegmentStore
from kvtier_kernels import Store
from support.cold_bench import BLOCK, SPACE, SPEC, Bench, key, run
from support.specs import pattern

SLOTS = 64
SAVED = 40  # blocks, 14 per segment: two segments are full
FULL = 28


class Time:
    """A clock that advances only when a task sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.before_sleep: Callable[[], Awaitable[None]] | None = None

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.before_sleep is not None:
            await self.before_sleep()
        await asyncio.sleep(0)


class Kept(Bench):
    """A bench with a catalog and a write-through mover."""

    def __init__(self, folder: Path, rate: int = 1 << 30) -> None:
        super().__init__([folder])
        self.catalog = Catalog(Store(), make("lru"))
        self.catalog.add_extent(SLOTS * BLOCK, bytearray(8 * SLOTS * BLOCK // PAGE))
        self.mover = Mover("t", self.catalog, self.tier, SLOTS * BLOCK, through=True)
        self.mover.extents.append(self.extent)
        self.time = Time()
        self.scrub = Scrubber(
            self.tier, {"t": self.catalog}, lambda _, ids: self.mover.writes.saved(ids), rate,
            self.time.clock, self.time.sleep,
        )  # fmt: skip
        self.ids = b""

    def leave(self, shelf: SegmentStore, segment: Segment) -> None:
        self.mover.reclaimer.reclaim(shelf, segment)

    async def save(self, first: int = 0, known: int = 0) -> None:
        """Save blocks, and wait until they are on disk in addition to the `known` blocks that already are."""
        await self.recover()
        self.moving = asyncio.create_task(self.mover.run())
        space = self.catalog.spaces.open(SPACE, SPEC, SessionId(1))
        granted = self.catalog.reserve(SessionId(1), space, 0, 0, b"", keys(first, SAVED))
        for number, place in enumerate(places(granted.slots)):
            self.slot(place)[:] = pattern(key(first + number), BLOCK)
        self.ids = self.catalog.commit(SessionId(1), granted.lease, 0, SAVED, b"")
        self.mover.writes.saved(self.ids)
        while self.catalog.counts()["framed_blocks"] < known + SAVED:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        while len(self.tier.sealed()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def frame_of(self, number: int) -> tuple[Segment, int, int]:
        """Segment, page and header pages of a block's frame."""
        one = array("I", [array("I", self.ids)[number]]).tobytes()
        segment, page, _, _, header_pages, _ = FRAME.unpack(self.catalog._store.frames(one)[0])
        return self.tier.table.segments[segment], page, header_pages

    def text_of(self, number: int, payload_bytes: int = 0) -> bytes:
        """A frame's header and the first bytes of its payload."""
        segment, page, header_pages = self.frame_of(number)
        with Path(segment.path).open("rb") as file:
            return os.pread(file.fileno(), header_pages * PAGE + payload_bytes, page * PAGE)

    def evict(self, number: int) -> None:
        self.catalog._store.evict(self.ids[4 * number : 4 * number + 4])

    def spoil(self, number: int, inside: int, text: bytes = b"\x55" * 64) -> None:
        """Overwrite a frame at this position of its payload; a negative position is in its header."""
        segment, page, header_pages = self.frame_of(number)
        fd = os.open(segment.path, os.O_RDWR)
        os.pwrite(fd, text, (page + header_pages) * PAGE + inside)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

    async def close(self) -> None:
        self.moving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.moving
        self.tier.table.tombstone(self.catalog.segments.take_dead_frames())
        await self.tier.close()


def test_no_damage_is_reported_for_intact_frames(tmp_path: Path) -> None:
    async def work() -> None:
        kept = Kept(tmp_path)
        await kept.save()
        assert await kept.scrub.round() == 2
        assert kept.scrub.counts["frames"] == FULL and kept.scrub.counts["damaged"] == 0
        assert kept.catalog.counts()["framed_blocks"] == SAVED
        await kept.close()

    run(work())


def test_damage_is_found_and_blocks_in_memory_are_written_again(tmp_path: Path) -> None:
    async def work() -> None:
        kept = Kept(tmp_path)
        await kept.save()
        places_before = {number: kept.frame_of(number) for number in range(SAVED)}
        kept.spoil(3, 1000)
        kept.spoil(4, -200)
        kept.spoil(20, BLOCK - 64)
        for gone in (20, 21):
            kept.evict(gone)
        # The complete frame of another block, which is valid in itself.
        kept.spoil(8, -kept.frame_of(8)[2] * PAGE, kept.text_of(9, BLOCK))
        kept.spoil(10, -kept.frame_of(10)[2] * PAGE, kept.text_of(11))
        await kept.scrub.round()
        assert kept.scrub.counts["damaged"] == 5
        assert kept.catalog.blocks.evicted["spoilt"] == 1
        while kept.mover.counts["written"] < SAVED + 4:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert kept.catalog.counts()["framed_blocks"] == SAVED - 1
        moved = {n for n in range(SAVED) if n != 20 and kept.frame_of(n) != places_before[n]}
        assert moved == {3, 4, 8, 10}
        await kept.close()

    async def again() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        assert set(bench.on_disk) == set(range(SAVED)) - {20}
        await bench.all_read()
        await bench.tier.close()

    run(work())
    run(again())


def test_the_rate_is_kept(tmp_path: Path) -> None:
    async def work() -> None:
        kept = Kept(tmp_path, rate=1 << 20)
        await kept.save()
        began = kept.time.now
        await kept.scrub.round()
        frame = PAGE * (kept.frame_of(0)[2] + BLOCK // PAGE)
        assert kept.scrub.counts["bytes"] == FULL * frame
        seconds = (FULL - 1) * frame / (1 << 20)  # the first frame is read immediately
        assert kept.time.now - began == pytest.approx(seconds)
        assert kept.scrub.last_round_s == pytest.approx(seconds, abs=1e-3)
        # An hour without reads does not increase the rate afterwards.
        kept.time.now += 3600
        began = kept.time.now
        await kept.scrub.round()
        assert kept.time.now - began == pytest.approx(seconds)
        await kept.close()

    run(work())


def test_a_read_is_served_before_the_scrub(tmp_path: Path) -> None:
    async def work() -> None:
        kept = Kept(tmp_path)
        await kept.save()
        segment, page, header_pages = kept.frame_of(0)
        digest = kept.catalog._store.frames(kept.ids[:4])[1]
        wanted = Incoming(
            0, segment.number, page, header_pages, BLOCK, digest, kept.extent, (SLOTS - 1) * BLOCK,
            BLOCK,
        )  # fmt: skip
        waited = rounds = 0
        while waited <= 3:  # they have ended before the test looks if its process was paused
            kept.tier.reader.read([wanted] * 4000, lambda *_: None)
            going = asyncio.create_task(kept.scrub.round())
            waited, rounds = 0, rounds + 1
            while (queued := kept.tier.directories.attached[0].disk.worker.queued)[0]:
                assert not queued[1], "a scrub read is queued behind requested reads"
                waited += 1
                await asyncio.sleep(0)
            await going
        assert kept.scrub.counts["frames"] == rounds * FULL
        await kept.close()

    run(work())


def test_a_disk_that_is_off_is_not_scrubbed(tmp_path: Path) -> None:
    async def work() -> None:
        kept = Kept(tmp_path, rate=1 << 20)
        await kept.save()
        sleeps = 0

        async def off() -> None:
            nonlocal sleeps
            sleeps += 1
            if sleeps == 3:
                kept.tier.directories.give_up("a test")

        kept.time.before_sleep = off
        await kept.scrub.round()
        assert kept.scrub.counts["frames"] == 3
        assert await kept.scrub.round() == 0
        assert kept.scrub.counts["frames"] == 3 and kept.scrub.counts["damaged"] == 0
        await kept.close()

    run(work())


def test_a_segment_that_is_reused_during_its_scrub_is_not_reported_as_damaged(
    tmp_path: Path,
) -> None:
    """The segment is reused while the scrub has half of it left to read."""

    async def work() -> None:
        kept = Kept(tmp_path, rate=1 << 20)
        await kept.save()
        shelf = kept.tier.directories.attached[0].stores["t"]
        (_, scrubbed), _ = kept.tier.sealed()  # they may be sealed in any order
        sleeps = 0

        async def leave() -> None:
            nonlocal sleeps
            sleeps += 1
            if sleeps == 3:
                segment = shelf.log.reclaim()
                assert segment is scrubbed
                kept.leave(shelf, segment)
                while segment.stage is Stage.LEAVING:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)

        kept.time.before_sleep = leave
        await kept.scrub.round()
        assert sleeps > 3
        assert kept.scrub.counts["frames"] == 3 + FULL // 2
        assert kept.scrub.counts["damaged"] == 0
        await kept.close()

    run(work())


def test_damage_in_a_segment_is_not_recorded_after_the_segment_was_freed(tmp_path: Path) -> None:
    """The place may meanwhile contain another frame, which the next start would then forget."""

    async def work() -> None:
        kept = Kept(tmp_path)
        await kept.save()
        shelf = kept.tier.directories.attached[0].stores["t"]
        spoilt, _, _ = kept.frame_of(3)
        kept.spoil(3, 1000)
        await kept.scrub.round()
        while spoilt.stage is Stage.SEALED:  # they may be sealed in any order
            segment = shelf.log.reclaim()
            assert segment is not None
            kept.leave(shelf, segment)
        while spoilt.stage is Stage.LEAVING:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert kept.catalog.segments.take_dead_frames() == b""
        await kept.close()

    run(work())


def test_a_read_of_an_earlier_use_of_the_segment_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        kept = Kept(tmp_path)
        await kept.save()
        segment, _, _ = kept.frame_of(5)
        read_header = kept.tier.reader.read_header

        def begun_again(block: Incoming, done: Callable[[int, bytes], None]) -> None:
            if block.id == array("I", kept.ids)[5]:
                assert segment.head is not None
                segment.head = replace(segment.head)
                kept.loop.call_soon(done, 0, b"another")
            else:
                read_header(block, done)

        monkeypatch.setattr(kept.tier.reader, "read_header", begun_again)
        await kept.scrub.round()
        assert kept.scrub.counts["frames"] == 6 + FULL // 2
        assert kept.scrub.counts["damaged"] == 0
        await kept.close()

    run(work())


def test_the_segment_with_the_oldest_scrub_is_next(tmp_path: Path) -> None:
    async def work() -> None:
        kept = Kept(tmp_path, rate=1 << 20)
        await kept.save()
        order: list[int] = []
        look_at = kept.scrub._scrub_segment

        async def noted(shelf: SegmentStore, segment: Segment) -> None:
            order.append(segment.number)
            await look_at(shelf, segment)

        kept.scrub._scrub_segment = noted  # type: ignore[method-assign]
        (shelf, first), (_, second) = kept.tier.sealed()
        await look_at(shelf, first)
        await kept.scrub.round()
        await kept.scrub.round()
        assert order == [second.number, first.number] * 2
        await kept.close()

    run(work())


@pytest.mark.parametrize(
    ("code", "times", "damaged"),
    [(errno.EIO, 1, 0), (errno.EIO, 2, 1), (errno.ENODEV, 2, 0), (errno.ENODATA, 1, 1)],
)
def test_a_failed_read_is_retried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, times: int, damaged: int
) -> None:
    async def work() -> None:
        kept = Kept(tmp_path)
        await kept.save()
        left, read_header = times, kept.tier.reader.read_header

        def fails(block: Incoming, done: Callable[[int, bytes], None]) -> None:
            nonlocal left
            if block.id == array("I", kept.ids)[5] and left:
                left -= 1
                kept.loop.call_soon(done, code, b"")
            else:
                read_header(block, done)

        monkeypatch.setattr(kept.tier.reader, "read_header", fails)
        await kept.scrub.round()
        assert not left and kept.scrub.counts["damaged"] == damaged
        await kept.close()

    run(work())
