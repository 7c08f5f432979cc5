"""The remote tier compared with the store's own client, with real servers on loopback.

    python benchmarks/bench_remote.py [--store s3|mooncake] [--rounds N] [--out FILE] [--quick]

Each round takes a new prompt. A host saves it and writes it to the store, and the client puts as many bytes
under other names; then another host reads it into memory, and the client gets the same objects. Both ways
alternate in their order, and the median of the rounds' ratios counts. Blocks are raw, so that both move the
same bytes. Local lookups, loads and saves are compared with those of a daemon without a remote tier.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import mmap
import os
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import harness
from harness import Row

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from kvtier import Client, KvSpec
from kvtier.frame import Identity
from kvtier.key import Keys
from kvtier.space import Space
from kvtier_daemon.tiers.remote.known import KnownObjects
from kvtier_daemon.tiers.remote.objects import keys_of, object_name
from kvtier_daemon.tiers.remote.s3 import PAGE_NAMES
from support.daemons import Daemon, start_daemon
from support.mooncake import MooncakePool
from support.object_store import BUCKET, KEY, ObjectStore

BLOCKS = 16  # of a prompt
BAR = 0.85
LOCAL_BAR = 1.02
LOOKUPS, LOADS, TURNS = 200, 60, 20
LOOK_S = 0.001
FIRST_LOOK = 0.9  # of the shortest time of the client's own put: no look before that
PAGE = PAGE_NAMES  # objects of a page of a list
SPEC = KvSpec.dense(
    model="bench",
    weights="w",
    dtype="bfloat16",
    layers=32,
    kv_heads=8,
    head_dim=128,
    block_tokens=16,
)  # blocks of 2 MiB


class OwnClient(Protocol):
    def has(self, names: list[str]) -> bool: ...
    def put(self, names: list[str], content: bytes, size: int) -> None: ...
    def get(self, names: list[str], size: int) -> None: ...


class S3Client:
    """obstore as its users use it: all requests at once."""

    def __init__(self, server: ObjectStore) -> None:
        from obstore.store import S3Store

        config = {
            "region": "us-east-1", "endpoint": server.endpoint, "access_key_id": KEY,
            "secret_access_key": server.secret,
        }  # fmt: skip
        self._store = S3Store(
            BUCKET, prefix="fleet", config=config, client_options={"allow_http": True}
        )
        self._folder = server.folder / "data" / BUCKET / "fleet"

    def has(self, names: list[str]) -> bool:
        """Whether the server has these files. A request would cost it a millisecond of its one processor."""
        return all((self._folder / name).exists() for name in names)

    def put(self, names: list[str], content: bytes, size: int) -> None:
        import obstore

        async def put() -> None:
            whole = memoryview(content)
            each = (
                obstore.put_async(
                    self._store, name, whole[at * size : (at + 1) * size], use_multipart=False
                )
                for at, name in enumerate(names)
            )
            await asyncio.gather(*each)

        asyncio.run(put())

    def get(self, names: list[str], size: int) -> None:
        import obstore

        async def one(name: str) -> int:
            return len(await (await obstore.get_async(self._store, name)).bytes_async())

        async def get() -> None:
            found = await asyncio.gather(*(one(name) for name in names))
            assert all(nbytes >= size for nbytes in found)

        asyncio.run(get())


class MooncakeClient:
    """`room` for each of `count` objects at once."""

    def __init__(self, pool: MooncakePool, room: int, count: int = BLOCKS) -> None:
        from mooncake.store import MooncakeDistributedStore

        nbytes = room * count
        self._store = MooncakeDistributedStore()
        code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", pool.address)
        assert not code
        self._memory = mmap.mmap(-1, nbytes)
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        assert not self._store.register_buffer(self._at, nbytes)
        self._room = room

    def _places(self, count: int) -> list[int]:
        return [self._at + at * self._room for at in range(count)]

    def has(self, names: list[str]) -> bool:
        return set(self._store.batch_is_exist([f"fleet/{name}" for name in names])) == {1}

    def put(self, names: list[str], content: bytes, size: int) -> None:
        names = [f"fleet/{name}" for name in names]
        codes = self._store.batch_upsert_from(names, self._places(len(names)), [size] * len(names))
        assert not any(codes), codes

    def get(self, names: list[str], size: int) -> None:
        names = [f"fleet/{name}" for name in names]
        room = [self._room] * len(names)
        found = self._store.batch_get_into(names, self._places(len(names)), room)
        assert all(nbytes >= size for nbytes in found), found

    def remove(self, names: list[str]) -> None:
        self._store.batch_remove([f"fleet/{name}" for name in names], True)


class Scene:
    def __init__(self, folder: Path, store: str) -> None:
        self.ratios: dict[str, list[float]] = {}
        self.seconds: dict[str, list[float]] = {}
        self.cpu_s: dict[str, list[list[float]]] = {}
        self._closing: list[Callable[[], object]] = []
        self._chance = random.Random(1)
        self._content = self._chance.randbytes(SPEC.block_bytes * BLOCKS)
        self._store = store
        server: Any
        if store == "s3":
            server = ObjectStore(folder / "s3")
            self.own: Any = S3Client(server)
        else:
            server = MooncakePool(folder, lent_bytes=1 << 30)
            self.own = MooncakeClient(server, SPEC.block_bytes + (64 << 10))
        self._closing.append(server.stop)
        remote = (
            server.config('codec = "raw"\nwrite = "all"\n')
            if store != "s3"
            else server.config(more='codec = "raw"\nwrite = "all"\n')
        )
        remote = remote.replace('buffer = "16MiB"', 'buffer = "128MiB"')
        self.a = self._host(folder, "a", remote)
        self.b = self._host(folder, "b", remote.replace('write = "all"', 'write = "none"'))
        self.alone = self._host(folder, "alone", "")

    def _host(self, folder: Path, name: str, config: str) -> tuple[Daemon, Client, Space]:
        secrets = folder / name / "state" / "secrets"
        secrets.mkdir(parents=True, mode=0o700)
        (secrets / "default").write_bytes(bytes(32))
        (secrets / "default").chmod(0o600)
        daemon = start_daemon(folder / name, warm="512MiB", config=config)
        self._closing.append(daemon.stop)
        if config:
            daemon.wait_for(lambda stats: stats["tiers"]["remote"]["on"])
        client = Client.connect(daemon.socket, populate=True)
        self._closing.append(client.close)
        return daemon, client, client.open(SPEC)

    def close(self) -> None:
        for close in reversed(self._closing):
            close()

    def _remote(self, host: tuple[Daemon, Client, Space]) -> dict[str, Any]:
        remote: dict[str, Any] = host[1].stats()["tiers"]["remote"]
        return remote

    def _counted(self, name: str, pids: list[int], work: Callable[[], float]) -> float:
        """Do this, and add the CPU time of each of these processes to that of `name`."""
        before = [cpu_s(pid) for pid in pids]
        took = work()
        self.cpu_s.setdefault(name, []).append(
            [cpu_s(pid) - one for pid, one in zip(pids, before, strict=True)]
        )
        return took

    def _pids(self, host: tuple[Daemon, Client, Space]) -> list[int]:
        return [host[0].process.pid, self._remote(host)["pid"]]

    def _until(self, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < until
            time.sleep(LOOK_S)

    def _note(self, name: str, ours: float, theirs: float, counts: bool) -> None:
        if counts:
            self.ratios.setdefault(name, []).append(theirs / ours)
            self.seconds.setdefault(f"{name}, kvtier", []).append(ours)
            self.seconds.setdefault(f"{name}, client", []).append(theirs)

    def round(self, number: int) -> None:
        counts = number >= 0
        tokens = [number + 2] * BLOCKS * SPEC.block_tokens
        size, order = SPEC.block_bytes, number % 2
        blocks = [self._content[at * size : (at + 1) * size] for at in range(BLOCKS)]
        keys = self.a[2].keys(tokens)
        names = [object_name(Identity(self.a[2].identity, 0, 0, key)) for key in keys]
        others = [f"own/{number}/{at}" for at in range(BLOCKS)]

        def write() -> float:
            began = time.perf_counter()
            assert len(self.a[2].save(keys, blocks)) == BLOCKS
            if counts:
                self.seconds.setdefault("write, save", []).append(time.perf_counter() - began)
            time.sleep(FIRST_LOOK * min(self.seconds.get("write, client", [0.0])))
            while not self.own.has(names):
                time.sleep(LOOK_S)
            self._until(lambda: self._remote(self.a)["states"]["written"] >= written)
            return time.perf_counter() - began

        def put() -> float:
            return timed(lambda: self.own.put(others, self._content, size))

        def ours(name: str, host: tuple[Daemon, Client, Space], work: Callable[[], float]) -> float:
            return self._counted(f"{name}, kvtier", self._pids(host), work)

        def theirs(name: str, work: Callable[[], float]) -> float:
            return self._counted(f"{name}, client", [os.getpid()], work)

        written = self._remote(self.a)["states"]["written"] + BLOCKS
        timed_both = both(lambda: ours("write", self.a, write), lambda: theirs("write", put), order)
        self._note("write", *timed_both, counts)
        space = self.b[2]
        space.match(keys)
        self._until(lambda: self._remote(self.b)["asking"] == 0)

        def read() -> float:
            began = time.perf_counter()
            with space.load(keys, wait_ms=60_000) as ready:
                assert len(ready) == BLOCKS
            return time.perf_counter() - began

        def get() -> float:
            return timed(lambda: self.own.get(names, size))

        timed_both = both(lambda: ours("read", self.b, read), lambda: theirs("read", get), order)
        self._note("read", *timed_both, counts)
        with space.load(keys) as ready:
            assert [bytes(block) for block in ready] == blocks, "a wrong block"
        self._local(number, blocks, counts)
        if self._store == "mooncake":
            self.own.remove([*names, *others])
        for one in (self.a, self.b, self.alone):
            one[2].forget(keys)

    def _local(self, number: int, blocks: list[bytes], counts: bool) -> None:
        """The daemon with the remote tier and the one without: saves, lookups and loads. They take turns of a
        few milliseconds, so that both meet the same work of other processes."""
        tokens = [1 << 20 | (number + 2)] * BLOCKS * SPEC.block_tokens
        sides = (self.b[2], self.alone[2])
        keys = [space.keys(tokens) for space in sides]
        found: dict[str, tuple[list[float], list[float]]] = {
            name: ([], []) for name in ("local save", "local match", "local load")
        }

        def each(name: str, work: Callable[[Space, Keys], object], times: int, turns: int) -> None:
            for turn in range(turns):
                for at in (0, 1) if (number + turn) % 2 else (1, 0):
                    work_of = partial(work, sides[at], keys[at])
                    found[name][at].extend(timed(work_of) for _ in range(times))

        each("local save", lambda space, chain: space.save(chain, blocks), 1, 1)
        each("local match", lambda space, chain: space.match(chain), LOOKUPS // TURNS, TURNS)
        each("local load", load, LOADS // TURNS, TURNS)
        for space, chain in zip(sides, keys, strict=True):
            space.forget(chain)
        for name, (ours, theirs) in found.items():
            self._note(name, median(ours), median(theirs), counts)


def load(space: Space, keys: Keys) -> None:
    with space.load(keys) as ready:
        assert len(ready) == BLOCKS
        for block in ready:
            bytes(block[:64])


def cpu_s(pid: int) -> float:
    """The CPU time of this process, in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def both(ours: Callable[[], float], theirs: Callable[[], float], order: int) -> tuple[float, float]:
    if order:
        return ours(), theirs()
    later = theirs()
    return ours(), later


