"""Encoded blocks in the cold tier: they are decoded to the saved bytes, and their real size is counted."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from conformance.codec_tests import kv
from kvtier import KvSpec
from kvtier.errors import TierError
from kvtier.frame import FIX4, PAGE, R32, RAW, ZSTD
from kvtier_daemon.catalog import Catalog, SessionId
from kvtier_daemon.catalog.frames import FRAME, FramedBlocks
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.codec import framing
from kvtier_daemon.codec.choice import BLOCK_MOST, FIRST_TRIES, Choice
from kvtier_daemon.codec.encryption import FrameCipher
from kvtier_daemon.tiers.cold import attached
from kvtier_daemon.tiers.cold import encoder as encoding
from kvtier_daemon.tiers.cold.directory import ColdDirectory
from kvtier_daemon.tiers.cold.disk import STAGED_BYTES, Callback
from kvtier_daemon.tiers.cold.encoder import threads_here
from kvtier_daemon.tiers.cold.frames import Incoming, Outgoing
from kvtier_daemon.tiers.cold.mover import Mover
from kvtier_daemon.tiers.cold.recovery import Recovered
from kvtier_daemon.tiers.cold.scrub import Scrubber
from kvtier_daemon.tiers.cold.segment import first_frame
from kvtier_daemon.tools.fsck import check
from kvtier_kernels import Store
from support.cold_bench import SEGMENT, SIZE, Bench, run
from support.specs import spec_of

ONE = SessionId(1)
SLOTS = 64
NUMBERS = {"raw": RAW, "fix4": FIX4, "r32": R32, "zstd": ZSTD}
SPECS = {
    dtype: spec_of(f"encoded {dtype}", dtype=dtype, head_dim=128 // size)
    for dtype, size in {
        "bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
    }.items()
}  # fmt: skip
BLOCK = SPECS["bfloat16"].block_bytes
assert {spec.block_bytes for spec in SPECS.values()} == {BLOCK}


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(spec: KvSpec, number: int) -> bytes:
    """Values that resemble K and V, different for each block."""
    drawn = np.frombuffer(kv(spec.dtype, BLOCK), np.uint8)
    return np.roll(drawn, 64 * number).tobytes()


class Tenant:
    """A catalog and a mover over a cold tier, as the daemon puts them together."""

    def __init__(
        self, folder: Path, codec: str, through: bool = True, cipher: FrameCipher | None = None
    ) -> None:
        self.bench = Bench([folder], encrypted=cipher is not None and cipher.encrypts)
        self.catalog = Catalog(Store(), make("lru"))
        self.mover = Mover(
            "t",
            self.catalog,
            self.bench.tier,
            SLOTS * BLOCK,
            through=through,
            codec=codec,
            cipher=lambda: cipher,
        )
        self.bench.first.stores["t"]._reclaim = self.mover.reclaimer.reclaim
        self.spaces = {
            dtype: self.catalog.spaces.open(dtype.ljust(32).encode(), spec, ONE)
            for dtype, spec in SPECS.items()
        }
        self.ids: dict[tuple[str, int], bytes] = {}

    async def start(self) -> None:
        async def restored(_: str, one: Recovered, segment: int) -> None:
            for identity, spec, rows in one.parts:
                self.catalog.segments.restore(identity, spec, rows, segment)

        self.catalog.add_extent(SLOTS * BLOCK, bytearray(8 * SLOTS * BLOCK // PAGE))
        self.mover.extents.append(self.bench.extent)
        await self.bench.tier.directories.recover(restored)
        self.running = asyncio.create_task(self.mover.run())

    def save(self, dtype: str, first: int, count: int) -> None:
        space = self.spaces[dtype]
        keys = b"".join(map(key, range(first, first + count)))
        granted = self.catalog.reserve(ONE, space, 0, 0, b"", keys)
        for at, (_, _, offset, _) in enumerate(struct.iter_unpack("<IIQQ", granted.slots)):
            self.bench.slot(offset // BLOCK)[:] = content(space.spec, first + at)
        ids = self.catalog.commit(ONE, granted.lease, 0, count, b"")
        for at in range(count):
            self.ids[dtype, first + at] = ids[4 * at : 4 * at + 4]
        self.mover.writes.saved(ids)

    async def on_disk(self, count: int) -> None:
        await until(lambda: self.catalog.counts()["framed_blocks"] >= count)

    def evict_all(self) -> None:
        self.catalog.expire_leases(1e9)
        for space in [one for one in self.spaces.values() if one.index >= 0]:
            self.catalog.blocks.make_room(space.index, 0, SLOTS)

    def frames(self, ids: bytes) -> list[tuple[int, ...]]:
        return list(FRAME.iter_unpack(self.catalog._store.frames(ids)[0]))

    async def bring(self, dtype: str, number: int) -> bytes | None:
        """The block, read from the disk, or None if it is not found."""
        space = self.spaces[dtype]
        self.evict_all()
        found = self.catalog.match(space, key(number), False)
        if not found.coming:
            return None
        self.mover.reads.promote(space, key(number), 1, request=(1, number))
        await until(lambda: not self.catalog.promotions.reading)
        ids = self.catalog._store.present(space.index, 0, 0, key(number))
        if not ids:
            return None
        (_, _, offset, _) = struct.unpack("<IIQQ", self.catalog._store.slots(ids))
        return bytes(self.bench.slot(offset // BLOCK))

    async def same(self, dtype: str, first: int, count: int) -> None:
        for number in range(first, first + count):
            assert await self.bring(dtype, number) == content(SPECS[dtype], number), number

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        assert await self.bench.tier.close()


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def seal(tenant: Tenant) -> None:
    shelf = tenant.bench.first.stores["t"]
    shelf.seal()
    await until(lambda: shelf.log.open is not None and shelf.log.sealed)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", SPECS)
@pytest.mark.parametrize("codec", [*NUMBERS, "auto"])
def test_saved_blocks_are_read_back_also_after_a_restart(
    tmp_path: Path, codec: str, dtype: str
) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path, codec)
        await tenant.start()
        for first in range(0, 48, 16):
            tenant.save(dtype, first, 16)
            await tenant.on_disk(first + 16)
        codecs = {one[3] for one in tenant.frames(b"".join(tenant.ids.values()))}
        if codec != "auto" and dtype in ("bfloat16", "float32"):
            assert codecs == {NUMBERS[codec]}
        await tenant.same(dtype, 0, 48)
        await tenant.close()
        again = Tenant(tmp_path, "raw")
        await again.start()
        assert again.catalog.counts()["framed_blocks"] == 48
        await again.same(dtype, 0, 48)
        await again.close()

    run(work())


def test_odd_types_and_noise_stay_raw(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path, "r32")
        await tenant.start()
        tenant.save("int8", 0, 4)
        await tenant.on_disk(4)
        space = tenant.spaces["bfloat16"]
        granted = tenant.catalog.reserve(ONE, space, 0, 0, b"", key(9))
        (_, _, offset, _) = struct.unpack("<IIQQ", granted.slots)
        noise = os.urandom(BLOCK)
        tenant.bench.slot(offset // BLOCK)[:] = noise
        tenant.mover.writes.saved(tenant.catalog.commit(ONE, granted.lease, 0, 1, b""))
        await tenant.on_disk(5)
        ids = tenant.catalog._store.present(space.index, 0, 0, key(9))
        assert {one[3] for one in tenant.frames(b"".join(tenant.ids.values()) + ids)} == {RAW}
        assert await tenant.bring("bfloat16", 9) == noise
        await tenant.close()

    run(work())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("codec", "more"), [("fix4", 1.31), ("r32", 1.44)])
def test_a_full_tier_holds_more_encoded_blocks(tmp_path: Path, codec: str, more: float) -> None:
    """A full tier holds `more` times the blocks, and reports their size on disk. One page of each frame
    is its header."""

    async def held(codec: str) -> int:
        folder = tmp_path / codec
        folder.mkdir()
        tenant = Tenant(folder, codec)
        await tenant.start()
        written = 0
        while tenant.mover.counts["written"] < 1600:
            tenant.save("bfloat16", written, 16)
            written += 16
            await until(lambda all_=written: tenant.mover.counts["written"] >= all_)  # type: ignore[misc]
        counts = tenant.catalog.counts()
        blocks: int = counts["framed_blocks"]
        assert counts["framed_bytes"] <= SIZE
        assert counts["framed_bytes"] > SIZE / 2, "the rest is the index and free segments"
        one = counts["framed_bytes"] / blocks
        assert tenant.mover.bytes["written"] == pytest.approx(
            one * tenant.mover.counts["written"], rel=0.02
        )
        await tenant.close()
        return blocks

    async def work() -> None:
        assert await held(codec) >= more * await held("raw")

    run(work())


def test_one_segment_contains_frames_of_several_codecs(tmp_path: Path) -> None:
    """Each life uses another codec and continues the same file. Each reads the blocks of the others."""

    async def work() -> None:
        folder, known = tmp_path, 0
        segments = set()
        for codec in ("raw", "fix4", "r32", "zstd"):
            tenant = Tenant(folder, codec)
            await tenant.start()
            assert tenant.catalog.counts()["framed_blocks"] == known
            tenant.save("bfloat16", known, 2)
            known += 2
            await tenant.on_disk(known)
            await tenant.same("bfloat16", 0, known)
            ids = tenant.ids["bfloat16", known - 1]
            ((segment, *_, number, _, _),) = tenant.frames(ids)
            assert number == NUMBERS[codec]
            segments.add(tenant.bench.tier.table.segments[segment].path)
            await tenant.close()
        assert len(segments) == 1
        volume = ColdDirectory(folder, SIZE)
        report = check(volume)
        assert report.is_clean and report.frames == 8
        volume.close()

    run(work())


def spoil(tenant: Tenant, number: int, inside: int) -> None:
    ((segment, page, *_, header_pages, _),) = tenant.frames(tenant.ids["bfloat16", number])
    path = tenant.bench.tier.table.segments[segment].path
    fd = os.open(path, os.O_RDWR)
    at = (page + header_pages) * PAGE + inside
    old = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([old[0] ^ 4]), at)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.parametrize("inside", [-PAGE + 100, -PAGE + 300, 0, 20_000], ids=str)
@pytest.mark.parametrize("codec", ["fix4", "r32", "zstd"])
def test_damage_is_a_miss_and_no_other_block_is_touched(
    tmp_path: Path, codec: str, inside: int
) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path, codec)
        await tenant.start()
        tenant.save("bfloat16", 0, 3)
        await tenant.on_disk(3)
        tenant.evict_all()
        spoil(tenant, 1, inside)
        assert await tenant.bring("bfloat16", 1) is None
        assert tenant.mover.counts["spoilt"] == 1
        await tenant.same("bfloat16", 0, 1)
        await tenant.same("bfloat16", 2, 1)
        assert await tenant.bring("bfloat16", 1) is None
        await tenant.close()

    run(work())


@pytest.mark.parametrize("codec", ["r32", "zstd"])
def test_a_wrongly_encoded_block_is_a_miss(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame contains the checksum of the block: a frame that decodes to other bytes is damaged."""

    async def work() -> None:
        tenant = Tenant(tmp_path, codec)
        await tenant.start()
        space = tenant.spaces["bfloat16"]
        granted = tenant.catalog.reserve(ONE, space, 0, 0, b"", key(0))
        (_, _, offset, _) = struct.unpack("<IIQQ", granted.slots)
        tenant.bench.slot(offset // BLOCK)[:] = content(space.spec, 0)
        tenant.mover.writes.saved(
            tenant.catalog.commit(ONE, granted.lease, 0, 1, b"another digest..")
        )
        await tenant.on_disk(1)
        assert await tenant.bring("bfloat16", 0) is None
        assert tenant.mover.counts["spoilt"] == 1
        await tenant.close()

    run(work())


def test_a_frame_is_not_damaged_where_there_is_no_memory_to_decode_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: object) -> None:
        raise MemoryError

    async def work() -> None:
        tenant = Tenant(tmp_path, "zstd")
        await tenant.start()
        tenant.save("bfloat16", 0, 1)
        await tenant.on_disk(1)
        with monkeypatch.context() as patched:
            patched.setattr(framing, "decode", short)
            for _ in range(6):
                assert await tenant.bring("bfloat16", 0) is None
        assert tenant.catalog.promotions.failed == {"ENOTRECOVERABLE": 6}
        assert (tenant.mover.counts["spoilt"], tenant.bench.tier.directories.faults) == (0, 0)
        await tenant.same("bfloat16", 0, 1)
        await tenant.close()

    run(work())


