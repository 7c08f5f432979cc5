"""What `kvtier explain` says: why a lookup ended where it did, and where a block is, or why it is nowhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from kvtier.catalog import Space
from kvtier.catalog.departures import Lookup
from kvtier.errors import Refused
from kvtier.key import KEY_BYTES
from kvtier_daemon.tenant import Tenant

LAST = 20
LIMIT_EXPLAINED = 4096  # keys times spaces: some milliseconds


def explain(
    tenant: Tenant, number: int, keys: bytes, now: float, digits: int | None = None
) -> dict[str, Any]:
    """Of one tenant: the lookup of this number, or these keys, or the last lookups. `digits` limits
    what is told of each key that others have looked up."""
    catalog = tenant.catalog

    @cache
    def asked(space: int) -> bool:
        return tenant.asks_for(catalog.space(space))

    if number:
        lookup = catalog.lookups.numbered(number)
        if lookup is None:
            raise Refused("bad_request", f"lookup {number} is not among the last ones")
        told: dict[str, Any] = {"lookup": _told(lookup, now, digits)}
        if lookup.missing:
            missing = _explained(tenant, asked, lookup.missing, lookup.space)
            told["keys"] = [missing | {"key": missing["key"][:digits]}]
        return told
    if not keys:
        return {"lookups": [_told(one, now, digits) for one in catalog.lookups.last(LAST)]}
    if len(keys) % KEY_BYTES:
        raise Refused("bad_request", f"{len(keys)} bytes of keys: {KEY_BYTES} each")
    if len(keys) // KEY_BYTES * max(1, catalog.spaces) > LIMIT_EXPLAINED:
        raise Refused("bad_request", "too many keys: ask in parts")
    each = (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
    return {"keys": [_explained(tenant, asked, key, None) for key in each]}


def _explained(
    tenant: Tenant, asked: Callable[[int], bool], key: bytes, space: Space | None
) -> dict[str, Any]:
    told = tenant.catalog.explain(key, space)
    if told["why"] in ("on_disk", "coming"):
        if not tenant.brings:
            told["why"] = "tier_off"
        elif not asked(told["space"]):
            told["why"] = "unasked"
    for near in told.get("near", ()):
        if space is not None and not near["differs"]:  # in nothing but what is lost on the disk
            there = tenant.stored(tenant.catalog.space(near["space"]))
            near["differs"] = {"cold.codecs": {"here": tenant.stored(space), "there": there}}
    return told


def _told(lookup: Lookup, now: float, digits: int | None) -> dict[str, Any]:
    return {
        "number": lookup.number,
        "ago_s": round(now - lookup.at, 3),
        "client": lookup.client,
        "space": lookup.space.number,
        "blocks": lookup.blocks,
        "ready": lookup.ready,
        "coming": lookup.coming,
        "used": lookup.used,
        "why": lookup.why,
        "missing": lookup.missing.hex()[:digits],
    }
