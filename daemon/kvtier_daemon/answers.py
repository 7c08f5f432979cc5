"""What one client's requests are answered: decided at once, from its tenant's catalog."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvtier import wire
from kvtier.catalog import Found, LeaseId, Space, Watch
from kvtier.catalog.departures import Lookup
from kvtier.catalog.reading import LIMIT_PIN_S
from kvtier.errors import KvtierError, Refused
from kvtier.key import KEY_BYTES
from kvtier.layout import LIMIT_SHARDS
from kvtier.planning import COMPUTE, PATIENCE_S
from kvtier_daemon import looking
from kvtier_daemon.deferring import Deferring
from kvtier_daemon.explaining import explain
from kvtier_daemon.observing.events import KEY_DIGITS, Watcher
from kvtier_daemon.tenant import Tenant

if TYPE_CHECKING:
    from kvtier_daemon.server import Server
    from kvtier_daemon.session import Session

log = logging.getLogger(__name__)

AskedFor = tuple[int, int, bytes]
LIMIT_SESSION_SPACES = 256
LIMIT_SESSION_WATCHES = 4
LIMIT_WAITING = 4096
LIMIT_ASKED = 2048
LONGEST_WAIT_S = 60.0
WATCH_S = 0.01
TIER_ORDERS = ("drain", "off", "on", "status")


@dataclass(slots=True)
class Asked:
    """A lookup that was counted, and may be asked about again."""

    lookup: AskedFor
    loaded: bool  # or matched alone
    weighed: bool = False  # load, or compute: that was said
    there: int = 0  # blocks that it was told of
    coming: int = 0  # of those
    owed: int = 0  # of those, counted as hits, and what becomes of them is not known
    block_tokens: int = 0
    noted: Lookup | None = None  # as `kvtier explain` tells it


class Answers:
    """Of one session, and what it has open. Nothing here waits."""

    def __init__(self, session: Session, server: Server) -> None:
        self._session = session
        self._server = server
        self.spaces: set[bytes] = set()
        self._watched: set[int] = set()
        self._watching: dict[int, int] = {}  # of spaces, the request that is to be answered
        # The requests that wait for more than their leases have; and each one's last lease.
        self._waiting: dict[LeaseId, int] = {}
        self._last_lease: dict[int, LeaseId] = {}
        self._lookup_of: dict[LeaseId, Lookup] = {}
        self._deferring = Deferring(session, server)
        # By the clients' numbers for who asks; of those who have none, 0, it is the last one.
        self._asked: OrderedDict[int, Asked] = OrderedDict()
        self.waiting = 0  # lookups that are owed something, and how much
        self.owed_tokens = 0
        self._monitoring = 0  # the request that events are the answer to
        self._growing = 0  # the request that waits for the tenant's memory to grow

    def to(self, tenant: Tenant | None, request: wire.Request) -> wire.Reply | None:
        """The answer; None where it comes later. Raises Refused or SpecError."""
        return ANSWERS[type(request)](self, tenant, request)

    def _open(self, tenant: Tenant, request: wire.Open) -> wire.Reply:
        spec = request.spec.checked()
        identity = tenant.identity_of(spec)
        if identity not in self.spaces and len(self.spaces) >= LIMIT_SESSION_SPACES:
            raise Refused("too_many", f"this session has {LIMIT_SESSION_SPACES} spaces already")
        space = tenant.catalog.open(identity, spec, self._session.id)
        self.spaces.add(identity)
        if self._server.events.on:
            self._tell_event("space", tenant, space=space.number, model=spec.model)
        return wire.Opened(request.id, space.number, identity, tenant.secret_of(identity))

    def _match(self, tenant: Tenant, request: wire.Match | wire.Prefetch) -> wire.Reply:
        space = tenant.catalog.space(request.space)
        new = isinstance(request, wire.Match) and self._is_new(request)
        found = tenant.catalog.match(space, request.keys, new, tenant.brings)
        if new:
            self._record(tenant, space, request.keys)
        coming, eta_ms, why = self._bring(tenant, space, request, found)
        if isinstance(request, wire.Match):
            self._promise(tenant, space, request, found, new, coming, why)
        return wire.Matched(request.id, found.ready, coming, eta_ms, why)

    def _load(self, tenant: Tenant, request: wire.Load) -> wire.Reply | None:
        space = tenant.catalog.space(request.space)
        _check_shards(request.shards)
        _check_answered(request)
        if request.deadline_ms < 1:
            raise Refused("bad_request", f"a deadline of {request.deadline_ms} ms")
        if not 0 <= request.first <= len(request.keys) // KEY_BYTES:
            raise Refused(
                "bad_request",
                f"first is {request.first}: write 0 to {len(request.keys) // KEY_BYTES}",
            )
        if tenant.mover is not None and self._deferring.defers(tenant.mover, request):
            return None
        new = self._is_new(request)
        if new:
            self._record(tenant, space, request.keys)
        found = tenant.catalog.load(
            self._session.id, space, request.keys, request.deadline_ms / 1000, request.shards,
            self._server.clock(), new, tenant.brings, request.first,
        )  # fmt: skip
        coming, eta_ms, why = self._bring(tenant, space, request, found)
        self._promise(tenant, space, request, found, new, coming, why)
        if coming and found.lease and request.request:
            if len(self._waiting) >= LIMIT_WAITING:
                self._waiting.clear()
                self._last_lease.clear()
            self._waiting[found.lease] = request.request
            self._last_lease[request.request] = found.lease
        if found.lease and (noted := self._asked[request.request].noted) is not None:
            if len(self._lookup_of) >= LIMIT_WAITING:
                self._lookup_of.clear()
            self._lookup_of[found.lease] = noted
        return _loaded(request.id, found, coming, eta_ms, why)

    def _is_new(self, request: wire.Match | wire.Load) -> bool:
        """Whether this is a lookup, and a use of what it finds: one of each request, however often it asks
        how far it is."""
        asked = self._asked.get(request.request)
        loads = isinstance(request, wire.Load)
        if asked is not None and asked.lookup == _lookup(request):
            if request.request:
                return False
            # Nobody says who it is: a load right after a match is the same one, and so is a match again while
            # something is on its way.
            if (not asked.loaded) if loads else asked.coming:
                asked.loaded |= loads
                return False
        self._forget_asked(request.request)
        if len(self._asked) >= LIMIT_ASKED:
            self._forget_asked(next(iter(self._asked)))
        self._asked[request.request] = Asked(_lookup(request), loads)
        return True

    def _forget_asked(self, request: int) -> None:
        asked = self._asked.pop(request, None)
        if asked is not None:
            self._owe(asked, 0)

    def _owe(self, asked: Asked, blocks: int) -> None:
        """Of what was counted as a hit, so much has yet to come."""
        self.waiting += (blocks > 0) - (asked.owed > 0)
        self.owed_tokens += (blocks - asked.owed) * asked.block_tokens
        asked.owed = blocks

    def _bring(
        self,
        tenant: Tenant,
        space: Space,
        request: wire.Match | wire.Load | wire.Prefetch,
        found: Found,
    ) -> tuple[int, float, str]:
        """Begin to bring what is on disk, if that is the sooner way to have it: how many blocks are to be
        expected, in how many milliseconds, and why."""
        if not found.coming:
            return 0, 0.0, ""
        mover = tenant.mover
        if mover is None:
            return 0, 0.0, "off"
        session, lookup = self._session.id, _lookup(request)
        if isinstance(request, wire.Load) and not self._lacks(request, found):
            return found.coming, 0.0, ""
        keys = request.keys[found.skipped * KEY_BYTES :]
        if isinstance(request, wire.Prefetch):
            return mover.promote(
                space,
                keys,
                found.coming,
                request=(session, ("prefetch", lookup)),
                urgent=False,
            )
        within_s = request.within_ms / 1000 if request.within_ms > 0 else PATIENCE_S
        queued_s = max(0, request.queued_ms) / 1000
        told = mover.promote(
            space, keys, found.coming, request=(session, request.request or lookup),
            within_s=min(within_s, LONGEST_WAIT_S),
            recompute_s=queued_s + space.recompute_s(found.coming, found.ready),
        )  # fmt: skip
        asked = self._asked[request.request]
        first, asked.weighed = not asked.weighed, True
        if first and told[2] in ("slower", "unreliable"):
            go_on = mover.compute if told[2] == "slower" else mover.probe
            go_on(session, space, keys, found.ready - found.skipped, found.coming)
        return told

    @staticmethod
    def _lacks(request: wire.Load, found: Found) -> bool:
        """Whether something on disk is to be read: the client wants that, and lacks it."""
        return request.bring and found.ready + found.coming > request.first

    def _promise(
        self, tenant: Tenant, space: Space, request: wire.Match | wire.Load, found: Found,
        new: bool, coming: int, why: str,
    ) -> None:  # fmt: skip
        """Note what was counted as coming: as far as it is lost by the time that is asked about again, it was
        a miss."""
        coming = found.coming if tenant.brings and coming else 0
        asked = self._asked[request.request]
        if new:
            asked.there = found.ready + found.coming if tenant.brings else found.ready
            asked.block_tokens = space.spec.block_tokens
        if asked.there > found.ready or asked.owed:
            self._settle_promise(tenant, space, found, asked, new, coming, why)
        if new:
            asked.noted = self._note_lookup(tenant, space, request.keys, found, coming, why)
        asked.there, asked.coming = found.ready + coming, coming

    def _settle_promise(
        self, tenant: Tenant, space: Space, found: Found, asked: Asked, new: bool, coming: int,
        why: str,
    ) -> None:  # fmt: skip
        """Count what was told to be coming and is lost by now, and what came."""
        # What was ready when it was counted, and is on disk by now, is no hit of the disk's to be lost.
        owed = asked.there - found.ready if new else asked.owed
        lost = max(0, min(asked.there - found.ready - coming, owed))
        tenant.catalog.count_lost(space, lost, why if why in COMPUTE else "not_read")
        self._owe(asked, min(owed - lost, coming))
        came = owed - lost - asked.owed
        tenant.catalog.count_came(space, came, max(0, found.ready - came))

    def _note_lookup(
        self, tenant: Tenant, space: Space, keys: bytes, found: Found, coming: int, why: str
    ) -> Lookup:
        """Remember what was answered, for whoever wants to know why."""
        got = found.ready + coming
        missing = keys[got * KEY_BYTES : (got + 1) * KEY_BYTES]
        reason = "" if not missing else why if why in COMPUTE else tenant.catalog.last_miss or why
        noted = tenant.catalog.lookups.note(
            self._server.clock(), self._session.name, space, len(keys) // KEY_BYTES, found.ready,
            coming, reason, missing,
        )  # fmt: skip
        if self._server.events.on:
            self._tell_event(
                "lookup", tenant, space=space.number, blocks=len(keys) // KEY_BYTES,
                ready=found.ready, coming=coming, why=reason, key=missing.hex()[:KEY_DIGITS],
            )  # fmt: skip
        return noted

    def _tell_event(self, kind: str, tenant: Tenant, **fields: object) -> None:
        self._server.events.tell(kind, tenant.name, client=self._session.name, **fields)

    def _explain(self, tenant: Tenant, request: wire.Explain) -> wire.Reply:
        digits = None if self._session.peer.privileged else 2 * looking.TOLD_BYTES
        told = explain(tenant, request.lookup, request.keys, self._server.clock(), digits)
        fields = {name: msgspec.Raw(msgspec.msgpack.encode(value)) for name, value in told.items()}
        return wire.Report(request.id, fields)

    def _adopt(self, tenant: Tenant, request: wire.Adopt) -> wire.Reply:
        _check_shards(request.shards)
        _check_answered(request)
        return _loaded(
            request.id, tenant.catalog.adopt(self._session.id, request.token, request.shards)
        )

    def _release(self, tenant: Tenant, request: wire.Release) -> wire.Reply:
        used = (request.warm_tokens, request.cold_tokens, request.nbytes)
        if not 0 <= min(used) <= max(used) <= wire.LIMIT_USED:
            raise Refused("bad_request", f"a release that used {used}: 0 to {wire.LIMIT_USED}")
        tenant.catalog.release(self._session.id, LeaseId(request.lease), *used)
        noted = self._lookup_of.pop(LeaseId(request.lease), None)
        if noted is not None:
            noted.used += sum(used[:2]) // noted.space.spec.block_tokens
        waits = self._waiting.pop(LeaseId(request.lease), 0)
        # Who asks how far it is has the next one before it gives the last one back.
        if waits and self._last_lease.get(waits) == request.lease:
            del self._last_lease[waits]
            if tenant.mover is not None:
                tenant.mover.released((self._session.id, waits))
        return wire.Done(request.id)

    def _reserve(self, tenant: Tenant, request: wire.Reserve) -> wire.Reply:
        self._check_may_write()
        _check_answered(request)
        if len(request.keys) > wire.LIMIT_RESERVED * KEY_BYTES:
            count = len(request.keys) // KEY_BYTES
            text = f"{count} keys to reserve at once, at most {wire.LIMIT_RESERVED}: ask in parts"
            raise Refused("bad_request", text)
        space = tenant.catalog.space(request.space)
        granted = tenant.catalog.reserve(
            self._session.id, space, request.group, request.shard, request.parent, request.keys
        )
        if (request.group, request.shard) == (0, 0):
            self._server.recorder.saved(
                tenant.name, space.number, space.spec.block_tokens, request.parent, request.keys
            )
        if self._server.events.on:
            outcomes = {
                name: n
                for code, name in enumerate(wire.OUTCOMES)
                if (n := granted.outcomes.count(code))
            }
            self._tell_event("save", tenant, space=space.number, what="reserved", **outcomes)
        return wire.Reserved(request.id, granted.lease, granted.outcomes, granted.slots)

    def _commit(self, tenant: Tenant, request: wire.Commit) -> wire.Reply:
        ids = tenant.catalog.commit(
            self._session.id,
            LeaseId(request.lease),
            request.first,
            request.count,
            request.checksums,
        )
        if tenant.mover is not None:
            tenant.mover.saved(ids)
        if self._server.events.on:
            self._tell_event("save", tenant, what="committed", blocks=request.count)
        return wire.Done(request.id)

    def _abort(self, tenant: Tenant, request: wire.Abort) -> wire.Reply:
        tenant.catalog.abort(self._session.id, LeaseId(request.lease))
        return wire.Done(request.id)

    def _pin(self, tenant: Tenant, request: wire.Pin) -> wire.Reply:
        self._check_may_write()
        space = tenant.catalog.space(request.space)
        if not 1 <= request.ttl_ms <= LIMIT_PIN_S * 1000:
            longest = f"{LIMIT_PIN_S:.0f} s, a week"
            text = f"a pin for {request.ttl_ms / 1000:g} s: pins last 1 ms to {longest}"
            raise Refused("bad_request", text)
        now = self._server.clock()
        blocks = tenant.catalog.pin(space, request.keys, request.ttl_ms / 1000, now)
        return wire.Counted(request.id, blocks)

    def _unpin(self, tenant: Tenant, request: wire.Unpin) -> wire.Reply:
        self._check_may_write()
        space = tenant.catalog.space(request.space)
        return wire.Counted(request.id, tenant.catalog.unpin(space, request.keys))

    def _cancel(self, tenant: Tenant, request: wire.Cancel) -> wire.Reply:
        self._forget_asked(request.request)
        self._deferring.cancel(request.request)
        if tenant.mover is not None:
            tenant.mover.cancel((self._session.id, request.request))
        return wire.Done(request.id)

    def _prefill(self, tenant: Tenant, request: wire.Prefill) -> wire.Reply:
        space = tenant.catalog.space(request.space)
        fit = (request.token_s, request.context_s)
        if not (all(map(math.isfinite, fit)) and min(fit) >= 0 and max(fit) > 0):
            raise Refused("bad_request", f"computing takes {fit} seconds")
        space.prefill = fit
        return wire.Done(request.id)

    def _hint(self, tenant: Tenant, request: wire.Hint) -> wire.Reply:
        self._check_may_write()
        space = tenant.catalog.space(request.space)
        if not 0.0 <= request.importance <= 1.0:
            raise Refused("bad_request", f"an importance of {request.importance}: 0 to 1")
        blocks = tenant.catalog.hint(space, request.keys, request.importance)
        return wire.Counted(request.id, blocks)

    def _forget(self, tenant: Tenant, request: wire.Forget) -> wire.Reply | None:
        self._check_may_write()
        space = tenant.catalog.space(request.space)
        count = tenant.catalog.forget(space, request.keys)
        if tenant.mover is None:
            return wire.Counted(request.id, count)

        def over(failure: str) -> None:
            if failure:
                text = f"forgotten in memory; after a restart it may be back from disk: {failure}"
                self._session.fail(request.id, "disk_failed", text)
            else:
                self._session.send(wire.Counted(request.id, count))

        tenant.mover.forget(space, request.keys, over if request.id else None)
        return None

    def _watch(self, tenant: Tenant, request: wire.Watch) -> None:
        _check_answered(request)
        space = tenant.catalog.space(request.space)
        if request.space in self._watching:
            raise Refused("bad_request", f"space {request.space} is being watched already")
        if len(self._watched - {request.space}) >= LIMIT_SESSION_WATCHES:
            raise Refused(
                "too_many", f"this session watches {LIMIT_SESSION_WATCHES} spaces already"
            )

        def awake() -> None:
            # What comes together is told together.
            self._server.loop.call_later(WATCH_S, self._tell, request.space, watch)

        watch = tenant.catalog.watch(self._session.id, space, awake)
        self._watched.add(request.space)
        self._watching[request.space] = request.id
        self._tell(request.space, watch)

    def _tell(self, space: int, watch: Watch) -> None:
        """Answer who watches, if somebody waits for it: whoever has yet to take the last answer has no other
        sent."""
        if watch.kept and space in self._watching:
            missed, changes = watch.take(wire.LIMIT_CHANGES)
            self._session.send(wire.Changed(self._watching.pop(space), missed, changes))

    def _check_may_write(self) -> None:
        if self._session.read_only:
            raise Refused("read_only", "this session said that it only reads")

    def _stats(self, tenant: Tenant | None, request: wire.Stats) -> wire.Reply:
        return wire.Report(
            request.id, self._server.stats(None if self._session.peer.privileged else tenant)
        )

    def _record(self, tenant: Tenant, space: Space, keys: bytes) -> None:
        self._server.recorder.looked_up(tenant.name, space.number, space.spec.block_tokens, keys)

    def _check_runs_the_daemon(self, what: str) -> None:
        if not self._session.peer.privileged:
            text = f"{what} for root, and for the user that the daemon runs as"
            raise Refused("no_tenant", text)

    def _settings(self, tenant: Tenant | None, request: wire.Settings) -> None:
        self._check_runs_the_daemon("the configuration is")
        assert self._server.operated is not None
        if request.order not in ("show", "diff", "reload", "log"):
            raise Refused("bad_request", f"settings can't be asked to {request.order!r}")
        self._answer_later(request.id, self._server.operated.settings(request.order))

    def _tier(self, tenant: Tenant | None, request: wire.Tier) -> None:
        self._check_runs_the_daemon("tiers are switched")
        assert self._server.operated is not None
        if request.tier not in ("warm", "cold") or request.order not in TIER_ORDERS:
            raise Refused(
                "bad_request", f"tier {request.tier!r} can't be asked to {request.order!r}"
            )
        self._answer_later(request.id, self._server.operated.tier(request.tier, request.order))

    def _answer_later(self, request_id: int, work: Coroutine[Any, Any, dict[str, Any]]) -> None:
        """Answer with what this comes to, whenever that is."""

        async def answer() -> None:
            try:
                told = await work
            except KvtierError as error:
                self._session.fail(request_id, "bad_request", str(error))
            except Exception:
                log.exception("a request could not be served")
                self._session.fail(request_id, "internal", "the daemon failed; its log says how")
            else:
                body = {name: msgspec.Raw(msgspec.msgpack.encode(told[name])) for name in told}
                self._session.send(wire.Report(request_id, body))

        task = self._server.loop.create_task(answer())
        self._server.answering.add(task)
        task.add_done_callback(self._server.answering.discard)

    def _recording(self, tenant: Tenant | None, request: wire.Record) -> wire.Reply:
        self._check_runs_the_daemon("recordings are")
        recorder = self._server.recorder
        if request.limit_bytes < 0:
            raise Refused("bad_request", f"a trace of {request.limit_bytes} bytes")
        if request.stop:
            stats = recorder.stop()
        elif request.limit_bytes:
            stats = recorder.start(request.limit_bytes)
        else:
            stats = recorder.stats()
        body = {name: msgspec.Raw(msgspec.msgpack.encode(value)) for name, value in stats.items()}
        return wire.Report(request.id, body)

    # --- for people ----------------------------------------------------------------------------

    def _meant(self, tenant: Tenant | None, name: str) -> Tenant:
        """The tenant that is asked about."""
        privileged = self._session.peer.privileged
        return looking.tenant_of(tenant, name, self._server.tenants, privileged)

    def _list_spaces(self, tenant: Tenant | None, request: wire.Spaces) -> wire.Reply:
        privileged = self._session.peer.privileged
        told: dict[str, Any] = {}
        if request.first >= 0:
            told = looking.spaces(self._meant(tenant, request.tenant), request.first)
        if privileged:
            told["tenants"] = list(self._server.tenants)
        told["clients"] = self._server.clients(None if privileged else tenant)
        body = {name: msgspec.Raw(msgspec.msgpack.encode(value)) for name, value in told.items()}
        return wire.Report(request.id, body)

    def _list(self, tenant: Tenant | None, request: wire.List) -> wire.Reply:
        meant = self._meant(tenant, request.tenant)
        if request.space < 0:
            return wire.Listed(request.id, *looking.tally(meant, request.first))
        privileged = self._session.peer.privileged
        found = looking.listed(meant, request.space, request.first, request.limit, privileged)
        return wire.Listed(request.id, *found)

    def _purge(self, tenant: Tenant | None, request: wire.Purge) -> wire.Reply | None:
        self._check_may_write()
        _check_answered(request)
        meant = self._meant(tenant, request.tenant)
        if request.space < 0:
            return self._erase(meant, request)

        def over(failure: str) -> None:
            if failure:
                text = f"forgotten in memory; after a restart it may be back from disk: {failure}"
                self._session.fail(request.id, "disk_failed", text)
            else:
                self._session.send(wire.Purged(request.id, after, blocks))

        after, blocks, later = looking.purge(meant, request.space, request.first, over)
        return None if later else wire.Purged(request.id, after, blocks)

    def _erase(self, tenant: Tenant, request: wire.Purge) -> wire.Reply | None:
        def over(failure: str, after: int, files: int) -> None:
            if failure:
                text = (
                    f"forgotten, but not all of it is erased from the disk: {failure}; purge again"
                )
                self._session.fail(request.id, "disk_failed", text)
            else:
                self._session.send(wire.Purged(request.id, after, files))

        if tenant.mover is None:
            return wire.Purged(request.id, 0, 0)
        looking.check_found_all(tenant.mover)
        tenant.mover.erase(request.first, over)
        return None

    def _monitor(self, tenant: Tenant | None, request: wire.Monitor) -> None:
        _check_answered(request)
        privileged = self._session.peer.privileged
        if self._monitoring:
            raise Refused("bad_request", "this session waits for events already")

        def awake() -> None:
            # What comes together is told together.
            self._server.loop.call_later(WATCH_S, self._tell_monitor, watcher)

        if tenant is None and not privileged:
            raise Refused("no_tenant", "this client has no tenant")
        of = None if privileged or tenant is None else tenant.name
        watcher = self._server.events.watch(self._session.id, of, request.kinds, awake)
        self._monitoring = request.id
        self._tell_monitor(watcher)

    def _tell_monitor(self, watcher: Watcher) -> None:
        if self._monitoring and (watcher.kept or watcher.missed):
            events = wire.Events(self._monitoring, *watcher.take(wire.LIMIT_EVENTS))
            self._monitoring = 0
            self._session.send(events)

    def _grow(self, tenant: Tenant, request: wire.Grow) -> wire.Reply | None:
        _check_answered(request)
        if self._growing:
            raise Refused("bad_request", "this session already waits for memory to grow")
        waits = tenant.catalog.growing and len(tenant.extents) <= request.extents
        if not waits or request.wait_ms < 1:
            return _grown(tenant, request.id)
        self._growing = request.id
        wait_s = min(request.wait_ms / 1000, LONGEST_WAIT_S)
        self._server.loop.call_later(wait_s, self._tell_growth, tenant, request.id)
        return None

    @property
    def waits_for_memory(self) -> bool:
        return bool(self._growing)

    def memory_grew(self, tenant: Tenant) -> None:
        """Answer the request that waits for this."""
        self._tell_growth(tenant, self._growing)

    def _tell_growth(self, tenant: Tenant, request_id: int) -> None:
        if request_id and request_id == self._growing:
            self._growing = 0
            self._session.send(_grown(tenant, request_id))

    def _ping(self, tenant: Tenant | None, request: wire.Ping) -> wire.Reply:
        return wire.Done(request.id)


Answer = Callable[[Answers, Any, Any], wire.Reply | None]  # None: the answer comes later
WITHOUT_TENANT = (
    wire.Stats, wire.Record, wire.Ping, wire.Settings, wire.Tier,
    wire.Spaces, wire.List, wire.Purge, wire.Monitor,
)  # fmt: skip
ANSWERS: dict[type[wire.Message], Answer] = {
    wire.Open: Answers._open,
    wire.Match: Answers._match,
    wire.Load: Answers._load,
    wire.Adopt: Answers._adopt,
    wire.Release: Answers._release,
    wire.Reserve: Answers._reserve,
    wire.Commit: Answers._commit,
    wire.Abort: Answers._abort,
    wire.Prefetch: Answers._match,
    wire.Pin: Answers._pin,
    wire.Hint: Answers._hint,
    wire.Forget: Answers._forget,
    wire.Watch: Answers._watch,
    wire.Stats: Answers._stats,
    wire.Record: Answers._recording,
    wire.Ping: Answers._ping,
    wire.Cancel: Answers._cancel,
    wire.Prefill: Answers._prefill,
    wire.Unpin: Answers._unpin,
    wire.Explain: Answers._explain,
    wire.Settings: Answers._settings,
    wire.Tier: Answers._tier,
    wire.Spaces: Answers._list_spaces,
    wire.List: Answers._list,
    wire.Purge: Answers._purge,
    wire.Monitor: Answers._monitor,
    wire.Grow: Answers._grow,
}


def _grown(tenant: Tenant, request_id: int) -> wire.Grown:
    return wire.Grown(request_id, len(tenant.extents), tenant.catalog.growing)


def _loaded(
    request_id: int, found: Found, coming: int = 0, eta_ms: float = 0.0, why: str = ""
) -> wire.Loaded:
    return wire.Loaded(
        request_id, found.ready, coming, eta_ms, found.lease, found.token, list(found.parts), why
    )


def _lookup(request: wire.Match | wire.Load | wire.Prefetch) -> AskedFor:
    """What tells a lookup from another: the last key of a chain names all before it."""
    return request.space, len(request.keys), request.keys[-KEY_BYTES:]


def _check_shards(shards: list[int]) -> None:
    if len(shards) > LIMIT_SHARDS:
        raise Refused("bad_request", f"{len(shards)} shards asked for")


def _check_answered(request: wire.Message) -> None:
    if not request.id:
        raise Refused("bad_request", "a request for a lease whose answer nobody reads")
