"""A policy is one class and one row: this file adds one, and a catalog evicts by it."""

import sys
from array import array

import pytest
from tests.conformance.policy_tests import PolicyTests, pack

from kvtier import KvSpec
from kvtier.key import token_keys
from kvtier.layout import space_id
from kvtier.wire import SLOT_BYTES
from kvtier_daemon.catalog import Catalog, SessionId
from kvtier_daemon.catalog.policy import NAMED, make
from kvtier_kernels import Store
from support.specs import spec_of

ME = SessionId(1)


def unpack(ids: bytes) -> list[int]:
    """Raise ValueError if the last id is incomplete."""
    found = array("I")
    found.frombytes(ids)
    return list(found)


class MostRecent:
    """Evicts the most recently used block first."""

    def __init__(self):
        self.order, self.aside, self.first = {}, set(), {}

    def added(self, ids, names=b"", parents=b""):
        self.left(ids)
        self.order.update(dict.fromkeys(unpack(ids)[::-1]))

    def wanted(self, ids, names=b""):
        known = [each for each in unpack(ids) if each in self.order]
        for each in known[::-1]:
            self.first.pop(each, None)
            self.order[each] = self.order.pop(each)

    def refreshed(self, ids):
        unpack(ids)

    def left(self, ids):
        for each in unpack(ids):
            self.order.pop(each, None)
            self.first.pop(each, None)
            self.aside.discard(each)

    gone = left

    def held(self, ids):
        self.aside |= self.order.keys() & set(unpack(ids))

    def freed(self, ids):
        self.aside -= set(unpack(ids))

    def demoted(self, ids):
        self.first.update(dict.fromkeys(each for each in unpack(ids) if each in self.order))

    def now(self, seconds): ...
    def hinted(self, ids, importance, names=b""): ...

    def victims(self, n):
        named = [*self.first, *(each for each in reversed(self.order) if each not in self.first)]
        return pack(*[each for each in named if each not in self.aside][:n])

    def __len__(self):
        return len(self.order) - len(self.aside)

    def memory_bytes(self):
        return sys.getsizeof(self.order) + sys.getsizeof(self.aside)


class TestMostRecent(PolicyTests):
    def make_policy(self):
        return MostRecent()


def save(catalog: Catalog, spec: KvSpec, keys: bytes) -> None:
    space = catalog.spaces.open(space_id(spec, "t"), spec)
    granted = catalog.reserve(ME, space, 0, 0, b"", keys)
    catalog.commit(ME, granted.lease, 0, len(granted.slots) // SLOT_BYTES)


def test_a_catalog_evicts_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMED, "most-recent", MostRecent)
    spec = spec_of()
    catalog = Catalog(Store(), make("most-recent"))
    catalog.add_extent(2 * spec.block_bytes, bytearray(8 * (2 * spec.block_bytes // 4096 + 1)))
    old, recent, new = (token_keys(bytes(32), [n] * 16, 16).packed for n in range(3))
    for keys in (old, recent, new):
        save(catalog, spec, keys)
    space = catalog.spaces.open(space_id(spec, "t"), spec)
    here = [catalog.match(space, keys, is_new=False).ready for keys in (old, recent, new)]
    assert here == [1, 0, 1]
