"""The control path: matches, plans, the catalog at a million blocks, and what an idle daemon costs.

The null echo is the floor of the socket: the same bytes there and back through a process of the same loop
that does nothing with them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import harness
from harness import Daemon, Row, at_least, at_most, percentile
from kvtier import Client, KvSpec, Space, wire
from kvtier.layout import space_id
from kvtier_kernels import Store

MIB = 1 << 20
KEYS = 1024
TOKENS = 16
ASKS = 3000
MILLION = 1_000_000
GROUP = 1024
ECHO = """
import asyncio, socket, sys, uvloop
async def main():
    loop = asyncio.get_running_loop()
    listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1]); listener.listen()
    sock, _ = listener.accept(); sock.setblocking(False)
    buffer = bytearray(1 << 18); reply = bytes(int(sys.argv[3])); want = int(sys.argv[2]); have = 0
    done = asyncio.Event()
    def readable():
        nonlocal have
        count = sock.recv_into(buffer)
        if not count: done.set()
        have += count
        if have >= want:
            have -= want; sock.send(reply)
    loop.add_reader(sock.fileno(), readable)
    await done.wait()
uvloop.run(main())
"""


def tiny_spec(name: str = "tiny") -> KvSpec:
    """4 KiB a block: a million of them are 4 GiB."""
    return KvSpec.dense(
        model=name, layers=1, kv_heads=1, head_dim=64, dtype="bfloat16", block_tokens=TOKENS,
        weights="rev:1",
    )  # fmt: skip


def chain(number: int, blocks: int = GROUP) -> list[int]:
    return [number, number >> 16] * (TOKENS // 2) + list(range(TOKENS * (blocks - 1)))


# --- matches over the socket --------------------------------------------------------------------


class Echo:
    """The null echo: requests of the same size as a match's, replies of the same size."""

    def __init__(self, folder: Path, request: int, reply: int) -> None:
        path = str(folder / "echo.sock")
        self.process = subprocess.Popen(
            [sys.executable, "-c", ECHO, path, str(request), str(reply)]
        )
        while not os.path.exists(path):
            time.sleep(0.01)
        self.sock = socket.socket(socket.AF_UNIX)
        while self.sock.connect_ex(path):
            time.sleep(0.01)
        self.request = bytes(request)

    def ask(self) -> None:
        self.sock.sendall(self.request)
        self.sock.recv(1 << 16)

    def close(self) -> None:
        self.sock.close()
        self.process.wait(10)


def timed(ask: Callable[[], Any], times: list[float]) -> None:
    started = time.perf_counter()
    ask()
    times.append(time.perf_counter() - started)


