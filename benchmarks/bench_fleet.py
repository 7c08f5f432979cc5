"""Time to first token of real vLLM engines that share blocks: of a hit in the store of a fleet, and of an
engine that decodes what another one on the same host has computed.

    python benchmarks/bench_fleet.py [--only s3|mooncake|roles] [--rounds N] [--out FILE] [--quick]

One host computes prompts and writes them to a real store on loopback. On another host, whose memory and disk
have none of them, the engine asks for each prompt as a hit in the store, in memory and on disk, and without
kvtier, and the store's own client gets as many objects of the same size. Then a host whose way to the store
is so slow that computing is faster. Each hit has all its tokens from the expected tier, and the same answer
as a hit in the engine's own cache.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import harness
from bench_remote import MooncakeClient, S3Client
from bench_ttft import (
    BLOCK,
    KV_BYTES,
    PREFIX,
    ColdDaemon,
    Engine,
    Parts,
    fresh,
    make,
    progress,
    same,
    share_row,
)
from harness import Row
from support.mooncake import MooncakePool
from support.object_store import ObjectStore
from support.proxy import Proxy
from ttft_journal import events

MODEL = "189M"
BLOCKS, NBYTES = PREFIX // BLOCK, PREFIX * KV_BYTES[MODEL]
ROOM = NBYTES * 3 // 2  # of memory: of prompts in turn, nothing of the one before the last is in it
BLOCK_BYTES = NBYTES // BLOCKS
OBJECT_BYTES = BLOCK_BYTES + 4096
BEFORE = 2  # rounds that do not count: the disk has the prompt of two rounds ago
REMOTE, COLD, RECOMPUTE, DECODE = 1.0, 1.10, 1.05, 1.10
SLOWER = 3.0  # how much longer loading takes than computing
STALE_S = 31.0  # without a read: an old speed that was low does not count
RECONNECT_S = 3.0
POLLS_S = 1.5  # longer than a worker of vLLM polls after its last step
WAIT_S = 60.0
OFF = {"load": False, "save": False}


def parts(seed: int) -> Parts:
    return [(seed, PREFIX), (1000, BLOCK // 2)]


class Host(ColdDaemon):
    """A daemon with memory, disk and the store."""

    def __init__(self, folder: Path, remote: str) -> None:
        secrets = folder / "state" / "secrets"
        secrets.mkdir(parents=True, mode=0o700)
        (secrets / "default").write_bytes(bytes(32))
        (secrets / "default").chmod(0o600)
        super().__init__(folder, ROOM, more=remote)
        self.until(lambda remote: remote["on"])

    @property
    def remote(self) -> dict[str, Any]:
        found: dict[str, Any] = self.stats()["tiers"]["remote"]
        return found

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds(now := self.remote):
            assert time.monotonic() < deadline, now
            time.sleep(0.02)


class Scene:
    """A store with the prompts of all rounds, and an engine that can be moved to another host."""

    def __init__(self, folder: Path, store: str, prompts: int, stack: ExitStack) -> None:
        self.store, self._folder, self._stack = store, folder, stack
        self.server: Any
        self.own: Any
        if store == "s3":
            self.server = ObjectStore(folder / "s3")
            self.own = S3Client(self.server)
        else:
            self.server = MooncakePool(folder, lent_bytes=(prompts + 4) * NBYTES * 4 // 3)
            self.own = MooncakeClient(self.server, OBJECT_BYTES, BLOCKS)
        stack.callback(self.server.stop)
        self.socket = folder / "engine.sock"
        with self.host("a", "all") as host:
            self.engine = stack.enter_context(Engine(folder, MODEL, str(self.socket)))
            for number in range(1, prompts + 1):
                self.ask(number)
                host.until(lambda remote, n=number: remote["states"]["written"] >= n * BLOCKS)
        progress(f"{store}: {prompts} prompts are in the store")

    def host(self, name: str, write: str = "none", port: int = 0) -> Host:
        """Start another host; the engine finds it at its socket."""
        config = self.server.config(more=f'codec = "raw"\nwrite = "{write}"\n')
        config = config.replace('buffer = "16MiB"', 'buffer = "128MiB"')
        if port:
            config = config.replace(f":{self.server.port}", f":{port}")
        host = Host(self._folder / name, config)
        self.socket.unlink(missing_ok=True)
        self.socket.symlink_to(host.socket)
        time.sleep(RECONNECT_S)
        return host

    def ask(self, seed: int, **kvtier: bool) -> dict[str, Any]:
        """The first token of a prompt of which the engine itself has nothing."""
        self.engine.reset()
        return self.engine.generate(parts(seed), **({"kvtier": kvtier} if kvtier else {}))

    def expect(self, host: Host, seed: int, shared: int, disk: bool) -> float:
        """The time of a hit for which this many objects, or all bytes from the disk, are read."""
        before, had = host.remote["states"]["read"], host.read_bytes()
        hit = self.ask(seed)
        read = host.remote["states"]["read"] - before, host.read_bytes() - had
        is_disk = read[1] >= (NBYTES if disk else BLOCK_BYTES)
        assert read[0] == shared and is_disk == disk, (read, host.remote["loads"])
        same(hit, self.engine.generate(parts(seed)))
        return float(hit["seconds"])


def remote_hits(scene: Scene, rounds: int) -> Iterator[Row]:
    arms: dict[str, list[float]] = {
        name: [] for name in ("recompute", "remote", "warm", "cold", "get")
    }
    others = [f"own/{at}" for at in range(BLOCKS)]
    scene.own.put(others, os.urandom(OBJECT_BYTES * BLOCKS), OBJECT_BYTES)

    def get() -> float:
        began = time.perf_counter()
        scene.own.get(others, OBJECT_BYTES)
        return time.perf_counter() - began

    # A Mooncake Store has no list: this host learns from a miss which objects exist.
    asks = {"save": False} if scene.store == "mooncake" else OFF
    with scene.host("b") as host:
        for number in range(-BEFORE, rounds):
            seed, took = number + BEFORE + 1, dict[str, float]()
            recomputed = scene.ask(seed, **asks)
            assert not recomputed["cached"] or number == -BEFORE, recomputed
            host.until(lambda remote: not (remote["asking"] or remote["reading"]))
            took["recompute"] = recomputed["seconds"]
            if number == -BEFORE:  # asks for the list, and measures the store
                scene.ask(seed, save=False)
                host.until(lambda remote: not (remote["asking"] or remote["reading"]))
            for name in ("cold", "remote", "get") if number % 2 else ("get", "remote", "cold"):
                if name == "get":
                    took[name] = get()
                elif name == "remote" and number == -BEFORE:
                    scene.ask(seed)
                elif name == "remote":
                    took[name] = scene.expect(host, seed, BLOCKS, False)
                    host.wait_for_written(seed * BLOCKS)
                    took["warm"] = scene.expect(host, seed, 0, False)
                elif number >= 0:
                    took[name] = scene.expect(host, seed - BEFORE, 0, True)
            for name, values in arms.items() if number >= 0 else ():
                values.append(took[name])
    more = {f"{name} ms": median(values) * 1e3 for name, values in arms.items()}
    at_once = zip(arms["remote"], arms["cold"], arms["get"], strict=True)
    name = (
        f"{scene.store}: first token of a hit in the store / a hit on disk and the client's own get"
    )
    yield share_row(name, [one / (cold + got) for one, cold, got in at_once], REMOTE, **more)
    pairs = zip(arms["remote"], arms["recompute"], strict=True)
    name = f"{scene.store}: first token of a hit in the store / recomputed"
    yield share_row(name, [one / other for one, other in pairs], RECOMPUTE)
    if scene.store == "s3":
        yield from slow_store(scene, rounds, SLOWER * median(arms["recompute"]))


def slow_store(scene: Scene, rounds: int, load_s: float) -> Iterator[Row]:
    """A host that can load a prompt in this time."""
    ratios = []
    with Proxy(scene.server.port) as proxy:
        proxy.bytes_s = NBYTES / load_s
        with scene.host("c", port=proxy.port) as host:
            scene.ask(1)  # asks for the list
            host.until(lambda remote: not remote["asking"])
            for number in range(2, rounds + 2):
                if number == rounds + 1:
                    time.sleep(STALE_S)
                took = {}
                for seed in (number, next(fresh)) if number % 2 else (next(fresh), number):
                    took[seed == number] = scene.ask(
                        seed, **({} if seed == number else {"load": False})
                    )
                assert took[True]["cached"] < PREFIX and not took[False]["cached"], took
                ratios.append(took[True]["seconds"] / took[False]["seconds"])
            verdicts = {why: count for why, count in host.remote["loads"].items() if count}
    name = f"a store in which loading takes {SLOWER:g} times as long: first token / recomputed"
    more = {"first": ratios[0], f"after {STALE_S:g} s": ratios[-1], "most": max(ratios), **verdicts}
    yield share_row(name, ratios, RECOMPUTE, **more)


def held_back_s(engine: Engine, hit: dict[str, Any]) -> float:
    """How long the scheduler held this request back before it loaded."""
    began, until = hit["began"], hit["began"] + hit["seconds"]
    found = (at for what, much, at, _ in events(engine.records) if what == "matched" and much)
    return next(at for at in found if began <= at <= until) - began


def last_save(engine: Engine, before: float) -> float:
    """When the last save of this engine before then ended."""
    saves = (ended for what, _, _, ended in events(engine.records) if what == "save")
    return max(ended for ended in saves if ended <= before)


def roles(folder: Path, rounds: int) -> Iterator[Row]:
    """An engine that computes, and one on the same host that decodes. vLLM's worker polls for a second after
    a step, and vLLM binds the workers of both engines to the same core: so the hit in memory is measured
    while the other engine polls too, and once while it does not."""
    first, warm, idle = list[float](), list[float](), list[float]()
    held, held_warm, saving = list[float](), list[float](), list[float]()
    with ExitStack() as stack:
        daemon = stack.enter_context(ColdDaemon(folder / "roles", 4 * ROOM))
        prefill, decode = (
            stack.enter_context(Engine(folder, MODEL, daemon.socket, role=role))
            for role in ("kv_producer", "kv_consumer")
        )
        for number in range(-1, rounds):
            seed = next(fresh)
            decode.reset()
            computed = prefill.generate(parts(seed))
            assert not computed["cached"]
            one = decode.generate(parts(seed))
            resident = decode.generate(parts(seed))
            decode.reset()
            prefill.generate([(next(fresh), BLOCK // 2)])
            other = decode.generate(parts(seed))
            decode.reset()
            time.sleep(POLLS_S)
            alone = decode.generate(parts(seed))
            for hit in (one, other, alone):
                same(hit, resident)
            if number >= 0:
                for times, hit in ((first, one), (warm, other), (idle, alone)):
                    times.append(hit["seconds"])
                held.append(held_back_s(decode, one))
                held_warm.append(held_back_s(decode, other))
                answered = computed["began"] + computed["seconds"]
                saving.append(last_save(prefill, one["began"] + one["seconds"]) - answered)
    ratios = [one / other for one, other in zip(first, warm, strict=True)]
    more = {
        "decoder ms": median(first) * 1e3, "warm ms": median(warm) * 1e3,
        "warm, the other engine is idle, ms": median(idle) * 1e3,
        "decoder held back ms": median(held) * 1e3, "warm held back ms": median(held_warm) * 1e3,
        "last save ends after the answer, ms": median(saving) * 1e3,
    }  # fmt: skip
    name = "first token of the decoder after the prefill engine's answer / a hit in memory"
    yield share_row(name, ratios, DECODE, **more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("s3", "mooncake", "roles"), action="append")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--folder", help="where models and segments lie; a temporary one otherwise")
    parser.add_argument("--out")
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    probes, rows = [harness.noise()], list[Row]()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        make(folder, MODEL)
        for part in options.only or ("s3", "mooncake", "roles"):
            (place := folder / part).mkdir()
            (place / MODEL).symlink_to(folder / MODEL)
            with ExitStack() as stack:
                if part == "roles":
                    found = roles(place, rounds)
                else:
                    scene = Scene(place, part, rounds + BEFORE, stack)
                    found = remote_hits(scene, rounds)
                for row in found:
                    rows.append(row)
                    progress(row.line()[:300])
    probes.append(harness.noise())
    return harness.report("fleet", rows, probes, options.out, rounds=rounds)


if __name__ == "__main__":
    sys.exit(main())
