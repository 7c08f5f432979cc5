"""What a codec is, what it is told of a block, and how its parts become entries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from kvtier.codec.frame import RAW, ZERO_DIGEST, Entry
from kvtier.codec.grid import Grid
from kvtier.errors import FrameError
from kvtier_kernels import Recipe, decode_parts, encode_parts

if TYPE_CHECKING:
    from typing_extensions import Buffer

FIX4, R32, ZSTD, Q8, Q4, Q2, ECSQ, CACHEGEN, FP8 = 1, 2, 3, 4, 5, 6, 7, 8, 9
# As the kernels number them; other types have no exponent to encode.
ELEMENTS = {
    "bfloat16": 0,
    "float16": 1,
    "float32": 2,
    "float8_e4m3fn": 3,
    "float8_e5m2": 4,
}


class Codec(Protocol):
    """Turns the parts of a block into a payload, and entries of a payload back. Keeps nothing between calls,
    so any thread may call it; long work is done without the GIL. A lossless one sees a part as a row of
    elements and needs no more of its layout: an opaque block is one part. A lossy one looks at channels: it
    needs the parts' grids, and leaves raw what has none. What a lossy one decoded is never to be encoded by a
    lossy one again: its errors would add up."""

    @property
    def name(self) -> str: ...
    @property
    def number(self) -> int:
        """How frames name it."""

    @property
    def lossy(self) -> bool: ...
    @property
    def profile(self) -> bytes:
        """The name of the one that it was made for; zeros where it needs none."""

    @property
    def recipe(self) -> Recipe | None:
        """How the kernels make and read whole frames of it, where it is lossy."""

    def bound(self, nbytes: int) -> int:
        """The most that a block of so many bytes takes."""

    def encode(
        self,
        block: Buffer,
        parts: Sequence[Entry],
        dtype: str,
        into: Buffer,
        grids: Sequence[Grid] = (),
        position: int = 0,
    ) -> tuple[Entry, ...]:
        """Writes the parts, which make up the block in their order (`raw.entries`), one after the other to
        the front of `into`, which has room for the bound. Returns their entries, the last of which says where
        the payload ends; their digests are still to come. A part that does not shrink is raw. Grids, if
        there are any, are one for each part; `position` is the first token's, where that is known: of a
        wrong one K costs more bits."""

    def decode(self, payload: Buffer, entries: Sequence[Entry], dtype: str, into: Buffer) -> None:
        """Writes what these entries hold, one, some or all, one after the other to the front of `into`.
        Raises FrameError where one is damaged; then what lies in `into` means nothing. Bytes that can't be
        told from other sound ones pass: the entries' digests are the caller's to check."""


class Native:
    """A codec of the kernels. What comes back from a lossy one is of the same type, and the same on every
    processor."""

    profile = ZERO_DIGEST

    def __init__(self, name: str, number: int, *, lossy: bool = False) -> None:
        self.name = name
        self.number = number
        self.lossy = lossy
        self.recipe = Recipe.by_grids(number) if lossy else None

    def bound(self, nbytes: int) -> int:
        return nbytes

    def encode(
        self,
        block: Buffer,
        parts: Sequence[Entry],
        dtype: str,
        into: Buffer,
        grids: Sequence[Grid] = (),
        position: int = 0,
    ) -> tuple[Entry, ...]:
        number = self.number if dtype in ELEMENTS else RAW
        sizes = [part.raw_bytes for part in parts]
        lies = [(one.rows, one.channels, one.head, one.by_token) for one in grids]
        found = encode_parts(number, ELEMENTS.get(dtype, 0), block, sizes, into, lies)
        return placed(parts, found)

    def decode(self, payload: Buffer, entries: Sequence[Entry], dtype: str, into: Buffer) -> None:
        expect(entries, self.number)
        places = [(one.codec, one.offset, one.nbytes, one.raw_bytes) for one in entries]
        sound = decode_parts(ELEMENTS.get(dtype, 0), payload, places, into)
        if sound != len(entries):
            raise damaged(entries[sound], self.name)


def placed(parts: Sequence[Entry], found: Iterable[tuple[int, int]]) -> tuple[Entry, ...]:
    """The entries of parts that were encoded so, one after the other."""
    entries, at = [], 0
    for part, (codec, nbytes) in zip(parts, found, strict=True):
        entries.append(Entry(part.layer, part.part, codec, at, nbytes, part.raw_bytes))
        at += nbytes
    return tuple(entries)


def expect(entries: Sequence[Entry], number: int) -> None:
    """Raises FrameError if one of them is by another codec; raw ones are anybody's."""
    for entry in entries:
        if entry.codec not in (RAW, number):
            raise FrameError(
                f"layer {entry.layer}, part {entry.part}: codec {entry.codec}, not {number}"
            )


def damaged(entry: Entry, name: str) -> FrameError:
    return FrameError(f"layer {entry.layer}, part {entry.part}: {name}: not what was encoded")
