"""Which tenant a user belongs to, and what the user may do there. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import IntEnum
from typing import NamedTuple

from kvtier_daemon.config.schema import Config, TenantConfig
from kvtier_daemon.config.values import EVERYONE, group_entry


class Role(IntEnum):
    """What a user may do in its tenant; each role includes those before it."""

    READ = 1
    WRITE = 2
    ADMIN = 3

    def __str__(self) -> str:
        return self.name.lower()


class Member(NamedTuple):
    """A user's tenant and role."""

    tenant: str
    role: Role


def roles_of(tenant: TenantConfig) -> dict[Role, tuple[int | str, ...]]:
    """Return the lists of users by role, the highest role first."""
    return {Role.ADMIN: tenant.uids, Role.WRITE: tenant.writers, Role.READ: tenant.readers}


def member_of(config: Config, uid: int, groups: Collection[int] = ()) -> Member | None:
    """Return the tenant and the role of the user `uid` in these groups.

    A list that names the user takes precedence over lists that name a group, and these over "*". In a tenant
    that names several groups of the user, the highest role applies. None: the user must be refused, because
    no tenant accepts it, or because several tenants name a group of it.
    """
    for names in ({uid}, {group_entry(group) for group in groups}, {EVERYONE}):
        found: dict[str, Role] = {}
        for name, tenant in config.tenants.items():
            for role, users in roles_of(tenant).items():
                if not names.isdisjoint(users):
                    found.setdefault(name, role)
        if found:
            return Member(*found.popitem()) if len(found) == 1 else None
    return None


def labelled_users(tenant: TenantConfig) -> Iterator[int | str]:
    """Yield the users of a tenant, each with its role unless that is admin."""
    yield from tenant.uids
    for role, users in roles_of(tenant).items():
        if role is not Role.ADMIN:
            yield from (f"{role} {user}" for user in users)
