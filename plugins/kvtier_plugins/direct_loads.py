"""A rank's direct reads: blocks on disk arrive in the device's memory and are copied to the engine's pages.
Blocks that do not arrive are loaded through the daemon's memory.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvtier import Keys, KvtierError, Space
from kvtier.client import Reader
from kvtier.wire import SLOT_BYTES
from kvtier_kernels.cuda import CopyLane, CudaError, DevicePieces, Driver, Event
from kvtier_plugins.direct_thread import DirectThread

log = logging.getLogger("kvtier")


class RankSession(Protocol):
    """A connection of a rank with its space open."""

    @property
    def space(self) -> Space: ...
    @property
    def reader(self) -> Reader: ...


class Times(NamedTuple):
    """How long a load waits for blocks from disk, and how long a lease lasts, in milliseconds."""

    patience_ms: int
    lease_ms: int


class DirectLoads:
    """The direct reads of one rank. `load` is for the thread that loads."""

    def __init__(
        self, mode: str, times: Times, driver: Driver, lane: CopyLane, pieces: DevicePieces, shard: int
    ) -> None:  # fmt: skip
        self._lane = lane
        self._pieces = pieces
        self._shard = shard
        self.times = times
        self._session: RankSession | None = None
        self._thread = DirectThread(driver, mode, shard)
        self._counts: Counter[str] = Counter()  # blocks, by outcome

    @property
    def is_on(self) -> bool:
        """Whether this rank reads directly now."""
        return self._session is not None and self._thread.is_on

    def follow(self, session: RankSession) -> None:
        """Use this session from now on."""
        if session is not self._session:
            self._session = session
            self._thread.open(session.space)

    def forget(self, reader: Reader) -> None:
        """These extents are about to be unmapped: do not keep their session."""
        if self._session is not None and self._session.reader is reader:
            self._session = None

    def load(self, keys: Keys, pages: Sequence[int], after: Event | None) -> str:
        """Fill these pages, after this event; return why that failed, or "". Then no copy is in progress."""
        session = self._session
        if session is None or after is None:
            return "no_daemon"
        try:
            left = self._read(session, keys, pages, after)
            while left:
                many = next((n for n, at in enumerate(left) if at != left[0] + n), len(left))
                many = min(many, session.space.most_keys())
                if not self._load(session, keys[left[0] : left[0] + many], pages[left[0] :], after):
                    return "stale"
                self._counts["through_memory"] += many
                left = left[many:]
        except Exception as error:  # noqa: BLE001  # becomes a cache miss
            self._lane.drain()
            log.warning("kvtier: a load failed: %s", str(error))
            return "error"
        return ""

    def _read(
        self, session: RankSession, keys: Keys, pages: Sequence[int], after: Event
    ) -> list[int]:
        """Read directly; return the places of the blocks that did not arrive."""
        missing = dict.fromkeys(range(len(keys)))
        try:
            for batch in self._thread.batches(session.space, keys, self.times.patience_ms / 1000):
                addresses = np.array([block.address for block in batch], np.uint64)
                ids = [pages[block.at] for block in batch]
                self._lane.start_at(self._pieces, ids, addresses, False, after)
                self._lane.finish()
                for block in batch:
                    missing.pop(block.at, None)
        except (KvtierError, CudaError) as error:
            self._lane.drain()  # the ring is not used before the next load
            log.info("kvtier: a direct read failed: %s", str(error))
        self._counts["read"] += len(keys) - len(missing)
        return list(missing)

    def _load(self, session: RankSession, keys: Keys, pages: Sequence[int], after: Event) -> bool:
        """Load these blocks through the daemon's memory; return whether all pages have their blocks."""
        space, reader = session.space, session.reader
        lease = space.lease(
            keys, self.times.lease_ms, [self._shard], wait_ms=self.times.patience_ms
        )
        used = 0
        try:
            if lease.ready < len(keys):
                return False
            part = lease.part(0, self._shard)
            nbytes = self._pieces.block_bytes
            ids, slots = reader.placed(part.slots, pages[: len(keys)], nbytes, 1)
            self._lane.start(self._pieces, ids, reader.mappings, slots, False, after)
            self._lane.finish()
            if lease.fresh(part) * SLOT_BYTES == len(part.slots):
                used = len(keys)
        finally:
            tokens, nbytes = space.used(0, self._shard, used, used)
            lease.release(0, nbytes, tokens)
        return bool(used)

    def take_counts(self) -> list[tuple[str, int]]:
        """How many blocks were read, and how many came through the daemon's memory, since the last call."""
        counts, self._counts = self._counts, Counter()
        return list(counts.items())

    def close(self) -> bool:
        """End; return false if a read is still in progress."""
        return self._thread.close()
