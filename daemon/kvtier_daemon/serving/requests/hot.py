"""Requests about the memory of GPUs: of the holder that offers it, and of engines that copy blocks to it."""

from __future__ import annotations

from kvtier import wire
from kvtier.errors import Refused, bad_request
from kvtier_daemon.catalog import LeaseId
from kvtier_daemon.serving.context import Handlers, Host, Requester
from kvtier_daemon.tenant import Tenant


class HotRequests:
    """What one session holds, or which GPU it has joined."""

    def __init__(self, session: Requester, server: Host) -> None:
        self._session = session
        self._server = server
        self._holds = False
        self.gpu = ""  # joined
        self._announced: int | None = None  # the number of the memory that the client knows

    def handlers(self) -> Handlers:
        return {
            wire.HotOffer: self.offer,
            wire.HotGrant: self.grant,
            wire.HotJoin: self.join,
            wire.HotReserve: self.reserve,
            wire.HotEnd: self.end,
        }

    # --- the holder ----------------------------------------------------------------------------

    def offer(self, tenant: Tenant | None, request: wire.HotOffer) -> wire.Reply:
        peer = self._session.peer
        if not peer.privileged:
            text = f"memory of GPUs is accepted from root and the daemon's user only, not from uid {peer.uid}"
            raise Refused("not_admin", text)
        if self._holds:
            raise bad_request("this client holds memory already: use one per GPU")
        shares = self._server.hot.offer(
            self._session.id, request.gpu, request.nbytes, request.unit_bytes
        )
        self._holds = True
        self._session.inbox.accept_descriptors()
        return wire.HotShares(request.id, shares)

    def grant(self, tenant: Tenant | None, request: wire.HotGrant) -> wire.Reply:
        fd = self._session.inbox.take_descriptor()
        if fd is None:
            raise bad_request("a HotGrant carries one file descriptor, after a HotOffer")
        self._server.hot.grant(self._session.id, request.gpu, request.tenant, request.nbytes, fd)
        return wire.Done(request.id)

    # --- engines -------------------------------------------------------------------------------

    def join(self, tenant: Tenant, request: wire.HotJoin) -> wire.Reply:
        if self._session.verifies:
            text = "copies in a GPU's memory cannot be verified: connect without verify, or do not join"
            raise bad_request(text)
        self.gpu = request.gpu
        self._session.device = True  # at the end of its process, slots are held for its copies
        tenant.catalog.hot.join(self._session.id, self._session.engine, request.gpu, request.shards)
        self.announce(tenant)
        return wire.Done(request.id)

    def announce(self, tenant: Tenant) -> None:
        """Send the memory of the joined GPU if the client does not have it, before the next answer, because a
        client that asks nothing reads nothing."""
        extent = self._server.hot.extent(tenant.name, self.gpu)
        number = extent.number if extent is not None else None
        if number == self._announced:
            return
        before, self._announced = self._announced, number
        if before is not None:
            self._session.send(wire.HotGone(0, before))
        if extent is not None:
            added = wire.HotAdded(0, extent.number, extent.gpu, extent.nbytes)
            self._session.send_with(added, extent)

    def reserve(self, tenant: Tenant, request: wire.HotReserve) -> wire.Reply:
        if len(request.slots) > wire.LIMIT_COPIED * wire.SLOT_BYTES:
            count = len(request.slots) // wire.SLOT_BYTES
            text = f"{count} slots in one request, at most {wire.LIMIT_COPIED}: split it"
            raise bad_request(text)
        granted = tenant.catalog.hot.reserve(self._session.id, request.slots, request.again)
        return wire.Reserved(request.id, granted.lease, granted.outcomes, granted.slots)

    def end(self, tenant: Tenant, request: wire.HotEnd) -> wire.Reply:
        tenant.catalog.hot.end(self._session.id, LeaseId(request.lease), request.good)
        return wire.Done(request.id)

    def session_ended(self, why: str) -> None:
        """The memory that this session holds is not used from now on."""
        if self._holds:
            self._holds = False
            self._server.hot.lost(self._session.id, why)
