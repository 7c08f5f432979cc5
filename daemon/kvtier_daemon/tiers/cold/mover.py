"""Moves one tenant's blocks between memory and disk.

The catalog decides which blocks, the planner when, and the cold tier does the I/O. Reads start with a match
and go before all writes. `Promoter` reads, `Flusher` and `Reclaimer` write, `TombstoneWriter` makes a forget
durable.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from kvtier.frame import ENCRYPTED, RAW
from kvtier.key import KEY_BYTES
from kvtier.wire import DIGEST_BYTES, SLOT
from kvtier_daemon.catalog import Catalog, KnownSpace
from kvtier_daemon.catalog.blocks import ID_BYTES
from kvtier_daemon.catalog.frames import CODECS, FRAME, PAYLOAD_SIZES, SEGMENTS, segments_of
from kvtier_daemon.catalog.holds import Request
from kvtier_daemon.catalog.promotion import Promotion, Survey
from kvtier_daemon.codec.choice import Choice
from kvtier_daemon.codec.losses import NUMBERS as LOSSY
from kvtier_daemon.codec.losses import Losses
from kvtier_daemon.planning import PATIENCE_S, WHY, Verdict
from kvtier_daemon.planning.recomputed import RecomputedBlocks, prefetch_limit
from kvtier_daemon.tiers.base import Outlook, TierStats
from kvtier_daemon.tiers.cold.compressor import Compressor
from kvtier_daemon.tiers.cold.direct_reads import SegmentReads
from kvtier_daemon.tiers.cold.flusher import Flusher
from kvtier_daemon.tiers.cold.frame_memory import CompressedFrame, CompressedFrames
from kvtier_daemon.tiers.cold.frames import DAMAGED, LINK, CipherNow, Decoding, Incoming, no_cipher
from kvtier_daemon.tiers.cold.leaving import LeavingSegments
from kvtier_daemon.tiers.cold.read_queue import Name
from kvtier_daemon.tiers.cold.reclaimer import Reclaimer
from kvtier_daemon.tiers.cold.tier import ColdTier
from kvtier_daemon.tiers.cold.tombstones import TombstoneWriter
from kvtier_daemon.tiers.cold.write_budget import WriteBudget

log = logging.getLogger(__name__)

READING_BLOCKS = 8192  # in flight; one request may use half of the rest
READING_BYTES = 1 << 30
PROBE_BLOCKS = 4
DECLINED_S = 10.0
TOO_SLOW = ("slower", "crowded", "unreliable")
LEAST_BLOCKS = 64  # a request may read at least this many
MOST = (1 << 32) - 1
NO_FRAMES: Mapping[int, CompressedFrame] = MappingProxyType({})

OUTCOMES = (
    "written", "read", "written_again", "spoilt", "not_read", "unknown_key", "direct", "not_direct",
)  # fmt: skip


class Promoter:
    """The `TierReads` of one tenant. `extents` has the cold tier's numbers of its extents; `evicted` is
    called when blocks were evicted to make room."""

    def __init__(
        self, tenant: str, catalog: Catalog, cold: ColdTier, extents: Sequence[int], choice: Choice,
        counts: Counter[str], nbytes: Counter[str], evicted: Callable[[], None],
        clock: Callable[[], float], cipher: CipherNow = no_cipher,
        compressed: CompressedFrames | None = None,
    ) -> None:  # fmt: skip
        self._compressed = compressed
        self.verdicts: Counter[str] = Counter(dict.fromkeys(WHY, 0))  # decisions of the planner
        self.recomputed = RecomputedBlocks()
        self.counts = counts
        self.bytes = nbytes
        self._tenant = tenant
        self._catalog = catalog
        self._cold = cold
        self._extents = extents
        self._choice = choice
        self._evicted = evicted
        self._clock = clock
        self._cipher = cipher
        self._waiting_bytes = 0  # in flight
        self._declined_at = -math.inf
        self._returns = 0  # requests that were made for blocks that engines dropped

    def declined_lately(self) -> bool:
        """Whether the disk was too slow or too busy for a request in the last seconds."""
        return self._clock() < self._declined_at + DECLINED_S

    @property
    def is_on(self) -> bool:
        return self._cold.reader.is_on

    def promote(
        self, space: KnownSpace, keys: bytes, coming: int, *, request: Request | None = None,
        urgent: bool = True, within_s: float = PATIENCE_S, recompute_s: float = float("inf"),
        begun: Callable[[bytes], None] | None = None,
    ) -> Outlook:  # fmt: skip
        if not self._cold.reader.is_on:
            return 0, 0.0, "off"
        if request is None:
            request = (0, (self._tenant, space.number, keys))
        catalog, reads = self._catalog, self._cold.reads
        verdicts: list[Verdict] = []

        def accept(survey: Survey) -> bool:
            compressed = self._frames_of(survey.ids)
            fresh = reads.bytes_of(self._load_bytes(space, survey.frames, survey.ids, compressed))
            joined = self._names(survey.joined)
            verdict = reads.weigh(request, fresh, joined, urgent, within_s, recompute_s)
            verdicts.append(verdict)
            return verdict.load

        reading = catalog.promotions.reading
        left = max(0, (READING_BYTES - self._waiting_bytes) // sum(space.block_bytes))
        room = min(READING_BLOCKS - reading, left)
        limit = reading + max(room // 2, min(room, LEAST_BLOCKS))
        unreadable_segments = self._cold.unreadable_segments()
        plan = catalog.promotions.plan(space, keys, limit, unreadable_segments, accept)
        if not verdicts:
            return 0, 0.0, "not_read"
        verdict = verdicts[0]
        if verdict.first:
            self.verdicts[verdict.why] += 1
            if verdict.why in TOO_SLOW:
                self._declined_at = self._clock()
        if not verdict.load:
            if verdict.first or not reads.planner.eta_s(request):
                return 0, 0.0, verdict.why
            # It starts no more reads, but waits for those that are in flight.
            plan = catalog.promotions.plan(space, keys, 0, unreadable_segments)
        if plan.ids or verdict.first:
            self._read(request, space, plan)
        if plan.ids:
            if catalog.demotions.in_memory_alone:
                self._evicted()  # blocks were evicted for these, so others are the coldest now
            if begun is not None:
                begun(plan.ids)
        elif not plan.joined:
            return 0, 0.0, "not_read"
        eta_ms = max(reads.planner.eta_s(request), verdict.load_s) * 1000
        return min(coming, plan.coming), eta_ms, verdict.why

    def probe(self, session: int, space: KnownSpace, keys: bytes, ready: int, coming: int) -> None:
        count = min(coming, PROBE_BLOCKS)
        keys = keys[: (ready + count) * KEY_BYTES]
        if sum(link.may_probe() for link in self._cold.links()):
            request = (session, ("probe", space.number, len(keys), keys[-KEY_BYTES:]))
            self.promote(space, keys, count, request=request, urgent=False)

    def recomputes(
        self, session: int, space: KnownSpace, keys: bytes, ready: int, coming: int
    ) -> None:
        again = self.recomputed.note(keys[ready * KEY_BYTES : (ready + coming) * KEY_BYTES])
        reads, reading = self._catalog.blocks.reads, self._catalog.promotions.reading
        room = prefetch_limit(sum(space.block_bytes), reading) // space.places
        self.recomputed.used(reads.loaded_again)
        allowed = self.recomputed.allowed(again * space.places)
        if count := min(room, -(-allowed // space.places)):
            keys = keys[: (ready + count) * KEY_BYTES]
            request = (session, ("recomputed", space.number, len(keys), keys[-KEY_BYTES:]))
            self.promote(space, keys, count, request=request, urgent=False, begun=self._prefetches)

    def bring_back(self, space: KnownSpace, ids: bytes) -> None:
        self.read(space, ids, True)

    def read(self, space: KnownSpace, ids: bytes, returns: bool = False) -> None:
        catalog, reads = self._catalog, self._cold.reads
        frames = catalog.blocks.store.frames(ids)[0]
        self._returns += 1
        request = (0, (self._tenant, "return", self._returns))
        readable = self.is_on and segments_of(frames).isdisjoint(self._cold.unreadable_segments())
        loads = self._load_bytes(space, frames, ids, self._frames_of(ids))
        if (
            not readable
            or not reads.weigh(request, reads.bytes_of(loads), (), False, PATIENCE_S, math.inf).load
        ):
            catalog.blocks.residency.stay_below(array("I", ids))
            return
        reading = catalog.promotions.reading
        limit = reading + prefetch_limit(max(space.block_bytes), reading)
        self._read(request, space, catalog.promotions.plan_return(space, ids, limit, returns))

    def _prefetches(self, ids: bytes) -> None:
        """These blocks are being read because they were recomputed."""
        self.recomputed.began(len(ids) // ID_BYTES)
        self._catalog.blocks.reads.recomputed(ids)

    def _read(self, request: Request, space: KnownSpace, plan: Promotion) -> None:
        """Queue the reads of a request that the planner has accepted."""
        compressed = self._frames_of(plan.ids)
        if self._compressed is not None and compressed:
            self._compressed.hold(list(compressed.values()))
            used, blocks = array("I", compressed).tobytes(), self._catalog.blocks
            blocks.policy.wanted(used, blocks.store.names(used))
        loads = self._load_bytes(space, plan.frames, plan.ids, compressed)
        self._waiting_bytes += self._cold.reads.add(
            request, self._tenant, plan.frames, loads, self._incoming(space, plan, loads, compressed),
            self._names(plan.joined), self._have_read,
        )  # fmt: skip

    def _frames_of(self, ids: bytes) -> dict[int, CompressedFrame]:
        if self._compressed is None:
            return {}
        return self._compressed.find(self._catalog.blocks.store, ids)

    def _load_bytes(
        self, space: KnownSpace, frames: bytes, ids: bytes = b"",
        compressed: Mapping[int, CompressedFrame] = NO_FRAMES,
    ) -> bytes:  # fmt: skip
        """Return the frames, with each payload size replaced by its cost for the link: more bytes if decoding
        is slower than reading. Frames in memory have a link of their own, and cost what is decoded."""
        loads = self._disk_bytes(space, frames)
        if not compressed:
            return loads
        words = array("I", loads)
        for at, one in enumerate(array("I", ids)):
            if (frame := compressed.get(one)) is not None:
                words[SEGMENTS.start + at * SEGMENTS.step] = LINK
                words[PAYLOAD_SIZES.start + at * SEGMENTS.step] = frame.block_bytes
        return words.tobytes()

    def _disk_bytes(self, space: KnownSpace, frames: bytes) -> bytes:
        codecs = set(frames[CODECS]) - {RAW, ENCRYPTED}
        if not codecs:
            return frames
        words, link_of = array("I", frames), self._cold.reads.link_of
        slowness_of = partial(self._choice.slowness, space.identity, space.spec)
        slow = {
            (segment, codec): slowness
            for segment in set(words[SEGMENTS])
            for codec in codecs
            if (slowness := slowness_of(codec & ~ENCRYPTED, link_of(segment).bytes_s)) > 1
        }
        if slow:
            words[PAYLOAD_SIZES] = array(
                "I",
                (
                    min(int(nbytes * slow.get((segment, codec), 1)), MOST)
                    for segment, nbytes, codec in zip(
                        words[SEGMENTS], words[PAYLOAD_SIZES], frames[CODECS], strict=True
                    )
                ),
            )
        return words.tobytes()

    def _names(self, ids: bytes) -> Iterator[Name]:
        return ((self._tenant, one) for one in array("I", ids))

    def _incoming(
        self, space: KnownSpace, plan: Promotion, loads: bytes, compressed: Mapping[int, CompressedFrame]
    ) -> Iterator[Incoming]:  # fmt: skip
        """Return the blocks to read, when they are needed: each takes microseconds."""
        columns = zip(
            array("I", plan.ids), FRAME.iter_unpack(plan.frames), SLOT.iter_unpack(plan.slots),
            memoryview(loads).cast("I")[PAYLOAD_SIZES], plan.sizes, strict=True,
        )  # fmt: skip
        for at, (number, stored, slot, load_bytes, block_bytes) in enumerate(columns):
            segment, page, nbytes, codec, header_pages, _ = stored
            coding = None
            if codec != RAW:
                coding = self._coding(space, number, codec, block_bytes)
            yield Incoming(
                number, segment, page, header_pages, nbytes,
                plan.digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES],
                self._extents[slot[0]], slot[2], load_bytes, coding, compressed=compressed.get(number),
            )  # fmt: skip

    def _coding(self, space: KnownSpace, number: int, codec: int, block_bytes: int) -> Decoding:
        encrypted, is_lossy = codec & ENCRYPTED, codec & ~ENCRYPTED in LOSSY
        if not (encrypted or is_lossy):
            return Decoding(codec, space.spec, block_bytes)
        (one,) = self._catalog.demotions.described(array("I", [number]).tobytes())
        name, lossy = one.identity, None
        if is_lossy:
            lossy = self._choice.lossy(name.space, space.spec, name.group, name.shard)
        cipher = self._cipher() if encrypted else None
        return Decoding(codec, space.spec, block_bytes, lossy, cipher, name)

    def _have_read(self, blocks: Sequence[Incoming], code: int, waited: Sequence[Request]) -> None:
        """These blocks were read alike: all or none from frames in memory; all or none have a checksum."""
        for block in blocks:
            self._waiting_bytes -= block.load_bytes
            if block.compressed is not None and self._compressed is not None:
                if code == errno.EBADMSG:
                    self._compressed.spoilt(block.compressed)
                self._compressed.release(block.compressed, not code)
            elif not code:
                self.counts["read"] += 1
                self.bytes["read"] += block.payload_bytes
        if not code:
            ids = array("I", [block.id for block in blocks]).tobytes()
            checksums = b"".join([block.checksum for block in blocks])
            is_compressed = blocks[0].compressed is not None
            self._catalog.promotions.promoted(ids, waited, self._clock(), checksums, is_compressed)
            return
        for block in blocks:
            self._have_not_read(block, code)

    def _have_not_read(self, block: Incoming, code: int) -> None:
        ids, catalog = array("I", [block.id]).tobytes(), self._catalog
        if block.compressed is not None and code == errno.EBADMSG:
            code = errno.ESTALE  # the frame on disk is another one
        if code == errno.ENOKEY:
            if not self.counts["unknown_key"]:
                log.warning(
                    "cold: the frame in segment %d, page %d, is encrypted with a key that is not in "
                    "cold.key_file; dropping it, and all others of which this is true",
                    block.segment, block.page,
                )  # fmt: skip
            catalog.promotions.spoilt(ids, "ENOKEY")
            self.counts["unknown_key"] += 1
        elif code in DAMAGED:
            text = "cold: the frame in segment %d, page %d, is damaged; dropping it"
            log.warning(text, block.segment, block.page)
            catalog.promotions.spoilt(ids, errno.errorcode.get(code, str(code)))
            self.counts["spoilt"] += 1
        else:
            catalog.promotions.unpromoted(ids, errno.errorcode.get(code, str(code)))
            self.counts["not_read"] += 1


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
        cipher: CipherNow = no_cipher,
        compressed: CompressedFrames | None = None,
    ) -> None:
        self.extents: list[int] = []
        self.counts = Counter(dict.fromkeys(OUTCOMES, 0))
        self.bytes = Counter(written=0, read=0, written_again=0)
        self.choice = Choice(cold.coding.rates, codec, codecs, losses, tenant)
        self.recovery = cold.recovery
        self.pending = cold.reads.pending
        self.direct = SegmentReads(catalog, cold, self.counts, clock)
        self.forgets = TombstoneWriter(tenant, catalog, cold)
        self._tenant = tenant
        self._blocks = catalog.blocks
        self._cold = cold
        self._budget = WriteBudget(daily_bytes, clock)
        self.reclaimer = Reclaimer(
            tenant, catalog, cold, self._budget, self.forgets, self.counts, self.bytes
        )
        self.writes = Flusher(
            tenant, catalog, cold, self.extents, quota_bytes, self._budget, self.reclaimer, self.counts,
            self.bytes, self.choice, clock, cipher, through=through, admission=admission,
        )  # fmt: skip
        self.reads = Promoter(
            tenant, catalog, cold, self.extents, self.choice, self.counts, self.bytes,
            self.writes.waiting.wake, clock, cipher, compressed,
        )  # fmt: skip
        self._compressor: Compressor | None = None
        if compressed is not None and cold.frame_threads is not None:
            self._compressor = Compressor(
                catalog, compressed, cold.frame_threads, quota_bytes, self.extents, cold.table.blank
            )
        self.leaving = LeavingSegments(tenant, catalog, cold, cipher)
        self.writes.is_disk_short = self.reads.declined_lately
        cold.table.opened[tenant] = self.writes.segment_opened

    def reconfigure(
        self, *, through: bool, daily_bytes: int, admission: str, codec: str,
        codecs: Sequence[tuple[str, str]],
    ) -> None:  # fmt: skip
        """Use this configuration for all writes that start from now on."""
        self._budget.limit(daily_bytes)
        self.choice.configure(codec, codecs)
        self.writes.reconfigure(through=through, admission=admission)

    def release(self, number: int) -> None:
        if number < len(self.extents):  # otherwise the disks have not mapped it
            self._cold.memory.release(self.extents[number])

    def inherit(self, other: Mover) -> None:
        """Continue the counters, the budget, the forgets and the drain of an earlier mover of this tenant."""
        self.counts.update(other.counts)
        self.bytes.update(other.bytes)
        self.reads.verdicts.update(other.reads.verdicts)
        self.reads.recomputed = other.reads.recomputed
        self._budget.inherit(other._budget)
        self.forgets.inherit(other.forgets)
        if self._compressor is not None and other._compressor is not None:
            self._compressor.frames.counts.update(other._compressor.frames.counts)
        if other.writes.drain.is_on:
            self.writes.drain.begin()

    def stats(self) -> TierStats:
        day_bytes, notes_bytes = self._budget.day_bytes(), self.reads.recomputed.memory_bytes()
        counts = {**self.counts, "loaded": self._blocks.reads.loaded}
        compressed = self._compressor.frames.stats() if self._compressor is not None else {}
        return TierStats(
            counts, self.bytes, self.reads.verdicts, day_bytes, notes_bytes, compressed
        )

    def tend(self) -> None:
        """Do periodic work: end leases of direct reads, write tombstones, and wake the flusher."""
        self.direct.expire()
        self.forgets.tombstone()
        self.writes.tend()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.writes.run(), name=f"write {self._tenant}")
            tasks.create_task(self.reclaimer.run(), name=f"reclaim {self._tenant}")
            if self._compressor is not None:
                tasks.create_task(self._compressor.run(), name=f"compress {self._tenant}")
