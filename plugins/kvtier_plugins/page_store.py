"""The pages of one rank in the daemon: found, loaded into the engine's memory, and saved from it.

The engine calls from several threads: one finds pages, one loads them, one saves them. No call raises: a
failure is the answer "not there" or "not stored", and is counted by its reason.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvtier import Keys, KvSpec, KvtierError, ProtocolError, Unavailable
from kvtier.client import Client
from kvtier.errors import SpoiltBlocks
from kvtier.loading import Lease, Reader
from kvtier.saving import Saving
from kvtier.space import Space, copy_threads
from kvtier.wire import (
    DIGEST_BYTES,
    GRANTED,
    IN_PROGRESS,
    LIMIT_RESERVED,
    OUTCOMES,
    PRESENT,
    SLOT_BYTES,
)  # fmt: skip
from kvtier_kernels import Pieces
from kvtier_plugins.keeper import TIMEOUT_S, SpaceKeeper

LEASE_MS = 10_000
SAVE_WAIT_S = 1.0  # of a thread that saves, for the daemon's disk
NICE = 10  # of threads that save: the server's own go first
LOOK_S = 0.005  # another thread may have received the answer
LIMIT_MOVED = 1024
STORED = (GRANTED, PRESENT, IN_PROGRESS)


class Moved(NamedTuple):
    """A copy: how many pages, of how many bytes, in how many seconds."""

    pages: int
    nbytes: int
    seconds: float


class PagePool(Protocol):
    """Pages of an engine. `numbers` returns those at these indices, of which there are `count`. `scatter`
    copies slots into pages, and returns how many leading slots were not reused; `gather` copies pages into
    the granted slots. Both return when that has ended."""

    @property
    def block_bytes(self) -> int: ...
    def numbers(self, indices: Any, count: int) -> Sequence[int]: ...
    def scatter(
        self, reader: Reader, slots: bytes, numbers: Sequence[int], threads: int, digests: bytes
    ) -> int: ...
    def gather(self, saving: Saving, numbers: Sequence[int]) -> None: ...


class HostPages:
    """The copies of a pool in the host's memory."""

    __slots__ = ()
    pieces: Pieces

    @property
    def block_bytes(self) -> int:
        return self.pieces.block_bytes

    def scatter(
        self, reader: Reader, slots: bytes, numbers: Sequence[int], threads: int, digests: bytes
    ) -> int:
        return reader.scatter(slots, self.pieces, numbers, threads, digests=digests)

    def gather(self, saving: Saving, numbers: Sequence[int]) -> None:
        saving.gather(self.pieces, numbers, nice=NICE)


@dataclass(slots=True)
class HeldPages:
    """The `ready` leading pages of `keys` that are in memory, held by leases until `until`, in monotonic
    seconds. `coming`: as many more are being read from disk. `waited_s`: how long the disk was waited for."""

    keys: Sequence[str]
    space: Space | None
    until: float
    leases: list[Lease] = field(default_factory=list)
    ready: int = 0
    coming: int = 0
    waited_s: float = 0.0

    def release(self) -> None:
        leases, self.leases, self.ready = self.leases, [], 0
        for lease in leases:
            lease.release()


@dataclass(frozen=True, slots=True)
class RankCache:
    """What a rank keeps. The pools are the groups of the spec, in this order. The rank holds this shard, and
    saves it if `writes`. `engine` and `log`: its name, and its logger."""

    spec: KvSpec
    pools: Mapping[str, PagePool]
    engine: str
    log: logging.Logger
    shard: int = 0
    writes: bool = True

    @property
    def device(self) -> bool:
        """Whether a device copies pages."""
        return not all(isinstance(one, HostPages) for one in self.pools.values())


class PageOptions(Protocol):
    """`socket`: as for `kvtier.Client`. `patience_ms`: the longest time that a load waits for pages on disk.
    `copy_threads`: of a load of 8 MiB or more. `verify`: compare pages with the checksums of their saves."""

    @property
    def socket(self) -> str | None: ...
    @property
    def patience_ms(self) -> int: ...
    @property
    def copy_threads(self) -> int: ...
    @property
    def verify(self) -> bool: ...


