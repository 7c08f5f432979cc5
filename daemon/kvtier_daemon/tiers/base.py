"""The tier below memory, as one tenant's requests use it: what serving, observing and the switching of tiers
call.

A tenant has one `TenantTier` at any time: `NullTier` until the daemon has opened one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.catalog.holds import Request
from kvtier_daemon.planning import PATIENCE_S

# Blocks that will be in memory, in how many milliseconds, and the reason.
Outlook = tuple[int, float, str]


class TierStats(NamedTuple):
    """What one tenant's tier counted."""

    counts: Mapping[str, int] = Counter()  # blocks that were read and written, by result
    moved_bytes: Mapping[str, int] = Counter()  # read and written
    verdicts: Mapping[str, int] = Counter()  # the planner's decisions for requests, by reason
    day_bytes: int = 0  # that count against the daily limit of writes
    notes_bytes: int = 0  # memory of the notes about recomputed blocks


class TenantTier(Protocol):
    """Blocks of one tenant that are not in memory. No call waits for I/O; a block is never in two tenants'
    tiers."""

    # --- state -------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether its blocks can be read now."""

    @property
    def is_recovering(self) -> bool:
        """Whether blocks from before the start are still being found."""

    @property
    def is_recovered(self) -> bool:
        """Whether all blocks from before the start are known."""

    # --- reads -------------------------------------------------------------------------------

    def promote(
        self, space: KnownSpace, keys: bytes, coming: int, *, request: Request | None = None,
        urgent: bool = True, within_s: float = PATIENCE_S, recompute_s: float = float("inf"),
    ) -> Outlook:  # fmt: skip
        """Start to read the blocks of this prefix that memory lacks, if the planner expects that to be faster
        than computing the `coming` blocks."""

    def recomputes(
        self, session: int, space: KnownSpace, keys: bytes, ready: int, coming: int
    ) -> None:
        """Note that a request computes the `coming` blocks after the ready ones, because that is faster.
        Blocks that were computed before are prefetched."""

    def probe(self, session: int, space: KnownSpace, keys: bytes, ready: int, coming: int) -> None:
        """Prefetch a few of the `coming` blocks of a request that computes them because the tier is
        unreliable, to measure whether it still is."""

    def cancel(self, request: Request) -> None:
        """Cancel the reads that only this request waits for."""

    def released(self, request: Request) -> None:
        """Note that the request's lease was released: nothing waits for its reads unless it asks again
        soon."""

    def session_ended(self, session: int) -> None:
        """Cancel the reads that only this session waits for."""

    def call_when_read(self, request: Request, then: Callable[[], None]) -> bool:
        """Call `then` once when all reads of this request have ended. False, without a call, if none is
        pending."""

    def call_when_recovered(self, request: Request, then: Callable[[], None]) -> None:
        """Call `then` once when all blocks from before the start are known."""

    def cancel_calls(self, request: Request) -> None:
        """Cancel the pending calls of this request."""

    # --- writes ------------------------------------------------------------------------------

    def saved(self, ids: bytes) -> None:
        """Note that these blocks were committed to memory."""

    def forget(self, space: KnownSpace, keys: bytes, done: Callable[[str], None] | None) -> bool:
        """Make durable that these blocks are forgotten; the catalog has forgotten them already. Later `done`
        gets the failure, or an empty text. False, without a call, if there is nothing to do."""

    def erase(self, first: int, done: Callable[[str, int, int], None]) -> bool:
        """Erase bytes that no block uses, in one portion of files from `first` on. Later `done` gets the
        failure or an empty text, the next `first` (0 at the end), and the number of files. False, without a
        call, if there is nothing to do."""

    def drain(self, wanted: bool) -> None:
        """Start to write all blocks that are only in memory, and all that are saved from now on; or stop
        that."""

    @property
    def is_drained(self) -> bool:
        """Whether all blocks that were only in memory when `drain` was called have been written."""

    @property
    def left_to_drain(self) -> int:
        """Number of blocks that `drain` has yet to write."""

    # --- numbers -----------------------------------------------------------------------------

    def stats(self) -> TierStats:
        """Return the counters since the start of the daemon."""

    def codec_report(self) -> Sequence[Mapping[str, object]]:
        """The codec that is in use for each space, and why."""


class NullTier:
    """No tier: it holds no blocks, and takes none."""

    is_on = is_recovering = False
    is_recovered = is_drained = True
    left_to_drain = 0

    def promote(
        self, space: KnownSpace, keys: bytes, coming: int, *, request: Request | None = None,
        urgent: bool = True, within_s: float = PATIENCE_S, recompute_s: float = float("inf"),
    ) -> Outlook:  # fmt: skip
        return 0, 0.0, "off"

    def recomputes(
        self, session: int, space: KnownSpace, keys: bytes, ready: int, coming: int
    ) -> None:
        pass

    def probe(self, session: int, space: KnownSpace, keys: bytes, ready: int, coming: int) -> None:
        pass

    def cancel(self, request: Request) -> None:
        pass

    def released(self, request: Request) -> None:
        pass

    def session_ended(self, session: int) -> None:
        pass

    def call_when_read(self, request: Request, then: Callable[[], None]) -> bool:
        return False

    def call_when_recovered(self, request: Request, then: Callable[[], None]) -> None:
        pass

    def cancel_calls(self, request: Request) -> None:
        pass

    def saved(self, ids: bytes) -> None:
        pass

    def forget(self, space: KnownSpace, keys: bytes, done: Callable[[str], None] | None) -> bool:
        return False

    def erase(self, first: int, done: Callable[[str, int, int], None]) -> bool:
        return False

    def drain(self, wanted: bool) -> None:
        pass

    def stats(self) -> TierStats:
        return TierStats()

    def codec_report(self) -> Sequence[Mapping[str, object]]:
        return ()
