"""Admission: which blocks are written while writes are limited, and the reason that is recorded for the
others."""

from __future__ import annotations

import struct
from array import array

from kvtier.layout import space_id
from kvtier_daemon.catalog import Catalog, SessionId
from kvtier_daemon.catalog.miss_log import BUDGET, ONCE, SLOW_DISK
from kvtier_daemon.catalog.policy import make
from kvtier_kernels import Store
from support.specs import spec_of
from support.stores import PAGE, key, look_up

ME = SessionId(1)
SLOTS = 32
SPEC = spec_of("admission", layers=1, kv_heads=1, head_dim=64)
FRAME = struct.Struct("<IIIBBBB")


class Tenant:
    def __init__(self, shut: bool = True) -> None:
        self.catalog = Catalog(Store(), make("lru"))
        self.catalog.add_extent(SLOTS * PAGE, bytearray(8 * SLOTS))
        self.space = self.catalog.spaces.open(space_id(SPEC, "t"), SPEC, ME)
        self.catalog.blocks.admission.turn_on()
        self.catalog.blocks.admission.strict = shut
        self.catalog.blocks.why_unwritten = ONCE if shut else SLOW_DISK

    def save(self, *names: int) -> bytes:
        ids = b""
        for name in names:
            granted = self.catalog.reserve(ME, self.space, 0, 0, b"", key(name))
            ids += self.catalog.commit(ME, granted.lease, 0, 1)
        return ids

    def written(self, limit: int = 128) -> set[bytes]:
        """The keys of the blocks that a mover would write next."""
        plan = self.catalog.demotions.plan(1 << 30, SLOTS * PAGE, limit)
        self.catalog.demotions.not_demoted(plan.ids)
        return {block.identity.key for block in plan.blocks}


def test_only_blocks_that_were_requested_again_are_written() -> None:
    tenant = Tenant()
    tenant.save(*range(20))
    assert tenant.written() == set()
    look_up(tenant.catalog, tenant.space, key(17))
    look_up(tenant.catalog, tenant.space, key(19))
    assert tenant.written(1) == {key(17)}
    assert tenant.written() == {key(17), key(19)}
    tenant.catalog.blocks.admission.strict = False
    assert len(tenant.written()) == 20


def test_a_block_that_is_saved_again_after_its_eviction_is_written() -> None:
    tenant = Tenant()
    tenant.save(1)
    tenant.save(*range(100, 100 + SLOTS))
    assert look_up(tenant.catalog, tenant.space, key(1)).ready == 0
    tenant.save(1)
    assert tenant.written() == {key(1)}


def test_a_block_that_is_called_important_is_worth_a_write() -> None:
    tenant = Tenant()
    tenant.save(1, 2, 3, 4)
    for name in (1, 3):
        look_up(tenant.catalog, tenant.space, key(name))
    for name, importance in ((1, 0.2), (2, 0.8), (4, 0.5)):
        tenant.catalog.hint(tenant.space, key(name), importance)
    assert tenant.written() == {key(1), key(2), key(3)}
    tenant.catalog.hint(tenant.space, key(2), 0.5)
    assert tenant.written() == {key(1), key(3)}


def test_write_through_applies_admission_too() -> None:
    tenant = Tenant()
    ids = tenant.save(1, 2)
    look_up(tenant.catalog, tenant.space, key(2))
    plan = tenant.catalog.demotions.plan_write_through(ids)
    assert [block.identity.key for block in plan.blocks] == [key(2)]
    tenant.catalog.demotions.not_demoted(plan.ids)


def test_blocks_evicted_without_a_write_are_counted_by_reason() -> None:
    tenant = Tenant()
    tenant.save(*range(SLOTS))
    for name in (0, 1, 2):
        look_up(tenant.catalog, tenant.space, key(name))
    tenant.save(*range(100, 100 + SLOTS))
    unwritten = tenant.catalog.blocks.unwritten
    assert (unwritten["once"], unwritten["slow_disk"]) == (SLOTS - 3, 3)
    assert tenant.catalog.explain(key(1))["why"] == "slow_disk"
    assert tenant.catalog.explain(key(9))["why"] == "once"
    tenant.catalog.blocks.why_unwritten = BUDGET
    tenant.save(*range(200, 210))
    assert unwritten["budget"] == 10
    assert tenant.catalog.explain(key(100))["why"] == "budget"
    assert sum(unwritten.values()) == tenant.catalog.blocks.evicted["capacity"]


def test_evicted_blocks_on_disk_are_not_counted_as_unwritten() -> None:
    tenant = Tenant(shut=False)
    ids = tenant.save(*range(SLOTS))
    plan = tenant.catalog.demotions.plan_write_through(ids)
    frames = b"".join(FRAME.pack(0, at, PAGE, 0, 1, 0, 0) for at in range(SLOTS))
    tenant.catalog.demotions.demoted(plan.ids, frames, bytes(16 * len(array("I", plan.ids))))
    tenant.save(*range(100, 100 + SLOTS))
    assert not sum(tenant.catalog.blocks.unwritten.values())
    assert tenant.catalog.explain(key(1))["why"] == "on_disk"
    tenant.catalog.segments.drop_segment(0)
    assert tenant.catalog.explain(key(1))["why"] == "lost"
