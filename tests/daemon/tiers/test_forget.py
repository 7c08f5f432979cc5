"""Forgotten blocks stay forgotten after a restart, whichever movement of them was in progress at the
forget."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import struct
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier import frame
from kvtier.frame import PAGE
from kvtier_daemon.catalog import Catalog, SessionId
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.tiers.cold import eraser as erasing_module
from kvtier_daemon.tiers.cold import segment_store as shelf_module
from kvtier_daemon.tiers.cold import tombstones
from kvtier_daemon.tiers.cold.attached import open_directory
from kvtier_daemon.tiers.cold.disk import Callback
from kvtier_daemon.tiers.cold.frames import BEGIN_TRIES, SETTLE_S
from kvtier_daemon.tiers.cold.index import Index
from kvtier_daemon.tiers.cold.mover import Mover
from kvtier_daemon.tiers.cold.recovery import Recovered
from kvtier_daemon.tiers.cold.segment_log import Segment, SegmentLog, Stage
from kvtier_daemon.tiers.cold.segment_store import SegmentStore
from kvtier_kernels import Store
from support.cold_bench import BLOCK, SEGMENT, SIZE, SPACE, SPEC, Bench, key, run
from support.specs import pattern

SLOTS = 32
ONE = SessionId(1)


class Tenant:
    """A catalog and a mover over a cold tier, connected as in the daemon. A tenant other than `t` has
    its own arena."""

    def __init__(self, folder: Path, name: str = "t", bench: Bench | None = None) -> None:
        self.bench = bench or Bench([folder])
        self.memory, self.extent = self.bench.memory, self.bench.extent
        if name != "t":
            self.memory, self.extent = self.bench.arena()
        self.catalog = Catalog(Store(), make("lru"))
        self.mover = Mover(name, self.catalog, self.bench.tier, SLOTS * BLOCK, through=True)
        self.bench.first.stores[name]._reclaim = self.mover.reclaimer.reclaim
        self.space = self.catalog.spaces.open(SPACE, SPEC, ONE)
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
        self.mover.writes.saved(self.catalog.commit(ONE, granted.lease, 0, 1, b""))

    async def on_disk(self, count: int) -> None:
        while self.mover.counts["written"] < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def on_disk_alone(self, count: int) -> None:
        """Save `count` blocks, wait until they are on disk, and evict them from memory."""
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
        """Save `count` blocks, seal their segment, and return it."""
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
        self.mover.forgets.forget(self.space, keys, said.set_result)
        return await said

    async def kill(self) -> None:
        """Stop without writing anything that is not yet on disk."""
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
        found = self.catalog.match(self.space, key(number), False)
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


def test_a_confirmed_forget_persists(tmp_path: Path) -> None:
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


def test_a_forgotten_block_does_not_return_from_a_write_whose_sync_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frame is on the disk all the same, besides the one that was written after it."""

    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        disk = tenant.bench.first.disk
        write, codes = disk.write, iter([errno.EIO])

        def failing(fd: int, ops: Any, headers: Any, callback: Callback) -> None:
            failure = next(codes, 0) if "_wrote_all" in callback.__qualname__ else 0
            write(fd, ops, headers, lambda code, text: callback(code or failure, text))

        monkeypatch.setattr(disk, "write", failing)
        tenant.save(3)
        await tenant.on_disk(1)
        assert disk.faults == 1, "no write failed"
        assert await tenant.forget(3) == ""
        await tenant.kill()
        assert await after_a_start(tmp_path, range(8)) == []

    run(work())


def held(folder: Path) -> bytes:
    """The content of the segment files after their heads."""
    files = sorted(path for path in (folder / "segments").rglob("*") if path.is_file())
    return b"".join(path.read_bytes()[PAGE:] for path in files)


def starts(text: bytes) -> set[bytes]:
    """Pieces of 64 bytes at all positions where a block may begin."""
    return {text[at : at + 64] for at in range(0, len(text), 64)}


async def frames(tenant: Tenant, count: int) -> None:
    """Wait until the disk holds `count` frames."""
    frames_in, segments = tenant.catalog.segments.frames_in, tenant.bench.tier.table.segments
    while sum(len(frames_in(one.number)) for one in segments) != count:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def erased(tenant: Tenant) -> str:
    """Erase bytes that belong to no block. Returns the error, or an empty string."""
    first = 0
    while True:
        said: asyncio.Future[tuple[str, int, int]] = asyncio.get_running_loop().create_future()
        tenant.mover.forgets.erase(first, lambda *all_, said=said: said.set_result(all_))
        failure, first, _ = await said
        if failure or not first:
            return failure


