"""Writes blocks to the disks: the coldest blocks of the warm tier, so that they can be evicted at once; or
all saved blocks (write-through)."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import chain

from kvtier_daemon.catalog import Catalog
from kvtier_daemon.catalog.blocks import ID_BYTES
from kvtier_daemon.catalog.demotion import Demotion
from kvtier_daemon.catalog.miss_log import BUDGET, OFF, ONCE, SLOW_DISK
from kvtier_daemon.codec.choice import Average, Choice
from kvtier_daemon.tiers.cold.encoder import threads_here
from kvtier_daemon.tiers.cold.frames import (
    BEGIN_S,
    BEGIN_TRIES,
    WRITE_BLOCKS,
    begin,
    describe,
    frame_bytes,
    frame_of,
    ids_of,
    in_time,
    outgoing,
    place_of,
)
from kvtier_daemon.tiers.cold.reclaimer import Reclaimer
from kvtier_daemon.tiers.cold.tier import ColdTier
from kvtier_daemon.tiers.cold.transfers import Landed, Outgoing
from kvtier_daemon.tiers.cold.write_budget import WriteBudget

log = logging.getLogger(__name__)

WRITE_BYTES = 32 << 20  # made durable by one sync
WRITES_AT_ONCE = 2
CLEAN_SHARE = 1 / 4  # of the warm tier: the coldest blocks that are kept clean
PAUSE_S = 0.05
LIMIT_SAVED = 4096  # commits that wait to be written through
SAVES_S = 10.0  # half-life of older saves
SIZES_BLOCKS = 1024
COPY_S = 3.0  # longest time that writes wait for the copies of the reclaimer


class Flusher:
    """Writes one tenant's blocks. `extents` are the cold tier's numbers of its extents."""

    def __init__(
        self,
        tenant: str,
        catalog: Catalog,
        cold: ColdTier,
        extents: Sequence[int],
        quota_bytes: int,
        budget: WriteBudget,
        leaving: Reclaimer,
        counts: Counter[str],
        nbytes: Counter[str],
        choice: Choice,
        clock: Callable[[], float],
        *,
        through: bool,
        admission: str,
    ) -> None:
        self.counts = counts
        self.bytes = nbytes
        self.choice = choice
        self._tenant = tenant
        self._catalog = catalog
        self._cold = cold
        self._extents = extents
        self._clean_bytes = int(quota_bytes * CLEAN_SHARE)
        self._budget = budget
        self._reclaimer = leaving
        self.reconfigure(through=through, admission=admission)
        catalog.blocks.why_unwritten = SLOW_DISK
        self._saved: deque[bytes] = deque()  # write-through: blocks that were committed
        self._drains = False  # a drain is in progress
        self._sweep = 0  # where the sweep continues
        self._swept = False  # the sweep has checked all blocks from before the drain
        self._unsure: set[int] = set()  # blocks of the sweep that may not be on disk yet
        self._drain_blocks = 0  # blocks that the drain has yet to write, at least
        self.is_drained = False
        # One future per waiting writer: those without work, and those that could not write.
        self._resting: deque[asyncio.Future[None]] = deque()
        self._pausing: deque[asyncio.Future[None]] = deque()
        self._clock = clock
        self._tended_at = clock()
        self._saved_blocks = 0  # since then
        self._saves = Average(SAVES_S)  # blocks for seconds
        self._sizes = Average(SIZES_BLOCKS)  # bytes for blocks

    def reconfigure(self, *, through: bool, admission: str) -> None:
        """Set write-through or write-back, and the admission."""
        self._through = through
        self._admission = admission
        if admission == "second-touch" or (admission == "auto" and self._budget.is_limited):
            self._catalog.blocks.admission.turn_on()

    def drain(self, wanted: bool) -> None:
        """Start to write all blocks that are only in memory, and all that are saved from now on, regardless
        of the daily budget; or stop that."""
        if wanted != self._drains:
            self._drains, self._sweep, self._swept = wanted, 0, False
            self._unsure, self.is_drained = set(), False
            self._drain_blocks = self._catalog.demotions.in_memory_alone
            self.wake()

    @property
    def drains(self) -> bool:
        return self._drains

    @property
    def left_to_drain(self) -> int:
        """About how many blocks the drain has yet to write, without those that were saved since it
        started."""
        if not self._drains or self.is_drained:
            return 0
        return max(1, min(self._drain_blocks, self._catalog.demotions.in_memory_alone))

    def _drain_on(self) -> Demotion:
        """Return a portion of the blocks that were only in memory when the drain started. Each id is checked
        once; dirty ones are checked again until they are on disk or gone. So the drain ends, regardless of
        the saves meanwhile."""
        catalog = self._catalog
        if not self._swept:
            plan, self._sweep, writing = catalog.demotions.sweep(self._sweep, WRITE_BLOCKS)
            self._swept = not self._sweep
            self._unsure.update(array("I", plan.ids), array("I", writing))
            if plan.ids or not self._swept:
                return plan
        left = catalog.demotions.dirty(array("I", self._unsure).tobytes())
        self._unsure = set(array("I", left))
        self.is_drained = not left
        return catalog.demotions.plan_write_through(left, WRITE_BLOCKS)

    def _sweep_on(self) -> Demotion | None:
        """Return a portion of the blocks that were saved since the drain started and did not fit into the
        queue of commits."""
        plan, self._sweep, _ = self._catalog.demotions.sweep(self._sweep, WRITE_BLOCKS)
        return plan if plan.ids else None

    def wake(self) -> None:
        """Wake one waiting writer, because there may be blocks to write. A writer that is busy checks again
        after its write."""
        _wake_one(self._resting or self._pausing)

    def saved(self, ids: bytes) -> None:
        """Note that these blocks were committed."""
        self._saved_blocks += len(ids) // ID_BYTES
        if (
            (self._through or self._drains)
            and self._cold.writer.is_on
            and len(self._saved) < LIMIT_SAVED
        ):
            # Blocks beyond the limit are written when they are close to eviction.
            self._saved.append(ids)
        self.wake()

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
            _wake_one(self._resting)

    async def run(self) -> None:
        """Write until the task is cancelled."""
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
                await self._wait(None if self._rests else PAUSE_S)
                continue
            # There may be more blocks. Do not wake writers that pause: those that cannot write would wake
            # each other forever.
            _wake_one(self._resting)
            left, wrote = await self._write(plan)
            if left and self._through and len(self._saved) < LIMIT_SAVED:
                self._saved.append(left)
            if left or not wrote:
                await self._wait(PAUSE_S)

    @property
    def _rests(self) -> bool:
        """Whether a writer without work sleeps until it is woken. During a drain, and while reads go first,
        it polls."""
        return not self._drains and self._cold.writer.may_write()

    async def _wait(self, timeout_s: float | None) -> None:
        """Wait until there may be blocks to write. No `await` lies between the check and this call, so no
        wake-up is missed."""
        waiting = self._resting if timeout_s is None else self._pausing
        woken = asyncio.get_running_loop().create_future()
        waiting.append(woken)
        try:
            await asyncio.wait([woken], timeout=timeout_s)
        finally:
            if not woken.done():
                waiting.remove(woken)

    def _plan(self) -> Demotion | None:
        """Return the blocks to write next, or None."""
        left = self.gate()
        if not self._cold.writer.is_on or (left <= 0 and not self._drains):
            return None
        if not self._cold.writer.may_write():
            return None
        catalog = self._catalog
        # Before newer saves; otherwise the drain would never end.
        if self._drains and not self.is_drained and (plan := self._drain_on()).ids:
            return plan
        while self._saved:
            ids, some = self._saved.popleft(), WRITE_BLOCKS * ID_BYTES
            if len(ids) > some:
                self._saved.appendleft(ids[some:])
            plan = catalog.demotions.plan_write_through(ids[:some])
            if plan.ids:
                return plan
        if self._drains:
            return self._sweep_on() if self.is_drained else None
        plan = catalog.demotions.plan(int(min(left, WRITE_BYTES)), self._clean_bytes, WRITE_BLOCKS)
        return plan if plan.ids else None

    def gate(self) -> float:
        """Set the reason that an eviction without a frame gets, and the admission; return how many bytes may
        be written."""
        left = self._budget.left()
        blocks = self._catalog.blocks
        shut = not self._drains and (
            self._admission == "second-touch"
            or (
                self._admission == "auto" and self._budget.is_limited and left < self._budget.scarce
            )
        )
        blocks.admission.strict = shut
        if not self._cold.writer.is_on:
            blocks.why_unwritten = OFF
        elif left <= 0:
            blocks.why_unwritten = BUDGET
        else:
            blocks.why_unwritten = ONCE if shut else SLOW_DISK
        return left

    async def _write(self, plan: Demotion) -> tuple[bytes, bool]:
        """Write these, as far as there is a place for them; the ids of those for which there was none, and
        whether anything was written at all.

        A block that was handed to the disk is held until the disk has ended with it, whatever becomes of this
        task: another block in its slot would be written under its name. Some are encoded while those before
        them are written, but none before there is a place.
        """
        catalog = self._catalog
        blocks = self._outgoing(plan)
        self._sizes.note(
            sum(block.spec.group_block_bytes(block.group) for block in blocks), len(blocks)
        )
        unfit = [block for block in blocks if not self._cold.writer.fits(block)]
        if unfit:
            log.debug(
                "cold: %d blocks are larger than a segment and are not written; raise cold.segment",
                len(unfit),
            )
            catalog.demotions.not_demoted(ids_of(unfit))
            blocks = [block for block in blocks if block not in unfit]
        rest = deque(self._cold.coding.pieces(blocks, self.choice))
        piece: list[Outgoing] = []
        wrote, before = False, None
        try:
            while rest and not piece:
                piece = rest.popleft()
                known = await describe(self._cold, self._tenant, piece)
                if not known or not await self._has_place_soon():
                    break
                piece = await self._encode(piece)
                while piece and await describe(self._cold, self._tenant, piece):
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
            left = [*piece, *chain.from_iterable(rest)]
            for block in left:
                block.release()
            catalog.demotions.not_demoted(ids_of(left))
        return ids_of(left), wrote

    def _outgoing(self, plan: Demotion) -> list[Outgoing]:
        ids, catalog = array("I", plan.ids), self._catalog
        lossy = frozenset(array("I", catalog.segments.lossy(plan.ids)))
        spaces = {block.space.identity: block.space for block in plan.blocks}
        wants = any(self.choice.has_loss(one.identity, one.spec) for one in spaces.values())
        depths = (
            array("I", catalog.segments.depths(plan.ids))
            if wants
            else array("I", bytes(len(plan.ids)))
        )
        return [
            outgoing(
                number, block, place_of(self._extents, block.slot), number in lossy,
                depth * block.space.spec.block_tokens,
            )
            for number, depth, block in zip(ids, depths, plan.blocks, strict=True)
        ]  # fmt: skip

    async def _encode(self, piece: list[Outgoing]) -> list[Outgoing]:
        return await self._cold.coding.encode(piece, self.choice, self._cold.reader.bandwidths())

    def _leave_out_forgotten(self, blocks: list[Outgoing]) -> None:
        """Remove blocks that were forgotten meanwhile: a forget waits only for writes that were submitted."""
        wanted = set(array("I", self._catalog.demotions.dirty(ids_of(blocks))))
        gone = [block for block in blocks if block.id not in wanted]
        if gone:
            for block in gone:
                block.release()
            self._catalog.demotions.not_demoted(ids_of(gone))
            blocks[:] = [block for block in blocks if block.id in wanted]

    def _settle(self, landed: list[Landed], failed: list[int]) -> None:
        self._landed(landed)
        self._catalog.demotions.not_demoted(array("I", failed).tobytes())

    def _landed(self, landed: list[Landed]) -> None:
        nbytes = sum(map(frame_bytes, landed))
        self._budget.spend(nbytes)
        self._reclaimer.wrote(nbytes)
        self._drain_blocks -= len(landed)
        self.counts["written"] += len(landed)
        self.bytes["written"] += nbytes
        numbers = array("I", (one.id for one in landed)).tobytes()
        frames = b"".join(map(frame_of, landed))
        self._catalog.demotions.demoted(numbers, frames, b"".join(one.digest for one in landed))

    async def _begin_soon(self, blocks: list[Outgoing]) -> asyncio.Future[bool] | None:
        """Submit these blocks, after the copies of the reclaimer, and remove what was submitted from the
        list. Waits a short time for the next segment."""
        for tries in range(BEGIN_TRIES):
            if tries:
                await asyncio.sleep(BEGIN_S)
            await self._copies_ended()
            self._leave_out_forgotten(blocks)
            count, settled = (
                begin(self._cold, self._tenant, blocks, self._settle) if blocks else (0, None)
            )
            del blocks[:count]
            if count or not blocks:
                return settled
        return None

    async def _has_place_soon(self) -> bool:
        """Whether there is a place within the time that the next segment takes to begin."""
        for tries in range(BEGIN_TRIES):
            if tries:
                await asyncio.sleep(BEGIN_S)
            await self._copies_ended()
            if self._cold.writer.has_place(self._tenant):
                return True
        return False

    async def _copies_ended(self) -> None:
        try:
            async with asyncio.timeout(COPY_S):
                await self._reclaimer.over.wait()
        except TimeoutError:
            self._reclaimer.over.set()  # a disk that hangs does not delay the others


def _wake_one(waiting: deque[asyncio.Future[None]]) -> None:
    if waiting:
        waiting.popleft().set_result(None)
