"""What is known about objects: that they exist, or that they did not exist lately. Bounded, 16 bytes a block.

An object is known by 64 bits of its name. Of a full set of four the oldest entry is replaced: then the
object is unknown, and asked about again. Two names with the same 64 bits cost one read that finds nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from kvtier.key import KEY_BYTES
from kvtier_kernels import Notes, blake3

ABSENT_S = 60.0  # an object that was absent is asked about again after one to two times this long
PRESENT, FIRST_EPOCH, EPOCHS = 1, 2, 250
NAME_BYTES = KEY_BYTES
LIMIT_DOUBTED = 4096
PLACE_DOMAIN = b"kvtier.remote-place.1\0"


def place_mask(space: bytes, group: int, shard: int) -> bytes:
    """Return what distinguishes the names of this place's objects from those of other places."""
    return blake3(PLACE_DOMAIN + space + bytes([group, shard]))


def names_of(keys: bytes, mask: bytes) -> bytes:
    """Return the names of the objects of these keys, 32 bytes each."""
    count = len(keys) // KEY_BYTES
    both = int.from_bytes(keys, "little") ^ int.from_bytes(mask * count, "little")
    return both.to_bytes(len(keys), "little")


def each_of(names: bytes) -> Iterator[bytes]:
    return (names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES))


class KnownObjects:
    """Of all tenants; their names differ. `clock` returns seconds."""

    def __init__(self, nbytes: int, clock: Callable[[], float]) -> None:
        self._notes = Notes(nbytes)
        self._clock = clock
        self._doubted: dict[bytes, None] = {}
        self._leaving: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._notes)

    def memory_bytes(self) -> int:
        return self._notes.memory_bytes()

    def _epoch(self) -> int:
        return int(self._clock() / ABSENT_S) % EPOCHS

    def note(self, names: bytes, present: bool) -> None:
        if present and self._leaving:
            names = b"".join(name for name in each_of(names) if name not in self._leaving)
        code = PRESENT if present else FIRST_EPOCH + self._epoch()
        self._notes.note(names, code, int(self._clock()))

    def begin_delete(self, names: bytes) -> None:
        """These objects are absent from now on, also if an answer that is on its way says otherwise."""
        self.note(names, False)
        self._leaving.update(each_of(names))

    def end_delete(self, names: bytes) -> None:
        """These objects were deleted, or could not be: what is said about them from now on counts."""
        self.note(names, False)
        for name in each_of(names):
            self._leaving[name] -= 1
            if not self._leaving[name]:
                del self._leaving[name]

    def doubt(self, name: bytes) -> bool:
        """Note that this object could not be read completely: it can be read again, and is replaced when its
        block is shared again, for it may be damaged. Return whether it was in doubt before."""
        was = name in self._doubted
        self._doubted[name] = None
        if len(self._doubted) > LIMIT_DOUBTED:
            del self._doubted[next(iter(self._doubted))]
        return was

    def trust(self, name: bytes) -> None:
        """Note that this object was read or written completely."""
        self._doubted.pop(name, None)

    def good(self, names: bytes) -> bytes:
        """Return a byte for each object: 1 if it is known to exist, and not in doubt."""
        flags = self.which(names)
        if not self._doubted:
            return flags
        return bytes(
            flag and name not in self._doubted
            for flag, name in zip(flags, each_of(names), strict=True)
        )

    def present(self, names: bytes) -> int:
        """Return how many of the leading objects are known to exist."""
        codes = self._notes.codes(names)
        return len(codes) - len(codes.lstrip(bytes([PRESENT])))

    def which(self, names: bytes) -> bytes:
        """Return a byte for each object: 1 if it is known to exist."""
        return self._notes.codes(names).translate(ONLY_PRESENT)

    def is_present(self, name: bytes) -> bool | None:
        """Whether this object exists; None if that is unknown, or was asked too long ago."""
        (code,) = self._notes.codes(name)
        if code == PRESENT:
            return True
        if not code or (self._epoch() - (code - FIRST_EPOCH)) % EPOCHS > 1:
            return None
        return False


ONLY_PRESENT = bytes(code == PRESENT for code in range(256))
