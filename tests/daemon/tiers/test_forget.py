"""What was forgotten is so after a start too, whatever was on its way when it was forgotten."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import struct
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from daemon.tiers.test_cold import BLOCK, SEGMENT, SIZE, SPACE, SPEC, Bench, key, run
from kvtier_daemon.catalog import Catalog, SessionId
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.codec import frame
from kvtier_daemon.codec.frame import PAGE
from kvtier_daemon.tiers.cold import eraser as erasing_module
from kvtier_daemon.tiers.cold import segment_store as shelf_module
from kvtier_daemon.tiers.cold import tombstones
from kvtier_daemon.tiers.cold.attached import open_directory
from kvtier_daemon.tiers.cold.disk import Over
from kvtier_daemon.tiers.cold.index import Index
from kvtier_daemon.tiers.cold.mover import Mover
from kvtier_daemon.tiers.cold.recovery import Recovered
from kvtier_daemon.tiers.cold.segment_log import Segment, Stage
from kvtier_daemon.tiers.cold.segment_store import SegmentStore
from kvtier_kernels import Store
from support.specs import pattern

SLOTS = 32
ONE = SessionId(1)


class Tenant:
    """A catalog and a mover over a cold tier, as the daemon puts them together. A tenant that is not
    `t` has memory of its own."""

    def __init__(self, folder: Path, name: str = "t", bench: Bench | None = None) -> None:
        self.bench = bench or Bench([folder])
        self.memory, self.extent = self.bench.memory, self.bench.extent
        if name != "t":
            self.memory, self.extent = self.bench.arena()
        self.catalog = Catalog(Store(), make("lru"))
        self.mover = Mover(name, self.catalog, self.bench.tier, SLOTS * BLOCK, through=True)
        self.bench.first.stores[name]._reclaim = self.mover.reclaim
        self.space = self.catalog.open(SPACE, SPEC, ONE)
        self.running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        async def restored(_: str, one: Recovered, segment: int) -> None:
            for identity, spec, rows in one.parts:
                self.catalog.segments.restore(identity, spec, rows, segment)

        self.catalog.add_extent(SLOTS * BLOCK, bytearray(8 * SLOTS * BLOCK // 4096))
        self.mover.extents.append(self.extent)
        if not self.bench.tier.recovery.complete.is_set():
            await self.bench.tier.directories.recover(restored)
        self.running = asyncio.create_task(self.mover.run())

    def save(self, number: int) -> None:
        granted = self.catalog.reserve(ONE, self.space, 0, 0, b"", key(number))
        (_, _, offset, _) = struct.unpack("<IIQQ", granted.slots)
        self.bench.slot(offset // BLOCK, self.memory)[:] = pattern(key(number), BLOCK)
        self.mover.saved(self.catalog.commit(ONE, granted.lease, 0, 1, b""))

    async def on_disk(self, count: int) -> None:
        while self.mover.counts["written"] < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def on_disk_alone(self, count: int) -> None:
        """So many blocks that only the disk has."""
        await self.start()
        for number in range(count):
            self.save(number)
        await self.on_disk(count)
        granted = self.catalog.reserve(
            ONE, self.space, 0, 0, b"", b"".join(key(1000 + at) for at in range(SLOTS))
        )
        self.catalog.abort(ONE, granted.lease)
        assert self.catalog.match(self.space, b"".join(map(key, range(count)))).ready == 0

    async def sealed(self, count: int) -> tuple[SegmentStore, Segment]:
        """The first segment, with so many blocks, and full."""
        for number in range(count):
            self.save(number)
        await self.on_disk(count)
        shelf = self.bench.first.stores["t"]
        if not shelf.log.sealed:
            shelf.seal()
        while not shelf.log.sealed:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return shelf, shelf.log.sealed[0]

    async def forget(self, *numbers: int) -> str:
        said: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        keys = b"".join(map(key, numbers))
        self.catalog.forget(self.space, keys)
        self.mover.forget(self.space, keys, said.set_result)
        return await said

    async def kill(self) -> None:
        """End with nothing written that was not when this was called."""
        attached = self.bench.tier.directories.attached
        for one in attached:
            one.descriptions.close()
            one.directory.index._env.close()
            one.disk.stop(5)
        assert self.running is not None
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        for one in attached:
            one.directory.close()

    def knows(self, number: int) -> bool:
        found = self.catalog.match(self.space, key(number), False, True)
        return bool(found.ready or found.coming)


async def after_a_start(folder: Path, numbers: range) -> list[int]:
    tenant = Tenant(folder)
    await tenant.start()
    known = [number for number in numbers if tenant.knows(number)]
    assert tenant.running is not None
    tenant.running.cancel()
    await asyncio.gather(tenant.running, return_exceptions=True)
    await tenant.bench.tier.close()
    return known


def test_an_answer_means_that_it_holds(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        for number in range(8):
            tenant.save(number)
        await tenant.on_disk(8)
        assert await tenant.forget(3, 5) == ""
        await tenant.kill()
        assert await after_a_start(tmp_path, range(8)) == [0, 1, 2, 4, 6, 7]

    run(work())


def held(folder: Path) -> bytes:
    """What the segment files hold behind their heads."""
    files = sorted(path for path in (folder / "segments").rglob("*") if path.is_file())
    return b"".join(path.read_bytes()[PAGE:] for path in files)


def starts(text: bytes) -> set[bytes]:
    """Pieces of 64 bytes, where a block's may lie."""
    return {text[at : at + 64] for at in range(0, len(text), 64)}


