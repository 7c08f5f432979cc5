"""Movements between memory and disk: plans, their results, and the counters. No I/O."""

from __future__ import annotations

import itertools
import random
import struct
import time
from array import array
from functools import partial
from hashlib import sha256

import msgspec
import pytest

from kvtier import Group, KvSpec, Refused
from kvtier.frame import HAS_PARENT, Identity
from kvtier.key import token_keys
from kvtier.layout import space_id
from kvtier.wire import CAME, CHANGE, DISK, GRANTED, MEMORY, PRESENT, SLOT_BYTES, WENT, WRITING
from kvtier_daemon.catalog import Catalog, SessionId, SpaceWatch, demotion, holds
from kvtier_daemon.catalog.demotion import Demotion
from kvtier_daemon.catalog.frames import PLACE_BYTES
from kvtier_daemon.catalog.holds import HOLD_S, HOLD_SHARE
from kvtier_daemon.catalog.miss_log import EVICTED, SLOW_DISK
from kvtier_daemon.catalog.policy import Policy, make
from kvtier_daemon.catalog.promotion import Promotion
from kvtier_kernels import Store
from models.policies.lru import LruModel
from support.specs import spec_of
from support.stores import look_up

ME, YOU = SessionId(1), SessionId(2)
SPEC = spec_of()
SIZE = SPEC.block_bytes
FRAME = struct.Struct("<IIIBBBB")
ROW = struct.Struct("<32s32sIHHIIHHQQQ16sI")
counter = itertools.count()


@pytest.fixture(params=["native", "twin"], autouse=True)
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decision is the same over the native policy and over its model."""
    if request.param == "twin":
        monkeypatch.setitem(globals(), "make", lambda name: LruModel())


class Tenant:
    """A catalog, and a disk that is a dictionary from (segment, page) to blocks."""

    def __init__(self, blocks: int, spec: KvSpec = SPEC, block_bytes: int = SIZE) -> None:
        self.store = Store()
        self.policy: Policy = make("lru")
        self.catalog = Catalog(self.store, self.policy)
        self.catalog.add_extent(blocks * block_bytes, bytearray(blocks * block_bytes // 4096 * 8))
        self.space = self.catalog.spaces.open(space_id(spec, "t"), spec)
        self.disk: dict[tuple[int, int], tuple[Identity, bytes]] = {}
        self.page = 1

    def save(
        self, keys: bytes, parent: bytes = b"", group: int = 0, checksums: bool = False
    ) -> bytes:
        granted = self.catalog.reserve(ME, self.space, group, 0, parent, keys)
        n = len(granted.slots) // SLOT_BYTES
        sums = bytes(16 * n) if checksums else b""
        return self.catalog.commit(ME, granted.lease, 0, n, sums) if granted.lease else b""

    def put(self, segment: int, entries: list[tuple[Identity, bytes]]) -> bytes:
        """Frames of these blocks at consecutive positions of this segment."""
        frames = b""
        for entry in entries:
            self.disk[segment, self.page] = entry
            frames += FRAME.pack(segment, self.page, SIZE, 0, 1, bool(entry[1]), 0)
            self.page += 2
        return frames

    def write(self, plan: Demotion, segment: int = 1) -> int:
        frames = self.put(segment, [(one.identity, one.parent) for one in plan.blocks])
        digests = b"".join(sha256(one.identity.key).digest()[:16] for one in plan.blocks)
        return self.catalog.demotions.demoted(plan.ids, frames, digests)

    def read(self, plan: Promotion) -> None:
        """Verify that each frame contains its block, and that its digest is the one that was written."""
        keys = self.store.keys_of(plan.ids)
        for at, frame in enumerate(FRAME.iter_unpack(plan.frames)):
            identity, _ = self.disk[frame[0], frame[1]]
            assert identity.key == keys[32 * at : 32 * at + 32]
            assert identity.space == self.space.identity
            digest = sha256(identity.key).digest()[:16]
            assert plan.digests[16 * at : 16 * at + 16] == digest

    def move_out(self, keys: bytes, segment: int = 1) -> None:
        """Write the existing blocks of these keys, and evict them."""
        groups = range(len(self.space.spec.cache_groups))
        ids = b"".join(self.store.present(self.space.index, at, 0, keys) for at in groups)
        plan = self.catalog.demotions.plan_write_through(ids)
        assert self.write(plan, segment) == 0
        self.store.evict(ids)
        self.policy.left(ids)

    def found(self, keys: bytes) -> tuple[int, int]:
        found = self.catalog.match(self.space, keys, is_new=False)
        return found.ready, found.coming

    def rows(self, segment: int) -> bytes:
        """The segment's footer."""
        return b"".join(
            ROW.pack(
                one.key, parent, 0, one.group, one.shard, page, 2, 1, 0, SIZE, SIZE, page,
                sha256(one.key).digest()[:16], HAS_PARENT if parent else 0,
            )
            for (number, page), (one, parent) in sorted(self.disk.items())
            if number == segment
        )  # fmt: skip

    def check(self) -> None:
        self.store.check()
        counts = self.catalog.counts()["blocks"]
        reads = self.catalog.promotions.reading
        assert reads >= counts["promoting"]
        if not self.catalog.demotions.writing:
            held = array("I", self.catalog.holds._sizes).tobytes()
            assert len(self.policy) == counts["ready"] - self.store.ready(held)


def chain(blocks: int) -> bytes:
    """The keys of a new prompt."""
    start = next(counter) * 1_000_000
    return token_keys(bytes(32), list(range(start, start + 16 * blocks)), 16).packed


def test_a_catalog_that_never_wrote_to_a_disk_has_nothing_coming() -> None:
    tenant, keys = Tenant(8), chain(8)
    tenant.save(keys)
    tenant.save(chain(4))
    assert tenant.found(keys) == (4, 0)
    assert tenant.catalog.blocks.evicted["capacity"] == 4
    assert tenant.catalog.blocks.evicted["demoted"] == 0
    assert tenant.catalog.promotions.plan(tenant.space, keys, 100) == Promotion()


def test_the_coldest_are_written_and_stay_the_coldest() -> None:
    tenant, old, new = Tenant(8), chain(4), chain(4)
    tenant.save(old)
    tenant.save(new)
    victims = tenant.policy.victims(8)
    plan = tenant.catalog.demotions.plan(100 * SIZE, 3 * SIZE)
    assert plan.ids == victims[:12]
    tail_first = [old[at : at + 32] for at in (96, 64, 32)]
    assert [one.identity.key for one in plan.blocks] == tail_first
    assert [one.parent for one in plan.blocks] == [*tail_first[1:], old[:32]]
    assert plan.blocks[0].identity == Identity(tenant.space.identity, 0, 0, tail_first[0])
    assert {len(one.slot) for one in plan.blocks} == {SLOT_BYTES}
    assert tenant.catalog.demotions.writing == 3
    assert tenant.write(plan) == 0
    assert tenant.policy.victims(8) == victims
    tenant.save(chain(3))
    assert tenant.catalog.blocks.evicted["demoted"] == 3
    assert tenant.catalog.blocks.evicted["capacity"] == 0
    assert (tenant.found(old), tenant.found(new)) == ((1, 3), (4, 0))
    tenant.check()


