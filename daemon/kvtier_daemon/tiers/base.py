"""The seam of the tier below memory. A new tier implements these roles; `App` gets its `LowerTier`.

`LowerTier` is the whole tier, with its files or connections. It gives each tenant a `TenantTier`, which has
one part for each kind of caller. A part may be the tier's own object for that purpose, and one object may be
several parts. No call of a part waits for I/O.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.catalog.demotion import WritePlan
from kvtier_daemon.catalog.holds import Request
from kvtier_daemon.config.schema import Config
from kvtier_daemon.planning import PATIENCE_S
from kvtier_daemon.tiers.warm import Extent
from kvtier_kernels import Mapping as MappedExtent

# Blocks that will be in memory, in how many milliseconds, and the reason.
Outlook = tuple[int, float, str]


class TierStats(NamedTuple):
    """What one tenant's tier counted since the start of the daemon."""

    counts: Mapping[str, int] = Counter()  # blocks that were read and written, by result
    moved_bytes: Mapping[str, int] = Counter()  # read and written
    verdicts: Mapping[str, int] = Counter()  # the planner's decisions for requests, by reason
    day_bytes: int = 0  # that count against the daily limit of writes
    notes_bytes: int = 0  # memory of the notes about recomputed blocks
    compressed: Mapping[str, int] = Counter()  # compressed memory


