"""Blocks with an expiry time: never found after it, never written to disk, and limited in number."""

from __future__ import annotations

import itertools
import math
import random
from array import array

import pytest

from kvtier.key import token_keys
from kvtier.layout import space_id
from kvtier.wire import GRANTED, NO_ROOM, PRESENT, SLOT_BYTES
from kvtier_daemon.catalog import Catalog, SessionId, expiring, writing
from kvtier_daemon.catalog.expiring import Expiring, expiry_time
from kvtier_daemon.catalog.miss_log import OFF
from kvtier_daemon.catalog.policy import Policy, make
from kvtier_kernels import Store
from models.policies.lru import LruModel
from support.specs import spec_of

ME, YOU = SessionId(1), SessionId(2)
SPEC = spec_of()
SIZE = SPEC.block_bytes
counter = itertools.count()


@pytest.fixture(params=["native", "twin"], autouse=True)
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "twin":
        monkeypatch.setitem(globals(), "make", lambda name: LruModel())


class Tenant:
    """A catalog with memory for `blocks` blocks."""

    def __init__(self, blocks: int) -> None:
        self.policy: Policy = make("lru")
        self.catalog = Catalog(Store(), self.policy)
        self.catalog.add_extent(blocks * SIZE, bytearray(blocks * SIZE // 4096 * 8))
        self.space = self.catalog.spaces.open(space_id(SPEC, "t"), SPEC)

    def save(self, keys: bytes, expires_at: float = math.inf, parent: bytes = b"") -> bytes:
        """Save blocks. Returns the outcomes."""
        granted = self.catalog.reserve(ME, self.space, 0, 0, parent, keys, expires_at)
        if granted.lease:
            count = len(granted.slots) // SLOT_BYTES
            self.catalog.commit(ME, granted.lease, 0, count)
        return granted.outcomes

    def found(self, keys: bytes) -> int:
        return self.catalog.match(self.space, keys, is_new=False).ready

    @property
    def expiring(self) -> Expiring:
        return self.catalog.blocks.expiring

    @property
    def ready(self) -> int:
        return self.catalog.counts()["blocks"]["ready"]


def chain(blocks: int) -> bytes:
    start = next(counter) * 1_000_000
    return token_keys(bytes(32), list(range(start, start + 16 * blocks)), 16).packed


def test_blocks_are_found_until_their_time_and_not_after() -> None:
    tenant, mine, other = Tenant(16), chain(4), chain(4)
    tenant.save(mine, 100.0)
    tenant.save(other)
    tenant.catalog.forget_expired(99.99)
    assert (tenant.found(mine), tenant.found(other)) == (4, 4)
    tenant.catalog.forget_expired(100.0)
    assert (tenant.found(mine), tenant.found(other)) == (0, 4)
    assert tenant.ready == 4 and not tenant.expiring
    assert tenant.catalog.explain(mine[:32])["why"] == "forgotten"


def test_use_does_not_extend_the_time_and_neither_does_another_save() -> None:
    tenant, keys = Tenant(16), chain(4)
    tenant.save(keys, 100.0)
    assert tenant.found(keys) == 4
    assert tenant.save(keys, 500.0) == tenant.save(keys) == bytes([PRESENT] * 4)
    tenant.catalog.forget_expired(100.0)
    assert not tenant.found(keys)
    assert tenant.save(keys) == bytes([GRANTED] * 4), "saved anew, without a limit"
    tenant.catalog.forget_expired(1e9)
    assert tenant.found(keys) == 4


def test_a_time_applies_only_to_blocks_that_its_save_stored() -> None:
    """A prompt whose first blocks were saved by another session keeps these blocks."""
    tenant, keys = Tenant(16), chain(6)
    tenant.save(keys[: 4 * 32])
    tenant.save(keys, 100.0)
    tenant.catalog.forget_expired(100.0)
    assert tenant.found(keys) == 4


def test_blocks_committed_after_their_time_are_not_found() -> None:
    tenant, keys = Tenant(16), chain(2)
    granted = tenant.catalog.reserve(ME, tenant.space, 0, 0, b"", keys, 100.0)
    tenant.catalog.forget_expired(200.0)
    tenant.catalog.commit(ME, granted.lease, 0, 2)
    tenant.catalog.forget_expired(200.0)
    assert not tenant.found(keys) and not tenant.ready


def test_a_reader_at_the_expiry_time_continues_and_no_new_read_begins() -> None:
    tenant, keys = Tenant(16), chain(4)
    tenant.save(keys, 100.0)
    lease = tenant.catalog.load(YOU, tenant.space, keys, 60.0, [0], 99.0).lease
    tenant.catalog.forget_expired(100.0)
    assert not tenant.found(keys)
    assert tenant.catalog.counts()["blocks"]["doomed"] == 4
    tenant.catalog.release(YOU, lease)
    assert tenant.catalog.counts()["blocks"]["doomed"] == 0 and not tenant.expiring


def test_blocks_forgotten_during_a_read_are_not_forgotten_again_at_their_time() -> None:
    tenant, keys, other = Tenant(16), chain(4), chain(4)
    tenant.save(keys, 100.0)
    tenant.save(other, 100.0)
    lease = tenant.catalog.load(YOU, tenant.space, keys, 60.0, [0], 50.0).lease
    assert tenant.catalog.forget(tenant.space, keys) == 4 and len(tenant.expiring) == 4
    tenant.catalog.forget_expired(100.0)
    assert not tenant.found(other) and not tenant.expiring
    tenant.catalog.release(YOU, lease)
    assert tenant.catalog.counts()["blocks"] == dict.fromkeys(tenant.catalog.counts()["blocks"], 0)


def test_a_pin_does_not_outlast_the_time() -> None:
    tenant, keys = Tenant(64), chain(4)
    tenant.save(keys, 100.0)
    assert tenant.catalog.pins.pin(tenant.space, keys, 600.0, 50.0) == 4
    tenant.catalog.forget_expired(100.0)
    assert not tenant.found(keys) and not tenant.catalog.pins.nbytes and not tenant.ready


def test_a_block_with_the_reused_id_of_an_expiring_block_stays() -> None:
    tenant, short, long = Tenant(4), chain(4), chain(4)
    tenant.save(short, 100.0)
    tenant.save(long)  # evicts the first chain, and reuses its ids
    assert not tenant.expiring
    tenant.catalog.forget_expired(100.0)
    assert tenant.found(long) == 4


def test_expiring_blocks_are_never_written_to_disk() -> None:
    tenant, short, long = Tenant(16), chain(6), chain(6)
    tenant.save(short, 100.0)
    tenant.save(long)
    demotions = tenant.catalog.demotions
    ids = tenant.catalog.blocks.store.present(tenant.space.index, 0, 0, short + long)
    assert len(ids) == 12 * 4
    mine = set(array("I", tenant.catalog.blocks.store.present(tenant.space.index, 0, 0, short)))
    plans = (
        lambda: demotions.plan(1 << 30, 1 << 30),
        lambda: demotions.plan_write_through(ids),
        lambda: demotions.sweep(0, 100)[0],
    )
    for planned in plans:
        plan = planned()
        written = array("I", plan.ids)
        assert len(written) == 6 and not mine & set(written)
        demotions.not_demoted(plan.ids)


def test_blocks_that_expire_do_not_keep_others_from_the_disk() -> None:
    """If the coldest blocks expire, the next ones are written."""
    tenant, short, long = Tenant(16), chain(12), chain(4)
    tenant.save(short, 100.0)
    tenant.save(long)
    plan = tenant.catalog.demotions.plan(4 * SIZE, 4 * SIZE)
    assert len(plan.ids) == 4 * 4
    tenant.catalog.demotions.not_demoted(plan.ids)


def test_an_evicted_block_that_expires_is_not_counted_as_lost_to_a_disk() -> None:
    tenant, short, long = Tenant(4), chain(3), chain(4)
    tenant.catalog.blocks.why_unwritten = OFF
    tenant.save(short, 100.0)
    tenant.save(long)
    assert tenant.catalog.blocks.evicted["capacity"] == 3
    assert not any(tenant.catalog.blocks.unwritten.values())
    assert tenant.catalog.explain(short[:32])["why"] == "evicted"
    tenant.save(chain(4))
    assert tenant.catalog.blocks.unwritten["off"] == 4


def test_no_block_is_found_while_expired_blocks_remain_to_be_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expiring, "LIMIT_DUE_IDS", 4)
    tenant, chains, other = Tenant(64), [chain(3) for _ in range(5)], chain(2)
    for number, keys in enumerate(chains):
        tenant.save(keys, 100.0 + number % 2)
    tenant.save(other)
    calls = 0
    while tenant.expiring:
        tenant.catalog.forget_expired(200.0)
        calls += 1
        assert not any(tenant.found(keys) for keys in chains)
        assert tenant.found(other) == (0 if tenant.expiring else 2)
    assert calls == 4 and tenant.ready == 2


def test_blocks_beyond_the_limit_are_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "LIMIT_IDS", 5)
    tenant, keys = Tenant(64), chain(4)
    assert tenant.save(keys, 100.0) == bytes([GRANTED] * 4)
    assert tenant.save(chain(4), 100.0) == bytes([GRANTED, NO_ROOM, NO_ROOM, NO_ROOM])
    assert tenant.save(chain(4), 100.0) == bytes([NO_ROOM] * 4)
    assert tenant.save(chain(4)) == bytes([GRANTED] * 4), "those that do not expire are"
    tenant.catalog.forget_expired(100.0)
    assert tenant.save(keys, 200.0) == bytes([GRANTED] * 4)


