"""Leases, and loads under them: views of slots that stay what they are, or are known not to have."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

from kvtier import wire
from kvtier.arguments import Checking
from kvtier.errors import InvalidArgument, StaleLease, Unavailable, ViewsInUse
from kvtier_kernels import Buffers, Pieces, copy_out, fresh, release_views, scatter, views

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.key import Keys
    from kvtier.link import Link, Mappings
    from kvtier.space import Space


class Lease:
    """Blocks that stay where they are until `release` or the deadline. `token` lets others join."""

    __slots__ = (
        "_extents", "_id", "_link", "_tables", "coming", "eta_ms", "parts", "ready", "refused", "token",
    )  # fmt: skip

    def __init__(
        self,
        link: Link,
        mappings: tuple[Mappings, Mappings],
        loaded: wire.Loaded,
        refused: str = "",
    ) -> None:
        self._link = link
        # Of its own: the mappings outlive a client that is closed under a lease.
        self._extents, self._tables = mappings
        self._id = loaded.lease
        self.refused = refused
        self.ready = loaded.ready
        self.coming = loaded.coming
        self.eta_ms = loaded.eta_ms
        self.token = loaded.token
        self.parts: list[wire.Part] = loaded.parts

    def part(self, group: int, shard: int) -> wire.Part:
        """The slots of one group and shard; InvalidArgument if they were not asked for."""
        for part in self.parts:
            if part.group == group and part.shard == shard:
                return part
        raise InvalidArgument(f"the lease tells nothing of group {group}, shard {shard}")

    @property
    def extents(self) -> int:
        """How many extents whoever reads these slots must have mapped."""
        slots = (slot for part in self.parts for slot in wire.SLOT.iter_unpack(part.slots))
        return 1 + max((extent for extent, *_ in slots), default=-1)

    def views(self, part: wire.Part, nbytes: int) -> list[memoryview]:
        """Read-only views of a part's slots."""
        with Checking("views of a part"):
            return views(self._extents, part.slots, nbytes, False)

    def copy_out(self, part: wire.Part, targets: Buffers, threads: int) -> int:
        """Copy a part's slots; how many leading ones still were what they were after it."""
        with Checking("copying a part"):
            copy_out(self._extents, part.slots, targets, threads)
        return self.fresh(part)

    def fresh(self, part: wire.Part) -> int:
        """How many leading blocks of a part still are what they were. Ask after reading them."""
        with Checking("a part"):
            return fresh(self._tables, part.slots)

    def release(self, tokens: int = 0, nbytes: int = 0, cold_tokens: int = 0) -> None:
        """Let go, and tell the daemon's figures what was used: the tokens that were in memory, those that
        were on disk, and the bytes. Does not wait for the daemon; a second call does nothing. A daemon
        that is gone has forgotten the lease already; the next request will say so."""
        if self._id:
            lease, self._id = self._id, 0
            with contextlib.suppress(Unavailable):
                self._link.tell(wire.Release(0, lease, tokens, cold_tokens, nbytes))


class Reader:
    """Reads slots by what the holder of their lease tells: needs no lease of its own, and asks the daemon
    nothing. Outlives its client; `daemon_run` says of which run of the daemon the slots must be."""

    __slots__ = ("_extents", "_tables", "daemon_run")

    def __init__(self, mappings: tuple[Mappings, Mappings], daemon_run: bytes) -> None:
        self._extents, self._tables = mappings
        self.daemon_run = daemon_run

    @property
    def extents(self) -> int:
        """How many are mapped. What the daemon adds comes with the next answer to the client."""
        return len(self._extents)

    @property
    def mappings(self) -> Mappings:
        """The extents, in a list that grows: for copies that are made elsewhere."""
        return self._extents

    def fresh(self, slots: bytes) -> int:
        """How many leading slots still are what they were. Ask after reading them."""
        return fresh(self._tables, slots)

    def scatter(
        self,
        slots: bytes,
        pieces: Pieces,
        block_ids: Sequence[int],
        threads: int = 1,
        nice: int = 0,
        parts: int = 1,
    ) -> int:
        """Copy slots into an engine's paged blocks; how many leading ones still were what they were
        after it. Each slot goes to so many `parts` of these, one after the other; 0 leaves its part alone
        where there are several. With `nice`, others that want the cores go first."""
        ids, within = self.placed(slots, block_ids, pieces.block_bytes, parts)
        scatter(pieces, ids, self._extents, within, threads, nice=nice)
        return fresh(self._tables, slots)

    def placed(
        self, slots: bytes, block_ids: Sequence[int], nbytes: int, parts: int
    ) -> tuple[Sequence[int], bytes]:
        """The paged blocks, of so many bytes each, that slots go to, and where in the slots each begins."""
        if len(block_ids) * wire.SLOT_BYTES != parts * len(slots):
            count = len(slots) // wire.SLOT_BYTES
            raise InvalidArgument(
                f"{len(block_ids)} paged blocks for {count} slots of {parts} parts"
            )
        if parts == 1:
            return block_ids, slots
        within = wire.split(slots, parts, nbytes)
        wanted = [at for at, block in enumerate(block_ids) if block]
        return [block_ids[at] for at in wanted], b"".join(within[at] for at in wanted)


class Blocks(list["memoryview | None"]):
    """The ready prefix: a read-only view a block, valid until the `with` block ends; None for the blocks
    before `first`, which this group can do without."""

    first: int = 0
    coming: int = 0
    eta_ms: float = 0.0


class Loading:
    """A load as a context; see Space.load."""

    __slots__ = ("_args", "_blocks", "_lease", "_part", "_space", "_views")

    def __init__(
        self, space: Space, keys: Keys | Sequence[bytes], deadline_ms: int, group: int, shard: int
    ) -> None:
        self._space = space
        self._args = (keys, deadline_ms, group, shard)
        self._lease: Lease | None = None
        self._part: wire.Part | None = None
        self._views: list[memoryview] = []
        self._blocks = Blocks()

    def __enter__(self) -> Blocks:
        keys, deadline_ms, group, shard = self._args
        lease = self._lease = self._space.lease(keys, deadline_ms, [shard])
        if lease.ready:
            try:
                part = self._part = lease.part(group, shard)
                self._views = lease.views(part, self._space.group_block_bytes(group))
            except BaseException:
                lease.release()
                raise
            self._blocks = Blocks([*[None] * part.first, *self._views])
            self._blocks.first = part.first
        self._blocks.coming = lease.coming
        self._blocks.eta_ms = lease.eta_ms
        return self._blocks

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
            *self._space.used(*self._args[2:], self._lease.ready if used else 0, used)
        )
        if stale and kind is None:
            raise StaleLease("the lease ran out while its blocks were read: use nothing of them")
        if kept and kind is None:
            text = "are still shown by something made from their views (an array, a slice): copy instead"
            raise ViewsInUse(f"{kept} blocks {text}; they may be another's at any time")