def summed(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return dict(total)


# --- one tenant's blocks that are not in memory --------------------------------------------------


class TierRecovery(Protocol):
    """The search for blocks from before the start."""

    @property
    def is_awaited(self) -> bool:
        """Whether it is in progress, and requests may wait for it."""

    @property
    def is_complete(self) -> bool:
        """Whether all blocks are known."""

    def call_when_ended(self, request: Request, then: Callable[[], None], /) -> None:
        """Call `then` once when the search has ended."""

    def cancel_calls(self, request: Request, /) -> None:
        """Cancel the pending call of this request."""


class TierReads(Protocol):
    """Starts reads into memory."""

    @property
    def is_on(self) -> bool:
        """Whether blocks can be read now."""

    def promote(
        self, space: KnownSpace, keys: bytes, coming: int, *, request: Request | None = None,
        urgent: bool = True, within_s: float = PATIENCE_S, recompute_s: float = float("inf"),
    ) -> Outlook:  # fmt: skip
        """Start to read the blocks of this prefix that memory lacks, if the planner expects that to be faster
        than computing. Return how many of the `coming` blocks to expect, in how many ms, and why."""

    def recomputes(
        self, session: int, space: KnownSpace, keys: bytes, ready: int, coming: int
    ) -> None:
        """Note that a request computes the `coming` blocks after the ready ones, because that is faster.
        Prefetch those that were computed before."""

    def bring_back(self, space: KnownSpace, ids: bytes) -> None:
        """Read these blocks, which are only on disk because an engine held them and has dropped them, if the
        tier has time for it. Report the others to `Residency.stay_below`."""

    def read(self, space: KnownSpace, ids: bytes) -> None:
        """Read these blocks, which are only on disk, if the tier has time for it."""

    def probe(self, session: int, space: KnownSpace, keys: bytes, ready: int, coming: int) -> None:
        """Prefetch a few of the `coming` blocks of a request that computes them because the tier is
        unreliable, to measure whether it still is."""


class PendingReads(Protocol):
    """The requests that wait for reads."""

    def cancel(self, request: Request) -> None:
        """Cancel the reads that only this request waits for, and forget its verdict."""

    def end_reads(self, request: Request) -> None:
        """Cancel the reads that only this request waits for: it was told that no blocks come."""

    def released(self, request: Request) -> None:
        """The request's lease was released: nothing waits for its reads unless it asks again soon."""

    def session_ended(self, session: int) -> None:
        """Cancel the reads that only this session waits for."""

    def call_when_read(self, request: Request, then: Callable[[], None]) -> bool:
        """Call `then` once when the request's reads have ended; False, without a call, if none is pending."""

    def cancel_calls(self, request: Request, /) -> None:
        """Cancel the pending call of this request."""


class Descriptors(Protocol):
    """Something that clients receive descriptors of."""

    def handles(self, read_only: bool) -> tuple[int, ...]:
        """Return new descriptors, which the caller closes."""


class DirectFile(Protocol):
    """A file of a tier, with blocks of one tenant. Equal to another one if it is the same file."""

    @property
    def nbytes(self) -> int: ...
    def open(self) -> Descriptors:
        """Open it only for reading. Raises OSError."""

    def __hash__(self) -> int: ...


class GrantedFrame(NamedTuple):
    """The frame of a block. `at`: its key's place in the request; `epoch`: the use of the file."""

    at: int
    file: DirectFile
    page: int
    payload_bytes: int
    codec: int
    header_pages: int
    epoch: int
    digest: bytes


class DirectGrant(NamedTuple):
    """Frames under a lease; no lease (0) without frames."""

    lease: int = 0
    frames: tuple[GrantedFrame, ...] = ()


class DirectReads(Protocol):
    """Frames that clients read from the files of the tier themselves."""

    def grant(
        self, session: int, space: KnownSpace, group: int, shard: int, keys: bytes,
        codecs: Collection[int], within_s: float, may_use: Callable[[DirectFile], bool], first: int,
        most: int,
    ) -> DirectGrant:  # fmt: skip
        """Take a lease on frames with these codecs: the first `most` blocks that a load of the keys needs
        and that are only in this tier, from the key `first` on. Takes no frame in a file that the session
        may not use. If `within_s` is 0 there is no lease."""

    def count(
        self, space: KnownSpace, place: tuple[int, int], good: int, bad: int, tokens: int, nbytes: int
    ) -> None:  # fmt: skip
        """Count frames that were read, and of each good one at most these tokens and bytes as used."""

    def end(self, session: int, lease: int, failed: bytes, tokens: int, nbytes: int) -> bytes:
        """End the lease; return a byte for each block, 1 if it has not `failed` and is still stored. Of each
        of these, at most `tokens` and `nbytes` count as used."""

    def session_ended(self, session: int) -> None: ...


class CopiedBlock(NamedTuple):
    """The bytes of a block, valid until the next read, and their checksum."""

    block: memoryview
    checksum: bytes


class LeavingBlocks(Protocol):
    """A place in the tier that is reused next: its blocks that have no other copy are lost then."""

    @property
    def name(self) -> tuple[int, int]:
        """The place, and what distinguishes this use of it."""

    @property
    def is_there(self) -> bool:
        """Whether its blocks can still be read."""

    def ids(self, used: bool) -> bytes:
        """The blocks without another copy; with `used`, only those that were requested after their write."""

    def plans(self, ids: bytes) -> Mapping[int, WritePlan]:
        """The content of the headers of those of these blocks that are still there, and not lossy."""

    async def read(self, plans: Mapping[int, WritePlan]) -> Mapping[int, CopiedBlock]:
        """Read these blocks to memory outside the arena, after all other reads. Leaves out those that cannot
        be read, or were forgotten before the end of the read."""


class TierLeaving(Protocol):
    def next(self) -> Sequence[LeavingBlocks]:
        """The places that are reused next."""


class TierDrain(Protocol):
    """Writes all blocks that are only in memory when it begins, and new blocks when they are saved."""

    @property
    def is_done(self) -> bool:
        """Whether all blocks that were only in memory at the beginning have been written."""

    @property
    def left_blocks(self) -> int:
        """About how many blocks are yet to be written."""

    @property
    def unfit(self) -> Collection[int]:
        """The blocks that cannot be written; the drain ends without them."""

    def begin(self) -> None: ...
    def end(self) -> None: ...


class TierWrites(Protocol):
    @property
    def drain(self) -> TierDrain: ...

    def saved(self, ids: bytes) -> None:
        """Note that these blocks were committed to memory."""


class TierForgets(Protocol):
    def forget(
        self, space: KnownSpace, keys: bytes, done: Callable[[str], None] | None, patient: bool = False
    ) -> bool:  # fmt: skip
        """Make durable that these blocks are forgotten; the catalog has forgotten them already. Later `done`
        gets the failure, or an empty text: soon, or if it is `patient`, after a longer time for a slow disk.
        Return False, without a call, if there is nothing to do."""

    def erase(self, first: int, done: Callable[[str, int, int], None]) -> bool:
        """Erase bytes that no block uses, in one portion of files from `first` on. Later `done` gets the
        failure or an empty text, the next `first` (0 at the end), and the number of files. Return False,
        without a call, if there is nothing to do."""


class TenantTier(Protocol):
    """The parts of one tenant. A block is never in two tenants' tiers."""

    def release(self, number: int) -> None:
        """Let go of the pages of the tenant's extent with this number, from 0 on: it will have no blocks."""

    @property
    def recovery(self) -> TierRecovery: ...
    @property
    def reads(self) -> TierReads: ...
    @property
    def pending(self) -> PendingReads: ...
    @property
    def direct(self) -> DirectReads: ...
    @property
    def writes(self) -> TierWrites: ...
    @property
    def forgets(self) -> TierForgets: ...
    @property
    def leaving(self) -> TierLeaving: ...

    def stats(self) -> TierStats: ...


class SharedTier(Protocol):
    """One tenant's part of a store that hosts share. It is beside the tier below memory: the catalog has no
    records of its blocks, and a block that is read from it is saved to memory by the daemon itself."""

    @property
    def pending(self) -> PendingReads: ...

    def beyond(
        self, space: KnownSpace, keys: bytes, first: int, others: Sequence[bytes] = (), asks: bool = True
    ) -> int:  # fmt: skip
        """Return how many blocks of this prefix from `first` on can be read, or are being read. `others`: the
        keys of its first blocks under each other secret that the tenant accepts. `asks`: a request needs
        them, so find out later what is not known of them."""

    def fetch(
        self, space: KnownSpace, keys: bytes, first: int, count: int, *, request: Request | None = None,
        urgent: bool = True, within_s: float = PATIENCE_S, recompute_s: float = float("inf"),
        others: Sequence[bytes] = (),
    ) -> Outlook:  # fmt: skip
        """Start to read these blocks, as `TierReads.promote` does."""

    def saved(self, ids: bytes) -> None:
        """Note that clients committed these blocks to memory."""

    def used(self, space: KnownSpace, keys: bytes) -> None:
        """Note that a request found these blocks in memory."""

    def forget(
        self, space: KnownSpace, keys: bytes, done: Callable[[str], None] | None
    ) -> bool: ...

    def purge(self, space: KnownSpace, keys: bytes, done: Callable[[str], None] | None) -> bool:
        """As `forget`, for these blocks and those of the space that this host wants."""


class NoDirectReads:
    """The `DirectReads` of a tier whose files no client may read."""

    def grant(self, *_: Any) -> DirectGrant:
        return DirectGrant()

    def count(self, *_: Any) -> None: ...

    def end(
        self, _session: int, _lease: int, failed: bytes, _tokens: int, _nbytes: int
    ) -> bytes:  # fmt: skip
        return bytes(len(failed))

    def session_ended(self, session: int) -> None:
        pass


class NullTier:
    """No tier, and all parts of it: it holds no blocks, and takes none."""

    is_on = is_awaited = False
    is_complete = is_done = True
    left_blocks = 0
    unfit: Collection[int] = ()

    def __init__(self) -> None:
        self.recovery = self.reads = self.pending = self.writes = self.forgets = self.drain = self
        self.leaving = self
        self.direct = NoDirectReads()

    def promote(self, *_: Any, **__: Any) -> Outlook:
        return 0, 0.0, "off"

    fetch = promote

    def beyond(self, *_: Any, **__: Any) -> int:
        return 0

    def next(self) -> Sequence[LeavingBlocks]:
        return ()

    def stats(self) -> TierStats:
        return TierStats()

    def ignore(self, *_: Any) -> None:
        pass

    def refuse(self, *_: Any, **__: Any) -> bool:
        return False

    release = recomputes = bring_back = read = probe = cancel = released = session_ended = ignore
    saved = used = begin = end = ignore
    call_when_ended = cancel_calls = end_reads = ignore
    call_when_read = forget = purge = erase = refuse


class JoinedReads:
    """The pending reads of several tiers as one."""

    def __init__(self, *parts: PendingReads) -> None:
        self._parts = parts

    def cancel(self, request: Request) -> None:
        for part in self._parts:
            part.cancel(request)

    def end_reads(self, request: Request) -> None:
        for part in self._parts:
            part.end_reads(request)

    def released(self, request: Request) -> None:
        for part in self._parts:
            part.released(request)

    def session_ended(self, session: int) -> None:
        for part in self._parts:
            part.session_ended(session)

    def call_when_read(self, request: Request, then: Callable[[], None]) -> bool:
        def ended() -> None:
            if not self.call_when_read(request, then):
                then()

        return any(part.call_when_read(request, ended) for part in self._parts)

    def cancel_calls(self, request: Request, /) -> None:
        for part in self._parts:
            part.cancel_calls(request)


def forget_in(
    parts: Sequence[Callable[[Callable[[str], None] | None], bool]],
    done: Callable[[str], None] | None,
) -> bool:
    """Forget blocks in several tiers. Each part lacks only the `done` of `TierForgets.forget`."""
    failures: list[str] = []
    left = len(parts) + 1  # a part may call at once

    def ended(failure: str) -> None:
        nonlocal left
        left -= 1
        if failure:
            failures.append(failure)
        if not left and done is not None:
            done("; ".join(failures))

    waits = [forget(ended if done is not None else None) for forget in parts]
    if not any(waits):
        return False
    for _ in range(1 + waits.count(False)):
        ended("")
    return True


# --- the whole tier ------------------------------------------------------------------------------


class OpenTier(Protocol):
    """A tier whose files or connections are open."""

    @property
    def size_bytes(self) -> int: ...
    @property
    def faults(self) -> int: ...

    @property
    def failure(self) -> str:
        """The current failures, or an empty text."""


class LowerTier(Protocol):
    """The life of the tier below memory. A failure of it disables the tier and nothing else."""

    name: str  # in orders, in the status and in events

    @property
    def tier(self) -> OpenTier | None:
        """None if no such tier is configured."""

    @property
    def hangs(self) -> bool:
        """Whether threads wait for I/O and cannot be stopped."""

    async def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open the tier, if configured, and set each `Tenant.tier`. TierError: the configuration is wrong."""

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start to move blocks in these tasks."""

    def map(self, extent: Extent) -> None:
        """Use this extent of a tenant's memory. It is called once for each, in their order."""

    def run_periodic(self) -> None:
        """Do periodic work. Never raises."""

    def probe(self) -> None:
        """Check in the background that blocks can be written and read."""

    def reconfigure(self, config: Config) -> None:
        """Apply this configuration, which differs only in keys that can be reloaded."""

    def order(self, tier: str, order: str) -> dict[str, Any]:
        """Drain a tier, switch it off or on, or report its state. Raises TierError."""

    def state(self, tier: str) -> str:
        """Return the state of this tier or of memory, one of `states`."""

    def report(self, tenants: Collection[str]) -> dict[str, Any]:
        """Return the status of the tier, with the figures of these tenants."""

    async def end_moving(self, told: Callable[[str], None]) -> None:
        """Write the blocks that are only in memory, as far as the configuration permits, then stop to move
        blocks. The files stay open. `told` gets the progress. A cancellation skips the rest of the writes."""

    async def close(self) -> bool:
        """Close the tier. Return False if something hangs that uses files or memory of the daemon."""

    def mappings(self) -> list[MappedExtent]:
        """Return the memory that reads and writes in flight use."""
