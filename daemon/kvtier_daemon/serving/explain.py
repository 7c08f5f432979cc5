"""The report of `kvtier explain`: why a lookup ended, and where a block is or why it is not stored."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from kvtier.errors import bad_request
from kvtier.key import KEY_BYTES
from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.catalog.explain import WHERE
from kvtier_daemon.catalog.reading import Lookup
from kvtier_daemon.tenant import Tenant

LAST = 20
LIMIT_EXPLAINED = 4096  # keys times spaces; takes some milliseconds


def explain(
    tenant: Tenant, number: int, keys: bytes, now: float, digits: int | None = None
) -> dict[str, Any]:
    """Explain the lookup of this number, or these keys, or the last lookups. `digits` limits how much is
    shown of keys that other clients looked up."""
    catalog = tenant.catalog

    @cache
    def requestable(space: int) -> bool:
        return tenant.can_open(catalog.spaces.at(space))

    if number:
        lookup = catalog.lookups.numbered(number)
        if lookup is None:
            raise bad_request(f"lookup {number} is not among the last lookups")
        body: dict[str, Any] = {"lookup": _described(lookup, now, digits)}
        if lookup.missing:
            missing = _explained(tenant, requestable, lookup.missing, lookup.space)
            body["keys"] = [missing | {"key": missing["key"][:digits]}]
        return body
    if not keys:
        return {"lookups": [_described(one, now, digits) for one in catalog.lookups.last(LAST)]}
    if len(keys) % KEY_BYTES:
        raise bad_request(f"keys: got {len(keys)} bytes, expected keys of {KEY_BYTES} bytes each")
    if len(keys) // KEY_BYTES * max(1, len(catalog.spaces)) > LIMIT_EXPLAINED:
        raise bad_request("too many keys: split the request")
    each = (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
    return {"keys": [_explained(tenant, requestable, key, None) for key in each]}


def _explained(
    tenant: Tenant, requestable: Callable[[int], bool], key: bytes, space: KnownSpace | None
) -> dict[str, Any]:
    found = tenant.catalog.explain(key, space)
    if found["why"] in ("on_disk", "coming"):
        if not tenant.tier.reads.is_on:
            found["why"] = "tier_off"
        elif not requestable(found["space"]):
            found["why"] = "unasked"
    if found["why"] not in WHERE:
        asked = [space] if space is not None else list(tenant.catalog.spaces)
        for one in asked:
            if tenant.shared.beyond(one, key, 0):
                found |= {"why": "in_remote", "space": one.number}
    for near in found.get("near", ()):
        if space is not None and not near["differs"]:  # they differ only in the loss of the codec
            theirs = tenant.stored(tenant.catalog.spaces.at(near["space"]))
            near["differs"] = {"cold.codecs": {"here": tenant.stored(space), "there": theirs}}
    return found


def _described(lookup: Lookup, now: float, digits: int | None) -> dict[str, Any]:
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
