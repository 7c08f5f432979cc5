"""What happens, for whoever watches: clients, lookups, saves, and what moves. Costs nothing while nobody
does.

Nobody is waited for: a watcher keeps so many events and no more, then the oldest go, and it is told how
many. An event has no key beyond a few digits of one, no token and no text.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvtier.catalog import SessionId
from kvtier.errors import Refused
from kvtier_daemon.tenant import Tenant

if TYPE_CHECKING:
    from kvtier_daemon.tiers.cold import ColdTier

KINDS: Final = ("client", "space", "save", "lookup", "evict", "promote", "demote", "fault")
WHAT: Final = ("came", "went", "reserved", "committed")
LIMIT_KEPT: Final = 4096
LIMIT_WATCHERS: Final = 16
KEY_DIGITS: Final = 8

Wall = Callable[[], float]


@dataclass(slots=True, eq=False)
class Watcher:
    """One session's view. `awake` is called when there is something to take, and was nothing before."""

    tenant: str | None  # None: every tenant's
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
        """How many events were forgotten, and the oldest ones after those."""
        missed, self.missed = self.missed, 0
        return missed, [self.kept.popleft() for _ in range(min(limit, len(self.kept)))]


class Events:
    """Who watches, and what is told. Ask `on` before making anything of what is told."""

    def __init__(self, wall: Wall) -> None:
        self._wall = wall
        self._watchers: dict[SessionId, Watcher] = {}
        self._counted: dict[tuple[str, str], Counter[str]] = {}

    @property
    def on(self) -> bool:
        return bool(self._watchers)

    def watch(
        self,
        session: SessionId,
        tenant: str | None,
        kinds: Collection[str],
        awake: Callable[[], None],
    ) -> Watcher:
        """From now on events are kept for this session until it takes them, up to a limit."""
        if unknown := sorted(set(kinds) - set(KINDS)):
            raise Refused(
                "bad_request", f"no events of kind {unknown[0]!r}: there are {', '.join(KINDS)}"
            )
        watcher = self._watchers.get(session)
        if watcher is None:
            if len(self._watchers) >= LIMIT_WATCHERS:
                raise Refused("too_many", f"{LIMIT_WATCHERS} clients watch already")
            watcher = Watcher(tenant, frozenset(kinds or KINDS), awake)
            self._watchers[session] = watcher
        return watcher

    def leave(self, session: SessionId) -> None:
        if self._watchers.pop(session, None) is not None and not self._watchers:
            self._counted.clear()  # whoever comes next begins anew

    def tell(self, kind: str, tenant: str, **fields: object) -> None:
        """This has happened just now."""
        event: msgspec.Raw | None = None
        for watcher in self._watchers.values():
            if kind in watcher.kinds and watcher.tenant in (None, tenant):
                if event is None:
                    body = {"at": round(self._wall(), 3), "kind": kind, "tenant": tenant} | fields
                    event = msgspec.Raw(msgspec.msgpack.encode(body))
                watcher.note(event)

    # --- what is counted elsewhere, and told as it grows ------------------------------------------

    def sample(self, tenants: Iterable[Tenant], cold: ColdTier | None) -> None:
        """Tell what moved since the last call, a line for each kind of movement."""
        if not self._watchers:
            return
        for tenant in tenants:
            self._grown("evict", tenant.name, tenant.catalog.evicted_blocks)
            if (mover := tenant.mover) is not None:
                counts = mover.counts
                self._grown("promote", tenant.name, {"blocks": counts["read"]})
                self._grown("demote", tenant.name, {"blocks": counts["written"]})
                failed = {why: n for why, n in tenant.catalog.cold.failed.items() if n}
                self._grown("fault", tenant.name, failed)
        if cold is not None:
            self._grown("fault", "", {"cold": cold.faults}, why=cold.failure)

    def _grown(self, kind: str, tenant: str, counts: Mapping[str, int], **more: Any) -> None:
        before = self._counted.get((kind, tenant))
        self._counted[kind, tenant] = Counter(counts)
        if before is None:
            return
        grown = {name: n - before[name] for name, n in counts.items() if n > before[name]}
        if grown:
            self.tell(kind, tenant, **grown, **more)
