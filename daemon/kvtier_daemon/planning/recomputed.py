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
TRIAL_BLOCKS = 16  # the first credit
RETURN_BLOCKS = 8  # for each prefetched block that a client used
RETRY = 1 / 64  # for each block that was not prefetched for lack of credit
RECOMPUTED = 1


class RecomputedBlocks:
    """Of one tenant. The first time is only noted: most of these blocks are not requested again.

    A prefetched block can be evicted before it is used. So each one costs a block of a credit, and its use
    returns several: prefetches end soon if they are useless, and are tried again rarely."""

    def __init__(self) -> None:
        self._notes = Notes(NOTES_BYTES)
        self._credit: float = TRIAL_BLOCKS
        self._used = 0

    def note(self, keys: bytes) -> int:
        """Note that these blocks are recomputed; return how many leading ones were noted before."""
        before = self._notes.codes(keys)
        self._notes.note(keys, RECOMPUTED, 0)
        first = before.find(0)
        return first if first >= 0 else len(keys) // KEY_BYTES

    def used(self, blocks: int) -> None:
        """Clients have used this many prefetched blocks so far."""
        self._credit = min(LIMIT_BLOCKS, self._credit + RETURN_BLOCKS * (blocks - self._used))
        self._used = blocks

    def allowed(self, blocks: int) -> int:
        """How many of these blocks the credit allows to prefetch."""
        allowed = min(blocks, max(0, int(self._credit)))
        if self._credit < TRIAL_BLOCKS:
            self._credit = min(TRIAL_BLOCKS, self._credit + (blocks - allowed) * RETRY)
        return allowed

    def began(self, blocks: int) -> None:
        """This many blocks are being prefetched."""
        self._credit -= blocks

    def memory_bytes(self) -> int:
        return self._notes.memory_bytes()


def prefetch_limit(block_bytes: int, reading: int) -> int:
    """How many recomputed blocks may be prefetched while this many are being read."""
    return max(0, min(LIMIT_BLOCKS, max(LIMIT_BYTES // block_bytes, LEAST_BLOCKS)) - reading)
