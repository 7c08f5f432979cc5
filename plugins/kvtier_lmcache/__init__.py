"""kvtier below LMCache's daemon: an L2 adapter of its type `plugin`.

LMCache copies blocks between the GPU and its own memory (L1), and hands objects in that memory to an adapter:
a chunk of a prompt, of one rank and one group of layers. Calls return at once: threads do the work, and event
descriptors report what has ended.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface, L2TaskId
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from kvtier import Group, KvSpec, ProtocolError, Unavailable
from kvtier.key import Keys
from kvtier.space import Space
from kvtier.wire import LIMIT_LOCATED
from kvtier_plugins.keeper import SpaceKeeper
from kvtier_plugins.page_store import keys_alone, leading_runs

log = logging.getLogger("lmcache.kvtier")

HASH_BYTES = 32  # shorter hashes can be forged
PARAMS = {
    "weights": "", "socket": None, "patience_ms": 1000, "copy_threads": 2, "chunk_tokens": 256,
    "verify": False,
}  # fmt: skip


class Kind(NamedTuple):
    """Objects of one size, of a model, a rank and a group of layers: one space of the daemon."""

    model: str
    rank: int
    group: int
    nbytes: int


class Tasks:
    """The results of one kind of task, and the descriptor that reports them."""

    def __init__(self) -> None:
        self.event = create_event_notifier()
        self._ended: dict[L2TaskId, Any] = {}
        self._lock = threading.Lock()

    def end(self, task: L2TaskId, result: Any) -> None:
        with self._lock:
            self._ended[task] = result
        self.event.notify()

    def take(self, task: L2TaskId) -> Any:
        with self._lock:
            return self._ended.pop(task, None)

    def take_all(self) -> dict[L2TaskId, Any]:
        with self._lock:
            ended, self._ended = self._ended, {}
        return ended


class ObjectSpaces:
    """The spaces of all kinds of objects, each with its connection. `counts`: objects by outcome."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.params = params
        self.counts: Counter[str] = Counter()
        self.keepers: dict[Kind, SpaceKeeper] = {}
        self._lock = threading.Lock()  # of both

    @property
    def status(self) -> dict[str, Any]:
        with self._lock:
            away = sum(keeper.space is None for keeper in self.keepers.values())
            return {
                "is_healthy": not away, "spaces": len(self.keepers), "spaces_away": away, **self.counts,
            }  # fmt: skip

    def each_run(
        self, what: str, keys: Sequence[ObjectKey], sizes: Mapping[int, int],
        there: Callable[[Space, Sequence[int]], list[bool]],
    ) -> Bitmap:  # fmt: skip
        """Call `there` with the places of the keys of each space, some at once: it returns for which ones it
        succeeded. `sizes` has those of the objects by group."""
        done = Bitmap(len(keys))
        runs: dict[Kind, list[int]] = {}
        for at, key in enumerate(keys):
            if len(key.chunk_hash) != HASH_BYTES:
                self.count(f"{what}:weak_hash", 1)
            elif nbytes := sizes.get(key.object_group_id, 0):
                runs.setdefault(_kind(key, nbytes), []).append(at)
        for kind, places in runs.items():
            keeper = self._keeper(kind)
            if (space := keeper.space) is None:
                self.count(f"{what}:no_daemon", len(places))
                continue
            good: list[bool] = []
            try:
                most = space.most_keys()
                while len(good) < len(places):
                    good += there(space, places[len(good) : len(good) + most])
            except Exception as error:  # noqa: BLE001  # becomes a cache miss
                self.failed(what, error, keeper)
            self.count(what, sum(good))
            done.batched_set([at for at, one in zip(places, good, strict=False) if one])
        return done

    def _keeper(self, kind: Kind) -> SpaceKeeper:
        with self._lock:
            keeper = self.keepers.get(kind)
            if keeper is None:
                params = self.params
                keeper = self.keepers[kind] = SpaceKeeper(
                    params["socket"], describe(kind, params["weights"], params["chunk_tokens"]), "lmcache l2",
                    params["verify"], log,
                )  # fmt: skip
            return keeper

    def count(self, what: str, objects: int) -> None:
        if objects:
            with self._lock:
                self.counts[what] += objects

    def failed(self, what: str, error: Exception, keeper: SpaceKeeper | None = None) -> None:
        self.count(f"{what}:failed", 1)
        if keeper is not None and isinstance(error, Unavailable | ProtocolError):
            keeper.lost(error)
        elif self.counts[f"{what}:failed"] == 1:
            log.warning("kvtier: %s failed: %s: %s", what, type(error).__name__, str(error))


