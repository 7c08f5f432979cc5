"""The orders of one session that the audit log gets, each when it is answered."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvtier import wire
from kvtier.key import KEY_BYTES
from kvtier_daemon.observing.audit import Actor, AuditLog, Order
from kvtier_daemon.serving.context import Requester
from kvtier_daemon.serving.listing import SHOWN_BYTES

LIMIT_TEXT = 64
AUDITED = frozenset((wire.Forget, wire.Purge, wire.Settings, wire.Tier, wire.Record))


class Begun(NamedTuple):
    order: Order
    changes: bool  # otherwise it only asks, and is noted if it is refused
    keys: int = 0
    key: str = ""


class Orders:
    """Notes what becomes of each order; those whose session ends before as unanswered."""

    def __init__(self, audit: AuditLog, session: Requester) -> None:
        self._audit = audit
        self._session = session
        self.begun: dict[int, Begun] = {}

    def begin(self, request: wire.Request, tenant: str) -> None:
        """This order is given; `tenant` is that of the client."""
        if request.id in self.begun:
            self._note(self.begun.pop(request.id), "unanswered")
        self.begun[request.id] = _begun(request, tenant)

    def answered(self, reply: wire.Message) -> None:
        begun = self.begun.pop(reply.id, None)
        if begun is None:
            return
        numbers, outcome = {}, "done"
        if isinstance(reply, wire.Failed):
            outcome = reply.code
        elif isinstance(reply, wire.Counted):
            numbers = {"blocks": reply.blocks}
        elif isinstance(reply, wire.Purged):
            numbers = {"files" if begun.order.what == "erase" else "blocks": reply.blocks}
        elif isinstance(reply, wire.Report) and "changes" in reply.stats:
            changes = msgspec.msgpack.decode(reply.stats["changes"])
            what = ", ".join(one["key"] for one in changes if one["live"])
            begun = begun._replace(order=begun.order._replace(what=what))
        self._note(begun, outcome, **numbers)

    def served(self) -> None:
        """A request without an id was served: it gets no answer."""
        if begun := self.begun.pop(0, None):
            self._note(begun, "done")

    def end(self) -> None:
        while self.begun:
            _, begun = self.begun.popitem()
            self._note(begun, "unanswered")

    def _note(self, begun: Begun, outcome: str, **numbers: int) -> None:
        if begun.keys:
            numbers["keys"] = begun.keys
        if begun.changes or outcome != "done":
            peer = self._session.peer
            actor = Actor(peer.uid, peer.pid, self._session.name)
            self._audit.note(begun.order, outcome, actor, begun.key, **numbers)


def _begun(request: wire.Request, tenant: str) -> Begun:
    if isinstance(request, wire.Forget):
        order = Order("forget", tenant, space=request.space)
        return Begun(order, True, len(request.keys) // KEY_BYTES, request.keys[:SHOWN_BYTES].hex())
    if isinstance(request, wire.Purge):
        what = "erase" if request.space < 0 else ""
        return Begun(
            Order("purge", request.tenant[:LIMIT_TEXT] or tenant, what, request.space), True
        )
    if isinstance(request, wire.Settings):
        reloads = request.order == "reload"
        settings = Order("settings", what=request.order[:LIMIT_TEXT])
        return Begun(Order("reload") if reloads else settings, reloads)
    if isinstance(request, wire.Tier):
        what = f"{request.tier} {request.order}"[:LIMIT_TEXT]
        return Begun(Order("tier", what=what), request.order != "status")
    assert isinstance(request, wire.Record)
    what = "stop" if request.stop else "start" if request.limit_bytes else "status"
    return Begun(Order("record", what=what), what != "status")
