"""The answers to the requests of one session, decided at once from its tenant's catalog."""

from __future__ import annotations

from kvtier import wire
from kvtier_daemon.serving.context import Handlers, Host, Requester
from kvtier_daemon.serving.requests.admin import AdminRequests
from kvtier_daemon.serving.requests.feeds import FeedRequests
from kvtier_daemon.serving.requests.lookups import LookupRequests
from kvtier_daemon.serving.requests.saves import SaveRequests
from kvtier_daemon.serving.requests.spaces import SpaceRequests

WITHOUT_TENANT = (
    wire.Stats, wire.Record, wire.Ping, wire.Settings, wire.Tier,
    wire.Spaces, wire.List, wire.Purge, wire.Monitor,
)  # fmt: skip
# Refused in a read-only session. Commit and Abort need a lease that such a session cannot have.
WRITES = (wire.Reserve, wire.Regain, wire.Pin, wire.Unpin, wire.Hint, wire.Forget, wire.Purge)


class Requests:
    """The state of one session's requests, and one table of handlers by message type.

    A handler gets the tenant and the request, and returns the answer; None if the answer is sent later. It
    raises Refused or SpecError, and never waits."""

    def __init__(self, session: Requester, server: Host) -> None:
        self.lookups = LookupRequests(session, server)
        self.spaces = SpaceRequests(session, server)
        self.feeds = FeedRequests(session, server)
        parts = (self.lookups, self.spaces, self.feeds, SaveRequests(session, server),
                 AdminRequests(session, server))  # fmt: skip
        self.handlers: Handlers = {}
        for part in parts:
            self.handlers |= part.handlers()
