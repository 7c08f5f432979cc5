"""The contract of all tiers, tested through the product's own seam. Inherit `TierTests` and name the tier.

A tier may lose any block; it never returns other bytes than those that were saved under that key in that
space.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from kvtier import Group, KvSpec
from kvtier.layout import space_id
from kvtier_daemon.app import MakeLowerTier
from kvtier_daemon.catalog import Catalog, Found, KnownSpace, LeaseId, SessionId
from kvtier_daemon.catalog.policy import Policy, make
from kvtier_daemon.config.current import CurrentConfig
from kvtier_daemon.config.schema import load
from kvtier_daemon.internal_errors import InternalErrors
from kvtier_daemon.notify import Notifier
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.warm import WarmTier
from kvtier_kernels import Mapping, Store, fresh, views
from support.effort import effort

ME = SessionId(1)
LEASE_S = 60.0
LRU = partial(make, "lru")
GROUPS, SHARDS = 2, 2
PART_BYTES = 32 << 10
BLOCK_BYTES = GROUPS * SHARDS * PART_BYTES
MEMORY_BYTES = 6 << 20
FULL = effort(2, 3, 3)  # times the capacity: blocks that no one holds are gone
CONFIG = """
socket = "{folder}/s"
state = "{folder}/state"
[warm]
size = "40MiB"
[tenants.it]
uids = [0]
quota = "6MiB"
[tenants.another]
uids = [65534]
quota = "34MiB"
"""


@dataclass(frozen=True)
class Identity:
    """What identifies a block's bytes."""

    space: str = "space"
    key: bytes = bytes(32)


