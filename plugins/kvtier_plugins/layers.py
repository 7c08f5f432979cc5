"""Loads on a device that are copied layer by layer: each layer's computation waits for its own part.

The layers of a block are divided at borders of layers, in several numbers of parts. A load uses the most
parts that have enough bytes. The copies of a part begin after those of the parts before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier_kernels.cuda import Copier, CopyLane, DevicePieces, Event
from kvtier_kernels.cuda.pins import Extents

# The smallest part of one block: a smaller one is copied at a fraction of the bandwidth.
LEAST_PIECE_BYTES = 32 << 10
MOST_PARTS = 16


class LayerParts:
    """The parts of a group's blocks, and the load that is copied by parts. `layers`: name and bytes of each
    layer, in the order of the computation and of the pages; `least_bytes`: of a part of a load."""

    def __init__(
        self,
        copier: Copier,
        pieces: DevicePieces,
        layers: Sequence[tuple[str, int]],
        least_bytes: int,
    ) -> None:
        assert sum(nbytes for _, nbytes in layers) == pieces.block_bytes
        self._least_bytes = least_bytes
        self._block_bytes = pieces.block_bytes
        self._numbers = {name: at for at, (name, _) in enumerate(layers)}
        self._ways: dict[int, list[DevicePieces]] = {}
        most = min(len(layers), MOST_PARTS, pieces.block_bytes // LEAST_PIECE_BYTES)
        count = 2
        while count <= most:
            ends = [-(-len(layers) * (part + 1) // count) for part in range(count)]
            bounds = [sum(nbytes for _, nbytes in layers[:end]) for end in ends]
            self._ways[count] = copier.parts(pieces, bounds)
            count *= 2
        self._events = [Event(copier.driver) for _ in range(max(self._ways, default=0))]
        self._called: set[str] = set()  # layers that once called `wait`
        self._left: set[str] = set()  # layers that have not called `wait` since `start`
        self._parts = 0  # of the present load

    def start(
        self, lane: CopyLane, copies: Sequence[tuple[Sequence[int], Extents, bytes]], after: Event
    ) -> bool:
        """Start to copy slots into pages by parts: blocks, extents and slots. False if that is impossible or
        not worth it, and nothing is started. The first load is not divided: which layers wait is unknown."""
        nbytes = sum(len(ids) for ids, _, _ in copies) * self._block_bytes
        fitting = [parts for parts in self._ways if nbytes >= parts * self._least_bytes]
        if not fitting or not self._called.issuperset(self._numbers):
            return False
        parts = max(fitting)
        if not lane.start_parts(self._ways[parts], copies, after, self._events[:parts]):
            return False
        self._parts, self._left = parts, set(self._numbers)
        return True

    def wait(self, name: str, stream: Callable[[], int]) -> None:
        """Let later work of this stream wait for the parts that this layer needs. A layer without pages of
        its own reads those of another one: it needs all parts."""
        self._called.add(name)
        if not self._parts:
            return
        layers = len(self._numbers)
        part = self._numbers.get(name, layers - 1) * self._parts // layers
        self._events[part].hold(stream())
        self._left.discard(name)

    def end(self) -> bool:
        """The step has ended; return whether each layer waited for its part. Otherwise the step may have
        computed from unfilled pages, and no further load is copied by parts."""
        complete, self._parts, self._left = not self._left, 0, set()
        if not complete:
            self._ways = {}
        return complete

    def close(self) -> None:
        """Free the events. No other thread may be copying."""
        self._ways = {}
        for event in self._events:
            event.free()