def test_a_plan_writes_up_to_the_watermark_and_the_limit() -> None:
    tenant = Tenant(200)
    tenant.save(chain(200))
    victims = tenant.policy.victims(200)
    assert tenant.catalog.demotions.plan(0, 10 * SIZE).ids == b""
    assert tenant.catalog.demotions.plan(100 * SIZE, 0).ids == b""
    few = tenant.catalog.demotions.plan(100 * SIZE, 10 * SIZE, 3)
    assert len(few.blocks) == 3
    tenant.catalog.demotions.not_demoted(few.ids)
    large = tenant.catalog.demotions.plan(1, 10 * SIZE)
    assert large.ids == victims[:4], "one goes, however large"
    tenant.catalog.demotions.not_demoted(large.ids)
    first = tenant.catalog.demotions.plan(2 * SIZE + 1, 10 * SIZE)
    assert first.ids == victims[:8]
    second = tenant.catalog.demotions.plan(300 * SIZE, 6 * SIZE)
    assert second.ids == victims[8:24], "what is being written is as good as clean"
    assert (tenant.write(first), tenant.write(second)) == (0, 0)
    assert tenant.catalog.demotions.plan(100 * SIZE, 6 * SIZE).ids == b"", "they are clean"
    assert len(tenant.catalog.demotions.plan(300 * SIZE, 300 * SIZE).blocks) == 194
    tenant.check()


def test_a_watermark_reaches_over_many_small_blocks() -> None:
    tenant = Tenant(200)
    group = Group(layers=1, opaque_bytes=4096)
    spec = KvSpec.groups([group], model="s", dtype="int8", block_tokens=16, weights="rev:1")
    small = tenant.catalog.spaces.open(space_id(spec, "t"), spec)
    granted = tenant.catalog.reserve(ME, small, 0, 0, b"", chain(300))
    tenant.catalog.commit(ME, granted.lease, 0, 300)
    tenant.save(chain(100))
    plan = tenant.catalog.demotions.plan(1000 * SIZE, 300 * 4096)
    assert [one.space for one in plan.blocks] == [small] * 300


def test_a_plan_examines_a_limited_number_of_victims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demotion, "MOST_VICTIMS", 5)
    tenant = Tenant(200)
    tenant.save(chain(200))
    assert len(tenant.catalog.demotions.plan(300 * SIZE, 300 * SIZE).blocks) == 5


def test_blocks_that_are_being_written_are_not_evicted() -> None:
    tenant, keys = Tenant(4), chain(4)
    tenant.save(keys)
    plan = tenant.catalog.demotions.plan(2 * SIZE, 4 * SIZE)
    assert len(tenant.save(chain(4))) == 2 * 4
    tenant.catalog.demotions.not_demoted(plan.ids)
    assert tenant.catalog.demotions.writing == 0
    assert tenant.store.dirty(plan.ids) == plan.ids
    assert len(tenant.save(chain(4))) == 4 * 4
    assert tenant.catalog.blocks.evicted["capacity"] == 6
    tenant.check()


def test_writing_blocks_does_not_change_the_order_of_victims() -> None:
    tenant = Tenant(32)
    for _ in range(8):
        tenant.save(chain(4))
    victims = tenant.policy.victims(32)
    plans = [tenant.catalog.demotions.plan(4 * SIZE, 32 * SIZE) for _ in range(3)]
    assert b"".join(plan.ids for plan in plans) == victims[: 3 * 16]
    for plan in (plans[1], plans[0], plans[2]):
        tenant.write(plan)
    assert tenant.policy.victims(32) == victims
    tenant.check()


def test_blocks_that_are_used_during_their_write_become_recent() -> None:
    tenant, chains = Tenant(16), [chain(4) for _ in range(4)]
    for keys in chains:
        tenant.save(keys)
    victims = tenant.policy.victims(16)
    plan = tenant.catalog.demotions.plan(12 * SIZE, 12 * SIZE)
    first = tenant.catalog.load(ME, tenant.space, chains[0], 10.0, [0], now=0.0)
    tenant.catalog.release(ME, first.lease)
    second = tenant.catalog.load(ME, tenant.space, chains[1], 10.0, [0], now=0.0)
    tenant.catalog.match(tenant.space, chains[2])
    assert tenant.catalog.forget(tenant.space, chains[3]) == 4
    tenant.write(plan)
    matched, loaded = victims[32:48], victims[:16]
    assert tenant.policy.victims(16) == matched + loaded
    tenant.catalog.release(ME, second.lease)
    assert tenant.policy.victims(16) == matched + loaded + victims[16:32]
    tenant.check()


def test_a_save_evicts_other_blocks_while_the_coldest_are_written() -> None:
    tenant = Tenant(16)
    tenant.save(chain(16))
    plan = tenant.catalog.demotions.plan(12 * SIZE, 16 * SIZE)
    assert len(tenant.save(chain(3))) == 3 * 4
    tenant.catalog.demotions.not_demoted(plan.ids)
    assert tenant.catalog.blocks.evicted["capacity"] == 3
    tenant.check()


@pytest.mark.parametrize("why, lost", [(SLOW_DISK, 0), (EVICTED, 4)])
def test_blocks_on_disk_are_evicted_before_colder_ones_that_wait_for_their_write(
    why: int, lost: int
) -> None:
    tenant = Tenant(16)
    dirty, clean = chain(4), chain(12)
    tenant.save(dirty)
    tenant.write(tenant.catalog.demotions.plan_write_through(tenant.save(clean)))
    tenant.catalog.blocks.why_unwritten = why
    tenant.save(chain(4))
    assert tenant.catalog.blocks.evicted["capacity"] == lost
    assert tenant.found(dirty) == (4 - lost, 0) and sum(tenant.found(clean)) == 12
    tenant.save(chain(16))  # if nothing else is left, they go
    assert tenant.found(dirty) == (0, 0) and tenant.found(clean) == (0, 12)
    tenant.check()


def test_a_save_that_waits_evicts_no_block_that_is_being_written() -> None:
    tenant = Tenant(16)
    dirty, clean, keys = chain(12), chain(4), chain(8)
    ids = tenant.save(dirty)
    tenant.write(tenant.catalog.demotions.plan_write_through(tenant.save(clean)))
    catalog, blocks = tenant.catalog, tenant.catalog.blocks
    blocks.why_unwritten = SLOW_DISK

    def reserve(waits: bool) -> tuple[set[int], int]:
        granted = catalog.reserve(ME, tenant.space, 0, 0, b"", keys, waits=waits)
        if granted.lease:
            catalog.abort(ME, granted.lease)
        return set(granted.outcomes), len(granted.slots) // SLOT_BYTES

    first = catalog.demotions.plan_write_through(ids, 2)
    assert reserve(True) == ({WRITING}, 0)
    tenant.write(first)
    rest = catalog.demotions.plan_write_through(ids, 4)
    assert reserve(True) == ({WRITING}, 0), "room for six of eight"
    tenant.write(rest)
    assert blocks.evicted["demoted"] == 6, "the room for six is kept"
    last = catalog.demotions.plan_write_through(ids)
    assert reserve(True) == ({GRANTED}, 8)
    catalog.demotions.not_demoted(last.ids)
    assert not blocks.unwritten["slow_disk"] and not blocks.evicted["capacity"]
    tenant.save(chain(6))
    assert reserve(True) == ({GRANTED}, 8), "nothing is being written"
    assert blocks.unwritten["slow_disk"]
    tenant.check()


