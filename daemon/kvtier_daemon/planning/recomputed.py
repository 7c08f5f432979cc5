"""Blocks that are on disk and were recomputed because that is faster.

The save that follows cannot bring such blocks into memory, because it finds them on disk. Blocks that are
recomputed a second time are therefore prefetched, so that the next request finds them in memory.
"""

from __future__ import annotations

from kvtier.key import KEY_BYTES
from kvtier_kernels import Notes

NOTES_BYTES = 1 << 20  # 16 per block
LIMIT_BLOCKS = 2048  # being read: above this, nothing is prefetched for this reason
LIMIT_BYTES = 1 << 28
LEAST_BLOCKS = 16  # allowed even if they exceed LIMIT_BYTES
RECOMPUTED = 1


class RecomputedBlocks:
    """Of one tenant. The first time is only noted: most of these blocks are not requested again."""

    def __init__(self) -> None:
        self._notes = Notes(NOTES_BYTES)

    def note(self, keys: bytes) -> int:
        """Note that these blocks are recomputed; return how many leading ones were noted before."""
        before = self._notes.codes(keys)
        self._notes.note(keys, RECOMPUTED, 0)
        first = before.find(0)
        return first if first >= 0 else len(keys) // KEY_BYTES

    def memory_bytes(self) -> int:
        return self._notes.memory_bytes()


def prefetch_limit(block_bytes: int, reading: int) -> int:
    """How many recomputed blocks may be prefetched while this many are being read."""
    return max(0, min(LIMIT_BLOCKS, max(LIMIT_BYTES // block_bytes, LEAST_BLOCKS)) - reading)
