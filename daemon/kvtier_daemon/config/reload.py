"""Which values of a configuration can change while the daemon runs, and which need a restart. No I/O.

Live values are levels, limits, rates, users, and how and what is written to the disks. Memory, files and
sockets need a restart. A tenant that a user leaves gets other memory (see `tiers/renewing`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from kvtier_daemon.codec.losses import NAMES as LOSSY
from kvtier_daemon.config.members import Member, Role, member_of, roles_of
from kvtier_daemon.config.schema import BUDGETS, USERS, ColdConfig, Config, RemoteConfig, settled
from kvtier_daemon.config.values import EVERYONE

# no configuration contains this uid: it stands for users that no list names
NOT_NAMED: Final = -1
LIVE: Final = frozenset({
    "log_level", "max_clients", "audit.path", "cold.codec", "cold.codecs", "cold.write", "cold.admission",
    "cold.daily_writes", "cold.scrub", "remote.credentials", "remote.write", "remote.archive",
    "remote.warm_up_percent", "remote.stop_s", "remote.codec", "remote.deadline_s", "remote.buffer",
    "remote.key_file",
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
    same_tenants = running.tenants.keys() == wanted.tenants.keys()

    def live(key: str) -> bool:
        is_users = key.startswith("tenants.") and key.endswith(USERS) and same_tenants
        if key == "cold.codecs" and not _same_losses(running.cold, wanted.cold):
            return False
        is_live = key in LIVE or is_users or (key.startswith("tenants.") and key.endswith(BUDGETS))
        return key in before and key in after and is_live

    return [
        SettingChange(key, before.get(key), after.get(key), live(key))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key)
    ]


def merged(running: Config, wanted: Config) -> Config:
    """Return the running configuration with all live values of the wanted one."""
    same_tenants = running.tenants.keys() == wanted.tenants.keys()
    live = (*BUDGETS, *(USERS if same_tenants else ()))
    tenants = {
        name: replace(tenant, **{key: getattr(wanted.tenants[name], key) for key in live})
        if name in wanted.tenants else tenant
        for name, tenant in running.tenants.items()
    }  # fmt: skip
    return replace(
        running, log_level=wanted.log_level, max_clients=wanted.max_clients, audit=wanted.audit,
        tenants=tenants, cold=_merged_cold(running.cold, wanted.cold),
        remote=_merged_remote(running.remote, wanted.remote),
    )  # fmt: skip


def left_tenants(running: Config, wanted: Config) -> set[str]:
    """Return the tenants that an entry of a list of users has left, or in which it may not write any longer:
    such a user may have mapped the memory."""
    both = (*running.tenants.values(), *wanted.tenants.values())
    listed = {entry for tenant in both for users in roles_of(tenant).values() for entry in users}
    left = set()
    for entry in (*listed, EVERYONE):
        before, after = _member(running, entry), _member(wanted, entry)
        if before is not None and (
            after is None or after.tenant != before.tenant or before.role >= Role.WRITE > after.role
        ):
            left.add(before.tenant)
    return left


def _member(config: Config, entry: int | str) -> Member | None:
    """Return the tenant and the role of this entry of a list of users, if nothing more precise applies."""
    if isinstance(entry, int):
        return member_of(config, entry)
    return member_of(config, NOT_NAMED, () if entry == EVERYONE else (int(entry[1:]),))


def _same_losses(running: ColdConfig | None, wanted: ColdConfig | None) -> bool:
    """Return whether the lossy codecs are the same: the loss is part of the identity of a space, which
    clients received when they opened it."""
    codecs = [*(running.codecs if running else ()), *(wanted.codecs if wanted else ())]
    return not any(codec in LOSSY for _, codec in codecs)


def _merged_remote(
    running: RemoteConfig | None, wanted: RemoteConfig | None
) -> RemoteConfig | None:
    if running is None or wanted is None:
        return running
    return replace(
        running, credentials=wanted.credentials, write=wanted.write, archive=wanted.archive,
        warm_up_percent=wanted.warm_up_percent, stop_s=wanted.stop_s, codec=wanted.codec,
        deadline_s=wanted.deadline_s, buffer_bytes=wanted.buffer_bytes, key_file=wanted.key_file,
    )  # fmt: skip


def _merged_cold(running: ColdConfig | None, wanted: ColdConfig | None) -> ColdConfig | None:
    if running is None or wanted is None:
        return running
    codecs = wanted.codecs if _same_losses(running, wanted) else running.codecs
    return replace(
        running, codec=wanted.codec, codecs=codecs, write=wanted.write,
        admission=wanted.admission, daily_bytes=wanted.daily_bytes, scrub_bytes=wanted.scrub_bytes,
    )  # fmt: skip