def test_a_save_waits_also_for_writes_of_blocks_that_a_reader_holds() -> None:
    tenant = Tenant(8)
    keys = chain(8)
    ids = tenant.save(keys)
    tenant.catalog.blocks.why_unwritten = SLOW_DISK
    plan = tenant.catalog.demotions.plan_write_through(ids, 2)
    tenant.catalog.blocks.lease([plan.ids])
    granted = tenant.catalog.reserve(ME, tenant.space, 0, 0, b"", chain(4), waits=True)
    assert granted.outcomes == bytes([WRITING]) * 4
    tenant.catalog.blocks.unlease(plan.ids)
    tenant.write(plan)
    assert tenant.catalog.blocks.planned_writes == 0
    assert not tenant.catalog.blocks.unwritten["slow_disk"]
    tenant.check()


def test_a_save_that_waits_gets_its_room_at_once_from_blocks_on_disk() -> None:
    tenant = Tenant(16)
    dirty, clean = tenant.save(chain(8)), tenant.save(chain(8))
    tenant.write(tenant.catalog.demotions.plan_write_through(clean))
    tenant.catalog.blocks.why_unwritten = SLOW_DISK
    plan = tenant.catalog.demotions.plan_write_through(dirty)
    granted = tenant.catalog.reserve(ME, tenant.space, 0, 0, b"", chain(8), waits=True)
    assert granted.outcomes == bytes([GRANTED]) * 8
    tenant.write(plan)
    tenant.check()


def test_a_plan_may_end_in_parts() -> None:
    tenant, keys = Tenant(8), chain(4)
    ids = tenant.save(keys, checksums=True)
    plan = tenant.catalog.demotions.plan_write_through(ids)
    assert plan.ids == ids and plan.blocks[0].checksum == bytes(16)
    frames = tenant.put(1, [(one.identity, one.parent) for one in plan.blocks])
    assert tenant.catalog.demotions.demoted(ids[:8], frames[:32]) == 0
    tenant.catalog.demotions.not_demoted(ids[8:])
    assert tenant.store.dirty(ids) == ids[8:]
    tenant.check()


def test_a_sweep_ends_after_the_last_id() -> None:
    tenant = Tenant(8)
    ids = tenant.save(chain(4))
    tenant.write(tenant.catalog.demotions.plan_write_through(ids))
    plan, at, _ = tenant.catalog.demotions.sweep(0, 1)
    assert (plan.ids, at) == (b"", 0)


def test_a_commit_is_written_through_once() -> None:
    tenant, keys = Tenant(8), chain(4)
    ids = tenant.save(keys)
    plan = tenant.catalog.demotions.plan_write_through(ids)
    assert plan.ids == ids and plan.blocks[0].checksum == b""
    assert [one.parent for one in plan.blocks[:2]] == [b"", keys[:32]]
    assert tenant.catalog.demotions.plan_write_through(ids).ids == b""
    tenant.catalog.demotions.not_demoted(plan.ids)
    plan = tenant.catalog.demotions.plan_write_through(ids + ids)
    assert plan.ids == ids, "an id may be given twice"
    tenant.write(plan)
    assert tenant.catalog.demotions.plan_write_through(ids).ids == b""
    tenant.check()


def test_a_block_forgotten_while_it_is_written_leaves_a_dead_frame() -> None:
    tenant, keys = Tenant(8), chain(2)
    ids = tenant.save(keys)
    plan = tenant.catalog.demotions.plan_write_through(ids)
    assert tenant.catalog.forget(tenant.space, keys[32:]) == 1
    assert tenant.write(plan, segment=3) == 1
    assert tenant.catalog.segments.take_dead_frames() == struct.pack("<II", 3, 3)
    assert tenant.catalog.segments.take_dead_frames() == b""
    assert tenant.catalog.counts()["blocks"]["doomed"] == 0
    assert tenant.found(keys) == (1, 0)
    tenant.check()


def test_a_prefix_on_disk_is_promoted_and_ready() -> None:
    tenant, keys = Tenant(8), chain(6)
    tenant.save(keys)
    tenant.move_out(keys[64:])
    found = tenant.catalog.load(ME, tenant.space, keys, 10.0, [0], now=0.0)
    assert (found.ready, found.coming) == (2, 4)
    plan = tenant.catalog.promotions.plan(tenant.space, keys, 100)
    assert len(plan.ids) == 4 * 4 and len(plan.slots) == 4 * SLOT_BYTES
    assert (plan.joined, plan.coming, tenant.catalog.promotions.reading) == (b"", 4, 4)
    tenant.read(plan)
    again = tenant.catalog.promotions.plan(tenant.space, keys, 100)
    assert (again.ids, again.joined) == (b"", plan.ids)
    assert tenant.catalog.promotions.promoted(plan.ids) == plan.ids
    assert tenant.found(keys) == (6, 0)
    assert tenant.catalog.promotions.reading == 0
    assert tenant.store.dirty(plan.ids) == b""
    tenant.catalog.release(ME, found.lease)
    tenant.check()
    tenant.save(chain(4))
    assert tenant.found(keys) == (4, 2), "the tail goes first, and to the disk only"


def test_promoted_blocks_are_the_most_recent_and_heads_outlive_tails() -> None:
    tenant, keys = Tenant(16), chain(4)
    tenant.save(keys)
    tenant.move_out(keys)
    other = tenant.save(chain(2))
    plan = tenant.catalog.promotions.plan(tenant.space, keys, 100)
    tenant.catalog.promotions.promoted(plan.ids)
    order = array("I", tenant.policy.victims(9)).tolist()
    assert order[:2] == array("I", other).tolist()[::-1]
    assert order[2:] == array("I", plan.ids).tolist()[::-1]


def test_a_load_of_what_is_on_disk_alone_says_that_it_is_coming() -> None:
    tenant, keys = Tenant(8), chain(4)
    tenant.save(keys)
    tenant.move_out(keys)
    found = tenant.catalog.load(ME, tenant.space, keys, 10.0, [0], now=0.0)
    assert (found.ready, found.coming, found.lease) == (0, 4, 0)


def test_a_promotion_never_evicts_its_own_chain() -> None:
    tenant, keys = Tenant(4), chain(6)
    tenant.save(keys[:128])
    tenant.move_out(keys[:32])
    tenant.save(chain(1))
    assert tenant.found(keys) == (0, 4)
    plan = tenant.catalog.promotions.plan(tenant.space, keys, 100)
    tenant.read(plan)
    tenant.catalog.promotions.promoted(plan.ids)
    assert tenant.found(keys) == (4, 0)
    tenant.check()