class ServedTenant:
    """A tenant with memory and the tier below it, used block by block: as requests use them, but without a
    connection. Each block has a part for each group and shard. If `is_lower`, blocks are evicted before each
    load, so that they come from the tier below memory."""

    def __init__(
        self, folder: Path, lower: MakeLowerTier, config: str, capacity_bytes: int, is_lower: bool,
        policy: Callable[[], Policy] = LRU, compressed: str = "0",
    ) -> None:  # fmt: skip
        self.capacity_bytes = capacity_bytes
        self.loop = asyncio.new_event_loop()
        (folder / "disk").mkdir()
        file = folder / "kvtier.toml"
        file.write_text(CONFIG.format(folder=folder) + config.format(folder=folder))
        loaded = load(file, {"warm.compressed": compressed}, environ={})
        quotas = {name: one.quota_bytes for name, one in loaded.config.tenants.items()}
        self._tenants = {
            name: Tenant(name, bytes(32), quota, Catalog(Store(), policy()))
            for name, quota in quotas.items()
        }
        self.tenant = self._tenants["it"]
        self._is_lower = is_lower
        self._warm = WarmTier(quotas, loaded.config.warm.extent_bytes)
        settings = CurrentConfig(loaded, Notifier(None), lambda config: None, lambda: None)
        self.lower = lower(settings, self._tenants, self._warm, InternalErrors(self._failed))
        self._memory: list[Mapping | None] = []
        self._tables: list[Mapping | None] = []
        self._held: dict[Identity, LeaseId] = {}
        self._requests = 0
        self._stopped = asyncio.Event()
        self._serving = self.loop.create_task(self._serve())
        self._until(lambda: self._warm.complete and self.tenant.tier.recovery.is_complete)

    def _failed(self) -> None:
        raise AssertionError("the tier's periodic work has failed")

    async def _serve(self) -> None:
        await self.lower.open(self.loop)
        self._warm.start()
        async with asyncio.TaskGroup() as tasks:
            self.lower.start(tasks)
            while not self._stopped.is_set():
                for extent in self._warm.ready():
                    self._tenants[extent.tenant].add(extent)
                    self.lower.map(extent)
                    if extent.tenant == self.tenant.name:
                        self._memory.append(Mapping(extent.fd, extent.nbytes, True))
                        self._tables.append(extent.table)
                self.lower.run_periodic()
                await asyncio.sleep(0.01)
            await self.lower.end_moving(lambda progress: None)
        assert await self.lower.close()

    def _until(self, holds: Callable[[], bool]) -> None:
        async def wait() -> None:
            until = time.monotonic() + 60
            while not holds():
                if self._serving.done():
                    self._serving.result()
                assert time.monotonic() < until
                await asyncio.sleep(0.001)

        self.loop.run_until_complete(wait())

    def _space(self, identity: Identity) -> KnownSpace:
        # Windows of one block: each block is found alone, regardless of the blocks before it.
        group = Group(
            kind="window", layers=1, opaque_bytes=PART_BYTES, window_tokens=16, shards=SHARDS
        )
        spec = KvSpec.groups(
            [group] * GROUPS, model=identity.space, dtype="bfloat16", block_tokens=16, weights="r"
        )
        space = self.tenant.catalog.spaces.open(space_id(spec, self.tenant.name), spec)
        self.tenant.catalog.spaces.settle(space)
        return space

    def put(self, identity: Identity, data: bytes) -> bool:
        """Save a block, and wait until the tier below memory has it; return whether it was saved."""
        catalog, space = self.tenant.catalog, self._space(identity)
        leases = []
        for at in range(GROUPS * SHARDS):
            group, shard = divmod(at, SHARDS)
            granted = catalog.reserve(ME, space, group, shard, b"", identity.key)
            if not granted.lease:
                for lease in leases:
                    catalog.abort(ME, lease)
                return False
            leases.append(granted.lease)
            (slot,) = views(self._memory, granted.slots, PART_BYTES, True)
            slot[:] = data[at * PART_BYTES : (at + 1) * PART_BYTES]
        ids = array("I")
        for lease in leases:
            ids.frombytes(saved := catalog.commit(ME, lease, 0, 1))

            def save(saved: bytes = saved) -> None:
                self.tenant.tier.writes.saved(saved)

            self.loop.call_soon(save)
        if self._is_lower:
            store, demotions = catalog.blocks.store, catalog.demotions
            self._until(lambda: not store.dirty(ids.tobytes()) and not demotions.writing)
        return True

    def _load(self, identity: Identity) -> Found:
        return self.loop.run_until_complete(self._loaded(identity))

    async def _loaded(self, identity: Identity) -> Found:
        """Load a block, after a read from the tier below memory if it is there."""
        catalog, space, tier = self.tenant.catalog, self._space(identity), self.tenant.tier
        if self._is_lower:
            for group in range(GROUPS):
                catalog.blocks.make_room(space.index, group, MEMORY_BYTES // PART_BYTES)
        self._requests += 1
        request = (int(ME), self._requests)
        while True:
            found = catalog.load(ME, space, identity.key, LEASE_S, range(SHARDS), time.monotonic())
            if not found.coming:
                break
            coming, _, why = tier.reads.promote(
                space, identity.key, found.coming, request=request, within_s=60.0
            )
            if not coming:
                assert why == "not_read", why
                break
            read = asyncio.Event()
            if tier.pending.call_when_read(request, read.set):
                async with asyncio.timeout(60):
                    await read.wait()
        catalog.holds.end(request)
        return found

    def get(self, identity: Identity) -> bytes | None:
        """Return the bytes of a block, or None."""
        found = self._load(identity)
        if not found.lease:
            return None
        parts = sorted(found.parts, key=lambda part: (part.group, part.shard))
        slots = b"".join(part.slots for part in parts)
        data = b"".join(views(self._memory, slots, PART_BYTES, False))
        assert fresh(self._tables, slots) == GROUPS * SHARDS
        self.tenant.catalog.release(ME, found.lease)
        return data

    def hold(self, identity: Identity) -> bool:
        """Keep a block from being evicted until `release`; False if it is not stored."""
        found = self._load(identity)
        if found.lease:
            self._held[identity] = found.lease
        return bool(found.lease)

    def release(self, identity: Identity) -> None:
        self.tenant.catalog.release(ME, self._held.pop(identity))

    def forget(self, identity: Identity) -> None:
        """Make a block impossible to find, durably."""
        space, told = self._space(identity), list[str]()
        self.tenant.catalog.forget(space, identity.key)

        async def forget() -> bool:
            return self.tenant.tier.forgets.forget(space, identity.key, told.append)

        if self.loop.run_until_complete(forget()):
            self._until(lambda: bool(told))
            assert told == [""]

    def used_bytes(self) -> int:
        counts = self.tenant.catalog.counts()
        return counts["framed_bytes"] if self._is_lower else counts["bytes"]["ready"]

    def close(self) -> None:
        self._stopped.set()
        self.loop.run_until_complete(self._serving)
        self.loop.close()
        self._memory.clear()
        self._warm.close()


def name(number: int) -> bytes:
    return random.Random(number).randbytes(32)


class TierTests:
    """The contract. A subclass defines these; it may have more tests."""

    capacity_bytes: int  # 16 to 80 blocks
    is_lower = True  # the tier that is tested is the one below memory
    config = ""
    turns = effort(150, 600, 600)  # of the test of any order

    compressed = "0"  # as warm.compressed

    def make_policy(self) -> Policy:
        return make("lru")

    def make_lower(self) -> MakeLowerTier:
        raise NotImplementedError(type(self).__name__)

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[ServedTenant]:
        tier = ServedTenant(
            tmp_path, self.make_lower(), self.config, self.capacity_bytes, self.is_lower,
            self.make_policy, self.compressed,
        )  # fmt: skip
        yield tier
        tier.close()

    def blocks(self, tier: ServedTenant) -> int:
        return tier.capacity_bytes // BLOCK_BYTES

    def data(self, tier: ServedTenant, number: int) -> bytes:
        return random.Random(f"data {number}").randbytes(BLOCK_BYTES)

    def test_a_stored_block_is_returned_complete(self, tier: ServedTenant) -> None:
        for number in range(8):
            assert tier.put(Identity(key=name(number)), self.data(tier, number))
        for number in reversed(range(8)):
            assert tier.get(Identity(key=name(number))) == self.data(tier, number)

    def test_a_block_that_was_never_stored_is_not_found(self, tier: ServedTenant) -> None:
        assert tier.get(Identity(key=name(1))) is None
        assert not tier.hold(Identity(key=name(1)))

    @pytest.mark.parametrize("change", [{"space": "other"}, {"key": name(9)}], ids=str)
    def test_another_identity_is_another_block(
        self, tier: ServedTenant, change: dict[str, object]
    ) -> None:
        first = Identity(key=name(1))
        second = replace(first, **change)  # type: ignore[arg-type]
        assert tier.put(first, self.data(tier, 1))
        assert tier.get(second) is None
        assert tier.put(second, self.data(tier, 2))
        assert tier.get(first) == self.data(tier, 1)
        assert tier.get(second) == self.data(tier, 2)

    def test_a_block_put_again_keeps_its_bytes(self, tier: ServedTenant) -> None:
        identity = Identity(key=name(1))
        tier.put(identity, self.data(tier, 1))
        tier.put(identity, self.data(tier, 2))
        assert tier.get(identity) == self.data(tier, 1)

    def test_a_full_tier_evicts_old_blocks_for_new_ones(self, tier: ServedTenant) -> None:
        count = 4 * self.blocks(tier)
        for number in range(count):
            assert tier.put(Identity(key=name(number)), self.data(tier, number))
            assert tier.get(Identity(key=name(number))) == self.data(tier, number)
            assert tier.used_bytes() <= tier.capacity_bytes
        assert tier.get(Identity(key=name(0))) is None
        assert tier.used_bytes() >= 0.75 * tier.capacity_bytes

    def test_a_held_block_stays_under_pressure(self, tier: ServedTenant) -> None:
        held = Identity(key=name(10_000))
        tier.put(held, self.data(tier, 10_000))
        assert tier.hold(held)
        for number in range(FULL * self.blocks(tier)):
            tier.put(Identity(key=name(number)), self.data(tier, number))
        assert tier.get(held) == self.data(tier, 10_000)
        tier.release(held)
        for number in range(5000, 5000 + FULL * self.blocks(tier)):
            tier.put(Identity(key=name(number)), self.data(tier, number))
        assert tier.get(held) is None

    def test_a_tier_full_of_held_blocks_refuses_new_ones_and_keeps_the_held_ones(
        self, tier: ServedTenant
    ) -> None:
        held = []
        for number in range(4 * self.blocks(tier)):
            identity = Identity(key=name(number))
            if not tier.put(identity, self.data(tier, number)):
                break
            assert tier.hold(identity)
            held.append((identity, number))
        assert len(held) >= self.blocks(tier) // 2
        for identity, number in held:
            assert tier.get(identity) == self.data(tier, number)

    def test_a_forgotten_block_is_not_found_and_can_be_stored_again(
        self, tier: ServedTenant
    ) -> None:
        identity = Identity(key=name(1))
        tier.put(identity, self.data(tier, 1))
        tier.forget(identity)
        assert tier.get(identity) is None
        assert tier.put(identity, self.data(tier, 2))
        assert tier.get(identity) == self.data(tier, 2)

    def test_any_order_of_operations_gives_right_bytes_or_none(self, tier: ServedTenant) -> None:
        chance = random.Random(4)
        put: dict[Identity, int] = {}
        for turn in range(self.turns):
            identity = Identity(
                space=chance.choice(["space", "other"]),
                key=name(chance.randrange(3 * self.blocks(tier))),
            )
            found = tier.get(identity)
            if found is not None:
                assert found == self.data(tier, put[identity])
            if chance.random() < 0.2:
                tier.forget(identity)
                assert tier.get(identity) is None
            elif found is None and tier.put(identity, self.data(tier, turn)):
                put[identity] = turn
