"""Writing to the disks: the coldest blocks of the warm tier are kept clean, so that room can be made at once;
or, write-through, what was saved is written."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import chain

from kvtier.catalog import Catalog
from kvtier.catalog.blocks import ID_BYTES
from kvtier.catalog.cold import Demotion
from kvtier.catalog.departures import BUDGET, OFF, ONCE, SLOW_DISK
from kvtier.codec.choice import Average, Choice
from kvtier_daemon.moving.blocks import (
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
from kvtier_daemon.moving.budget import Budget
from kvtier_daemon.moving.leaving import Leaving
from kvtier_daemon.tiers.batch import Landed, Outgoing
from kvtier_daemon.tiers.coding import threads_here
from kvtier_daemon.tiers.cold import ColdTier

log = logging.getLogger(__name__)

WRITE_BYTES = 32 << 20  # made durable by one sync
WRITES_AT_ONCE = 2
CLEAN_SHARE = 1 / 4  # of the warm tier: the coldest blocks that are kept clean
PAUSE_S = 0.05
LIMIT_SAVED = 4096  # commits that wait to be written through
SAVES_S = 10.0  # what was saved before counts for half
SIZES_BLOCKS = 1024
BRING_AWAY_S = 3.0  # that writes wait for what goes before them


class Writing:
    """One tenant's. `extents` are its extents' numbers with the cold tier."""

    def __init__(
        self,
        tenant: str,
        catalog: Catalog,
        cold: ColdTier,
        extents: Sequence[int],
        quota_bytes: int,
        budget: Budget,
        leaving: Leaving,
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
        self._leaving = leaving
        self.go_by(through=through, admission=admission)
        catalog.blocks.keeps_back = SLOW_DISK
        self._saved: deque[bytes] = deque()  # write-through: blocks that were committed
        self._drains = False  # all is to be written, soon
        self._sweep = 0  # where that goes on
        self._swept = False  # all that there was when a drain was asked for has been looked at
        self._unsure: set[int] = set()  # blocks of that which may not be on disk yet
        self._drain_blocks = 0  # of that, at least this many to go
        self.is_drained = False
        # A writer each: who found nothing to write, and who could not write what there was.
        self._resting: deque[asyncio.Future[None]] = deque()
        self._pausing: deque[asyncio.Future[None]] = deque()
        self._clock = clock
        self._tended_at = clock()
        self._saved_blocks = 0  # since then
        self._saves = Average(SAVES_S)  # blocks for seconds
        self._sizes = Average(SIZES_BLOCKS)  # bytes for blocks

    def go_by(self, *, through: bool, admission: str) -> None:
        """Write what is saved at once, or not, and what is worth it by this."""
        self._through = through
        self._admission = admission
        if admission == "second-touch" or (admission == "auto" and self._budget.is_limited):
            self._catalog.blocks.admission.turn_on()

    def drain(self, wanted: bool) -> None:
        """Write all that is in memory alone, and what is saved meanwhile at once, whatever the day's budget
        says; or do so no more."""
        if wanted != self._drains:
            self._drains, self._sweep, self._swept = wanted, 0, False
            self._unsure, self.is_drained = set(), False
            self._drain_blocks = self._catalog.cold.in_memory_alone
            self.wake()

    @property
    def drains(self) -> bool:
        return self._drains

    @property
    def left_to_drain(self) -> int:
        """How many blocks have to be written until a drain is over, about; of those saved since, none."""
        if not self._drains or self.is_drained:
            return 0
        return max(1, min(self._drain_blocks, self._catalog.cold.in_memory_alone))

    def _drain_on(self) -> Demotion:
        """Some of what was in memory alone when the drain was asked for. All ids are looked at once; those
        that were found dirty then are looked at again until they are on disk or gone. So this ends, however
        much is saved meanwhile."""
        cold = self._catalog.cold
        if not self._swept:
            plan, self._sweep, writing = cold.sweep(self._sweep, WRITE_BLOCKS)
            self._swept = not self._sweep
            self._unsure.update(array("I", plan.ids), array("I", writing))
            if plan.ids or not self._swept:
                return plan
        left = cold.dirty(array("I", self._unsure).tobytes())
        self._unsure = set(array("I", left))
        self.is_drained = not left
        return cold.plan_write_through(left, WRITE_BLOCKS)

    def _sweep_on(self) -> Demotion | None:
        """Some of what was saved since the drain, and for which there was no place among the commits that
        wait."""
        plan, self._sweep, _ = self._catalog.cold.sweep(self._sweep, WRITE_BLOCKS)
        return plan if plan.ids else None

    def wake(self) -> None:
        """There may be something to write: one of those who wait looks. Who is writing looks after that."""
        _wake_one(self._resting or self._pausing)

    def saved(self, ids: bytes) -> None:
        """These blocks were committed."""
        self._saved_blocks += len(ids) // ID_BYTES
        if (self._through or self._drains) and self._cold.takes and len(self._saved) < LIMIT_SAVED:
            # Those beyond the limit are written when they come near to being evicted.
            self._saved.append(ids)
        self.wake()

    def tend(self) -> None:
        """Take note of how much is saved, and of what may be written. Nobody tells when others become the
        coldest, a disk comes back or a budget grows: while there is something to write, one looks for it now.
        """
        now = self._clock()
        self._saves.note(self._saved_blocks, now - self._tended_at)
        self._tended_at, self._saved_blocks = now, 0
        at_once = min(WRITES_AT_ONCE, threads_here())
        self.choice.saved_bytes_s = self._saves.value * self._sizes.value / at_once
        left = self.gate()
        if self._cold.takes and left > 0 and self._catalog.cold.in_memory_alone:
            _wake_one(self._resting)

    async def run(self) -> None:
        """Write what is to be written, until the tier is closed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(WRITES_AT_ONCE):
                    tasks.create_task(self._write_on(), name=f"write {self._tenant} {number}")
        finally:
            self._catalog.blocks.keeps_back = OFF  # until another one writes

    async def _write_on(self) -> None:
        while True:
            plan = self._plan()
            if plan is None:
                await self._wait(None if self._rests else PAUSE_S)
                continue
            # There may be more. Who pauses sleeps on: those who can't write would wake each other for ever.
            _wake_one(self._resting)
            left, wrote = await self._write(plan)
            if left and self._through and len(self._saved) < LIMIT_SAVED:
                self._saved.append(left)
            if left or not wrote:
                await self._wait(PAUSE_S)

    @property
    def _rests(self) -> bool:
        """Whether who has found nothing to write is woken when there is something. A drain goes on by itself,
        and reads that go first end and begin so often that a tenth of a second is long."""
        return not self._drains and self._cold.may_write(self._tenant)

    async def _wait(self, timeout_s: float | None) -> None:
        """Until there may be something to write. Between looking and this nothing is awaited, so what comes
        after the look finds who waits."""
        waiting = self._resting if timeout_s is None else self._pausing
        woken = asyncio.get_running_loop().create_future()
        waiting.append(woken)
        try:
            await asyncio.wait([woken], timeout=timeout_s)
        finally:
            if not woken.done():
                waiting.remove(woken)

    def _plan(self) -> Demotion | None:
        """What to write next, or None."""
        left = self.gate()
        if not self._cold.takes or (left <= 0 and not self._drains):
            return None
        if not self._cold.may_write(self._tenant):
            return None
        cold = self._catalog.cold
        # Before what is saved meanwhile, or it would never be over.
        if self._drains and not self.is_drained and (plan := self._drain_on()).ids:
            return plan
        while self._saved:
            ids, some = self._saved.popleft(), WRITE_BLOCKS * ID_BYTES
            if len(ids) > some:
                self._saved.appendleft(ids[some:])
            plan = cold.plan_write_through(ids[:some])
            if plan.ids:
                return plan
        if self._drains:
            return self._sweep_on() if self.is_drained else None
        plan = cold.plan_demotion(int(min(left, WRITE_BYTES)), self._clean_bytes, WRITE_BLOCKS)
        return plan if plan.ids else None

    def gate(self) -> float:
        """Say why what is evicted now without a frame has none, and whether everything may be written; how
        many bytes may be."""
        left = self._budget.left()
        blocks = self._catalog.blocks
        shut = not self._drains and (
            self._admission == "second-touch"
            or (
                self._admission == "auto" and self._budget.is_limited and left < self._budget.scarce
            )
        )
        blocks.admission.shut = shut
        if not self._cold.takes:
            blocks.keeps_back = OFF
        elif left <= 0:
            blocks.keeps_back = BUDGET
        else:
            blocks.keeps_back = ONCE if shut else SLOW_DISK
        return left

    async def _write(self, plan: Demotion) -> tuple[bytes, bool]:
        """Write these, as far as there is a place for them; the ids of those for which there was none, and
        whether anything was written at all.

        A block that was handed to the disk is held until the disk has ended with it, whatever becomes of this
        task: another block in its slot would be written under its name. Some are encoded while those before
        them are written, but none before there is a place.
        """
        cold = self._catalog.cold
        blocks = self._outgoing(plan)
        self._sizes.note(
            sum(block.spec.group_block_bytes(block.group) for block in blocks), len(blocks)
        )
        unfit = [block for block in blocks if not self._cold.fits(self._tenant, block)]
        if unfit:
            log.debug("cold: %d blocks are too large for a segment", len(unfit))
            cold.not_demoted(ids_of(unfit))
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
                block.let_go()
            cold.not_demoted(ids_of(left))
        return ids_of(left), wrote

    def _outgoing(self, plan: Demotion) -> list[Outgoing]:
        ids, cold = array("I", plan.ids), self._catalog.cold
        lossy = frozenset(array("I", cold.lossy(plan.ids)))
        spaces = {block.space.identity: block.space for block in plan.blocks}
        wants = any(self.choice.has_loss(one.identity, one.spec) for one in spaces.values())
        depths = array("I", cold.depths(plan.ids)) if wants else array("I", bytes(len(plan.ids)))
        return [
            outgoing(
                number, block, place_of(self._extents, block.slot), number in lossy,
                depth * block.space.spec.block_tokens,
            )
            for number, depth, block in zip(ids, depths, plan.blocks, strict=True)
        ]  # fmt: skip

    async def _encode(self, piece: list[Outgoing]) -> list[Outgoing]:
        return await self._cold.coding.encode(
            piece, self.choice, self._cold.bandwidths(self._tenant)
        )

    def _leave_out_forgotten(self, blocks: list[Outgoing]) -> None:
        """What is forgotten by now is not written: a forget waits only for what is with the disk."""
        wanted = set(array("I", self._catalog.cold.dirty(ids_of(blocks))))
        gone = [block for block in blocks if block.id not in wanted]
        if gone:
            for block in gone:
                block.let_go()
            self._catalog.cold.not_demoted(ids_of(gone))
            blocks[:] = [block for block in blocks if block.id in wanted]

    def _settle(self, landed: list[Landed], failed: list[int]) -> None:
        self._landed(landed)
        self._catalog.cold.not_demoted(array("I", failed).tobytes())

    def _landed(self, landed: list[Landed]) -> None:
        nbytes = sum(map(frame_bytes, landed))
        self._budget.spend(nbytes)
        self._leaving.wrote(nbytes)
        self._drain_blocks -= len(landed)
        self.counts["written"] += len(landed)
        self.bytes["written"] += nbytes
        numbers = array("I", (one.id for one in landed)).tobytes()
        frames = b"".join(map(frame_of, landed))
        self._catalog.cold.demoted(numbers, frames, b"".join(one.digest for one in landed))

    async def _begin_soon(self, blocks: list[Outgoing]) -> asyncio.Future[bool] | None:
        """The same for what leaves memory, in a while if the next segment is just being begun; takes what was
        begun off the list. What is brought away goes first: it would find no place any more, and until it has
        one there is no next segment."""
        for tries in range(BEGIN_TRIES):
            if tries:
                await asyncio.sleep(BEGIN_S)
            await self._brought_away()
            self._leave_out_forgotten(blocks)
            count, settled = (
                begin(self._cold, self._tenant, blocks, self._settle) if blocks else (0, None)
            )
            del blocks[:count]
            if count or not blocks:
                return settled
        return None

    async def _has_place_soon(self) -> bool:
        """Whether there is a place for anything, in the time that the next segment takes to be begun."""
        for tries in range(BEGIN_TRIES):
            if tries:
                await asyncio.sleep(BEGIN_S)
            await self._brought_away()
            if self._cold.has_place(self._tenant):
                return True
        return False

    async def _brought_away(self) -> None:
        try:
            async with asyncio.timeout(BRING_AWAY_S):
                await self._leaving.over.wait()
        except TimeoutError:
            self._leaving.over.set()  # a disk that hangs holds up no other


def _wake_one(waiting: deque[asyncio.Future[None]]) -> None:
    if waiting:
        waiting.popleft().set_result(None)