def test_promotions_in_progress_are_limited() -> None:
    tenant, keys, other = Tenant(32), chain(16), chain(8)
    tenant.save(keys)
    tenant.save(other)
    tenant.move_out(keys)
    tenant.move_out(other)
    plan = tenant.catalog.promotions.plan(tenant.space, keys, 6)
    assert plan.ids == tenant.store.resident(tenant.space.index, keys[: 6 * 32])
    assert plan.coming == 6
    none = tenant.catalog.promotions.plan(tenant.space, other, 6)
    assert (none.ids, none.coming) == (b"", 0)
    joins = tenant.catalog.promotions.plan(tenant.space, keys, 6)
    assert (joins.ids, joins.joined, joins.coming) == (b"", plan.ids, 6)
    tenant.catalog.promotions.promoted(plan.ids)
    assert tenant.found(keys) == (6, 10)
    assert len(tenant.catalog.promotions.plan(tenant.space, other, 6).ids) == 6 * 4
    tenant.check()


def test_a_limited_promotion_of_a_long_prefix_takes_its_head() -> None:
    tenant, keys = Tenant(300), chain(300)
    tenant.save(keys)
    tenant.move_out(keys)
    plan = tenant.catalog.promotions.plan(tenant.space, keys, 2)
    assert (len(plan.ids), plan.coming) == (2 * 4, 2)
    many = tenant.catalog.promotions.plan(tenant.space, keys, 202)
    assert 200 - 26 <= len(many.ids) // 4 <= 200


def sharded_on_disk(blocks: int, memory: int, shards: int) -> tuple[Tenant, bytes]:
    """A tenant with room for `memory` blocks, and a chain that is on disk in all shards."""
    spec = KvSpec(
        model="sharded", weights="rev:1", dtype="bfloat16", block_tokens=16,
        cache_groups=(Group(layers=1, kv_heads=1, head_dim=64, shards=shards),),
    ).checked()  # fmt: skip
    tenant, keys = Tenant(memory, spec, spec.group_block_bytes(0)), chain(blocks)
    for shard in range(shards):
        granted = tenant.catalog.reserve(ME, tenant.space, 0, shard, b"", keys)
        ids = tenant.catalog.commit(ME, granted.lease, 0, blocks)
        assert tenant.write(tenant.catalog.demotions.plan_write_through(ids)) == 0
        tenant.store.evict(ids)
        tenant.policy.left(ids)
    assert tenant.found(keys) == (0, blocks)
    return tenant, keys


def test_a_limited_promotion_says_how_many_blocks_come_in_all_shards() -> None:
    tenant, keys = sharded_on_disk(16, 16 * 4, 4)
    plan = tenant.catalog.promotions.plan(tenant.space, keys, 6 * 4)
    assert 4 <= plan.coming <= 6 and len(plan.ids) // 4 == 4 * plan.coming
    tenant.catalog.promotions.promoted(plan.ids)
    assert tenant.found(keys) == (plan.coming, 16 - plan.coming)