def test_bytes_of_earlier_uses_of_a_segment_are_erased_too(tmp_path: Path) -> None:
    """Bytes of blocks that were evicted earlier are also in segments that were written again since."""

    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        shelf = tenant.bench.first.stores["t"]
        shelf.files.most_bytes = 3 * SEGMENT
        for number in range(6 * SEGMENT // BLOCK):
            tenant.save(number)
            # Otherwise some are evicted before they are written.
            await tenant.on_disk(number - SLOTS // 4)
        await tenant.on_disk(number + 1)
        stale = [at for at in range(number + 1) if not tenant.knows(at)]
        before = starts(held(tmp_path))
        assert any(pattern(key(at), 64) in before for at in stale)
        kept = [at for at in range(number + 1) if tenant.knows(at)][-3:]
        assert await tenant.forget(*(at for at in range(number + 1) if at not in kept)) == ""
        await frames(tenant, 3)
        assert await erased(tenant) == ""
        after = starts(held(tmp_path))
        # Block 0 consists of zeros, so it cannot be searched for.
        assert [at for at in range(1, number + 1) if pattern(key(at), 64) in after] == kept
        for at in range(5000, 5006):  # the segments accept writes again
            tenant.save(at)
        await frames(tenant, 9)
        await tenant.kill()
        found = await after_a_start(tmp_path, range(number + 1))
        assert found == kept

    run(work())


def test_a_segment_is_not_reused_while_it_is_erased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New frames in a segment that is being erased would be erased too."""
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
        going.cancel()  # the client that requested the erase left; the erase continues
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
    """A segment whose size differs from that of new ones is removed when it is freed."""

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


def test_an_erase_waits_for_writes_to_its_segment(tmp_path: Path) -> None:
    """The write was in progress when an earlier one failed, or it is the late footer of a recovered
    segment."""

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


def test_a_crash_during_an_erase_restores_no_block(
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
        again = Tenant(tmp_path)  # the erase can be repeated, although no block is left to forget
        await again.start()
        assert await erased(again) == ""
        text = held(tmp_path)
        assert [at for at in range(1, 8) if pattern(key(at), 64) in text] == [1, 2, 4, 6, 7]
        await again.kill()

    def broken(*_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    run(work())


def good_frames(segment: Segment, places: Iterable[int]) -> int:
    """The number of frames at these pages of a file. Each must contain the saved block."""
    text, count = Path(segment.path).read_bytes(), 0
    for page in places:
        at = page * PAGE
        one = frame.decode(text[at : at + frame.peek(text[at : at + PAGE])])
        payload = text[at + one.header_bytes :][: one.payload_bytes]
        assert payload == pattern(one.identity.key, BLOCK)
        count += 1
    return count


def test_blocks_that_are_written_during_erases_stay(tmp_path: Path) -> None:
    """Segments are sealed, freed and begun again while erases run."""

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


def test_an_erase_writes_zeros_if_the_file_system_can_not_punch_holes(
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


def test_a_forget_waits_for_writes_in_progress(tmp_path: Path) -> None:
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


def test_a_planned_write_is_dropped_when_its_block_is_forgotten(tmp_path: Path) -> None:
    """The forget is confirmed before the planned write begins."""

    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        tenant.save(0)
        await tenant.on_disk(1)
        tenant.mover.reclaimer.idle.clear()  # the flusher waits because the reclaimer works
        for number in (1, 2, 3):
            tenant.save(number)
        while not tenant.catalog.demotions.writing:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert await tenant.forget(1, 2) == ""
        tenant.mover.reclaimer.idle.set()
        await tenant.on_disk(2)
        await tenant.kill()
        assert await after_a_start(tmp_path, range(4)) == [0, 3]

    run(work())


def test_a_second_chance_is_dropped_when_its_block_is_forgotten(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        shelf, first = await with_second_chances(tenant, 1, 2)
        read, was_read = tenant.mover.reclaimer._read_all, asyncio.Event()
        may_write = asyncio.Event()

        async def reading(*args: Any) -> bool:
            good = await read(*args)
            was_read.set()
            await may_write.wait()
            return good

        tenant.mover.reclaimer._read_all = reading  # type: ignore[method-assign]
        shelf.log.reclaim()
        tenant.mover.reclaimer.reclaim(shelf, first)
        await was_read.wait()
        forgetting = asyncio.create_task(tenant.forget(1))
        await asyncio.sleep(0)
        may_write.set()
        assert await forgetting == ""
        while first in shelf.log.others:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert tenant.mover.counts["written_again"] == 1
        await tenant.kill()
        assert 1 not in await after_a_start(tmp_path, range(4))

    run(work())


def test_a_second_chance_waits_for_a_slow_disk(tmp_path: Path) -> None:
    """The writes in flight take longer than the writers of other blocks would wait for a place. The time in
    which the space is described is not one of waiting."""

    async def work() -> None:
        tenant = Tenant(tmp_path)
        shelf, first = await with_second_chances(tenant, 1, 2)
        write, refused, late_s = shelf.write, 0, 0.0
        reclaimer = tenant.mover.reclaimer
        describe = reclaimer._cold.writer.describe

        async def describing(*one: Any) -> bool:
            nonlocal late_s
            late_s = late_s or 2 * SETTLE_S
            return await describe(*one)

        def writing(blocks: Any, done: Any) -> int:
            nonlocal refused
            refused += 1
            return write(blocks, done) if refused > 4 * BEGIN_TRIES else 0

        shelf.write = writing  # type: ignore[method-assign]
        reclaimer._cold.writer.describe = describing  # type: ignore[method-assign]
        reclaimer._clock = lambda: time.monotonic() + late_s  # type: ignore[method-assign]
        shelf.log.reclaim()
        reclaimer.reclaim(shelf, first)
        while first in shelf.log.others:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert refused > 4 * BEGIN_TRIES
        assert tenant.mover.counts["written_again"] == 2
        await tenant.kill()
        assert await after_a_start(tmp_path, range(4)) == [1, 2]

    run(work())


def test_a_second_chance_does_not_wait_for_a_place_on_a_disk_that_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the release of the segment makes a place on the other disk."""

    async def work() -> None:
        tenant = Tenant(tmp_path)
        shelf, first = await with_second_chances(tenant, 1)
        tier, reclaimer = tenant.bench.tier, tenant.mover.reclaimer
        off = SimpleNamespace(
            stores={"t": SimpleNamespace(log=SimpleNamespace(has_place=True))},
            disk=SimpleNamespace(writes=SimpleNamespace(is_on=False)),
        )
        shelf.write = lambda *_: 0  # type: ignore[method-assign]
        monkeypatch.setattr(SegmentLog, "has_place", False)
        both = SimpleNamespace(attached=[tenant.bench.first, off])
        reclaimer._cold = SimpleNamespace(  # type: ignore[assignment]
            directories=both, reader=tier.reader, writer=tier.writer, memory=tier.memory
        )
        reclaimer._clock = lambda: 0.0  # its time is never over
        shelf.log.reclaim()
        reclaimer.reclaim(shelf, first)
        async with asyncio.timeout(60):
            while first in shelf.log.others:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert tenant.mover.counts["written_again"] == 0
        await tenant.kill()

    run(work())


def test_a_block_that_recovery_finds_after_its_forget_is_dropped(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        for number in range(4):
            tenant.save(number)
        await tenant.on_disk(4)
        await tenant.kill()
        early = Tenant(tmp_path)
        answers = [asyncio.create_task(early.forget(1)), asyncio.create_task(early.forget(2))]
        for _ in range(100):
            await asyncio.sleep(0)
        assert not any(one.done() for one in answers), "the recovery has not listed the blocks yet"
        await early.start()
        assert await asyncio.gather(*answers) == ["", ""]
        assert [number for number in range(4) if early.knows(number)] == [0, 3]
        await early.kill()
        assert await after_a_start(tmp_path, range(4)) == [0, 3]

    run(work())


def test_a_block_that_is_saved_again_stays_when_recovery_finds_its_forgotten_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        tenant.save(1)
        tenant.save(2)
        await tenant.on_disk(2)
        await tenant.kill()
        again = Tenant(tmp_path)
        answer = asyncio.create_task(again.forget(1))
        await asyncio.sleep(0)
        recover = again.bench.tier.directories.recover

        async def saved_before(restored: Any) -> None:
            again.save(1)
            await recover(restored)

        monkeypatch.setattr(again.bench.tier.directories, "recover", saved_before)
        await again.start()
        assert await answer == ""
        assert again.knows(1)
        assert again.knows(2)
        await again.on_disk(1)  # not with the frame that was forgotten
        await again.kill()
        assert await after_a_start(tmp_path, range(4)) == [1, 2]

    run(work())


async def with_second_chances(tenant: Tenant, *numbers: int) -> tuple[SegmentStore, Segment]:
    """Start the tenant. A segment with blocks 0 to 3, which are only on disk; these were requested again."""
    await tenant.start()
    shelf, first = await tenant.sealed(4)
    for number in numbers:
        tenant.catalog.load(ONE, tenant.space, key(number), 1.0, [], 0.0)
    evict_all(tenant)
    tenant.mover._budget.second_chance_bytes = 1 << 30
    return shelf, first


async def one_that_is_read_leaves(tenant: Tenant) -> tuple[SegmentStore, Segment]:
    """A segment with blocks 0 to 3, of which 1 and 2 were copied by the reclaimer. It stays unreleased
    while a read of it is in progress."""
    shelf, first = await with_second_chances(tenant, 1, 2)
    first.reading += 1
    assert shelf.log.reclaim() is first
    tenant.mover.reclaimer.reclaim(shelf, first)
    while first not in shelf.releasing:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert tenant.mover.counts["written_again"] == 2
    assert 2 * tenant.mover.bytes["written_again"] == tenant.mover.bytes["written"]
    return shelf, first


def test_a_forget_while_a_directory_is_lost_persists_when_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its segments are no longer writable, and stay listed until the directory is detached."""
    monkeypatch.setattr(tombstones, "FORGET_S", 0.05)

    def fails() -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def no_write(_fd: int, _at: int, _text: bytes, over: Callback) -> None:
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
        tenant.mover.forgets.end_early_forgets()
        assert [number for number in range(8) if tenant.knows(number)] == [0, 1, 2, 4, 6, 7]
        tier.directories.attached[0].stores["t"]._reclaim = tenant.mover.reclaimer.reclaim
        await tenant.kill()

    run(work())


def test_forgetting_a_copied_block_writes_no_tombstone_into_the_next_use_of_its_old_place(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        shelf, first = await one_that_is_read_leaves(tenant)
        first.reading -= 1
        shelf.free_if_unused(first)
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


def test_a_forget_drops_both_copies_of_a_second_chance(tmp_path: Path) -> None:
    """Its segment is not free yet, so a restart would find the first copy."""

    async def work() -> None:
        tenant = Tenant(tmp_path)
        await one_that_is_read_leaves(tenant)
        tombstones.FORGET_S = 0.2
        assert "did not confirm" in await tenant.forget(1), "its segment still has its head"
        await tenant.kill()
        assert 1 not in await after_a_start(tmp_path, range(4))

    before = tombstones.FORGET_S
    try:
        run(work())
    finally:
        tombstones.FORGET_S = before


def evict_all(tenant: Tenant) -> None:
    """Evict all blocks from memory."""
    tenant.catalog.expire_leases(1e9)
    granted = tenant.catalog.reserve(
        ONE, tenant.space, 0, 0, b"", b"".join(key(900 + number) for number in range(SLOTS))
    )
    tenant.catalog.abort(ONE, granted.lease)


def test_a_forget_succeeds_although_the_index_fails(
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


def test_blocks_whose_space_description_can_not_be_stored_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        refused = threading.Event()

        def refusing(*_: object) -> str:
            refused.set()
            return "no room in the index"

        with monkeypatch.context() as broken:
            broken.setattr(Index, "_commit", refusing)
            tenant.save(0)
            assert await asyncio.to_thread(refused.wait, 45)
            for _ in range(100):
                await asyncio.sleep(0)
            assert tenant.mover.counts["written"] == 0
            assert tenant.knows(0)
        await tenant.on_disk(1)
        await tenant.kill()
        assert await after_a_start(tmp_path, range(1)) == [0]

    run(work())


def test_a_waiting_flush_fails_when_the_index_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Index, "flush", lambda *_: None)  # the index has no time to confirm

    async def closes() -> None:
        bench = Bench([tmp_path])
        tier, flushing = bench.tier, bench.first.descriptions.flush()
        await asyncio.sleep(0)
        assert await tier.close()
        async with asyncio.timeout(60):
            assert "closed" in await flushing

    run(closes())


def test_the_list_of_forgets_while_the_tier_is_off_is_bounded(
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
