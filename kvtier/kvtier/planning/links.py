"""A link: what lies between memory and one disk directory. How fast it is, and who may use it."""

from __future__ import annotations

from collections.abc import Callable

GUESS_BYTES_S = 2e9  # until something was read
BUSY_S = 1.0  # of reading: how fast it was before counts for half
STALE_S = 30.0  # without a read: what was slow then may be so no more
WINDOW_S = 0.01  # handed over at once, so that who comes next needn't wait for more
WINDOW_READS, WINDOW_MOST = 16, 1024
SIDE_SHARE = 1 / 16  # of an urgent link that writes get; and prefetches as much again
SURE = 0.8
FORECAST_SHARE = 0.25  # that the last forecast has in how many were kept
UNRELIABLE, RELIABLE = (
    0.6,
    0.8,
)  # two failures in a row make a link unreliable; three successes end that
# Between prefetches that show whether forecasts are kept again; twice as long after each that was late.
PROBE_S, LONGEST_PROBE_S = 1.0, 30.0


class Link:
    """Averages of bandwidth, of the reads that were handed over: they are served side by side, so bytes count
    against the time in which any of them was there. Once urgent ones have come, only while there are some:
    beside prefetches writes have all they want, and how fast those are says little."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.reading = self.reading_bytes = 0  # handed over, and not over
        self._urgent = 0  # of those
        self._was_urgent = False  # ever
        self._clock = clock
        self._busy_s = self._come_bytes = 0.0  # lately
        self._at = 0.0  # until when `_busy_s` is counted
        self._last_at = clock()
        self._writes = self._prefetches = 0.0  # bytes that they may move beside urgent reads
        self._kept = 1.0  # share of the last forecasts
        self._probed_at = float("-inf")
        self._probe_s = PROBE_S
        self.is_reliable = True

    @property
    def bytes_s(self) -> float:
        if not self._come_bytes or not self._busy_s:
            return GUESS_BYTES_S
        rate = self._come_bytes / self._busy_s
        idle = not self.reading and self._clock() - self._last_at > STALE_S
        return max(rate, GUESS_BYTES_S) if idle else rate

    @property
    def sure_bytes_s(self) -> float:
        """What urgent reads can count on: others have their share, and no average is always kept."""
        return self.bytes_s * SURE

    def began(self, nbytes: int, urgent: bool) -> None:
        """A read was handed to the disk."""
        now = self._clock()
        self._pass(now)
        self._urgent += urgent
        self.reading += 1
        self.reading_bytes += nbytes
        if self._busy_s > BUSY_S:
            self._busy_s, self._come_bytes = self._busy_s / 2, self._come_bytes / 2
        if urgent:
            # Never so much that several go in a row.
            side = nbytes * SIDE_SHARE
            self._writes = min(nbytes, self._writes + side)
            self._prefetches = min(nbytes, self._prefetches + side)

    def ended(self, nbytes: int, good: bool, urgent: bool) -> None:
        """A read that began so has ended, and brought what it should or not."""
        now = self._clock()
        if self._pass(now):
            self._last_at = now
            self._come_bytes += nbytes if good else 0
        self.reading -= 1
        self.reading_bytes -= nbytes
        self._urgent -= urgent
        self._was_urgent |= urgent

    def forecast_ended(self, kept: bool) -> None:
        """A request's reads were forecast, and came in time or late."""
        self._kept += FORECAST_SHARE * (kept - self._kept)
        if not self.is_reliable:
            self._probe_s = PROBE_S if kept else min(2 * self._probe_s, LONGEST_PROBE_S)
        self.is_reliable = self._kept > (UNRELIABLE if self.is_reliable else RELIABLE)

    def may_probe(self) -> bool:
        """Whether a prefetch may show now if forecasts are kept again; it then does."""
        now = self._clock()
        if self.is_reliable or now - self._probed_at < self._probe_s:
            return False
        self._probed_at = now
        return True

    def _pass(self, now: float) -> bool:
        """Time has passed; whether it counts."""
        counts = self._urgent > 0 or (self.reading > 0 and not self._was_urgent)
        if counts:
            self._busy_s += now - self._at
        self._at = now
        return counts

    def has_room(self) -> bool:
        """Whether one more read may be handed over: enough to keep the disk busy, and no more."""
        if self.reading < WINDOW_READS:
            return True
        return self.reading < WINDOW_MOST and self.reading_bytes < WINDOW_S * self.bytes_s

    def spend_prefetch(self, nbytes: int) -> bool:
        """Whether a prefetch may go beside urgent reads, which it then does."""
        if self._prefetches <= 0:
            return False
        self._prefetches -= nbytes
        return True

    def may_write(self) -> bool:
        """Whether a write may go beside urgent reads."""
        return self._writes > 0

    def wrote(self, nbytes: int) -> None:
        """A write went beside urgent reads."""
        self._writes -= nbytes