def keys_alone(space: Space, hashes: Sequence[tuple[bytes, bytes]]) -> Keys:
    """Keys of blocks that an engine names by a hash of all their tokens, and a salt. Each stands alone."""
    each = [
        space.keys_of_hashes([one for one, _ in some], salt, alone=True)
        for salt, some in itertools.groupby(hashes, key=lambda pair: pair[1])
    ]
    others = tuple(map(b"".join, zip(*(one.others for one in each), strict=False)))
    return Keys(b"".join(one.packed for one in each), b"", others)


def leading_runs(count: int, leading: Callable[[int, int], int]) -> list[bool]:
    """For each of these blocks whether `leading` succeeds. It gets the first and the number of some, and
    returns for how many leading ones it succeeds. After one that fails, it gets one block first: the daemon
    counts each block of a question as looked up."""
    good: list[bool] = []
    size = count
    while len(good) < count:
        some = min(size, count - len(good))
        there = leading(len(good), some)
        good += [True] * there + [False] * (there < some)
        size = 2 * size if there == some else 1
    return good


class PageStore:
    """`counts`: pages by what became of them. `loads` and `saves`: the copies since they were last taken."""

    def __init__(self, cache: RankCache, options: PageOptions) -> None:
        self.counts: Counter[str] = Counter()
        self.loads: deque[Moved] = deque(maxlen=LIMIT_MOVED)
        self.saves: deque[Moved] = deque(maxlen=LIMIT_MOVED)
        self._cache = cache
        self._options = options
        self._groups = {name: group for group, name in enumerate(cache.pools)}
        self._generation = b""
        self._cleared = 0
        self._requests = itertools.count(1)
        self._loading = threading.Lock()  # one thread polls for answers
        self._counting = threading.Lock()
        name = f"{cache.engine} {os.getpid()}"
        self.keeper = SpaceKeeper(
            options.socket, cache.spec, name, options.verify, cache.log, cache.device
        )

    def exists(self, keys: Sequence[str]) -> int:
        """How many leading pages are stored, in all pools and by all ranks, in memory or coming from disk."""
        found = 0
        space = self.keeper.space
        try:
            while space is not None and found < len(keys):
                piece = self._keys(space, keys[found : found + space.most_keys()])
                match = space.match(piece, within_ms=self._options.patience_ms)
                found += (hit := match.ready + match.coming)
                if hit < len(piece):
                    break
        except Exception as error:  # noqa: BLE001  # becomes a cache miss
            self._failed("find", error)
        self._count("found", found)
        self._count("away", 0 if space is not None else len(keys))
        return found

    def stored(self, keys: Sequence[str]) -> list[bool]:
        """For each page: whether it is stored. After one that is not, the questions begin with one page: the
        daemon counts each page of a question as looked up."""
        return leading_runs(
            len(keys), lambda first, count: self.exists(keys[first : first + count])
        )

    def load(self, pool: str, keys: Sequence[str], indices: Any) -> list[bool]:
        """Copy the leading stored pages to these places of a pool. For each page: whether it is there."""
        good, space = 0, self.keeper.space
        try:
            pages = self._cache.pools[pool]
            numbers = pages.numbers(indices, len(keys))
            if space is None:
                self._count("away", len(keys))
            elif keys:
                good = self._load(space, pool, self._keys(space, keys), numbers)
        except SpoiltBlocks:
            self._count("spoilt", len(keys))
        except Exception as error:  # noqa: BLE001  # becomes a cache miss
            self._failed("load", error)
        return [True] * good + [False] * (len(keys) - good)

    def hold(self, keys: Sequence[str], waits: bool = True) -> HeldPages:
        """Hold the leading pages that are in memory, in all pools and by all ranks, for LEASE_MS. If it
        `waits`, then first for pages from disk, at most for the patience."""
        space = self.keeper.space
        held = HeldPages(keys, space, time.monotonic() + LEASE_MS / 1000)
        try:
            while space is not None and held.ready < len(keys):
                piece = keys[held.ready : held.ready + space.most_keys()]
                lease, waited_s = self._lease(space, self._keys(space, piece), waits)
                held.waited_s += waited_s
                held.leases.append(lease)
                held.ready += lease.ready
                held.coming = lease.coming
                if lease.ready < len(piece):
                    break
        except Exception as error:  # noqa: BLE001  # becomes a cache miss
            self._failed("find", error)
        self._count("found", held.ready)
        self._count("away", 0 if space is not None else len(keys))
        return held

    def load_held(self, held: HeldPages, indices: Mapping[str, Any], count: int) -> bool:
        """Copy these pages' first `count` to the places in each pool; release them. Whether all came."""
        done, shard, space = 0, self._cache.shard, held.space
        try:
            numbers = {
                pool: self._cache.pools[pool].numbers(at, count) for pool, at in indices.items()
            }
            for lease in held.leases:
                some, good = min(lease.ready, count - done), count
                try:
                    for pool, places in numbers.items():
                        good = min(good, self._copy(lease, pool, places[done : done + some]))
                except SpoiltBlocks:
                    lease.recheck()
                    raise
                if good < some:
                    break
                if space is not None:
                    used = [space.used(self._groups[pool], shard, some, some) for pool in numbers]
                    lease.release(sum(one for one, _ in used), sum(one for _, one in used))
                done += some
        except SpoiltBlocks:
            self._count("spoilt", count)
        except Exception as error:  # noqa: BLE001  # the pages are not there
            self._failed("load", error)
        finally:
            held.release()
        self._count("loaded", done)
        self._count("load_missing", count - done)
        return done == count

    def save(
        self, pool: str, keys: Sequence[str], indices: Any, before: str = "",
        waits: Callable[[], bool] = lambda: True, stored: Sequence[int] = STORED,
    ) -> list[bool]:  # fmt: skip
        """Save these pages of a pool. `before`: the key of the page before the first one, if it is known. It
        waits for the disk for at most a second, and while it `waits`. For each page: whether it is stored, or
        is being stored by another rank or server; or whether its outcome is one of `stored`."""
        outcomes, space = b"", self.keeper.space
        if not self._cache.writes:
            return [False] * len(keys)
        try:
            pages = self._cache.pools[pool]
            numbers = pages.numbers(indices, len(keys))
            if space is None:
                self._count("away", len(keys))
            else:
                parent = self._keys(space, [before]).packed if before else b""
                whole = Keys(self._keys(space, keys).packed, parent)
                for at in range(0, len(keys), LIMIT_RESERVED):
                    piece = slice(at, at + LIMIT_RESERVED)
                    outcomes += self._save(space, pool, whole[piece], numbers[piece], waits)
        except Exception as error:  # noqa: BLE001  # the pages are not stored
            self._failed("save", error)
        for one in set(outcomes):
            self._count(f"saved:{OUTCOMES[one]}", outcomes.count(one))
        good = [one in stored for one in outcomes]
        return good + [False] * (len(keys) - len(good))

    def clear(self, run: bytes) -> None:
        """From now on the run of the engine with this name finds none of the pages that are stored now."""
        self._cleared += 1
        self._generation = run + b" " + str(self._cleared).encode()

    def close(self) -> None:
        self.keeper.close()
        if self.counts:
            parts = (f"{what} {count:,}" for what, count in sorted(self.counts.items()))
            self._cache.log.info("kvtier: pages in this run: %s", ", ".join(parts))

    def _keys(self, space: Space, keys: Sequence[str]) -> Keys:
        return space.keys_of_hashes([*map(bytes.fromhex, keys)], self._generation, alone=True)

    def _load(self, space: Space, pool: str, keys: Keys, numbers: Sequence[int]) -> int:
        shard, group, good = self._cache.shard, self._groups[pool], 0
        lease, _ = self._lease(space, keys)
        try:
            good = self._copy(lease, pool, numbers[: lease.ready])
        except SpoiltBlocks:
            lease.recheck()
            raise
        finally:
            lease.release(*space.used(group, shard, good, good))
        self._count("loaded", good)
        self._count("load_missing", len(keys) - good)
        return good

    def _copy(self, lease: Lease, pool: str, numbers: Sequence[int]) -> int:
        """Copy the first slots of a lease into these pages. Return how many leading ones are there."""
        if not numbers:
            return 0
        pages, count = self._cache.pools[pool], len(numbers)
        group, shard = self._groups[pool], self._cache.shard
        part, began = lease.part(group, shard), time.monotonic()
        threads = copy_threads(count * pages.block_bytes, self._options.copy_threads)
        good = pages.scatter(
            lease.reader(), part.slots[: count * SLOT_BYTES], numbers, threads,
            part.digests[: count * DIGEST_BYTES],
        )  # fmt: skip
        self.loads.append(Moved(good, good * pages.block_bytes, time.monotonic() - began))
        return good

    def _lease(self, space: Space, keys: Keys, waits: bool = True) -> tuple[Lease, float]:
        """Lease the leading pages in memory. If it `waits`, then for those that are coming from disk, at most
        for the patience. Return the lease, and how long it waited."""
        last = space.lease(keys, LEASE_MS, [self._cache.shard])
        if not (last.coming and waits):
            return last, 0.0
        client, number = self.keeper.client, next(self._requests)
        if client is None:
            raise Unavailable("the client was closed")
        began, patience_s, wait_ms = time.monotonic(), self._options.patience_ms / 1000, 0
        until = began + patience_s
        if not self._loading.acquire(timeout=patience_s):
            return last, patience_s
        try:
            while True:
                left_ms = max(1, int((until - time.monotonic()) * 1000))
                ticket = space.begin_lease(
                    keys, LEASE_MS, [self._cache.shard], request=number, within_ms=left_ms,
                    wait_ms=wait_ms,
                )  # fmt: skip
                lease = self._answer(client, ticket, left_ms / 1000 + TIMEOUT_S)
                last.release()  # only now: the daemon cancels reads that no request waits for
                last = lease
                if lease.coming and time.monotonic() < until:
                    wait_ms = left_ms
                    continue
                if lease.coming:
                    space.cancel(number)
                return lease, time.monotonic() - began
        except BaseException:
            last.release()
            raise
        finally:
            self._loading.release()

    def _answer(self, client: Client, ticket: int, within_s: float) -> Lease:
        until = time.monotonic() + within_s
        while True:
            for other, answer in client.poll().items():
                if other == ticket and isinstance(answer, Lease):
                    if answer.refused:
                        raise KvtierError(answer.refused)
                    return answer
            if time.monotonic() >= until:
                raise Unavailable(f"the daemon did not answer within {within_s:.1f} s")
            with suppress(OSError):  # the connection was made again
                poll = select.poll()
                poll.register(client.fileno(), select.POLLIN)
                poll.poll(LOOK_S * 1000)

    def _save(
        self, space: Space, pool: str, keys: Keys, numbers: Sequence[int], waits: Callable[[], bool]
    ) -> bytes:
        pages, until = self._cache.pools[pool], time.monotonic() + SAVE_WAIT_S
        with space.reserve(
            keys, self._groups[pool], self._cache.shard, wait_s=0,
            waits=lambda: time.monotonic() < until and waits(),
        ) as saving:  # fmt: skip
            if saving.slots:
                began = time.monotonic()
                pages.gather(saving, numbers)
                saving.commit(len(saving))
                nbytes = len(saving) * pages.block_bytes
                self.saves.append(Moved(len(saving), nbytes, time.monotonic() - began))
        return saving.outcomes

    def _count(self, what: str, pages: int) -> None:
        if pages:
            with self._counting:
                self.counts[what] += pages

    def _failed(self, what: str, error: Exception) -> None:
        self._count(f"failed:{what}", 1)
        if isinstance(error, (Unavailable, ProtocolError)):
            self.keeper.lost(error)
        elif self.counts[f"failed:{what}"] == 1:
            self._cache.log.warning(
                "kvtier: %s failed: %s: %s", what, type(error).__name__, str(error)
            )
