"""The answers to the requests of one session, decided at once from its tenant's catalog."""

from __future__ import annotations

from collections.abc import Callable

from kvtier import wire
from kvtier.errors import Refused
from kvtier_daemon.config.members import Role
from kvtier_daemon.serving.context import Handlers, Host, Requester
from kvtier_daemon.serving.peer import Peer
from kvtier_daemon.serving.requests.admin import AdminRequests
from kvtier_daemon.serving.requests.direct_reads import DirectReadRequests
from kvtier_daemon.serving.requests.feeds import FeedRequests
from kvtier_daemon.serving.requests.hot import HotRequests
from kvtier_daemon.serving.requests.lookups import LookupRequests
from kvtier_daemon.serving.requests.saves import SaveRequests
from kvtier_daemon.serving.requests.spaces import SpaceRequests

WITHOUT_TENANT = (
    wire.Stats, wire.Record, wire.Ping, wire.Settings, wire.Tier,
    wire.Spaces, wire.List, wire.Purge, wire.Monitor, wire.HotOffer, wire.HotGrant,
)  # fmt: skip
# The role that a request needs if that is more than READ. Commit and Abort need a lease that a reader cannot
# have.
NEEDED = {
    **dict.fromkeys((wire.Reserve, wire.Regain, wire.Pin, wire.Unpin, wire.Hint, wire.Forget), Role.WRITE),
    # The memory of a GPU can only be mapped for writing.
    **dict.fromkeys((wire.HotJoin, wire.HotReserve), Role.WRITE),
    wire.Purge: Role.ADMIN,
}  # fmt: skip

# Requests without effect unless the client reads the answer.
ANSWERED = frozenset((
    wire.Reserve, wire.Regain, wire.Load, wire.Adopt, wire.Watch, wire.Monitor, wire.Grow, wire.Purge,
    wire.HotReserve, wire.DirectRead,
))  # fmt: skip


def check_role(peer: Peer, read_only: bool, needed: Role) -> None:
    """Raise Refused unless this client, which may be `read_only` by choice, has this role."""
    if read_only:
        raise Refused("read_only", "this session is read-only")
    if peer.role < needed and not (needed is Role.ADMIN and peer.privileged):
        tenant = peer.tenant.name if peer.tenant else ""
        text = (
            f"uid {peer.uid} has the role {peer.role} in tenant {tenant}, and this needs the role "
            f"{needed}"
        )
        raise Refused("read_only" if peer.role is Role.READ else "not_admin", text)


class Requests:
    """The state of one session's requests, and one table of handlers by message type.

    A handler gets the tenant and the request, and returns the answer; None if the answer is sent later. It
    raises Refused or SpecError, and never waits. `settle` does what no answer waits for, before the next
    request."""

    def __init__(self, session: Requester, server: Host) -> None:
        self.later: list[Callable[[], None]] = []
        self.lookups = LookupRequests(session, server, self.later)
        self.spaces = SpaceRequests(session, server)
        self.feeds = FeedRequests(session, server)
        self.hot = HotRequests(session, server)
        parts = (self.lookups, self.spaces, self.feeds, self.hot, SaveRequests(session, server),
                 AdminRequests(session, server), DirectReadRequests(session))  # fmt: skip
        self.handlers: Handlers = {}
        for part in parts:
            self.handlers |= part.handlers()

    def settle(self) -> None:
        """Count and log what was answered."""
        later = self.later
        while later:
            later.pop(0)()