def test_no_block_is_read_without_room_for_all_its_shards() -> None:
    tenant, keys = sharded_on_disk(2, 4, 4)
    granted = tenant.catalog.reserve(ME, tenant.space, 0, 0, b"", chain(1))
    assert granted.slots
    plan = tenant.catalog.promotions.plan(tenant.space, keys, 100)
    assert (plan.ids, plan.coming, tenant.catalog.promotions.reading) == (b"", 0, 0)
    tenant.catalog.abort(ME, granted.lease)
    tenant.check()
    plan = tenant.catalog.promotions.plan(tenant.space, keys[:32], 100)
    assert (len(plan.ids) // 4, plan.coming) == (4, 1)


def test_a_prefix_that_is_shortened_for_lack_of_room_reads_only_its_own_blocks() -> None:
    """A request is answered when its prefix is ready: a read that goes on would hold its block."""
    tenant, keys = sharded_on_disk(2, 4, 2)
    granted = tenant.catalog.reserve(ME, tenant.space, 0, 0, b"", chain(1))
    plan = tenant.catalog.promotions.plan(tenant.space, keys, 100)
    assert (len(plan.ids) // 4, plan.coming, len(plan.sizes)) == (2, 1, 2)
    assert tenant.store.keys_of(plan.ids) == 2 * keys[:32]
    joins = tenant.catalog.promotions.plan(tenant.space, keys, 100)
    assert (joins.ids, joins.coming, joins.joined) == (b"", 1, plan.ids)
    tenant.catalog.promotions.promoted(plan.ids)
    assert tenant.found(keys) == (1, 1)
    tenant.catalog.abort(ME, granted.lease)
    assert tenant.catalog.promotions.reading == 0
    tenant.check()


def test_a_promotion_with_little_room_takes_the_head() -> None:
    tenant, keys = Tenant(4), chain(4)
    tenant.save(keys)
    tenant.move_out(keys)
    held = chain(2)
    tenant.save(held)
    lease = tenant.catalog.load(ME, tenant.space, held, 10.0, [0], now=0.0).lease
    plan = tenant.catalog.promotions.plan(tenant.space, keys, 100)
    assert (len(plan.ids), plan.coming) == (2 * 4, 2)
    tenant.catalog.promotions.promoted(plan.ids)
    assert tenant.found(keys) == (2, 2)
    tenant.catalog.release(ME, lease)
    tenant.check()


def test_failed_reads_are_counted_by_reason() -> None:
    tenant, keys = Tenant(8), chain(4)
    tenant.save(keys)
    tenant.move_out(keys)
    tenant.save(chain(2))
    plan = tenant.catalog.promotions.plan(tenant.space, keys, 100)
    tenant.catalog.promotions.unpromoted(plan.ids[:8], "deadline")
    tenant.catalog.promotions.promoted(plan.ids[12:])
    tenant.catalog.promotions.spoilt(plan.ids[8:12], "damaged")
    assert tenant.catalog.promotions.failed == {"deadline": 2, "damaged": 1}
    assert tenant.catalog.blocks.evicted["spoilt"] == 1
    assert tenant.catalog.segments.take_dead_frames() == struct.pack("<II", 1, 5)
    assert tenant.catalog.promotions.reading == 0
    assert tenant.found(keys) == (0, 2)
    victims = tenant.policy.victims(1)
    assert victims == plan.ids[12:], "what no match can reach goes first"
    tenant.check()


def test_a_miss_of_blocks_on_disk_has_its_own_reason() -> None:
    tenant, keys = Tenant(8), chain(4)
    tenant.save(keys)
    tenant.move_out(keys)
    look_up(tenant.catalog, tenant.space, keys)
    plan = tenant.catalog.promotions.plan(tenant.space, keys[:32], 100)
    look_up(tenant.catalog, tenant.space, keys[:64])
    tenant.catalog.promotions.promoted(plan.ids)
    assert tenant.catalog.usage.miss_tokens == {"cold": 4 * 16, "promoting": 2 * 16}


def test_a_save_of_blocks_on_disk_is_answered_present() -> None:
    tenant, keys = Tenant(8), chain(4)
    tenant.save(keys)
    tenant.move_out(keys[64:])
    longer = keys + chain(1)
    granted = tenant.catalog.reserve(ME, tenant.space, 0, 0, b"", longer)
    assert granted.outcomes == bytes([PRESENT] * 4 + [GRANTED])
    tenant.catalog.commit(ME, granted.lease, 0, 1)
    assert tenant.found(longer) == (2, 3)
    tenant.check()


def test_forgetting_reaches_the_disk() -> None:
    tenant, keys = Tenant(8), chain(4)
    tenant.save(keys)
    tenant.move_out(keys)
    plan = tenant.catalog.promotions.plan(tenant.space, keys[:64], 100)
    assert tenant.catalog.forget(tenant.space, keys) == 4
    assert tenant.found(keys) == (0, 0)
    died = struct.iter_unpack("<II", tenant.catalog.segments.take_dead_frames())
    assert sorted(died) == [(1, 1), (1, 3), (1, 5), (1, 7)]
    assert tenant.catalog.promotions.reading == 2
    assert tenant.catalog.promotions.promoted(plan.ids) == b""
    assert tenant.catalog.blocks.evicted["forgotten"] == 4
    assert tenant.catalog.counts()["free_bytes"] == 8 * SIZE
    tenant.check()


def test_used_blocks_of_a_segment_get_a_second_chance() -> None:
    tenant, used, unused = Tenant(16), chain(4), chain(4)
    tenant.save(used)
    tenant.save(unused)
    tenant.move_out(used)
    tenant.move_out(unused)
    tenant.found(used)
    rescue = tenant.catalog.segments.reclaim(1, keep=3)
    assert rescue.ids == tenant.store.resident(tenant.space.index, used)[:12]
    tenant.catalog.forget(tenant.space, used[:32])
    entries = [tenant.disk[1, page] for _, page, *_ in FRAME.iter_unpack(rescue.frames)]
    frames = tenant.put(2, entries)
    assert tenant.catalog.segments.rescued(rescue.ids, rescue.frames, frames) == 1
    assert tenant.catalog.segments.take_dead_frames()[8:] == frames[:8]
    assert tenant.catalog.segments.drop_segment(1) == 5
    assert tenant.catalog.blocks.evicted["lost"] == 5
    ids, flags = tenant.store.in_segment(2)
    assert (ids, flags) == (rescue.ids[4:], bytes([6, 6]))
    plan = tenant.catalog.promotions.plan(tenant.space, used[32:], 100)
    tenant.read(plan)
    assert len(plan.ids) == 8
    assert tenant.catalog.segments.reclaim(2, keep=9).ids == b"", (
        "what is being read is in memory soon"
    )
    tenant.check()


def test_important_blocks_of_a_segment_get_a_second_chance_once() -> None:
    tenant, chains = Tenant(32), [chain(4) for _ in range(4)]
    little, much, neither, unhinted = chains
    for keys in chains:
        tenant.save(keys)
        tenant.move_out(keys)
    for keys in (little, unhinted):
        tenant.found(keys)
    for keys, importance in ((little, 0.1), (much, 0.9), (neither, 0.5)):
        assert tenant.catalog.hint(tenant.space, keys, importance) == 4
    rescue = tenant.catalog.segments.reclaim(1, keep=99)
    ids = tenant.store.resident(tenant.space.index, much + unhinted + little)
    assert sorted(array("I", rescue.ids)) == sorted(array("I", ids))
    assert tenant.catalog.segments.reclaim(1, keep=99).ids == b"", "a hint counts for one copy"
    tenant.check()


def test_blocks_of_no_importance_get_no_second_chance_until_another_hint_comes() -> None:
    tenant, ended, goes_on, again = Tenant(32), chain(4), chain(4), chain(4)
    for keys in (ended, goes_on, again):
        tenant.save(keys)
        tenant.move_out(keys)
        tenant.found(keys)
        tenant.catalog.hint(tenant.space, keys, 0.1 if keys is goes_on else 0.0)
    tenant.catalog.hint(tenant.space, again, 0.9)
    rescue = tenant.catalog.segments.reclaim(1, keep=99)
    ids = tenant.store.resident(tenant.space.index, goes_on + again)
    assert sorted(array("I", rescue.ids)) == sorted(array("I", ids))
    assert tenant.catalog.segments.drop_segment(1) == 12
    tenant.check()


def test_a_request_that_finds_blocks_ends_their_hint_of_no_importance() -> None:
    tenant, used, unused = Tenant(32), chain(4), chain(4)
    for keys in (used, unused):
        tenant.save(keys)
        tenant.move_out(keys)
        tenant.found(keys)
        tenant.catalog.hint(tenant.space, keys, 0.0)
    found = tenant.catalog.match(tenant.space, used)
    assert (found.ready, found.coming) == (0, 4)
    tenant.catalog.usage.count_lookup(tenant.space, used, 0, 3)  # the last one is not read
    rescue = tenant.catalog.segments.reclaim(1, keep=99)
    ids = tenant.store.resident(tenant.space.index, used)[: 3 * 4]
    assert sorted(array("I", rescue.ids)) == sorted(array("I", ids))
    tenant.check()


def test_blocks_in_memory_are_written_again_after_their_segment_was_dropped() -> None:
    tenant, keys = Tenant(8), chain(4)
    ids = tenant.save(keys)
    tenant.write(tenant.catalog.demotions.plan_write_through(ids))
    tenant.found(keys)
    assert tenant.catalog.segments.reclaim(1, keep=9).ids == b""
    assert tenant.catalog.segments.drop_segment(1) == 0
    assert tenant.found(keys) == (4, 0)
    assert len(tenant.catalog.demotions.plan(100 * SIZE, 100 * SIZE).blocks) == 4


def test_blocks_below_those_of_a_dropped_segment_are_evicted_first() -> None:
    tenant, keys = Tenant(8), chain(4)
    tenant.save(chain(2))
    tenant.save(keys)
    tenant.move_out(keys[:32])
    below = tenant.store.present(tenant.space.index, 0, 0, keys)
    assert tenant.catalog.segments.drop_segment(1) == 1
    first = array("I", tenant.policy.victims(3))
    assert sorted(first) == sorted(array("I", below))
    tenant.check()


def test_a_restart_finds_what_the_footers_list() -> None:
    before, keys = Tenant(8), chain(4)
    before.save(keys)
    before.move_out(keys)
    after = Tenant(8)
    identity = before.space.identity
    assert after.catalog.segments.restore(identity, SPEC, before.rows(1), 1) == (4, 0)
    after.disk = before.disk
    assert after.found(keys) == (0, 4)
    plan = after.catalog.promotions.plan(after.space, keys, 100)
    after.read(plan)
    after.catalog.promotions.promoted(plan.ids)
    assert after.found(keys) == (4, 0)
    assert after.save(keys + chain(1)) != b""
    after.check()
    assert not after.catalog.segments.take_dead_frames()
    assert after.catalog.segments.restore(identity, SPEC, before.rows(1), 2) == (0, 0)
    assert len(after.catalog.segments.take_dead_frames()) == 4 * PLACE_BYTES, (
        "of two frames of a block one is nothing"
    )


def test_a_space_without_usable_rows_in_a_segment_is_not_kept() -> None:
    tenant = Tenant(8)
    other = spec_of("other")
    rows = bytearray(ROW.size)
    struct.pack_into("<HH", rows, 68, 9, 0)
    assert tenant.catalog.segments.restore(space_id(other, "t"), other, bytes(rows), 1) == (0, 1)
    assert len(tenant.catalog.spaces) == 1
    tenant.store.check()


def test_a_space_is_opened_only_with_its_own_description() -> None:
    """A damaged description gave a window of one block instead of five."""
    before = Tenant(8)
    before.save(chain(4))
    before.write(before.catalog.demotions.plan(4 * SIZE, 4 * SIZE))
    identity, wrong = before.space.identity, msgspec.structs.replace(SPEC, model="another")
    after = Tenant(8)
    assert after.catalog.segments.restore(identity, wrong, before.rows(1), 1) == (0, 4), (
        "it is open as it is"
    )
    late = Catalog(Store(), make("lru"))
    assert late.segments.restore(identity, wrong, before.rows(1), 1) == (4, 0)
    space = late.spaces.open(identity, SPEC, ME)
    assert space.spec == SPEC and late.match(space, chain(4)).coming == 0
    late.end_session(ME, True)
    assert late.spaces.open(identity, SPEC, ME).spec == SPEC


def test_groups_that_need_only_their_trailing_blocks_are_promoted_alone() -> None:
    groups = [
        Group(layers=2, kv_heads=2, head_dim=64),
        Group(kind="window", layers=2, kv_heads=2, head_dim=64, window_tokens=32),
    ]
    spec = KvSpec.groups(groups, model="w", dtype="bfloat16", block_tokens=16, weights="rev:1")
    tenant, keys = Tenant(64, spec), chain(8)
    for group in range(2):
        tenant.save(keys, group=group)
    tenant.move_out(keys)
    assert tenant.found(keys) == (0, 8)
    plan = tenant.catalog.promotions.plan(tenant.space, keys, 100)
    assert len(plan.ids) == 4 * (8 + 2)
    tenant.catalog.promotions.promoted(plan.ids)
    assert tenant.found(keys) == (8, 0)
    tenant.move_out(keys)
    few = tenant.catalog.promotions.plan(tenant.space, keys, 6)
    assert len(few.ids) == 4 * 6, "four blocks and a window of two"
    tenant.catalog.promotions.promoted(few.ids)
    assert tenant.found(keys)[0] == 4
    tenant.check()


@pytest.mark.parametrize("seed", range(6))
def test_reads_return_their_planned_blocks_after_random_operations(seed: int) -> None:
    rnd = random.Random(seed)
    tenant = Tenant(24)
    chains = [chain(rnd.randint(1, 9)) for _ in range(8)]
    reads: list[bytes] = []
    writes: list[Demotion] = []
    segment = 4
    for now in range(300):
        keys = rnd.choice(chains)
        act = rnd.randrange(11)
        if act < 2:
            tenant.save(keys)
        elif act == 2:
            writes.append(tenant.catalog.demotions.plan(rnd.randint(1, 9) * SIZE, 12 * SIZE))
        elif act == 3 and writes:
            plan = writes.pop(rnd.randrange(len(writes)))
            if rnd.random() < 0.8:
                tenant.write(plan, segment)
            else:
                tenant.catalog.demotions.not_demoted(plan.ids)
        elif act < 6:
            promotion = tenant.catalog.promotions.plan(tenant.space, keys, 8)
            tenant.read(promotion)
            reads += [promotion.ids] if promotion.ids else []
        elif act == 6 and reads:
            ids = reads.pop(rnd.randrange(len(reads)))
            waiting = rnd.sample([(ME, 1), (ME, 2), (YOU, 1)], rnd.randrange(3))
            rnd.choice(
                [
                    partial(tenant.catalog.promotions.promoted, waiting=waiting, now=now / 4),
                    tenant.catalog.promotions.promoted,
                    lambda ids: tenant.catalog.promotions.unpromoted(ids, "deadline"),
                    lambda ids: tenant.catalog.promotions.spoilt(ids, "damaged"),
                ]
            )(ids)
        elif act == 7 and rnd.random() < 0.3:
            tenant.catalog.forget(tenant.space, keys[: 32 * rnd.randint(1, 3)])
        elif act == 8 and rnd.random() < 0.4:
            segment += 1
            rescue = tenant.catalog.segments.reclaim(segment - 3, keep=2)
            entries = [
                tenant.disk[number, page] for number, page, *_ in FRAME.iter_unpack(rescue.frames)
            ]
            tenant.catalog.segments.rescued(rescue.ids, rescue.frames, tenant.put(segment, entries))
            tenant.catalog.segments.drop_segment(segment - 3)
            assert tenant.store.in_segment(segment - 3) == (b"", b"")
        elif act == 9:
            tenant.catalog.holds.end((ME, rnd.randint(1, 2)))
        elif act == 10:
            tenant.catalog.expire_leases(now / 4)
            if rnd.random() < 0.2:
                tenant.catalog.end_session(rnd.choice([ME, YOU]), gone=True)
        ready, coming = tenant.found(keys)
        assert 0 <= ready <= ready + coming <= len(keys) // 32
        tenant.check()
    for ids in reads:
        tenant.catalog.promotions.promoted(ids)
    for plan in writes:
        tenant.catalog.demotions.not_demoted(plan.ids)
    tenant.catalog.expire_leases(now / 4 + HOLD_S)
    assert len(tenant.catalog.holds) == tenant.catalog.holds.nbytes == 0
    assert tenant.catalog.promotions.reading == tenant.catalog.demotions.writing == 0
    assert tenant.catalog.counts()["blocks"]["promoting"] == 0
    tenant.check()
    assert tenant.catalog.blocks.evicted["demoted"]


# --- blocks held for waiting requests ---------------------------------------------------------


def waits_for(tenant: Tenant, keys: bytes, *requests: tuple[int, int]) -> bytes:
    """Save these blocks, move them to the disk, and read them for these requests."""
    tenant.save(keys)
    tenant.move_out(keys)
    plan = tenant.catalog.promotions.plan(tenant.space, keys, 100)
    assert tenant.catalog.promotions.promoted(plan.ids, requests, 100.0) == plan.ids
    tenant.check()
    return plan.ids


def test_blocks_read_for_a_waiting_request_outlive_prefetched_blocks() -> None:
    tenant, waits, other = Tenant(16), chain(4), chain(4)
    waits_for(tenant, waits, (ME, 1))
    waits_for(tenant, other)
    tenant.save(chain(12))
    assert (tenant.found(waits), tenant.found(other)) == ((4, 0), (0, 4))
    tenant.check()


@pytest.mark.parametrize("how", ["answered", "session", "time"])
def test_a_hold_ends_with_its_request(how: str) -> None:
    tenant, keys = Tenant(16), chain(4)
    waits_for(tenant, keys, (ME, 1))
    tenant.catalog.holds.end((ME, 2))
    tenant.catalog.holds.end((YOU, 1))
    tenant.catalog.end_session(YOU, gone=True)
    tenant.catalog.expire_leases(99.0 + HOLD_S)
    assert (len(tenant.catalog.holds), tenant.catalog.holds.nbytes) == (4, 4 * SIZE)
    if how == "answered":
        tenant.catalog.holds.end((ME, 1))
    elif how == "session":
        tenant.catalog.end_session(ME, gone=True)
    else:
        tenant.catalog.expire_leases(100.0 + HOLD_S)
    assert (len(tenant.catalog.holds), tenant.catalog.holds.nbytes) == (0, 0)
    tenant.check()
    tenant.save(chain(16))
    assert tenant.found(keys) == (0, 4)


def test_each_new_block_restarts_the_time_of_a_hold() -> None:
    tenant, keys = Tenant(16), chain(4)
    ids = waits_for(tenant, keys[:64], (ME, 1))
    waits_for(tenant, chain(2), (ME, 2))
    tenant.save(keys)
    tenant.move_out(keys[64:])
    plan = tenant.catalog.promotions.plan(tenant.space, keys, 100)
    assert len(plan.ids) == len(ids)
    tenant.catalog.promotions.promoted(plan.ids, [(ME, 1)], 103.0)
    tenant.catalog.expire_leases(100.0 + HOLD_S)
    assert len(tenant.catalog.holds) == 4
    tenant.catalog.expire_leases(103.0 + HOLD_S)
    assert len(tenant.catalog.holds) == 0


def test_a_block_is_held_until_all_requests_that_wait_for_it_are_answered() -> None:
    tenant, keys = Tenant(16), chain(4)
    waits_for(tenant, keys, (ME, 1), (YOU, 1))
    assert tenant.catalog.holds.nbytes == 4 * SIZE
    tenant.catalog.holds.end((ME, 1))
    tenant.save(chain(16))
    assert tenant.found(keys) == (4, 0)
    tenant.catalog.holds.end((YOU, 1))
    tenant.save(chain(16))
    assert tenant.found(keys) == (0, 4)
    tenant.check()


def test_holds_are_limited_to_a_share_of_the_memory() -> None:
    """The rest is available to saves, however many requests wait."""
    tenant = Tenant(16)
    for number in range(3):
        waits_for(tenant, chain(4), (ME, number))
    assert tenant.catalog.holds.nbytes == 16 * SIZE * HOLD_SHARE
    granted = tenant.catalog.reserve(YOU, tenant.space, 0, 0, b"", chain(16))
    assert granted.outcomes.count(GRANTED) == 8
    tenant.catalog.abort(YOU, granted.lease)
    tenant.catalog.end_session(ME, gone=True)
    granted = tenant.catalog.reserve(YOU, tenant.space, 0, 0, b"", chain(16))
    assert granted.outcomes.count(GRANTED) == 16, "a slot is missing"


def test_more_can_be_held_when_the_memory_has_grown() -> None:
    tenant = Tenant(8)
    waits_for(tenant, chain(4), (ME, 1))
    waits_for(tenant, chain(4), (ME, 2))
    assert tenant.catalog.holds.nbytes == 8 * SIZE * HOLD_SHARE
    tenant.catalog.add_extent(8 * SIZE, bytearray(8 * SIZE // 4096 * 8))
    waits_for(tenant, chain(4), (ME, 3))
    assert tenant.catalog.holds.nbytes == 16 * SIZE * HOLD_SHARE


def test_holds_are_limited_to_what_one_call_can_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "LIMIT_HELD", 5)
    tenant, keys = Tenant(16), chain(4)
    waits_for(tenant, keys, (ME, 1), (ME, 2))
    assert len(tenant.catalog.holds) == 2
    tenant.catalog.holds.end((ME, 1))
    waits_for(tenant, chain(4), (ME, 3))
    assert len(tenant.catalog.holds) == 2 + 3
    tenant.catalog.end_session(ME, gone=True)
    assert len(tenant.catalog.holds) == 0
    tenant.check()


def test_a_forget_ends_holds() -> None:
    tenant, keys = Tenant(8), chain(4)
    waits_for(tenant, keys, (ME, 1))
    tenant.catalog.forget(tenant.space, keys[64:96])
    assert len(tenant.catalog.holds) == 0
    assert tenant.catalog.counts()["free_bytes"] == 5 * SIZE
    tenant.check()


# --- change feeds ------------------------------------------------------------------------------


def watch_of(
    tenant: Tenant, session: SessionId = ME, woken: list[bool] | None = None
) -> SpaceWatch:
    space = tenant.catalog.spaces.open(tenant.space.identity, tenant.space.spec, session)
    return tenant.catalog.watch(session, space, lambda: (woken or []).append(True))


def changes_of(watch: SpaceWatch) -> list[tuple[int, int, bytes]]:
    """Event, tier and key of each change. All of them are of group 0 and shard 0."""
    missed, taken = watch.take(1 << 20)
    found = [(what, tier, key) for what, tier, _, _, key in CHANGE.iter_unpack(taken)]
    assert not missed and len(taken) == CHANGE.size * len(found)
    return found


def keys_in(keys: bytes) -> list[bytes]:
    return [keys[at : at + 32] for at in range(0, len(keys), 32)]


def test_a_feed_reports_saved_and_forgotten_blocks() -> None:
    tenant, keys = Tenant(8), chain(2)
    watch = watch_of(tenant)
    tenant.save(keys)
    assert changes_of(watch) == [(CAME, MEMORY, key) for key in keys_in(keys)]
    tenant.catalog.forget(tenant.space, keys)
    went = [(WENT, tier, key) for tier in (MEMORY, DISK) for key in keys_in(keys)]
    assert sorted(changes_of(watch)) == sorted(went)


def test_a_feed_does_not_report_blocks_of_another_space() -> None:
    tenant = Tenant(8)
    watch = watch_of(tenant)
    other = spec_of("other")
    space = tenant.catalog.spaces.open(space_id(other, "t"), other, ME)
    granted = tenant.catalog.reserve(ME, space, 0, 0, b"", chain(2))
    tenant.catalog.commit(ME, granted.lease, 0, 2)
    assert changes_of(watch) == []


def test_only_sessions_that_opened_a_space_may_watch_it() -> None:
    tenant = Tenant(8)
    with pytest.raises(Refused, match="not open"):
        tenant.catalog.watch(YOU, tenant.space, lambda: None)


def test_a_watch_ends_with_its_session() -> None:
    tenant = Tenant(8)
    watch = watch_of(tenant, YOU)
    tenant.catalog.end_session(YOU, gone=True)
    tenant.save(chain(1))
    assert changes_of(watch) == [] and not tenant.catalog._changes.watched


def test_a_full_feed_drops_changes_and_reports_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier_daemon.catalog.watch.LIMIT_KEPT", 5)
    tenant, keys, woken = Tenant(16), chain(8), [True]
    watch = watch_of(tenant, woken=woken)
    tenant.save(keys)
    assert len(watch.kept) == 3 * CHANGE.size and len(woken) == 3
    missed, taken = watch.take(2)
    assert missed == 5
    assert [CHANGE.unpack_from(taken, at * CHANGE.size)[4] for at in range(2)] == keys_in(keys)[5:7]
    assert watch.take(2) == (0, CHANGE.pack(CAME, MEMORY, 0, 0, keys_in(keys)[7]))


@pytest.mark.parametrize("seed", range(6))
def test_the_changes_of_a_feed_add_up_to_the_stored_blocks(seed: int) -> None:
    """Saves, promotions, demotions, damage, forgetting and reused segments, in any order."""
    rnd = random.Random(seed)
    tenant = Tenant(24)
    watch = watch_of(tenant)
    chains = [chain(rnd.randint(1, 9)) for _ in range(8)]
    every = {key for keys in chains for key in keys_in(keys)}
    there: dict[int, set[bytes]] = {MEMORY: set(), DISK: set()}
    seen: set[tuple[int, int]] = set()
    segment = 4
    for _ in range(400):
        keys = rnd.choice(chains)
        act = rnd.randrange(7)
        if act < 2:
            tenant.save(keys)
        elif act == 2:
            tenant.write(
                tenant.catalog.demotions.plan(rnd.randint(1, 9) * SIZE, 12 * SIZE), segment
            )
        elif act == 3:
            plan = tenant.catalog.promotions.plan(tenant.space, keys, 8)
            rnd.choice(
                [
                    tenant.catalog.promotions.promoted,
                    lambda ids: tenant.catalog.promotions.spoilt(ids, "damaged"),
                ]
            )(plan.ids)
        elif act == 4 and rnd.random() < 0.2:
            tenant.catalog.forget(tenant.space, keys[: 32 * rnd.randint(1, 3)])
        elif act == 5 and rnd.random() < 0.4:
            ids = tenant.catalog.segments.in_segment(segment)[:4]
            tenant.catalog.segments.damaged(ids, tenant.store.frames(ids)[0])
        elif act == 6 and rnd.random() < 0.4:
            segment += 1
            rescue = tenant.catalog.segments.reclaim(segment - 3, keep=2)
            entries = [
                tenant.disk[number, page] for number, page, *_ in FRAME.iter_unpack(rescue.frames)
            ]
            tenant.catalog.segments.rescued(rescue.ids, rescue.frames, tenant.put(segment, entries))
            tenant.catalog.segments.drop_segment(segment - 3)
        for what, tier, key in changes_of(watch):
            seen.add((what, tier))
            (there[tier].add if what == CAME else there[tier].discard)(key)
        index = tenant.space.index
        ids = b"".join(tenant.catalog.segments.in_segment(number) for number in range(segment + 1))
        keys_on_disk = set(keys_in(tenant.store.keys_of(ids)))
        assert there[DISK] == keys_on_disk
        assert there[MEMORY] == {
            key
            for key in every
            if index >= 0 and tenant.store.states(index, key) == bytes([PRESENT])
        }
    assert len(seen) == 4


def test_blocks_that_were_read_because_they_were_recomputed_are_counted_if_a_client_used_them() -> (
    None
):
    tenant = Tenant(8)
    catalog, keys = tenant.catalog, chain(6)
    tenant.save(keys)
    tenant.move_out(keys)
    reads = catalog.blocks.reads

    def plan(recomputed: bool) -> bytes:
        tenant.save(chain(8))  # evicts what was read
        ids = catalog.promotions.plan(tenant.space, keys, 100).ids
        if recomputed:
            reads.recomputed(ids)
        return ids

    def load(blocks: int) -> None:
        found = catalog.load(ME, tenant.space, keys[: 32 * blocks], 1.0, (0,), 0.0)
        catalog.release(ME, found.lease, nbytes=SIZE)

    catalog.promotions.promoted(plan(True))
    load(4)
    load(5)
    assert (reads.loaded, reads.loaded_again) == (5, 5)
    catalog.promotions.promoted(plan(False))
    load(6)
    assert (reads.loaded, reads.loaded_again) == (11, 5), "the sixth was evicted unused"
    catalog.promotions.unpromoted(plan(True), "late")
    catalog.promotions.promoted(plan(False))
    load(6)
    assert (reads.loaded, reads.loaded_again) == (17, 5)


def test_read_blocks_count_as_loaded_once_a_read_and_only_if_a_client_used_them() -> None:
    tenant = Tenant(8)
    catalog, keys = tenant.catalog, chain(6)
    tenant.save(keys)

    def read() -> None:
        tenant.move_out(keys)
        plan = catalog.promotions.plan(tenant.space, keys, 100)
        assert len(plan.ids) == 4 * 6
        catalog.promotions.promoted(plan.ids)

    def load(blocks: int, nbytes: int) -> None:
        found = catalog.load(ME, tenant.space, keys[: 32 * blocks], 1.0, (0,), 0.0)
        assert found.ready == blocks
        catalog.release(ME, found.lease, nbytes=nbytes)

    load(6, SIZE)
    assert catalog.blocks.reads.loaded == 0, "these were never on disk"
    read()
    load(6, 0)
    assert catalog.blocks.reads.loaded == 0, "the client used none of them"
    load(4, SIZE)
    load(5, SIZE)
    assert catalog.blocks.reads.loaded == 5
    tenant.save(chain(8))  # evicts them: one was read in vain
    tenant.check()
    plan = catalog.promotions.plan(tenant.space, keys, 100)
    catalog.promotions.promoted(plan.ids)
    load(6, SIZE)
    assert catalog.blocks.reads.loaded == 5 + 6


def test_direct_reads_of_the_last_of_many_keys_cost_as_little_as_of_the_first() -> None:
    many, most = 1 << 14, 8
    tenant, keys = Tenant(many), chain(many)
    tenant.save(keys)
    tenant.move_out(keys)
    costs: dict[int, list[float]] = {0: [], many - most: []}
    for first in list(costs) * 7:
        began = time.process_time()
        found, places = tenant.catalog.direct.find(tenant.space, 0, 0, keys, b"\0", first, most)
        costs[first].append(time.process_time() - began)
        assert places == list(range(first, first + most))
        assert tenant.store.keys_of(found.ids) == keys[32 * first : 32 * (first + most)]
    assert min(costs[many - most]) < 1.5 * min(costs[0]), costs


def test_what_a_direct_read_must_know_of_is_counted() -> None:
    """A forget also if its blocks are not stored any longer, and each block that loses its frame."""
    tenant = Tenant(4)
    catalog, counted = tenant.catalog, []

    def count() -> int:
        counted.append(catalog.blocks.forgets[0])
        return len(set(counted))

    assert count() == 1
    catalog.segments.drop_segment(0)
    assert count() == 2
    catalog.segments.damaged(b"", b"")
    assert count() == 3
    assert catalog.forget(tenant.space, bytes(32)) == 0
    assert count() == 4
    catalog.forget_spoilt(b"")
    assert count() == 5
    catalog.forget_expired(1e9)
    assert count() == 5
