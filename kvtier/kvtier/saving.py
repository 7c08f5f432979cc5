"""Saves: slots to write into. Written slots are committed, the others are given back."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from kvtier import wire
from kvtier.arena import same_slots
from kvtier.arguments import Checking
from kvtier.errors import InvalidArgument, KvtierError, ProtocolError, StaleLease
from kvtier.key import KEY_BYTES, Key, Keys
from kvtier_kernels import Buffers, Pieces, copy_in, gather, release_views, views

if TYPE_CHECKING:
    from kvtier.link import BothMappings, Link, Mappings

MARK_BYTES = 16
PIECE_BYTES = 16 << 20  # of a copy in turns: how much is copied per turn
FIRST_PAUSE_S, LAST_PAUSE_S = 0.002, 0.032  # of a save that waits for the disk


class Savable(Protocol):
    """A space, as a save sees it."""

    link: Link
    index: int

    def group_block_bytes(self, group: int) -> int: ...


class Saving(Mapping[Key, memoryview]):
    """A save as a context manager, and a mapping from key to writable slot, in order; see Space.reserve.

    `slots` contains the packed slots, `outcomes` one byte per key. `checksums` are sent with the next commit.
    """

    def __init__(
        self,
        space: Savable,
        keys: Keys,
        group: int,
        shard: int,
        wait_s: float = 0.0,
        ttl_ms: int = 0,
        waits: Callable[[], bool] | None = None,
    ) -> None:
        self._space = space
        self._wait_s = wait_s
        self._waits = waits
        self._ttl_ms = ttl_ms
        self._keys = keys
        self._group = group
        self._shard = shard
        self._lease = 0
        self._lease_first = 0  # the granted block that is the first one of the lease
        self.is_lost = False  # the daemon ended, and the slots are not those of the next one
        self._is_given_back = True
        self._granted_at = 0.0
        self._extents: Mappings = ()
        self._committed = 0
        self._mark = os.urandom(MARK_BYTES)
        self._buffers: dict[Key, memoryview] | None = None
        self.checksums = b""
        self.slots = b""
        self.outcomes = b""

    @property
    def mappings(self) -> Mappings:
        """The extents that contain the slots. For copies by other code."""
        return self._extents

    @property
    def granted(self) -> list[int]:
        """The positions of the keys that have a slot."""
        return [at for at, outcome in enumerate(self.outcomes) if outcome == wire.GRANTED]

    @property
    def refused(self) -> dict[Key, str]:
        """Why each of the other keys has no slot: present, in_progress, leaving, no_room, growing."""
        return {
            key: wire.OUTCOMES[outcome]
            for key, outcome in zip(self._keys, self.outcomes, strict=False)
            if outcome != wire.GRANTED
        }

    def commit(self, count: int) -> None:
        """Declare the next `count` granted blocks as written: other clients can find them from now on."""
        left = len(self) - self._committed
        if not (isinstance(count, int) and 0 <= count <= left):
            raise InvalidArgument(f"cannot commit {count} blocks: {left} are not committed yet")
        if not count:
            return
        if (
            self._buffers is not None
            and (written := _written(self._buffers, self._committed, self._mark)) < count
        ):
            text = f"block {written} of these {count} was granted but never written"
            raise InvalidArgument(text)
        end, sums = self._committed + count, self.checksums

        def request(id_: int) -> wire.Message:
            if self.is_lost:
                raise StaleLease("the daemon has ended, and its memory was not kept: save again")
            # Those before `first` were committed by a request whose answer was lost.
            first = max(self._committed, self._lease_first)
            if first >= end:
                return wire.Ping(id_)
            digests = sums[first * wire.DIGEST_BYTES : end * wire.DIGEST_BYTES]
            return wire.Commit(id_, self._lease, first - self._lease_first, end - first, digests)

        self._space.link.ask(request, wire.Done)
        self._committed = end

    def copy(self, sources: Buffers, threads: int, checksum: bool) -> None:
        """Copy the sources of the granted keys into their slots, and commit them. `sources`: one per key."""
        at = None if len(self) == len(sources) else self.granted
        with Checking("copying blocks in"):
            self.checksums = copy_in(self._extents, self.slots, sources, threads, checksum, at)
        self.commit(len(self))

    def gather(
        self,
        pieces: Pieces,
        block_ids: Sequence[int],
        threads: int = 1,
        checksum: bool = True,
        nice: int = 0,
        turn: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        """Copy an engine's paged blocks into the granted slots. `block_ids` has one id per key, or
        several whose pages are consecutive in a slot; such a slot has no checksum. Commits nothing, so
        the pages may change afterwards. `nice` is the priority of the copying threads. With `turn`, at
        most PIECE_BYTES (or one block) are copied at a time, and `turn` is entered for each piece."""
        ids, within = self.placed(block_ids, pieces.block_bytes)
        checksum = checksum and len(ids) == len(self)
        most = max(1, len(ids)) if turn is None else max(1, PIECE_BYTES // pieces.block_bytes)
        sums = []
        for first in range(0, len(ids), most):
            slots = within[first * wire.SLOT_BYTES : (first + most) * wire.SLOT_BYTES]
            with turn or contextlib.nullcontext():
                some = ids[first : first + most]
                sums.append(gather(pieces, some, self._extents, slots, threads, checksum, nice))
        self.checksums = b"".join(sums)

    def placed(self, block_ids: Sequence[int], nbytes: int) -> tuple[list[int], bytes]:
        """Return the paged blocks, of `nbytes` each, that are copied into the granted slots, and the place of
        each page in its slot."""
        parts, rest = divmod(len(block_ids), len(self._keys))
        if rest:
            raise InvalidArgument(
                f"{len(block_ids)} paged blocks do not match {len(self._keys)} keys"
            )
        ids = [block for at in self.granted for block in block_ids[at * parts : (at + 1) * parts]]
        whole = parts == 1
        return ids, self.slots if whole else b"".join(wire.split(self.slots, parts, nbytes))

    def _slot_views(self) -> dict[Key, memoryview]:
        if self._buffers is None:
            buffers = views(
                self._extents, self.slots, self._space.group_block_bytes(self._group), True
            )
            for buffer in buffers[self._committed :]:
                # Marks slots that are never written: those still contain the evicted block.
                buffer[:MARK_BYTES] = self._mark[: len(buffer)]
            keys = [self._keys[at] for at in self.granted]
            self._buffers = dict(zip(keys, buffers, strict=True))
        return self._buffers

    def __getitem__(self, key: Key) -> memoryview:
        return self._slot_views()[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._slot_views())

    def __len__(self) -> int:
        return len(self.slots) // wire.SLOT_BYTES

    def __enter__(self) -> Saving:
        link = self._space.link
        link.begin_writing(self)
        try:
            self._reserve()
        except BaseException:
            link.end_writing(self)
            raise
        return self

    def _reserve(self) -> None:
        """Get the daemon's grant. While its memory grows, or blocks that have to leave are being written to
        disk, wait for enough of it, at most `wait_s`."""
        space, link = self._space, self._space.link

        def left_s() -> float:
            return until - link.connection.clock()

        def request(id_: int) -> wire.Message:
            place, keys = (space.index, self._group, self._shard), self._keys
            waits = self._waits is not None or left_s() > 0
            return wire.Reserve(id_, *place, keys.parent, keys.packed, self._ttl_ms, waits)

        until = link.connection.clock() + self._wait_s
        pause_s = FIRST_PAUSE_S
        while True:
            link.ask(request, wire.Reserved, self._take)
            if wire.WRITING in self.outcomes:  # never after `until`
                time.sleep(max(0.0, min(pause_s, left_s()) if self._waits is None else pause_s))
                if self._waits is not None and not self._waits():
                    return
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
                continue
            if wire.GROWING not in self.outcomes or left_s() <= 0:
                return
            # Give back the granted slots and reserve all keys again: a save has one lease.
            if self.slots:
                self._give_back()
            link.wait_for_growth(until)

    def _take(self, reserved: wire.Reserved, mappings: BothMappings) -> None:
        if len(reserved.outcomes) != len(self._keys.packed) // KEY_BYTES:
            raise ProtocolError("the daemon answered a reserve for another number of keys")
        self._lease, self.slots, self.outcomes = reserved.lease, reserved.slots, reserved.outcomes
        self._extents, _ = mappings
        self._lease_first, self._granted_at = 0, time.monotonic()
        self.is_lost = self._is_given_back = False

    def _give_back(self) -> None:
        """Give back the slots that are not committed."""

        def request(id_: int) -> wire.Message:
            return wire.Abort(id_, self._lease) if self._lease else wire.Ping(id_)

        def given_back(*_: object) -> None:
            self._lease, self._is_given_back = 0, True

        self._space.link.ask(request, wire.Done, given_back)

    def again(self, request_id: int) -> wire.Message | None:
        """The request for the slots that are not committed, in another connection. A save that lost slots
        sends nothing: a later save of the same keys may have other slots."""
        self._lease = 0
        granted = self.granted[self._committed :]
        if self._is_given_back or self.is_lost or not granted:
            return None
        ttl_ms, space = self._ttl_ms, self._space
        if ttl_ms:
            ttl_ms = max(1, ttl_ms - int((time.monotonic() - self._granted_at) * 1000))
        keys = b"".join(self._keys[at] for at in granted)
        return wire.Regain(request_id, space.index, self._group, self._shard, keys, ttl_ms)

    def taken(self, reply: wire.Reply, mappings: BothMappings) -> None:
        """The client is connected again: go on with the same slots, or note that some are lost."""
        assert isinstance(reply, wire.Reserved)
        # The first ones may be committed: the daemon ended before it answered.
        present = len(reply.outcomes) - len(reply.outcomes.lstrip(bytes([wire.PRESENT])))
        self._lease, self._lease_first = reply.lease, self._committed + present
        slots = self.slots[self._lease_first * wire.SLOT_BYTES :]
        self.is_lost = not same_slots(self._extents, slots, mappings[0], reply.slots)

    def __repr__(self) -> str:
        return (
            f"<{len(self)} slots for {len(self._keys)} keys{_reasons(self.outcomes, wire.GRANTED)}>"
        )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        link = self._space.link
        try:
            if kind is None and self._buffers is not None:
                self.commit(_written(self._buffers, self._committed, self._mark))
            if self._buffers:
                release_views(list(self._buffers.values()))
            if self._committed < len(self):
                # The caller must see the first exception.
                suppressed = () if kind is None else (KvtierError,)
                with contextlib.suppress(*suppressed):
                    self._give_back()
        finally:
            link.end_writing(self)


def _written(buffers: Mapping[Key, memoryview], committed: int, mark: bytes) -> int:
    """Return how many leading slots after the committed ones have been written."""
    count = 0
    for buffer in list(buffers.values())[committed:]:
        if buffer[:MARK_BYTES] == mark[: len(buffer)]:
            break
        count += 1
    return count


class Saved(Sequence[Key]):
    """The keys that are in the cache after a save, in order.

    `stored` is the number of blocks that this save wrote, `present` the number that were in the cache before.
    `refused` contains the other keys, each with its reason.
    """

    def __init__(self, keys: Keys, outcomes: bytes) -> None:
        self._keys = keys
        self._outcomes = outcomes
        self.stored = outcomes.count(wire.GRANTED)
        self.present = outcomes.count(wire.PRESENT)

    @cached_property
    def _kept(self) -> Sequence[Key]:
        if len(self) == len(self._keys):
            return self._keys
        kept = (wire.GRANTED, wire.PRESENT)
        return [key for key, outcome in self._pairs() if outcome in kept]

    @property
    def leading(self) -> int:
        """How many of the first keys are in the cache."""
        kept = bytes((wire.GRANTED, wire.PRESENT))
        return len(self._outcomes) - len(self._outcomes.lstrip(kept))

    @property
    def refused(self) -> dict[Key, str]:
        """Why each of the other keys was not stored: in_progress, leaving, no_room, growing."""
        kept = (wire.GRANTED, wire.PRESENT)
        return {
            key: wire.OUTCOMES[outcome] for key, outcome in self._pairs() if outcome not in kept
        }

    def _pairs(self) -> Iterator[tuple[Key, int]]:
        return zip(self._keys, self._outcomes, strict=True)

    def __len__(self) -> int:
        return self.stored + self.present

    def __getitem__(self, index: Any) -> Any:
        return self._kept[index]

    def __repr__(self) -> str:
        reasons = _reasons(self._outcomes, wire.GRANTED, wire.PRESENT)
        return f"<{self.stored} blocks stored, {self.present} present{reasons or ', 0 refused'}>"


def _reasons(outcomes: bytes, *kept: int) -> str:
    """Return the refused keys by reason, as text: ", 4 refused (4 growing)"."""
    counts = {
        name: outcomes.count(code)
        for code, name in enumerate(wire.OUTCOMES)
        if code not in kept and outcomes.count(code)
    }
    text = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f", {sum(counts.values())} refused ({text})" if counts else ""
