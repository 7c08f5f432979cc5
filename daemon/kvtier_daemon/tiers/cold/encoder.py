"""Encodes blocks in threads before they are written, and decodes frames whose codec the disks' workers do not
have (`zstd`).

An encoded block is in the encode buffer, memory of the cold tier, until it is written.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TypeVar

from kvtier.errors import FrameError
from kvtier.frame import ENCRYPTED, RAW, pages, stamp
from kvtier_daemon.codec import framing
from kvtier_daemon.codec.arranged import Arranged
from kvtier_daemon.codec.base import Codec
from kvtier_daemon.codec.choice import Choice, Rates
from kvtier_daemon.codec.encryption import FrameCipher, UnknownKeyError
from kvtier_daemon.codec.grid import grids
from kvtier_daemon.tiers.cold.coding_threads import CodingThreads, run_all
from kvtier_daemon.tiers.cold.disk import STAGED_BYTES
from kvtier_daemon.tiers.cold.frames import Decoding, Outgoing
from kvtier_kernels import Mapping, xxh3_128

log = logging.getLogger(__name__)

THREADS_MOST = 4
PIECE_BYTES = 8 << 20  # of blocks that are encoded while the previous ones are written
LOG_S = 10.0  # between messages about failures
PATIENCE_S = 6.0  # longest wait for memory: a disk that hangs keeps the memory of its writes
T = TypeVar("T")


def threads_here() -> int:
    """Return how many threads encode, or decode: half of the processors, to leave the others to engines."""
    return max(1, min(THREADS_MOST, len(os.sched_getaffinity(0)) // 2))


def decoders_here(encrypted: bool) -> int:
    """Return how many threads of each disk decode: as many as `threads_here`. One cannot decrypt as fast as a
    disk reads, so there are two for encrypted frames, except on a single processor."""
    threads = threads_here()
    return max(threads, min(2, len(os.sched_getaffinity(0)))) if encrypted else threads


@dataclass(frozen=True, slots=True)
class Encoding:
    """What a codec made of a block: the payload's size, and the times; `decode_s` only if measured."""

    codec: int
    nbytes: int
    encode_s: float
    decode_s: float | None = None


@dataclass(frozen=True, slots=True)
class Payload:
    """What is written of a block, in its pages of the buffer, and its unsealed header."""

    codec: int
    nbytes: int
    header: bytes


