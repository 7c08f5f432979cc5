"""What of a configuration may be swapped while the daemon runs, and what needs a restart. No I/O.

Live is what nothing was built of: levels, limits, rates, who is whose user, how and what is written to the
disks. Memory, files and sockets are as they were made.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from msgspec.structs import replace

from kvtier.codec.losses import NAMES as LOSSY
from kvtier_daemon.config import Cold, Config, settled

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
    same_tenants = running.tenants.keys() == wanted.tenants.keys()

    def live(key: str) -> bool:
        # While a tenant is missing, nobody may lose a user to it.
        is_uids = key.startswith("tenants.") and key.endswith(".uids") and same_tenants
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
    if tenants.keys() == wanted.tenants.keys():
        tenants = {
            name: replace(tenant, uids=wanted.tenants[name].uids)
            for name, tenant in tenants.items()
        }
    return replace(
        running, log_level=wanted.log_level, max_clients=wanted.max_clients, tenants=tenants,
        cold=_merged_cold(running.cold, wanted.cold),
    )  # fmt: skip


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
