"""Leases, and loads under a lease: views of slots, with a check whether a slot was reused."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from kvtier import wire
from kvtier.arena import same_slots
from kvtier.arguments import WRONG, Checking
from kvtier.errors import InvalidArgument, SpoiltBlocks, StaleLease, Unavailable, ViewsInUse
from kvtier.link import ask_delayed
from kvtier_kernels import (
    Buffers,
    Pieces,
    copy_out,
    copy_parts,
    copy_tokens,
    fresh,
    release_views,
    scatter,
    views,
    xxh3_128,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.key import Keys
    from kvtier.link import BothMappings, Link, Make, Mappings
    from kvtier.parts import Selection
    from kvtier_kernels._native import _Integers


class Lease:
    """A lease on the ready blocks of a prefix, until `release` or the deadline.

    `ready` is the number of blocks of the prefix that can be read, `coming` the number that are being
    read from disk, `eta_ms` the expected time until they are ready, and `why` the reason to read the blocks
    on disk or not to read them. `parts` contains the slots, `token` lets another process join with
    `Client.adopt`, and `refused` is the reason if the daemon refused the request.
    """

    __slots__ = (
        "__weakref__", "_again", "_extents", "_home", "_id", "_link", "_tables", "coming", "eta_ms",
        "parts", "ready", "refused", "token", "why",
    )  # fmt: skip

    def __init__(
        self,
        link: Link,
        mappings: BothMappings,
        loaded: wire.Loaded,
        refused: str = "",
        again: Make | None = None,
    ) -> None:
        """`again` makes the request for the same lease in another connection."""
        self._link = link
        self._home = mappings[0]  # identifies the connection of the lease
        self._again = again
        # Own references: the mappings must outlive a client that is closed under a lease.
        self._extents, self._tables = mappings
        self._id = loaded.lease
        self.refused = refused
        self.ready = loaded.ready
        self.coming = loaded.coming
        self.eta_ms = loaded.eta_ms
        self.why = loaded.why
        self.token = loaded.token
        self.parts: list[wire.Part] = loaded.parts
        if again is not None and self._id:
            link.leases.keep(self)

    def __repr__(self) -> str:
        state = f"refused: {self.refused}" if self.refused else f"{self.coming} coming"
        return f"<lease of {self.ready} blocks, {state}>"

    @classmethod
    def of(
        cls,
        link: Link,
        request: wire.Message | Make,
        again: Make | None = None,
        delayed: bool = False,
    ) -> Lease:
        """Ask for a lease, and return it. `delayed`: the daemon may delay the answer."""
        taken: list[Lease] = []

        def take(reply: wire.Loaded, mappings: BothMappings) -> None:
            taken.append(cls(link, mappings, reply, again=again))

        if delayed:
            ask_delayed(link, request, wire.Loaded, take)
        else:
            link.ask(request, wire.Loaded, take)
        return taken[0]

    def again(self, request_id: int) -> wire.Message | None:
        """The request for the same lease in another connection, if it has not ended."""
        return self._again(request_id) if self._again is not None and self._id else None

    def taken(self, reply: wire.Reply, mappings: BothMappings) -> None:
        """The client is connected again: hold the same slots there if all still contain the blocks."""
        assert isinstance(reply, wire.Loaded)
        others = {(part.group, part.shard, part.first): part.slots for part in reply.parts}
        same = all(
            same_slots(
                self._extents, part.slots, mappings[0],
                others.get((part.group, part.shard, part.first), b"")[: len(part.slots)],
            )
            for part in self.parts
        )  # fmt: skip
        self._id, self._home = reply.lease if same else 0, mappings[0]

    def part(self, group: int, shard: int) -> wire.Part:
        """Return the slots of one group and shard. Raises InvalidArgument if they were not requested."""
        for part in self.parts:
            if part.group == group and part.shard == shard:
                return part
        raise InvalidArgument(f"the lease does not include group {group}, shard {shard}")

    @property
    def extents(self) -> int:
        """How many extents a process must have mapped to read these slots."""
        slots = (slot for part in self.parts for slot in wire.SLOT.iter_unpack(part.slots))
        return 1 + max((extent for extent, *_ in slots), default=-1)

    def reader(self) -> Reader:
        """Return a reader for the slots of this lease, for copies by other code."""
        return Reader((self._extents, self._tables), self._link.welcome.daemon)

    def views(self, part: wire.Part, nbytes: int, start: int = 0) -> list[memoryview]:
        """Return read-only views of the slots of a part: of `nbytes` from the byte `start` of each. Call
        `fresh` after reading. Verifies nothing: `matching` does."""
        try:
            slots = wire.moved(part.slots, start) if start else part.slots
            return views(self._extents, slots, nbytes, False)
        except WRONG as error:
            raise InvalidArgument(f"views of a part: {error}") from error

    def copy_out(
        self, part: wire.Part, targets: Buffers, threads: int, chosen: Selection | None = None
    ) -> int:
        """Copy the slots of a part, or these bytes of each. Returns how many leading blocks were not reused
        during the copy and, with digests, are the blocks that were saved: that reads the whole blocks."""
        with Checking("copying a part"):
            if chosen is None:
                digests = copy_out(self._extents, part.slots, targets, threads, bool(part.digests))
            else:
                starts, each = chosen.starts, chosen.each
                copy_parts(self._extents, part.slots, starts, each, targets, threads)
        if chosen is not None:
            digests = self._digests(part, chosen.block_bytes)
        return self._sound(part, digests)

    def copy_tokens(
        self, part: wire.Part, chosen: Selection, tokens: _Integers, block_tokens: int,
        targets: Buffers, threads: int,
    ) -> bool:  # fmt: skip
        """Copy tokens of the prefix: from each of the places `chosen` in its block, to one target each.
        Returns whether the part contains them all, and its blocks are as `copy_out` says."""
        with Checking("copying tokens"):
            found = copy_tokens(
                self._extents, part.slots, chosen.starts, chosen.each, tokens, block_tokens,
                part.first * block_tokens, targets, threads,
            )  # fmt: skip
        sound = self._sound(part, self._digests(part, chosen.block_bytes))
        return found and sound * wire.SLOT_BYTES == len(part.slots)

    def _digests(self, part: wire.Part, block_bytes: int) -> bytes:
        if not part.digests:
            return b""
        blocks = self.views(part, block_bytes)
        try:
            return b"".join(map(xxh3_128, blocks))
        finally:
            release_views(blocks)

    def _sound(self, part: wire.Part, digests: bytes) -> int:
        good = self.fresh(part)
        if part.digests and (sound := leading(digests, part.digests)) < good:
            self.recheck()
            return sound
        return good

    def matching(self, part: wire.Part, blocks: Sequence[memoryview]) -> int:
        """Return how many leading blocks of a part match its digests; all if it has none."""
        if not part.digests:
            return len(blocks)
        sound = leading(b"".join(map(xxh3_128, blocks)), part.digests)
        if sound < min(len(blocks), self.fresh(part)):
            self.recheck()
        return sound

    def recheck(self) -> None:
        """Let the daemon forget the blocks of this lease that differ from their checksums. Does not wait."""
        if self._id:
            with contextlib.suppress(Unavailable):
                self._link.tell(wire.Recheck(0, self._id))

    def fresh(self, part: wire.Part) -> int:
        """Return how many leading blocks of a part have not been reused. Call it after reading them."""
        try:
            return fresh(self._tables, part.slots)
        except WRONG as error:
            raise InvalidArgument(f"a part: {error}") from error

    def release(self, tokens: int = 0, nbytes: int = 0, cold_tokens: int = 0) -> None:
        """End this holder's use of the lease, and report what was used: tokens from memory, tokens from
        disk, and bytes. Does not wait for the daemon, and raises nothing if the daemon has ended. A
        second call does nothing."""
        if self._id:
            link, lease, self._id = self._link, self._id, 0
            link.leases.pop(id(self), None)
            if link.arena.extents is self._home:
                try:  # noqa: SIM105 - a context manager takes longer
                    link.tell(wire.Release(0, lease, tokens, cold_tokens, nbytes))
                except Unavailable:
                    pass  # the lease has ended with the connection


class Reader:
    """Reads slots that the holder of a lease passes on. It needs no lease and sends no requests.

    It can be used after its client is closed. `daemon_run` identifies the run of the daemon; slots of another
    run must not be read.
    """

    __slots__ = ("_extents", "_tables", "daemon_run")

    def __init__(self, mappings: BothMappings, daemon_run: bytes) -> None:
        self._extents, self._tables = mappings
        self.daemon_run = daemon_run

    @property
    def extents(self) -> int:
        """How many extents are mapped. New extents are mapped with the next answer to the client."""
        return len(self._extents)

    @property
    def mappings(self) -> Mappings:
        """The mapped extents, in a list that grows. For copies by other code."""
        return self._extents

    def let_go(self) -> None:
        """Keep nothing mapped: only how much there was can be asked from now on. Its client is closed."""
        self._extents, self._tables = [None] * len(self._extents), []

    def fresh(self, slots: bytes) -> int:
        """Return how many leading slots have not been reused. Call it after reading them."""
        return fresh(self._tables, slots)

    def scatter(
        self,
        slots: bytes,
        pieces: Pieces,
        block_ids: Sequence[int],
        threads: int = 1,
        nice: int = 0,
        parts: int = 1,
        digests: bytes = b"",
    ) -> int:
        """Copy slots into an engine's paged blocks. Returns how many leading slots were not reused during the
        copy. Each slot is divided into `parts` consecutive pages; with several parts, block id 0 skips its
        page. `nice` is the priority of the copying threads. With `digests`, raises SpoiltBlocks if a slot
        that was not reused has other bytes."""
        ids, within = self.placed(slots, block_ids, pieces.block_bytes, parts)
        same_pass = bool(digests) and parts == 1
        found = scatter(pieces, ids, self._extents, within, threads, same_pass, nice)
        if same_pass:
            self._compare(slots, found, digests)
        elif digests:
            self.verify(slots, digests, pieces.block_bytes * parts)
        return fresh(self._tables, slots)

    def verify(self, slots: bytes, digests: bytes, nbytes: int) -> None:
        """Raise SpoiltBlocks if a slot of `nbytes` that was not reused does not match its digest."""
        blocks = views(self._extents, slots, nbytes, False)
        try:
            found = b"".join(map(xxh3_128, blocks))
        finally:
            release_views(blocks)
        self._compare(slots, found, digests)

    def _compare(self, slots: bytes, found: bytes, digests: bytes) -> None:
        sound = leading(found, digests)
        if sound * wire.SLOT_BYTES < len(slots) and sound < fresh(self._tables, slots):
            raise SpoiltBlocks("a block was overwritten after its save")

    def placed(
        self, slots: bytes, block_ids: Sequence[int], nbytes: int, parts: int
    ) -> tuple[Sequence[int], bytes]:
        """Return the paged blocks, of `nbytes` each, that the slots are copied to, and the place of each
        page in its slot."""
        if len(block_ids) * wire.SLOT_BYTES != parts * len(slots):
            count = len(slots) // wire.SLOT_BYTES
            raise InvalidArgument(
                f"{len(block_ids)} paged blocks do not match {count} slots of {parts} parts"
            )
        if parts == 1:
            return block_ids, slots
        within = wire.split(slots, parts, nbytes)
        wanted = [at for at, block in enumerate(block_ids) if block]
        return [block_ids[at] for at in wanted], b"".join(within[at] for at in wanted)


def leading(found: bytes, wanted: bytes) -> int:
    """Return how many leading digests are as wanted. NO_DIGEST matches every digest."""
    if found == wanted:
        return len(wanted) // wire.DIGEST_BYTES
    for count, at in enumerate(range(0, len(wanted), wire.DIGEST_BYTES)):
        one = wanted[at : at + wire.DIGEST_BYTES]
        if one not in (found[at : at + wire.DIGEST_BYTES], wire.NO_DIGEST):
            return count
    return len(wanted) // wire.DIGEST_BYTES


class Blocks(list["memoryview | None"]):
    """The ready prefix of a load: one read-only view per block, valid until the `with` block ends.

    Blocks before `first` are None: this group does not need them. `coming` is the number of blocks after the
    prefix that are being read from disk, `eta_ms` the expected time until they are ready.
    """

    first: int = 0
    coming: int = 0
    eta_ms: float = 0.0


class Loadable(Protocol):
    """A space, as a load sees it."""

    def lease(
        self,
        keys: Keys | Sequence[bytes],
        deadline_ms: int = ...,
        shards: Sequence[int] = ...,
        *,
        wait_ms: int = ...,
    ) -> Lease: ...
    def is_full(self, group: int) -> bool: ...
    def group_block_bytes(self, group: int) -> int: ...
    def used(
        self, group: int, shard: int, blocks: int, slots: int, chosen: Selection | None = ...
    ) -> tuple[int, int]: ...


class Loading:
    """A load as a context manager; see Space.load."""

    __slots__ = ("_args", "_blocks", "_chosen", "_lease", "_part", "_space", "_views", "_wait_ms")

    def __init__(
        self,
        space: Loadable,
        keys: Keys | Sequence[bytes],
        deadline_ms: int,
        group: int,
        shard: int,
        wait_ms: int,
        chosen: Selection | None = None,
    ) -> None:
        """`chosen` has one start: a view is one range of bytes."""
        self._chosen = chosen
        self._space = space
        self._args = (keys, deadline_ms, group, shard)
        self._wait_ms = wait_ms
        self._lease: Lease | None = None
        self._part: wire.Part | None = None
        self._views: list[memoryview] = []
        self._blocks = Blocks()

    def __enter__(self) -> Blocks:
        keys, deadline_ms, group, shard = self._args
        lease = self._lease = self._space.lease(keys, deadline_ms, [shard], wait_ms=self._wait_ms)
        if lease.ready:
            try:
                part = self._part = lease.part(group, shard)
                self._views = lease.views(part, self._space.group_block_bytes(group))
                self._keep(lease.matching(part, self._views))
                if self._chosen is not None and self._part is not None:
                    release_views(self._views)
                    (start,) = self._chosen.starts
                    self._views = lease.views(self._part, self._chosen.each, start)
            except BaseException:
                release_views(self._views)
                lease.release()
                raise
            if self._part is not None:
                self._blocks = Blocks(self._views)
                if part.first:
                    self._blocks[:0] = [None] * part.first
                    self._blocks.first = part.first
        self._blocks.coming = lease.coming
        self._blocks.eta_ms = lease.eta_ms
        return self._blocks

    def _keep(self, sound: int) -> None:
        """Drop the blocks from the first spoilt one on; all blocks of a group that needs all of them."""
        assert self._lease is not None and self._part is not None
        if sound == len(self._views):
            return
        keep = sound if self._space.is_full(self._args[2]) else 0
        release_views(self._views[keep:])
        del self._views[keep:]
        self._lease.ready = keep
        part = self._part
        kept = wire.Part(part.group, part.shard, part.first, part.slots[: keep * wire.SLOT_BYTES])
        self._part = kept if keep else None

    def __exit__(
        self, kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        assert self._lease is not None
        stale, kept = False, 0
        if self._part is not None:
            stale = self._lease.fresh(self._part) * wire.SLOT_BYTES < len(self._part.slots)
            kept = release_views(self._views)
        used = len(self._views) if kind is None and not stale else 0
        self._lease.release(
            *self._space.used(*self._args[2:], self._lease.ready if used else 0, used, self._chosen)
        )
        if stale and kind is None:
            raise StaleLease("the lease expired while its blocks were read: discard what was read")
        if kept and kind is None:
            text = (
                "are still referenced by an object made from their views (an array, a "
                "slice): copy instead"
            )
            raise ViewsInUse(f"{kept} blocks {text}; their memory may be reused at any time")