def test_no_memory_for_a_frame_is_no_fault_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path, "r32")
        await tenant.start()
        tenant.save("bfloat16", 0, 1)
        await tenant.on_disk(1)
        tier, drive = tenant.bench.tier, tenant.bench.first.disk
        tenant.evict_all()
        told: list[int] = []
        block = Incoming(0, 0, 1, 1, 4096, bytes(16), 0, 0, 4096)

        def no_memory(_fd: int, _at: int, _nbytes: int, callback: Callback) -> None:
            callback(errno.ENOMEM, None)

        with monkeypatch.context() as patched:
            patched.setattr(drive, "read_text", no_memory)
            for _ in range(6):
                tier.reader.read_header(block, lambda code, _: told.append(code))
        assert told == [errno.ENOMEM] * 6
        assert tier.directories.faults == 0 and drive.reads.is_on
        await tenant.same("bfloat16", 0, 1)
        await tenant.close()

    run(work())


def test_a_scrub_sees_damage_without_decoding(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path, "r32")
        await tenant.start()
        tenant.save("bfloat16", 0, 4)
        await tenant.on_disk(4)
        await seal(tenant)
        tenant.evict_all()
        scrub = Scrubber(tenant.bench.tier, {"t": tenant.catalog}, lambda *_: None, 1 << 30)
        await scrub.round()
        assert (scrub.counts["frames"], scrub.counts["damaged"]) == (4, 0)
        spoil(tenant, 2, 30_000)
        await scrub.round()
        assert scrub.counts["damaged"] == 1
        assert not tenant.bench.first.disk.worker.moved()[2]
        assert await tenant.bring("bfloat16", 2) is None
        await tenant.same("bfloat16", 3, 1)
        await tenant.close()

    run(work())