def known_rows(blocks: int) -> list[Row]:
    """The existence set with this many objects, and the work of the loop for one page of a list."""
    known = KnownObjects(16 * blocks, time.monotonic)
    chance = random.Random(2)
    space, pages = bytes(32), array("d")
    for _ in range(blocks // PAGE):
        keys = chance.randbytes(32 * PAGE)
        began = time.thread_time()
        known.note(keys, True)
        pages.append(time.thread_time() - began)
    names = [object_name(Identity(space, 0, 0, chance.randbytes(32))) for _ in range(PAGE)]
    parsing = [timed_cpu(lambda: keys_of(space, names)) for _ in range(200)]
    longest_ms = (harness.percentile(parsing, 0.99) + harness.percentile(pages, 0.99)) * 1e3
    return [
        harness.at_most(
            f"existence set, {blocks:,} objects: bytes each", known.memory_bytes() / blocks, "B", 16.0,
            still_known=round(len(known) / blocks, 3),
        ),
        harness.at_most(
            f"a page of {PAGE} names: CPU time of the loop, p99", longest_ms, "ms", 3.0,
            median_ms=(median(parsing) + median(pages)) * 1e3,
        ),
    ]  # fmt: skip


def timed_cpu(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def rows_of(scene: Scene, store: str) -> list[Row]:
    rows = []
    for name, ratios in scene.ratios.items():
        bar = BAR if name in ("read", "write") else 1 / LOCAL_BAR
        what = "the client's own" if name in ("read", "write") else "a daemon without it"
        low, high = harness.interval(ratios)
        value = median(ratios)
        more = {
            f"{side} ms": median(scene.seconds[f"{name}, {key}"]) * 1e3
            for side, key in (("kvtier", "kvtier"), ("other", "client"))
        }
        if f"{name}, save" in scene.seconds:
            more["of which save ms"] = median(scene.seconds[f"{name}, save"]) * 1e3
        if f"{name}, kvtier" in scene.cpu_s:
            rounds = scene.cpu_s[f"{name}, kvtier"]
            gigabytes = BLOCKS * SPEC.block_bytes / 1e9
            daemon, process = (
                sum(each) / len(rounds) / gigabytes for each in zip(*rounds, strict=True)
            )
            other = sum(map(sum, scene.cpu_s[f"{name}, client"])) / len(rounds) / gigabytes
            more |= {
                "daemon cpu s/GB": daemon, "its process cpu s/GB": process, "other cpu s/GB": other,
            }  # fmt: skip
        title = f"{store}: {name}, {BLOCKS} blocks of 2 MiB / {what}"
        rows.append(Row(title, value, "x", f">= {bar:.3g}", value >= bar, low, high, more))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=("s3", "mooncake"), action="append")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--out")
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    stores = options.store or ["s3", "mooncake"]
    probes, rows = [harness.noise()], list[Row]()
    for store in stores:
        with tempfile.TemporaryDirectory(prefix="remote-") as folder:
            scene = Scene(Path(folder), store)
            try:
                for number in range(-1, rounds):
                    scene.round(number)
            finally:
                scene.close()
        rows += rows_of(scene, store)
    rows += known_rows(200_000 if options.quick else 10_000_000)
    probes.append(harness.noise())
    return harness.report("remote", rows, probes, options.out, rounds=rounds, load=os.getloadavg())


if __name__ == "__main__":
    sys.exit(main())
