"""Blocks that come from a store of other hosts: until they arrive no match finds them, and nothing else takes
their place."""

from __future__ import annotations

from kvtier.wire import GRANTED, IN_PROGRESS, PRESENT
from kvtier_daemon.catalog import Catalog, KnownSpace, SessionId
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.tiers.base import JoinedReads, NullTier, forget_in
from kvtier_kernels import Store
from support.specs import spec_of

ME = SessionId(1)
KEYS = bytes(range(32)) * 1 + bytes(range(32, 64)) + bytes(range(64, 96))
PAGE = 4096


def made() -> tuple[Catalog, KnownSpace]:
    catalog = Catalog(Store(), make("lru"))
    blocks = 4 * spec_of().block_bytes
    catalog.add_extent(blocks, bytearray(blocks // PAGE * 8))
    return catalog, catalog.spaces.open(bytes(32), spec_of(), ME)


def test_an_arriving_block_is_found_when_it_has_arrived_and_not_before() -> None:
    catalog, space = made()
    taken, outcomes = catalog.arrivals.reserve(space, 0, 0, b"", KEYS)
    assert outcomes == bytes([GRANTED]) * 3
    assert [one.key for one in taken] == [KEYS[at : at + 32] for at in (0, 32, 64)]
    assert catalog.match(space, KEYS).ready == 0
    assert catalog.reserve(ME, space, 0, 0, b"", KEYS).outcomes == bytes([IN_PROGRESS]) * 3
    catalog.arrivals.arrived(taken[0], bytes(16), [(1, "request")], 1.0)
    assert catalog.match(space, KEYS).ready == 1
    assert len(catalog.holds) == 1
    catalog.arrivals.failed(taken[1])
    again = catalog.reserve(ME, space, 0, 0, b"", KEYS)
    assert again.outcomes == bytes([PRESENT, GRANTED, IN_PROGRESS]), "a save takes its place"
    catalog.arrivals.failed(taken[2])
    catalog.abort(ME, again.lease)
    assert len(catalog.leases) == 0
    assert catalog.usage.saved_tokens == 0


def test_blocks_that_all_arrived_leave_no_lease() -> None:
    catalog, space = made()
    taken, _ = catalog.arrivals.reserve(space, 0, 0, b"", KEYS)
    for one in taken:
        catalog.arrivals.arrived(one, bytes(16), (), 1.0)
    assert len(catalog.leases) == 0
    assert catalog.arrivals.reserve(space, 0, 0, b"", KEYS) == ([], bytes([PRESENT]) * 3)


class Reads(NullTier):
    """Reads that end when told."""

    def __init__(self) -> None:
        super().__init__()
        self.then = None

    def call_when_read(self, request, then):
        self.then = then
        return self.waits

    waits = True

    def end(self) -> None:
        self.waits = False
        self.then()


def test_a_request_that_waits_for_two_tiers_is_called_once_after_both() -> None:
    one, other, called = Reads(), Reads(), []
    joined = JoinedReads(one, other)
    assert joined.call_when_read((1, 1), lambda: called.append(1))
    one.end()
    assert called == []
    other.end()
    assert called == [1]
    assert not joined.call_when_read((1, 1), lambda: called.append(2))


class Forgets:
    def forget(self, done):
        self.done = done
        return True


def test_a_forget_in_several_tiers_tells_all_failures_once() -> None:
    one, other, told = Forgets(), Forgets(), []
    assert forget_in((one.forget, NullTier().forget, other.forget), told.append)
    one.done("disk")
    assert told == []
    other.done("store")
    assert told == ["disk; store"]
    assert not forget_in((NullTier().forget, NullTier().forget), told.append)


def test_a_forget_that_fails_at_once_is_told() -> None:
    def fail(done):
        done("not now")
        return True

    for parts in ((fail, NullTier().forget), (NullTier().forget, fail, fail)):
        told: list[str] = []
        assert forget_in(parts, told.append)
        assert told == ["; ".join(["not now"] * (len(parts) - 1))]
