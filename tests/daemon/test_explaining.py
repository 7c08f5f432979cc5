"""Why blocks are where they are, as a daemon says it."""

from __future__ import annotations

import struct

from kvtier.catalog import Catalog, SessionId, Space
from kvtier.layout import space_id
from kvtier.policy.base import make
from kvtier_daemon.explaining import explain
from kvtier_daemon.tenant import Tenant
from kvtier_kernels import Store
from specs import spec_of
from stores import PAGE, key

ME, SLOTS = SessionId(1), 16
SPEC = spec_of("explained", layers=1, kv_heads=1, head_dim=64)
FRAME = struct.Struct("<IIIBBBB")


class Counting(Tenant):
    """How often it is looked whether somebody can ask for a space."""

    asked = 0

    @property
    def brings(self) -> bool:
        return True

    def asks_for(self, space: Space) -> bool:
        self.asked += 1
        return super().asks_for(space)


def test_whether_a_space_is_asked_for_is_looked_at_once_for_all_its_keys() -> None:
    """The loop waits: it is a digest of the whole description."""
    catalog = Catalog(Store(), make("lru"))
    catalog.add_extent(SLOTS * PAGE, bytearray(8 * SLOTS))
    tenant = Counting("t", b"", SLOTS * PAGE, catalog)
    spaces = [
        catalog.open(identity, SPEC, ME) for identity in (space_id(SPEC, "t"), b"another".ljust(32))
    ]
    ids = b""
    for number in range(SLOTS):
        granted = catalog.reserve(ME, spaces[number % 2], 0, 0, b"", key(number))
        ids += catalog.commit(ME, granted.lease, 0, 1)
    plan = catalog.cold.plan_write_through(ids)
    frames = b"".join(FRAME.pack(0, at, PAGE, 0, 1, 0, 0) for at in range(SLOTS))
    catalog.cold.demoted(plan.ids, frames, bytes(16 * SLOTS))
    for number in range(SLOTS):  # in their place
        catalog.reserve(ME, spaces[0], 0, 0, b"", key(100 + number))
    told = explain(tenant, 0, b"".join(map(key, range(SLOTS))), 0.0)
    assert [one["why"] for one in told["keys"]] == ["on_disk", "unasked"] * (SLOTS // 2)
    assert tenant.asked == len(spaces)
