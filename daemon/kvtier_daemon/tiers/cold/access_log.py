"""The frames of a directory whose blocks were requested since their write, in its index: these blocks are
copied when their segment is reclaimed, also after a restart. A lost record costs no more than that copy.

Key:    epoch of the segment u64 │ number of the piece u32; big-endian
Value:  pages of frames, u32 each, little-endian, in the order of the requests

All pieces of a segment but the last are full, so a new access changes one piece.
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
class Accesses:
    """The accessed pages of one segment; the first `written` of them are in the index."""

    pages: array[int] = field(default_factory=lambda: array("I"))
    written: int = 0


class AccessLog:
    """Segments are named by their epochs. Only `load` waits for the disk."""

    def __init__(self, index: Index | IndexProcess) -> None:
        self._index = index
        self._accesses: dict[int, Accesses] = {}  # by epoch
        self._changed: dict[int, None] = {}  # epochs, in the order of their changes

    def load(self) -> None:
        """Read the records of the index, and drop those that do not fit together."""
        pieces: dict[int, dict[int, bytes]] = {}
        for key, text in self._index.entries(TABLE):
            if len(key) == KEY.size:
                epoch, number = KEY.unpack(key)
                pieces.setdefault(epoch, {})[number] = text
            else:
                self._index.drop(TABLE, key)
        for epoch, texts in pieces.items():
            accesses = self._accesses[epoch] = Accesses()
            for number, text in sorted(texts.items()):
                full = len(accesses.pages) == number * PIECE
                if full and len(text) % PAGE_BYTES == 0 and len(text) <= PIECE * PAGE_BYTES:
                    accesses.pages.frombytes(text)
                else:
                    self._index.drop(TABLE, KEY.pack(epoch, number))
            accesses.written = len(accesses.pages)

    def pages(self, epoch: int) -> bytes:
        """Return the pages of a segment's accessed frames, 4 bytes each, in ascending order."""
        accesses = self._accesses.get(epoch)
        return array("I", sorted(accesses.pages)).tobytes() if accesses is not None else b""

    def add(self, epoch: int) -> array[int]:
        """Return the array to which the pages of newly accessed frames of this segment are to be appended."""
        self._changed[epoch] = None
        return self._accesses.setdefault(epoch, Accesses()).pages

    def write(self, limit: int) -> int:
        """Put up to `limit` changed pieces into the index; return their number."""
        count = 0
        while self._changed and count < limit:
            epoch = next(iter(self._changed))
            accesses = self._accesses[epoch]
            number = accesses.written // PIECE
            text = accesses.pages[number * PIECE : (number + 1) * PIECE].tobytes()
            self._index.put(TABLE, KEY.pack(epoch, number), text)
            accesses.written = min(len(accesses.pages), (number + 1) * PIECE)
            if accesses.written == len(accesses.pages):
                del self._changed[epoch]
            count += 1
        return count

    def drop(self, epoch: int) -> None:
        """Forget the accesses of a segment that is reclaimed."""
        self._changed.pop(epoch, None)
        accesses = self._accesses.pop(epoch, None)
        for number in range(-(-accesses.written // PIECE) if accesses is not None else 0):
            self._index.drop(TABLE, KEY.pack(epoch, number))

    def keep_only(self, epochs: Collection[int]) -> None:
        for epoch in set(self._accesses) - set(epochs):
            self.drop(epoch)
