"""When what happened to a hit: from its queueing to the first step that computes with what was loaded.

Written as lines of Chrome's trace format, which chrome://tracing and Perfetto open as they are: "[" and then
an event a line, each with a comma after it. Off, every call returns at once. On, the scheduler's thread never
waits for the file: a thread of its own writes, and what it can't keep up with is left out.
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
    "queued",
    "asked",
    "answered",
    "coming",
    "ready",
    "allocated",
    "reported",
    "scheduled",
    "stepped",
]
LIMIT_HITS = 1024  # that wait to be written
LIMIT_FILE_BYTES = 256 << 20
LANES = 100  # tracks of one hit: its own, and one for each rank
WRITE_S = 0.5
# What lies between two marks, where both are there and in this order.
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
    """One request; times in seconds of the monotonic clock, which all processes of a host share."""

    request_id: str
    lane: int
    marks: dict[Mark, float] = field(default_factory=dict)
    copies: list[Copied] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    step: int = 0

    def spans(self) -> Iterator[tuple[str, int, float, float]]:
        """Name, track (0, or 1 + rank), begin and end."""
        for name, first, last in PHASES:
            begun, ended = self.marks.get(first), self.marks.get(last)
            if begun is not None and ended is not None and begun <= ended:
                yield name, 0, begun, ended
        if self.copies and "allocated" in self.marks:
            begun = min(copied.begun for copied in self.copies)
            ended = max(copied.ended for copied in self.copies)
            # Within a step there is no other way than the step's.
            start = min(begun, self.marks.get("scheduled", begun))
            yield "on its way to the ranks", 0, self.marks["allocated"], start
            reported = self.marks.get("reported", 0.0)
            if reported <= self.marks.get("scheduled", reported):
                yield "the end is noticed", 0, ended, reported
        for copied in self.copies:
            yield f"copy, rank {copied.rank}", 1 + copied.rank, copied.begun, copied.ended

    def lines(self) -> str:
        about = {"request": self.request_id, "tokens": self.tokens}
        told: list[dict[str, Any]] = []
        for name, track, begun, ended in self.spans():
            told.append(
                {"name": name, "ph": "X", "ts": round(begun * 1e6), "dur": round((ended - begun) * 1e6),
                 "pid": os.getpid(), "tid": self.lane * LANES + track, "args": about}
            )  # fmt: skip
        return "".join(json.dumps(one) + ",\n" for one in told)


class Timelines:
    """The hits of an engine. `path` is the file that they are appended to; none: nothing is noted."""

    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        self.hits: deque[Timeline] = deque(maxlen=LIMIT_HITS)
        self._on = bool(path)
        self._path = path
        self._clock = clock
        self._open: dict[str, Timeline] = {}
        self._lanes: list[int] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="kvtier-timeline", daemon=True)
        if self._on:
            self._thread.start()

    def queued(self, request_id: str) -> None:
        if not self._on:
            return
        lane = self._lanes.pop() if self._lanes else len(self._open)
        timeline = self._open[request_id] = Timeline(request_id, lane)
        timeline.marks["queued"] = self._clock()

    def mark(self, request_id: str, mark: Mark) -> None:
        """This is so from now on; the first time counts."""
        timeline = self._open.get(request_id) if self._on else None
        if timeline is not None:
            timeline.marks.setdefault(mark, self._clock())

    def allocated(self, request_id: str, tokens: dict[str, int]) -> None:
        """So many tokens of each tier are to be loaded into the pages that it has."""
        timeline = self._open.get(request_id) if self._on else None
        if timeline is not None:
            timeline.tokens = tokens
            timeline.marks["allocated"] = self._clock()

    def copied(self, request_id: str, copied: Copied) -> None:
        timeline = self._open.get(request_id) if self._on else None
        if timeline is not None:
            timeline.copies.append(copied)

    def scheduled(self, step: int, request_ids: Any) -> None:
        """A step computes for these."""
        if not self._open:
            return
        for request_id in request_ids:
            timeline = self._open.get(request_id)
            if timeline is not None and not timeline.step and "allocated" in timeline.marks:
                timeline.step = step
                timeline.marks["scheduled"] = self._clock()

    def stepped(self, step: int) -> None:
        """The steps up to this one are over."""
        if not self._open:
            return
        over = [one for one in self._open.values() if 0 < one.step <= step]
        for timeline in over:
            timeline.marks["stepped"] = self._clock()
            self.hits.append(timeline)
            self._close(timeline)

    def finished(self, request_id: str) -> None:
        """The request is over. Of one that a step computes for that step's end is to come: an engine ends
        requests before it says what the ranks have done."""
        timeline = self._open.get(request_id)
        if timeline is not None and not timeline.step:
            self._close(timeline)

    def _close(self, timeline: Timeline) -> None:
        del self._open[timeline.request_id]
        self._lanes.append(timeline.lane)

    def close(self) -> None:
        self._ending.set()
        if self._on:
            self._thread.join(2.0)

    def _write_all(self) -> None:
        ending = False
        while not ending:
            ending = self._ending.wait(WRITE_S)
            try:
                if not self._write():
                    return
            except OSError as error:
                log.warning("kvtier: timelines are not kept: %s", error)
                return

    def _write(self) -> bool:
        """Append what there is; False where the file is full."""
        text = ""
        while self.hits:
            text += self.hits.popleft().lines()
        if not text:
            return True
        with open(self._path, "a") as file:
            if file.tell() + len(text) > LIMIT_FILE_BYTES:
                log.warning("kvtier: %s is full: no more timelines are kept", self._path)
                return False
            file.write(text if file.tell() else "[\n" + text)
        return True
