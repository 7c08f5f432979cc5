"""What is on disk, and is computed again all the same, as that is sooner.

It can't come back into memory by the save that follows, which finds it on disk. So what is beaten again is
brought with what the disk has to spare, while nobody waits for it: the next one who asks finds it in memory.
"""

from __future__ import annotations

from kvtier.key import KEY_BYTES
from kvtier_kernels import Notes

NOTES_BYTES = 1 << 20  # 16 a block
LIMIT_BLOCKS = 2048  # being read, beyond which nothing is brought so
LIMIT_BYTES = 1 << 28
LEAST_BLOCKS = 16  # or so many
BEATEN = 1


class Beaten:
    """Of one tenant. What was beaten once is noted, and no more: most of that is not asked for again."""

    def __init__(self) -> None:
        self._notes = Notes(NOTES_BYTES)

    def again(self, keys: bytes) -> int:
        """Computing these blocks has beaten reading them; of how many leading ones it had before."""
        before = self._notes.codes(keys)
        self._notes.note(keys, BEATEN, 0)
        first = before.find(0)
        return first if first >= 0 else len(keys) // KEY_BYTES

    def memory_bytes(self) -> int:
        return self._notes.memory_bytes()


def may_bring(block_bytes: int, reading: int) -> int:
    """How many blocks may be brought so, where so many are being read."""
    return max(0, min(LIMIT_BLOCKS, max(LIMIT_BYTES // block_bytes, LEAST_BLOCKS)) - reading)
