"""Slots whose write is in progress keep their content until the disk completes the write, in all
circumstances."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvtier_daemon.catalog import Catalog, SessionId
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.tiers.cold import flusher
from kvtier_daemon.tiers.cold import read_queue as reads_module
from kvtier_daemon.tiers.cold.frames import Incoming, Outgoing, Read, Wrote
from kvtier_daemon.tiers.cold.mover import Mover
from kvtier_daemon.tiers.cold.write_budget import WriteBudget
from kvtier_kernels import Store
from support.cold_bench import BLOCK, SPACE, SPEC, Bench, key, run
from support.specs import pattern

SLOTS = 64


def places(slots: bytes) -> list[int]:
    return [fields[2] // BLOCK for fields in struct.iter_unpack("<IIQQ", slots)]


def keys(first: int, count: int) -> bytes:
    return b"".join(key(number) for number in range(first, first + count))


def test_a_stopped_mover_does_not_free_slots_whose_write_is_in_progress(tmp_path: Path) -> None:
    """The blocks have no checksum: the disk would seal any content of their slots under their names."""

    async def first() -> None:
        bench = Bench([tmp_path], engine="threads")
        await bench.recover()
        await bench.write(range(2))
        catalog = Catalog(Store(), make("lru"))
        catalog.add_extent(SLOTS * BLOCK, bytearray(8 * SLOTS * BLOCK // 4096))
        mover = Mover("t", catalog, bench.tier, SLOTS * BLOCK, through=True)
        mover.extents.append(bench.extent)
        space = catalog.spaces.open(SPACE, SPEC, SessionId(1))
        granted = catalog.reserve(SessionId(1), space, 0, 0, b"", keys(100, 32))
        ours = places(granted.slots)
        for number, place in enumerate(ours):
            bench.slot(place)[:] = pattern(key(100 + number), BLOCK)
        ids = catalog.commit(SessionId(1), granted.lease, 0, 32, b"")
        # Urgent reads delay the writes.
        one = bench.on_disk[0]
        place = (bench.extent, (SLOTS - 1) * BLOCK)
        ahead = Incoming(
            0,
            one.segment,
            one.page,
            one.header_pages,
            one.payload_bytes,
            one.digest,
            *place,
            one.payload_bytes,
        )
        bench.tier.reader.read([ahead] * 4000, lambda *_: None)
        mover.writes.saved(ids)
        moving = asyncio.create_task(mover.run())
        while not bench.first.disk.worker.queued[2] > 10:  # noqa: ASYNC110
            await asyncio.sleep(0)
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        waiting = bench.first.disk.worker.queued[2]
        granted = catalog.reserve(SessionId(2), space, 0, 0, b"", keys(900, 60))
        assert waiting > 2, "no read was queued, so the test checked nothing"
        for number, place_ in enumerate(places(granted.slots)):
            bench.slot(place_)[:] = pattern(key(900 + number), BLOCK)
        await bench.tier.close()

    async def again() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        assert len(bench.on_disk) > 2
        await bench.all_read()
        await bench.tier.close()

    run(first())
    run(again())


def test_writes_of_the_last_day_are_counted_by_the_hour() -> None:
    now = 5000.0
    budget = WriteBudget(0, lambda: now)
    for nbytes in (1, 20, 300):
        budget.spend(nbytes)
        budget.spend(nbytes)
        now += 3600
    assert budget.day_bytes() == 642
    now += 21 * 3600
    assert budget.day_bytes() == 640
    now += 3600
    assert budget.day_bytes() == 600
    now += 3600
    assert budget.day_bytes() == 0


def test_many_blocks_are_submitted_in_small_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One large batch would block the event loop, and all other clients would wait."""
    monkeypatch.setattr(flusher, "WRITE_BLOCKS", 8)
    monkeypatch.setattr(reads_module, "READ_BLOCKS", 8)
    handed: Counter[str] = Counter()

    async def moves(through: bool) -> None:
        folder = tmp_path / str(through)
        folder.mkdir()
        bench = Bench([folder])
        await bench.recover()
        read, write = bench.tier.reader.read, bench.tier.writer.write

        def few_read(blocks: Sequence[Incoming], done: Read) -> None:
            handed["read"] = max(handed["read"], len(blocks))
            read(blocks, done)

        def few_written(tenant: str, blocks: Sequence[Outgoing], done: Wrote) -> int:
            handed["written"] = max(handed["written"], len(blocks))
            return write(tenant, blocks, done)

        monkeypatch.setattr(bench.tier.reader, "read", few_read)
        monkeypatch.setattr(bench.tier.writer, "write", few_written)
        catalog = Catalog(Store(), make("lru"))
        catalog.add_extent(SLOTS * BLOCK, bytearray(8 * SLOTS * BLOCK // 4096))
        mover = Mover("t", catalog, bench.tier, 4 * SLOTS * BLOCK, through=through)
        mover.extents.append(bench.extent)
        space = catalog.spaces.open(SPACE, SPEC, SessionId(1))
        granted = catalog.reserve(SessionId(1), space, 0, 0, b"", keys(100, 32))
        ids = catalog.commit(SessionId(1), granted.lease, 0, 32, b"")
        mover.writes.saved(ids)
        moving = asyncio.create_task(mover.run())
        await until(lambda: mover.counts["written"] == 32)
        granted = catalog.reserve(SessionId(1), space, 0, 0, b"", keys(900, SLOTS))
        assert granted.outcomes == bytes(SLOTS), "the blocks were not evicted"
        catalog.abort(SessionId(1), granted.lease)
        assert mover.reads.promote(space, keys(100, 32), 32)[0] == 32
        await until(lambda: mover.counts["read"] == 32)
        assert handed == {"read": 8, "written": 8}
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        await bench.tier.close()

    run(moves(through=True))
    run(moves(through=False))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
