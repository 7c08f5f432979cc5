"""Answers that are sent when the blocks of a request are read or written, so that clients need not poll."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

import msgspec

from kvtier import wire
from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.catalog.awaited import AwaitedWrites
from kvtier_daemon.serving.context import Host, Requester
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.base import PendingReads, TierRecovery

LIMIT_BYTES = 8 << 20  # of keys per session; above this, requests are answered at once
LONGEST_S = 1.0
Source = PendingReads | TierRecovery | AwaitedWrites


@dataclass(slots=True)
class DeferredAnswer:
    """A pending answer; it is sent when `timer` fires at the latest."""

    load: wire.Load
    source: Source  # calls when the answer can be given
    timer: asyncio.TimerHandle


class DeferredAnswers:
    """The pending answers of one session."""

    def __init__(self, session: Requester, server: Host) -> None:
        self._session = session
        self._server = server
        self.pending: dict[int, DeferredAnswer] = {}  # by the client's number of the request
        self._bytes = 0
        self._sending = 0  # the request that is being answered

    def defers(self, reads: PendingReads, load: wire.Load) -> bool:
        """Whether the answer waits for the end of this request's reads. Sends an earlier pending answer."""
        number = load.request
        self._send(number)
        if load.wait_ms < 1 or not self._has_room(load):
            return False
        if not reads.call_when_read((self._session.id, number), partial(self._send, number)):
            return False
        self._add(reads, load, load.wait_ms / 1000)
        return True

    def until_recovered(self, recovery: TierRecovery, load: wire.Load, wait_s: float) -> bool:
        """Whether the answer is deferred until the disk is recovered, for at most `wait_s` and half of the
        time that the request waits in all. Happens once per request."""
        number, wait_s = load.request, min(wait_s, load.within_ms / 2000)
        if number == self._sending or wait_s <= 0 or not self._has_room(load):
            return False
        recovery.call_when_ended((self._session.id, number), partial(self._send, number))
        self._add(recovery, load, wait_s)
        return True

    def until_written(
        self, tenant: Tenant, space: KnownSpace, load: wire.Load, until: float
    ) -> bool:
        """Whether the answer waits until `until` for blocks that other clients are writing."""
        wait_s = min(load.wait_ms / 1000, until - self._server.clock())
        if load.wait_ms < 1 or wait_s <= 0 or not self._has_room(load):
            return False
        found, writes = tenant.catalog.located(space, load.keys), tenant.catalog.awaited
        # Not at once: the commit of another session makes the call, perhaps for many requests.
        send = partial(self._send, load.request)
        give = partial(self._server.turns.in_turn, tenant.name, send)
        name = self._session.id, load.request
        if found.coming or not writes.call_when_written(name, space, load.keys, found.ready, give):
            return False
        self._add(writes, load, wait_s)
        return True

    def _has_room(self, load: wire.Load) -> bool:
        return load.request != 0 and self._bytes + len(load.keys) + len(load.others) <= LIMIT_BYTES

    def _add(self, source: Source, load: wire.Load, wait_s: float) -> None:
        give = partial(self._send, load.request)
        timer = self._server.loop.call_later(min(wait_s, LONGEST_S), give)
        self.pending[load.request] = DeferredAnswer(load, source, timer)
        self._bytes += len(load.keys) + len(load.others)

    def _send(self, number: int) -> None:
        if (answer := self._take(number)) is not None:
            self._sending = number
            try:
                self._session.serve_later(msgspec.structs.replace(answer.load, wait_ms=0))
            finally:
                self._sending = 0

    def cancel(self, number: int) -> None:
        """Answer a cancelled request: no blocks, and no lease."""
        if (answer := self._take(number)) is not None:
            self._session.send(wire.Loaded(answer.load.id, 0, 0, 0.0, 0, b"", []))

    def end(self) -> None:
        """The session has ended."""
        for number in list(self.pending):
            self._take(number)

    def _take(self, number: int) -> DeferredAnswer | None:
        answer = self.pending.pop(number, None)
        if answer is not None:
            self._bytes -= len(answer.load.keys) + len(answer.load.others)
            answer.timer.cancel()
            answer.source.cancel_calls((self._session.id, number))
        return answer
