"""Blocks of a prefix that are held by leases while a cache uses them, and slots for the blocks after them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvtier import Keys, wire
from kvtier.errors import Refused, SpoiltBlocks, StaleLease
from kvtier.loading import Lease
from kvtier.saving import Saving
from kvtier.space import GOES_ON, Space
from kvtier_kernels import Pieces, gather, release_views, scatter, views, xxh3_128
from kvtier_transformers.options import CacheOptions
from kvtier_transformers.store import REQUESTS

LIMIT_RUNS = 32  # leases of a row, before one takes the place of all
RENEWED = 0.5  # of the time of a lease, after which it is renewed
RETRY_S, RETRY_FOR_S = 0.01, 5.0  # for slots, if older ones of the same blocks are still in use


class Run:
    """Consecutive blocks of a prefix, from `first` on, under one lease."""

    def __init__(
        self, first: int, blocks: int, lease: Lease, layer_bytes: int, warm: int | None = None
    ) -> None:
        """Of the lease, the first `blocks`; `warm` of these were in memory before, if their use counts."""
        self.blocks = blocks
        self._first, self._lease = first, lease
        self._layer_bytes, self._warm = layer_bytes, warm
        self._reader = lease.reader()
        self._slots = lease.part(0, 0).slots[: blocks * wire.SLOT_BYTES]
        self._numbers = list(range(first, first + blocks))
        self._places: dict[int, bytes] = {}

    @property
    def is_fresh(self) -> bool:
        """Whether no slot was reused: the lease may have ended."""
        return self._reader.fresh(self._slots) == self.blocks

    def verify(self, block_bytes: int) -> None:
        """Compare the blocks with their digests, if the client asked for them. Raises SpoiltBlocks."""
        if digests := self._lease.part(0, 0).digests:
            self._reader.verify(
                self._slots, digests[: self.blocks * wire.DIGEST_BYTES], block_bytes
            )

    def first_blocks(self, count: int) -> Run:
        """The first of these blocks, under the same lease."""
        return Run(self._first, count, self._lease, self._layer_bytes, self._warm)

    def release(self, block_tokens: int = 0, block_bytes: int = 0) -> None:
        warm = self._warm
        if warm is None:
            self._lease.release()
        else:
            warm = min(warm, self.blocks)
            cold = self.blocks - warm
            self._lease.release(warm * block_tokens, self.blocks * block_bytes, cold * block_tokens)

    def copy_layer(self, number: int, pieces: Pieces) -> None:
        """Copy one layer of all blocks. Raises StaleLease if a slot was reused."""
        places = self._places.get(number)
        if places is None:
            places = wire.moved(self._slots, number * self._layer_bytes)
            self._places[number] = places
        scatter(pieces, self._numbers, self._reader.mappings, places)
        if not self.is_fresh:
            raise StaleLease("blocks of the cache were evicted while they were in use")


class HeldBlocks:
    """The leading blocks of one row that are held: `blocks` of them, in `runs`."""

    def __init__(self, space: Space, options: CacheOptions, layers: int) -> None:
        self._space = space
        self._options = options
        self._layer_bytes = space.block_bytes // layers
        self._renew_at = 0.0
        self.runs: tuple[Run, ...] = ()

    @property
    def blocks(self) -> int:
        return sum(run.blocks for run in self.runs)

    def hold(self, keys: Keys, warm: int | None = None) -> None:
        """Hold the blocks of these keys, or as many leading ones as there are. Waits for those that come from
        disk, or that others write. Blocks whose lease has ended count until their slot is reused. After an
        exception the same blocks are held as before. `warm`: as in a Run."""
        is_fresh = all(run.is_fresh for run in self.runs)
        if is_fresh and time.monotonic() < self._renew_at and len(self.runs) < LIMIT_RUNS:
            self._append(keys)
            return
        before, self.runs = self.runs, ()
        others = before
        try:
            self._append(keys, warm)
            if is_fresh and self.blocks < len(keys):
                others, self.runs = self.runs, before
                self._append(keys)
        except BaseException:
            new = [run for run in (*others, *self.runs) if run not in before]
            self.runs = before
            self._release(new)
            raise
        self._release(others)
        self._renew_at = time.monotonic() + RENEWED * self._options.lease_ms / 1000

    def keep(self, blocks: int) -> None:
        """Hold only the first blocks."""
        before, self.runs = self.runs, ()
        for run in before:
            count = min(run.blocks, blocks - self.blocks)
            if count:
                self.runs += (run.first_blocks(count) if count < run.blocks else run,)
            else:
                self._release([run])

    def release(self) -> None:
        self._release(self.runs)
        self.runs = ()

    def _append(self, keys: Keys, warm: int | None = None) -> None:
        most = self._space.most_keys()
        while (first := self.blocks) < len(keys):
            some = keys[first : first + most]
            request = next(REQUESTS)
            try:
                self._bring(some, request)
                self._add(self._space.lease(some, self._options.lease_ms), warm)
            finally:
                self._space.cancel(request)
            if self.blocks < first + len(some):
                break

    def _bring(self, keys: Keys, request: int) -> None:
        """Wait until these blocks are in memory, as long as one of them arrives within `patience_ms`."""
        patience_s = self._options.patience_ms / 1000
        found = self._space.wait(keys, self._options.patience_ms, request=request, awaits=True)
        ready, until = -1, 0.0
        # Blocks on disk cannot be saved again, so they are read even if computing them would be faster.
        while found.ready < len(keys) and self._space.locate([keys])[0].disk:
            if found.ready > ready:
                ready, until = found.ready, time.monotonic() + patience_s
            if time.monotonic() >= until:
                break
            found = self._space.prefetch(keys)
            time.sleep(RETRY_S)

    def _add(self, lease: Lease, warm: int | None = None) -> None:
        """Hold the blocks of this lease too. Those that are damaged are reported, and count as gone."""
        if not lease.ready:
            return
        run = Run(self.blocks, lease.ready, lease, self._layer_bytes, warm)
        try:
            run.verify(self._space.block_bytes)
        except SpoiltBlocks:
            lease.recheck()
            lease.release()
            return
        self.runs += (run,)

    def _release(self, runs: Sequence[Run]) -> None:
        for run in runs:
            run.release(self._options.block_tokens, self._space.block_bytes)


class LayerwiseSave:
    """Slots for these blocks of each row, written layer by layer. Raises Refused without room."""

    def __init__(
        self, space: Space, rows: Sequence[Keys], first: int, end: int, layers: int
    ) -> None:
        self.first, self.end = first, end
        self._space = space
        self._layer_bytes = space.block_bytes // layers
        self._savings: list[Saving] = []
        try:
            for keys in rows:
                self._reserve(keys[first:end])
        except BaseException:
            self.abort()
            raise

    def _reserve(self, keys: Keys) -> None:
        until = time.monotonic() + RETRY_FOR_S
        while True:
            saving = self._space.reserve(keys)
            saving.__enter__()
            self._savings.append(saving)
            refused = [wire.OUTCOMES[one] for one in saving.outcomes if one not in GOES_ON]
            if not refused:
                return
            self._savings.pop()
            _give_back(saving)
            if refused[0] != "leaving" or time.monotonic() >= until:
                text = "the daemon has no room for the cache of this context; give it more memory (warm.size)"
                raise Refused(refused[0], text)
            time.sleep(RETRY_S)

    def write(self, row: int, number: int, pieces: Pieces, ids: Sequence[int]) -> None:
        """Copy one layer of these paged blocks, one for each block, into the slots of a row."""
        saving = self._savings[row]
        if saving.slots:
            places = wire.moved(saving.slots, number * self._layer_bytes)
            gather(pieces, [ids[at] for at in saving.granted], saving.mappings, places)

    def commit(self) -> int:
        """Let other clients find the blocks. Returns how many are new."""
        new = 0
        while self._savings:
            saving = self._savings[0]
            blocks = views(saving.mappings, saving.slots, self._space.block_bytes, False)
            try:
                saving.checksums = b"".join(map(xxh3_128, blocks))
            finally:
                release_views(blocks)
            saving.commit(len(saving))
            new += len(saving)
            self._savings.pop(0).__exit__(None, None, None)
        return new

    def abort(self) -> None:
        """Give back the slots that are not committed."""
        while self._savings:
            _give_back(self._savings.pop())


def _give_back(saving: Saving) -> None:
    saving.__exit__(StaleLease, None, None)
