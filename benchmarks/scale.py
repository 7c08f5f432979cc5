"""Fleets of 2 to 1,024 hosts by simulation: hit rates, traffic, requests to the store, and their price.

    python benchmarks/scale.py [--trace FILE] [--svg docs/scale.svg] [--master]

A trace is the users of two hosts; a fleet of N hosts has N/2 copies of it, whose users share nothing. Without
a file it is made up: a chat service. The hosts' own caches are replayed with the daemon's policy; what the
store has is calculated. Prints tables in Markdown. `--master` measures a real Mooncake master and one client
on this machine instead.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import traces
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.sim.plot import draw
from kvtier_kernels import Policy, Replay, Trace

HOSTS = (2, 16, 128, 1024)
COPY_HOSTS = 2  # that the trace is the work of
SAMPLED = 4  # hosts that are replayed of a larger fleet
BLOCK_TOKENS = 512  # of a trace
TOKEN_BYTES = 128 << 10  # an 8B model with grouped-query attention
RATIO = 1.5  # of r32 on bfloat16, docs/figures.md
LOCAL_BYTES = 1 << 40  # memory and disk of a host
SIZES = (16, 256)  # tokens of a block in the store
PUT_USD, GET_USD = 5e-6, 4e-7  # list prices of AWS S3, us-east-1, in 2026
QUESTION = 64  # names of a question at most
REQUESTS = 8000
ANY, STICKY = "any host", "same host"
Timed = traces.Timed


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one size and one router. Rates are shares of all blocks of all prompts; the others are per host and
    second, in tokens."""

    hosts: int
    router: str
    local: float
    modelled: float  # the same, by the window
    used: float  # with the store, if blocks are written when they are used again
    every: float  # with the store, if all blocks are written
    read: float
    written: float
    written_used: float
    asked: float
    fresh: float  # new tokens of the fleet, that are stored


def routed(requests: Sequence[Timed], hosts: int, router: str, chance: random.Random) -> list[int]:
    """Return the host of each request. With `STICKY`, a request goes where at least half of its blocks were
    before; others to any host."""
    if router == ANY:
        return [chance.randrange(hosts) for _ in requests]
    owner: dict[int, int] = {}
    found = []
    for _, blocks in requests:
        seen = next((at for at, one in enumerate(blocks) if one not in owner), len(blocks))
        goes_on = bool(seen) and 2 * seen >= len(blocks)
        host = owner[blocks[seen - 1]] if goes_on else chance.randrange(hosts)
        found.append(host)
        for one in blocks[seen:]:
            owner[one] = host
    return found


