"""Requests of one session that find and read blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import msgspec

from kvtier import wire
from kvtier.errors import bad_request
from kvtier.key import KEY_BYTES
from kvtier.layout import LIMIT_SHARDS
from kvtier_daemon.catalog import Catalog, Found, KnownSpace, LeaseId
from kvtier_daemon.catalog.holds import Request
from kvtier_daemon.catalog.reading import Held, Lookup
from kvtier_daemon.observing.events import KEY_DIGITS
from kvtier_daemon.planning import COMPUTE, PATIENCE_S
from kvtier_daemon.serving.context import LONGEST_WAIT_S, Handlers, Host, Requester, others_of
from kvtier_daemon.serving.deferred_answers import DeferredAnswers
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.memory_check import check_memory

LIMIT_NOTED = 4096  # leases, and waiting requests, of one session; above this the oldest is dropped
LIMIT_COUNTED = 2048
WRITE_MS = 5.0  # a guess: how long a write to memory takes

LookupName = tuple[int, int, bytes]


Answered = tuple[int, float, str]  # blocks that come, in how many milliseconds, and why


class CountedLookup(msgspec.Struct, gc=False):
    """A lookup that was counted, and that the client may repeat to ask for progress."""

    name: LookupName
    loaded: bool  # by a load, not only by a match
    has_verdict: bool = False
    reported: int = 0  # blocks in the last answer, ready or coming
    coming: int = 0  # of these
    pending: int = 0  # blocks that count as hits and are not in memory yet
    shared: int = 0  # of these, the last ones: from the remote store
    block_tokens: int = 0
    log_entry: Lookup | None = None
    awaits_until: float = 0.0  # for blocks that others are writing; 0: it has not seen any
    # Blocks that count as hits of memory, and that others were writing at the last answer.
    awaited: int = 0
    awaited_first: int = 0  # the place of the first one


class HeldLease(msgspec.Struct, gc=False):
    """A lease whose use is recorded at its release. `number`: its request has one and waits for more."""

    began: float
    number: int = 0
    log_entry: Lookup | None = None


class CountedLookups:
    """The lookups of one session that were counted, by the client's number of the request. All lookups
    without a number share the number 0, and the last one is kept."""

    def __init__(self) -> None:
        self.of: OrderedDict[int, CountedLookup] = OrderedDict()
        self.waiting = 0  # lookups with pending blocks
        self.pending_tokens = 0
        self.pending_shared_tokens = 0
        self.awaited_tokens = 0

    @property
    def coming_tokens(self) -> int:
        return self.pending_tokens + self.awaited_tokens

    def is_new(self, catalog: Catalog, request: wire.MatchPrefix | wire.Load) -> bool:
        """Whether this request is a new lookup, and remember it. A repeated one is not counted again."""
        number, name = request.request, lookup_name(request)
        known = self.of.get(number)
        loads = isinstance(request, wire.Load)
        if known is not None and known.name == name:
            if number:
                return False
            # Without a number, a load directly after a match is the same lookup. Another match is the same
            # one while blocks are coming.
            if (not known.loaded) if loads else known.coming:
                known.loaded |= loads
                return False
        if known is not None:
            self._drop(catalog, known)
            self.of.move_to_end(number)
        elif len(self.of) >= LIMIT_COUNTED:
            self.forget(catalog, next(iter(self.of)))
        self.of[number] = CountedLookup(name, loads)
        return True

    def is_another(self, catalog: Catalog, request: wire.Load, ready: int) -> bool:
        """Whether a load without a number is not the lookup of the match before it, because blocks that the
        match did not find were saved since; and remember it as a new one."""
        known = self.of[request.request]
        if request.request or ready <= known.reported:
            return False
        self._drop(catalog, known)
        self.of[request.request] = CountedLookup(known.name, loaded=True)
        return True

    def forget(self, catalog: Catalog, request: int) -> None:
        known = self.of.pop(request, None)
        if known is not None:
            self._drop(catalog, known)

    def end(self, catalog: Catalog) -> None:
        """The client is gone."""
        for lookup in self.of.values():
            self._drop(catalog, lookup)

    def _drop(self, catalog: Catalog, lookup: CountedLookup) -> None:
        """The client waits no longer: blocks that others were writing for it are no hits."""
        if lookup.pending:
            self._set_pending(lookup, 0)
        if lookup.awaited:
            catalog.usage.count_not_written(lookup.awaited * lookup.block_tokens)
            self.expect_writes(lookup, 0, 0)

    def expect(self, lookup: CountedLookup, shared: int) -> None:
        """This many of the blocks that were reported come from the remote store."""
        self.pending_shared_tokens += (shared - lookup.shared) * lookup.block_tokens
        lookup.shared = shared

    def awaited(
        self, tenant: Tenant, space: KnownSpace, request: wire.MatchPrefix | wire.Load, found: Found,
        answer: Answered, now: float,
    ) -> Answered:  # fmt: skip
        """Add the blocks that clients are writing to those that come, until they could have been computed,
        or the request has waited for `within_ms`. It waits once."""
        coming, eta_ms, why = answer
        if not request.awaits or coming != found.coming or not request.request:
            return answer
        lookup, first = self.of[request.request], found.ready + coming
        count = tenant.catalog.awaited.count(space, request.keys, first)
        if count and not lookup.awaits_until:
            within_s = request.within_ms / 1000 if request.within_ms > 0 else PATIENCE_S
            lookup.awaits_until = now + min(
                within_s, LONGEST_WAIT_S, space.recompute_s(count, first)
            )
        if not count or now >= lookup.awaits_until:
            return answer
        return coming + count, max(eta_ms, WRITE_MS), why or "written"

    def awaits_until(self, request: wire.Load) -> float:
        """How long this request waits for blocks that clients are writing; 0: it has not seen any."""
        known = self.of.get(request.request)
        is_same = known is not None and known.name == lookup_name(request)
        return known.awaits_until if known is not None and is_same else 0.0

    def wrote(
        self, tenant: Tenant, space: KnownSpace, request: wire.MatchPrefix | wire.Load, found: Found,
        coming: int, awaited: int,
    ) -> None:  # fmt: skip
        """Count what became of the blocks that others were writing: in memory, awaited, read, or missed."""
        lookup = self.of[request.request]
        ready = min(lookup.awaited, max(0, found.ready - lookup.awaited_first))
        first = lookup.awaited_first + ready
        still = min(lookup.awaited - ready, max(0, found.ready + coming + awaited - first))
        lost = lookup.awaited - ready - still
        if lost:
            tenant.catalog.usage.count_not_written(lost * lookup.block_tokens)
        if ready:
            tenant.catalog.usage.count_avoided(space, ready, lookup.awaited_first)
            tenant.shared.used(space, request.keys[: found.ready * KEY_BYTES])
        self.expect_writes(lookup, first, still)

    def expect_writes(self, lookup: CountedLookup, first: int, blocks: int) -> None:
        """This many blocks count as hits that others are writing."""
        self.awaited_tokens += (blocks - lookup.awaited) * lookup.block_tokens
        lookup.awaited_first, lookup.awaited = first, blocks

    def _set_pending(self, lookup: CountedLookup, blocks: int) -> None:
        self.expect(lookup, min(lookup.shared, blocks))
        self.waiting += (blocks > 0) - (lookup.pending > 0)
        self.pending_tokens += (blocks - lookup.pending) * lookup.block_tokens
        lookup.pending = blocks

    def settle(
        self, catalog: Catalog, space: KnownSpace, found: Found, lookup: CountedLookup, is_new: bool,
        coming: int, why: str,
    ) -> None:  # fmt: skip
        """Count the blocks that were reported as coming: as lost, or as read."""
        # Blocks that were ready when they were counted, and are on disk now, are no hits of the disk.
        pending = lookup.reported - found.ready if is_new else lookup.pending
        lost = max(0, min(lookup.reported - found.ready - coming, pending))
        shared = min(lost, lookup.shared)
        self.expect(lookup, lookup.shared - shared)
        catalog.usage.count_lost(space, lost, why if why in COMPUTE else "not_read", shared)
        self._set_pending(lookup, min(pending - lost, coming))
        read = pending - lost - lookup.pending
        catalog.usage.count_avoided(space, read, max(0, found.ready - read))


class LookupRequests:
    """Matches, loads and their leases. `later` gets what is done after the answer."""

    def __init__(self, session: Requester, server: Host, later: list[Callable[[], None]]) -> None:
        self._session = session
        self._later = later
        self._server = server
        self.counted = CountedLookups()
        self._leases: dict[LeaseId, HeldLease] = {}
        self._last_lease: dict[int, LeaseId] = {}  # of each request that waits for more blocks
        self._waits: dict[Hashable, float] = {}  # since when requests wait for blocks
        self.deferred = DeferredAnswers(session, server)

    def handlers(self) -> Handlers:
        return {
            wire.MatchPrefix: self.match,
            wire.Prefetch: self.prefetch,
            wire.Load: self.load,
            wire.Adopt: self.adopt,
            wire.Release: self.release,
            wire.Cancel: self.cancel,
            wire.Recheck: self.recheck,
        }

    def match(self, tenant: Tenant, request: wire.MatchPrefix) -> wire.Reply:
        catalog = tenant.catalog
        space = catalog.spaces.at(request.space)
        found, held = catalog.find(space, request.keys)
        beyond, on_disk = _beyond(tenant, space, request, found, self._session), found.coming
        if not (on_disk or beyond or request.awaits):
            self._later.append(partial(self._matched, tenant, space, request, found, held))
            return wire.Matched(request.id, found.ready, 0, 0.0)
        is_new = self._note_use(tenant, space, request, held)
        coming, eta_ms, why = 0, 0.0, ""
        if on_disk or beyond:
            coming, eta_ms, why, found = self._start_reads(tenant, space, request, found, beyond)
        shared, reads, before = found.coming - on_disk, why != "off", (coming, why)
        coming, eta_ms, why = self.counted.awaited(
            tenant, space, request, found, (coming, eta_ms, why), self._server.clock()
        )
        self._answered(
            tenant, space, request, found, is_new, reads, *before, shared, coming - before[0]
        )
        if coming or self._waits:
            self._note_wait(request, coming > 0)
        return wire.Matched(request.id, found.ready, coming, eta_ms, why)

    def _note_use(
        self, tenant: Tenant, space: KnownSpace, request: wire.MatchPrefix, held: Sequence[Held]
    ) -> bool:
        """Note that a match has used these blocks. Return whether it is a new lookup."""
        is_new = self.counted.is_new(tenant.catalog, request)
        tenant.catalog.reading.note_use(space, held, request.keys, is_new)
        if is_new and self._server.recorder.is_on:
            _record(self._server, tenant, space, request.keys)
        return is_new

    def _matched(
        self, tenant: Tenant, space: KnownSpace, request: wire.MatchPrefix, found: Found,
        held: Sequence[Held],
    ) -> None:  # fmt: skip
        """Count the answer of a match for which nothing is read."""
        is_new = self._note_use(tenant, space, request, held)
        self._answered(tenant, space, request, found, is_new, True, 0, "", 0, 0)
        if self._waits:
            self._note_wait(request, False)

    def prefetch(self, tenant: Tenant, request: wire.Prefetch) -> wire.Reply:
        space = tenant.catalog.spaces.at(request.space)
        found = tenant.catalog.match(space, request.keys, False)
        beyond = _beyond(tenant, space, request, found, self._session)
        coming, eta_ms, why = 0, 0.0, ""
        name = (self._session.id, ("prefetch", lookup_name(request)))
        if found.coming:
            coming, eta_ms, why = tenant.tier.reads.promote(
                space, request.keys, found.coming, request=name, urgent=False
            )
        if beyond and coming == found.coming:
            more, shared_ms, why = tenant.shared.fetch(
                space,
                request.keys,
                found.ready + found.coming,
                beyond,
                request=name,
                urgent=False,
                others=others_of(tenant, request, self._session),
            )
            coming, eta_ms = coming + more, max(eta_ms, shared_ms)
        return wire.Matched(request.id, found.ready, coming, eta_ms, why)

    def load(self, tenant: Tenant, request: wire.Load) -> wire.Reply | None:
        catalog, number = tenant.catalog, request.request
        space = catalog.spaces.at(request.space)
        _check_parts(request)
        if request.deadline_ms < 1:
            raise bad_request(f"deadline_ms is {request.deadline_ms}, it must be at least 1")
        if not 0 <= request.first <= len(request.keys) // KEY_BYTES:
            raise bad_request(
                f"first is {request.first}, it must be 0 to {len(request.keys) // KEY_BYTES}"
            )
        deferred = self.deferred
        if (
            (request.wait_ms > 0 or deferred.pending)
            and (
                deferred.defers(tenant.pending, request)
                or deferred.until_written(
                    tenant, space, request, self.counted.awaits_until(request)
                )
            )
        ) or (
            number and request.within_ms > 0 and self._waits_for_recovery(tenant, space, request)
        ):
            self._note_wait(request, True)
            return None
        is_new = self.counted.is_new(catalog, request)
        found = catalog.load(
            self._session.id, space, request.keys, request.deadline_ms / 1000, request.shards,
            self._server.clock(), is_new, request.first,
        )  # fmt: skip
        is_new = is_new or self.counted.is_another(catalog, request, found.ready)
        if is_new and self._server.recorder.is_on:
            _record(self._server, tenant, space, request.keys)
        reads, coming, eta_ms, why = True, 0, 0.0, ""
        beyond, on_disk = 0, found.coming
        if request.bring:
            beyond = _beyond(tenant, space, request, found, self._session)
        if found.coming or beyond:
            if request.bring and found.ready + found.coming + beyond > request.first:
                coming, eta_ms, why, found = self._start_reads(
                    tenant, space, request, found, beyond
                )
                reads = why != "off"
            else:  # the client does not need them
                reads, coming = tenant.tier.reads.is_on, found.coming
        if not coming and catalog.holds.of:
            catalog.holds.end(self._name(request))
        shared = found.coming - on_disk
        counted = reads, coming, why, shared
        coming, eta_ms, why = self.counted.awaited(
            tenant, space, request, found, (coming, eta_ms, why), self._server.clock()
        )
        self._later.append(
            partial(self._load_answered, tenant, space, request, found, is_new, counted, coming)
        )
        # Its reads have just begun. Without a block there is nothing that the client could do meanwhile.
        if (
            coming
            and not found.lease
            and request.wait_ms
            and deferred.defers(tenant.pending, request)
        ):
            return None
        return self._loaded(tenant, request.id, found, coming, eta_ms, why)

    def _load_answered(
        self, tenant: Tenant, space: KnownSpace, request: wire.Load, found: Found, is_new: bool,
        counted: tuple[bool, int, str, int], coming: int,
    ) -> None:  # fmt: skip
        """Count the answer of a load, and note its lease. `coming` includes blocks that others write."""
        self._answered(tenant, space, request, found, is_new, *counted, coming - counted[1])
        if coming or self._waits:
            self._note_wait(request, coming > 0)
        if found.lease:
            log_entry = self.counted.of[request.request].log_entry
            self._note_lease(found.lease, request.request if coming else 0, log_entry)

    def adopt(self, tenant: Tenant, request: wire.Adopt) -> wire.Reply:
        _check_parts(request)
        found = tenant.catalog.adopt(self._session.id, request.token, request.shards)
        if found.lease not in self._leases:
            self._note_lease(found.lease)
        return self._loaded(tenant, request.id, found)

    def _loaded(
        self, tenant: Tenant, request_id: int, found: Found, coming: int = 0, eta_ms: float = 0.0,
        why: str = "",
    ) -> wire.Loaded:  # fmt: skip
        parts = list(found.parts)
        if self._session.verifies and parts:
            parts = tenant.catalog.reading.digests(found.lease, parts)
        elif parts and tenant.catalog.hot.is_used:
            parts = tenant.catalog.with_copies(self._session.engine, found.lease, parts)
        return wire.Loaded(
            request_id, found.ready, coming, eta_ms, found.lease, found.token, parts, why
        )

    def recheck(self, tenant: Tenant, request: wire.Recheck) -> wire.Reply | None:
        ids = tenant.catalog.reading.held(self._session.id, LeaseId(request.lease))
        if tenant.rechecking or not ids:
            return wire.Counted(request.id, 0) if request.id else None
        tenant.rechecking = True

        async def check() -> None:
            before = tenant.spoilt_blocks
            try:
                await check_memory(tenant, ids)
            finally:
                tenant.rechecking = False
            if request.id:
                self._session.send(wire.Counted(request.id, tenant.spoilt_blocks - before))

        task = self._server.loop.create_task(check(), name=f"recheck {tenant.name}")
        self._server.answering.add(task)
        task.add_done_callback(self._server.answering.discard)
        return None

    def release(self, tenant: Tenant, request: wire.Release) -> wire.Reply:
        used = warm, cold, nbytes = request.warm_tokens, request.cold_tokens, request.nbytes
        most = wire.LIMIT_USED
        if not (0 <= warm <= most and 0 <= cold <= most and 0 <= nbytes <= most):
            raise bad_request(f"used amounts are {used}, each must be 0 to {most}")
        lease = LeaseId(request.lease)
        tenant.catalog.release(self._session.id, lease, warm, cold, nbytes)
        held = self._leases.pop(lease, None)
        if held is None:
            return wire.Done(request.id)
        self._server.latencies.load.note(self._server.clock() - held.began)
        if held.log_entry is not None:
            held.log_entry.used += (warm + cold) // held.log_entry.space.spec.block_tokens
        # A request that asks for progress gets its next lease before it releases the last one.
        if held.number and self._last_lease.get(held.number) == lease:
            del self._last_lease[held.number]
            tenant.pending.released((self._session.id, held.number))
        return wire.Done(request.id)

    def cancel(self, tenant: Tenant, request: wire.Cancel) -> wire.Reply:
        self.counted.forget(tenant.catalog, request.request)
        self.deferred.cancel(request.request)
        tenant.catalog.holds.end((self._session.id, request.request))
        tenant.pending.cancel((self._session.id, request.request))
        return wire.Done(request.id)

    # --- reads from disk -----------------------------------------------------------------------

    def _waits_for_recovery(self, tenant: Tenant, space: KnownSpace, request: wire.Load) -> bool:
        """Whether the answer is deferred because recovery may still find missing blocks on disk. This happens
        once per request with a number, and not for longer than computing takes."""
        tier = tenant.tier
        if (
            not (tier.recovery.is_awaited and tier.reads.is_on)
            or request.request in self.counted.of
        ):
            return False
        found = tenant.catalog.match(space, request.keys, False)
        known = found.ready + found.coming
        missing = len(request.keys) // KEY_BYTES - known
        return missing > 0 and self.deferred.until_recovered(
            tier.recovery, request, space.recompute_s(missing, known)
        )

    def _start_reads(
        self,
        tenant: Tenant,
        space: KnownSpace,
        request: wire.MatchPrefix | wire.Load,
        found: Found,
        beyond: int,
    ) -> tuple[int, float, str, Found]:
        """Start to read the blocks on disk, and the `beyond` ones after them from the remote store, if that
        is faster than computing. Return how many blocks will come, in how many milliseconds, the reason, and
        the answer with the blocks that are read from the remote store."""
        keys = request.keys[found.skipped * KEY_BYTES :]
        within_s = request.within_ms / 1000 if request.within_ms > 0 else PATIENCE_S
        queued_s = max(0, request.queued_ms) / 1000
        within_s = min(within_s, LONGEST_WAIT_S)
        coming, eta_ms, why = 0, 0.0, ""
        if found.coming:
            coming, eta_ms, why = tenant.tier.reads.promote(
                space, keys, found.coming, request=self._name(request), within_s=within_s,
                recompute_s=queued_s + space.recompute_s(found.coming, found.ready),
            )  # fmt: skip
            counted = self.counted.of[request.request]
            if not counted.has_verdict and why in ("slower", "unreliable"):
                reads = tenant.tier.reads
                note = reads.recomputes if why == "slower" else reads.probe
                note(self._session.id, space, keys, found.ready - found.skipped, found.coming)
            counted.has_verdict = True
        if beyond and coming == found.coming:
            first = found.ready + found.coming
            more, shared_ms, shared_why = tenant.shared.fetch(
                space, request.keys, first, beyond, request=self._name(request), within_s=within_s,
                recompute_s=queued_s + space.recompute_s(beyond, first),
                others=others_of(tenant, request, self._session),
            )  # fmt: skip
            coming, eta_ms, why = coming + more, max(eta_ms, shared_ms), why or shared_why
            found = msgspec.structs.replace(found, coming=found.coming + more)
        return coming, eta_ms, why, found

    def _name(self, request: wire.MatchPrefix | wire.Load) -> Request:
        """The name of this request, the same each time it asks."""
        return self._session.id, request.request or lookup_name(request)

    def _note_lease(self, lease: LeaseId, number: int = 0, log_entry: Lookup | None = None) -> None:
        if len(self._leases) >= LIMIT_NOTED:
            oldest = next(iter(self._leases))
            if self._last_lease.get(dropped := self._leases.pop(oldest).number) == oldest:
                del self._last_lease[dropped]
        self._leases[lease] = HeldLease(self._server.clock(), number, log_entry)
        if number:
            self._last_lease[number] = lease

    def _note_wait(self, request: wire.MatchPrefix | wire.Load, waits: bool) -> None:
        """The request waits for blocks that are being read; or no longer."""
        name = request.request or lookup_name(request)
        if waits and name not in self._waits:
            if len(self._waits) >= LIMIT_NOTED:
                del self._waits[next(iter(self._waits))]
            self._waits[name] = self._server.clock()
        elif not waits and (began := self._waits.pop(name, None)) is not None:
            self._server.latencies.wait.note(self._server.clock() - began)

    # --- counts and logs -----------------------------------------------------------------------

    def _answered(
        self, tenant: Tenant, space: KnownSpace, request: wire.MatchPrefix | wire.Load, found: Found,
        is_new: bool, reads: bool, coming: int, why: str, shared: int, awaited: int,
    ) -> None:  # fmt: skip
        """Count the answer. `reads`: blocks on disk can be read, and are no miss. Those that were counted as
        coming and are lost at the next answer become misses. The last `shared` of the blocks that come are
        read from the remote store. `awaited` blocks after these are being written by others."""
        lookup = self.counted.of[request.request]
        if not (coming or awaited) and (why or self._waits):
            # Of the blocks that it waited for, one before them may be gone: it would hold the others.
            tenant.pending.end_reads(self._name(request))
        coming = found.coming if reads and coming else 0
        if is_new:
            from_disk = found.coming if reads else 0
            shared = min(shared, from_disk)
            tenant.catalog.usage.count_lookup(
                space, request.keys, found.ready, from_disk, shared, awaited
            )
            if found.ready:
                tenant.shared.used(space, request.keys[: found.ready * KEY_BYTES])
            lookup.reported = found.ready + found.coming if reads else found.ready
            lookup.block_tokens = space.spec.block_tokens
            if shared:
                self.counted.expect(lookup, shared)
            if awaited:
                self.counted.expect_writes(lookup, found.ready + coming, awaited)
        elif lookup.awaited:
            self.counted.wrote(tenant, space, request, found, coming, awaited)
        if lookup.reported > found.ready or lookup.pending:
            self.counted.settle(tenant.catalog, space, found, lookup, is_new, coming, why)
        if is_new:
            lookup.log_entry = self._log(tenant, space, request.keys, found, coming + awaited, why)
        lookup.reported, lookup.coming = found.ready + coming, coming

    def _log(
        self, tenant: Tenant, space: KnownSpace, keys: bytes, found: Found, coming: int, why: str
    ) -> Lookup:
        """Log the answer for `kvtier explain`."""
        got, blocks = found.ready + coming, len(keys) // KEY_BYTES
        missing = keys[got * KEY_BYTES : (got + 1) * KEY_BYTES]
        last_miss = tenant.catalog.usage.last_miss
        reason = "" if not missing else why if why in COMPUTE else last_miss or why
        entry = tenant.catalog.lookups.note(
            self._server.clock(), self._session.name, space, blocks, found.ready, coming, reason,
            missing,
        )  # fmt: skip
        if self._server.events.on:
            self._server.events.tell(
                "lookup", tenant.name, client=self._session.name, space=space.number, blocks=blocks,
                ready=found.ready, coming=coming, why=reason, key=missing.hex()[:KEY_DIGITS],
            )  # fmt: skip
        return entry


def lookup_name(request: wire.MatchPrefix | wire.Load | wire.Prefetch) -> LookupName:
    """The name of a lookup: the last key of a chain names all keys before it."""
    return request.space, len(request.keys), request.keys[-KEY_BYTES:]


def _beyond(
    tenant: Tenant, space: KnownSpace, request: wire.MatchPrefix | wire.Load | wire.Prefetch,
    found: Found, session: Requester,
) -> int:  # fmt: skip
    """How many blocks after those of this host are in the remote store."""
    first = found.ready + found.coming
    if first * KEY_BYTES >= len(request.keys):
        return 0
    return tenant.shared.beyond(space, request.keys, first, others_of(tenant, request, session))


def _record(server: Host, tenant: Tenant, space: KnownSpace, keys: bytes) -> None:
    server.recorder.looked_up(tenant.name, space.number, space.spec.block_tokens, keys)


def _check_parts(request: wire.Load | wire.Adopt) -> None:
    if len(request.shards) > LIMIT_SHARDS:
        raise bad_request(f"{len(request.shards)} shards in one request, at most {LIMIT_SHARDS}")
