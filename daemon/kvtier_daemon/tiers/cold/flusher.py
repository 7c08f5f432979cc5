"""Writes blocks to the disks in the order of their saves, so that the head of a chain is on disk before the
blocks below it, and that memory can evict blocks at once."""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import chain

from kvtier_daemon.catalog import Catalog
from kvtier_daemon.catalog.blocks import ID_BYTES
from kvtier_daemon.catalog.demotion import Demotion
from kvtier_daemon.catalog.frames import FramedBlocks
from kvtier_daemon.catalog.miss_log import BUDGET, OFF, ONCE, SLOW_DISK
from kvtier_daemon.codec.choice import Average, Choice
from kvtier_daemon.tiers.cold.encoder import threads_here
from kvtier_daemon.tiers.cold.frames import (
    BEGIN_S,
    BEGIN_TRIES,
    WRITE_BLOCKS,
    CipherNow,
    Outgoing,
    begin,
    describe,
    ids_of,
    in_time,
    no_cipher,
    outgoing,
    place_of,
)
from kvtier_daemon.tiers.cold.reclaimer import Reclaimer
from kvtier_daemon.tiers.cold.tier import ColdTier
from kvtier_daemon.tiers.cold.write_budget import WriteBudget

log = logging.getLogger(__name__)

WRITE_BYTES = 32 << 20  # made durable by one sync
WRITES_AT_ONCE = 2
# Of the warm tier: the coldest blocks, which are written even if the budget is low.
CLEAN_SHARE = 1 / 4
FULL_SHARE = 3 / 4  # of the disks: some segments are always empty, or are being reused
PAUSE_S = 0.05
SWEEP_S = 10.0  # after a search of all blocks, until the next one
LIMIT_SAVED = 1 << 20  # saved blocks that wait to be written; 4 bytes each
SAVES_S = 10.0  # half-life of older saves
SIZES_BLOCKS = 1024
UNFIT = (
    "they are larger than a segment (raise cold.segment), or a client removed pages of their memory"
)
COPY_S = 3.0  # longest time that writes wait for the copies of the reclaimer


class WaitingWriters:
    """The writers of one tenant that wait: without work (`idle`), or for a place (`pausing`)."""

    def __init__(self) -> None:
        self._idle: deque[asyncio.Future[None]] = deque()
        self._pausing: deque[asyncio.Future[None]] = deque()

    def wake(self) -> None:
        """Wake one writer, because there may be blocks. A busy one checks again after its write."""
        if waiting := self._idle or self._pausing:
            waiting.popleft().set_result(None)

    def wake_idle(self) -> None:
        if self._idle:
            self._idle.popleft().set_result(None)

    async def wait(self, timeout_s: float | None) -> None:
        """Wait until there may be blocks to write. No `await` may lie between the check and this call, so
        that no wake-up is missed."""
        waiting = self._idle if timeout_s is None else self._pausing
        woken = asyncio.get_running_loop().create_future()
        waiting.append(woken)
        try:
            await asyncio.wait([woken], timeout=timeout_s)
        finally:
            if not woken.done():
                waiting.remove(woken)


class Drain:
    """The drain of one tenant: writes the blocks that are only in memory when it begins, regardless of the
    daily budget, and then those that are saved."""

    def __init__(self, catalog: Catalog, waiting: WaitingWriters) -> None:
        self.is_on = self.is_done = self.is_last = False
        self._store = catalog.blocks.store
        self._demotions = catalog.demotions
        self._waiting = waiting
        self._at = 0  # where the sweep continues, or the order
        self._swept = False  # the sweep has checked all blocks from before the drain
        self._order = array("I")  # instead of the sweep, at a stop
        self._unsure: set[int] = set()  # blocks of the sweep that may not be on disk yet
        self._left = 0  # blocks that the drain has yet to write, at least
        self.unfit: set[int] = set()  # blocks that cannot be written

    def begin(self) -> None:
        if not self.is_on:
            self._reset(True)

    def begin_last(self, limit_bytes: int) -> None:
        """Write up to this many bytes that are only in memory, last victims first, and nothing else."""
        self._reset(True)
        self._swept = self.is_last = True
        self._order.frombytes(self._demotions.last_to_keep(limit_bytes))
        self._left = len(self._order)

    def end(self) -> None:
        if self.is_on:
            self._reset(False)

    def _reset(self, is_on: bool) -> None:
        self.is_on, self.is_done = is_on, False
        self._at, self._swept, self._unsure, self._order = 0, False, set(), array("I")
        self.unfit.clear()
        self._left = self._demotions.in_memory_alone
        self._waiting.wake()

    @property
    def left_blocks(self) -> int:
        """About how many blocks are yet to be written, without those saved since the drain began."""
        if not self.is_on or self.is_done:
            return 0
        return max(1, min(self._left, self._demotions.in_memory_alone))

    def wrote(self, blocks: int) -> None:
        self._left -= blocks

    def leave_out(self, ids: bytes) -> None:
        """End without these blocks, which cannot be written."""
        new = set(array("I", ids)) - self.unfit
        self.unfit |= new
        self.wrote(len(new))
        self._unsure -= new

    def plan(self) -> Demotion:
        """Return a portion of the blocks that were only in memory when the drain began. Each id is checked
        once; dirty ones are checked again until they are on disk or gone. So the drain ends, regardless of
        the saves meanwhile."""
        if not self._swept:
            plan, self._at, writing = self._demotions.sweep(self._at, WRITE_BLOCKS)
            self._swept = not self._at
            self._unsure.update(array("I", plan.ids), array("I", writing))
            if plan.ids or not self._swept:
                return plan
        while self._at < len(self._order):
            some = self._order[self._at : self._at + WRITE_BLOCKS]
            self._at += WRITE_BLOCKS
            self._unsure.update(some)
            plan = self._demotions.plan_write_through(some.tobytes())
            if plan.ids:
                return plan
        left = self._store.dirty(array("I", self._unsure).tobytes())
        if self.is_last and self._left <= 0:
            # As many as were ordered are on disk: of those, some lost their segment to others since.
            left = b""
        self._unsure = set(array("I", left))
        self.is_done = not left
        return self._demotions.plan_write_through(left, WRITE_BLOCKS)


