"""What a person asks of what is kept: which spaces there are, their keys, and that they be forgotten. In
pieces, none of which keeps the others waiting for more than a millisecond or two.

A client may ask about its own tenant; root, and the daemon's user, about any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Final

from kvtier.catalog import Space
from kvtier.errors import Refused
from kvtier.key import KEY_BYTES
from kvtier.wire import LIMIT_LISTED, LISTED
from kvtier_daemon.mover import Mover
from kvtier_daemon.tenant import Tenant

LOOK_RECORDS: Final = 65_536  # in one piece
PURGE_BLOCKS: Final = 512
SPACES_AT_ONCE: Final = 64
TOLD_BYTES: Final = 8  # of a key, to who is not privileged
KEY_AT: Final = LISTED.size - KEY_BYTES


def tenant_of(
    own: Tenant | None, name: str, tenants: Mapping[str, Tenant], privileged: bool
) -> Tenant:
    """The tenant that a client means. Raises Refused if it is not the client's to ask about."""
    if not name:
        if own is None:
            raise Refused("no_tenant", f"name a tenant: there are {', '.join(tenants)}")
        return own
    if own is not None and name == own.name:
        return own
    if not privileged:
        text = f"tenant {name!r} is not yours; others are for root, and the user the daemon runs as"
        raise Refused("no_tenant", text)
    if name not in tenants:
        raise Refused("no_tenant", f"no tenant {name!r}: there are {', '.join(tenants)}")
    return tenants[name]


def spaces(tenant: Tenant, first: int) -> dict[str, Any]:
    """Some of the tenant's spaces, from this number on; `next` is where to go on, 0 at the end."""
    rest = (space for space in tenant.catalog.each_space() if space.number >= first)
    told = list(islice(rest, SPACES_AT_ONCE + 1))
    after = told.pop().number if len(told) > SPACES_AT_ONCE else 0
    return {"tenant": tenant.name, "spaces": [_told(space) for space in told], "next": after}


def _told(space: Space) -> dict[str, Any]:
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
    """How many blocks each space has, by the store's number of it, among some of the records."""
    return tenant.catalog.tally(_checked(first), LOOK_RECORDS)


def listed(
    tenant: Tenant, space: int, first: int, limit: int, privileged: bool
) -> tuple[int, bytes]:
    """Some of the blocks of a space. Who is not privileged is told the first bytes of each key, by which a
    block can be recognised and not loaded: the key of a salted block is what separates it from others."""
    if not 0 < limit <= LIMIT_LISTED:
        raise Refused("bad_request", f"{limit} keys at once: 1 to {LIMIT_LISTED}")
    found = tenant.catalog.space(space)
    after, rows = tenant.catalog.listed(found, _checked(first), LOOK_RECORDS, limit)
    if not privileged:
        told, hidden = KEY_AT + TOLD_BYTES, bytes(KEY_BYTES - TOLD_BYTES)
        each = (rows[at : at + told] for at in range(0, len(rows), LISTED.size))
        rows = b"".join(row + hidden for row in each)
    return after, rows


def purge(
    tenant: Tenant, space: int, first: int, over: Callable[[str], None]
) -> tuple[int, int, bool]:
    """Forget some of the blocks of a space: where to go on, how many blocks, and whether `over` will be told
    what went wrong on the way to the disk, or nothing. So it is at the end, when all of it would survive a
    kill."""
    mover = tenant.mover
    if mover is not None:
        check_found_all(mover)
    found = tenant.catalog.space(space)
    after, rows = tenant.catalog.listed(found, _checked(first), LOOK_RECORDS, PURGE_BLOCKS)
    each = (rows[at + KEY_AT : at + LISTED.size] for at in range(0, len(rows), LISTED.size))
    keys = b"".join(dict.fromkeys(each))
    blocks = tenant.catalog.forget(found, keys)
    if mover is not None and not after:
        mover.forget(found, keys, over)
        return after, blocks, True
    return after, blocks, False


def check_found_all(mover: Mover) -> None:
    """Raises Refused where what is on disk is not known: the cold tier is off, or being looked through."""
    if not mover.has_found_all:
        raise Refused(
            "disk_failed", "the cold tier is still looking at what it has: try again soon"
        )


def _checked(first: int) -> int:
    if not 0 <= first < 1 << 32:
        raise Refused("bad_request", f"no piece begins at {first}")
    return first
