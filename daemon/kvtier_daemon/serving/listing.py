"""Lists of spaces and blocks, and purges, in portions that take a millisecond or two.

A client may use them for its own tenant; root and the daemon's user for any tenant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Any, Final

from kvtier.errors import Refused, bad_request
from kvtier.key import KEY_BYTES
from kvtier.wire import LIMIT_LISTED, LISTED
from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.base import forget_in
from kvtier_daemon.tiers.slot_eraser import SlotEraser

LOOK_RECORDS: Final = 65_536  # in one portion
PURGE_BLOCKS: Final = 512
ERASED_BYTES: Final = 32 << 20  # of memory, in one portion: some milliseconds
SPACES_AT_ONCE: Final = 64
SHOWN_BYTES: Final = 8  # of a key, for clients that are not privileged
KEY_AT: Final = LISTED.size - KEY_BYTES


def tenant_of(
    own: Tenant | None, name: str, tenants: Mapping[str, Tenant], privileged: bool
) -> Tenant:
    """The tenant of this name, or the client's own. Raises Refused if the client may not use it."""
    if not name:
        if own is None:
            raise Refused("no_tenant", f"name a tenant; configured are {', '.join(tenants)}")
        return own
    if own is not None and name == own.name:
        return own
    if not privileged:
        text = (
            f"tenant {name!r} is not yours; only root and the daemon's user may access "
            "other tenants"
        )
        raise Refused("no_tenant", text)
    if name not in tenants:
        raise Refused("no_tenant", f"no tenant {name!r}; configured are {', '.join(tenants)}")
    return tenants[name]


def spaces(tenant: Tenant, first: int) -> dict[str, Any]:
    """Some of the tenant's spaces, from this number on; `next` is where to continue, 0 at the end."""
    rest = (space for space in list(tenant.catalog.spaces) if space.number >= first)
    some = list(islice(rest, SPACES_AT_ONCE + 1))
    after = some.pop().number if len(some) > SPACES_AT_ONCE else 0
    return {"tenant": tenant.name, "spaces": [_described(space) for space in some], "next": after}


def _described(space: KnownSpace) -> dict[str, Any]:
    spec = space.spec
    return {
        "space": space.number,
        "index": space.index,
        "identity": space.identity.hex(),
        "model": spec.model,
        "weights": spec.weights,
        "dtype": spec.dtype,
        "engine": spec.engine,
        "block_tokens": spec.block_tokens,
        "block_bytes": spec.block_bytes,
        "groups": len(spec.cache_groups),
        "places": spec.places,
        "sessions": len(space.users),
        "used_tokens": space.used_tokens,
        "loaded_bytes": space.loaded_bytes,
    }


def tally(tenant: Tenant, first: int) -> tuple[int, bytes]:
    """The number of blocks per space, by its index in the store, among some of the records."""
    return tenant.catalog.blocks.store.tally(_checked(first), LOOK_RECORDS)


def listed(
    tenant: Tenant, space: int, first: int, limit: int, privileged: bool
) -> tuple[int, bytes]:
    """Some of the blocks of a space. A client that is not privileged gets only the first bytes of each key.
    They identify a block, and do not allow to load it: the key of a salted block must stay secret."""
    if not 0 < limit <= LIMIT_LISTED:
        raise bad_request(f"limit is {limit}, it must be 1 to {LIMIT_LISTED}")
    found = tenant.catalog.spaces.at(space)
    after, rows = _rows(tenant, found, _checked(first), limit)
    if not privileged:
        shown, hidden = KEY_AT + SHOWN_BYTES, bytes(KEY_BYTES - SHOWN_BYTES)
        each = (rows[at : at + shown] for at in range(0, len(rows), LISTED.size))
        rows = b"".join(row + hidden for row in each)
    return after, rows


def purge(
    tenant: Tenant, space: int, first: int, done: Callable[[str], None]
) -> tuple[int, int, bool]:
    """Forget some of the blocks of a space, and erase their slots. Return where to continue, how many blocks
    were forgotten, and whether `done` will be called with the failure, or an empty text. For the last portion
    it is called when all of the purge is durable."""
    check_recovered(tenant)
    found = tenant.catalog.spaces.at(space)
    groups = zip(found.block_bytes, found.spec.cache_groups, strict=True)
    key_bytes = sum(nbytes * group.shards for nbytes, group in groups)
    limit = min(PURGE_BLOCKS, max(1, ERASED_BYTES // key_bytes))
    after, rows = _rows(tenant, found, _checked(first), limit)
    each = (rows[at + KEY_AT : at + LISTED.size] for at in range(0, len(rows), LISTED.size))
    keys = b"".join(dict.fromkeys(each))
    eraser = SlotEraser(tenant.name, tenant.extents)
    blocks = tenant.catalog.purge(found, keys, eraser.erase)
    # Requests want blocks also during the purge.
    shared = tenant.shared.forget if first and after else tenant.shared.purge
    # A tier below memory makes all portions durable at once.
    last = partial(tenant.tier.forgets.forget, patient=True)
    tiers = (shared,) if after else (last, shared)
    waits = forget_in([partial(forget, found, keys) for forget in tiers], done)
    return after, blocks, waits


def check_recovered(tenant: Tenant) -> None:
    """Raise Refused if the blocks on disk are not known yet."""
    if not tenant.tier.recovery.is_complete:
        raise Refused("disk_failed", "the cold tier is still reading its segments: try again soon")


def _rows(tenant: Tenant, space: KnownSpace, first: int, limit: int) -> tuple[int, bytes]:
    """At most `limit` blocks of the space among LOOK_RECORDS records from `first` on, including forgotten
    blocks that are being read; where to continue, 0 at the end (see wire.LISTED)."""
    if space.index < 0:
        return 0, b""
    return tenant.catalog.blocks.store.listed(space.index, first, LOOK_RECORDS, limit)


def _checked(first: int) -> int:
    if not 0 <= first < 1 << 32:
        raise bad_request(f"no page begins at {first}")
    return first
