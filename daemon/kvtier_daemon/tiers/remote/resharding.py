"""Blocks that are made of objects of another space of their family."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier.frame import DIGEST_BYTES, Identity
from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.catalog.arrivals import Arriving
from kvtier_daemon.codec.encryption import FrameCipher
from kvtier_daemon.codec.resharding import Runs, sources
from kvtier_daemon.tiers.remote.objects import decode
from kvtier_kernels import xxh3_128


@dataclass(slots=True, frozen=True)
class Sibling:
    """A space of the family of `target`. No client has opened it here. `runs`: by group, the pairs of a shard
    of this space and one of the target."""

    space: KnownSpace
    target: KnownSpace
    runs: Sequence[Mapping[tuple[int, int], Runs]]

    def sources(self, group: int, shard: int) -> range:
        """The shards of this space of which a block of this shard of the target consists."""
        return sources(self.space.spec, self.target.spec, group, shard)


class Exchange:
    """The parts of one block of the target that are made of the same objects: one part of several objects, or
    several parts of one. They are good if all objects are."""

    def __init__(
        self, sibling: Sibling, group: int, parts: Sequence[tuple[Arriving, int, memoryview]], objects: int
    ) -> None:  # fmt: skip
        self._dtype = sibling.space.spec.dtype
        self._runs = sibling.runs[group]
        self._parts = parts  # with their shards and slots
        self._to_decode = self._to_end = objects
        self._is_good = True
        self._digests = b""
        self._lock = threading.Lock()

    def decode(
        self, of: Identity, nbytes: int, cipher: FrameCipher | None, text: memoryview
    ) -> bytes:
        """In a thread: verify an object, and copy its bytes to the slots. Return the digests of the parts if
        it is the last object. Raises what `decode` of objects raises."""
        block = memoryview(bytearray(nbytes))  # private: what is not good must not get into a slot
        decode(of, self._dtype, cipher, text, block)
        for _, shard, slot in self._parts:
            self._runs[of.shard, shard].copy(block, slot)
        with self._lock:
            self._to_decode -= 1
            is_last = not self._to_decode
        return b"".join(xxh3_128(slot) for _, _, slot in self._parts) if is_last else b""

    def ended(self, is_good: bool, digests: bytes) -> list[tuple[Arriving, bytes]]:
        """The read of an object has ended. Return the parts, with the digests of those that are good, when
        the last one has: until then a thread may write to their slots."""
        self._to_end -= 1
        self._is_good &= is_good
        self._digests += digests
        if self._to_end:
            return []
        each = range(0, len(self._parts) * DIGEST_BYTES, DIGEST_BYTES)
        found = [self._digests[at : at + DIGEST_BYTES] if self._is_good else b"" for at in each]
        return [(block, digest) for (block, _, _), digest in zip(self._parts, found, strict=True)]
