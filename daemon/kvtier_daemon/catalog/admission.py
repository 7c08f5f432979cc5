"""Which blocks are worth a write to the disk, where writes are scarce.

While the write budget suffices, all blocks are. Otherwise only those that were requested twice: saved and
found again, or saved again after eviction (TinyLFU's doorkeeper; Einziger, Friedman and Manes, ACM ToS 2017).
A block that is not admitted stays in memory until it is evicted, and is counted at that time.

Blocks that an engine calls important are worth a write too, and one more when their segment is reused. Blocks
of no importance (0) are not copied then, unless a request found them after the hint. Other hints change
nothing here: a block that was requested twice is used by others.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from itertools import compress
from operator import and_, or_

from kvtier.key import KEY_BYTES
from kvtier_kernels import Notes

NOTES_BYTES = 4 << 20  # 16 bytes a block
ONCE, AGAIN = 1, 2
AGAIN_OF = bytes(code == ONCE | AGAIN for code in range(256))
OTHER, MUCH, NONE = 1, 2, 3  # hints

MUCH_OF = bytes(code == MUCH for code in range(256))
SOME_OF = bytes(code != NONE for code in range(256))


class Admission:
    """Of one tenant. Off, it admits all blocks and remembers none."""

    def __init__(self) -> None:
        self.strict = False  # admit only blocks that were requested twice
        self.is_on = False
        self._notes: Notes | None = None
        self._hints: Notes | None = None

    def turn_on(self) -> None:
        """Remember requested blocks from now on."""
        if self._notes is None:
            self._notes = Notes(NOTES_BYTES)
            self.is_on = True

    def memory_bytes(self) -> int:
        return sum(one.memory_bytes() for one in (self._notes, self._hints) if one is not None)

    def found(self, keys: bytes, blocks: int) -> None:
        """A request found this many blocks of its keys. That ends hints of no importance."""
        if self._notes is None and self._hints is None:
            return
        keys = keys[: blocks * KEY_BYTES]
        self.note(keys)
        if self._hints is not None and NONE in (codes := self._hints.codes(keys)):
            self._end_hints(keys, (code == NONE for code in codes))

    def _end_hints(self, keys: bytes, which: Iterable[int]) -> None:
        assert self._hints is not None
        names = (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
        self._hints.note(b"".join(compress(names, which)), OTHER, 0)

    def note(self, keys: bytes) -> None:
        """These blocks were saved, or a request found them."""
        if self._notes is not None:
            self._notes.note(keys, ONCE, 0, bytes([ONCE, ONCE | AGAIN]), AGAIN)

    def admitted(self, keys: bytes) -> bytes:
        """A byte per block: whether it was requested twice."""
        if self._notes is None:
            return b"\1" * (len(keys) // KEY_BYTES)
        again = self._notes.codes(keys).translate(AGAIN_OF)
        return again if self._hints is None else _with_much(self._hints.codes(keys), again)

    def hint(self, keys: bytes, importance: float) -> None:
        """An engine reported the importance of these blocks, from 0 to 1."""
        if self._hints is None:
            self._hints = Notes(NOTES_BYTES)
        code = NONE if importance <= 0 else OTHER if importance < 2 / 3 else MUCH
        self._hints.note(keys, code, 0)

    def worth_copying(self, ids: bytes, used: bytes, keys_of: Callable[[bytes], bytes]) -> bytes:
        """Which of these blocks to copy when their segment is reused: a byte per block, as in `used`, which
        says if it was requested. A hint of much importance counts for one such copy, and one of no importance
        (0) for none."""
        if self._hints is None or not ids:
            return used
        keys = keys_of(ids)
        codes = self._hints.codes(keys)
        used = bytes(map(and_, codes.translate(SOME_OF), used))
        wanted = _with_much(codes, used)
        self._end_hints(
            keys, (one and not before for one, before in zip(wanted, used, strict=True))
        )
        return wanted

    def filter(self, ids: bytes, keys_of: Callable[[bytes], bytes]) -> bytes:
        """The blocks of these that may be written now."""
        if not self.strict or not ids:
            return ids
        return array("I", compress(array("I", ids), self.admitted(keys_of(ids)))).tobytes()


def _with_much(codes: bytes, otherwise: bytes) -> bytes:
    """A byte per block: `otherwise`, and 1 where the hint says much importance."""
    return bytes(map(or_, codes.translate(MUCH_OF), otherwise))
