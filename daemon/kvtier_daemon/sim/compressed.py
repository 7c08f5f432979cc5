"""The model of one tier with compressed memory: the daemon's own order of blocks, without its threads."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from kvtier_daemon.catalog.compressed import COOL_SHARE, CompressedOrder
from kvtier_daemon.catalog.policy import NO_PARENT, make
from kvtier_daemon.sim.trace import ANNOUNCED, TraceRequests

UNIT = 1000  # the size of a block in this model


class CompressedReplay:
    """Replays a trace on a tier of `blocks`, of which `share` is compressed memory, with frames of `ratio` of
    a block. Blocks get frames before they leave their slots, as in the daemon; dropped blocks are gone."""

    def __init__(
        self, requests: TraceRequests, policy: str, blocks: int, share: float, ratio: float
    ) -> None:
        self._requests = requests
        self._nodes = memoryview(requests.native.nodes()).cast("I")
        self._order = CompressedOrder(make(policy), make("lru"))
        self._slots = max(1, round(blocks * (1 - share)))
        self._cool = max(1, int(self._slots * COOL_SHARE))
        self._capacity = (blocks - self._slots) * UNIT
        self._frame = max(1, round(UNIT * ratio))
        self._in_slots: set[int] = set()
        self._framed: set[int] = set()
        self._next = self._start = 0

    def run(self, count: int) -> bytes:
        """Replay the next requests, or the remaining ones. Return the number of hits of each."""
        hits = array("I")
        for index in range(self._next, min(self._next + count, len(self._requests))):
            length = self._requests.lengths[index]
            nodes = self._nodes[self._start : self._start + length].tolist()
            self._start += length
            self._order.now(self._requests.seconds[index])
            if (hint := self._requests.hints[index]) >= 0:
                if hint != ANNOUNCED:
                    self._hint(nodes, hint)
                hits.append(0)
            else:
                hits.append(self._play(nodes))
        self._next += len(hits)
        return hits.tobytes()

    def _hint(self, nodes: Sequence[int], importance: float) -> None:
        there = [one for one in nodes if self._has(one)]
        self._order.hinted(_ids(there), importance, _names(there))
        if importance <= 0:
            self._order.demoted(_ids(there[::-1]))

    def _has(self, node: int) -> bool:
        return node in self._in_slots or node in self._framed

    def _play(self, nodes: Sequence[int]) -> int:
        there = [self._has(one) for one in nodes]
        hits = there.index(False) if False in there else len(nodes)
        present = [one for one, has in zip(nodes, there, strict=True) if has]
        self._order.wanted(_ids(present), _names(present))
        back = [one for one in present if one not in self._in_slots]
        self._order.added(_ids(back), _names(back), _ids([NO_PARENT] * len(back)))
        parents = dict(zip(nodes[1:], nodes, strict=False))
        fresh = [one for one, has in zip(nodes, there, strict=True) if not has]
        above = _ids(parents.get(one, NO_PARENT) for one in fresh)
        self._order.added(_ids(fresh), _names(fresh), above)
        if present and fresh:
            self._order.refreshed(_ids(nodes))
        self._in_slots.update(back, fresh)
        self._reduce()
        return hits

    def _reduce(self) -> None:
        """Compress what is cool, and evict down to the size."""
        over = max(0, len(self._in_slots) - self._slots)
        if len(self._in_slots) + self._cool <= self._slots:
            return
        cool = array("I", self._order.next_to_compress(over + self._cool)).tolist()
        short = len(self._framed) * self._frame + len(cool) * self._frame - self._capacity
        needless: set[int] = set()
        if short > 0:
            dropped, needless = self._order.make_room(
                short, lambda _: self._frame, (), cool, self._frame
            )
            self._drop(dropped)
        for one in cool:
            fits = (len(self._framed) + 1) * self._frame <= self._capacity
            if one not in needless and fits:
                self._order.compressed(one, UNIT)
                self._framed.add(one)
        victims = array("I", self._order.victims(over)).tolist()
        self._in_slots.difference_update(victims)
        self._order.left(_ids(one for one in victims if one in self._framed))
        self._order.gone(_ids(one for one in victims if one not in self._framed))

    def _drop(self, frames: Sequence[int]) -> None:
        self._framed.difference_update(frames)
        self._order.dropped(frames)
        self._order.gone(_ids(one for one in frames if one not in self._in_slots))


def _ids(nodes: Iterable[int]) -> bytes:
    return array("I", nodes).tobytes()


def _names(nodes: Iterable[int]) -> bytes:
    """Names that look like hashes, because the policies sample by them."""
    return array(
        "Q", ((one + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF for one in nodes)
    ).tobytes()