class KvtierL2Adapter(L2AdapterInterface):
    """Objects in the daemon, in its memory and on its disks. The daemon evicts, so LMCache needs no eviction
    for this adapter. An object that cannot be stored or loaded is a miss, and is counted by its reason."""

    def __init__(
        self, params: Mapping[str, Any], l1_memory_desc: L1MemoryDesc | None = None
    ) -> None:
        super().__init__()
        if unknown := sorted(set(params) - set(PARAMS)):
            raise ValueError(
                f"adapter_params: {unknown[0]!r} is unknown; known are {', '.join(PARAMS)}"
            )
        self._params = {**PARAMS, **params}
        if not self._params["weights"]:
            raise ValueError(
                'adapter_params: add "weights": a name that changes with everything that changes the values'
                " of the cache: the model's revision, quantization, type of the cache, overrides, adapters"
            )
        for name in ("patience_ms", "copy_threads", "chunk_tokens"):
            if not isinstance(self._params[name], int) or self._params[name] < 1:
                raise ValueError(
                    f"adapter_params: {name} is {self._params[name]!r}, it must be at least 1"
                )
        self._spaces = ObjectSpaces(self._params)
        self._stores, self._lookups, self._loads = Tasks(), Tasks(), Tasks()
        # A store that waits for room delays no load.
        self._storer, self._loader, self._finder = (
            ThreadPoolExecutor(1, f"kvtier-{what}") for what in ("store", "load", "find")
        )
        self._tasks = itertools.count(1)  # LMCache submits in two threads

    # --- LMCache's interface -------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return int(self._stores.event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookups.event.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._loads.event.fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        return self._submit(
            self._storer, self._stores, lambda: self._stored(keys, objects), L2StoreResult(False, 0)
        )

    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]:
        return self._stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> L2TaskId:
        """Nothing is locked: an object that is evicted before its load is a miss of the load."""
        sizes = {group: _nbytes(one) for group, one in group_layout_descs.items()}

        def there(space: Space, places: Sequence[int]) -> list[bool]:
            """The leading objects are read from disk now; the others are only asked about, all at once."""
            wanted = _keys(space, [keys[at] for at in places])
            match = space.match(wanted, within_ms=self._params["patience_ms"])
            found = [True] * (match.ready + match.coming)
            while len(found) < len(places):
                some = [[key] for key in wanted[len(found) : len(found) + LIMIT_LOCATED]]
                found += [any(one) for one in space.locate(some)]
            return found

        def find() -> Bitmap:
            return self._spaces.each_run("find", keys, sizes, there)

        return self._submit(self._finder, self._lookups, find, Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        pass

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        return self._submit(
            self._loader, self._loads, lambda: self._loaded(keys, objects), Bitmap(len(keys))
        )

    def query_load_result(self, task_id: L2TaskId) -> Bitmap | None:
        return self._loads.take(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        deleted: list[tuple[ObjectKey, int]] = []
        for kind, keeper in list(self._spaces.keepers.items()):
            own = [key for key in keys if kind[:3] == _kind(key, 0)[:3]]
            space = keeper.space
            if own and space is not None:
                for key in own:
                    with suppress(Exception):  # the daemon is away
                        if space.forget(_keys(space, [key])):
                            deleted.append((key, kind.nbytes))
        if deleted:
            self._notify_keys_deleted([key for key, _ in deleted], [size for _, size in deleted])

    def report_status(self) -> dict[str, Any]:
        return {"type": "KvtierL2Adapter", **self._spaces.status}

    def close(self) -> None:
        for pool in (self._storer, self._loader, self._finder):
            pool.shutdown(cancel_futures=True)
        for keeper in self._spaces.keepers.values():
            keeper.close()
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.event.close()

    # --- in the threads ------------------------------------------------------------------------

    def _submit(
        self, pool: ThreadPoolExecutor, tasks: Tasks, run: Callable[[], Any], failed: Any
    ) -> L2TaskId:
        task = next(self._tasks)

        def work() -> None:
            result = failed
            try:
                result = run()
            except Exception as error:  # noqa: BLE001  # becomes a cache miss
                self._spaces.failed("task", error)
            tasks.end(task, result)

        pool.submit(work)
        return task

    def _stored(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        sources = [_bytes_of(one) for one in objects]

        def store(space: Space, some: Keys, arrays: list[memoryview], left_s: float) -> int:
            return space.save(some, arrays, wait_s=left_s).leading

        found = self._copied("store", keys, sources, store)
        stored = [at for at in range(len(keys)) if found.test(at)]
        sizes = [len(sources[at]) for at in stored]
        if stored:
            self._notify_keys_stored([keys[at] for at in stored], sizes)
        return L2StoreResult(len(stored) == len(keys), sum(sizes))

    def _loaded(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Bitmap:
        def load(space: Space, some: Keys, targets: list[memoryview], left_s: float) -> int:
            threads = self._params["copy_threads"]
            return space.load_into(some, targets, threads=threads, wait_ms=int(left_s * 1000))

        found = self._copied("load", keys, [_bytes_of(one) for one in objects], load)
        if loaded := [key for at, key in enumerate(keys) if found.test(at)]:
            self._notify_keys_accessed(loaded)
        return found

    def _copied(
        self, what: str, keys: list[ObjectKey], buffers: list[memoryview],
        copy: Callable[[Space, Keys, list[memoryview], float], int],
    ) -> Bitmap:  # fmt: skip
        """Copy objects. `copy` gets some of a space and the time that it may wait, and returns how many
        leading ones it copied. All of them wait for `patience_ms` together."""
        until = time.monotonic() + self._params["patience_ms"] / 1000

        def there(space: Space, places: Sequence[int]) -> list[bool]:
            def leading(first: int, count: int) -> int:
                some = places[first : first + count]
                named = _keys(space, [keys[at] for at in some])
                left_s = max(0.0, until - time.monotonic())
                return copy(space, named, [buffers[at] for at in some], left_s)

            return leading_runs(len(places), leading)

        sizes = {key.object_group_id: len(one) for key, one in zip(keys, buffers, strict=True)}
        return self._spaces.each_run(what, keys, sizes, there)


def describe(kind: Kind, weights: str, chunk_tokens: int) -> KvSpec:
    """The KvSpec of these objects."""
    return KvSpec.groups(
        [Group(layers=1, opaque_bytes=kind.nbytes, shards=1)],
        model=kind.model,
        dtype="uint8",
        block_tokens=chunk_tokens,
        weights=weights,
        layout=f"lmcache:rank {kind.rank:x}:group {kind.group}",
        engine="lmcache",
        engine_layout="l2",
    )


def _kind(key: ObjectKey, nbytes: int) -> Kind:
    return Kind(key.model_name, key.kv_rank, key.object_group_id, nbytes)


def _keys(space: Space, keys: Sequence[ObjectKey]) -> Keys:
    """The salt belongs to the key: the same prompt of another user has other keys."""
    return keys_alone(space, [(key.chunk_hash, key.cache_salt.encode()) for key in keys])


def _bytes_of(one: MemoryObj) -> memoryview:
    return memoryview(one.byte_array).cast("B")[: one.get_size()]


def _nbytes(layout: MemoryLayoutDesc) -> int:
    return sum(
        math.prod(shape) * dtype.itemsize
        for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
    )
