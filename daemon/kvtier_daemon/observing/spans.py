"""Latencies that clients see: of loads, saves and waits. Measured when requests are answered; costs one
dictionary lookup per request, independent of the number of blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier import wire
from kvtier.wire import SLOT_BYTES
from kvtier_daemon.observing.histogram import Histogram

LIMIT_BEGUN: Final = 8192  # per session, which may have half as many leases


@dataclass(slots=True)
class Latencies:
    """The histograms of all clients."""

    load: Histogram = field(default_factory=Histogram)
    save: Histogram = field(default_factory=Histogram)
    wait: Histogram = field(default_factory=Histogram)

    def report(self) -> dict[str, Any]:
        return {"load": self.load.report(), "save": self.save.report(), "wait": self.wait.report()}


@dataclass(slots=True)
class _Save:
    at: float
    blocks: int  # that are not committed yet


class Spans:
    """The open spans of one session. The oldest are dropped above a limit."""

    def __init__(self, latencies: Latencies, clock: Callable[[], float]) -> None:
        self._latencies = latencies
        self._clock = clock
        self._loads: dict[int, float] = {}
        self._saves: dict[int, _Save] = {}
        self._waits: dict[Hashable, float] = {}

    def answered(self, request: wire.Request, reply: wire.Reply | None) -> None:
        """Record the answer to a request; None: it comes later, or was a refusal."""
        step = STEPS.get(type(request))
        if step is not None:
            step(self, request, reply)

    def _asked(
        self, request: wire.MatchPrefix | wire.Load, reply: wire.Matched | wire.Loaded | None
    ) -> None:
        coming = reply is None or reply.coming
        if not (coming or self._waits):
            return
        # A request without a number is identified by its keys.
        name = request.request or (request.space, request.keys[-32:])
        if coming:
            if name not in self._waits:
                _begin(self._waits, name, self._clock())
        elif (began := self._waits.pop(name, None)) is not None:
            self._latencies.wait.note(self._clock() - began)

    def _loaded(self, request: wire.Load, reply: wire.Loaded | None) -> None:
        self._asked(request, reply)
        if reply is not None:
            self._adopted(request, reply)

    def _adopted(self, request: wire.Load | wire.Adopt, reply: wire.Loaded) -> None:
        if reply.lease:
            _begin(self._loads, reply.lease, self._clock())

    def _released(self, request: wire.Release, reply: wire.Done) -> None:
        if (began := self._loads.pop(request.lease, None)) is not None:
            self._latencies.load.note(self._clock() - began)

    def _reserved(self, request: wire.Reserve, reply: wire.Reserved) -> None:
        if reply.lease:
            save = _Save(self._clock(), len(reply.slots) // SLOT_BYTES)
            _begin(self._saves, reply.lease, save)

    def _committed(self, request: wire.Commit, reply: wire.Done) -> None:
        save = self._saves.get(request.lease)
        if save is None:
            return
        save.blocks -= request.count
        if save.blocks <= 0:
            del self._saves[request.lease]
            self._latencies.save.note(self._clock() - save.at)

    def _aborted(self, request: wire.Abort, reply: wire.Done) -> None:
        self._saves.pop(request.lease, None)


STEPS: Final[dict[type, Callable[[Spans, Any, Any], None]]] = {
    wire.MatchPrefix: Spans._asked,
    wire.Load: Spans._loaded,
    wire.Adopt: Spans._adopted,
    wire.Release: Spans._released,
    wire.Reserve: Spans._reserved,
    wire.Commit: Spans._committed,
    wire.Abort: Spans._aborted,
}


def _begin(begun: dict[Any, Any], name: Hashable, what: object) -> None:
    if name not in begun and len(begun) >= LIMIT_BEGUN:
        del begun[next(iter(begun))]
    begun[name] = what