class Flusher:
    """The `TierWrites` of one tenant. `extents` has the cold tier's numbers of its extents."""

    def __init__(
        self, tenant: str, catalog: Catalog, cold: ColdTier, extents: Sequence[int], quota_bytes: int,
        budget: WriteBudget, reclaimer: Reclaimer, counts: Counter[str], nbytes: Counter[str],
        choice: Choice, clock: Callable[[], float], cipher: CipherNow = no_cipher, *,
        through: bool, admission: str,
    ) -> None:  # fmt: skip
        self.counts = counts
        self.bytes = nbytes
        self.choice = choice
        self._cipher = cipher
        self._tenant = tenant
        self._catalog = catalog
        self._cold = cold
        self._extents = extents
        self._quota_bytes = quota_bytes
        self._budget = budget
        self._reclaimer = reclaimer
        self.reconfigure(through=through, admission=admission)
        catalog.blocks.why_unwritten = SLOW_DISK
        # For reads; then nothing is written ahead.
        self.is_disk_short: Callable[[], bool] = lambda: False
        self.waiting = WaitingWriters()
        self.drain = Drain(catalog, self.waiting)
        self._saved = bytearray()  # ids of blocks to write, in the order of their commits
        self._sweep_at = 0  # where the search for other blocks continues
        self._next_sweep_s = clock()
        self._in_flight_bytes = 0  # planned to be written, and not yet subtracted from the budget
        self._clock = clock
        self._tended_at = clock()
        self._saved_blocks = 0  # since then
        self._opened = 0  # segments
        self._saves = Average(SAVES_S)  # blocks for seconds
        self._sizes = Average(SIZES_BLOCKS)  # bytes for blocks

    def reconfigure(self, *, through: bool, admission: str) -> None:
        """Set write-through or write-back, and the admission."""
        self._through = through
        self._admission = admission
        if admission == "second-touch" or (admission == "auto" and self._budget.is_limited):
            self._catalog.blocks.admission.turn_on()

    def saved(self, ids: bytes) -> None:
        self._saved_blocks += len(ids) // ID_BYTES
        self._saved += ids
        # The oldest have probably been evicted; a sweep finds the others.
        del self._saved[: max(0, len(self._saved) - LIMIT_SAVED * ID_BYTES)]
        self.waiting.wake()

    def tend(self) -> None:
        """Measure the rate of saves, and wake a writer if there are dirty blocks: no event reports that a
        disk is on again, or that the budget grew."""
        now = self._clock()
        self._saves.note(self._saved_blocks, now - self._tended_at)
        self._tended_at, self._saved_blocks = now, 0
        at_once = min(WRITES_AT_ONCE, threads_here())
        self.choice.saved_bytes_s = self._saves.value * self._sizes.value / at_once
        left = self.gate()
        if self._cold.writer.is_on and left > 0 and self._catalog.demotions.in_memory_alone:
            self.waiting.wake_idle()

    def segment_opened(self) -> None:
        """There is a place again: wake a writer, and let those that are about to pause go on."""
        self._opened += 1
        self.waiting.wake()

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(WRITES_AT_ONCE):
                    tasks.create_task(self._write_on(), name=f"write {self._tenant} {number}")
        finally:
            self._catalog.blocks.why_unwritten = OFF  # until another one writes

    async def _write_on(self) -> None:
        while True:
            plan = self._plan()
            if plan is None:
                # During a drain, and while reads go first, nothing wakes a writer: it polls.
                writer = self._cold.writer
                polls = self.drain.is_on or (writer.is_on and not writer.may_write())
                await self.waiting.wait(PAUSE_S if polls else None)
                continue
            # There may be more blocks. Do not wake writers that pause: those that cannot write would wake
            # each other forever.
            self.waiting.wake_idle()
            opened = self._opened
            left, wrote = await self._write(plan)
            self._catalog.blocks.writes_go_on = wrote or bool(left)
            self._saved[:0] = left
            if (left or not wrote) and opened == self._opened:
                await self.waiting.wait(PAUSE_S)

    def _plan(self) -> Demotion | None:
        left = self.gate()
        if not self._cold.writer.is_on or (left <= 0 and not self.drain.is_on):
            return None
        if not self._cold.writer.may_write():
            return None
        catalog = self._catalog
        # Before newer saves; otherwise the drain would never end.
        if self.drain.is_on and not self.drain.is_done and (plan := self.drain.plan()).ids:
            return plan
        if self.drain.is_last:
            return None
        ahead_bytes = WRITE_BYTES if self.drain.is_on else left - self._kept_budget()
        if ahead_bytes > 0:
            blocks = catalog.demotions.blocks_of(int(min(ahead_bytes, WRITE_BYTES)))
            some = min(WRITE_BLOCKS, blocks) * ID_BYTES
            while self._saved:
                ids = bytes(self._saved[:some])
                del self._saved[:some]
                if (plan := catalog.demotions.plan_write_through(ids)).ids:
                    return plan
        if not self.drain.is_on:
            most = int(min(left - self._twice_budget(), WRITE_BYTES))
            if (plan := catalog.demotions.plan(most, self._clean_bytes(), WRITE_BLOCKS)).ids:
                return plan
        if ahead_bytes > 0 and (self.drain.is_done or not self.drain.is_on):
            return self._sweep()
        return None

    def _clean_bytes(self) -> int:
        """How many bytes of the coldest blocks are written even if the budget is low: no more than the disks
        hold beside other blocks, because they would be written in turn, without an end."""
        disk_bytes = self._cold.writer.capacity_bytes(self._tenant)
        return int(min(self._quota_bytes * CLEAN_SHARE, disk_bytes / 2))

    def _kept_budget(self) -> float:
        """The part of the budget that is kept for blocks that are close to eviction, or requested twice."""
        if self._through:
            return self._twice_budget()
        return math.inf if self.is_disk_short() else self._budget.plenty

    def _twice_budget(self) -> float:
        """The part of the budget that is kept for blocks that were requested twice."""
        keeps = self._admission == "auto" and not self._catalog.blocks.admission.strict
        return self._budget.scarce if keeps else 0.0

    def _sweep(self) -> Demotion | None:
        """Return blocks that are only in memory, although they left the queue of saved blocks: their write
        failed, or their frame is gone. None if memory is larger than the disks: each write would make other
        frames go."""
        now, demotions = self._clock(), self._catalog.demotions
        disk_bytes = self._cold.writer.capacity_bytes(self._tenant)
        if self._quota_bytes > FULL_SHARE * disk_bytes:
            return None
        waits = self._catalog.blocks.admission.strict or now < self._next_sweep_s
        if waits or demotions.in_memory_alone <= demotions.writing:
            return None
        plan, self._sweep_at, _ = demotions.sweep(self._sweep_at, WRITE_BLOCKS)
        if not self._sweep_at and not self.drain.is_on:
            self._next_sweep_s = now + SWEEP_S
        return plan if plan.ids else None

    def gate(self) -> float:
        """Set the reason that an eviction without a frame gets, and the admission; return how many bytes may
        be written."""
        left = self._budget.left() - self._in_flight_bytes
        blocks = self._catalog.blocks
        scarce = self._budget.is_limited and left <= self._budget.scarce
        shut = not self.drain.is_on and (
            self._admission == "second-touch" or (self._admission == "auto" and scarce)
        )
        blocks.admission.strict = shut
        blocks.spares_unwritten = not self.is_disk_short()
        if not self._cold.writer.is_on:
            blocks.why_unwritten = OFF
        elif left <= 0:
            blocks.why_unwritten = BUDGET
        else:
            blocks.why_unwritten = ONCE if shut else SLOW_DISK
        return left

    async def _write(self, plan: Demotion) -> tuple[bytes, bool]:
        """Write these blocks, as far as there is a place for them. Return the ids of those without a place,
        and whether anything was written.

        A submitted block is held until its write has ended, even if this task is cancelled: otherwise another
        block in its slot would be written under its name. A piece is encoded while the one before it is
        written, but only after a place for it was found.
        """
        catalog = self._catalog
        blocks = self._outgoing(plan)
        nbytes = sum(block.block_bytes for block in blocks)
        self._sizes.note(nbytes, len(blocks))
        self._in_flight_bytes += nbytes
        unfit = [block for block in blocks if not self._cold.writer.fits(block)]
        if unfit:
            log.debug("cold: %d blocks are not written: %s", len(unfit), UNFIT)
            catalog.demotions.not_demoted(ids_of(unfit))
            self.drain.leave_out(ids_of(unfit))
            blocks = [block for block in blocks if block not in unfit]
        cipher = self._cipher()
        if cipher is not None and not cipher.encrypts:
            cipher = None
        rest = deque(self._cold.coding.pieces(blocks, self.choice, cipher is not None))
        piece: list[Outgoing] = []
        wrote, before = False, None
        try:
            while rest and not piece:
                piece = rest.popleft()
                known = await describe(self._cold.writer, self._tenant, piece)
                if not known or not await self._has_place_soon():
                    break
                links = self._cold.reader.bandwidths()
                ready = await self._cold.coding.encode(piece, self.choice, links, cipher)
                unencrypted = {block.id for block in piece} - {block.id for block in ready}
                catalog.demotions.not_demoted(array("I", unencrypted).tobytes())
                piece = ready
                while piece and await describe(self._cold.writer, self._tenant, piece):
                    settled = await self._begin_soon(piece)
                    if settled is None:
                        break
                    wrote = True
                    if before is not None and not await in_time(before):
                        return ids_of([*piece, *chain.from_iterable(rest)]), wrote
                    before = settled
            if before is not None:
                await in_time(before)
        finally:
            self._in_flight_bytes -= nbytes
            left = [*piece, *chain.from_iterable(rest)]
            for block in left:
                block.release()
            catalog.demotions.not_demoted(ids_of(left))
        return ids_of(left), wrote

    def _outgoing(self, plan: Demotion) -> list[Outgoing]:
        ids, catalog = array("I", plan.ids), self._catalog
        spaces = {block.space.identity: block.space for block in plan.blocks}
        wants = any(self.choice.has_loss(one.identity, one.spec) for one in spaces.values())
        depths = array(
            "I", catalog.blocks.store.depths(plan.ids) if wants else bytes(len(plan.ids))
        )
        return [
            outgoing(
                number, block, place_of(self._extents, block.slot), block.lossy,
                depth * block.space.spec.block_tokens,
            )
            for number, depth, block in zip(ids, depths, plan.blocks, strict=True)
        ]  # fmt: skip

    def _leave_out_forgotten(self, blocks: list[Outgoing]) -> None:
        """Remove blocks that were forgotten meanwhile: a forget waits only for writes that were submitted."""
        wanted = set(array("I", self._catalog.blocks.store.dirty(ids_of(blocks))))
        gone = [block for block in blocks if block.id not in wanted]
        if gone:
            for block in gone:
                block.release()
            self._catalog.demotions.not_demoted(ids_of(gone))
            blocks[:] = [block for block in blocks if block.id in wanted]

    def _settle(self, landed: FramedBlocks, failed: list[int]) -> None:
        """Note which blocks are on disk, and which could not be written."""
        count, nbytes = len(landed.ids) // ID_BYTES, landed.nbytes
        self._budget.spend(nbytes)
        self.drain.wrote(count)
        self.counts["written"] += count
        self.bytes["written"] += nbytes
        if count:
            self._catalog.blocks.writes_go_on = True  # before the writer plans its next blocks
        self._catalog.demotions.demoted(landed.ids, landed.frames, landed.digests)
        self._catalog.demotions.not_demoted(array("I", failed).tobytes())

    async def _begin_soon(self, blocks: list[Outgoing]) -> asyncio.Future[bool] | None:
        """Submit these blocks, after the copies of the reclaimer, and remove what was submitted from the
        list. Waits a short time for the next segment."""
        for tries in range(BEGIN_TRIES):
            await self._pause(tries)
            self._leave_out_forgotten(blocks)
            count, settled = (
                begin(self._cold.writer, self._tenant, blocks, self._settle)
                if blocks
                else (0, None)
            )
            del blocks[:count]
            if count or not blocks:
                return settled
        return None

    async def _has_place_soon(self) -> bool:
        """Whether there is a place within the time that the next segment takes to begin."""
        for tries in range(BEGIN_TRIES):
            await self._pause(tries)
            if self._cold.writer.has_place(self._tenant):
                return True
        return False

    async def _pause(self, tries: int) -> None:
        """Wait until a write may be tried: not at once again, and after the copies of the reclaimer."""
        if tries:
            await asyncio.sleep(BEGIN_S)
        if self._reclaimer.idle.is_set():
            return
        try:
            async with asyncio.timeout(COPY_S):
                await self._reclaimer.idle.wait()
        except TimeoutError:
            self._reclaimer.idle.set()  # a disk that hangs does not delay the others
