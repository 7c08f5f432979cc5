"""Plans to read blocks from disk into memory, and their outcomes. No I/O.

Every planned block must be reported, in any number of parts, to `promoted`, `unpromoted` or `spoilt`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from kvtier.key import KEY_BYTES
from kvtier.wire import CAME, DISK, MEMORY, WENT
from kvtier_daemon.catalog.blocks import ID_BYTES, BlockTable
from kvtier_daemon.catalog.frames import segments_of
from kvtier_daemon.catalog.holds import Holds, Request
from kvtier_daemon.catalog.miss_log import LOST, SPOILT
from kvtier_daemon.catalog.spaces import IDENTITY, KnownSpace

Missing = tuple[int, int, bytes, bytes]  # group, shard, ids only in a tier below, PROMOTING ids


@dataclass(slots=True, frozen=True)
class Promotion:
    """Blocks to read into their slots, in the order of the chain.

    The blocks in `joined` are being read for an earlier plan. `coming` is how many blocks the ready prefix
    grows by when all of them have been read: each in all groups and shards."""

    ids: bytes = b""
    slots: bytes = b""
    frames: bytes = b""
    digests: bytes = b""
    joined: bytes = b""
    coming: int = 0
    sizes: Sequence[int] = ()  # of the blocks, in bytes


@dataclass(slots=True, frozen=True)
class Survey:
    """The frames that a promotion would read, their blocks' ids, and those of blocks already being read."""

    frames: bytes
    joined: bytes
    ids: bytes


