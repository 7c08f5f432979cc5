"""Which blocks are worth a write to the disk, where writes are scarce.

While the write budget suffices, all blocks are. Otherwise only those that were requested twice: saved and
found again, or saved again after eviction (TinyLFU's doorkeeper; Einziger, Friedman and Manes, ACM ToS 2017).
A block that is not admitted stays in memory until it is evicted, and is counted at that time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import compress

from kvtier.key import KEY_BYTES
from kvtier_kernels import Notes

NOTES_BYTES = 4 << 20  # 16 bytes a block
ONCE, AGAIN = 1, 2
AGAIN_OF = bytes(code == ONCE | AGAIN for code in range(256))


class Admission:
    """Of one tenant. Off, it admits all blocks and remembers none."""

    def __init__(self) -> None:
        self.strict = False  # admit only blocks that were requested twice
        self.is_on = False
        self._notes: Notes | None = None

    def turn_on(self) -> None:
        """Remember requested blocks from now on."""
        if self._notes is None:
            self._notes = Notes(NOTES_BYTES)
            self.is_on = True

    def memory_bytes(self) -> int:
        return self._notes.memory_bytes() if self._notes is not None else 0

    def note(self, keys: bytes) -> None:
        """These blocks were saved, or a request found them."""
        if self._notes is not None:
            self._notes.note(keys, ONCE, 0, bytes([ONCE, ONCE | AGAIN]), AGAIN)

    def admitted(self, keys: bytes) -> bytes:
        """A byte per block: whether it was requested twice."""
        if self._notes is None:
            return b"\1" * (len(keys) // KEY_BYTES)
        return self._notes.codes(keys).translate(AGAIN_OF)

    def filter(self, ids: bytes, keys_of: Callable[[bytes], bytes]) -> bytes:
        """The blocks of these that may be written now."""
        if not self.strict or not ids:
            return ids
        return array("I", compress(array("I", ids), self.admitted(keys_of(ids)))).tobytes()