async def reading(tenant: Tenant, count: int) -> None:
    """Submit `count` reads and nothing else."""
    await tenant.start()
    tenant.save("bfloat16", 0, count)
    await tenant.on_disk(count)
    tenant.evict_all()
    tenant.running.cancel()
    await asyncio.gather(tenant.running, return_exceptions=True)
    keys = b"".join(map(key, range(count)))
    tenant.mover.reads.promote(tenant.spaces["bfloat16"], keys, count, request=(1, 1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert tenant.catalog.promotions.reading == count


def test_the_last_reads_are_decoded_before_a_close_ends(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path, "zstd")
        await reading(tenant, 8)
        drive = tenant.bench.first.disk
        assert await tenant.bench.tier.close()
        assert (tenant.catalog.promotions.reading, drive.reads.given_up) == (0, False)
        assert not any(segment.reading for segment in tenant.bench.tier.table.segments)

    run(work())


@pytest.mark.parametrize("ends", [True, False])
def test_the_event_loop_runs_while_a_close_waits_for_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """The close waits for decoding only until its time limit."""
    begun, let, decode, waited = threading.Event(), threading.Event(), framing.decode, list[bool]()

    def slow(*args: Any) -> None:
        begun.set()
        waited.append(let.wait(60))
        decode(*args)

    async def work() -> None:
        tenant = Tenant(tmp_path, "zstd")
        monkeypatch.setattr(framing, "decode", slow)
        await reading(tenant, 1)
        await until(begun.is_set)  # before that, a close gives the read up
        if ends:
            tenant.bench.loop.call_later(0.05, let.set)
        assert await tenant.bench.tier.close(20 if ends else 0.05) == ends
        let.set()
        await until(lambda: waited)
        assert waited == [True]
        await until(lambda: not tenant.catalog.promotions.reading)

    run(work())


@pytest.mark.parametrize("codec", ["fix4", "r32", "zstd"])
def test_a_second_chance_copies_the_frame_without_decoding(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A life with another codec setting copies the encoded frame: payload and digests stay the same,
    and no block is decoded."""

    async def work() -> None:
        tenant = Tenant(tmp_path, codec)
        await tenant.start()
        tenant.save("bfloat16", 0, 4)
        await tenant.on_disk(4)
        await seal(tenant)
        for number in (1, 2):
            tenant.catalog.load(ONE, tenant.spaces["bfloat16"], key(number), 1.0, [], 0.0)
        tenant.evict_all()
        ids = [tenant.ids["bfloat16", number] for number in (1, 2)]
        before = [(tenant.frames(one)[0], tenant.catalog._store.frames(one)[1]) for one in ids]
        tenant.mover.choice._configured = "raw"
        tenant.mover.choice._spaces.clear()  # forget which codec each space uses
        coding, done = tenant.bench.tier.coding, []
        for name in ("encode", "decode"):
            monkeypatch.setattr(coding, name, lambda *_, name=name: done.append(name))
        spoil(tenant, 2, -PAGE + 100)
        tenant.mover._budget.second_chance_bytes = 1 << 30
        shelf = tenant.bench.first.stores["t"]
        first = shelf.log.reclaim()
        assert first is not None
        tenant.mover.reclaimer.reclaim(shelf, first)
        await until(lambda: first not in shelf.log.others)
        assert tenant.mover.counts["written_again"] == 1, "one header is damaged"
        ((frame, digest),) = [(tenant.frames(ids[0])[0], tenant.catalog._store.frames(ids[0])[1])]
        assert frame[:2] != before[0][0][:2] and frame[2:5] == before[0][0][2:5]
        assert digest == before[0][1] and frame[3] == NUMBERS[codec]
        assert not tenant.bench.first.disk.worker.moved()[2] and not done
        monkeypatch.undo()
        await tenant.same("bfloat16", 1, 1)
        assert await tenant.bring("bfloat16", 2) is None
        await tenant.close()
        again = Tenant(tmp_path, "raw")
        await again.start()
        await again.same("bfloat16", 1, 1)
        await again.close()

    run(work())


def test_a_block_that_is_forgotten_while_it_is_encoded_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path, "r32")
        await tenant.start()
        coding = tenant.bench.tier.coding
        encode, was_encoded, forgotten = coding.encode, asyncio.Event(), asyncio.Event()

        async def slow(*args: object) -> object:
            found = await encode(*args)  # type: ignore[arg-type]
            was_encoded.set()
            await forgotten.wait()
            return found

        monkeypatch.setattr(coding, "encode", slow)
        tenant.save("bfloat16", 0, 4)
        await was_encoded.wait()
        tenant.catalog.forget(tenant.spaces["bfloat16"], key(1))
        forgotten.set()
        await tenant.on_disk(3)
        await until(lambda: not coding.staging.used)
        assert tenant.mover.counts["written"] == 3
        await tenant.close()

    run(work())


def test_staging_memory_is_reused(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path, "r32")
        await tenant.start()
        staging = tenant.bench.tier.coding.staging
        for first in range(0, 480, 16):
            tenant.save("bfloat16", first, 16)
            await until(lambda first=first: tenant.mover.counts["written"] >= first + 16)  # type: ignore[misc]
        assert len(tenant.bench.tier.memory.mappings) == 2, "the arena and the staging"
        await until(lambda: not staging.used)
        assert list(staging._holes.values()) == [{0: STAGED_BYTES}], "whole again"
        disk = tenant.bench.first.disk.worker
        if disk.engine == "io_uring":
            assert disk.registered_bytes == SLOTS * BLOCK, "only the arena is pinned"
        await tenant.close()

    run(work())


@pytest.mark.parametrize("blocks", [1, 3])
def test_staging_never_exceeds_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """With pieces of half of the limit and of most of it. The slow disk keeps staging in use until an
    encoder waits for it."""
    most, seen = (blocks + 1) * BLOCK, [0]
    landed: list[Callable[[], None]] = []
    monkeypatch.setattr(encoding, "PIECE_BYTES", blocks * BLOCK)

    async def work() -> None:
        tenant = Tenant(tmp_path, "r32")
        tier = tenant.bench.tier
        staging, write = tier.coding.staging, tier.writer.write
        staging.most = most
        place_of = staging._cut

        def cut(nbytes: int) -> tuple[int, int] | None:
            place = place_of(nbytes)
            seen[0] = max(seen[0], staging.used)
            return place

        def slow(
            name: str, some: Sequence[Outgoing], done: Callable[[FramedBlocks, list[int]], None]
        ) -> int:
            return write(name, some, lambda *over: landed.append(partial(done, *over)))

        async def land() -> None:
            await until(lambda: staging.waited)
            while True:
                while landed:
                    landed.pop()()
                await asyncio.sleep(0.001)

        monkeypatch.setattr(staging, "_cut", cut)
        monkeypatch.setattr(tier.writer, "write", slow)
        await tenant.start()
        tenant.save("bfloat16", 0, 48)
        landing = tenant.bench.loop.create_task(land())
        await tenant.on_disk(48)
        landing.cancel()
        assert {one[3] for one in tenant.frames(b"".join(tenant.ids.values()))} == {R32}
        assert BLOCK < seen[0] <= most and staging.waited and not staging.refused
        await until(lambda: not staging.used)
        await tenant.same("bfloat16", 0, 48)
        await tenant.close()

    run(work())


@pytest.mark.parametrize("lacks", ["a segment", "a description"])
def test_no_block_is_encoded_before_it_can_be_written(
    tmp_path: Path, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path, "auto")
        tier = tenant.bench.tier
        await tenant.start()
        shelf, (asked, encoded) = tier.directories.attached[0].stores["t"], ([], [])
        await until(lambda: shelf.log.open is not None)
        encode, open_segment = tier.coding.encode, shelf.log.open

        async def counted(blocks: Sequence[Outgoing], *more: Any) -> list[Outgoing]:
            encoded.extend(blocks)
            return await encode(blocks, *more)

        async def refuse(*_: object) -> bool:
            asked.append(1)
            return False

        monkeypatch.setattr(tier.coding, "encode", counted)
        with monkeypatch.context() as patched:
            if lacks == "a segment":
                shelf.log.open = None
                patched.setattr(shelf, "prepare", lambda: asked.append(1))
            else:
                patched.setattr(tier.writer, "describe", refuse)
            tenant.save("bfloat16", 0, 16)
            await until(lambda: len(asked) >= 3)
            assert not encoded and not tenant.mover.choice.report()[0]["ratios"]
            shelf.log.open = open_segment
        # Beginning the next segment may take many attempts.
        monkeypatch.setattr("kvtier_daemon.tiers.cold.flusher.BEGIN_TRIES", 100_000)
        await tenant.on_disk(16)
        assert sorted(block.id for block in encoded) == sorted(
            int.from_bytes(one, "little") for one in tenant.ids.values()
        ), "each once"
        await tenant.same("bfloat16", 0, 4)
        await tenant.close()

    run(work())


@pytest.mark.parametrize(
    ("dtype", "tried"), [("bfloat16", FIRST_TRIES), ("int8", 0)], ids=["native", "zstd"]
)
def test_auto_tries_large_blocks_only_with_codecs_that_workers_decode(
    tmp_path: Path, dtype: str, tried: int
) -> None:
    """If no codec can encode blocks of this type, they are passed on unchanged and in one piece."""
    head_dim = BLOCK_MOST if dtype == "int8" else BLOCK_MOST // 2
    spec = spec_of("large", dtype=dtype, layers=1, kv_heads=1, block_tokens=1, head_dim=head_dim)
    assert spec.block_bytes > BLOCK_MOST

    async def work() -> None:
        bench = Bench([tmp_path])
        coding, choice = bench.tier.coding, Choice(bench.tier.coding.rates)
        extent, _ = bench.tier.memory.allocate(spec.block_bytes)
        some = [
            Outgoing(n, b"l" * 32, spec, 0, 0, key(n), b"", b"", spec.block_bytes, extent, 0)
            for n in range(FIRST_TRIES + 1)
        ]
        pieces = list(coding.pieces(some, choice))
        assert len(pieces) == (len(some) if tried else 1)
        for piece in pieces:
            for block in await coding.encode(piece, choice, [1e9]):
                block.release()
        (report,) = choice.report()
        assert bool(report["ratios"]) == bool(tried)
        assert choice.tries(b"l" * 32, spec, spec.block_bytes) == 0
        assert await bench.tier.close()

    run(work())


@pytest.mark.parametrize("fails", ["memory", "a codec", "noting"])
def test_a_block_that_can_not_be_encoded_is_written_raw(
    tmp_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next block is encoded again."""

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def work() -> None:
        tenant = Tenant(tmp_path, "r32")
        tier = tenant.bench.tier
        await tenant.start()
        with monkeypatch.context() as patched:
            if fails == "memory":
                patched.setattr(attached, "anonymous", refuse)
            elif fails == "a codec":
                patched.setattr(framing, "encode", refuse)
            else:
                patched.setattr(tier.coding.rates, "encoded", refuse)
            tenant.save("bfloat16", 0, 4)
            await tenant.on_disk(4)
        assert {one[3] for one in tenant.frames(b"".join(tenant.ids.values()))} == {RAW}
        assert tier.coding.failures >= 1 and tier.writer.is_on
        assert tier.coding.staging.used == 0, "no memory is lost"
        tenant.save("bfloat16", 4, 4)
        await tenant.on_disk(8)
        assert {one[3] for one in tenant.frames(tenant.ids["bfloat16", 4])} == {R32}
        await tenant.same("bfloat16", 0, 8)
        await tenant.close()

    run(work())


def test_no_thread_is_started_after_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    async def work() -> None:
        tenant = Tenant(tmp_path, "zstd")
        await tenant.start()
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            tenant.save("bfloat16", 0, 4)
            await tenant.on_disk(4)
            assert {one[3] for one in tenant.frames(b"".join(tenant.ids.values()))} == {ZSTD}
            await tenant.same("bfloat16", 0, 4)
        await tenant.close()
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(TierError, match="cannot start threads: can't start new thread"):
                Bench([tmp_path])

    run(work())


def test_auto_encodes_compressible_data_on_a_slow_disk(tmp_path: Path) -> None:
    """If the disk is slower than the decoders, `auto` encodes floating-point blocks and stores noise raw."""

    async def work() -> None:
        tenant = Tenant(tmp_path, "auto")
        tier = tenant.bench.tier
        tier.reader.bandwidths = lambda: [1e6]  # type: ignore[method-assign]
        await tenant.start()
        for first in range(0, 48, 16):
            tenant.save("bfloat16", first, 16)
            await tenant.on_disk(first + 16)
        codecs = Counter(one[3] for one in tenant.frames(b"".join(tenant.ids.values())))
        assert codecs[RAW] <= 16, "blocks before the first measurements"
        assert codecs[R32] >= 32, codecs
        (report,) = [one for one in tenant.mover.choice.report() if one["dtype"] == "bfloat16"]
        ratios = report["ratios"]
        assert isinstance(ratios, dict)
        assert report["codec"] == "r32" and ratios["r32"] > ratios["fix4"] > 1.3
        tier.reader.bandwidths = lambda: [1e15]  # type: ignore[method-assign]
        tenant.save("bfloat16", 100, 1)
        await tenant.on_disk(49)
        assert tenant.frames(tenant.ids["bfloat16", 100])[0][3] == RAW
        await tenant.same("bfloat16", 0, 48)
        await tenant.close()

    run(work())


def test_a_read_does_not_wait_for_blocks_that_are_being_encoded(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path, "zstd")
        await tenant.start()
        tenant.save("bfloat16", 0, 1)
        await tenant.on_disk(1)
        encoders, goes_on = tenant.bench.tier.coding._encoders, threading.Event()
        try:
            for _ in range(2 * threads_here()):
                encoders.submit(goes_on.wait)
            await tenant.same("bfloat16", 0, 1)
        finally:
            goes_on.set()
        await tenant.close()

    run(work())


def test_the_rate_of_saves_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path, "auto")
        await tenant.start()
        writing, now = tenant.mover.writes, [100.0]
        monkeypatch.setattr(writing, "_clock", lambda: now[0])
        monkeypatch.setattr(writing, "_tended_at", 100.0)
        tenant.save("bfloat16", 0, 16)
        await tenant.on_disk(16)
        now[0] += 2.0
        tenant.mover.tend()
        assert tenant.mover.choice.saved_bytes_s == 8 * BLOCK / min(2, threads_here())
        for _ in range(100):
            now[0] += 1.0
            tenant.mover.tend()
        assert 0 <= tenant.mover.choice.saved_bytes_s < BLOCK / 10, "the rate decays"
        await tenant.close()

    run(work())


def test_segments_are_filled_by_encoded_sizes(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path, "r32")
        await tenant.start()
        for first in range(0, 64, 16):
            tenant.save("bfloat16", first, 16)
            await tenant.on_disk(first + 16)
        frames = tenant.frames(b"".join(tenant.ids.values()))
        first_segment = [one for one in frames if one[0] == frames[0][0]]
        end = first_frame(SEGMENT) // PAGE
        for _, page, nbytes, _, header_pages, _ in first_segment:
            assert page == end, "frames are contiguous"
            end = page + header_pages + -(-nbytes // PAGE)
        assert SEGMENT - end * PAGE < BLOCK + 3 * PAGE
        assert len(first_segment) > SEGMENT // (BLOCK + PAGE)
        ids = array("I")
        ids.frombytes(tenant.catalog.segments.in_segment(frames[0][0]))
        assert len(ids) == len(first_segment)
        await tenant.close()

    run(work())


def test_a_load_is_planned_with_encoded_sizes_and_decode_time(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path, "r32")
        await tenant.start()
        tenant.save("bfloat16", 0, 4)
        await tenant.on_disk(4)
        tenant.evict_all()
        space, rates = tenant.spaces["bfloat16"], tenant.bench.tier.coding.rates
        frames = tenant.catalog._store.frames(b"".join(tenant.ids.values()))[0]
        rates.decoded(R32, "bfloat16", 1 << 50, 1.0)
        assert tenant.mover.reads._load_bytes(space, frames) == frames, "their own bytes"
        assert sum(one[2] for one in FRAME.iter_unpack(frames)) < 0.75 * 4 * BLOCK
        rates.decoded(R32, "bfloat16", 1, 4e9)  # decoding all of them takes a second
        keys = b"".join(map(key, range(4)))
        asked = tenant.mover.reads.promote(space, keys, 4, request=(1, 1), recompute_s=0.3)
        assert asked[0] == 0 and asked[2] == "slower", "decoding takes long"
        assert tenant.mover.reads.promote(space, keys, 4, request=(1, 2))[0] == 4
        await until(lambda: not tenant.catalog.promotions.reading)
        assert tenant.mover.reads._waiting_bytes == 0
        await tenant.close()

    run(work())