class EncodeBuffer:
    """The memory that blocks are encoded to, shared by all tenants, who wait for it in order.

    The disks' workers know its memory permanently, so it is allocated once and never freed. `room(nbytes)`
    allocates: it returns the number of the memory with the disks, and its size. A request that is larger than
    `most` gets memory of its own; one such request is served at a time."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        room: Callable[[int], tuple[int, int]],
        most: int = STAGED_BYTES,
    ) -> None:
        self.most = most
        self.used = 0
        self.waited = 0  # requests that found no free memory
        self.refused = 0  # requests that got none
        self._stuck = False  # a request waited in vain, and no memory was returned since
        self._loop = loop
        self._room = room
        self._holes: dict[int, dict[int, int]] = {}  # by extent: sizes by offset
        self._sizes: dict[int, int] = {}
        self._waiting: deque[tuple[int, asyncio.Future[tuple[int, int]]]] = deque()

    async def take(self, nbytes: int) -> tuple[int, int] | None:
        """Return the extent and offset of this many bytes, in whole pages, not cleared. None if no memory
        became free in time. Later requests then do not wait until some memory is returned: a disk that hangs
        may hold all of it. Raises OSError if memory cannot be allocated."""
        nbytes = pages(nbytes)
        if not self._waiting and (place := self._cut(nbytes)) is not None:
            return place
        self.waited += 1
        if self._stuck:
            self.refused += 1
            return None
        granted: asyncio.Future[tuple[int, int]] = self._loop.create_future()
        self._waiting.append((nbytes, granted))
        try:
            await asyncio.wait([granted], timeout=PATIENCE_S)
        except asyncio.CancelledError:
            if not self._leave(nbytes, granted) and not granted.exception():
                self.give(*granted.result(), nbytes)
            raise
        if self._leave(nbytes, granted):
            self.refused += 1
            self._stuck = True
            return None
        return granted.result()

    def _leave(self, nbytes: int, granted: asyncio.Future[tuple[int, int]]) -> bool:
        """Stop waiting. False if the request was already answered."""
        if granted.done():
            return False
        self._waiting.remove((nbytes, granted))
        self._serve()
        return True

    def give(self, extent: int, offset: int, nbytes: int) -> None:
        if not nbytes:
            return
        holes = self._holes[extent]
        self._stuck = False
        self.used -= nbytes
        for at, size in list(holes.items()):
            if at + size == offset:
                offset, nbytes = at, size + nbytes
                del holes[at]
            elif at == offset + nbytes:
                nbytes += size
                del holes[at]
        holes[offset] = nbytes
        self._serve()

    def _serve(self) -> None:
        """Answer requests in order: otherwise small ones would delay a large one forever."""
        while self._waiting:
            nbytes, granted = self._waiting[0]
            try:
                place = self._cut(nbytes)
            except OSError as error:
                granted.set_exception(error)
            else:
                if place is None:
                    return
                granted.set_result(place)
            self._waiting.popleft()

    def _cut(self, nbytes: int) -> tuple[int, int] | None:
        """Take memory from the smallest hole that is large enough."""
        self._allocate(nbytes)
        found = [
            (size, extent, at)
            for extent, holes in self._holes.items()
            for at, size in holes.items()
            if size >= nbytes and self._suits(self._sizes[extent], nbytes)
        ]
        if not found:
            return None
        size, extent, at = min(found)
        del self._holes[extent][at]
        if size > nbytes:
            self._holes[extent][at + nbytes] = size - nbytes
        self.used += nbytes
        return extent, at

    def _allocate(self, nbytes: int) -> None:
        """Allocate memory unless there is an extent, free or used, for requests of this size."""
        wanted = max(nbytes, self.most)
        if not any(size >= wanted for size in self._sizes.values() if self._suits(size, nbytes)):
            extent, size = self._room(wanted)
            size = size if wanted > self.most else wanted
            self._sizes[extent], self._holes[extent] = size, {0: size}

    def _suits(self, size: int, nbytes: int) -> bool:
        """Whether an extent of this size is for requests of `nbytes`: normal ones, or larger than `most`."""
        return (size > self.most) == (nbytes > self.most)


class Encoder(CodingThreads):
    """Serves all tenants. `blank(block)` returns an unsealed header for the block."""

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
        super().__init__((threads, "kvtier-encode"), (threads, "kvtier-decode"))
        self.failures = 0  # to encode; the blocks were written raw
        self._logs_at = 0.0

    # --- writing -----------------------------------------------------------------------------

    async def encode(
        self, blocks: Sequence[Outgoing], choice: Choice, links: Sequence[float],
        cipher: FrameCipher | None = None,
    ) -> list[Outgoing]:  # fmt: skip
        """Return the blocks, encoded where that pays and succeeds. The caller must call `release` of each
        when it was written, or will not be written. With `cipher` all are encrypted; those for which that
        fails are left out."""
        kinds = {_kind(block): block for block in blocks}
        chosen = {kind: _codec(block, choice, links) for kind, block in kinds.items()}
        codecs = [chosen[_kind(block)] for block in blocks]
        tried = self._tries(blocks, codecs, choice)
        todo = [
            at
            for at, codec in enumerate(codecs)
            if cipher is not None or codec.number != RAW or at in tried
        ]
        if not todo:
            return list(blocks)
        try:
            return await self._encoded(blocks, codecs, tried, todo, choice, cipher)
        except Exception:
            self.failures += 1
            if self._loop.time() >= self._logs_at:
                self._logs_at = self._loop.time() + LOG_S
                otherwise = "not written" if cipher is not None else "written raw"
                log.exception("cold: internal error while encoding blocks; they are %s", otherwise)
            return [] if cipher is not None else list(blocks)

    async def _encoded(
        self, blocks: Sequence[Outgoing], codecs: Sequence[Codec], tried: set[int],
        todo: Sequence[int], choice: Choice, cipher: FrameCipher | None,
    ) -> list[Outgoing]:  # fmt: skip
        """Encode the blocks `todo`, each to pages of its own, and release the pages that are not needed."""
        sizes = [pages(blocks[at].block_bytes) for at in todo]
        place = await self.staging.take(sum(sizes))
        if place is None:
            return [] if cipher is not None else list(blocks)
        extent, first = place
        offsets = [first + before for before in accumulate(sizes[:-1], initial=0)]
        used = [0] * len(todo)  # bytes at the start of each block's pages

        def give_back(_: object = None) -> None:
            for offset, size, front in zip(offsets, sizes, used, strict=True):
                self.staging.give(extent, offset + front, size - front)

        try:
            headers = [self._blank(blocks[at]) for at in todo]
            jobs = [
                partial(
                    _encode, blocks[at], codecs[at], header, cipher,
                    self._view(blocks[at].extent, blocks[at].offset, blocks[at].block_bytes),
                    self._view(extent, offset, blocks[at].block_bytes),
                    choice.candidates(blocks[at].spec, blocks[at].block_bytes) if at in tried else (),
                )
                for at, header, offset in zip(todo, headers, offsets, strict=True)
            ]  # fmt: skip
            encoding = self._submit(self._encoders, run_all, jobs)
        except BaseException:
            give_back()
            raise
        try:
            found = await asyncio.shield(encoding)
        except asyncio.CancelledError:
            encoding.add_done_callback(give_back)  # the thread still writes to it
            raise
        except Exception:
            give_back()
            raise
        try:
            self._note(blocks, todo, tried, found, choice)
            result = list(blocks)
            for number, (at, (_, payload)) in enumerate(zip(todo, found, strict=True)):
                if payload is None:
                    continue  # it is written raw
                nbytes, encoded_at = payload.nbytes, (extent, offsets[number])
                used[number] = pages(nbytes)
                result[at] = replace(
                    blocks[at],
                    codec=payload.codec,
                    header=payload.header,
                    payload_bytes=nbytes,
                    encoded_at=encoded_at,
                    release=partial(self.staging.give, *encoded_at, pages(nbytes)),
                )
            return result
        finally:
            give_back()

    def pieces(
        self, blocks: Sequence[Outgoing], choice: Choice, encrypted: bool = False
    ) -> Iterator[list[Outgoing]]:
        """Divide the blocks into lists that are encoded at once. Raw ones do not count, unless encrypted."""
        piece: list[Outgoing] = []
        nbytes = 0
        for block in blocks:
            size = block.block_bytes
            if not (encrypted or choice.encodes(block.space, block.spec, size)):
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
        """Return the positions of the blocks that all codecs are tried on, among the lossless ones."""
        used: Counter[bytes] = Counter()
        tried = set()
        for at, (block, codec) in enumerate(zip(blocks, codecs, strict=True)):
            if codec.lossy:
                continue
            if used[block.space] < choice.tries(block.space, block.spec, block.block_bytes):
                used[block.space] += 1
                tried.add(at)
        return tried

    def _note(
        self, blocks: Sequence[Outgoing], todo: Sequence[int], tried: set[int],
        found: Sequence[tuple[Sequence[Encoding], Payload | None]], choice: Choice,
    ) -> None:  # fmt: skip
        """Report the measured ratios and rates, and for each space how many blocks are written and tried."""
        for at, (results, _) in zip(todo, found, strict=True):
            block, size = blocks[at], blocks[at].block_bytes
            for each in results:
                choice.shrank(block.space, block.spec, each.codec, size, each.nbytes)
                self.rates.encoded(each.codec, block.spec.dtype, size, each.encode_s)
                if each.decode_s is not None:
                    self.rates.decoded(each.codec, block.spec.dtype, size, each.decode_s)
        for block in {block.space: block for block in blocks}.values():
            of_space = [at for at, each in enumerate(blocks) if each.space == block.space]
            choice.wrote(
                block.space, block.spec, len(of_space), sum(at in tried for at in of_space)
            )

    # --- reading -----------------------------------------------------------------------------

    def decode(
        self, how: Decoding, text: memoryview, header_bytes: int, digest: bytes, extent: int, offset: int,
        done: Callable[[int, bytes], None],
    ) -> None:  # fmt: skip
        """Decode this frame into its slot; `done` gets an errno or 0, and the block's checksum."""
        into, dtype = self._view(extent, offset, how.block_bytes), how.spec.dtype

        def work() -> tuple[bytes, float]:
            began = time.perf_counter()
            found = framing.decode(text, header_bytes, digest, dtype, into, how.cipher, how.name)
            return found, time.perf_counter() - began

        def decoded(future: asyncio.Future[tuple[bytes, float]]) -> None:
            if future.cancelled():
                done(errno.ECANCELED, b"")
            elif (error := future.exception()) is None:
                number, (checksum, seconds) = how.codec & ~ENCRYPTED, future.result()
                self.rates.decoded(number, dtype, how.block_bytes, seconds)
                done(0, checksum)
            elif isinstance(error, UnknownKeyError):
                done(errno.ENOKEY, b"")
            elif isinstance(error, FrameError):
                done(errno.EBADMSG, b"")
            else:
                # Out of memory, or a bug: the frame may be good.
                log.error("cold: cannot decode a frame; keeping it", exc_info=error)
                done(errno.ENOTRECOVERABLE, b"")

        self._submit(self._decoders, work).add_done_callback(decoded)

    # --- memory ------------------------------------------------------------------------------

    def _view(self, extent: int, offset: int, nbytes: int) -> memoryview:
        return memoryview(self._mapping_of(extent))[offset : offset + nbytes]


