"""Requests of one session that are answered when something happens: changes, events, more memory."""

from __future__ import annotations

from kvtier import wire
from kvtier.errors import Refused, bad_request
from kvtier_daemon.catalog import SpaceWatch
from kvtier_daemon.observing.events import Watcher
from kvtier_daemon.serving.context import LONGEST_WAIT_S, Handlers, Host, Requester
from kvtier_daemon.tenant import Tenant

LIMIT_SESSION_WATCHES = 4
COLLECT_S = 0.01  # changes of this time are sent together


class FeedRequests:
    """A feed has at most one unanswered request. A client that does not ask again gets nothing."""

    def __init__(self, session: Requester, server: Host) -> None:
        self._session = session
        self._server = server
        self._watched: set[int] = set()
        self._watching: dict[int, int] = {}  # per space, the request that waits for changes
        self._monitoring = 0  # the request that waits for events
        self.growing = 0  # the request that waits for the tenant's memory to grow

    def handlers(self) -> Handlers:
        return {wire.Watch: self.watch, wire.Monitor: self.monitor, wire.Grow: self.grow}

    def watch(self, tenant: Tenant, request: wire.Watch) -> None:
        space = tenant.catalog.spaces.at(request.space)
        if request.space in self._watching:
            raise bad_request(f"this session already watches space {request.space}")
        if len(self._watched - {request.space}) >= LIMIT_SESSION_WATCHES:
            raise Refused(
                "too_many", f"this session already watches {LIMIT_SESSION_WATCHES} spaces"
            )

        def wake() -> None:
            self._server.loop.call_later(COLLECT_S, self._send_changes, request.space, watch)

        watch = tenant.catalog.watch(self._session.id, space, wake)
        self._watched.add(request.space)
        self._watching[request.space] = request.id
        self._send_changes(request.space, watch)

    def _send_changes(self, space: int, watch: SpaceWatch) -> None:
        """Answer the request that waits for changes of this space, if there are any."""
        if watch.kept and space in self._watching:
            missed, changes = watch.take(wire.LIMIT_CHANGES)
            self._session.send(wire.Changed(self._watching.pop(space), missed, changes))

    def monitor(self, tenant: Tenant | None, request: wire.Monitor) -> None:
        privileged = self._session.peer.privileged
        if self._monitoring:
            raise bad_request("this session already waits for events")

        def wake() -> None:
            self._server.loop.call_later(COLLECT_S, self._send_events, watcher)

        if tenant is None and not privileged:
            raise Refused("no_tenant", "this client has no tenant")
        of = None if privileged or tenant is None else tenant.name
        watcher = self._server.events.watch(self._session.id, of, request.kinds, wake)
        self._monitoring = request.id
        self._send_events(watcher)

    def _send_events(self, watcher: Watcher) -> None:
        if self._monitoring and (watcher.kept or watcher.missed):
            events = wire.Events(self._monitoring, *watcher.take(wire.LIMIT_EVENTS))
            self._monitoring = 0
            self._session.send(events)

    def grow(self, tenant: Tenant, request: wire.Grow) -> wire.Reply | None:
        if self.growing:
            raise bad_request("this session already waits for memory to grow")
        # A client counts retired extents if later ones were announced to it.
        used = sum(not extent.is_retired for extent in tenant.extents)
        waits = tenant.catalog.growing and used <= request.extents
        if not waits or request.wait_ms < 1:
            return _grown(tenant, request.id)
        self.growing = request.id
        wait_s = min(request.wait_ms / 1000, LONGEST_WAIT_S)
        self._server.loop.call_later(wait_s, self.send_growth, tenant, request.id)
        return None

    def send_growth(self, tenant: Tenant, request_id: int) -> None:
        """Answer the request that waits for memory, if it is this one."""
        if request_id and request_id == self.growing:
            self.growing = 0
            self._session.send(_grown(tenant, request_id))


def _grown(tenant: Tenant, request_id: int) -> wire.Grown:
    return wire.Grown(request_id, len(tenant.extents), tenant.catalog.growing)
