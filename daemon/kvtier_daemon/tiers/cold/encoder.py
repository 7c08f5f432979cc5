"""Blocks encoded on their way to the disks, and frames of codecs that the disks' workers can't decode, in
threads beside the loop; and what of that pays.

What was encoded lies in memory of the tier's own until it is written. A worker that reads a frame decodes it
by itself, but for `zstd`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar, TypeVarTuple

from kvtier.errors import FrameError
from kvtier.layout import KvSpec
from kvtier_daemon.codec import framing
from kvtier_daemon.codec.arranged import Arranged
from kvtier_daemon.codec.base import Codec
from kvtier_daemon.codec.choice import Choice, Rates
from kvtier_daemon.codec.frame import RAW, pages
from kvtier_daemon.codec.grid import grids
from kvtier_daemon.tiers.cold.encode_buffer import EncodeBuffer
from kvtier_daemon.tiers.cold.transfers import Coded, Outgoing
from kvtier_kernels import Mapping, xxh3_128

log = logging.getLogger(__name__)

THREADS_MOST = 4
PIECE_BYTES = 8 << 20  # of blocks, encoded while what was before them is written
TELL_S = 10.0
START_S = 10.0
T = TypeVar("T")
Args = TypeVarTuple("Args")


def threads_here() -> int:
    """How many threads encode, and how many decode for each disk: half of the processors, the others are
    the engines'."""
    return max(1, min(THREADS_MOST, len(os.sched_getaffinity(0)) // 2))


@dataclass(frozen=True, slots=True)
class Job:
    """What a thread does with a block: encode it, by one codec or to see what each makes of it."""

    block: Outgoing
    codec: Codec
    header: bytearray
    source: memoryview
    into: memoryview
    extent: int
    offset: int
    tries: tuple[Codec, ...]


@dataclass(frozen=True, slots=True)
class Took:
    """What one codec made of a block, and in how many seconds; none for decoding where it was not tried."""

    codec: int
    nbytes: int
    encode_s: float
    decode_s: float | None = None


class Encoder:
    """For all tenants. `blank(block)` is a header for it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        mapping_of: Callable[[int], Mapping],
        staging: EncodeBuffer,
        blank: Callable[[Outgoing], bytearray],
        threads: int,
    ) -> None:
        self.rates = Rates(threads)
        self._loop = loop
        self._mapping_of = mapping_of
        self.staging = staging
        self._blank = blank
        self._encoders = _started(threads, "kvtier-encode")
        self._decoders = _started(threads, "kvtier-decode")
        self._jobs: set[Future[Any]] = set()
        self.failures = 0  # to encode; the blocks were written as they are
        self._tells_at = 0.0

    # --- writing -----------------------------------------------------------------------------

    async def encode(
        self, blocks: Sequence[Outgoing], choice: Choice, links: Sequence[float]
    ) -> list[Outgoing]:
        """The same blocks, those for which it pays, and for which it can be done, with what they are encoded
        to. Whoever gets them lets go of each (`Coded.release`) once it is written, or is not to be."""
        kinds = {_kind(block): block for block in blocks}
        chosen = {kind: _codec(block, choice, links) for kind, block in kinds.items()}
        codecs = [chosen[_kind(block)] for block in blocks]
        tried = self._tries(blocks, codecs, choice)
        todo = [at for at, codec in enumerate(codecs) if codec.number != RAW or at in tried]
        if not todo:
            return list(blocks)
        try:
            return await self._encoded(blocks, codecs, tried, todo, choice)
        except Exception:
            self.failures += 1
            if self._loop.time() >= self._tells_at:
                self._tells_at = self._loop.time() + TELL_S
                log.exception("cold: internal error while encoding blocks; they are written raw")
            return list(blocks)

    async def _encoded(
        self, blocks: Sequence[Outgoing], codecs: Sequence[Codec], tried: set[int],
        todo: Sequence[int], choice: Choice,
    ) -> list[Outgoing]:  # fmt: skip
        sizes = [pages(blocks[at].block_bytes) for at in todo]
        place = await self.staging.take(sum(sizes))
        if place is None:
            return list(blocks)
        kept = [0] * len(todo)  # bytes at the front of each one's

        def give_back(_: object = None) -> None:
            extent, offset = place
            for taken, front in zip(sizes, kept, strict=True):
                self.staging.give(extent, offset + front, taken - front)
                offset += taken

        try:
            jobs = self._jobs_of(blocks, codecs, tried, todo, choice, place)
            encoding = self._beside(self._encoders, _encode_all, jobs)
        except BaseException:
            give_back()
            raise
        try:
            found = await asyncio.shield(encoding)
        except asyncio.CancelledError:
            encoding.add_done_callback(give_back)  # the thread goes on, and writes to it
            raise
        except Exception:
            give_back()
            raise
        try:
            over = list(blocks)
            for job, (_, took) in zip(jobs, found, strict=True):
                for one in took:
                    self._note(job.block, choice, one, len(job.source))
            for block in {block.space: block for block in blocks}.values():
                of_space = [at for at, one in enumerate(blocks) if one.space == block.space]
                choice.wrote(
                    block.space, block.spec, len(of_space), sum(at in tried for at in of_space)
                )
            for number, (at, job, (nbytes, _)) in enumerate(zip(todo, jobs, found, strict=True)):
                if nbytes is not None and pages(nbytes) < pages(len(job.source)):
                    kept[number] = pages(nbytes)
                    over[at] = replace(job.block, coded=self._coded(job, nbytes))
            return over
        finally:
            give_back()

    def _jobs_of(
        self, blocks: Sequence[Outgoing], codecs: Sequence[Codec], tried: set[int],
        todo: Sequence[int], choice: Choice, place: tuple[int, int],
    ) -> list[Job]:  # fmt: skip
        """Each is encoded to pages of its own, one after the other from this place on."""
        extent, offset = place
        jobs = []
        for at in todo:
            block, size = blocks[at], blocks[at].block_bytes
            header = self._blank(block)
            source = self._view(block.extent, block.offset, size)
            into = self._view(extent, offset, size)
            tries = choice.candidates(block.spec, size) if at in tried else ()
            jobs.append(Job(block, codecs[at], header, source, into, extent, offset, tries))
            offset += pages(size)
        return jobs

    def _coded(self, job: Job, nbytes: int) -> Coded:
        return Coded(
            bytes(job.header), job.codec.number, nbytes, job.extent, job.offset,
            lambda: self.staging.give(job.extent, job.offset, pages(nbytes)),
        )  # fmt: skip

    def pieces(self, blocks: Sequence[Outgoing], choice: Choice) -> Iterator[list[Outgoing]]:
        """The blocks, as many at a time as are to be encoded at once; all where none is to be."""
        piece: list[Outgoing] = []
        nbytes = 0
        for block in blocks:
            size = block.block_bytes
            if not choice.encodes(block.space, block.spec, size):
                size = 0
            if piece and nbytes + size > PIECE_BYTES:
                yield piece
                piece, nbytes = [], 0
            piece.append(block)
            nbytes += size
        if piece:
            yield piece

    def _tries(
        self, blocks: Sequence[Outgoing], codecs: Sequence[Codec], choice: Choice
    ) -> set[int]:
        """Which of these to try with all codecs: of those that are to be lossless."""
        used: Counter[bytes] = Counter()
        tried = set()
        for at, (block, codec) in enumerate(zip(blocks, codecs, strict=True)):
            if codec.lossy:
                continue
            if used[block.space] < choice.tries(block.space, block.spec, block.block_bytes):
                used[block.space] += 1
                tried.add(at)
        return tried

    def _note(self, block: Outgoing, choice: Choice, took: Took, size: int) -> None:
        choice.shrank(block.space, block.spec, took.codec, size, took.nbytes)
        self.rates.encoded(took.codec, block.spec.dtype, size, took.encode_s)
        if took.decode_s is not None:
            self.rates.decoded(took.codec, block.spec.dtype, size, took.decode_s)

    # --- reading -----------------------------------------------------------------------------

    def decode(
        self, codec: int, text: memoryview, header_bytes: int, digest: bytes, spec: KvSpec, extent: int,
        offset: int, nbytes: int, done: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Write the block of this frame to its slot; `done` is told an errno or 0."""
        into = self._view(extent, offset, nbytes)

        def work() -> float:
            began = time.perf_counter()
            framing.decode(text, header_bytes, digest, spec.dtype, into)
            return time.perf_counter() - began

        def over(future: asyncio.Future[float]) -> None:
            if future.cancelled():
                done(errno.ECANCELED)
            elif (error := future.exception()) is None:
                self.rates.decoded(codec, spec.dtype, nbytes, future.result())
                done(0)
            elif isinstance(error, FrameError):
                done(errno.EBADMSG)
            else:
                # No memory, or a bug of ours: of the frame that says nothing, and it is kept.
                log.error("cold: cannot decode a frame; keeping it", exc_info=error)
                done(errno.ENOTRECOVERABLE)

        self._beside(self._decoders, work).add_done_callback(over)

    async def close(self, timeout_s: float) -> bool:
        """Call off what has not begun, wait for what has, and end. False if something goes on, and may
        write to a slot."""
        jobs = [asyncio.wrap_future(job) for job in list(self._jobs)]
        going = asyncio.gather(*jobs, return_exceptions=True)
        self.stop()
        done, _ = await asyncio.wait([going], timeout=timeout_s)
        return bool(done)

    def stop(self) -> None:
        """Call off what has not begun, and wait for nothing."""
        for pool in (self._encoders, self._decoders):
            pool.shutdown(wait=False, cancel_futures=True)

    # --- memory ------------------------------------------------------------------------------

    def _beside(
        self, pool: ThreadPoolExecutor, work: Callable[[*Args], T], *args: *Args
    ) -> asyncio.Future[T]:
        job = pool.submit(work, *args)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return asyncio.wrap_future(job)

    def _view(self, extent: int, offset: int, nbytes: int) -> memoryview:
        return memoryview(self._mapping_of(extent))[offset : offset + nbytes]


def _started(threads: int, name: str) -> ThreadPoolExecutor:
    """An executor that has its threads: one that can't be had later fails nothing. Raises RuntimeError."""
    pool, all_here = ThreadPoolExecutor(threads, name), threading.Barrier(threads + 1)
    try:
        for _ in range(threads):
            pool.submit(all_here.wait)
        all_here.wait(START_S)
    except RuntimeError:  # no thread, or, as BrokenBarrierError, not in time
        all_here.abort()
        pool.shutdown(wait=False)
        raise
    return pool


def _kind(block: Outgoing) -> tuple[bytes, int, int, bool]:
    """What blocks of one codec have in common."""
    return block.space, block.group, block.shard, block.lossy


def _codec(block: Outgoing, choice: Choice, links: Sequence[float]) -> Codec:
    """By what a block is stored now. What a lossy codec made is stored as it is: errors would add up."""
    lossy = choice.lossy(block.space, block.spec, block.group, block.shard)
    if lossy is not None and not block.lossy:
        return lossy
    return choice.codec(block.space, block.spec, block.block_bytes, links)


def _encode_all(jobs: Sequence[Job]) -> list[tuple[int | None, list[Took]]]:
    """What each block is encoded to, the payload's bytes, or None where it stays raw; and what was
    measured."""
    return [_encode(job) for job in jobs]


def _encode(job: Job) -> tuple[int | None, list[Took]]:
    dtype, took = job.block.spec.dtype, []
    for codec in job.tries:
        if codec is not job.codec:
            took.append(
                _try(codec, dtype, bytearray(job.header), job.source, job.into, decodes=True)
            )
    if job.codec.number == RAW:
        return None, took
    if job.codec.lossy:
        one = _lose(job.codec, job.block, job.header, job.source, job.into)
    else:
        one = _try(job.codec, dtype, job.header, job.source, job.into, decodes=bool(job.tries))
    return one.nbytes, [*took, one]


def _lose(
    codec: Codec, block: Outgoing, header: bytearray, source: memoryview, into: memoryview
) -> Took:
    began = time.perf_counter()
    dtype = block.spec.dtype
    lies = grids(block.spec, block.group, ordered=isinstance(codec, Arranged))
    nbytes = framing.encode_lossy(codec, dtype, header, source, into, lies, block.position)
    return Took(codec.number, nbytes, time.perf_counter() - began)


def _try(
    codec: Codec, dtype: str, header: bytearray, source: memoryview, into: memoryview, decodes: bool
) -> Took:
    began = time.perf_counter()
    nbytes = framing.encode(codec, dtype, header, source, into)
    encoded = time.perf_counter()
    if not decodes or nbytes >= len(source):
        return Took(codec.number, nbytes, encoded - began)
    scratch = bytearray(source)
    again = time.perf_counter()
    codec.decode(into[:nbytes], framing.entries_of(header), dtype, scratch)
    # As a read does, before and after.
    xxh3_128(into[:nbytes])
    xxh3_128(scratch)
    return Took(codec.number, nbytes, encoded - began, time.perf_counter() - again)
