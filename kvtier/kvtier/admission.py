"""Which blocks are worth a write to the disk, where writes are scarce.

While there is budget enough, all are. Below that only those that were wanted twice: saved and found again, or
saved again after they had gone (TinyLFU's doorkeeper; Einziger, Friedman and Manes, ACM ToS 2017). Nothing is
dropped here: who is not admitted stays in memory until it is evicted, and is counted then.
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
    """Of one tenant. Off, it admits everything and remembers nothing. Another judge, such as a policy that
    knows what a block is worth, takes the place of `admitted`."""

    def __init__(self) -> None:
        self.shut = False  # only what was wanted again is admitted
        self._notes: Notes | None = None

    @property
    def is_on(self) -> bool:
        return self._notes is not None

    def turn_on(self) -> None:
        """Remember what is wanted from now on."""
        if self._notes is None:
            self._notes = Notes(NOTES_BYTES)

    def memory_bytes(self) -> int:
        return self._notes.memory_bytes() if self._notes is not None else 0

    def saved(self, keys: bytes) -> None:
        """These were committed."""
        self._wanted(keys)

    def found(self, keys: bytes) -> None:
        """A request found these."""
        self._wanted(keys)

    def _wanted(self, keys: bytes) -> None:
        if self._notes is not None:
            self._notes.note(keys, ONCE, 0, bytes([ONCE, ONCE | AGAIN]), AGAIN)

    def admitted(self, keys: bytes) -> bytes:
        """A byte for each: whether it was wanted again."""
        if self._notes is None:
            return b"\1" * (len(keys) // KEY_BYTES)
        return self._notes.codes(keys).translate(AGAIN_OF)

    def filter(self, ids: bytes, keys_of: Callable[[bytes], bytes]) -> bytes:
        """Those of these blocks that may be written now."""
        if not self.shut or not ids:
            return ids
        return array("I", compress(array("I", ids), self.admitted(keys_of(ids)))).tobytes()
