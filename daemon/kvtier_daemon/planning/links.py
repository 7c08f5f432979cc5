"""The bandwidth between memory and one disk directory, and which transfers may be submitted to it."""

from __future__ import annotations

from collections.abc import Callable

GUESS_BYTES_S = 2e9  # assumed before the first read
BUSY_S = 1.0  # of reading: the earlier average is halved
STALE_S = 30.0  # without a read: a low average is not used
WINDOW_S = 0.01  # of work submitted at once; a later read waits no longer than this
WINDOW_READS, WINDOW_MOST = 16, 1024
SIDE_SHARE = 1 / 16  # of a busy link, for writes; the same for prefetches
SURE = 0.8
FORECAST_SHARE = 0.25  # weight of the last forecast in the average
# Two failures in a row make a link unreliable; three successes make it reliable again.
UNRELIABLE, RELIABLE = 0.6, 0.8
# Between prefetches that test an unreliable link; doubled after each late one.
PROBE_S, LONGEST_PROBE_S = 1.0, 30.0


class DiskLink:
    """The average bandwidth of submitted reads, which run in parallel: bytes divided by the time during which
    at least one was running. After the first urgent read, only times with urgent reads count, because writes
    are not limited while only prefetches run."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.reading = self.reading_bytes = 0  # submitted and not ended
        self._urgent = 0  # of these
        self._was_urgent = False  # ever
        self._clock = clock
        self._busy_s = self._read_bytes = 0.0  # recently
        self._at = 0.0  # `_busy_s` includes the time until then
        self._last_at = clock()
        self._writes = self._prefetches = 0.0  # bytes allowed while urgent reads run
        self._kept = 1.0  # share of recent forecasts that were right
        self._probed_at = float("-inf")
        self._probe_s = PROBE_S
        self.is_reliable = True

    @property
    def bytes_s(self) -> float:
        if not self._read_bytes or not self._busy_s:
            return GUESS_BYTES_S
        rate = self._read_bytes / self._busy_s
        idle = not self.reading and self._clock() - self._last_at > STALE_S
        return max(rate, GUESS_BYTES_S) if idle else rate

    @property
    def sure_bytes_s(self) -> float:
        """The bandwidth that urgent reads can rely on: writes and prefetches share the average."""
        return self.bytes_s * SURE

    def began(self, nbytes: int, urgent: bool) -> None:
        """A read was submitted to the disk."""
        now = self._clock()
        self._count_busy(now)
        self._urgent += urgent
        self.reading += 1
        self.reading_bytes += nbytes
        if self._busy_s > BUSY_S:
            self._busy_s, self._read_bytes = self._busy_s / 2, self._read_bytes / 2
        if urgent:
            # At most one read's worth, so that none follow each other directly.
            side = nbytes * SIDE_SHARE
            self._writes = min(nbytes, self._writes + side)
            self._prefetches = min(nbytes, self._prefetches + side)

    def ended(self, nbytes: int, good: bool, urgent: bool) -> None:
        """A submitted read has ended, with its data or without."""
        now = self._clock()
        if self._count_busy(now):
            self._last_at = now
            self._read_bytes += nbytes if good else 0
        self.reading -= 1
        self.reading_bytes -= nbytes
        self._urgent -= urgent
        self._was_urgent |= urgent

    def forecast_ended(self, kept: bool) -> None:
        """The forecast for a request was right (`kept`) or wrong."""
        self._kept += FORECAST_SHARE * (kept - self._kept)
        if not self.is_reliable:
            self._probe_s = PROBE_S if kept else min(2 * self._probe_s, LONGEST_PROBE_S)
        self.is_reliable = self._kept > (UNRELIABLE if self.is_reliable else RELIABLE)

    def may_probe(self) -> bool:
        """Whether to start a prefetch now that tests an unreliable link. True counts as started."""
        now = self._clock()
        if self.is_reliable or now - self._probed_at < self._probe_s:
            return False
        self._probed_at = now
        return True

    def _count_busy(self, now: float) -> bool:
        """Count the time since the last call if it was busy; return whether it was."""
        counts = self._urgent > 0 or (self.reading > 0 and not self._was_urgent)
        if counts:
            self._busy_s += now - self._at
        self._at = now
        return counts

    def has_room(self) -> bool:
        """Whether one more read may be submitted: enough to keep the disk busy, not more."""
        if self.reading < WINDOW_READS:
            return True
        return self.reading < WINDOW_MOST and self.reading_bytes < WINDOW_S * self.bytes_s

    def spend_prefetch(self, nbytes: int) -> bool:
        """Whether a prefetch may be submitted while urgent reads run. True counts as submitted."""
        if self._prefetches <= 0:
            return False
        self._prefetches -= nbytes
        return True

    def may_write(self) -> bool:
        """Whether a write may be submitted while urgent reads run."""
        return self._writes > 0

    def wrote(self, nbytes: int) -> None:
        """A write was submitted while urgent reads run."""
        self._writes -= nbytes
