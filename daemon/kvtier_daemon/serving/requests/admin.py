"""Requests of people and tools: status, settings, tiers, lists of blocks, purges, recordings."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec

from kvtier import wire
from kvtier.errors import KvtierError, Refused, bad_request
from kvtier_daemon.serving import listing
from kvtier_daemon.serving.context import Handlers, Host, Requester, not_durable
from kvtier_daemon.serving.explain import explain
from kvtier_daemon.tenant import Tenant

log = logging.getLogger(__name__)

TIER_ORDERS = ("drain", "off", "on", "status", "hand-over", "warm-up")


class AdminRequests:
    """Has no state of its own."""

    def __init__(self, session: Requester, server: Host) -> None:
        self._session = session
        self._server = server

    def handlers(self) -> Handlers:
        return {
            wire.Stats: self.stats,
            wire.Settings: self.settings,
            wire.Tier: self.tier,
            wire.Spaces: self.spaces,
            wire.List: self.list_blocks,
            wire.Purge: self.purge,
            wire.Record: self.record,
            wire.Explain: self.explain,
            wire.Ping: self.ping,
        }

    def ping(self, tenant: Tenant | None, request: wire.Ping) -> wire.Reply:
        return wire.Done(request.id)

    def stats(self, tenant: Tenant | None, request: wire.Stats) -> wire.Reply:
        of = None if self._session.peer.privileged else tenant
        return wire.Report(request.id, self._server.stats(of))

    def settings(self, tenant: Tenant | None, request: wire.Settings) -> None:
        self._check_privileged("the configuration is available")
        assert self._server.operated is not None
        if request.order not in ("show", "diff", "reload", "log"):
            raise bad_request(f"unknown order for settings: {request.order!r}")
        self._answer_later(request.id, self._server.operated.settings(request.order))

    def tier(self, tenant: Tenant | None, request: wire.Tier) -> None:
        self._check_privileged("tiers can be switched")
        assert self._server.operated is not None
        if request.tier not in self._server.operated.tiers or request.order not in TIER_ORDERS:
            raise bad_request(f"unknown tier or order: {request.tier!r}, {request.order!r}")
        self._answer_later(request.id, self._server.operated.tier(request.tier, request.order))

    def record(self, tenant: Tenant | None, request: wire.Record) -> wire.Reply:
        self._check_privileged("recordings are available")
        recorder = self._server.recorder
        if request.limit_bytes < 0:
            raise bad_request(f"limit_bytes is {request.limit_bytes}, it must not be negative")
        if request.stop:
            stats = recorder.stop()
        elif request.limit_bytes:
            stats = recorder.start(request.limit_bytes)
        else:
            stats = recorder.stats()
        return _report(request.id, stats)

    def explain(self, tenant: Tenant, request: wire.Explain) -> wire.Reply:
        digits = None if self._session.peer.privileged else 2 * listing.SHOWN_BYTES
        return _report(
            request.id, explain(tenant, request.lookup, request.keys, self._server.clock(), digits)
        )

    def spaces(self, tenant: Tenant | None, request: wire.Spaces) -> wire.Reply:
        privileged = self._session.peer.privileged
        body: dict[str, Any] = {}
        if request.first >= 0:
            body = listing.spaces(self._tenant_of(tenant, request.tenant), request.first)
        if privileged:
            body["tenants"] = list(self._server.tenants)
        body["clients"] = self._server.clients(None if privileged else tenant)
        return _report(request.id, body)

    def list_blocks(self, tenant: Tenant | None, request: wire.List) -> wire.Reply:
        of = self._tenant_of(tenant, request.tenant)
        if request.space < 0:
            return wire.Listed(request.id, *listing.tally(of, request.first))
        privileged = self._session.peer.privileged
        found = listing.listed(of, request.space, request.first, request.limit, privileged)
        return wire.Listed(request.id, *found)

    def purge(self, tenant: Tenant | None, request: wire.Purge) -> wire.Reply | None:
        of = self._tenant_of(tenant, request.tenant)
        if request.space < 0:
            return self._erase(of, request)

        def done(failure: str) -> None:
            if failure:
                self._session.fail(request.id, "disk_failed", not_durable(failure))
            else:
                self._session.send(wire.Purged(request.id, after, blocks))

        after, blocks, later = listing.purge(of, request.space, request.first, done)
        return None if later else wire.Purged(request.id, after, blocks)

    def _erase(self, tenant: Tenant, request: wire.Purge) -> wire.Reply | None:
        def done(failure: str, after: int, files: int) -> None:
            if failure:
                text = (
                    f"forgotten, but not completely erased from disk: {failure}; run the purge "
                    "again"
                )
                self._session.fail(request.id, "disk_failed", text)
            else:
                self._session.send(wire.Purged(request.id, after, files))

        listing.check_recovered(tenant)
        waits = tenant.tier.forgets.erase(request.first, done)
        return None if waits else wire.Purged(request.id, 0, 0)

    def _tenant_of(self, tenant: Tenant | None, name: str) -> Tenant:
        """The tenant that the request is about."""
        privileged = self._session.peer.privileged
        return listing.tenant_of(tenant, name, self._server.tenants, privileged)

    def _check_privileged(self, what: str) -> None:
        if not self._session.peer.privileged:
            raise Refused("no_tenant", f"{what} only for root and the daemon's user")

    def _answer_later(self, request_id: int, work: Coroutine[Any, Any, dict[str, Any]]) -> None:
        """Answer with the result of this work when it is complete."""

        async def answer() -> None:
            try:
                body = await work
            except KvtierError as error:
                self._session.fail(request_id, "bad_request", str(error))
            except Exception:
                log.exception("internal error while serving a request")
                self._session.fail(
                    request_id, "internal", "internal error in the daemon, see its log"
                )
            else:
                self._session.send(_report(request_id, body))

        task = self._server.loop.create_task(answer())
        self._server.answering.add(task)
        task.add_done_callback(self._server.answering.discard)


def _report(request_id: int, body: Mapping[str, Any]) -> wire.Report:
    fields = {name: msgspec.Raw(msgspec.msgpack.encode(value)) for name, value in body.items()}
    return wire.Report(request_id, fields)
