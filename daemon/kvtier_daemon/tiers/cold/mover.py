"""Moves one tenant's blocks between memory and disk.

The catalog decides which blocks, the planner when, and the cold tier does the I/O. Reads start with a match
and go
before all writes. `Flusher` and `Reclaimer` write; `TombstoneWriter` makes a forget durable.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from kvtier.key import KEY_BYTES
from kvtier_daemon.catalog import Catalog, KnownSpace
from kvtier_daemon.catalog.holds import Request
from kvtier_daemon.catalog.promotion import Promotion, Survey
from kvtier_daemon.codec.base import Codec
from kvtier_daemon.codec.choice import Choice
from kvtier_daemon.codec.frame import RAW
from kvtier_daemon.codec.losses import NUMBERS as LOSSY
from kvtier_daemon.codec.losses import Losses
from kvtier_daemon.planning import PATIENCE_S, WHY, Verdict
from kvtier_daemon.planning.recomputed import RecomputedBlocks, prefetch_limit
from kvtier_daemon.tiers.base import TierStats
from kvtier_daemon.tiers.cold.flusher import Flusher
from kvtier_daemon.tiers.cold.frames import (
    CODEC_AT,
    DAMAGED,
    FRAME,
    NBYTES_AT,
    SLOT,
    incoming,
    place_of,
)
from kvtier_daemon.tiers.cold.read_queue import Name
from kvtier_daemon.tiers.cold.reclaimer import Reclaimer
from kvtier_daemon.tiers.cold.segment_log import Segment
from kvtier_daemon.tiers.cold.segment_store import SegmentStore
from kvtier_daemon.tiers.cold.tier import ColdTier
from kvtier_daemon.tiers.cold.tombstones import TombstoneWriter
from kvtier_daemon.tiers.cold.transfers import Decoding, Incoming
from kvtier_daemon.tiers.cold.write_budget import WriteBudget

log = logging.getLogger(__name__)

READING_BLOCKS = 8192  # in flight; one request may use half of the rest
READING_BYTES = 1 << 30
PROBE_BLOCKS = 4
LEAST_BLOCKS = 64  # a request may read at least this many
MOST = (1 << 32) - 1


class Mover:
    """The `TenantTier` of one tenant's disks. `extents` has the cold tier's numbers of the tenant's extents,
    in the tenant's order; `ColdLifecycle` fills it."""

    def __init__(
        self,
        tenant: str,
        catalog: Catalog,
        cold: ColdTier,
        quota_bytes: int,
        *,
        through: bool = False,
        daily_bytes: int = 0,
        admission: str = "auto",
        codec: str = "raw",
        codecs: Sequence[tuple[str, str]] = (),
        losses: Losses | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.extents: list[int] = []
        self.counts: Counter[str] = Counter(
            written=0, read=0, written_again=0, spoilt=0, not_read=0
        )
        self.bytes: Counter[str] = Counter(written=0, read=0, written_again=0)
        # The planner's decisions for requests.
        self.verdicts: Counter[str] = Counter(dict.fromkeys(WHY, 0))
        self.beaten = RecomputedBlocks()
        self.choice = Choice(cold.coding.rates, codec, codecs, losses, tenant)
        self._tenant = tenant
        self._catalog = catalog
        self._cold = cold
        self._clock = clock
        self._budget = WriteBudget(daily_bytes, clock)
        self._tombstones = TombstoneWriter(tenant, catalog, cold)
        self._reclaimer = Reclaimer(
            tenant, catalog, cold, self._budget, self._tombstones, self.counts, self.bytes
        )
        self._flusher = Flusher(
            tenant, catalog, cold, self.extents, quota_bytes, self._budget, self._reclaimer, self.counts,
            self.bytes, self.choice, clock, through=through, admission=admission,
        )  # fmt: skip
        self._waiting_bytes = 0  # in flight

    def reconfigure(
        self, *, through: bool, daily_bytes: int, admission: str, codec: str,
        codecs: Sequence[tuple[str, str]],
    ) -> None:  # fmt: skip
        """Use this configuration for all writes that start from now on."""
        self._budget.limit(daily_bytes)
        self.choice.ask(codec, codecs)
        self._flusher.reconfigure(through=through, admission=admission)

    def drain(self, wanted: bool) -> None:
        """Start to write all blocks that are only in memory, and all that are saved from now on; or stop
        that."""
        self._flusher.drain(wanted)

    @property
    def is_drained(self) -> bool:
        """Whether all blocks that were only in memory when `drain` was called have been written."""
        return self._flusher.is_drained

    @property
    def left_to_drain(self) -> int:
        return self._flusher.left_to_drain

    def inherit(self, other: Mover) -> None:
        """Continue the counters, the budget, the forgets and the drain of an earlier mover of this tenant."""
        self.counts.update(other.counts)
        self.bytes.update(other.bytes)
        self.verdicts.update(other.verdicts)
        self.beaten = other.beaten
        self._budget.inherit(other._budget)
        self._tombstones.inherit(other._tombstones)
        self.drain(other._flusher.drains)

    @property
    def is_on(self) -> bool:
        return self._cold.reader.is_on

    @property
    def is_recovered(self) -> bool:
        """Whether all blocks from before the start are known."""
        return self._cold.recovery.is_complete

    @property
    def is_recovering(self) -> bool:
        """Whether blocks from before the start are still being found."""
        return self._cold.recovery.is_awaited and self._cold.reader.is_on

    def stats(self) -> TierStats:
        return TierStats(
            self.counts,
            self.bytes,
            self.verdicts,
            self._budget.day_bytes(),
            self.beaten.memory_bytes(),
        )

    def codec_report(self) -> Sequence[Mapping[str, object]]:
        return self.choice.report()

    def saved(self, ids: bytes) -> None:
        """Note that these blocks were committed."""
        self._flusher.saved(ids)

    def reclaim(self, store: SegmentStore, segment: Segment) -> None:
        """Reclaim this segment after its requested blocks have been copied."""
        self._reclaimer.reclaim(store, segment)

    def forget(self, space: KnownSpace, keys: bytes, done: Callable[[str], None] | None) -> bool:
        self._tombstones.forget(space, keys, done)
        return True

    def erase(self, first: int, done: Callable[[str, int, int], None]) -> bool:
        self._tombstones.erase(first, done)
        return True

    def repeat_early_forgets(self) -> None:
        """Forget again the blocks that were forgotten before the scan found them."""
        self._tombstones.repeat_early_forgets()

    def tombstone(self) -> None:
        """Write tombstones of frames that no block uses."""
        self._tombstones.tombstone()

    def tend(self) -> None:
        """Do periodic work: write tombstones, and wake the flusher."""
        self.tombstone()
        self._flusher.tend()

    async def run(self) -> None:
        """Write and reclaim until the task is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._flusher.run(), name=f"write {self._tenant}")
            tasks.create_task(self._reclaimer.run(), name=f"bring away {self._tenant}")

    # --- reading -----------------------------------------------------------------------------

    def promote(
        self,
        space: KnownSpace,
        keys: bytes,
        coming: int,
        *,
        request: Request | None = None,
        urgent: bool = True,
        within_s: float = PATIENCE_S,
        recompute_s: float = float("inf"),
    ) -> tuple[int, float, str]:
        """Start to read the blocks of this prefix that memory lacks, if the planner expects that to be faster
        than computing; return how many of the `coming` blocks to expect, in how many milliseconds, and the
        reason."""
        if not self._cold.reader.is_on:
            return 0, 0.0, "off"
        if request is None:
            request = (0, (self._tenant, space.number, keys))
        catalog, reads = self._catalog, self._cold.reads
        said: list[Verdict] = []

        def accept(survey: Survey) -> bool:
            fresh = reads.bytes_of(self._load_bytes(space, survey.frames))
            joined = self._names(survey.joined)
            verdict = reads.weigh(request, fresh, joined, urgent, within_s, recompute_s)
            said.append(verdict)
            return verdict.load

        room = (
            min(READING_BLOCKS, catalog.promotions.reading + self._room(space))
            - catalog.promotions.reading
        )
        limit = catalog.promotions.reading + max(room // 2, min(room, LEAST_BLOCKS))
        unreadable_segments = self._cold.unreadable_segments()
        plan = catalog.promotions.plan(space, keys, limit, unreadable_segments, accept)
        if not said:
            return 0, 0.0, "not_read"
        if said[0].first:
            self.verdicts[said[0].why] += 1
        if not said[0].load:
            if said[0].first or not reads.planner.eta_s(request):
                return 0, 0.0, said[0].why
            # It starts no more reads, but waits for those that are in flight.
            plan = catalog.promotions.plan(space, keys, 0, unreadable_segments)
        if plan.ids or said[0].first:
            self._read(request, space, plan)
        if plan.ids:
            self._flusher.wake()  # blocks were evicted for these, so others are the coldest now
        elif not plan.joined:
            return 0, 0.0, "not_read"
        eta_ms = max(reads.planner.eta_s(request), said[0].load_s) * 1000
        return max(0, coming - plan.left_out), eta_ms, said[0].why

    def probe(self, session: int, space: KnownSpace, keys: bytes, ready: int, coming: int) -> None:
        """Prefetch a few of the `coming` blocks of a request that computes them because the disk is
        unreliable, to measure whether it still is."""
        count = min(coming, PROBE_BLOCKS)
        keys = keys[: (ready + count) * KEY_BYTES]
        if sum(one.disk.link.may_probe() for one in self._cold.directories.attached):
            request = (session, ("probe", space.number, len(keys), keys[-KEY_BYTES:]))
            self.promote(space, keys, count, request=request, urgent=False)

    def recomputes(
        self, session: int, space: KnownSpace, keys: bytes, ready: int, coming: int
    ) -> None:
        """Note that a request computes the `coming` blocks after the ready ones. Prefetch those that were
        computed before."""
        again = self.beaten.note(keys[ready * KEY_BYTES : (ready + coming) * KEY_BYTES])
        room = (
            prefetch_limit(space.spec.block_bytes, self._catalog.promotions.reading) // space.places
        )
        if count := min(again, room):
            keys = keys[: (ready + count) * KEY_BYTES]
            request = (session, ("beaten", space.number, len(keys), keys[-KEY_BYTES:]))
            self.promote(space, keys, count, request=request, urgent=False)

    def _read(self, request: Request, space: KnownSpace, plan: Promotion) -> None:
        """Queue the reads of a request that the planner has accepted."""
        loads = self._load_bytes(space, plan.frames)
        blocks = (
            self._wanted(space, plan, loads, number, at)
            for at, number in enumerate(array("I", plan.ids))
        )
        self._waiting_bytes += self._cold.reads.add(
            request, self._tenant, loads, blocks, self._names(plan.joined), self._have_read
        )

    def _load_bytes(self, space: KnownSpace, frames: bytes) -> bytes:
        """Return the frames, with each payload size replaced by its cost for the link: more bytes if decoding
        is slower than reading."""
        codecs = set(frames[CODEC_AT :: FRAME.size]) - {RAW}
        if not codecs:
            return frames
        words, link_of = array("I", frames), self._cold.reads.link_of
        step = FRAME.size // words.itemsize
        slow = {
            (segment, codec): slowness
            for segment in set(words[::step])
            for codec in codecs
            if (slowness := self._slowness(space, codec, link_of(segment).bytes_s)) > 1
        }
        if slow:
            at = NBYTES_AT // words.itemsize
            for number, codec in enumerate(frames[CODEC_AT :: FRAME.size]):
                if factor := slow.get((words[number * step], codec)):
                    words[number * step + at] = min(int(words[number * step + at] * factor), MOST)
        return words.tobytes()

    def _slowness(self, space: KnownSpace, codec: int, link_bytes_s: float) -> float:
        return self.choice.slowness(space.identity, space.spec, codec, link_bytes_s)

    def _names(self, ids: bytes) -> Iterator[Name]:
        return ((self._tenant, one) for one in array("I", ids))

    def cancel(self, request: Request) -> None:
        """Cancel the reads that only this request waits for."""
        self._cold.reads.cancel(request)

    def released(self, request: Request) -> None:
        """Note that the request's lease was released: nothing waits for its reads unless it asks again
        soon."""
        self._cold.reads.planner.released(request)

    def call_when_read(self, request: Request, then: Callable[[], None]) -> bool:
        """Call `then` once when all reads of this request have ended. False, without a call, if none is
        pending."""
        return self._cold.reads.call_when_read(request, then)

    def call_when_recovered(self, request: Request, then: Callable[[], None]) -> None:
        """Call `then` once when all blocks from before the start are known."""
        self._cold.recovery.call_when_ended(request, then)

    def cancel_calls(self, request: Request) -> None:
        self._cold.reads.cancel_calls(request)
        self._cold.recovery.cancel_calls(request)

    def session_ended(self, session: int) -> None:
        """Cancel the reads that only this session waits for."""
        self._cold.reads.session_ended(session)

    def _room(self, space: KnownSpace) -> int:
        """Return how many more blocks of this space may be read now."""
        return max(0, (READING_BYTES - self._waiting_bytes) // space.spec.block_bytes)

    def _wanted(
        self, space: KnownSpace, plan: Promotion, loads: bytes, number: int, at: int
    ) -> Incoming:
        place = place_of(self.extents, plan.slots[at * SLOT.size : (at + 1) * SLOT.size])
        block = incoming(number, plan.frames, plan.digests, at, place)
        codec = plan.frames[at * FRAME.size + CODEC_AT]
        if codec == RAW:
            return block
        load_bytes = FRAME.unpack_from(loads, at * FRAME.size)[2]
        size, lossy = plan.sizes[at], self._lossy(space, number) if codec in LOSSY else None
        return replace(block, coding=Decoding(codec, space.spec, size, load_bytes, lossy))

    def _lossy(self, space: KnownSpace, number: int) -> Codec | None:
        """Return the lossy codec of this block."""
        (one,) = self._catalog.demotions.described(array("I", [number]).tobytes())
        name = one.identity
        return self.choice.lossy(name.space, space.spec, name.group, name.shard)

    def _have_read(self, block: Incoming, code: int, waited: Sequence[Request]) -> None:
        self._waiting_bytes -= block.load_bytes
        ids, catalog = array("I", [block.id]).tobytes(), self._catalog
        if not code:
            catalog.promotions.promoted(ids, waited, self._clock())
            self.counts["read"] += 1
            self.bytes["read"] += block.payload_bytes
        elif code in DAMAGED:
            log.warning(
                "cold: the frame in segment %d, page %d, is damaged; dropping it",
                block.segment,
                block.page,
            )
            catalog.promotions.spoilt(ids, errno.errorcode.get(code, str(code)))
            self.counts["spoilt"] += 1
        else:
            catalog.promotions.unpromoted(ids, errno.errorcode.get(code, str(code)))
            self.counts["not_read"] += 1