def _kind(block: Outgoing) -> tuple[bytes, int, int, bool]:
    """Return the properties that determine a block's codec."""
    return block.space, block.group, block.shard, block.lossy


def _codec(block: Outgoing, choice: Choice, links: Sequence[float]) -> Codec:
    """Return the codec for a block. A block from a lossy codec is encoded lossless: errors would add up."""
    lossy = choice.lossy(block.space, block.spec, block.group, block.shard)
    if lossy is not None and not block.lossy:
        return lossy
    return choice.codec(block.space, block.spec, block.block_bytes, links)


def _encode(
    block: Outgoing, codec: Codec, header: bytearray, cipher: FrameCipher | None, source: memoryview,
    into: memoryview, tries: Sequence[Codec],
) -> tuple[list[Encoding], Payload | None]:  # fmt: skip
    """Encode the block with `codec`, unless that is raw, after trying the other codecs; then encrypt it.
    Return the results, and what is written; None if that is the block itself."""
    dtype, results, blank = block.spec.dtype, list[Encoding](), bytes(header)
    for each in tries:
        if each is not codec:
            results.append(_try(each, dtype, bytearray(header), source, into, decodes=True))
    if codec.lossy:
        results.append(_lose(codec, block, header, source, into))
    elif codec.number != RAW:
        results.append(_try(codec, dtype, header, source, into, decodes=bool(tries)))
    number, payload = codec.number, into
    if number != RAW and pages(results[-1].nbytes) < pages(block.block_bytes):
        payload = into[: results[-1].nbytes]
    elif cipher is not None:
        header[:], number, payload = blank, RAW, source
    else:
        return results, None
    if cipher is not None:
        stamp(header, block.key, block.parent, 0, 0)
        cipher.encrypt(header, payload, into)
        number |= ENCRYPTED
    return results, Payload(number, len(payload), bytes(header))


def _lose(
    codec: Codec, block: Outgoing, header: bytearray, source: memoryview, into: memoryview
) -> Encoding:
    began = time.perf_counter()
    dtype = block.spec.dtype
    parts = grids(block.spec, block.group, ordered=isinstance(codec, Arranged))
    nbytes = framing.encode_lossy(codec, dtype, header, source, into, parts, block.position)
    return Encoding(codec.number, nbytes, time.perf_counter() - began)


def _try(
    codec: Codec, dtype: str, header: bytearray, source: memoryview, into: memoryview, decodes: bool
) -> Encoding:
    began = time.perf_counter()
    nbytes = framing.encode(codec, dtype, header, source, into)
    encoded = time.perf_counter()
    if not decodes or nbytes >= len(source):
        return Encoding(codec.number, nbytes, encoded - began)
    scratch = bytearray(source)
    again = time.perf_counter()
    codec.decode(into[:nbytes], framing.entries_of(header), dtype, scratch)
    # A read verifies both digests.
    xxh3_128(into[:nbytes])
    xxh3_128(scratch)
    return Encoding(codec.number, nbytes, encoded - began, time.perf_counter() - again)