async def frames(tenant: Tenant, count: int) -> None:
    """Wait until `count` blocks are on disk."""
    frames_in, segments = tenant.catalog.segments.frames_in, tenant.bench.tier.table.segments
    while sum(len(frames_in(one.number)) for one in segments) != count:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def erased(tenant: Tenant) -> str:
    """Erase from the disk what no block owns; what went wrong."""
    first = 0
    while True:
        said: asyncio.Future[tuple[str, int, int]] = asyncio.get_running_loop().create_future()
        tenant.mover.erase(first, lambda *all_, said=said: said.set_result(all_))
        failure, first, _ = await said
        if failure or not first:
            return failure


def test_what_earlier_uses_of_a_segment_have_left_is_erased_too(tmp_path: Path) -> None:
    """Blocks that were evicted long ago lie behind what was written since."""

    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        shelf = tenant.bench.first.stores["t"]
        shelf.files.most_bytes = 3 * SEGMENT
        for number in range(6 * SEGMENT // BLOCK):
            tenant.save(number)
            await tenant.on_disk(number - SLOTS // 4)  # else some are evicted unwritten
        await tenant.on_disk(number + 1)
        stale = [at for at in range(number + 1) if not tenant.knows(at)]
        before = starts(held(tmp_path))
        assert any(pattern(key(at), 64) in before for at in stale)
        kept = [at for at in range(number + 1) if tenant.knows(at)][-3:]
        assert await tenant.forget(*(at for at in range(number + 1) if at not in kept)) == ""
        await frames(tenant, 3)
        assert await erased(tenant) == ""
        after = starts(held(tmp_path))
        # The block of key 0 is all zeros.
        assert [at for at in range(1, number + 1) if pattern(key(at), 64) in after] == kept
        for at in range(5000, 5006):  # and it is written to as before
            tenant.save(at)
        await frames(tenant, 9)
        await tenant.kill()
        found = await after_a_start(tmp_path, range(number + 1))
        assert found == kept

    run(work())


def test_what_is_erased_is_not_used_again_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames written there while the old ones are erased would be erased with them."""
    erasing, go = threading.Event(), threading.Event()
    erase = erasing_module.erase

    def slow(*arguments: Any) -> None:
        erasing.set()
        assert go.wait(60)
        erase(*arguments)

    monkeypatch.setattr(shelf_module, "erase", slow)

    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        shelf, segment = await tenant.sealed(5)
        assert await tenant.forget(0, 1, 2) == ""
        going = asyncio.create_task(erased(tenant))
        assert await asyncio.to_thread(erasing.wait, 30)
        assert shelf.log.reclaim() is segment
        tenant.catalog.segments.drop_segment(segment.number)
        shelf.release_segment(segment)
        going.cancel()  # the client that asked for it has gone: it goes on
        await asyncio.gather(going, return_exceptions=True)
        assert segment.stage is Stage.LEAVING
        go.set()
        await tenant.bench.tier.writer.settled("t")
        assert segment.stage is Stage.FREE
        await tenant.kill()

    run(work())


def test_a_free_segment_is_not_begun_while_it_is_erased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    erasing, go = threading.Event(), threading.Event()
    erase = erasing_module.erase

    def slow(*arguments: Any) -> None:
        erasing.set()
        assert go.wait(60)
        erase(*arguments)

    monkeypatch.setattr(shelf_module, "erase", slow)

    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        shelf, segment = await tenant.sealed(5)
        assert shelf.log.reclaim() is segment
        tenant.catalog.segments.drop_segment(segment.number)
        shelf.release_segment(segment)
        await tenant.bench.tier.writer.settled("t")
        assert segment in shelf.log.free and segment.leftover
        going = asyncio.create_task(erased(tenant))
        assert await asyncio.to_thread(erasing.wait, 30)
        assert segment not in shelf.log.free and segment.stage is Stage.FREEING
        go.set()
        assert await going == ""
        assert segment in shelf.log.free and not segment.leftover
        await tenant.kill()

    run(work())


def test_an_erase_passes_over_a_segment_whose_file_is_removed(tmp_path: Path) -> None:
    """One of another size than new segments is removed when it has left."""

    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        shelf, segment = await tenant.sealed(5)
        shelf.files.segment_bytes //= 2
        assert shelf.log.reclaim() is segment
        tenant.catalog.segments.drop_segment(segment.number)
        shelf.release_segment(segment)
        await tenant.bench.tier.writer.settled("t")
        assert segment.fd < 0
        async with asyncio.timeout(60):
            assert await erased(tenant) == ""
        await tenant.kill()

    run(work())


def test_an_erase_waits_for_what_is_written_to_its_segment(tmp_path: Path) -> None:
    """A write that has yet to end, where an earlier one failed; or a footer that a start writes late."""

    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        _, segment = await tenant.sealed(5)
        assert await tenant.forget(1) == ""
        segment.writing += 1
        going = asyncio.create_task(erased(tenant))
        await asyncio.sleep(20 * shelf_module.ERASE_POLL_S)
        assert pattern(key(1), 64) in held(tmp_path) and not going.done()
        segment.writing -= 1
        async with asyncio.timeout(60):
            assert await going == ""
        assert pattern(key(1), 64) not in held(tmp_path)
        await tenant.kill()

    run(work())


def test_an_erase_that_a_crash_cuts_short_brings_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        await tenant.sealed(8)
        assert await tenant.forget(3, 5) == ""
        with monkeypatch.context() as patch:
            patch.setattr(erasing_module, "_zero", broken)
            assert "Input/output error" in await erased(tenant)
        await tenant.kill()
        assert await after_a_start(tmp_path, range(8)) == [0, 1, 2, 4, 6, 7]
        again = Tenant(tmp_path)  # it can be asked for again, though nothing is left to forget
        await again.start()
        assert await erased(again) == ""
        text = held(tmp_path)
        assert [at for at in range(1, 8) if pattern(key(at), 64) in text] == [1, 2, 4, 6, 7]
        await again.kill()

    def broken(*_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    run(work())


def good_frames(segment: Segment, places: Iterable[int]) -> int:
    """How many frames there are at these pages of a file, all of which are what was saved."""
    text, count = Path(segment.path).read_bytes(), 0
    for page in places:
        at = page * PAGE
        one = frame.decode(text[at : at + frame.peek(text[at : at + PAGE])])
        payload = text[at + one.header_bytes :][: one.payload_bytes]
        assert payload == pattern(one.identity.key, BLOCK)
        count += 1
    return count


def test_what_is_written_while_others_are_erased_stays(tmp_path: Path) -> None:
    """Segments are sealed, left, freed and begun again meanwhile."""

    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        rounds = 0

        async def erase_on() -> None:
            nonlocal rounds
            while not over.is_set():
                assert await erased(tenant) == ""
                rounds += 1

        over = asyncio.Event()
        erasing = asyncio.create_task(erase_on())
        saves = 8 * SEGMENT // BLOCK
        for number in range(1, saves):
            tenant.save(number)
            if number % 4 == 0:
                await tenant.on_disk(number - 8)
                assert await tenant.forget(number - 1) == ""
        await tenant.on_disk(saves - SLOTS)
        over.set()
        await erasing
        assert rounds > 3
        frames_in = tenant.catalog.segments.frames_in
        good = [good_frames(one, frames_in(one.number)) for one in tenant.bench.tier.table.segments]
        assert sum(good) >= 4
        await tenant.kill()

    run(work())


def test_where_no_hole_can_be_made_zeros_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: int) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(erasing_module, "_fallocate", unsupported)

    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        await tenant.sealed(8)
        assert await tenant.forget(*range(7)) == ""
        assert await erased(tenant) == ""
        text = held(tmp_path)
        assert [at for at in range(1, 8) if pattern(key(at), 64) in text] == [7]
        await tenant.kill()

    run(work())


def test_what_is_being_written_is_waited_for(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        tenant.save(0)
        await tenant.on_disk(1)
        for number in range(1, 9):
            tenant.save(number)
        while not tenant.bench.first.stores["t"].in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert await tenant.forget(*range(9)) == ""
        await tenant.kill()
        assert await after_a_start(tmp_path, range(9)) == []

    run(work())


def test_what_was_planned_is_not_written_after_it_was_forgotten(tmp_path: Path) -> None:
    """The forget is answered before the write would have been begun."""

    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        tenant.save(0)
        await tenant.on_disk(1)
        tenant.mover._reclaimer.over.clear()  # something is being brought away
        for number in (1, 2, 3):
            tenant.save(number)
        while not tenant.catalog.demotions.writing:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert await tenant.forget(1, 2) == ""
        tenant.mover._reclaimer.over.set()
        await tenant.on_disk(2)
        await tenant.kill()
        assert await after_a_start(tmp_path, range(4)) == [0, 3]

    run(work())


def test_what_is_copied_is_not_written_after_it_was_forgotten(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        shelf, first = await tenant.sealed(4)
        for number in (1, 2):
            tenant.catalog.load(ONE, tenant.space, key(number), 1.0, [], 0.0, True, False)
        evict_all(tenant)
        tenant.mover._reclaimer.second_chance_bytes = 1 << 30
        read, was_read = tenant.mover._reclaimer._read_all, asyncio.Event()

        async def reading(*args: Any) -> bool:
            good = await read(*args)
            was_read.set()
            await asyncio.sleep(0.1)
            return good

        tenant.mover._reclaimer._read_all = reading  # type: ignore[method-assign]
        shelf.log.reclaim()
        tenant.mover.reclaim(shelf, first)
        await was_read.wait()
        assert await tenant.forget(1) == ""
        while first in shelf.log.others:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert tenant.mover.counts["written_again"] == 1
        await tenant.kill()
        assert 1 not in await after_a_start(tmp_path, range(4))

    run(work())


def test_what_is_found_after_it_was_forgotten_goes_too(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        for number in range(4):
            tenant.save(number)
        await tenant.on_disk(4)
        await tenant.kill()
        early = Tenant(tmp_path)
        answers = [asyncio.create_task(early.forget(1)), asyncio.create_task(early.forget(2))]
        await asyncio.sleep(0.01)
        assert not any(one.done() for one in answers), "nobody knows yet what there is"
        await early.start()
        assert await asyncio.gather(*answers) == ["", ""]
        assert [number for number in range(4) if early.knows(number)] == [0, 3]
        await early.kill()
        assert await after_a_start(tmp_path, range(4)) == [0, 3]

    run(work())


async def one_that_is_read_leaves(tenant: Tenant) -> tuple[SegmentStore, Segment]:
    """A segment with 0 to 3, of which 1 and 2 were brought away; it is free when nobody reads it any more."""
    shelf, first = await tenant.sealed(4)
    first.reading += 1
    for number in (1, 2):
        tenant.catalog.load(ONE, tenant.space, key(number), 1.0, [], 0.0, True, False)
    evict_all(tenant)
    tenant.mover._reclaimer.second_chance_bytes = 1 << 30
    assert shelf.log.reclaim() is first
    tenant.mover.reclaim(shelf, first)
    while first not in shelf.releasing:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert tenant.mover.counts["written_again"] == 2
    assert 2 * tenant.mover.bytes["written_again"] == tenant.mover.bytes["written"]
    return shelf, first


def test_what_is_forgotten_once_a_directory_is_lost_is_forgotten_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its segments can no longer be written, and are listed until it is detached."""
    monkeypatch.setattr(tombstones, "FORGET_S", 0.05)

    def fails() -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def no_write(_fd: int, _at: int, _text: bytes, over: Over) -> None:
        over(errno.EIO, None)

    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        await tenant.sealed(8)
        tier = tenant.bench.tier
        attached = tenant.bench.first
        drive, volume = attached.disk, attached.directory

        async def restored(_: str, one: Recovered, segment: int) -> None:
            for identity, spec, rows in one.parts:
                tenant.catalog.segments.restore(identity, spec, rows, segment)

        monkeypatch.setattr(volume, "elsewhere", fails)
        while not drive.lost:
            tier.directories.check_locations()
            await asyncio.sleep(0.001)
        drive.write_text = no_write  # type: ignore[method-assign, assignment]
        assert await tenant.forget(3, 5)
        for _, number in await tier.directories.detach(attached, tier.reads.pump):
            tenant.catalog.segments.drop_segment(number)
        await tier.directories.closed(volume)
        await tier.directories.attach(open_directory(tmp_path, SIZE), restored)
        assert tier.recovery.complete.is_set()
        tenant.mover.repeat_early_forgets()
        assert [number for number in range(8) if tenant.knows(number)] == [0, 1, 2, 4, 6, 7]
        tier.directories.attached[0].stores["t"]._reclaim = tenant.mover.reclaim
        await tenant.kill()

    run(work())


def test_what_was_brought_away_says_nothing_of_its_place_once_that_is_anothers(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        shelf, first = await one_that_is_read_leaves(tenant)
        shelf.read_ended(first)
        while shelf.log.open is not first:
            if shelf.log.open is not None:
                shelf.seal()
            await asyncio.sleep(0.001)
        written = tenant.mover.counts["written"]
        for number in range(10, 14):
            tenant.save(number)
        await tenant.on_disk(written + 4)
        assert await tenant.forget(1, 2) == ""
        await tenant.kill()
        assert await after_a_start(tmp_path, range(14)) == [10, 11, 12, 13]

    run(work())


def test_both_copies_of_what_is_brought_away_go(tmp_path: Path) -> None:
    """Its segment is not free yet, and a start would find the first one."""

    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        await one_that_is_read_leaves(tenant)
        tombstones.FORGET_S = 0.2
        assert "did not confirm" in await tenant.forget(1), "its segment has its head still"
        await tenant.kill()
        assert 1 not in await after_a_start(tmp_path, range(4))

    before = tombstones.FORGET_S
    try:
        run(work())
    finally:
        tombstones.FORGET_S = before


def evict_all(tenant: Tenant) -> None:
    """Leave blocks on disk alone."""
    tenant.catalog.expire_leases(1e9)
    granted = tenant.catalog.reserve(
        ONE, tenant.space, 0, 0, b"", b"".join(key(900 + number) for number in range(SLOTS))
    )
    tenant.catalog.abort(ONE, granted.lease)


def test_an_index_that_fails_is_in_no_forgets_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        tenant.save(0)
        tenant.save(1)
        await tenant.on_disk(2)
        monkeypatch.setattr(Index, "_commit", lambda *_: "no room in the index")
        assert await tenant.forget(0) == ""
        await tenant.kill()
        monkeypatch.undo()
        assert await after_a_start(tmp_path, range(2)) == [1]

    run(work())


def test_blocks_that_a_start_could_not_name_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        with monkeypatch.context() as broken:
            broken.setattr(Index, "_commit", lambda *_: "no room in the index")
            tenant.save(0)
            await asyncio.sleep(0.1)
            assert tenant.mover.counts["written"] == 0
            assert tenant.knows(0)
        await tenant.on_disk(1)
        await tenant.kill()
        assert await after_a_start(tmp_path, range(1)) == [0]

    run(work())


def test_who_waits_for_an_index_is_told_that_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Index, "flush", lambda *_: None)  # it has no time to answer

    async def closes() -> None:
        bench = Bench([tmp_path])
        tier, flushing = bench.tier, bench.first.descriptions.flush()
        await asyncio.sleep(0)
        assert await tier.close()
        async with asyncio.timeout(60):
            assert "closed" in await flushing

    run(closes())


def test_what_is_forgotten_while_a_tier_is_off_is_bounded_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tombstones, "EARLY_BYTES", 2 * len(key(0)))

    async def forgets() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        recovered = tenant.bench.tier.recovery.complete
        for _ in range(3):
            recovered.clear()
            some = [tenant.forget(at) for at in range(3)]
            answers = [asyncio.ensure_future(one) for one in some]
            await asyncio.sleep(0)
            recovered.set()
            assert [bool(why) for why in await asyncio.gather(*answers)] == [False, False, True]
        assert tenant.running is not None
        tenant.running.cancel()
        await asyncio.gather(tenant.running, return_exceptions=True)
        await tenant.bench.tier.close()

    run(forgets())
