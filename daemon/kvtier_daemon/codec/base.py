"""The interface of a codec, and how encoded parts become entries of a frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvtier.errors import FrameError
from kvtier.frame import ELEMENTS, RAW, Entry
from kvtier_kernels import Recipe, decode_parts

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Codec:
    """How blocks are stored. The kernels encode and decode the frames of a `native` codec; another codec has
    its own `encode` and `decode`. Has no state between calls, so all threads may call it; long work runs
    without the GIL. A lossless codec treats a part as a row of elements and needs no layout: an opaque block
    is one part. A lossy codec works on channels: it needs the grids of the parts, and stores parts without a
    grid raw. Never encode what a lossy codec decoded with a lossy codec again: the errors would add up."""

    name: str
    number: int  # in frames
    lossy = False
    native = True  # a disk's workers decode what they read
    # How the kernels encode and decode whole frames, if the codec is lossy.
    recipe: Recipe | None = None

    def encode(
        self, block: Buffer, parts: Sequence[Entry], dtype: str, into: Buffer
    ) -> tuple[Entry, ...]:
        """Write the encoded parts consecutively to the front of `into`, which is as large as the block.
        `parts` make up the block in order (`block_parts.entries`). Returns their entries without digests;
        the last entry shows where the payload ends. A part that does not shrink is stored raw."""
        raise NotImplementedError

    def decode(self, payload: Buffer, entries: Sequence[Entry], dtype: str, into: Buffer) -> None:
        """Write the decoded bytes of these entries (one, some or all) consecutively to the front of `into`.
        Raises FrameError if an entry is damaged; the content of `into` is then undefined. Does not compare
        digests: the caller must do that."""
        raise NotImplementedError


class Native(Codec):
    """A codec of the kernels. A lossy one returns elements of the same type, identical on every processor."""

    def __init__(self, name: str, number: int, *, lossy: bool = False) -> None:
        self.name = name
        self.number = number
        self.lossy = lossy
        self.recipe = Recipe.by_grids(number) if lossy else None

    def decode(self, payload: Buffer, entries: Sequence[Entry], dtype: str, into: Buffer) -> None:
        expect(entries, self.number)
        places = [(one.codec, one.offset, one.nbytes, one.raw_bytes) for one in entries]
        sound = decode_parts(ELEMENTS.get(dtype, 0), payload, places, into)
        if sound != len(entries):
            raise damaged(entries[sound], self.name)


def placed(parts: Sequence[Entry], found: Iterable[tuple[int, int]]) -> tuple[Entry, ...]:
    """Return the entries of parts that were encoded consecutively."""
    entries, at = [], 0
    for part, (codec, nbytes) in zip(parts, found, strict=True):
        entries.append(Entry(part.layer, part.part, codec, at, nbytes, part.raw_bytes))
        at += nbytes
    return tuple(entries)


def expect(entries: Sequence[Entry], number: int) -> None:
    """Raise FrameError if an entry has another codec. Raw entries are always accepted."""
    for entry in entries:
        if entry.codec not in (RAW, number):
            raise FrameError(
                f"layer {entry.layer}, part {entry.part}: codec is {entry.codec}, expected {number}"
            )


def damaged(entry: Entry, name: str) -> FrameError:
    return FrameError(f"layer {entry.layer}, part {entry.part}: {name}: encoded data is damaged")
