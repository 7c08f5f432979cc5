"""The daemon's explanations of where blocks are."""

from __future__ import annotations

import struct

from kvtier.layout import space_id
from kvtier_daemon.catalog import Catalog, KnownSpace, SessionId
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.serving.explain import explain
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.base import NullTier
from kvtier_kernels import Store
from support.specs import spec_of
from support.stores import PAGE, key

ME, SLOTS = SessionId(1), 16
SPEC = spec_of("explained", layers=1, kv_heads=1, head_dim=64)
FRAME = struct.Struct("<IIIBBBB")


class Readable(NullTier):
    is_on = True


class Counting(Tenant):
    """Counts the checks whether a client can open a space."""

    asked = 0

    def can_open(self, space: KnownSpace) -> bool:
        self.asked += 1
        return super().can_open(space)


def test_a_space_is_checked_once_for_all_its_keys() -> None:
    """The check hashes the whole description while the event loop waits."""
    catalog = Catalog(Store(), make("lru"))
    catalog.add_extent(SLOTS * PAGE, bytearray(8 * SLOTS))
    tenant = Counting("t", b"", SLOTS * PAGE, catalog, Readable())
    spaces = [
        catalog.spaces.open(identity, SPEC, ME)
        for identity in (space_id(SPEC, "t"), b"another".ljust(32))
    ]
    ids = b""
    for number in range(SLOTS):
        granted = catalog.reserve(ME, spaces[number % 2], 0, 0, b"", key(number))
        ids += catalog.commit(ME, granted.lease, 0, 1)
    plan = catalog.demotions.plan_write_through(ids)
    frames = b"".join(FRAME.pack(0, at, PAGE, 0, 1, 0, 0) for at in range(SLOTS))
    catalog.demotions.demoted(plan.ids, frames, bytes(16 * SLOTS))
    for number in range(SLOTS):  # evicts the earlier blocks
        catalog.reserve(ME, spaces[0], 0, 0, b"", key(100 + number))
    answer = explain(tenant, 0, b"".join(map(key, range(SLOTS))), 0.0)
    assert [one["why"] for one in answer["keys"]] == ["on_disk", "unasked"] * (SLOTS // 2)
    assert tenant.asked == len(spaces)