def local_hits(requests: Sequence[Timed], hosts: int, router: str, blocks: int) -> tuple[int, int]:
    """Return the hits and all blocks of some hosts of the fleet, each with the daemon's policy."""
    sampled = min(hosts, SAMPLED)
    work: list[list[tuple[float, traces.Request]]] = [[] for _ in range(sampled)]
    step = 1 + max(max(one) for _, one in requests if one)
    for copy in range(max(1, hosts // COPY_HOSTS)):
        chance = random.Random(copy)
        shift = chance.uniform(0, requests[-1][0])  # the copies are not in step
        for host, (when, one) in zip(
            routed(requests, hosts, router, chance), requests, strict=True
        ):
            if host < sampled:
                at = (when + shift) % (requests[-1][0] or 1)
                work[host].append(
                    (at if hosts > COPY_HOSTS else when, [b + copy * step for b in one])
                )
    hits = total = 0
    for mine in work:
        mine.sort(key=lambda each: each[0])
        policy = make("auto")
        assert isinstance(policy, Policy)
        names: dict[int, int] = {}
        each = array("Q", [names.setdefault(b, len(names)) for _, one in mine for b in one])
        packed = (
            each.tobytes(),
            array("I", [len(one) for _, one in mine]).tobytes(),
            array("d", [when for when, _ in mine]).tobytes(),
        )
        if mine:
            hits += sum(array("I", Replay(Trace(*packed), policy, blocks).run(len(mine))))
            total += len(each)
    return hits, total


def leading(flags: Sequence[bool]) -> int:
    return next((at for at, one in enumerate(flags) if not one), len(flags))


def with_store(
    requests: Sequence[Timed], hosts: int, router: str, window_s: float, seed: int
) -> dict[str, int]:
    """Return what a copy's requests find and cause, in blocks. A host has what it used in the last
    `window_s`; the store has everything that was written."""
    chance = random.Random(seed)
    last: dict[tuple[int, int], float] = {}
    used: set[int] = set()
    every: set[int] = set()
    sums = dict.fromkeys(("all", "local", "used", "every", "read", "asked"), 0)
    for host, (when, one) in zip(routed(requests, hosts, router, chance), requests, strict=True):
        mine = leading([when - last.get((host, b), -1e18) <= window_s for b in one])
        shared, stored = leading([b in used for b in one]), leading([b in every for b in one])
        sums["all"] += len(one)
        sums["local"] += mine
        sums["used"] += max(mine, shared)
        sums["every"] += max(mine, stored)
        sums["read"] += max(0, stored - mine)
        sums["asked"] += max(1, min(len(one), stored + 1) - mine) if mine < len(one) else 0
        used.update(one[:mine])
        every.update(one)
        for b in one:
            last[host, b] = when
    sums |= {"fresh": len(every), "fresh_used": len(used)}
    return sums


def simulated(requests: Sequence[Timed], hosts: int, router: str) -> Outcome:
    blocks = LOCAL_BYTES // (BLOCK_TOKENS * TOKEN_BYTES)
    hits, total = local_hits(requests, hosts, router, blocks)
    span_s = requests[-1][0] - requests[0][0]
    # How long a host keeps a block that is not used: until as many others have come.
    alone = with_store(requests, hosts, router, 0.0, 1)
    missed_s = (alone["all"] - hits / total * alone["all"]) / COPY_HOSTS / span_s
    window_s = blocks / missed_s
    sums = with_store(requests, hosts, router, window_s, 1)
    rate = BLOCK_TOKENS / COPY_HOSTS / span_s
    return Outcome(
        hosts, router, hits / total, sums["local"] / sums["all"], sums["used"] / sums["all"],
        sums["every"] / sums["all"], sums["read"] * rate, sums["fresh"] * rate, sums["fresh_used"] * rate,
        sums["asked"] * rate, sums["fresh"] * BLOCK_TOKENS * hosts / COPY_HOSTS / span_s,
    )  # fmt: skip


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def tables(outcomes: Sequence[Outcome]) -> str:
    """Two tables: what is found, and what it costs if all blocks are written."""
    found = (
        "hosts",
        "router",
        "own cache",
        "by the window",
        "and the store, `used`",
        "and the store, `all`",
    )
    lines = [row(*found), row(*["---"] * len(found))]
    lines += [
        row(
            f"{one.hosts:,}", one.router,
            *(f"{x:.1%}" for x in (one.local, one.modelled, one.used, one.every)),
        )
        for one in outcomes
    ]  # fmt: skip
    costs = (
        "hosts", "router", "block", "read, a host", "written, `all`", "written, `used`", "S3 requests",
        "names asked of a master", "S3 price, a host and hour", "stored in a day",
    )  # fmt: skip
    lines += ["", row(*costs), row(*["---"] * len(costs))]
    gbit = 8 * TOKEN_BYTES / RATIO / 1e9
    for one in outcomes:
        for tokens in SIZES:
            gets, puts, asked = one.read / tokens, one.written / tokens, one.asked / tokens
            # A bucket: a HEAD for each block that is asked about. A master: the same names, in batches, one
            # query for each read, and two calls for each write.
            bucket, names = gets + puts + asked, gets + 2 * puts + asked
            price = 3600 * (puts * PUT_USD + (gets + asked) * GET_USD)
            day = one.fresh * 86_400 * TOKEN_BYTES / RATIO / (1 << 40)
            rates = (f"{x * gbit:.2f} Gb/s" for x in (one.read, one.written, one.written_used))
            lines.append(
                row(
                    f"{one.hosts:,}", one.router, tokens, *rates, f"{bucket * one.hosts:,.0f}/s",
                    f"{names * one.hosts:,.0f}/s", f"${price:.2f}", f"{day:,.0f} TiB",
                )
            )  # fmt: skip
    return "\n".join(lines)


# --- measured ----------------------------------------------------------------------------------------


def master() -> str:
    """Measure a real master on loopback: names asked for in a second, and a client's reads and writes."""
    import ctypes
    import mmap

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from mooncake.store import MooncakeDistributedStore

    from support.mooncake import MooncakePool

    count, size = 128, int((16 * TOKEN_BYTES) / RATIO)
    with tempfile.TemporaryDirectory() as folder:
        pool = MooncakePool(Path(folder), lent_bytes=512 << 20)
        try:
            store = MooncakeDistributedStore()
            assert not store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", pool.address)
            memory = mmap.mmap(-1, count * size)
            at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            assert not store.register_buffer(at, count * size)
            memory[:] = random.Random(1).randbytes(count * size)
            content = memory[:]
            names = [f"scale/{number}" for number in range(count)]
            places, sizes = [at + n * size for n in range(count)], [size] * count
            asked = [f"scale/{number}" for number in range(QUESTION)]
            best = {"put": 0.0, "get": 0.0, "names": 0.0}
            for _ in range(5):
                began = time.perf_counter()
                assert not any(store.batch_upsert_from(names, places, sizes))
                best["put"] = max(best["put"], count * size / (time.perf_counter() - began))
                memory[:] = bytes(count * size)
                began = time.perf_counter()
                assert store.batch_get_into(names, places, sizes) == sizes
                best["get"] = max(best["get"], count * size / (time.perf_counter() - began))
                assert memory[:] == content, "a client must return what was put"
                began = time.perf_counter()
                for _ in range(100):
                    assert sum(store.batch_is_exist(asked)) == QUESTION
                best["names"] = max(best["names"], 100 * QUESTION / (time.perf_counter() - began))
            store.close()
        finally:
            pool.stop()
    return (
        f"one client, objects of {size / (1 << 20):.2f} MiB, TCP on loopback, best of 5: put "
        f"{best['put'] / 1e9:.2f} GB/s, get {best['get'] / 1e9:.2f} GB/s, {best['names']:,.0f} names a "
        f"second in questions of {QUESTION}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--master", action="store_true")
    options = parser.parse_args()
    if options.master:
        print(master())
        return
    requests = traces.read_timed(options.trace) if options.trace else traces.chat(REQUESTS, 1, 1.0)
    outcomes = [simulated(requests, hosts, router) for router in (ANY, STICKY) for hosts in HOSTS]
    print(tables(outcomes))
    if options.svg:
        ways = {"own cache": "local", "store, used": "used", "store, all": "every"}
        lines = {
            f"{way}, {router}": [
                (float(one.hosts), getattr(one, name)) for one in outcomes if one.router == router
            ]
            for router in (ANY, STICKY)
            for way, name in ways.items()
        }
        labels = {float(hosts): f"{hosts:,}" for hosts in HOSTS}
        options.svg.write_text(draw("hit rate of a fleet (calculated)", "hosts", lines, labels))


if __name__ == "__main__":
    main()
