"""Requests of one session that save blocks."""

from __future__ import annotations

import math

import msgspec

from kvtier import wire
from kvtier.errors import bad_request
from kvtier.key import KEY_BYTES
from kvtier_daemon.catalog import LeaseId
from kvtier_daemon.catalog.expiring import expiry_time
from kvtier_daemon.catalog.pins import LIMIT_PIN_S
from kvtier_daemon.catalog.writing import Granted
from kvtier_daemon.serving.context import Handlers, Host, Requester
from kvtier_daemon.tenant import Tenant

WAIT_S = 10.0  # longest time that saves of a session wait for the disk at once
WAIT_SHARE = 1 / 2  # of the time of a session in the long run
ASKS_S = 1.0  # a client that waits asks again within this time, or has given up


class DiskWaits:
    """Limits the time for which the saves of a session wait for writes to disk. If saves exceed the disk's
    rate for long, blocks are lost in any case, so a client must not be slowed down to that rate."""

    def __init__(self, now: float) -> None:
        self._left_s = WAIT_S
        self._at = now
        self._waits = False  # since then

    def may_wait(self, now: float) -> bool:
        """Whether the save that asks now may wait. Ends the wait before."""
        passed_s = now - self._at
        self._left_s = min(WAIT_S, self._left_s + passed_s * WAIT_SHARE)
        if self._waits:
            self._left_s -= min(passed_s, ASKS_S)
        self._at, self._waits = now, False
        return self._left_s > 0

    def begin(self) -> None:
        self._waits = True


class OpenSave(msgspec.Struct):
    """A save whose latency is measured: when its slots were granted, and how many are not committed."""

    began: float
    blocks: int


class SaveRequests:
    """Reservations, commits and aborts. Their leases are in the catalog."""

    def __init__(self, session: Requester, server: Host) -> None:
        self._session = session
        self._server = server
        self._open: dict[LeaseId, OpenSave] = {}
        self._waits = DiskWaits(server.clock())

    def handlers(self) -> Handlers:
        return {
            wire.Reserve: self.reserve,
            wire.Regain: self.regain,
            wire.Commit: self.commit,
            wire.Abort: self.abort,
        }

    def reserve(self, tenant: Tenant, request: wire.Reserve) -> wire.Reply:
        expires_at = self._expires_at(request)
        space = tenant.catalog.spaces.at(request.space)
        waits = self._waits.may_wait(self._server.clock()) and request.waits
        granted = tenant.catalog.reserve(
            self._session.id, space, request.group, request.shard, request.parent, request.keys,
            expires_at, waits,
        )  # fmt: skip
        waits = wire.WRITING in granted.outcomes
        if waits:
            self._waits.begin()
        recorder = self._server.recorder
        if recorder.is_on and not waits and (request.group, request.shard) == (0, 0):
            recorder.saved(
                tenant.name, space.number, space.spec.block_tokens, request.parent, request.keys
            )
        if self._server.events.on:
            outcomes = {
                name: n
                for code, name in enumerate(wire.OUTCOMES)
                if (n := granted.outcomes.count(code))
            }
            self._server.events.tell(
                "save", tenant.name, client=self._session.name, space=space.number, what="reserved",
                **outcomes,
            )  # fmt: skip
        return self._opened(request.id, granted)

    def regain(self, tenant: Tenant, request: wire.Regain) -> wire.Reply:
        expires_at = self._expires_at(request)
        space = tenant.catalog.spaces.at(request.space)
        granted = tenant.catalog.regain(
            self._session.id, space, request.group, request.shard, request.keys, expires_at
        )
        return self._opened(request.id, granted)

    def _expires_at(self, request: wire.Reserve | wire.Regain) -> float:
        """When the blocks of this request expire. Raises Refused if it is not possible."""
        if len(request.keys) > wire.LIMIT_RESERVED * KEY_BYTES:
            count = len(request.keys) // KEY_BYTES
            text = f"{count} keys in one reserve, at most {wire.LIMIT_RESERVED}: split the request"
            raise bad_request(text)
        if not 0 <= request.ttl_ms <= LIMIT_PIN_S * 1000:
            longest = f"{LIMIT_PIN_S:.0f} s, a week"
            text = f"blocks that expire after {request.ttl_ms / 1000:g} s: 1 ms to {longest}"
            raise bad_request(text)
        if not request.ttl_ms:
            return math.inf
        return expiry_time(self._server.clock(), request.ttl_ms / 1000)

    def _opened(self, request_id: int, granted: Granted) -> wire.Reply:
        if granted.lease:
            blocks = len(granted.slots) // wire.SLOT_BYTES
            self._open[granted.lease] = OpenSave(self._server.clock(), blocks)
        return wire.Reserved(request_id, granted.lease, granted.outcomes, granted.slots)

    def commit(self, tenant: Tenant, request: wire.Commit) -> wire.Reply:
        lease = LeaseId(request.lease)
        ids = tenant.catalog.commit(
            self._session.id, lease, request.first, request.count, request.checksums
        )
        tenant.tier.writes.saved(ids)
        tenant.shared.saved(ids)
        save = self._open[lease]
        save.blocks -= request.count
        if not save.blocks:
            del self._open[lease]
            self._server.latencies.save.note(self._server.clock() - save.began)
        if self._server.events.on:
            self._server.events.tell(
                "save", tenant.name, client=self._session.name, what="committed", blocks=request.count
            )  # fmt: skip
        return wire.Done(request.id)

    def abort(self, tenant: Tenant, request: wire.Abort) -> wire.Reply:
        lease = LeaseId(request.lease)
        if not lease:
            # Nothing of its earlier sessions is written.
            tenant.catalog.process_gone(self._session.id)
            return wire.Done(request.id)
        tenant.catalog.abort(self._session.id, lease)
        del self._open[lease]
        return wire.Done(request.id)
