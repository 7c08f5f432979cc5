"""Takes over the blocks of an earlier daemon from the notes of its slots."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Mapping, Sequence

from kvtier.errors import Refused
from kvtier.layout import KvSpec
from kvtier_daemon.catalog.blocks import BlockTable
from kvtier_daemon.catalog.leases import NOBODY, SessionId
from kvtier_daemon.catalog.pins import PinnedPrefixes
from kvtier_daemon.catalog.spaces import SpaceTable
from kvtier_daemon.catalog.writing import WriteLeases

Spaces = Mapping[int, tuple[bytes, KvSpec]]
Pins = Sequence[tuple[int, bytes, float]]  # number of the space, keys, deadline


class KeptBlocks:
    """Of one tenant."""

    def __init__(
        self, blocks: BlockTable, spaces: SpaceTable, writing: WriteLeases, pins: PinnedPrefixes
    ) -> None:
        self._blocks = blocks
        self._spaces = spaces
        self._writing = writing
        self._pins = pins

    def adopt(
        self, spaces: Spaces, pages: Sequence[tuple[int, int, int]]
    ) -> tuple[bytes, list[SessionId], int]:
        """Take over the blocks that are noted on these pages (extent, first page, number of pages), before
        any other block exists. Return their ids, the earlier sessions that may still write to slots, and the
        number of blocks that were dropped because their notes contradict each other."""
        known = [self._spaces.restore(number, *space) for number, space in spaces.items()]
        ready, expires, writing, owners, dropped = self._blocks.store.adopt(
            pages, [(space.number, space.index) for space in known]
        )
        self._blocks.came(ready)
        for one, expires_ms in zip(array("I", ready), expires, strict=True):
            if expires_ms:
                self._blocks.expiring.add(array("I", (one,)).tobytes(), expires_ms / 1000)
        held: dict[SessionId, bytes] = {}
        for one, owner in zip(array("I", writing), owners, strict=True):
            session = SessionId(owner)
            held[session] = held.get(session, b"") + array("I", (one,)).tobytes()
        self._writing.quarantine(held)
        # A disk may write to these: no end of a session or process frees them.
        held.pop(NOBODY, None)
        self._spaces.retire(known)
        return ready, list(held), dropped

    def adopt_pins(self, pins: Pins, now: float) -> None:
        """Take over the pins whose deadline has not passed, as far as their blocks are there."""
        for number, keys, deadline in pins:
            with contextlib.suppress(Refused):
                if deadline > now:
                    self._pins.pin(self._spaces.at(number), keys, deadline - now, now)

    def keep_pins(self, keep: Callable[[Pins], None]) -> None:
        """Call `keep` with the pins whenever they change."""
        self._pins.keep = lambda: keep(self._pins.described())

    def keep_spaces(self, keep: Callable[[Spaces], None]) -> None:
        """Call `keep` with the spaces that have blocks whenever one is added."""
        self._spaces.keep = lambda: keep(
            {
                space.number: (space.identity, space.spec)
                for space in self._spaces
                if space.index >= 0
            }
        )
