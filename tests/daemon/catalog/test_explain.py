"""The reasons why a block is not stored; and pins, which end and can be renewed."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest

from kvtier.layout import KvSpec, space_id
from kvtier_daemon.catalog import Catalog, KnownSpace, SessionId, miss_log
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.catalog.reading import LIMIT_LOOKUPS, Lookups
from kvtier_kernels import Store
from support.specs import spec_of
from support.stores import PAGE, key, keys

ME = SessionId(1)
SLOTS = 32


def spec(**changes: object) -> KvSpec:
    return spec_of("explain", **({"layers": 1, "kv_heads": 1, "head_dim": 64} | changes))


class Tenant:
    def __init__(self) -> None:
        self.catalog = Catalog(Store(), make("lru"))
        self.catalog.add_extent(SLOTS * PAGE, bytearray(8 * SLOTS))
        self.space = self.open(spec())

    def open(self, described: KvSpec) -> KnownSpace:
        return self.catalog.spaces.open(space_id(described, "t"), described, ME)

    def save(self, *names: object) -> None:
        space = self.space
        granted = self.catalog.reserve(ME, space, 0, 0, b"", keys(*names))
        self.catalog.commit(ME, granted.lease, 0, len(names))

    def why(self, name: object) -> str:
        return str(self.catalog.explain(key(name), self.space)["why"])


def test_explain_distinguishes_the_reasons_for_a_missing_block() -> None:
    tenant = Tenant()
    tenant.save("here", "gone", "kept")
    assert tenant.why("never") == "never_stored"
    granted = tenant.catalog.reserve(ME, tenant.space, 0, 0, b"", key("writing"))
    assert tenant.why("writing") == "in_progress"
    tenant.catalog.abort(ME, granted.lease)
    assert tenant.why("here") == "in_memory"
    tenant.catalog.forget(tenant.space, key("gone"))
    assert tenant.why("gone") == "forgotten"
    tenant.save(*range(SLOTS))
    assert tenant.why("here") == "evicted"
    assert tenant.why("gone") == "forgotten"


def test_a_pin_keeps_blocks_until_it_expires_or_is_removed_and_can_be_renewed() -> None:
    tenant = Tenant()
    tenant.save("a")
    tenant.save("b")
    tenant.save("c")
    for name in ("a", "b", "c"):
        assert tenant.catalog.pins.pin(tenant.space, key(name), 10.0, 100.0) == 1
    assert tenant.catalog.pins.pin(tenant.space, key("b"), 10.0, 105.0) == 1
    assert tenant.catalog.pins.nbytes == 3 * PAGE
    assert tenant.catalog.pins.unpin(tenant.space, keys("c", "else")) == 1
    assert tenant.catalog.pins.unpin(tenant.space, key("c")) == 0
    tenant.save(*range(SLOTS - 2))
    assert [tenant.why(name) for name in "abc"] == ["in_memory", "in_memory", "evicted"]
    tenant.catalog.expire_leases(111.0)
    tenant.save(*range(100, 100 + SLOTS - 1))
    assert [tenant.why(name) for name in "ab"] == ["expired", "in_memory"]
    tenant.catalog.expire_leases(116.0)
    assert tenant.catalog.pins.nbytes == 0
    tenant.save(*range(200, 200 + SLOTS))
    answer = tenant.catalog.explain(key("b"))
    assert (answer["why"], answer["ago_s"]) == ("expired", 0.0)


def test_explain_reports_the_fields_in_which_another_description_differs() -> None:
    tenant = Tenant()
    tenant.save("a")
    tenant.space = tenant.open(spec(weights="rev:2"))
    answer = tenant.catalog.explain(key("a"), tenant.space)
    assert answer["why"] == "other_identity"
    (other,) = answer["near"]
    assert other["differs"] == {"weights": {"here": "rev:2", "there": "rev:1"}}


def test_the_nearest_descriptions_come_first() -> None:
    tenant = Tenant()
    for changes in ({"weights": "x", "dtype": "float16", "model": "m"}, {"dtype": "float16"},
                    {"block_tokens": 32, "dtype": "float16"}, {}):  # fmt: skip
        tenant.space = tenant.open(spec(**changes))
        tenant.save("a")
    answer = tenant.catalog.explain(key("z"), tenant.space)
    assert answer["why"] == "never_stored"
    differs = [set(one["differs"]) for one in answer["near"]]
    assert [len(one) for one in differs] == sorted(len(one) for one in differs)
    assert differs[0] == {"dtype"}


def test_empty_spaces_do_not_hide_spaces_with_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miss_log, "LOOK_SPACES", 2)
    tenant = Tenant()
    tenant.save("a")
    for number in range(3):
        tenant.space = tenant.open(spec(weights=f"rev:{number + 2}"))
    answer = tenant.catalog.explain(key("a"), tenant.space)
    assert [set(one["differs"]) for one in answer["near"]] == [{"weights"}]


def test_noted_lookups_keep_no_catalog_in_memory() -> None:
    """The garbage collector does not see what they refer to."""
    tenant = Tenant()
    catalog, space = tenant.catalog, tenant.space
    catalog.watch(ME, space, partial(print, catalog))  # as a session, which refers to its daemon
    catalog.lookups.note(0.0, "me", space, 5, 3, 1, "absent", key(0))
    left = weakref.ref(catalog)
    del tenant, catalog, space
    gc.collect()
    assert left() is None


def test_the_last_lookups_are_found_by_their_numbers() -> None:
    lookups, space = Lookups(), Tenant().space
    for at in range(LIMIT_LOOKUPS + 10):
        lookups.note(float(at), "me", space, 5, 3, 1, "absent", key(at))
    assert lookups.numbered(10) is None
    assert lookups.numbered(LIMIT_LOOKUPS + 11) is None
    for number in (11, 500, LIMIT_LOOKUPS + 10):
        found = lookups.numbered(number)
        assert found is not None
        assert (found.number, found.missing) == (number, key(number - 1))
    assert [one.number for one in lookups.last(2)] == [LIMIT_LOOKUPS + 10, LIMIT_LOOKUPS + 9]
