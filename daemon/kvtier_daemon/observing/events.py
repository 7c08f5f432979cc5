"""Events for `kvtier monitor`: clients, lookups, saves and movements. Costs nothing without a watcher.

The daemon never waits for a watcher: each keeps a limited number of events; then the oldest are dropped and
counted. An event contains at most a few digits of a key, no token and no text of a prompt.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvtier.errors import Refused, bad_request
from kvtier_daemon.catalog import SessionId
from kvtier_daemon.tenant import Tenant

if TYPE_CHECKING:
    from kvtier_daemon.tiers.base import LowerTier

KINDS: Final = ("client", "space", "save", "lookup", "evict", "promote", "demote", "fault")
WHAT: Final = ("came", "went", "reserved", "committed")
LIMIT_KEPT: Final = 4096
LIMIT_WATCHERS: Final = 16
KEY_DIGITS: Final = 8

Wall = Callable[[], float]


@dataclass(slots=True, eq=False)
class Watcher:
    """The events of one session. `awake` is called when the first event arrives."""

    tenant: str | None  # None: events of all tenants
    kinds: frozenset[str]
    awake: Callable[[], None]
    kept: deque[msgspec.Raw] = field(default_factory=deque)
    missed: int = 0

    def note(self, event: msgspec.Raw) -> None:
        if len(self.kept) >= LIMIT_KEPT:
            self.kept.popleft()
            self.missed += 1
        self.kept.append(event)
        if len(self.kept) == 1:
            self.awake()

    def take(self, limit: int) -> tuple[int, list[msgspec.Raw]]:
        """Return how many events were dropped, and the oldest events after those."""
        missed, self.missed = self.missed, 0
        return missed, [self.kept.popleft() for _ in range(min(limit, len(self.kept)))]


class EventFeed:
    """The watchers of all sessions. Check `on` before creating an event."""

    def __init__(self, wall: Wall) -> None:
        self._wall = wall
        self._watchers: dict[SessionId, Watcher] = {}
        self._counted: dict[tuple[str, str], Counter[str]] = {}
        self.on = False  # there are watchers

    def watch(
        self,
        session: SessionId,
        tenant: str | None,
        kinds: Collection[str],
        awake: Callable[[], None],
    ) -> Watcher:
        """Keep events for this session until it takes them, up to a limit."""
        if unknown := sorted(set(kinds) - set(KINDS)):
            raise bad_request(
                f"unknown kind of event {unknown[0]!r}; known kinds: {', '.join(KINDS)}"
            )
        watcher = self._watchers.get(session)
        if watcher is None:
            if len(self._watchers) >= LIMIT_WATCHERS:
                raise Refused(
                    "too_many", f"{LIMIT_WATCHERS} clients already watch, the limit is reached"
                )
            watcher = Watcher(tenant, frozenset(kinds or KINDS), awake)
            self._watchers[session] = watcher
            self.on = True
        return watcher

    def leave(self, session: SessionId) -> None:
        if self._watchers.pop(session, None) is not None and not self._watchers:
            self.on = False
            self._counted.clear()  # the next watcher starts from zero

    def tell(self, kind: str, tenant: str, **fields: object) -> None:
        """Add an event that happened now."""
        event: msgspec.Raw | None = None
        for watcher in self._watchers.values():
            if kind in watcher.kinds and watcher.tenant in (None, tenant):
                if event is None:
                    body = {"at": round(self._wall(), 3), "kind": kind, "tenant": tenant} | fields
                    event = msgspec.Raw(msgspec.msgpack.encode(body))
                watcher.note(event)

    # --- what is counted elsewhere, and told as it grows ------------------------------------------

    def sample(self, tenants: Iterable[Tenant], lower: LowerTier) -> None:
        """Add an event for each kind of movement since the last call."""
        if not self._watchers:
            return
        for tenant in tenants:
            self._grown("evict", tenant.name, tenant.catalog.blocks.evicted)
            counts = tenant.tier.stats().counts
            self._grown("promote", tenant.name, {"blocks": counts.get("read", 0)})
            self._grown("demote", tenant.name, {"blocks": counts.get("written", 0)})
            failed = {why: n for why, n in tenant.catalog.promotions.failed.items() if n}
            self._grown("fault", tenant.name, failed)
        if (tier := lower.tier) is not None:
            self._grown("fault", "", {lower.name: tier.faults}, why=tier.failure)

    def _grown(self, kind: str, tenant: str, counts: Mapping[str, int], **more: Any) -> None:
        before = self._counted.get((kind, tenant))
        self._counted[kind, tenant] = Counter(counts)
        if before is None:
            return
        grown = {name: n - before[name] for name, n in counts.items() if n > before[name]}
        if grown:
            self.tell(kind, tenant, **grown, **more)
