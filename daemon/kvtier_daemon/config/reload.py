"""Which values of a configuration can change while the daemon runs, and which need a restart. No I/O.

Live values are levels, limits, rates, users that join a tenant, and how and what is written to the disks.
Memory, files and sockets need a restart. A user that has a tenant keeps it, because its processes may have
mapped that tenant's memory, and a mapping cannot be taken back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from kvtier_daemon.codec.losses import NAMES as LOSSY
from kvtier_daemon.config.schema import ColdConfig, Config, settled, tenant_of

# no configuration contains this uid: it stands for all users that "*" matches
NOT_NAMED: Final = -1
LIVE: Final = frozenset({
    "log_level", "max_clients", "cold.codec", "cold.codecs", "cold.write", "cold.admission",
    "cold.daily_writes", "cold.scrub",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A value in force, and the value in the sources now; None if one of them lacks the key."""

    key: str
    running: object
    files: object
    live: bool


def changes(running: Config, wanted: Config) -> list[SettingChange]:
    """Return the differences, in the order of the keys."""
    before, after = settled(running), settled(wanted)
    keep_tenants = _all_keep_their_tenants(running, wanted)

    def live(key: str) -> bool:
        is_uids = key.startswith("tenants.") and key.endswith(".uids") and keep_tenants
        if key == "cold.codecs" and not _same_losses(running.cold, wanted.cold):
            return False
        return key in before and key in after and (key in LIVE or is_uids)

    return [
        SettingChange(key, before.get(key), after.get(key), live(key))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key)
    ]


def merged(running: Config, wanted: Config) -> Config:
    """Return the running configuration with all live values of the wanted one."""
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


def _same_losses(running: ColdConfig | None, wanted: ColdConfig | None) -> bool:
    """Return whether the lossy codecs are the same: the loss is part of the identity of a space, which
    clients received when they opened it."""
    codecs = [*(running.codecs if running else ()), *(wanted.codecs if wanted else ())]
    return not any(codec in LOSSY for _, codec in codecs)


def _merged_cold(running: ColdConfig | None, wanted: ColdConfig | None) -> ColdConfig | None:
    if running is None or wanted is None:
        return running
    codecs = wanted.codecs if _same_losses(running, wanted) else running.codecs
    return replace(
        running, codec=wanted.codec, codecs=codecs, write=wanted.write,
        admission=wanted.admission, daily_bytes=wanted.daily_bytes, scrub_bytes=wanted.scrub_bytes,
    )  # fmt: skip
