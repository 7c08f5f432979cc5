"""Writes the tombstones of one tenant's segments in one directory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from kvtier_daemon.codec.frame import PAGE
from kvtier_daemon.tiers.cold.disk import DirectoryDisk
from kvtier_daemon.tiers.cold.segment_log import Segment, Stage

RETRY_S = 1.0


class SegmentTombstones:
    """`unused` is called with a segment whenever a write to it has ended."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        disk: DirectoryDisk,
        unused: Callable[[Segment], None],
        clock: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._disk = disk
        self._unused = unused
        self._clock = clock
        self._writing: dict[Segment, asyncio.Future[None]] = {}
        self._dirty: dict[Segment, None] = {}  # tombstones that are not written yet
        self._failed: dict[Segment, str] = {}  # why the last write failed
        self._retry_at = 0.0

    def add(self, segment: Segment, page: int) -> None:
        """Set the tombstone of this frame in memory; `write` writes it."""
        if segment.head is not None:
            segment.tombstones.add(page)
            self._dirty[segment] = None

    def write(self) -> None:
        """Start to write all dirty tombstones, except of segments whose head is being zeroed: those need
        none, unless that fails."""
        for segment in list(self._dirty):
            if segment not in self._writing and segment.stage is not Stage.FREEING:
                self._write_segment(segment)

    def retry(self) -> None:
        """Write again what failed, once per `RETRY_S`."""
        if self._dirty and self._disk.writes.is_on and self._clock() >= self._retry_at:
            self.write()

    async def flush(self) -> str:
        """Wait until all tombstones are on disk; return the failure, or an empty text."""
        self.write()
        for segment in list(self._writing):
            # The write in progress may lack the last tombstone; the next write has it.
            for _ in range(2):
                if writing := self._writing.get(segment):
                    await asyncio.shield(writing)
        return next(iter(self._failed.values()), "")

    def drop(self, segment: Segment) -> None:
        """Forget the tombstones of a segment that is reused."""
        self._dirty.pop(segment, None)
        self._failed.pop(segment, None)

    def _write_segment(self, segment: Segment) -> None:
        del self._dirty[segment]
        marks, head = segment.tombstones, segment.head
        if not marks.dirty or head is None:
            return
        first, count = marks.take_dirty()
        done = self._writing[segment] = self._loop.create_future()
        segment.noting = True

        def written(code: int, _: bytes | None) -> None:
            segment.noting = False
            del self._writing[segment]
            self._failed.pop(segment, None)
            if code:
                what = f"{segment.path}: cannot write its tombstones"
                self._disk.writes.fault(what, code)
                self._failed[segment] = f"{what}: {os.strerror(code)}"
                marks.dirty.update(range(first, first + count))
                self._dirty[segment] = None
                self._retry_at = self._clock() + RETRY_S
            elif segment in self._dirty:
                self._write_segment(segment)
            done.set_result(None)
            self._unused(segment)

        text = marks.encode(head.epoch, first, count)
        self._disk.write_text(segment.fd, PAGE + first * PAGE, text, written)
