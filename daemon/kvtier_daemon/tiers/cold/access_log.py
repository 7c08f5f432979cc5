"""Which frames of a directory were wanted since they were written, kept in its index: what is, gets a second
chance when its segment is used again, after a restart too. Only a hint.

Key:    epoch of the segment u64 │ number of the piece u32; big-endian
Value:  pages of frames, u32 each, little-endian, in the order in which they became wanted

All pieces of a segment but the last are full. So what is new changes one piece, of a page of the index.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from kvtier_daemon.tiers.cold.index import Index
from kvtier_daemon.tiers.cold.index_process import IndexProcess

KEY: Final = struct.Struct(">QI")
TABLE: Final = b"segments"
PIECE: Final = 1000
PAGE_BYTES: Final = 4


@dataclass(slots=True)
class Wanted:
    """Of one segment. So many of the pages are in the index."""

    pages: array[int] = field(default_factory=lambda: array("I"))
    written: int = 0


class AccessLog:
    """Segments are named by their epochs. Only `load` waits for the disk."""

    def __init__(self, index: Index | IndexProcess) -> None:
        self._index = index
        self._of: dict[int, Wanted] = {}
        self._changed: dict[int, None] = {}  # epochs, in the order of their changes

    def load(self) -> None:
        """Read what the index has. What is not as it was written there is dropped."""
        pieces: dict[int, dict[int, bytes]] = {}
        for key, text in self._index.entries(TABLE):
            if len(key) == KEY.size:
                epoch, number = KEY.unpack(key)
                pieces.setdefault(epoch, {})[number] = text
            else:
                self._index.drop(TABLE, key)
        for epoch, texts in pieces.items():
            one = self._of[epoch] = Wanted()
            for number, text in sorted(texts.items()):
                full = len(one.pages) == number * PIECE
                if full and len(text) % PAGE_BYTES == 0 and len(text) <= PIECE * PAGE_BYTES:
                    one.pages.frombytes(text)
                else:
                    self._index.drop(TABLE, KEY.pack(epoch, number))
            one.written = len(one.pages)

    def pages(self, epoch: int) -> bytes:
        """The pages of a segment's frames that were wanted, 4 bytes each, in ascending order."""
        one = self._of.get(epoch)
        return array("I", sorted(one.pages)).tobytes() if one is not None else b""

    def add(self, epoch: int) -> array[int]:
        """Where to note the pages of frames of this segment that are wanted now."""
        self._changed[epoch] = None
        return self._of.setdefault(epoch, Wanted()).pages

    def write(self, limit: int) -> int:
        """Give so many changed pieces to the index, at most; how many there were."""
        count = 0
        while self._changed and count < limit:
            epoch = next(iter(self._changed))
            one = self._of[epoch]
            number = one.written // PIECE
            text = one.pages[number * PIECE : (number + 1) * PIECE].tobytes()
            self._index.put(TABLE, KEY.pack(epoch, number), text)
            one.written = min(len(one.pages), (number + 1) * PIECE)
            if one.written == len(one.pages):
                del self._changed[epoch]
            count += 1
        return count

    def drop(self, epoch: int) -> None:
        """The segment is used again."""
        self._changed.pop(epoch, None)
        one = self._of.pop(epoch, None)
        for number in range(-(-one.written // PIECE) if one is not None else 0):
            self._index.drop(TABLE, KEY.pack(epoch, number))

    def keep_only(self, epochs: Collection[int]) -> None:
        """There are no other segments."""
        for epoch in set(self._of) - set(epochs):
            self.drop(epoch)