def test_a_time_is_rounded_down_by_a_thousandth_at_most() -> None:
    for seed in range(1000):
        rng = random.Random(seed)
        now, ttl_s = rng.uniform(0, 1e7), math.exp(rng.uniform(math.log(1e-3), math.log(604_800)))
        assert now + ttl_s * (1 - 1 / 1024) <= expiry_time(now, ttl_s) <= now + ttl_s


def test_the_number_of_expiry_times_is_bounded() -> None:
    mine, now = Expiring(), 1000.0
    ids = array("I", [7]).tobytes()
    for _ in range(20_000):
        now += 0.001
        mine.add(ids, expiry_time(now, 10.0))
        mine.drop(ids)
        mine.take_due(now)
    assert len(mine._at) == len(mine.times) <= 2048 and not mine


def test_random_saves_and_evictions_agree_with_a_model() -> None:
    """Compares the catalog with a dictionary of keys and times."""
    rng = random.Random(7)
    tenant, times, now = Tenant(32), {}, 0.0
    for _ in range(400):
        now += rng.random()
        keys = chain(rng.randint(1, 6))
        at = now + rng.choice([0.5, 3.0, 1e9])
        tenant.save(keys, math.inf if at > 1e8 else at)
        times[keys] = at
        tenant.catalog.forget_expired(now)
        for one, until in times.items():
            if until <= now:
                assert not tenant.found(one)
        assert len(tenant.policy) == tenant.ready
        assert len(tenant.expiring) <= tenant.ready
    tenant.catalog.forget_expired(1e8)
    assert not tenant.expiring
