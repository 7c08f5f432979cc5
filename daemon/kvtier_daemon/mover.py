"""Moves one tenant's blocks between memory and disk: what, when, and what becomes of it. The catalog decides
which blocks; the cold tier has the files; nothing here waits for a disk but these tasks themselves.

Reads are asked for by a match, go in the planner's order, and are before everything else. Writes keep the
coldest blocks of the warm tier clean, so that room can be made at once; or, write-through, follow each save.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import struct
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from kvtier.catalog import Catalog, Space
from kvtier.catalog.blocks import ID_BYTES
from kvtier.catalog.cold import Demotion, Promotion, Rescue, Survey
from kvtier.catalog.cold import Outgoing as Described
from kvtier.catalog.departures import BUDGET, LATE, OFF, ONCE
from kvtier.codec.frame import PAGE, RAW, pages
from kvtier.key import KEY_BYTES
from kvtier.planning import PATIENCE_S, WHY, Verdict
from kvtier.planning.beaten import Beaten, may_bring
from kvtier.wire import DIGEST_BYTES
from kvtier_daemon.tiers.cold import ColdTier, Incoming
from kvtier_daemon.tiers.drive import HANGS_S
from kvtier_daemon.tiers.log import NOT_FREE_YET, Segment
from kvtier_daemon.tiers.reads import Name, Request
from kvtier_daemon.tiers.shelf import Landed, Outgoing, Shelf, Wrote

log = logging.getLogger(__name__)

SLOT = struct.Struct("<IIQQ")  # extent, zero, offset, generation
FRAME = struct.Struct("<IIIBBBB")  # segment, page, payload bytes, codec, header pages, flags, zero
PLACE_BYTES = 8  # the first two

WRITE_BYTES = 32 << 20  # made durable by one sync
WRITE_BLOCKS = 128  # planned in one go: each costs the loop some 20 us
WRITES_AT_ONCE = 2
READING_BLOCKS = 8192  # asked for and not there yet; one request may have half of what is left
READING_BYTES = 1 << 30
LEAST_BLOCKS = 64  # or so many
CLEAN_SHARE = 1 / 4  # of the warm tier: the coldest blocks that are kept clean
PAUSE_S = 0.05
SECOND_CHANCE = 0.25  # of what is written may be written a second time
SECOND_CHANCE_MOST = 4 << 30
KEEP_MOST = 1 << 20
COPY_BYTES = 8 << 20  # of a segment that leaves, at a time
SETTLE_S = HANGS_S + 1
FORGET_S = 3.0
EARLY_BYTES = 64 << 20
LIMIT_SAVED = 4096  # commits that wait to be written through
BEGIN_S, BEGIN_TRIES = 0.001, 50  # until the next segment is begun
BRING_AWAY_S = 3.0  # that writes wait for what goes before them
DAMAGED = (errno.EBADMSG, errno.ENODATA)
SCARCE = 1 / 2  # of an hour's budget
DAY_S = 86_400.0
HOUR_S = 3600.0


class Budget:
    """Bytes that may be written, by the day; nothing is saved up for longer than an hour."""

    def __init__(self, daily_bytes: int, clock: Callable[[], float]) -> None:
        self._rate = daily_bytes / DAY_S
        self._most = daily_bytes / 24
        self._clock = clock
        self._left = self._most
        self._at = clock()
        self._hours: deque[tuple[int, int]] = deque()  # number of the hour, bytes

    @property
    def is_limited(self) -> bool:
        return self._rate > 0

    @property
    def scarce(self) -> float:
        """With fewer bytes left than this, not everything should be written."""
        return self._most * SCARCE

    def left(self) -> float:
        """How many bytes may be written now."""
        if not self._rate:
            return float("inf")
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        return self._left

    def spend(self, nbytes: int) -> None:
        if self._rate:
            self._left -= nbytes
        hour, spent = int(self._clock() // HOUR_S), 0
        if self._hours and self._hours[-1][0] == hour:
            _, spent = self._hours.pop()
        self._hours.append((hour, spent + nbytes))

    def day_bytes(self) -> int:
        """How many bytes were written in this hour and the 23 before it."""
        while self._hours and self._hours[0][0] <= self._clock() // HOUR_S - 24:
            self._hours.popleft()
        return sum(nbytes for _, nbytes in self._hours)


class Mover:
    """One tenant's. `extents` is filled by whoever adds extents to the tenant: their numbers with the cold
    tier, in the tenant's order."""

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.extents: list[int] = []
        self.counts: Counter[str] = Counter(written=0, read=0, written_again=0, spoilt=0, late=0)
        self.bytes: Counter[str] = Counter(written=0, read=0, written_again=0)
        self.verdicts: Counter[str] = Counter(
            dict.fromkeys(WHY, 0)
        )  # on requests: load, or compute
        self.beaten = Beaten()
        self._tenant = tenant
        self._catalog = catalog
        self._cold = cold
        self._through = through
        self._admission = admission
        if admission == "second-touch" or (admission == "auto" and daily_bytes):
            catalog.blocks.admission.turn_on()
        catalog.blocks.keeps_back = LATE
        self._clean_bytes = int(quota_bytes * CLEAN_SHARE)
        self._budget = Budget(daily_bytes, clock)
        self._leaving: asyncio.Queue[tuple[Shelf, Segment]] = asyncio.Queue()
        self._left = asyncio.Event()  # nothing is to be brought away
        self._left.set()
        self._saved: deque[bytes] = deque()  # write-through: blocks that were committed
        self._wake = asyncio.Event()
        self._waiting_bytes = 0  # asked for and not there yet
        self._again_bytes = 0.0  # that may be written a second time
        self._bounce: tuple[int, int] | None = None
        # Of segments that leave: where frames are copied to, and what from. Both are there for a while.
        self._copies: dict[Segment, dict[bytes, bytes]] = {}
        self._forgotten: list[Callable[[str], None]] = []  # who waits until it is so on disk
        self._forgetting: asyncio.Task[None] | None = None
        self._early: list[tuple[bytes, bytes]] = []  # forgotten before all was found that there is
        self._early_bytes = 0

    @property
    def is_on(self) -> bool:
        return self._cold.is_on

    @property
    def day_bytes(self) -> int:
        return self._budget.day_bytes()

    # --- reading -----------------------------------------------------------------------------

    def promote(
        self,
        space: Space,
        keys: bytes,
        coming: int,
        *,
        request: Request | None = None,
        urgent: bool = True,
        within_s: float = PATIENCE_S,
        recompute_s: float = float("inf"),
    ) -> tuple[int, float, str]:
        """Begin to read what this prefix needs and memory lacks, if that is the sooner way to have it: how
        many of the `coming` blocks are to be expected, in how many milliseconds, and why so."""
        if not self._cold.is_on:
            return 0, 0.0, "off"
        if request is None:
            request = (0, (self._tenant, space.number, keys))
        cold, reads = self._catalog.cold, self._cold.reads
        said: list[Verdict] = []

        def accept(survey: Survey) -> bool:
            fresh, joined = reads.bytes_of(survey.frames), self._names(survey.joined)
            verdict = reads.weigh(request, fresh, joined, urgent, within_s, recompute_s)
            said.append(verdict)
            return verdict.load

        room = min(READING_BLOCKS, cold.reading + self._room(space)) - cold.reading
        limit = cold.reading + max(room // 2, min(room, LEAST_BLOCKS))
        out_of_reach = self._cold.out_of_reach()
        plan = cold.plan_promotion(space, keys, limit, out_of_reach, accept)
        if not said:
            return 0, 0.0, "not_read"
        if said[0].first:
            self.verdicts[said[0].why] += 1
        if not said[0].load:
            if said[0].first or not reads.planner.eta_s(request):
                return 0, 0.0, said[0].why
            # No more, but what was begun for it is on its way.
            plan = cold.plan_promotion(space, keys, 0, out_of_reach)
        if plan.ids or said[0].first:
            self._read(request, plan)
        if plan.ids:
            self._wake.set()  # others went for these, so others are the coldest now
        elif not plan.joined:
            return 0, 0.0, "not_read"
        eta_ms = max(reads.planner.eta_s(request), said[0].load_s) * 1000
        return max(0, coming - plan.left_out), eta_ms, said[0].why

    def compute(self, session: int, space: Space, keys: bytes, ready: int, coming: int) -> None:
        """A request computes the `coming` blocks after the ready ones, as that is sooner than reading them.
        What of it was so before is brought for the next one."""
        again = self.beaten.again(keys[ready * KEY_BYTES : (ready + coming) * KEY_BYTES])
        room = may_bring(space.spec.block_bytes, self._catalog.cold.reading) // space.places
        if count := min(again, room):
            keys = keys[: (ready + count) * KEY_BYTES]
            request = (session, ("beaten", space.number, len(keys), keys[-KEY_BYTES:]))
            self.promote(space, keys, count, request=request, urgent=False)

    def _read(self, request: Request, plan: Promotion) -> None:
        """Have these read for a request that was weighed."""
        blocks = (self._wanted(plan, number, at) for at, number in enumerate(array("I", plan.ids)))
        self._waiting_bytes += self._cold.reads.add(
            request, self._tenant, plan.frames, blocks, self._names(plan.joined), self._have_read
        )

    def _names(self, ids: bytes) -> Iterator[Name]:
        return ((self._tenant, one) for one in array("I", ids))

    def cancel(self, request: Request) -> None:
        """Nobody waits for what this request asked for."""
        self._cold.reads.cancel(request)

    def released(self, request: Request) -> None:
        """Its lease was released: nobody waits, unless it asks again soon."""
        self._cold.reads.planner.released(request)

    def session_over(self, session: int) -> None:
        """Nobody waits for what this session's requests asked for."""
        self._cold.reads.session_over(session)

    def _room(self, space: Space) -> int:
        """How many blocks of this space may be asked for on top."""
        return max(0, (READING_BYTES - self._waiting_bytes) // space.spec.block_bytes)

    def _wanted(self, plan: Promotion, number: int, at: int) -> Incoming:
        place = self._place(plan.slots[at * SLOT.size : (at + 1) * SLOT.size])
        return _incoming(number, plan.frames, plan.digests, at, place)

    def _have_read(self, block: Incoming, code: int) -> None:
        self._waiting_bytes -= block.payload_bytes
        ids, cold = array("I", [block.id]).tobytes(), self._catalog.cold
        if not code:
            cold.promoted(ids)
            self.counts["read"] += 1
            self.bytes["read"] += block.payload_bytes
        elif code in DAMAGED:
            log.warning(
                "cold: a frame in segment %d, page %d, is damaged", block.segment, block.page
            )
            cold.spoilt(ids, errno.errorcode.get(code, str(code)))
            self.counts["spoilt"] += 1
        else:
            cold.unpromoted(ids, errno.errorcode.get(code, str(code)))
            self.counts["late"] += 1

    # --- writing -----------------------------------------------------------------------------

    def saved(self, ids: bytes) -> None:
        """These blocks were committed."""
        if self._through and self._cold.takes and len(self._saved) < LIMIT_SAVED:
            # Those beyond the limit are written when they come near to being evicted.
            self._saved.append(ids)
        self._wake.set()

    def tend(self) -> None:
        """What has to be looked at now and then."""
        self.bury()
        self._gate(self._budget.left())

    async def run(self) -> None:
        """Write what is to be written, for as long as the daemon lives."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(WRITES_AT_ONCE):
                tasks.create_task(self._write_on(), name=f"write {self._tenant} {number}")
            tasks.create_task(self._bring_away_on(), name=f"bring away {self._tenant}")

    async def _write_on(self) -> None:
        while True:
            plan = self._plan()
            left, wrote = await self._write(plan) if plan is not None else (b"", False)
            if left and self._through and len(self._saved) < LIMIT_SAVED:
                self._saved.append(left)
            if left or not wrote:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PAUSE_S):
                        await self._wake.wait()

    def _plan(self) -> Demotion | None:
        """What to write next, or None."""
        left = self._budget.left()
        self._gate(left)
        if not self._cold.takes or left <= 0:
            return None
        if not self._cold.may_write(self._tenant):
            return None
        cold = self._catalog.cold
        while self._saved:
            ids, some = self._saved.popleft(), WRITE_BLOCKS * ID_BYTES
            if len(ids) > some:
                self._saved.appendleft(ids[some:])
            plan = cold.plan_write_through(ids[:some])
            if plan.ids:
                return plan
        plan = cold.plan_demotion(int(min(left, WRITE_BYTES)), self._clean_bytes, WRITE_BLOCKS)
        return plan if plan.ids else None

    def _gate(self, left: float) -> None:
        """Say why what is evicted now without a frame has none, and whether everything may be written."""
        blocks = self._catalog.blocks
        shut = self._admission == "second-touch" or (
            self._admission == "auto" and self._budget.is_limited and left < self._budget.scarce
        )
        blocks.admission.shut = shut
        if not self._cold.takes:
            blocks.keeps_back = OFF
        elif left <= 0:
            blocks.keeps_back = BUDGET
        else:
            blocks.keeps_back = ONCE if shut else LATE

    async def _write(self, plan: Demotion) -> tuple[bytes, bool]:
        """Write these, as far as there is a place for them; the ids of those for which there was none, and
        whether anything was written at all.

        A block that was handed to the disk is held until the disk has ended with it, whatever becomes of this
        task: another block in its slot would be written under its name.
        """
        cold = self._catalog.cold
        blocks = [
            self._outgoing(number, block, self._place(block.slot))
            for number, block in zip(array("I", plan.ids), plan.blocks, strict=True)
        ]
        unfit = [block for block in blocks if not self._cold.fits(self._tenant, block)]
        if unfit:
            log.debug("cold: %d blocks are too large for a segment", len(unfit))
            cold.not_demoted(_ids_of(unfit))
            blocks = [block for block in blocks if block not in unfit]
        wrote = False
        try:
            while blocks and await self._describe(blocks):
                settled = await self._begin_soon(blocks)
                if settled is None:
                    break
                wrote = True
                if not await _in_time(settled):
                    break
        finally:
            cold.not_demoted(_ids_of(blocks))
        return _ids_of(blocks), wrote

    def _leave_out_forgotten(self, blocks: list[Outgoing]) -> None:
        """What is forgotten by now is not written: a forget waits only for what is with the disk."""
        wanted = set(array("I", self._catalog.cold.dirty(_ids_of(blocks))))
        gone = [block for block in blocks if block.id not in wanted]
        if gone:
            self._catalog.cold.not_demoted(_ids_of(gone))
            blocks[:] = [block for block in blocks if block.id in wanted]

    def _settle(self, landed: list[Landed], failed: list[int]) -> None:
        self._landed(landed)
        self._catalog.cold.not_demoted(array("I", failed).tobytes())

    def _landed(self, landed: list[Landed]) -> None:
        nbytes = sum(map(_frame_bytes, landed))
        self._budget.spend(nbytes)
        self._again_bytes = min(self._again_bytes + SECOND_CHANCE * nbytes, SECOND_CHANCE_MOST)
        self.counts["written"] += len(landed)
        self.bytes["written"] += nbytes
        numbers = array("I", (one.id for one in landed)).tobytes()
        frames = b"".join(map(_frame, landed))
        self._catalog.cold.demoted(numbers, frames, b"".join(one.digest for one in landed))

    async def _describe(self, blocks: Sequence[Outgoing]) -> bool:
        for block in {block.space: block for block in blocks}.values():
            if not await self._cold.describe(self._tenant, block.space, block.spec):
                return False
        return True

    def _begin(self, blocks: Sequence[Outgoing], settle: Wrote) -> tuple[int, asyncio.Future[bool]]:
        """Hand the leading blocks to the disk: how many, and, once `settle` was called, whether all of them
        are on it."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def over(landed: list[Landed], failed: list[int]) -> None:
            settle(landed, failed)
            if not done.done():
                done.set_result(not failed)

        return self._cold.write(self._tenant, blocks, over), done

    async def _begin_soon(self, blocks: list[Outgoing]) -> asyncio.Future[bool] | None:
        """The same for what leaves memory, in a while if the next segment is just being begun; takes what was
        begun off the list. What is brought away goes first: it would find no place any more, and until it has
        one there is no next segment."""
        for tries in range(BEGIN_TRIES):
            if tries:
                await asyncio.sleep(BEGIN_S)
            try:
                async with asyncio.timeout(BRING_AWAY_S):
                    await self._left.wait()
            except TimeoutError:
                self._left.set()  # a disk that hangs holds up no other
            self._leave_out_forgotten(blocks)
            count, settled = self._begin(blocks, self._settle) if blocks else (0, None)
            del blocks[:count]
            if count or not blocks:
                return settled
        return None

    def _outgoing(self, number: int, block: Described, place: tuple[int, int]) -> Outgoing:
        name = block.identity
        return Outgoing(
            number, name.space, block.space.spec, name.group, name.shard, name.key, block.parent,
            block.checksum, *place,
        )  # fmt: skip

    def _place(self, slot: bytes) -> tuple[int, int]:
        extent, _, offset, _ = SLOT.unpack(slot)
        return self.extents[extent], offset

    # --- segments that are used again --------------------------------------------------------

    def leave(self, shelf: Shelf, segment: Segment) -> None:
        """This segment is to be used again, once what deserves it was brought away."""
        self._leaving.put_nowait((shelf, segment))
        self._left.clear()

    async def _bring_away_on(self) -> None:
        while True:
            shelf, segment = await self._leaving.get()
            try:
                await self._bring_away(segment)
            except Exception:
                log.exception("cold: %s could not be brought away", segment.path)
            # As long as the segment has its epoch.
            self.bury()
            self._catalog.cold.drop_segment(segment.number)
            self._cold.left(shelf, segment)
            if self._leaving.empty():
                self._left.set()

    async def _bring_away(self, segment: Segment) -> None:
        """Write again, elsewhere, what was wanted since it was written and is nowhere else."""
        cold = self._catalog.cold
        found = cold.reclaim(segment.number, KEEP_MOST)
        frames = [
            found.frames[at : at + FRAME.size] for at in range(0, len(found.frames), FRAME.size)
        ]
        at = 0
        while at < len(frames) and self._again_bytes > 0 and self._cold.is_on and self._cold.takes:
            count, nbytes = 0, 0
            while (
                at + count < len(frames)
                and count < WRITE_BLOCKS
                and (not count or nbytes < COPY_BYTES)
            ):
                nbytes += pages(FRAME.unpack(frames[at + count])[2])
                count += 1
            if not await self._copy(segment, found, frames, range(at, at + count), nbytes):
                break
            at += count

    async def _copy(
        self,
        segment: Segment,
        found: Rescue,
        frames: Sequence[bytes],
        which: range,
        nbytes: int,
    ) -> bool:
        """Write these frames of a segment that leaves again; False if there is no place for them, as there
        will be none for others."""
        ids, extent, offset = array("I", found.ids), self._bounce_of(nbytes), 0
        # Some may be gone by now, and their ids others'.
        named = self._catalog.cold.described_in(
            ids[which.start : which.stop].tobytes(), segment.number
        )
        reading, writing = [], {}
        for at in which:
            if block := named.get(ids[at]):
                place = (extent, offset)
                reading.append(_incoming(ids[at], found.frames, found.digests, at, place))
                writing[ids[at]] = self._outgoing(ids[at], block, place)
                offset += pages(reading[-1].payload_bytes)
        if not reading:
            return True
        if not await self._read_all(reading, writing):
            self._bounce = None  # the disk's until it gives it back
            return False
        before = dict(zip((ids[at] for at in which), frames[which.start : which.stop], strict=True))

        def settle(landed: list[Landed], _: list[int]) -> None:
            for one in landed:
                self._rescued(segment, one, before[one.id])

        blocks, tries = list(writing.values()), 0
        while blocks and tries < BEGIN_TRIES and await self._describe(blocks):
            there = set(array("I", self._catalog.cold.still(_ids_of(blocks), segment.number)))
            blocks = [block for block in blocks if block.id in there]
            if not blocks:
                break
            count, settled = self._begin(blocks, settle)
            blocks = blocks[count:]
            if count:
                if not await _in_time(settled):
                    self._bounce = None
                    return False
            else:
                if not any(shelf.log.has_place for shelf in self._cold.shelves[self._tenant]):
                    break  # it is this segment's leaving that makes a place, for these and all others
                tries += 1
                await asyncio.sleep(BEGIN_S)
        return not blocks

    async def _read_all(self, blocks: Sequence[Incoming], wanted: dict[int, Outgoing]) -> bool:
        """Read these; take those that are not good out of what is wanted. Who asks for them next will be
        told. False if the disk hangs."""
        left = len(blocks)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def over(block: Incoming, code: int) -> None:
            nonlocal left
            left -= 1
            if code:
                del wanted[block.id]
            if not left and not done.done():
                done.set_result(None)

        self._cold.read(blocks, over)
        return bool((await asyncio.wait([done], timeout=SETTLE_S))[0])

    def _rescued(self, segment: Segment, one: Landed, before: bytes) -> None:
        nbytes = _frame_bytes(one)
        self._again_bytes -= nbytes
        self._budget.spend(nbytes)
        self.counts["written_again"] += 1
        self.bytes["written_again"] += nbytes
        after = _frame(one)
        self._copies.setdefault(segment, {})[after[:PLACE_BYTES]] = before[:PLACE_BYTES]
        self._catalog.cold.rescued(array("I", [one.id]).tobytes(), before, after)

    def _bounce_of(self, nbytes: int) -> int:
        """Memory of our own, of so many bytes at least; its number with the cold tier."""
        if self._bounce is None or self._bounce[1] < nbytes:
            self._bounce = self._cold.room(nbytes)
        return self._bounce[0]

    # --- what was forgotten ------------------------------------------------------------------

    def forget(self, space: Space, keys: bytes, over: Callable[[str], None] | None) -> None:
        """See to it that these blocks, which the catalog has forgotten, are so after a start too; then `over`
        is told what went wrong, or nothing."""
        if not self._cold.recovered.is_set():
            if self._early_bytes + len(keys) > EARLY_BYTES:
                if over is not None:
                    over("the cold tier is still looking at what it has")
                return
            self._early.append((space.identity, keys))
            self._early_bytes += len(keys)
        if over is None:
            return
        self._forgotten.append(over)
        if self._forgetting is None:
            self._forgetting = asyncio.create_task(self._forget_on(), name="forget")

    async def _forget_on(self) -> None:
        while self._forgotten:
            some, self._forgotten = self._forgotten, []
            try:
                async with asyncio.timeout(FORGET_S):
                    await self._cold.recovered.wait()
                    self.forget_early()
                    self.bury()
                    await self._cold.settled(self._tenant)
                    self.bury()  # what has landed since
                    failure = await self._cold.flush() or self._cold.unknown
            except TimeoutError:
                failure = self._cold.failure or f"nothing was heard of it for {FORGET_S:.0f} s"
            for over in some:
                over(failure)
        self._forgetting = None

    def forget_early(self) -> None:
        """What was forgotten may have been found since."""
        for identity, keys in self._early:
            self._catalog.forget_again(identity, keys)
        self._early = []

    def bury(self) -> None:
        """Tell the index of the frames that are nothing any more."""
        died = self._catalog.cold.take_died()
        # Once a segment is free its pages are others'.
        for segment in [one for one in self._copies if one.stage not in NOT_FREE_YET]:
            del self._copies[segment]
        for copies in self._copies.values():
            for at in range(0, len(died), PLACE_BYTES):
                died += copies.get(died[at : at + PLACE_BYTES], b"")
        self._cold.bury(died)


async def _in_time(settled: asyncio.Future[bool]) -> bool:
    """Wait for what was handed to a disk, but not for one that hangs: what it has then, it has until it gives
    it back, and others are written elsewhere."""
    done, _ = await asyncio.wait([settled], timeout=SETTLE_S)
    return bool(done) and settled.result()


def _incoming(
    number: int, frames: bytes, digests: bytes, at: int, place: tuple[int, int]
) -> Incoming:
    segment, page, nbytes, _, header_pages, _, _ = FRAME.unpack_from(frames, at * FRAME.size)
    digest = digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
    return Incoming(number, segment, page, header_pages, nbytes, digest, *place)


def _ids_of(blocks: Sequence[Outgoing]) -> bytes:
    return array("I", (block.id for block in blocks)).tobytes()


def _frame_bytes(one: Landed) -> int:
    """What was written for it."""
    return one.header_pages * PAGE + pages(one.payload_bytes)


def _frame(one: Landed) -> bytes:
    return FRAME.pack(one.segment, one.page, one.payload_bytes, RAW, one.header_pages, 0, 0)
