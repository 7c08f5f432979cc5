"""The watchdog's probe of memory: saves a block and loads it again.

It uses a catalog with an extent of its own, which counts for no tenant.
"""

from __future__ import annotations

import secrets
import time

from kvtier.errors import TierError
from kvtier.key import KEY_BYTES
from kvtier.layout import KvSpec, space_id
from kvtier.wire import SLOT
from kvtier_daemon.catalog import Catalog, SessionId
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.tiers.cold.disk import anonymous
from kvtier_daemon.tiers.warm import table_bytes
from kvtier_kernels import Store

PAGE = 4096
EXTENT_BYTES = 16 * PAGE  # a slab
LEASE_S = 10.0
WHO = SessionId(1)
NO_TENANT = "."  # not a valid name of a tenant
SPEC = KvSpec.dense(
    model="kvtier-probe", layers=1, kv_heads=1, head_dim=64, dtype="bfloat16", block_tokens=16,
    weights="rev:probe",
)  # fmt: skip


class Probe:
    """Of memory: the store, the policy, leases, slots, generations."""

    def __init__(self) -> None:
        self._catalog = Catalog(Store(), make("lru"), 0)
        self._memory, self._table = anonymous(EXTENT_BYTES), anonymous(table_bytes(EXTENT_BYTES))
        self._catalog.add_extent(EXTENT_BYTES, self._table)
        self._space = self._catalog.spaces.open(space_id(SPEC, NO_TENANT), SPEC, WHO)

    def put_and_get(self) -> None:
        """Save a block, find it, read it and forget it. TierError if the bytes differ."""
        key, block = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(SPEC.block_bytes)
        memory = memoryview(self._memory)
        granted = self._catalog.reserve(WHO, self._space, 0, 0, b"", key)
        if len(granted.slots) != SLOT.size:
            raise TierError("warm: the watchdog's probe found no room in its own memory")
        _, _, at, _ = SLOT.unpack(granted.slots)
        memory[at : at + len(block)] = block
        self._catalog.commit(WHO, granted.lease, 0, 1, b"")
        found = self._catalog.load(WHO, self._space, key, LEASE_S, [0], time.monotonic(), False)
        slots = b"".join(part.slots for part in found.parts)
        if found.ready != 1 or len(slots) != SLOT.size:
            raise TierError("warm: the watchdog's probe did not find its block")
        _, _, at, _ = SLOT.unpack(slots)
        if memory[at : at + len(block)] != block:
            raise TierError("warm: the watchdog's probe loaded other bytes than it saved")
        self._catalog.release(WHO, found.lease)
        self._catalog.forget(self._space, key)