@contextmanager
def saving_at_full_speed(daemon: Daemon) -> Iterator[None]:
    """Another process saves 2 MiB blocks as fast as it can."""
    bench_warm = Path(__file__).with_name("bench_warm.py")
    worker = subprocess.Popen(
        [sys.executable, str(bench_warm), "--worker", "save", daemon.socket, "7"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert worker.stdin is not None and worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    worker.stdin.write("go\n" * 60)
    worker.stdin.close()
    try:
        yield
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()


def matches(folder: Path) -> list[Row]:
    rows: list[Row] = []
    with Daemon(folder, "1GiB") as daemon:
        daemon.wait_for_arena()
        client = Client.connect(daemon.socket, populate=False)
        space = client.open(tiny_spec("match"))
        keys = space.keys(chain(1))
        assert space.save(keys, bytearray(4096 * KEYS)).stored == KEYS
        request = wire.encode(wire.MatchPrefix(1, space.index, keys.packed))
        reply = wire.encode(wire.Matched(1, KEYS, 0, 0.0))
        echo = Echo(folder, len(request), len(reply))

        def look() -> None:
            assert space.match(keys).ready == KEYS

        for label, context in (("", None), (" while another saves", saving_at_full_speed(daemon))):
            ours: list[float] = []
            null: list[float] = []
            saved, started = client.stats()["bytes"]["saved"], time.perf_counter()
            if context is not None:
                context.__enter__()
            for _ in range(200):
                look()
                echo.ask()
            for _ in range(ASKS):
                timed(look, ours)
                timed(echo.ask, null)
            saved = (
                (client.stats()["bytes"]["saved"] - saved) / (time.perf_counter() - started) / 1e9
            )
            if context is not None:
                context.__exit__(None, None, None)
            p50, p99 = median(ours) * 1e6, percentile(ours, 0.99) * 1e6
            echo50, echo99 = median(null) * 1e6, percentile(null, 0.99) * 1e6
            more = {"echo p50": echo50, "echo p99": echo99, "p99": p99}
            if context is None:
                rows.append(at_most(f"match of {KEYS} keys, p50", p50, "us", 80, **more))
                rows.append(
                    at_most("match, p99 beyond the echo's", p99 - echo99, "us", 300, **more)
                )
            else:
                rows.append(
                    at_most(
                        f"match{label}, p99 beyond the echo's",
                        p99 - echo99,
                        "us",
                        1000,
                        p50=p50,
                        saving_gb_s=saved,
                        **more,
                    )
                )
                assert saved > 1, "the other client did not save at full speed"
        echo.close()
        times: list[float] = []
        tokens = list(range(KEYS * TOKENS))
        for _ in range(300):
            timed(lambda: space.keys(tokens), times)
        rows.append(
            at_most(
                f"space.keys of {KEYS} blocks of 16 tokens, from a list",
                median(times) * 1e3,
                "ms",
                0.3,
            )
        )
        client.close()
    return rows


# --- a million blocks ---------------------------------------------------------------------------


def fill(client: Client, space: Space, blocks: int) -> Any:
    """Reserve and commit without copying: the catalog is measured here, not memcpy."""
    keys = None
    for number in range(blocks // GROUP):
        keys = space.keys(chain(number))
        saving = space.reserve(keys)
        with saving:
            assert len(saving) == GROUP
            saving.commit(GROUP)
    return keys


def million(folder: Path) -> list[Row]:
    rows: list[Row] = []
    large_folder, small_folder = folder / "large", folder / "small"
    large_folder.mkdir()
    small_folder.mkdir()
    count = MILLION // GROUP * GROUP
    with Daemon(large_folder, "4GiB") as large, Daemon(small_folder, "64MiB") as small:
        large.wait_for_arena()
        small.wait_for_arena()
        clients = [Client.connect(each.socket, populate=False) for each in (large, small)]
        spaces = [client.open(tiny_spec()) for client in clients]
        before = large.anonymous_bytes()
        fill(clients[0], spaces[0], count)
        per_block = (large.anonymous_bytes() - before) / count
        stats = clients[0].stats()
        assert stats["tiers"]["warm"]["blocks"] == count
        own = stats["catalog_bytes"] / count
        rows.append(
            at_most(
                "catalog of 1,000,000 blocks: memory a block", per_block, "B", 128, own_count=own
            )
        )
        fill(clients[1], spaces[1], 10 * GROUP)
        chance = random.Random(1)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(1500):
            for at, (space, most) in enumerate(zip(spaces, (count // GROUP, 10), strict=True)):
                keys = space.keys(chain(chance.randrange(most)))
                started = time.perf_counter()
                assert space.match(keys).ready == GROUP
                times[at].append(time.perf_counter() - started)
        ratio = median(times[0]) / median(times[1])
        rows.append(
            at_most("match among 1,000,000 blocks relative to 10,000", ratio, "x", 1.5,
                    us=median(times[0]) * 1e6, us_10k=median(times[1]) * 1e6)
        )  # fmt: skip
        for client in clients:
            client.close()
    return rows


def plans() -> list[Row]:
    """Plans that evict 1,024 of 1,000,000, in the process: the decision alone."""
    # Not at the top: `compare_side` imports this file with a tree that lacks these modules.
    from kvtier_daemon.catalog import Catalog, SessionId
    from kvtier_daemon.catalog.policy import make

    rows = []
    session = SessionId(1)
    for leased in (0.0, 0.9):
        catalog = Catalog(Store(), make("lru"))
        size = MILLION * 4096
        catalog.add_extent(size, bytearray(size // 4096 * 8))
        spec = tiny_spec()
        space = catalog.spaces.open(space_id(spec, "t"), spec)
        secret = os.urandom(32)
        from kvtier.key import token_keys

        chains = [
            token_keys(secret, chain(number), TOKENS).packed for number in range(MILLION // GROUP)
        ]
        for packed in chains:
            granted = catalog.reserve(session, space, 0, 0, b"", packed)
            catalog.commit(session, granted.lease, 0, GROUP)
        if leased:
            for packed in chains[: int(len(chains) * leased)]:
                catalog.load(session, space, packed, 3600, [], now=0.0, is_new=False)
        times = []
        for number in range(60):
            new = token_keys(secret, chain(10**6 + number), TOKENS).packed
            before = catalog.blocks.evicted["capacity"]
            started = time.perf_counter()
            granted = catalog.reserve(session, space, 0, 0, b"", new)
            times.append(time.perf_counter() - started)
            assert granted.outcomes == bytes(GROUP)
            if number:  # the first one finds what did not fill a whole chain
                assert catalog.blocks.evicted["capacity"] - before == GROUP
            catalog.commit(session, granted.lease, 0, GROUP)
        label = f", {leased:.0%} of the old end leased" if leased else ""
        rows.append(
            at_most(
                f"a plan that evicts {GROUP}{label}",
                median(times) * 1e3,
                "ms",
                1.0,
                p99=percentile(times, 0.99) * 1e3,
            )
        )
    return rows


# --- the arena, the daemon, the install ---------------------------------------------------------


def mixed_arena(folder: Path) -> list[Row]:
    """Two spaces of different block size, saved at random until nothing changes."""
    rows = []
    for total, one, two in ((1 << 30, 2 * MIB, 3 * MIB), (1 << 30, 192 * 1024, 2 * MIB)):
        place = folder / f"{one}-{two}"
        place.mkdir()
        with Daemon(place, str(total)) as daemon:
            daemon.wait_for_arena()
            with Client.connect(daemon.socket, populate=False) as client:
                spaces = [client.open(sized_spec(size)) for size in (one, two)]
                chance = random.Random(5)
                shares = []
                names = itertools.count(1)
                saved = 0
                while saved < 6 * total:
                    at = chance.randrange(2)
                    blocks = chance.randint(1, 40)
                    keys = spaces[at].keys(chain(next(names), blocks))
                    with spaces[at].reserve(keys) as saving:
                        saving.commit(len(saving))
                        saved += len(saving) * (one, two)[at]
                    if saved > 3 * total:
                        warm = client.stats()["tiers"]["warm"]
                        shares.append(warm["used_bytes"] / warm["capacity_bytes"])
                used = {size: client.stats()["tenants"]["default"]["blocks"] for size in (one,)}
        name = f"arena of 1 GiB, blocks of {one // 1024} and {two // 1024} KiB: ready"
        rows.append(
            at_least(name, median(shares) * 100, "%", 95, worst=min(shares) * 100, blocks=used[one])
        )
    return rows


def sized_spec(nbytes: int) -> KvSpec:
    return KvSpec.dense(
        model=f"sized-{nbytes}", layers=1, kv_heads=nbytes // (2 * 64 * 2 * TOKENS), head_dim=64,
        dtype="bfloat16", block_tokens=TOKENS, weights="rev:1",
    )  # fmt: skip


def idle(folder: Path) -> list[Row]:
    rows = []
    for size in ("256MiB", "12GiB"):
        ready, complete, anonymous = [], [], 0
        for number in range(5 if size == "256MiB" else 3):
            place = folder / f"idle-{size}-{number}"
            place.mkdir()
            with Daemon(place, size) as daemon:
                ready.append(daemon.ready_s)
                with Client.connect(daemon.socket, populate=False) as client:
                    client.wait_ready()
                complete.append(time.perf_counter() - daemon.started)
                if number == 0 and size == "256MiB":
                    anonymous = daemon.anonymous_bytes()
        rows.append(at_most(f"daemon with {size}: takes clients after", median(ready), "s", 1.0))
        rows.append(Row(f"daemon with {size}: memory complete after", median(complete), "s"))
        if anonymous:
            rows.append(at_most("daemon idle: anonymous memory", anonymous / MIB, "MiB", 80))
    return rows


def dependencies() -> list[Row]:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    direct = project["project"]["dependencies"]
    heavy = [name for name in direct if any(word in name for word in ("torch", "cupy", "cuda"))]
    assert not heavy
    return [at_most("core dependencies", len(direct), "", 10)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    rows: list[Row] = []
    probes = [harness.noise()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, part in enumerate((matches, million, mixed_arena, idle)):
            place = folder / str(number)
            place.mkdir()
            rows += part(place)
    rows += plans()
    rows += dependencies()
    probes.append(harness.noise())
    return harness.report("control", rows, probes, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