class Promotions:
    """The reads of one tenant."""

    def __init__(self, blocks: BlockTable, holds: Holds) -> None:
        self._blocks = blocks
        self._holds = holds
        self.reading = 0  # blocks
        self.failed: Counter[str] = Counter()  # blocks that could not be read, by reason

    def plan(
        self,
        space: KnownSpace,
        keys: bytes,
        limit_blocks: int,
        out_of_reach: Set[int] = frozenset(),
        accept: Callable[[Survey], bool] | None = None,
    ) -> Promotion:
        """Take slots for the blocks on disk that a match of these keys needs, if `accept` agrees. `accept` is
        called if there is something to read or to wait for.

        The prefix is shortened if it would put more than `limit_blocks` in flight, or if it needs a segment
        that is `out_of_reach`. Never evicts a block of this chain. Never reads a block twice.
        """
        space.check_keys(keys)
        if space.index < 0:
            return Promotion()
        store = self._blocks.store
        ready, whole, _ = store.match(space.index, keys)
        if ready == whole:
            return Promotion()
        wanted = store.missing(space.index, keys, whole)
        limit_blocks = max(0, limit_blocks - self.reading)
        prefix, wanted = self._within(space, keys, whole, wanted, limit_blocks, out_of_reach)
        reads_any = any(below for _, _, below, _ in wanted)
        if accept is not None and wanted:
            on_disk = b"".join(below for _, _, below, _ in wanted)
            coming = b"".join(promoting for _, _, _, promoting in wanted)
            if (on_disk or coming) and not accept(
                Survey(store.frames(on_disk)[0], coming, on_disk)
            ):
                return Promotion()
        present = self._present(space, keys[: prefix * KEY_BYTES]) if reads_any else []
        ids, joined, sizes = b"", b"", array("I")
        self._blocks.lease(present)
        try:
            for group, _, below, promoting in wanted:
                joined += promoting
                if below:
                    self._blocks.make_room(space.index, group, len(below) // ID_BYTES)
                    promoted = store.promote(below)[0]
                    ids += promoted
                    sizes += array("I", [space.block_bytes[group]]) * (len(promoted) // ID_BYTES)
        finally:
            for held in reversed(present):
                self._blocks.unlease(held)
        if len(ids) < sum(len(below) for _, _, below, _ in wanted):  # there was no room for all
            prefix, wanted = self._longest(
                space, keys, prefix, lambda parts: not any(below for _, _, below, _ in parts)
            )
            coming = b"".join(part for *_, part in wanted) if prefix > ready else b""
            needed = set(array("I", coming))
            ids, sizes = self._keep_needed(ids, sizes, needed)
            joined = array("I", (one for one in array("I", joined) if one in needed)).tobytes()
        if prefix <= ready:
            self._blocks.policy.demoted(store.unpromoted(ids)[1])
            return Promotion()
        self.reading += len(ids) // ID_BYTES
        frames, digests = store.frames(ids)
        return Promotion(ids, store.slots(ids), frames, digests, joined, prefix - ready, sizes)

    def plan_return(
        self, space: KnownSpace, ids: bytes, limit_blocks: int, returns: bool = True
    ) -> Promotion:
        """Take slots for these blocks of one space, which are only on disk; with `returns`, because an engine
        held them. Evicts only blocks that are on disk too. Blocks without room stay on disk."""
        store, found, sizes = self._blocks.store, b"", array("I")
        by_group: dict[int, array[int]] = {}
        names = IDENTITY.iter_unpack(store.identities(ids))
        for one, (_, group, *_) in zip(array("I", ids), names, strict=True):
            by_group.setdefault(group, array("I")).append(one)
        left = max(0, limit_blocks - self.reading)
        for group, members in by_group.items():
            wanted = members[: left - len(sizes)]
            if wanted:
                self._blocks.make_room(space.index, group, len(wanted), clean=True)
                promoted = store.promote(wanted.tobytes())[0]
                found += promoted
                sizes += array("I", [space.block_bytes[group]]) * (len(promoted) // ID_BYTES)
        if returns:
            self._blocks.residency.reading_back(found)
        coming = set(array("I", found))
        self._blocks.residency.stay_below(one for one in array("I", ids) if one not in coming)
        self.reading += len(sizes)
        frames, digests = store.frames(found)
        return Promotion(found, store.slots(found), frames, digests, b"", len(sizes), sizes)

    def _keep_needed(
        self, ids: bytes, sizes: Sequence[int], needed: Set[int]
    ) -> tuple[bytes, array[int]]:
        """Give back the slots of blocks that only a longer prefix needs: the request would wait for them, and
        hold them after its answer. Return the other blocks and their sizes."""
        planned = list(zip(array("I", ids), sizes, strict=True))
        needless = array("I", (one for one, _ in planned if one not in needed))
        self._blocks.policy.demoted(self._blocks.store.unpromoted(needless.tobytes())[1])
        kept = array("I", (one for one, _ in planned if one in needed))
        return kept.tobytes(), array("I", (size for one, size in planned if one in needed))

    def _present(self, space: KnownSpace, keys: bytes) -> list[bytes]:
        """The READY blocks of this prefix, for each shard of each group."""
        return [
            self._blocks.store.present(space.index, at, shard, keys)
            for at, group in enumerate(space.spec.cache_groups)
            for shard in range(group.shards)
        ]

    def _within(
        self,
        space: KnownSpace,
        keys: bytes,
        prefix: int,
        wanted: list[Missing],
        limit_blocks: int,
        out_of_reach: Set[int],
    ) -> tuple[int, list[Missing]]:
        """This prefix and its blocks; or a shorter one with at most `limit_blocks`, none out of reach."""
        store = self._blocks.store

        def fits(parts: list[Missing]) -> bool:
            if sum(len(below) for _, _, below, _ in parts) > limit_blocks * ID_BYTES:
                return False
            if not out_of_reach:
                return True
            ids = b"".join(cold + promoting for _, _, cold, promoting in parts)
            return segments_of(store.frames(ids)[0]).isdisjoint(out_of_reach)

        if fits(wanted):
            return prefix, wanted
        enough = 1 if out_of_reach else 1 + limit_blocks // 8
        return self._longest(space, keys, prefix, fits, enough)

    def _longest(
        self,
        space: KnownSpace,
        keys: bytes,
        prefix: int,
        fits: Callable[[list[Missing]], bool],
        enough: int = 1,
    ) -> tuple[int, list[Missing]]:
        """The longest part of this prefix whose missing blocks fit, or `enough - 1` less; and these."""
        store = self._blocks.store
        best: tuple[int, list[Missing]] = (0, [])
        low, high = 0, prefix
        while high - low > enough:
            middle = (low + high) // 2
            shorter = store.match(space.index, keys[: middle * KEY_BYTES])[1]
            parts = store.missing(space.index, keys, shorter)
            if fits(parts):
                low, best = middle, (shorter, parts)
            else:
                high = middle
        return best

    def promoted(
        self, ids: bytes, waiting: Sequence[Request] = (), now: float = 0.0, checksums: bytes = b"",
        compressed: bool = False,
    ) -> bytes:  # fmt: skip
        """These blocks are in their slots, verified. Return those that are READY; the others were forgotten.
        The READY ones are held for the requests that wait for them. `checksums` are needed for blocks that
        were decoded; `compressed` ones were in memory."""
        ready, gone = self._blocks.store.promoted(ids, checksums)
        if self._blocks.changes.watched:
            self._blocks.changes.add(CAME, MEMORY, self._blocks.changes.name(ready))
        self._blocks.came(ready)
        self._blocks.reads.read(ready, compressed)
        self._blocks.gone(gone, "forgotten")
        self.reading -= len(ids) // ID_BYTES
        self._holds.hold(ready, waiting, now)
        return ready

    def unpromoted(self, ids: bytes, reason: str) -> None:
        """These blocks were not read. Their frames may be good: they stay on disk."""
        self._blocks.miss_log.note(self._blocks.store.keys_of(ids), LOST)  # in case they go
        gone, orphans = self._blocks.store.unpromoted(ids)
        self._not_read(ids, reason, orphans)
        self._blocks.gone(gone, "lost")
        self._blocks.residency.stay_below(array("I", ids))

    def spoilt(self, ids: bytes, reason: str) -> None:
        """The frames of these blocks are damaged: drop the blocks."""
        names = self._blocks.changes.name(ids)
        self._blocks.miss_log.note(self._blocks.store.keys_of(ids), SPOILT)
        gone, orphans, dead = self._blocks.store.spoilt(ids)
        self._blocks.forgets[0] += 1
        self._blocks.changes.add(WENT, DISK, names)
        self._not_read(ids, reason, orphans)
        self._blocks.gone(gone, "spoilt")
        self._blocks.dead_frames += dead

    def _not_read(self, ids: bytes, reason: str, orphans: bytes) -> None:
        self._blocks.policy.demoted(orphans)
        self._blocks.reads.left(ids)
        self.failed[reason] += len(ids) // ID_BYTES
        self.reading -= len(ids) // ID_BYTES
