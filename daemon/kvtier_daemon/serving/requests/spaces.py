"""Requests of one session about its spaces: open, pins, hints, forget."""

from __future__ import annotations

import math

from kvtier import wire
from kvtier.errors import Refused, bad_request
from kvtier.key import KEY_BYTES
from kvtier_daemon.catalog.pins import LIMIT_PIN_S
from kvtier_daemon.config.members import Role
from kvtier_daemon.serving.context import Handlers, Host, Requester, not_durable, others_of
from kvtier_daemon.tenant import Tenant

LIMIT_SESSION_SPACES = 256


class SpaceRequests:
    """Keeps which spaces the session has opened."""

    def __init__(self, session: Requester, server: Host) -> None:
        self._session = session
        self._server = server
        self.opened: set[bytes] = set()  # identities

    def handlers(self) -> Handlers:
        return {
            wire.Open: self.open,
            wire.Prefill: self.prefill,
            wire.Pin: self.pin,
            wire.Unpin: self.unpin,
            wire.Hint: self.hint,
            wire.Forget: self.forget,
            wire.Resident: self.resident,
            wire.Locate: self.locate,
        }

    def open(self, tenant: Tenant, request: wire.Open) -> wire.Reply:
        spec = request.spec.checked()
        identity = tenant.identity_of(spec)
        if identity not in self.opened and len(self.opened) >= LIMIT_SESSION_SPACES:
            raise Refused("too_many", f"this session has {LIMIT_SESSION_SPACES} spaces already")
        space = tenant.catalog.spaces.open(identity, spec, self._session.id)
        self.opened.add(identity)
        if self._server.events.on:
            self._server.events.tell(
                "space", tenant.name, client=self._session.name, space=space.number, model=spec.model
            )  # fmt: skip
        return wire.Opened(
            request.id, space.number, identity, tenant.secret_of(space),
            tenant.accepted_of(space) if self._session.peer.role >= Role.WRITE else [],
        )  # fmt: skip

    def prefill(self, tenant: Tenant, request: wire.Prefill) -> wire.Reply:
        space = tenant.catalog.spaces.at(request.space)
        fit = (request.token_s, request.context_s)
        if not (all(map(math.isfinite, fit)) and min(fit) >= 0 and max(fit) > 0):
            raise bad_request(f"invalid prefill times: {fit} seconds")
        space.prefill = fit
        return wire.Done(request.id)

    def pin(self, tenant: Tenant, request: wire.Pin) -> wire.Reply:
        space = tenant.catalog.spaces.at(request.space)
        if not 1 <= request.ttl_ms <= LIMIT_PIN_S * 1000:
            longest = f"{LIMIT_PIN_S:.0f} s, a week"
            text = (
                f"a pin of {request.ttl_ms / 1000:g} s is not possible: pins last 1 ms to {longest}"
            )
            raise bad_request(text)
        now = self._server.clock()
        blocks = tenant.catalog.pins.pin(space, request.keys, request.ttl_ms / 1000, now)
        return wire.Counted(request.id, blocks)

    def unpin(self, tenant: Tenant, request: wire.Unpin) -> wire.Reply:
        space = tenant.catalog.spaces.at(request.space)
        return wire.Counted(request.id, tenant.catalog.pins.unpin(space, request.keys))

    def hint(self, tenant: Tenant, request: wire.Hint) -> wire.Reply:
        space = tenant.catalog.spaces.at(request.space)
        _check_count(request)
        if not 0.0 <= request.importance <= 1.0:
            raise bad_request(f"importance is {request.importance}, it must be 0 to 1")
        blocks = tenant.catalog.hint(space, request.keys, request.importance)
        if (recorder := self._server.recorder).is_on:
            recorder.hinted(
                tenant.name, space.number, space.spec.block_tokens, request.keys, request.importance
            )
        return wire.Counted(request.id, blocks)

    def resident(self, tenant: Tenant, request: wire.Resident) -> wire.Reply:
        """Ignored for clients that may only read: it has an effect on eviction."""
        space = tenant.catalog.spaces.at(request.space)
        space.check_place(request.group, 0)
        for keys in (request.entered, request.left):
            space.check_keys(keys)
        if (count := (len(request.entered) + len(request.left)) // KEY_BYTES) > wire.LIMIT_RESIDENT:
            raise bad_request(f"{count} keys that entered or left, at most {wire.LIMIT_RESIDENT}")
        if self._session.peer.role >= Role.WRITE:
            residency, session = tenant.catalog.blocks.residency, self._session.id
            residency.is_on = tenant.tier.reads.is_on
            if request.reset:
                residency.end_session(session)
            back = residency.left(session, space, request.group, request.left)
            residency.entered(session, space, request.group, request.entered)
            if back:
                tenant.tier.reads.bring_back(space, back)
        return wire.Done(request.id)

    def locate(self, tenant: Tenant, request: wire.Locate) -> wire.Reply:
        space, keys = tenant.catalog.spaces.at(request.space), request.keys
        space.check_keys(keys)
        if len(request.lengths) % 4 or len(request.lengths) // 4 > wire.LIMIT_LOCATED:
            text = (
                f"lengths: {len(request.lengths)} bytes for at most {wire.LIMIT_LOCATED} prefixes"
            )
            raise bad_request(text)
        lengths = memoryview(request.lengths).cast("I")
        if sum(lengths) * KEY_BYTES != len(keys):
            raise bad_request(f"{len(keys)} bytes of keys for {sum(lengths)} blocks")
        rows, at = bytearray(), 0
        for length in lengths:
            chain, at = keys[at : at + length * KEY_BYTES], at + length * KEY_BYTES
            found = tenant.catalog.located(space, chain)
            on_disk = found.coming if tenant.tier.reads.is_on else 0
            beyond = 0
            if on_disk == found.coming:
                beyond = tenant.shared.beyond(space, chain, found.ready + on_disk, asks=False)
            rows += wire.LOCATED.pack(found.ready, on_disk, beyond)
        return wire.Locations(request.id, bytes(rows))

    def forget(self, tenant: Tenant, request: wire.Forget) -> wire.Reply | None:
        space = tenant.catalog.spaces.at(request.space)
        _check_count(request)
        count = tenant.catalog.forget(space, request.keys)
        for sibling in tenant.siblings_of(space):
            tenant.catalog.forget(sibling, request.keys)

        def done(failure: str) -> None:
            if failure:
                self._session.fail(request.id, "disk_failed", not_durable(failure))
            else:
                self._session.send(wire.Counted(request.id, count))

        told = done if request.id else None
        waits = tenant.forget(space, request.keys, told, others_of(tenant, request, self._session))
        return None if waits else wire.Counted(request.id, count)


def _check_count(request: wire.Hint | wire.Forget) -> None:
    if (count := len(request.keys) // KEY_BYTES) > wire.LIMIT_CHANGED:
        text = f"{count} keys in one request, at most {wire.LIMIT_CHANGED}: split the request"
        raise bad_request(text)
