"""What of a configuration may be swapped while the daemon runs, and what needs a restart. No I/O.

Live is what nothing was built of: levels, limits, rates, users that join a tenant, how and what is written to
the disks. Memory, files and sockets are as they were made; and a user that has a tenant keeps it, because its
processes may have mapped that tenant's memory, which cannot be taken back.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from msgspec.structs import replace

from kvtier.codec.losses import NAMES as LOSSY
from kvtier_daemon.config import Cold, Config, settled, tenant_of

NOT_NAMED: Final = -1  # a uid that no configuration can name: it stands for all that "*" takes
LIVE: Final = frozenset(
    {
        "log_level",
        "max_clients",
        "cold.codec",
        "cold.codecs",
        "cold.write",
        "cold.admission",
        "cold.daily_writes",
        "cold.scrub",
    }
)


@dataclass(frozen=True, slots=True)
class Change:
    """A value that the daemon runs with, and what its sources say now; None where one of them has no such
    key."""

    key: str
    running: object
    files: object
    live: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def changes(running: Config, wanted: Config) -> list[Change]:
    """Return what differs, in the order of the keys."""
    before, after = settled(running), settled(wanted)
    keep_tenants = _all_keep_their_tenants(running, wanted)

    def live(key: str) -> bool:
        is_uids = key.startswith("tenants.") and key.endswith(".uids") and keep_tenants
        if key == "cold.codecs" and not _same_losses(running.cold, wanted.cold):
            return False
        return key in before and key in after and (key in LIVE or is_uids)

    return [
        Change(key, before.get(key), after.get(key), live(key))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key)
    ]


def merged(running: Config, wanted: Config) -> Config:
    """Return the running configuration with all that may be swapped as it is wanted."""
    tenants = running.tenants
    if _all_keep_their_tenants(running, wanted):
        tenants = {
            name: replace(tenant, uids=wanted.tenants[name].uids)
            for name, tenant in tenants.items()
        }
    return replace(
        running, log_level=wanted.log_level, max_clients=wanted.max_clients, tenants=tenants,
        cold=_merged_cold(running.cold, wanted.cold),
    )  # fmt: skip


def _all_keep_their_tenants(running: Config, wanted: Config) -> bool:
    """Return whether the tenants are the same, and every user that has one keeps it."""
    if running.tenants.keys() != wanted.tenants.keys():
        return False
    both = (*running.tenants.values(), *wanted.tenants.values())
    named = {uid for tenant in both for uid in tenant.uids if isinstance(uid, int)}
    return all(
        tenant_of(running, uid) in (None, tenant_of(wanted, uid)) for uid in (*named, NOT_NAMED)
    )


def _same_losses(running: Cold | None, wanted: Cold | None) -> bool:
    """Whether no codec loses bits: what is lost of a space's blocks is part of its identity, and those who
    use it were told that when they opened it."""
    codecs = [*(running.codecs if running else ()), *(wanted.codecs if wanted else ())]
    return not any(codec in LOSSY for _, codec in codecs)


def _merged_cold(running: Cold | None, wanted: Cold | None) -> Cold | None:
    if running is None or wanted is None:
        return running
    codecs = wanted.codecs if _same_losses(running, wanted) else running.codecs
    return replace(
        running, codec=wanted.codec, codecs=codecs, write=wanted.write,
        admission=wanted.admission, daily_bytes=wanted.daily_bytes, scrub_bytes=wanted.scrub_bytes,
    )  # fmt: skip
