"""Moves one tenant's blocks between memory and disk: what, when, and what becomes of it. The catalog
decides which blocks; the cold tier has the files; nothing here waits for a disk but these tasks
themselves.

Reads are asked for by a match, go in the planner's order, and are before everything else. How writes go is
in `moving`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kvtier.catalog import Catalog, Space
from kvtier.catalog.cold import Promotion, Survey
from kvtier.codec.base import Codec
from kvtier.codec.choice import Choice
from kvtier.codec.frame import RAW
from kvtier.codec.losses import NUMBERS as LOSSY
from kvtier.codec.losses import Losses
from kvtier.key import KEY_BYTES
from kvtier.planning import PATIENCE_S, WHY, Verdict
from kvtier.planning.beaten import Beaten, may_bring
from kvtier_daemon.moving.blocks import (
    CODEC_AT,
    DAMAGED,
    FRAME,
    NBYTES_AT,
    SLOT,
    incoming,
    place_of,
)
from kvtier_daemon.moving.budget import Budget
from kvtier_daemon.moving.forgetting import Forgetting
from kvtier_daemon.moving.leaving import Leaving
from kvtier_daemon.moving.writing import Writing
from kvtier_daemon.tiers.cold import ColdTier, Decoding, Incoming
from kvtier_daemon.tiers.log import Segment
from kvtier_daemon.tiers.reads import Name, Request
from kvtier_daemon.tiers.shelf import Shelf

log = logging.getLogger(__name__)

READING_BLOCKS = 8192  # asked for and not there yet; one request may have half of what is left
READING_BYTES = 1 << 30
PROBE_BLOCKS = 4
LEAST_BLOCKS = 64  # or so many
MOST = (1 << 32) - 1


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
        # On requests: load, or compute.
        self.verdicts: Counter[str] = Counter(dict.fromkeys(WHY, 0))
        self.beaten = Beaten()
        self.choice = Choice(cold.coding.rates, codec, codecs, losses, tenant)
        self._tenant = tenant
        self._catalog = catalog
        self._cold = cold
        self._budget = Budget(daily_bytes, clock)
        self._forgetting = Forgetting(tenant, catalog, cold)
        self._leaving = Leaving(
            tenant, catalog, cold, self._budget, self._forgetting, self.counts, self.bytes
        )
        self._writing = Writing(
            tenant, catalog, cold, self.extents, quota_bytes, self._budget, self._leaving, self.counts,
            self.bytes, self.choice, clock, through=through, admission=admission,
        )  # fmt: skip
        self._waiting_bytes = 0  # asked for and not there yet

    def go_by(
        self, *, through: bool, daily_bytes: int, admission: str, codec: str,
        codecs: Sequence[tuple[str, str]],
    ) -> None:  # fmt: skip
        """Write as is wanted from now on; what is being written is written as it was begun."""
        self._budget.limit(daily_bytes)
        self.choice.ask(codec, codecs)
        self._writing.go_by(through=through, admission=admission)

    def drain(self, wanted: bool) -> None:
        """Write all that is in memory alone, and what is saved from now on; or no more."""
        self._writing.drain(wanted)

    @property
    def is_drained(self) -> bool:
        """Whether all that was in memory alone when that was asked for is on disk."""
        return self._writing.is_drained

    @property
    def left_to_drain(self) -> int:
        return self._writing.left_to_drain

    def inherit(self, other: Mover) -> None:
        """Go on where another one of this tenant ended: what it counted, may write, and has yet to forget."""
        self.counts.update(other.counts)
        self.bytes.update(other.bytes)
        self.verdicts.update(other.verdicts)
        self.beaten = other.beaten
        self._budget.inherit(other._budget)
        self._forgetting.inherit(other._forgetting)
        self.drain(other._writing.drains)

    @property
    def is_on(self) -> bool:
        return self._cold.is_on

    @property
    def has_found_all(self) -> bool:
        """Whether what was on disk at the start is known."""
        return self._cold.recovered.is_set()

    @property
    def day_bytes(self) -> int:
        return self._budget.day_bytes()

    def saved(self, ids: bytes) -> None:
        """These blocks were committed."""
        self._writing.saved(ids)

    def leave(self, shelf: Shelf, segment: Segment) -> None:
        """This segment is to be used again, once what deserves it was brought away."""
        self._leaving.leave(shelf, segment)

    def forget(self, space: Space, keys: bytes, over: Callable[[str], None] | None) -> None:
        """See to it that these blocks, which the catalog has forgotten, are so after a start too; then `over`
        is told what went wrong, or nothing."""
        self._forgetting.forget(space, keys, over)

    def erase(self, first: int, over: Callable[[str, int, int], None]) -> None:
        """Erase from the disks what no block owns, piece by piece; `over` is told how that went."""
        self._forgetting.erase(first, over)

    def forget_early(self) -> None:
        """What was forgotten may have been found since."""
        self._forgetting.forget_early()

    def bury(self) -> None:
        """Tell the index of the frames that are nothing any more."""
        self._forgetting.bury()

    def tend(self) -> None:
        """What has to be looked at now and then."""
        self.bury()
        self._writing.tend()

    async def run(self) -> None:
        """Write what is to be written, for as long as the daemon lives."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._writing.run(), name=f"write {self._tenant}")
            tasks.create_task(self._leaving.run(), name=f"bring away {self._tenant}")

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
            fresh = reads.bytes_of(self._load_bytes(space, survey.frames))
            joined = self._names(survey.joined)
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
            self._read(request, space, plan)
        if plan.ids:
            self._writing.wake()  # others went for these, so others are the coldest now
        elif not plan.joined:
            return 0, 0.0, "not_read"
        eta_ms = max(reads.planner.eta_s(request), said[0].load_s) * 1000
        return max(0, coming - plan.left_out), eta_ms, said[0].why

    def probe(self, session: int, space: Space, keys: bytes, ready: int, coming: int) -> None:
        """A request computes the `coming` blocks after the ready ones, as the disk is unreliable: read some
        of them while no request waits, to know whether it still is."""
        count = min(coming, PROBE_BLOCKS)
        keys = keys[: (ready + count) * KEY_BYTES]
        if sum(drive.link.may_probe() for drive in self._cold.drives):
            request = (session, ("probe", space.number, len(keys), keys[-KEY_BYTES:]))
            self.promote(space, keys, count, request=request, urgent=False)

    def compute(self, session: int, space: Space, keys: bytes, ready: int, coming: int) -> None:
        """A request computes the `coming` blocks after the ready ones, as that is sooner than reading them.
        What of it was so before is brought for the next one."""
        again = self.beaten.again(keys[ready * KEY_BYTES : (ready + coming) * KEY_BYTES])
        room = may_bring(space.spec.block_bytes, self._catalog.cold.reading) // space.places
        if count := min(again, room):
            keys = keys[: (ready + count) * KEY_BYTES]
            request = (session, ("beaten", space.number, len(keys), keys[-KEY_BYTES:]))
            self.promote(space, keys, count, request=request, urgent=False)

    def _read(self, request: Request, space: Space, plan: Promotion) -> None:
        """Have these read for a request that was weighed."""
        loads = self._load_bytes(space, plan.frames)
        blocks = (
            self._wanted(space, plan, loads, number, at)
            for at, number in enumerate(array("I", plan.ids))
        )
        self._waiting_bytes += self._cold.reads.add(
            request, self._tenant, loads, blocks, self._names(plan.joined), self._have_read
        )

    def _load_bytes(self, space: Space, frames: bytes) -> bytes:
        """The same frames, with what each costs its link in place of its payload's bytes: more than those
        where it is decoded slower than it is read."""
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

    def _slowness(self, space: Space, codec: int, link_bytes_s: float) -> float:
        return self.choice.slowness(space.identity, space.spec, codec, link_bytes_s)

    def _names(self, ids: bytes) -> Iterator[Name]:
        return ((self._tenant, one) for one in array("I", ids))

    def cancel(self, request: Request) -> None:
        """Nobody waits for what this request asked for."""
        self._cold.reads.cancel(request)

    def released(self, request: Request) -> None:
        """Its lease was released: nobody waits, unless it asks again soon."""
        self._cold.reads.planner.released(request)

    def tell_when_over(self, request: Request, then: Callable[[], None]) -> bool:
        """Call this once nothing is on its way any more that this request asked for. False where that is so
        now."""
        return self._cold.reads.tell_when_over(request, then)

    def tell_no_more(self, request: Request) -> None:
        self._cold.reads.tell_no_more(request)

    def session_over(self, session: int) -> None:
        """Nobody waits for what this session's requests asked for."""
        self._cold.reads.session_over(session)

    def _room(self, space: Space) -> int:
        """How many blocks of this space may be asked for on top."""
        return max(0, (READING_BYTES - self._waiting_bytes) // space.spec.block_bytes)

    def _wanted(
        self, space: Space, plan: Promotion, loads: bytes, number: int, at: int
    ) -> Incoming:
        place = place_of(self.extents, plan.slots[at * SLOT.size : (at + 1) * SLOT.size])
        block = incoming(number, plan.frames, plan.digests, at, place)
        codec = plan.frames[at * FRAME.size + CODEC_AT]
        if codec == RAW:
            return block
        load_bytes = FRAME.unpack_from(loads, at * FRAME.size)[2]
        size, lossy = plan.sizes[at], self._lossy(space, number) if codec in LOSSY else None
        return replace(block, coding=Decoding(codec, space.spec, size, load_bytes, lossy))

    def _lossy(self, space: Space, number: int) -> Codec | None:
        """The lossy codec of this block."""
        (one,) = self._catalog.cold.described(array("I", [number]).tobytes())
        name = one.identity
        return self.choice.lossy(name.space, space.spec, name.group, name.shard)

    def _have_read(self, block: Incoming, code: int) -> None:
        self._waiting_bytes -= block.load_bytes
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
            self.counts["not_read"] += 1
