"""The catalog's decisions about saves, matches, leases, pins and evictions. No I/O; the clock is a
number in each call."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier import Group, KvSpec, Refused
from kvtier.key import KEY_BYTES, token_keys
from kvtier.layout import space_id
from kvtier.space import Space as ClientSpace
from kvtier.wire import (
    GRANTED,
    GROWING,
    IN_PROGRESS,
    LIMIT_KEYS,
    NO_ROOM,
    PRESENT,
    SLOT_BYTES,
    Opened,
)
from kvtier_daemon.catalog import Catalog, Granted, KnownSpace, LeaseId, SessionId
from kvtier_daemon.catalog.policy import Policy, make
from kvtier_kernels import Store
from models.policies.attention import Attention, AttentionModel
from models.policies.lru import LruModel
from models.policies.value import Value, ValueModel
from support.specs import spec_of
from support.stores import look_up

ME, YOU = SessionId(1), SessionId(2)
SECRET = bytes(32)
SPEC = spec_of()
SIZE = SPEC.block_bytes
counter = itertools.count()


@pytest.fixture(params=["native", "twin"], autouse=True)
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decision is the same over the native policy and over its model."""
    if request.param == "twin":
        monkeypatch.setitem(globals(), "make", lambda name: LruModel())


def catalog_of(blocks: int, size: int = SIZE) -> Catalog:
    catalog = Catalog(Store(), make("lru"))
    nbytes = blocks * size
    catalog.add_extent(nbytes, bytearray(-(-nbytes // 4096) * 8))
    return catalog


def space_of(catalog: Catalog, spec: KvSpec = SPEC) -> KnownSpace:
    return catalog.spaces.open(space_id(spec, "t"), spec)


def chain(blocks: int) -> bytes:
    """The keys of a new prompt."""
    start = next(counter) * 1_000_000
    return token_keys(SECRET, list(range(start, start + 16 * blocks)), 16).packed


def save(
    catalog: Catalog, space: KnownSpace, keys: bytes, session: SessionId = ME, parent: bytes = b""
) -> Granted:
    granted = catalog.reserve(session, space, 0, 0, parent, keys)
    if granted.lease:
        catalog.commit(session, granted.lease, 0, len(granted.slots) // SLOT_BYTES)
    return granted


def ready(catalog: Catalog, space: KnownSpace, keys: bytes) -> int:
    return catalog.match(space, keys, is_new=False).ready


def test_nothing_is_found_before_its_commit_and_everything_after() -> None:
    catalog = catalog_of(8)
    space, keys = space_of(catalog), chain(4)
    granted = catalog.reserve(ME, space, 0, 0, b"", keys)
    assert granted.outcomes == bytes([GRANTED] * 4)
    assert ready(catalog, space, keys) == 0
    catalog.commit(ME, granted.lease, 0, 3)
    assert ready(catalog, space, keys) == 3
    catalog.commit(ME, granted.lease, 3, 1)
    assert ready(catalog, space, keys) == 4
    assert len(catalog.leases) == 0


def test_a_save_of_stored_blocks_needs_no_lease() -> None:
    catalog = catalog_of(8)
    space, keys = space_of(catalog), chain(4)
    save(catalog, space, keys)
    again = save(catalog, space, keys)
    assert again.outcomes == bytes([PRESENT] * 4)
    assert again.lease == 0


def test_a_save_of_blocks_that_another_session_writes_gets_in_progress_without_waiting() -> None:
    catalog = catalog_of(8)
    space, keys = space_of(catalog), chain(4)
    mine = catalog.reserve(ME, space, 0, 0, b"", keys)
    yours = catalog.reserve(YOU, space, 0, 0, b"", keys)
    assert yours.outcomes == bytes([IN_PROGRESS] * 4)
    assert not yours.lease
    catalog.abort(ME, mine.lease)
    assert save(catalog, space, keys, YOU).outcomes == bytes([GRANTED] * 4)


def test_a_lease_that_a_session_joined_twice_ends_with_the_session() -> None:
    catalog = catalog_of(8)
    space, keys = space_of(catalog), chain(8)
    save(catalog, space, keys)
    found = catalog.load(ME, space, keys, 3600.0, [0], 0.0)
    catalog.adopt(ME, found.token, [0])
    catalog.end_session(ME, gone=False)
    assert len(catalog.leases) == 0
    assert save(catalog, space, chain(8), YOU).outcomes == bytes([GRANTED] * 8)


def test_old_blocks_are_evicted_for_new_ones_tails_before_heads() -> None:
    catalog = catalog_of(8)
    space, old, new = space_of(catalog), chain(8), chain(3)
    save(catalog, space, old)
    save(catalog, space, new)
    assert ready(catalog, space, new) == 3
    assert ready(catalog, space, old) == 5


def test_matched_blocks_are_not_evicted_next() -> None:
    catalog = catalog_of(8)
    space, first, second, third = space_of(catalog), chain(4), chain(4), chain(4)
    save(catalog, space, first)
    save(catalog, space, second)
    catalog.match(space, first)
    save(catalog, space, third)
    assert [ready(catalog, space, keys) for keys in (first, second, third)] == [4, 0, 4]


def test_one_save_may_use_nearly_all_the_memory() -> None:
    catalog = catalog_of(100)
    space = space_of(catalog)
    for _ in range(30):
        save(catalog, space, chain(10))
    large = chain(90)
    assert save(catalog, space, large).outcomes == bytes([GRANTED] * 90)
    assert ready(catalog, space, large) == 90


def test_a_save_larger_than_the_memory_keeps_its_head() -> None:
    catalog = catalog_of(8)
    space, keys = space_of(catalog), chain(12)
    granted = save(catalog, space, keys)
    assert granted.outcomes == bytes([GRANTED] * 8 + [NO_ROOM] * 4)
    assert ready(catalog, space, keys) == 8
    assert catalog.usage.refused_tokens["no_room"] == 4 * 16
    catalog.growing = True
    assert save(catalog, space, keys).outcomes == bytes([PRESENT] * 8 + [GROWING] * 4)
    assert catalog.usage.refused_tokens["growing"] == 4 * 16
    before = dict(catalog.usage.refused_tokens)
    assert GROWING in catalog.reserve(ME, space, 0, 0, b"", keys, waits=True).outcomes
    assert catalog.usage.refused_tokens == before, "the client reserves these keys again"


def test_a_longer_chain_never_evicts_its_own_head() -> None:
    catalog = catalog_of(8)
    space, keys = space_of(catalog), chain(12)
    save(catalog, space, keys[: 6 * 32])
    save(catalog, space, keys)
    assert ready(catalog, space, keys) == 8
    save(catalog, space, keys[8 * 32 :], parent=keys[7 * 32 : 8 * 32])
    assert ready(catalog, space, keys) == 8


def test_blocks_saved_one_by_one_are_evicted_from_the_tail() -> None:
    catalog = catalog_of(8)
    space, keys, other = space_of(catalog), chain(6), chain(4)
    for at in range(6):
        parent = keys[(at - 1) * 32 : at * 32] if at else b""
        save(catalog, space, keys[at * 32 : (at + 1) * 32], parent=parent)
    save(catalog, space, other)
    assert ready(catalog, space, other) == 4
    assert ready(catalog, space, keys) == 4


def test_leased_blocks_stay_and_released_blocks_may_be_evicted() -> None:
    catalog = catalog_of(8)
    space, held, other = space_of(catalog), chain(5), chain(8)
    save(catalog, space, held)
    found = catalog.load(ME, space, held, 10.0, [0], now=0.0)
    assert found.ready == 5
    assert len(found.parts[0].slots) == 5 * SLOT_BYTES
    save(catalog, space, other)
    assert ready(catalog, space, held) == 5
    assert ready(catalog, space, other) == 3
    catalog.release(ME, found.lease)
    save(catalog, space, other)
    assert ready(catalog, space, other) == 8


def test_a_lease_ends_at_its_deadline_and_a_later_release_is_not_an_error() -> None:
    catalog = catalog_of(4)
    space, keys = space_of(catalog), chain(4)
    save(catalog, space, keys)
    found = catalog.load(ME, space, keys, 1.0, [0], now=100.0)
    assert catalog.expire_leases(100.9) == 0
    assert catalog.expire_leases(101.0) == 1
    catalog.release(ME, found.lease)
    save(catalog, space, chain(4))
    assert ready(catalog, space, keys) == 0


def test_a_lease_joined_by_its_token_lasts_until_all_sessions_release_it() -> None:
    catalog = catalog_of(4)
    space, keys, other = space_of(catalog), chain(4), chain(4)
    save(catalog, space, keys)
    found = catalog.load(ME, space, keys, 60.0, [], now=0.0)
    assert found.parts == ()
    joined = catalog.adopt(YOU, found.token, [0])
    assert joined.ready == 4 and len(joined.parts) == 1
    catalog.release(ME, found.lease)
    assert save(catalog, space, other).outcomes == bytes([NO_ROOM] * 4)
    catalog.release(YOU, joined.lease)
    assert save(catalog, space, other).outcomes == bytes([GRANTED] * 4)


def test_leases_of_other_sessions_and_unknown_leases_are_refused() -> None:
    catalog = catalog_of(8)
    space, keys = space_of(catalog), chain(4)
    mine = catalog.reserve(ME, space, 0, 0, b"", keys)
    for call in (
        lambda: catalog.commit(YOU, mine.lease, 0, 1),
        lambda: catalog.abort(YOU, mine.lease),
        lambda: catalog.release(ME, mine.lease),
        lambda: catalog.release(ME, LeaseId(99)),
        lambda: catalog.commit(ME, LeaseId(99), 0, 1),
        lambda: catalog.adopt(YOU, bytes(16), [0]),
    ):
        with pytest.raises(Refused) as refusal:
            call()
        assert refusal.value.code == "unknown_lease"
    catalog.commit(ME, mine.lease, 0, 4)
    found = catalog.load(ME, space, keys, 1.0, [0], now=0.0)
    with pytest.raises(Refused):
        catalog.release(YOU, found.lease)


@pytest.mark.parametrize("span", [(0, 5), (4, 1), (-1, 2), (0, 0), (1, 4)])
def test_a_commit_outside_its_lease_changes_nothing(span: tuple[int, int]) -> None:
    catalog = catalog_of(8)
    space, keys = space_of(catalog), chain(4)
    granted = catalog.reserve(ME, space, 0, 0, b"", keys)
    with pytest.raises(Refused):
        catalog.commit(ME, granted.lease, *span)
    assert ready(catalog, space, keys) == 0
    catalog.commit(ME, granted.lease, 0, 4)


def test_a_block_is_committed_once() -> None:
    catalog = catalog_of(8)
    space = space_of(catalog)
    granted = catalog.reserve(ME, space, 0, 0, b"", chain(4))
    catalog.commit(ME, granted.lease, 1, 2)
    with pytest.raises(Refused, match="committed already"):
        catalog.commit(ME, granted.lease, 0, 2)
    with pytest.raises(Refused, match="checksums"):
        catalog.commit(ME, granted.lease, 0, 1, b"short")


def test_blocks_of_a_dead_writer_are_freed_and_those_of_a_living_one_are_quarantined() -> None:
    catalog = catalog_of(8)
    space, keys = space_of(catalog), chain(8)
    catalog.reserve(ME, space, 0, 0, b"", keys)
    assert not catalog.end_session(ME, gone=True)
    assert catalog.counts()["blocks"]["writing"] == 0
    catalog.reserve(YOU, space, 0, 0, b"", keys)
    assert catalog.end_session(YOU, gone=False)
    assert save(catalog, space, chain(8)).outcomes == bytes([NO_ROOM] * 8)
    assert ready(catalog, space, keys) == 0
    catalog.process_gone(YOU)
    assert catalog.counts()["blocks"]["quarantined"] == 0
    assert save(catalog, space, chain(8)).outcomes == bytes([GRANTED] * 8)


def test_committed_blocks_survive_their_writer() -> None:
    catalog = catalog_of(8)
    space, keys = space_of(catalog), chain(6)
    granted = catalog.reserve(ME, space, 0, 0, b"", keys)
    catalog.commit(ME, granted.lease, 0, 4)
    catalog.end_session(ME, gone=True)
    assert ready(catalog, space, keys) == 4


def test_a_dead_reader_frees_its_lease() -> None:
    catalog = catalog_of(4)
    space, keys = space_of(catalog), chain(4)
    save(catalog, space, keys)
    catalog.load(YOU, space, keys, 3600.0, [0], now=0.0)
    catalog.end_session(YOU, gone=False)
    assert save(catalog, space, chain(4)).outcomes == bytes([GRANTED] * 4)
    assert len(catalog.leases) == 0


def test_forgotten_blocks_do_not_match_even_while_they_are_read() -> None:
    catalog = catalog_of(8)
    space, keys = space_of(catalog), chain(4)
    save(catalog, space, keys)
    found = catalog.load(ME, space, keys, 60.0, [0], now=0.0)
    assert catalog.forget(space, keys[64:96]) == 1
    assert ready(catalog, space, keys) == 2
    assert catalog.counts()["blocks"]["doomed"] == 1
    catalog.release(ME, found.lease)
    assert catalog.counts()["blocks"]["doomed"] == 0
    assert save(catalog, space, keys).outcomes == bytes([PRESENT, PRESENT, GRANTED, PRESENT])
    assert ready(catalog, space, keys) == 4


def test_unreachable_blocks_are_evicted_first() -> None:
    catalog = catalog_of(8)
    space, broken, whole = space_of(catalog), chain(4), chain(4)
    save(catalog, space, whole)
    save(catalog, space, broken)
    catalog.forget(space, broken[:32])
    save(catalog, space, chain(4))
    assert ready(catalog, space, whole) == 4


def test_pins_hold_up_to_their_share() -> None:
    catalog = catalog_of(16)
    space, keys = space_of(catalog), chain(8)
    save(catalog, space, keys)
    assert catalog.pins.pin(space, keys, 5.0, now=0.0) == 4
    assert catalog.pins.pin(space, keys, 10.0, now=0.0) == 4, (
        "a pin again is a longer one, not a second"
    )
    assert len(catalog.leases) == 1
    other = chain(4)
    save(catalog, space, other)
    assert catalog.pins.pin(space, other, 10.0, now=0.0) == 0
    catalog.expire_leases(5.0)
    save(catalog, space, chain(16))
    assert ready(catalog, space, keys) == 4
    catalog.expire_leases(10.0)
    save(catalog, space, chain(16))
    assert ready(catalog, space, keys) == 0


def test_unimportant_blocks_are_evicted_first() -> None:
    catalog = catalog_of(8)
    space, old, young = space_of(catalog), chain(4), chain(4)
    save(catalog, space, old)
    save(catalog, space, young)
    assert catalog.hint(space, young, 0.0) == 4
    save(catalog, space, chain(4))
    assert (ready(catalog, space, old), ready(catalog, space, young)) == (4, 0)


@pytest.mark.parametrize("kinds", [(Attention, AttentionModel), (Value, ValueModel)])
def test_important_blocks_outlive_their_peers(kinds: tuple[type[Policy], type[Policy]]) -> None:
    catalog = Catalog(Store(), kinds[isinstance(make("lru"), LruModel)]())
    catalog.add_extent(16 * SIZE, bytearray(-(-16 * SIZE // 4096) * 8))
    space, chains = space_of(catalog), [chain(4) for _ in range(3)]
    for keys in chains:
        save(catalog, space, keys)
    assert catalog.hint(space, chains[0], 1.0) == 4
    save(catalog, space, chain(8))  # four blocks are free, so four must be evicted
    left = [ready(catalog, space, keys) for keys in chains]
    assert left[0] == 4 and sum(left) == 8


@pytest.mark.parametrize("kinds", [(Attention, AttentionModel), (Value, ValueModel)])
def test_a_hint_of_no_importance_replaces_an_earlier_one(
    kinds: tuple[type[Policy], type[Policy]],
) -> None:
    catalog = Catalog(Store(), kinds[isinstance(make("lru"), LruModel)]())
    catalog.add_extent(16 * SIZE, bytearray(-(-16 * SIZE // 4096) * 8))
    space, chains = space_of(catalog), [chain(4) for _ in range(3)]
    for keys in chains:
        save(catalog, space, keys)
    for importance in (1.0, 0.0):
        assert catalog.hint(space, chains[0], importance) == 4
    for keys in chains:  # a use ends what a hint of 0 orders, but makes nothing important
        catalog.match(space, keys)
    save(catalog, space, chain(8))
    assert ready(catalog, space, chains[0]) == 0


def test_unimportant_blocks_are_evicted_tails_before_heads() -> None:
    """An evicted head would make its tail unusable."""
    catalog = catalog_of(8)
    space, keys = space_of(catalog), chain(8)
    save(catalog, space, keys)
    assert catalog.hint(space, keys, 0.0) == 8
    save(catalog, space, chain(3))
    assert ready(catalog, space, keys) == 5


def hybrid() -> KvSpec:
    return KvSpec.groups(
        [
            Group(layers=2, kv_heads=2, head_dim=64),
            Group(kind="window", layers=2, kv_heads=2, head_dim=64, window_tokens=32),
            Group(kind="state", layers=2, state_bytes=8192),
        ],
        model="hybrid", dtype="bfloat16", block_tokens=16, weights="rev:1",
    )  # fmt: skip


def test_a_prefix_counts_when_every_group_can_restore_it() -> None:
    catalog = catalog_of(64)
    space, keys = space_of(catalog, hybrid()), chain(8)
    for group in range(3):
        granted = catalog.reserve(ME, space, group, 0, b"", keys)
        catalog.commit(ME, granted.lease, 0, 8)
    assert ready(catalog, space, keys) == 8
    found = catalog.load(ME, space, keys, 1.0, [0], now=0.0)
    places = [(part.group, part.first, len(part.slots) // SLOT_BYTES) for part in found.parts]
    assert places == [(0, 0, 8), (1, 6, 2), (2, 7, 1)]


def test_a_prefix_without_one_of_its_shards_does_not_match() -> None:
    catalog = catalog_of(64)
    spec = spec_of(tensor_parallel=2)
    space, keys = space_of(catalog, spec), chain(4)
    first = catalog.reserve(ME, space, 0, 0, b"", keys)
    catalog.commit(ME, first.lease, 0, 4)
    assert ready(catalog, space, keys) == 0
    second = catalog.reserve(YOU, space, 0, 1, b"", keys)
    catalog.commit(YOU, second.lease, 0, 3)
    assert ready(catalog, space, keys) == 3


def test_hits_and_misses_add_up_to_all_lookups() -> None:
    catalog = catalog_of(8)
    space, keys = space_of(catalog), chain(4)
    look_up(catalog, space, keys)
    save(catalog, space, keys[:64])
    look_up(catalog, space, keys)
    pending = catalog.reserve(ME, space, 0, 0, keys[32:64], keys[64:])
    look_up(catalog, space, keys)
    catalog.abort(ME, pending.lease)
    assert catalog.usage.lookup_tokens == 12 * 16
    assert catalog.usage.hit_tokens == {"warm": 4 * 16, "cold": 0, "remote": 0}
    assert catalog.usage.miss_tokens == {"absent": 6 * 16, "in_progress": 2 * 16}


@pytest.mark.parametrize("keys", [bytes(31), bytes(32 * (LIMIT_KEYS + 1))], ids=["cut", "many"])
def test_malformed_keys_are_refused(keys: bytes) -> None:
    catalog = catalog_of(8)
    space = space_of(catalog)
    for call in (
        lambda: catalog.match(space, keys),
        lambda: catalog.load(ME, space, keys, 1.0, [0], 0.0),
        lambda: catalog.reserve(ME, space, 0, 0, b"", keys),
        lambda: catalog.forget(space, keys),
        lambda: catalog.reserve(ME, space, 1, 0, b"", bytes(32)),
        lambda: catalog.reserve(ME, space, 0, 1, b"", bytes(32)),
        lambda: catalog.reserve(ME, space, 0, 0, b"x", bytes(32)),
    ):
        with pytest.raises(Refused):
            call()


def test_a_chain_with_a_repeated_key_is_refused_and_takes_no_slots() -> None:
    catalog = catalog_of(8)
    space, keys = space_of(catalog), chain(2)
    with pytest.raises(Refused, match="twice"):
        catalog.reserve(ME, space, 0, 0, b"", keys[:32] + keys)
    assert catalog.counts()["blocks"]["writing"] == 0
    assert len(catalog.leases) == 0


def test_a_request_that_is_refused_evicts_nothing() -> None:
    catalog = catalog_of(8)
    space, old, new = space_of(catalog), chain(8), chain(4)
    save(catalog, space, old)
    for keys in (new + new[:32], new + new, old[:32] + new + old[:32]):
        with pytest.raises(Refused, match="twice") as refusal:
            catalog.reserve(ME, space, 0, 0, b"", keys)
        assert refusal.value.code == "bad_request"
    assert ready(catalog, space, old) == 8


def test_an_extent_that_is_added_later_is_used() -> None:
    catalog = Catalog(Store(), make("lru"))
    space, keys = space_of(catalog), chain(4)
    assert save(catalog, space, keys).outcomes == bytes([NO_ROOM] * 4)
    catalog.add_extent(4 * SIZE, bytearray(SIZE * 4 // 4096 * 8))
    assert save(catalog, space, keys).outcomes == bytes([GRANTED] * 4)


def test_spaces_share_only_the_memory() -> None:
    catalog = catalog_of(12)
    one, two = space_of(catalog), space_of(catalog, spec_of("other"))
    keys = chain(4)
    save(catalog, one, keys)
    assert ready(catalog, two, keys) == 0
    save(catalog, two, chain(12))
    assert ready(catalog, one, keys) == 0


def test_a_lease_joined_by_its_own_session_needs_two_releases() -> None:
    catalog = catalog_of(4)
    space, keys, other = space_of(catalog), chain(4), chain(4)
    save(catalog, space, keys)
    found = catalog.load(ME, space, keys, 60.0, [0], now=0.0)
    catalog.adopt(ME, found.token, [0])
    catalog.release(ME, found.lease)
    assert save(catalog, space, other).outcomes == bytes([NO_ROOM] * 4)
    catalog.release(ME, found.lease)
    assert save(catalog, space, other).outcomes == bytes([GRANTED] * 4)


def test_a_forget_ends_pins() -> None:
    catalog = catalog_of(16)
    space, keys = space_of(catalog), chain(4)
    save(catalog, space, keys)
    assert catalog.pins.pin(space, keys, 3600.0, now=0.0) == 4
    assert catalog.forget(space, keys[:32] + keys[:32]) == 1
    assert len(catalog.leases) == 0
    assert catalog.counts()["blocks"]["doomed"] == 0


def test_a_pin_limited_by_its_share_holds_a_prefix_that_can_be_restored() -> None:
    spec = spec_of(window_tokens=32)
    catalog = catalog_of(16)
    space, keys = space_of(catalog, spec), chain(8)
    save(catalog, space, keys)
    catalog.forget(space, keys[:64])
    assert ready(catalog, space, keys) == 8
    assert catalog.pins.pin(space, keys, 10.0, now=0.0) in (0, 4)


def test_a_space_without_saves_is_removed_with_its_last_session() -> None:
    catalog = catalog_of(4)
    empty = catalog.spaces.open(b"e" * 32, spec_of("empty"), ME)
    used = catalog.spaces.open(b"u" * 32, spec_of("used"), ME)
    catalog.spaces.open(b"e" * 32, spec_of("empty"), YOU)
    assert ready(catalog, empty, chain(2)) == 0
    assert catalog.hint(empty, chain(2), 0.5) == catalog.forget(empty, chain(2)) == 0
    save(catalog, used, chain(2))
    catalog.end_session(ME, gone=True)
    assert len(catalog.spaces) == 2
    catalog.end_session(YOU, gone=True)
    assert len(catalog.spaces) == 1
    with pytest.raises(Refused) as refusal:
        catalog.spaces.at(empty.number)
    assert refusal.value.code == "unknown_space"


def test_one_session_can_not_take_all_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_daemon.catalog.leases.LIMIT_SESSION_LEASES", 3)
    catalog = catalog_of(4)
    space, keys = space_of(catalog), chain(4)
    save(catalog, space, keys)
    for _ in range(3):
        catalog.load(ME, space, keys, 1.0, [0], now=0.0)
    with pytest.raises(Refused, match="this session has"):
        catalog.load(ME, space, keys, 1.0, [0], now=0.0)
    assert catalog.load(YOU, space, keys, 1.0, [0], now=0.0).ready == 4


def test_a_load_whose_reply_is_too_large_is_refused_without_a_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier_daemon.catalog.reading.LIMIT_TOLD_SLOTS", 3)
    catalog = catalog_of(4)
    space, keys = space_of(catalog), chain(4)
    save(catalog, space, keys)
    with pytest.raises(Refused, match="fewer shards"):
        catalog.load(ME, space, keys, 1.0, [0], now=0.0)
    assert len(catalog.leases) == 0
    assert catalog.load(ME, space, keys, 1.0, [], now=0.0).ready == 4


@pytest.mark.parametrize("windows, shards", [((), 1), ((), 2), ((20,), 2), ((20, 40, 0), 1)])
def test_a_client_computes_how_many_keys_a_lease_may_have(
    monkeypatch: pytest.MonkeyPatch, windows: tuple[int, ...], shards: int
) -> None:
    for limit in ("kvtier.wire.LIMIT_TOLD_SLOTS", "kvtier_daemon.catalog.reading.LIMIT_TOLD_SLOTS"):
        monkeypatch.setattr(limit, 17)
    groups = [
        Group(kind="window" if window else "full", window_tokens=window, layers=1,
              opaque_bytes=4096, shards=shards)
        for window in (0, *windows)
    ]  # fmt: skip
    spec = KvSpec.groups(groups, model="m", dtype="int8", block_tokens=16, weights="rev:1")
    catalog = catalog_of(20 * spec.places, 4096)
    space, keys = space_of(catalog, spec), chain(20)
    for group, shard in itertools.product(range(len(groups)), range(shards)):
        granted = catalog.reserve(ME, space, group, shard, b"", keys)
        catalog.commit(ME, granted.lease, 0, 20)
    link: Any = SimpleNamespace(caller=SimpleNamespace(verify=False))
    client = ClientSpace(link, spec, Opened(1, 1, bytes(32), bytes(32)))
    most = client.most_keys(shards)
    every = list(range(shards))
    assert catalog.load(ME, space, keys[: most * KEY_BYTES], 1.0, every, now=0.0).ready == most > 0
    with pytest.raises(Refused, match="fewer shards"):
        catalog.load(ME, space, keys[: (most + 1) * KEY_BYTES], 1.0, every, now=0.0)


def wide(groups: int, shards: int) -> KvSpec:
    return KvSpec.groups(
        [Group(layers=1, opaque_bytes=4096, shards=shards)] * groups,
        model="wide", dtype="int8", block_tokens=16, weights="rev:1",
    )  # fmt: skip


def save_everywhere(catalog: Catalog, space: KnownSpace, keys: bytes) -> None:
    for index, group in enumerate(space.spec.cache_groups):
        for shard in range(group.shards):
            granted = catalog.reserve(ME, space, index, shard, b"", keys)
            catalog.commit(ME, granted.lease, 0, len(keys) // 32)


def test_the_time_of_a_lookup_depends_on_the_blocks_not_on_groups_and_shards() -> None:
    if isinstance(make("lru"), LruModel):
        pytest.skip("the model is not made to be fast")

    def seconds(groups: int, shards: int, blocks: int) -> list[float]:
        catalog = catalog_of(groups * shards * blocks, 4096)
        space, keys = space_of(catalog, wide(groups, shards)), chain(blocks)
        save_everywhere(catalog, space, keys)
        lookups: tuple[Callable[[], object], ...] = (
            lambda: catalog.match(space, keys),
            lambda: catalog.load(ME, space, keys, 60.0, [], now=0.0),
            lambda: catalog.hint(space, keys, 1.0),
            lambda: catalog.forget(space, keys),
        )
        times = []
        for lookup in lookups:
            began = time.thread_time()
            lookup()
            times.append(time.thread_time() - began)
        return times

    wide_s = [min(each) for each in zip(*(seconds(64, 16, 10) for _ in range(3)), strict=True)]
    deep_s = [min(each) for each in zip(*(seconds(1, 1, 10 * 1024) for _ in range(3)), strict=True)]
    # Walking each group and shard separately would take 1,024 times as many steps.
    assert all(wide < 20 * deep for wide, deep in zip(wide_s, deep_s, strict=True)), (
        wide_s,
        deep_s,
    )


def test_a_load_that_names_a_key_twice_is_refused() -> None:
    catalog = catalog_of(4)
    space, keys = space_of(catalog), chain(2)
    save(catalog, space, keys)
    for twice in (keys[:32] * 2, keys + keys[:32]):
        with pytest.raises(Refused, match="twice") as refusal:
            catalog.load(ME, space, twice, 60.0, [0], now=0.0)
        assert refusal.value.code == "bad_request"
    assert len(catalog.leases) == 0
    assert save(catalog, space, chain(4)).outcomes == bytes([GRANTED] * 4)


def test_an_empty_space_without_sessions_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier_daemon.catalog.spaces.LIMIT_SPACES", 2)
    catalog = catalog_of(8)
    first = catalog.spaces.open(b"1" * 32, spec_of("first"), ME)
    second = catalog.spaces.open(b"2" * 32, spec_of("second"), ME)
    keys = chain(4)
    save(catalog, first, keys)
    save(catalog, second, keys)
    assert catalog.forget(first, keys) == 4
    with pytest.raises(Refused, match="2 spaces"):
        catalog.spaces.open(
            b"3" * 32, spec_of("third"), YOU
        )  # first is empty, but a session has it open
    catalog.end_session(ME, gone=True)
    assert len(catalog.spaces) == 1
    third = catalog.spaces.open(b"3" * 32, spec_of("third"), YOU)
    assert save(catalog, third, chain(2)).lease
    assert third.number not in (first.number, second.number)
    with pytest.raises(Refused) as refusal:
        catalog.spaces.at(first.number)
    assert refusal.value.code == "unknown_space"
    assert ready(catalog, second, keys) == 4
    # A space that became empty later is removed when all numbers are in use.
    assert catalog.forget(second, keys) == 4
    assert catalog.spaces.open(b"4" * 32, spec_of("fourth"), YOU).number > third.number
    assert len(catalog.spaces) == 2


def test_unused_block_sizes_are_replaced_by_new_ones() -> None:
    catalog = catalog_of(64)

    def sizes(at: int) -> KvSpec:
        pages = [1, *range(64 * at + 2, 64 * at + 65)]
        groups = [Group(layers=1, opaque_bytes=4096 * n) for n in pages]
        return KvSpec.groups(groups, model="m", dtype="int8", block_tokens=16, weights="rev:1")

    keys = chain(1)
    for at in range(16):
        save(catalog, catalog.spaces.open(bytes([at]) * 32, sizes(at), YOU if at else ME), keys)
    last = catalog.spaces.open(bytes([16]) * 32, sizes(16), YOU)
    for _ in range(2):
        with pytest.raises(Refused, match="sizes") as refusal:
            save(catalog, last, keys)
        assert refusal.value.code == "too_many"
        catalog.end_session(ME, gone=True)
    assert catalog.forget(catalog.spaces.at(0), keys) == 1
    assert save(catalog, last, keys).lease
    assert len(catalog.spaces) == 16


def test_a_save_without_granted_blocks_creates_no_space() -> None:
    catalog = Catalog(Store(), make("lru"))
    space, keys = catalog.spaces.open(b"1" * 32, SPEC, ME), chain(2)
    assert catalog.reserve(ME, space, 0, 0, b"", b"") == Granted(LeaseId(0), b"", b"")
    assert catalog.reserve(ME, space, 0, 0, b"", keys).outcomes == bytes([NO_ROOM] * 2)
    with pytest.raises(Refused):
        catalog.reserve(ME, space, 0, 0, b"", keys[:32] * 2)
    assert space.index < 0
    catalog.end_session(ME, gone=True)
    assert len(catalog.spaces) == 0


def test_forgetting_blocks_without_leases_checks_no_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = catalog_of(16)
    space, pinned, other = space_of(catalog), chain(2), chain(2)
    save(catalog, space, pinned)
    save(catalog, space, other)
    assert catalog.pins.pin(space, pinned, 10.0, now=0.0) == 2
    monkeypatch.setattr(catalog.pins, "_living", None)
    assert catalog.forget(space, other) == 2
    assert catalog.forget(space, chain(2)) == 0


def test_a_forget_ends_the_pin_of_a_block_that_is_also_read() -> None:
    catalog = catalog_of(16)
    space, keys = space_of(catalog), chain(2)
    save(catalog, space, keys)
    assert catalog.pins.pin(space, keys, 10.0, now=0.0) == 2
    found = catalog.load(ME, space, keys, 10.0, [0], now=0.0)
    assert catalog.forget(space, keys) == 2
    assert len(catalog.leases) == 1
    catalog.release(ME, found.lease)
    assert catalog.counts()["blocks"]["doomed"] == 0
    assert catalog.blocks.evicted["forgotten"] == 2


def test_pins_are_bounded_in_number_and_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_daemon.catalog.pins.LIMIT_PINS", 2)
    monkeypatch.setattr("kvtier_daemon.catalog.pins.LIMIT_PINNED_IDS", 5)
    catalog = catalog_of(64)
    space, keys = space_of(catalog), [chain(4) for _ in range(3)]
    for one in keys:
        save(catalog, space, one)
    assert catalog.pins.pin(space, keys[0], 10.0, now=0.0) == 4
    assert catalog.pins.pin(space, keys[1], 10.0, now=0.0) == 1
    assert catalog.pins.pin(space, keys[2], 10.0, now=0.0) == 0
    assert catalog.pins.pin(space, keys[0], 20.0, now=0.0) == 4
    monkeypatch.setattr("kvtier_daemon.catalog.pins.LIMIT_PINNED_IDS", 50)
    with pytest.raises(Refused, match="2 pins"):
        catalog.pins.pin(space, keys[2], 10.0, now=0.0)
    assert catalog.pins.pin(space, keys[1], 10.0, now=0.0) == 4
    assert len(catalog.leases) == 2


def test_a_refused_pin_ends_no_other_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = catalog_of(16)
    space, keys = space_of(catalog), chain(4)
    save(catalog, space, keys)
    assert catalog.pins.pin(space, keys[:64], 10.0, now=0.0) == 2
    monkeypatch.setattr("kvtier_daemon.catalog.leases.LIMIT_LEASES", 1)
    with pytest.raises(Refused, match="leases already"):
        catalog.pins.pin(space, keys, 10.0, now=0.0)
    assert len(catalog.leases) == 1
    monkeypatch.setattr("kvtier_daemon.catalog.leases.LIMIT_LEASES", 2)
    save(catalog, space, chain(16))
    assert ready(catalog, space, keys) == 2


def test_a_pin_is_charged_the_size_of_its_slots() -> None:
    catalog = catalog_of(16, 4096)
    group = Group(layers=1, opaque_bytes=1)
    spec = KvSpec.groups([group], model="b", dtype="int8", block_tokens=16, weights="rev:1")
    space, keys = space_of(catalog, spec), chain(16)
    save(catalog, space, keys)
    assert catalog.pins.pin(space, keys, 10.0, now=0.0) == 4


def test_an_adoption_whose_reply_is_too_large_is_refused_and_not_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    catalog = catalog_of(4)
    space, keys = space_of(catalog), chain(4)
    save(catalog, space, keys)
    found = catalog.load(ME, space, keys, 60.0, [], now=0.0)
    monkeypatch.setattr("kvtier_daemon.catalog.reading.LIMIT_TOLD_SLOTS", 3)
    with pytest.raises(Refused, match="fewer shards"):
        catalog.adopt(YOU, found.token, [0])
    catalog.release(ME, found.lease)
    assert len(catalog.leases) == 0


def test_one_call_releases_a_limited_number_of_blocks_and_the_next_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier_daemon.catalog.reading.LIMIT_ENDED_IDS", 4)
    catalog = catalog_of(16)
    space, keys = space_of(catalog), chain(4)
    save(catalog, space, keys)
    tokens = [catalog.load(ME, space, keys, 60.0, [], now=0.0).token for _ in range(4)]
    catalog.reserve(ME, space, 0, 0, b"", chain(4))
    catalog.adopt(YOU, tokens[1], [0])
    assert not catalog.end_session(ME, gone=True)
    assert catalog.counts()["blocks"]["writing"] == 0, "writes end at once"
    assert len(catalog.leases) == 3
    catalog.expire_leases(0.0)  # another session holds one of these, so only one ends
    assert len(catalog.leases) == 2
    catalog.expire_leases(0.0)
    assert len(catalog.leases) == 1
    for _ in range(3):
        catalog.load(YOU, space, keys, 60.0, [], now=1.0)
    assert [catalog.expire_leases(100.0) for _ in range(5)] == [1, 1, 1, 1, 0]
    assert len(catalog.leases) == 0
    assert save(catalog, space, chain(16)).outcomes == bytes([GRANTED] * 16)


def test_a_purged_slot_is_erased_when_it_is_free_and_before_another_block_gets_it() -> None:
    catalog = catalog_of(8)
    space, keys = space_of(catalog), chain(4)
    save(catalog, space, keys)
    places = catalog.load(ME, space, keys, 10.0, [0], now=0.0)
    slots = places.parts[0].slots
    each = [slots[at : at + SLOT_BYTES] for at in range(0, len(slots), SLOT_BYTES)]
    held = catalog.load(ME, space, keys[:64], 10.0, [0], now=0.0)
    catalog.release(ME, places.lease)
    erased: list[tuple[bytes, int]] = []
    free_at: list[int] = []

    def erase(slot: bytes, nbytes: int) -> None:
        erased.append((slot, nbytes))
        free_at.append(catalog.counts()["blocks"]["ready"])

    assert catalog.purge(space, keys, erase) == 4
    assert sorted(erased) == sorted((slot, SIZE) for slot in each[2:]), "two blocks are still read"
    assert catalog.purge(space, keys, erase) == 0 and len(erased) == 2
    catalog.release(ME, held.lease)
    assert sorted(erased) == sorted((slot, SIZE) for slot in each)
    assert set(free_at) == {0}
    # The records of the purged blocks are used again: their end erases nothing.
    for _ in range(4):
        again = chain(8)
        save(catalog, space, again)
        catalog.forget(space, again)
    assert len(erased) == 4


def test_a_purge_of_a_block_that_is_being_saved_erases_nothing() -> None:
    catalog = catalog_of(8)
    space, keys = space_of(catalog), chain(2)
    granted = catalog.reserve(ME, space, 0, 0, b"", keys)
    erased: list[bytes] = []
    catalog.purge(space, keys, lambda slot, _: erased.append(slot))
    catalog.abort(ME, granted.lease)
    save(catalog, space, keys)
    catalog.forget(space, keys)
    assert not erased
