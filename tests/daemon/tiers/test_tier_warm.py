"""The warm tier passes the conformance suite of tiers, with catalog, extents and generations."""

from __future__ import annotations

import select
from pathlib import Path

from conformance.tier_tests import Identity, TierTests
from kvtier import Group, KvSpec
from kvtier.layout import space_id
from kvtier_daemon.catalog import Catalog, KnownSpace, LeaseId, SessionId
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.catalog.reading import Held
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.warm import WarmTier
from kvtier_kernels import Mapping, Store, fresh, views

ME = SessionId(1)
MIB = 1 << 20


class Warm:
    """A tenant with real memory for its catalog, used block by block."""

    block_bytes = 2 * 2 * 4 * 64 * 16 * 2

    def __init__(self) -> None:
        self.capacity_bytes = 2 * MIB
        self._tier = WarmTier({"t": self.capacity_bytes}, MIB)
        self._catalog = Catalog(Store(), make("lru"))
        self._tenant = Tenant("t", bytes(32), self.capacity_bytes, self._catalog)
        self._memory: list[Mapping | None] = []
        self._tables: list[Mapping | None] = []
        self._held: dict[Identity, LeaseId] = {}
        event_fd = self._tier.start()
        while not self._tier.complete:
            select.select([event_fd], [], [], 10)
            for extent in self._tier.ready():
                self._tenant.add(extent)
                self._memory.append(Mapping(extent.fd, extent.nbytes, True))
                self._tables.append(extent.table)

    def _space(self, identity: Identity) -> KnownSpace:
        # Windows of one block: each block can be found alone, whichever blocks precede it.
        group = Group(kind="window", layers=2, kv_heads=4, head_dim=64, window_tokens=16, shards=2)
        spec = KvSpec.groups(
            [group, group],
            model=f"{identity.space}",
            dtype="bfloat16",
            block_tokens=16,
            weights="r",
        )
        space = self._catalog.open(space_id(spec, "t"), spec)
        self._catalog.spaces.settle(space)
        return space

    def _lease(self, identity: Identity) -> tuple[LeaseId, bytes]:
        """A lease on the block alone, and its slot; (0, b"") if it is not stored."""
        space = self._space(identity)
        store = self._catalog._store
        ids = store.present(space.index, identity.group, identity.shard, identity.key)
        if not ids:
            return LeaseId(0), b""
        held = [Held(identity.group, identity.shard, 0, ids)]
        lease = self._catalog._reading.hold(ME, space, held, 1, deadline=1e9)
        return lease.id, store.slots(ids)

    def put(self, identity: Identity, data: bytes) -> bool:
        space = self._space(identity)
        granted = self._catalog.reserve(
            ME, space, identity.group, identity.shard, b"", identity.key
        )
        if not granted.lease:
            return False
        (slot,) = views(self._memory, granted.slots, self.block_bytes, True)
        slot[:] = data
        self._catalog.commit(ME, granted.lease, 0, 1)
        return True

    def get(self, identity: Identity) -> bytes | None:
        lease, slots = self._lease(identity)
        if not lease:
            return None
        (slot,) = views(self._memory, slots, self.block_bytes, False)
        data = bytes(slot)
        assert fresh(self._tables, slots) == 1
        self._catalog.release(ME, lease)
        return data

    def hold(self, identity: Identity) -> bool:
        lease, _ = self._lease(identity)
        self._held[identity] = lease
        return bool(lease)

    def release(self, identity: Identity) -> None:
        self._catalog.release(ME, self._held.pop(identity))

    def forget(self, identity: Identity) -> None:
        store, space = self._catalog._store, self._space(identity)
        ids = store.present(space.index, identity.group, identity.shard, identity.key)
        store.forget(ids)
        self._catalog._policy.gone(ids)

    def used_bytes(self) -> int:
        return self._catalog.counts()["bytes"]["ready"]

    def close(self) -> None:
        self._memory.clear()
        self._tier.close()


class TestWarmTier(TierTests):
    def make_tier(self, folder: Path) -> Warm:
        return Warm()
