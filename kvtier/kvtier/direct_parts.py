"""Read parts of blocks on disk from their frames: the pages of the header and of the entries that are needed.

    header ──▶ which block is it, in this use of the file?
    entries ─▶ digest of each ──▶ decoded ──▶ the bytes that were chosen

The digests cover the entries as they are on disk. That of the whole block is not compared. A block counts
only if the daemon confirms after the read that it is still stored.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from kvtier.direct import DirectFrame, OpenSpace, codecs_for, is_decodable, read_directly
from kvtier.errors import FrameError
from kvtier.frame import ELEMENTS, PAGE, RAW, Entry, pages
from kvtier.key import Keys
from kvtier.layout import KvSpec
from kvtier.parts import Chosen
from kvtier.read_file import read_whole
from kvtier.wire import LIMIT_DIRECT_BLOCKS
from kvtier_kernels import decode_parts, xxh3_128

READERS = 8  # threads, which wait for the disk
BATCH_BYTES = 64 << 20  # of chosen bytes, in memory until the daemon has confirmed their blocks
GAP_BYTES = (
    64 << 10
)  # fewer unneeded bytes between two entries are read, as that is faster than another read


class Needed(NamedTuple):
    """An entry, and the place in the block of its first byte."""

    entry: Entry
    at: int


class Decoded(NamedTuple):
    """The bytes of a block from the place `at` on."""

    at: int
    text: memoryview


def read_parts(
    space: OpenSpace, spec: KvSpec, keys: Keys, chosen: Chosen, group: int, shard: int, first: int,
    deadline_ms: int,
) -> list[bytearray]:  # fmt: skip
    """Read the chosen bytes of blocks that are only on disk, from the key `first` on, without a gap and at
    most as many as fit a batch. Return those that were verified and are still stored: none if the block
    `first` is in memory, or if its frame is one that only the daemon can read. Raises Refused if the
    tenant's configuration does not permit direct reads."""
    most = max(1, min(LIMIT_DIRECT_BLOCKS, BATCH_BYTES // chosen.nbytes))
    lease = read_directly(space, keys, codecs_for(spec), group, shard, deadline_ms, first, most)
    frames = [frame for number, frame in enumerate(lease.frames) if frame.at == first + number]
    element = ELEMENTS.get(spec.dtype, 0)

    def read(frame: DirectFrame) -> bytearray | None:
        return read_part(frame, chosen, element)

    if len(frames) > 1:
        with ThreadPoolExecutor(min(READERS, len(frames)), "kvtier-parts") as threads:
            found = list(threads.map(read, frames))
    else:
        found = [read(frame) for frame in frames]
    sound = [part is not None for part in found]
    sound += [False] * (len(lease.frames) - len(frames))
    valid = lease.end(sound, (chosen.tokens, chosen.nbytes)) if lease.frames else []
    parts = []
    for part, is_valid in zip(found, valid, strict=False):
        if part is None or not is_valid:
            break
        parts.append(part)
    return parts


def read_part(frame: DirectFrame, chosen: Chosen, element: int) -> bytearray | None:
    """Return the chosen bytes of the block of this frame, or None if it is damaged or another one."""
    if not frame.is_inside or (text := _read(frame, 0, frame.header_bytes)) is None:
        return None
    try:
        header = frame.verify(bytes(text), chosen.block_bytes)
    except FrameError:
        return None
    if not is_decodable(header):
        return None
    decoded: list[Decoded] = []
    for run in _runs(_needed(header.entries, chosen)):
        first = run[0].entry.offset // PAGE * PAGE
        size = pages(run[-1].entry.offset + run[-1].entry.nbytes) - first
        payload = _read(frame, frame.header_bytes + first, size)
        if payload is None:
            return None
        for entry, at in run:
            start = entry.offset - first
            text = _decode(entry, payload[start : start + entry.nbytes], element)
            if text is None:
                return None
            decoded.append(Decoded(at, text))
    return _assembled(decoded, chosen)


def _read(frame: DirectFrame, at: int, nbytes: int) -> memoryview | None:
    # Anonymous memory, because reads without the page cache need whole pages of memory.
    memory = memoryview(mmap.mmap(-1, nbytes))
    return memory if read_whole(frame.file, memory, frame.header_at + at) else None


def _needed(entries: Sequence[Entry], chosen: Chosen) -> list[Needed]:
    """Return the entries that contain chosen bytes, in their order."""
    needed, at = [], 0
    for entry in entries:
        end = at + entry.raw_bytes
        if any(start < end and at < start + chosen.each for start in chosen.starts):
            needed.append(Needed(entry, at))
        at = end
    return needed


def _runs(needed: Sequence[Needed]) -> list[list[Needed]]:
    """Divide the entries into those that one read gets together."""
    runs: list[list[Needed]] = []
    for one in needed:
        last = runs[-1][-1].entry if runs else None
        if last is not None and one.entry.offset - last.offset - last.nbytes <= GAP_BYTES:
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def _decode(entry: Entry, payload: memoryview, element: int) -> memoryview | None:
    if xxh3_128(payload) != entry.digest:
        return None
    if entry.codec == RAW:
        return payload
    into = bytearray(entry.raw_bytes)
    places = [(entry.codec, 0, entry.nbytes, entry.raw_bytes)]
    return memoryview(into) if decode_parts(element, payload, places, into) == 1 else None


def _assembled(decoded: Sequence[Decoded], chosen: Chosen) -> bytearray:
    part, done = bytearray(chosen.nbytes), 0
    for start in chosen.starts:
        for at, text in decoded:
            low, high = max(start, at), min(start + chosen.each, at + len(text))
            if low < high:
                place = done + low - start
                part[place : place + high - low] = text[low - at : high - at]
        done += chosen.each
    return part
