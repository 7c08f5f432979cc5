"""Time lines of hits: from the arrival of a request to the first step that computes with its loaded blocks.

The file is in Chrome's trace format, which chrome://tracing and Perfetto open: "[", then one event per
line, each followed by a comma. Without a file every call returns at once. The scheduler's thread never
waits for the file: another thread writes it, and omits hits if too many wait.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from kvtier_vllm.messages import Copied

log = logging.getLogger("vllm.kvtier")

Mark = Literal[
    "queued", "asked", "answered", "coming", "ready", "allocated", "reported", "scheduled", "stepped",
]  # fmt: skip
LIMIT_HITS = 1024  # that wait to be written
LIMIT_FILE_BYTES = 256 << 20
LANES = 100  # tracks of one hit: its own, and one for each rank
WRITE_S = 0.5
# Phases between two marks, if both exist in this order.
PHASES: tuple[tuple[str, Mark, Mark], ...] = (
    ("until it is asked about", "queued", "asked"),
    ("the daemon answers", "asked", "answered"),
    ("blocks come from disk", "coming", "ready"),
    ("waits for its turn", "ready", "allocated"),
    ("rescheduled", "reported", "scheduled"),
    ("first step", "scheduled", "stepped"),
)


@dataclass(slots=True, eq=False)
class Timeline:
    """One request. Times are seconds of the monotonic clock, which all processes of a host share."""

    request_id: str
    lane: int
    marks: dict[Mark, float] = field(default_factory=dict)
    copies: list[Copied] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    step: int = 0

    def spans(self) -> Iterator[tuple[str, int, float, float]]:
        """The phases and copies: name, track (0, or 1 + rank), begin and end."""
        for name, first, last in PHASES:
            begun, ended = self.marks.get(first), self.marks.get(last)
            if begun is not None and ended is not None and begun <= ended:
                yield name, 0, begun, ended
        if self.copies and "allocated" in self.marks:
            begun = min(copied.begun for copied in self.copies)
            ended = max(copied.ended for copied in self.copies)
            # A load within a step reaches the ranks with the step.
            start = min(begun, self.marks.get("scheduled", begun))
            yield "on its way to the ranks", 0, self.marks["allocated"], start
            reported = self.marks.get("reported", 0.0)
            if reported <= self.marks.get("scheduled", reported):
                yield "the end is noticed", 0, ended, reported
        for copied in self.copies:
            yield f"copy, rank {copied.rank}", 1 + copied.rank, copied.begun, copied.ended

    def lines(self) -> str:
        about = {"request": self.request_id, "tokens": self.tokens}
        spans: list[dict[str, Any]] = []
        for name, track, begun, ended in self.spans():
            spans.append(
                {"name": name, "ph": "X", "ts": round(begun * 1e6), "dur": round((ended - begun) * 1e6),
                 "pid": os.getpid(), "tid": self.lane * LANES + track, "args": about}
            )  # fmt: skip
        return "".join(json.dumps(one) + ",\n" for one in spans)


class Timelines:
    """The time lines of an engine. `path`: the file to append to; "": record nothing."""

    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        self.hits: deque[Timeline] = deque(maxlen=LIMIT_HITS)
        self._enabled = bool(path)
        self._path = path
        self._clock = clock
        self._open: dict[str, Timeline] = {}
        self._lanes: list[int] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="kvtier-timeline", daemon=True)
        if self._enabled:
            self._thread.start()

    def queued(self, request_id: str) -> None:
        if not self._enabled:
            return
        lane = self._lanes.pop() if self._lanes else len(self._open)
        timeline = self._open[request_id] = Timeline(request_id, lane)
        timeline.marks["queued"] = self._clock()

    def mark(self, request_id: str, mark: Mark) -> None:
        """Record the time of this mark, the first time only."""
        if (timeline := self._open.get(request_id)) is not None:
            timeline.marks.setdefault(mark, self._clock())

    def allocated(self, request_id: str, tokens: dict[str, int]) -> None:
        """The request has pages, and this many tokens of each tier are to be loaded."""
        if (timeline := self._open.get(request_id)) is not None:
            timeline.tokens = tokens
            timeline.marks["allocated"] = self._clock()

    def copied(self, request_id: str, copied: Copied) -> None:
        if (timeline := self._open.get(request_id)) is not None:
            timeline.copies.append(copied)

    def scheduled(self, step: int, request_ids: Any) -> None:
        """A step computes for these requests."""
        if not self._open:
            return
        for request_id in request_ids:
            timeline = self._open.get(request_id)
            if timeline is not None and not timeline.step and "allocated" in timeline.marks:
                timeline.step = step
                timeline.marks["scheduled"] = self._clock()

    def stepped(self, step: int) -> None:
        """The steps up to this one have ended."""
        if not self._open:
            return
        ended = [one for one in self._open.values() if 0 < one.step <= step]
        for timeline in ended:
            timeline.marks["stepped"] = self._clock()
            self.hits.append(timeline)
            self._close(timeline)

    def finished(self, request_id: str) -> None:
        """The request has ended. If a step computes for it, its time line ends with that step: an engine ends
        requests before it passes on the ranks' reports."""
        timeline = self._open.get(request_id)
        if timeline is not None and not timeline.step:
            self._close(timeline)

    def _close(self, timeline: Timeline) -> None:
        del self._open[timeline.request_id]
        self._lanes.append(timeline.lane)

    def close(self) -> None:
        self._ending.set()
        if self._enabled:
            self._thread.join(2.0)

    def _write_all(self) -> None:
        ending = False
        while not ending:
            ending = self._ending.wait(WRITE_S)
            try:
                if not self._write():
                    return
            except OSError as error:
                log.warning("kvtier: cannot write timelines: %s", str(error))
                return

    def _write(self) -> bool:
        """Append the finished time lines; False if the file is full."""
        text = ""
        while self.hits:
            text += self.hits.popleft().lines()
        if not text:
            return True
        with open(self._path, "a") as file:
            if file.tell() + len(text) > LIMIT_FILE_BYTES:
                log.warning("kvtier: %s is full: writing no more timelines", self._path)
                return False
            file.write(text if file.tell() else "[\n" + text)
        return True
