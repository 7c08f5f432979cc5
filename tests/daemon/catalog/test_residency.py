"""Blocks that engines hold in their own caches: which leave memory first, and which return. No I/O."""

from __future__ import annotations

import random
import struct
from hashlib import sha256

import pytest

from kvtier.layout import space_id
from kvtier.wire import SLOT_BYTES
from kvtier_daemon.catalog import Catalog, SessionId, residency
from kvtier_daemon.catalog.policy import NAMED, make
from kvtier_kernels import Store
from support.specs import spec_of
from support.stores import key, keys

ME, YOU = SessionId(1), SessionId(2)
SPEC = spec_of("resident")
SIZE = SPEC.block_bytes
FRAME = struct.Struct("<IIIBBBB")


class Tenant:
    """A catalog with one space. Its disk keeps every frame."""

    def __init__(self, blocks: int, policy: str = "lru") -> None:
        self.store = Store()
        self.policy = make(policy)
        self.catalog = Catalog(self.store, self.policy)
        self.catalog.add_extent(blocks * SIZE, bytearray(blocks * SIZE // 4096 * 8))
        self.space = self.catalog.spaces.open(space_id(SPEC, "t"), SPEC)
        self.residency = self.catalog.blocks.residency
        self.page = 1

    def save(self, *names: int, write: bool = True) -> bytes:
        """Save a chain of blocks, and write it to the disk."""
        granted = self.catalog.reserve(ME, self.space, 0, 0, b"", keys(*names))
        n = len(granted.slots) // SLOT_BYTES
        if not n:
            return b""
        ids = self.catalog.commit(ME, granted.lease, 0, n)
        if write:
            self.write(ids)
        return ids

    def write(self, ids: bytes) -> None:
        plan = self.catalog.demotions.plan_write_through(ids)
        frames, digests = b"", b""
        for block in plan.blocks:
            frames += FRAME.pack(1, self.page, SIZE, 0, 1, 0, 0)
            digests += sha256(block.identity.key).digest()[:16]
            self.page += 2
        self.catalog.demotions.demoted(plan.ids, frames, digests)

    def enter(self, *names: int, session: SessionId = ME) -> None:
        self.residency.entered(session, self.space, 0, keys(*names))

    def drop(self, *names: int, session: SessionId = ME) -> bytes:
        return self.residency.left(session, self.space, 0, keys(*names))

    def read_back(self, ids: bytes) -> None:
        plan = self.catalog.promotions.plan_return(self.space, ids, 1000)
        assert plan.coming == len(plan.ids) // 4
        self.catalog.promotions.promoted(plan.ids)

    def in_memory(self, *names: int) -> list[int]:
        return [
            name for name in names
            if self.store.ready(self.store.present(self.space.index, 0, 0, key(name)))
        ]  # fmt: skip

    def check(self) -> None:
        self.store.check()
        assert len(self.policy) == self.catalog.counts()["blocks"]["ready"]


def test_a_block_that_an_engine_holds_and_the_disk_has_leaves_memory_first() -> None:
    tenant = Tenant(8)
    tenant.save(*range(8))
    tenant.enter(5, 6)
    tenant.save(100, 101)
    assert tenant.in_memory(*range(8)) == [0, 1, 2, 3, 4, 7]
    tenant.save(102)
    assert tenant.in_memory(*range(8)) == [0, 1, 2, 3, 4]  # then the tail of the oldest chain
    tenant.check()


def test_a_block_without_another_copy_does_not_leave_first() -> None:
    tenant = Tenant(8)
    tenant.save(*range(7))
    ids = tenant.save(50, write=False)
    tenant.enter(50)
    tenant.save(100)
    assert tenant.in_memory(50, 6) == [50]
    tenant.write(ids)
    tenant.save(101)
    assert tenant.in_memory(50, 5) == [5]


def test_a_block_that_lost_its_frame_does_not_leave_first() -> None:
    tenant = Tenant(8)
    tenant.save(*range(8))
    tenant.enter(7, 6)
    tenant.store.drop_segment(1)
    assert tenant.residency.victims(8) == b""
    assert tenant.residency.report()["leave_first_blocks"] == 0


def test_a_block_that_the_engine_drops_is_read_back() -> None:
    tenant = Tenant(8)
    tenant.save(*range(8))
    tenant.enter(0, 1, 2, 3)
    tenant.save(100, 101)
    assert tenant.in_memory(0, 1, 2, 3) == [2, 3]
    assert tenant.residency.report()["away_blocks"] == 2
    back = tenant.drop(3, 2, 1)
    assert len(back) == 4  # the others are in memory
    tenant.read_back(back)
    assert tenant.in_memory(0, 1, 2, 3) == [1, 2, 3]
    report = tenant.residency.report()
    assert (report["away_blocks"], report["returned_blocks"], report["blocks"]) == (1, 1, 1)
    tenant.check()


def test_a_return_never_evicts_the_only_copy_of_a_block() -> None:
    tenant = Tenant(4)
    tenant.save(*range(4))
    tenant.enter(*range(4))
    tenant.save(100, 101, 102, 103, write=False)
    assert tenant.in_memory(100, 101, 102, 103) == [100, 101, 102, 103]
    back = tenant.drop(*range(4))
    assert len(back) == 16
    tenant.read_back(back)
    assert tenant.in_memory(100, 101, 102, 103) == [100, 101, 102, 103]
    assert tenant.residency.report()["away_blocks"] == 0
    assert tenant.catalog.match(tenant.space, keys(*range(4))).coming == 4
    tenant.check()


def test_a_block_that_another_engine_still_holds_does_not_return() -> None:
    tenant = Tenant(8)
    tenant.save(*range(8))
    tenant.enter(4, 5)
    tenant.enter(5, session=YOU)
    tenant.save(100, 101)
    back = tenant.drop(4, 5)
    assert back == tenant.store.clean(tenant.store.resident(tenant.space.index, key(4)), False)
    assert len(tenant.drop(5, session=YOU)) == 4


def test_the_end_of_a_session_ends_what_its_engine_held() -> None:
    tenant = Tenant(8)
    tenant.save(*range(8))
    tenant.enter(*range(4))
    tenant.save(100, 101)
    assert tenant.residency.report()["away_blocks"] == 2
    tenant.catalog.end_session(ME, True)
    report = tenant.residency.report()
    assert (report["engines"], report["blocks"], report["bytes"]) == (0, 0, 0)
    tenant.catalog.expire_leases(1.0)
    report = tenant.residency.report()
    assert (report["away_blocks"], report["leave_first_blocks"]) == (0, 0)
    assert tenant.catalog.match(tenant.space, keys(0, 1)).coming == 2  # the disk still has them
    tenant.check()


def test_the_memory_for_residency_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "LIMIT_NAMES", 4)
    tenant = Tenant(8)
    tenant.save(*range(8))
    tenant.enter(0, 1, 2, 3)
    tenant.enter(4, 5)
    report = tenant.residency.report()
    assert (report["blocks"], report["refused_blocks"]) == (4, 2)
    tenant.drop(0, 1)
    tenant.enter(4, 5)
    assert tenant.residency.report()["blocks"] == 4


def test_a_block_that_an_engine_held_keeps_its_uses() -> None:
    """Its place is that of a block that was held: with LRU as recent as its return."""
    tenant = Tenant(4)
    tenant.save(0)
    tenant.save(1)
    tenant.save(2)
    tenant.save(3)
    tenant.enter(0)
    tenant.save(4)
    assert tenant.in_memory(0, 1, 2, 3, 4) == [1, 2, 3, 4]
    tenant.read_back(tenant.drop(0))
    assert tenant.in_memory(0, 1, 2, 3, 4) == [0, 2, 3, 4]
    tenant.save(5)
    assert tenant.in_memory(0, 2, 3, 4, 5) == [0, 3, 4, 5]


def test_a_request_that_reads_an_away_block_counts_as_any_read() -> None:
    tenant = Tenant(4)
    tenant.save(*range(4))
    tenant.enter(0, 1)
    tenant.save(100, 101)
    plan = tenant.catalog.promotions.plan(tenant.space, keys(0, 1, 2, 3), 100)
    tenant.catalog.promotions.promoted(plan.ids)
    assert tenant.in_memory(0, 1) == [0, 1]
    assert tenant.residency.report()["away_blocks"] == 0
    tenant.check()


def test_a_read_back_that_fails_leaves_the_block_on_disk() -> None:
    tenant = Tenant(4)
    tenant.save(*range(4))
    tenant.enter(0)
    tenant.save(100)
    plan = tenant.catalog.promotions.plan_return(tenant.space, tenant.drop(0), 100)
    tenant.catalog.promotions.unpromoted(plan.ids, "EIO")
    assert tenant.residency.report()["away_blocks"] == 0
    assert tenant.catalog.match(tenant.space, key(0)).coming == 1
    tenant.check()


def test_explain_says_how_many_engines_hold_a_block() -> None:
    tenant = Tenant(4)
    tenant.save(*range(4))
    assert "engines" not in tenant.catalog.explain(key(0), tenant.space)
    tenant.enter(0)
    tenant.enter(0, session=YOU)
    assert tenant.catalog.explain(key(0), tenant.space)["engines"] == 2


@pytest.mark.parametrize("policy", [name for name in NAMED if name != "auto"])
def test_random_operations_keep_catalog_and_policy_in_step(policy: str) -> None:
    """For every policy: no copy is lost, every block that may be evicted is a victim, and nothing is left
    when the engines are gone."""
    for seed in range(6):
        chance = random.Random(f"{policy} {seed}")
        tenant = Tenant(24, policy)
        held: dict[SessionId, set[int]] = {ME: set(), YOU: set()}
        saved: set[int] = set()
        for _ in range(250):
            who, name = chance.choice((ME, YOU)), chance.randrange(60)
            what = chance.random()
            if what < 0.35:
                if name not in saved:
                    write = chance.random() < 0.8
                    if tenant.save(name, write=write) and write:
                        saved.add(name)
            elif what < 0.6:
                tenant.enter(name, session=who)
                held[who].add(name)
            elif what < 0.75 and held[who]:
                dropped = chance.choice(sorted(held[who]))
                held[who].discard(dropped)
                back = tenant.drop(dropped, session=who)
                tenant.read_back(back)
            elif what < 0.85:
                found = tenant.catalog.load(who, tenant.space, key(name), 10.0, [0], 1.0)
                if found.lease:
                    tenant.catalog.release(who, found.lease)
            elif what < 0.92 and name in saved:
                plan = tenant.catalog.promotions.plan(tenant.space, key(name), 100)
                tenant.catalog.promotions.promoted(plan.ids)
            elif what < 0.95:
                tenant.catalog.forget(tenant.space, key(name))
                saved.discard(name)
            elif what < 0.97:
                held[who].clear()
                tenant.residency.end_session(who)
                tenant.residency.check()
            tenant.check()
            for one in saved:
                found = tenant.catalog.match(tenant.space, key(one), is_new=False)
                assert found.ready + found.coming == 1, one
        for who in (ME, YOU):
            tenant.residency.end_session(who)
        tenant.residency.check()
        report = tenant.residency.report()
        assert (report["away_blocks"], report["blocks"], report["leave_first_blocks"]) == (0, 0, 0)
