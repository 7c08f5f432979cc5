"""The cold tier keeps the contract of all tiers: catalog, mover and segments together, over a real directory.
Whatever is got has left memory before, and comes from the disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from conformance.tier_tests import Identity, Tier, TierTests, name
from kvtier import Group, KvSpec
from kvtier.layout import space_id
from kvtier_daemon.catalog import Catalog, KnownSpace, LeaseId, SessionId
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.catalog.promotion import Promotion
from kvtier_daemon.catalog.reading import Held
from kvtier_daemon.catalog.spaces import IDENTITY
from kvtier_daemon.tiers.cold.attached import StoreOptions, open_directory
from kvtier_daemon.tiers.cold.mover import Mover
from kvtier_daemon.tiers.cold.tier import ColdTier
from kvtier_kernels import Mapping, Store, views
from support.oracle import HIGH

ME = SessionId(1)
MIB = 1 << 20
BLOCK = 64 << 10
SEGMENT = 512 << 10
SLOTS = 48
SHARES = {"t": 0.25, "another": 0.75}
SEGMENTS = 9  # a quarter of a directory of 36 MiB, what index and lock take apart
PER_SEGMENT = 7


class Cold:
    """A tenant whose blocks are written through and, but for those that are held, read from the disk each
    time."""

    block_bytes = BLOCK
    capacity_bytes = SEGMENTS * PER_SEGMENT * BLOCK

    def __init__(self, folder: Path, engine: str, codec: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._catalog = Catalog(Store(), make("lru"))
        self._table = bytearray(8 * SLOTS * BLOCK // 4096)
        self._held: dict[Identity, LeaseId] = {}
        fd = os.memfd_create("arena")
        os.ftruncate(fd, SLOTS * BLOCK)
        self._memory = Mapping(fd, SLOTS * BLOCK, True)
        os.close(fd)
        self._loop.run_until_complete(self._open(folder, engine, codec))

    async def _open(self, folder: Path, engine: str, codec: str) -> None:
        self._tier = ColdTier(
            self._loop, [open_directory(folder, 36 * MIB)], StoreOptions(SEGMENT, SHARES, engine),
            lambda shelf, segment: self.mover.reclaim(shelf, segment),
        )  # fmt: skip
        self.mover = Mover("t", self._catalog, self._tier, SLOTS * BLOCK, through=True, codec=codec)
        self.mover.extents.append(self._tier.memory.register(self._memory))
        self._catalog.add_extent(SLOTS * BLOCK, self._table)

        async def nothing(*_: object) -> None:
            raise AssertionError("an empty directory holds nothing")

        await self._tier.directories.recover(nothing)
        self._moving = self._loop.create_task(self.mover.run())

    def _until(self, holds: Callable[[], bool]) -> None:
        async def wait() -> None:
            until = time.monotonic() + 60
            while not holds():
                assert time.monotonic() < until
                await asyncio.sleep(0.001)

        self._loop.run_until_complete(wait())

    def _space(self, identity: Identity) -> KnownSpace:
        group = Group(kind="window", layers=1, opaque_bytes=BLOCK, window_tokens=16, shards=2)
        spec = KvSpec.groups(
            [group, group], model=identity.space, dtype="bfloat16", block_tokens=16, weights="r"
        )
        space = self._catalog.open(space_id(spec, "t"), spec)
        self._catalog.spaces.settle(space)
        return space

    def _ids(self, identity: Identity) -> bytes:
        """The block alone, wherever it is."""
        store, space = self._catalog._store, self._space(identity)
        ids = array("I", store.resident(space.index, identity.key))
        names = IDENTITY.iter_unpack(store.identities(ids.tobytes()))
        place = (identity.group, identity.shard)
        return array(
            "I", (i for i, name in zip(ids, names, strict=True) if name[1:3] == place)
        ).tobytes()

    def _evict(self, space: KnownSpace) -> None:
        """Everything that nobody holds leaves memory."""
        self._catalog.blocks.make_room(space.index, 0, SLOTS)

    def _bring(self, identity: Identity) -> bytes:
        """Its id, once it was read from the disk; empty if it is nowhere."""
        store, space = self._catalog._store, self._space(identity)
        reads = self._catalog.promotions
        self._evict(space)
        ids = self._ids(identity)
        if not ids or store.present(space.index, identity.group, identity.shard, identity.key):
            return ids
        promoting, _ = store.promote(ids)
        if not promoting:
            return b""
        reads.reading += 1
        frames = store.frames(promoting)
        plan = Promotion(promoting, store.slots(promoting), *frames, sizes=[BLOCK])
        self.mover._cold.reads.weigh((0, 0), {}, (), True, 5.0, float("inf"))
        self.mover._read((0, 0), space, plan)
        self._until(lambda: not reads.reading)
        self._catalog.holds.end((0, 0))
        return store.present(space.index, identity.group, identity.shard, identity.key)

    def put(self, identity: Identity, data: bytes) -> bool:
        space = self._space(identity)
        if self._ids(identity):
            return False
        granted = self._catalog.reserve(
            ME, space, identity.group, identity.shard, b"", identity.key
        )
        if not granted.lease:
            return False
        views([self._memory], granted.slots, BLOCK, True)[0][:] = data
        ids = self._catalog.commit(ME, granted.lease, 0, 1)
        self.mover.saved(ids)
        store = self._catalog._store
        self._until(lambda: not store.dirty(ids) and not self._catalog.demotions.writing)
        return True

    def get(self, identity: Identity) -> bytes | None:
        ids = self._bring(identity)
        if not ids:
            return None
        (slot,) = views([self._memory], self._catalog._store.slots(ids), BLOCK, False)
        self._catalog.match(self._space(identity), identity.key)  # it was wanted
        return bytes(slot)

    def hold(self, identity: Identity) -> bool:
        ids = self._bring(identity)
        if ids:
            held = [Held(identity.group, identity.shard, 0, ids)]
            lease = self._catalog._reading.hold(ME, self._space(identity), held, 1, deadline=1e9)
            self._held[identity] = lease.id
        return bool(ids)

    def release(self, identity: Identity) -> None:
        self._catalog.release(ME, self._held.pop(identity))

    def forget(self, identity: Identity) -> None:
        self._catalog.blocks.forget(self._ids(identity))
        self.mover.tombstone()

    def used_bytes(self) -> int:
        return self._catalog.counts()["framed_bytes"]

    def close(self) -> None:
        async def end() -> None:
            self._moving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._moving
            await self._tier.close()

        self._loop.run_until_complete(end())
        self._loop.close()


class ColdTierTests(TierTests):
    engine = ""
    codec = "raw"

    def make_tier(self, folder: Path) -> Cold:
        return Cold(folder, self.engine, self.codec)


class TestColdTierOfIoUring(ColdTierTests):
    engine = "io_uring"


class TestColdTierOfThreads(ColdTierTests):
    engine = "threads"


class EncodedTests(ColdTierTests):
    engine = "auto"

    def data(self, tier: Tier, number: int) -> bytes:
        """Small numbers in bf16."""
        low = random.Random(f"data {number}").randbytes(tier.block_bytes // 2)
        words = bytearray(tier.block_bytes)
        words[::2], words[1::2] = low, low.translate(HIGH)
        return bytes(words)

    def test_it_is_encoded(self, tier: Tier) -> None:
        for number in range(8):
            assert tier.put(Identity(key=name(number)), self.data(tier, number))
        assert tier.used_bytes() < 8 * 0.9 * BLOCK


class TestColdTierOfFix4(EncodedTests):
    codec = "fix4"


class TestColdTierOfR32(EncodedTests):
    codec = "r32"


class TestColdTierOfZstd(EncodedTests):
    codec = "zstd"
