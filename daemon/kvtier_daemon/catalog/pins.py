"""Pins: leases with a long deadline that keep prefixes in memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.errors import Refused
from kvtier.key import KEY_BYTES
from kvtier_daemon.catalog.blocks import BlockTable
from kvtier_daemon.catalog.leases import NOBODY
from kvtier_daemon.catalog.reading import Held, ReadLease, ReadLeases
from kvtier_daemon.catalog.spaces import KnownSpace

LIMIT_PINS = 4096
LIMIT_PINNED_IDS = 1 << 17  # checking all of them takes some milliseconds
LIMIT_PIN_S = 7 * 24 * 3600.0
PIN_SHARE = 0.25  # of the tenant's memory


@dataclass(slots=True, frozen=True)
class PinLease:
    """A lease without a session, the keys of its prefix, its blocks, and the memory it keeps."""

    lease: ReadLease
    keys: bytes
    ids: array[int]
    nbytes: int


class PinnedPrefixes:
    """The pins of one tenant."""

    def __init__(self, blocks: BlockTable, reading: ReadLeases) -> None:
        self._blocks = blocks
        self._reading = reading
        self._pins: list[PinLease] = []
        self.keep: Callable[[], None] = lambda: None  # called after a change

    def pin(self, space: KnownSpace, keys: bytes, ttl_s: float, now: float) -> int:
        """Keep the ready prefix for `ttl_s`, as far as the limits allow; return how many blocks that is.

        The new pin replaces pins that hold only blocks of this prefix.
        """
        space.check_keys(keys)
        find, pins = self._reading.find, self._living()
        ready, _, parts = find(space, keys[: LIMIT_PINNED_IDS // space.places * KEY_BYTES])
        if not ready:
            return 0
        prefix = set(_ids_of(parts))
        replaced = [pin for pin in pins if prefix.issuperset(pin.ids)]
        kept = [pin for pin in pins if not prefix.issuperset(pin.ids)]
        store = self._blocks.store
        per_block = sum(
            store.slot_bytes(space.index, at) * group.shards
            for at, group in enumerate(space.spec.cache_groups)
        )
        nbytes = store.counts()["capacity_bytes"] * PIN_SHARE - sum(pin.nbytes for pin in kept)
        ids = LIMIT_PINNED_IDS - sum(len(pin.ids) for pin in kept)
        blocks = max(0, min(ready, int(nbytes // per_block), ids // space.places))
        if blocks < ready:
            # A shorter prefix may need blocks that the longer one did not need: match again.
            blocks, _, parts = find(space, keys[: blocks * KEY_BYTES])
        if not blocks:
            return 0
        if len(kept) >= LIMIT_PINS:
            raise Refused("too_many", f"this tenant has {LIMIT_PINS} pins already")
        lease = self._reading.hold(NOBODY, space, parts, blocks, now + min(ttl_s, LIMIT_PIN_S))
        keys = keys[: blocks * KEY_BYTES]
        self._pins.append(PinLease(lease, keys, _ids_of(parts), per_block * blocks))
        if not self._end(replaced):
            self.keep()
        return blocks

    def unpin(self, space: KnownSpace, keys: bytes) -> int:
        """End the pins that hold only blocks of this prefix; return how many blocks they held."""
        space.check_keys(keys)
        if space.index < 0:
            return 0
        prefix = set(array("I", self._blocks.store.resident(space.index, keys)))
        return self._end([pin for pin in self._living() if prefix.issuperset(pin.ids)])

    def unpin_forgotten(self) -> None:
        """End the pins with a block that is not READY: forgetting has priority."""
        ready = self._blocks.store.ready
        self._end([pin for pin in self._living() if ready(pin.ids.tobytes()) < len(pin.ids)])

    @property
    def nbytes(self) -> int:
        """How much memory the pins keep."""
        return sum(pin.nbytes for pin in self._living())

    def described(self) -> list[tuple[int, bytes, float]]:
        """The number of the space, the keys and the deadline of each pin."""
        return [(pin.lease.space.number, pin.keys, pin.lease.deadline) for pin in self._living()]

    def _living(self) -> list[PinLease]:
        """The pins whose deadline has not ended them."""
        self._pins = [pin for pin in self._pins if pin.lease.holders]
        return self._pins

    def _end(self, pins: Sequence[PinLease]) -> int:
        for pin in pins:
            self._reading.end(pin.lease)
        if pins:
            self.keep()
        return sum(pin.lease.prefix_blocks for pin in pins)


def _ids_of(parts: Sequence[Held]) -> array[int]:
    return array("I", b"".join(held.ids for held in parts))
