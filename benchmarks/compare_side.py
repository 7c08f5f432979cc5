"""One tree's side of `compare.py`: prepares a group of rows, then runs a round for each line of stdin.

It runs under the interpreter of the tree that it measures, and uses only what every tree since 72e4edf has.
A round is answered by one line of JSON: a value for each row, where smaller is better.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

import kvtier
from bench_control import GROUP, KEYS, MILLION, Echo, chain, fill, tiny_spec
from bench_warm import MIB, buffers, fresh_keys, spec_of
from harness import Daemon, percentile
from kvtier import Client, wire

ASKS = 800
WARMUPS = 200
VIEWS = 256
VIEW_ROUNDS = 60
COPY_BLOCKS = 64
HITS = 6
PROMPT_BLOCKS = 64
SCHEDULER_CALLS = ("queued", "matched", "allocated", "step", "reported", "finished")

MATCH = getattr(wire, "MatchPrefix", None) or wire.Match  # its name before
Values = dict[str, float]
Round = Callable[[], Values]


def seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@contextmanager
def client_of(warm: str) -> Iterator[tuple[Client, Path]]:
    """A client of a daemon of its own whose memory is complete."""
    with tempfile.TemporaryDirectory() as name, Daemon(Path(name), warm) as daemon:
        daemon.wait_for_arena()
        with Client.connect(daemon.socket) as client:
            yield client, Path(name)


@contextmanager
def match(_tests: str) -> Iterator[Round]:
    """Matches of 1,024 keys, and an echo of as many bytes between them."""
    with client_of("256MiB") as (client, folder):
        space = client.open(tiny_spec("match"))
        keys = space.keys(chain(1))
        assert space.save(keys, bytearray(4096 * KEYS)).stored == KEYS
        request = wire.encode(MATCH(1, space.index, keys.packed))
        echo = Echo(folder, len(request), len(wire.encode(wire.Matched(1, KEYS, 0, 0.0))))

        def look() -> None:
            assert space.match(keys).ready == KEYS

        def run() -> Values:
            ours, null = [], []
            for _ in range(WARMUPS):
                look()
                echo.ask()
            for _ in range(ASKS):
                ours.append(seconds(look) * 1e6)
                null.append(seconds(echo.ask) * 1e6)
            beyond = percentile(ours, 0.99) - percentile(null, 0.99)
            return {"match of 1,024 keys, p50": median(ours), "match, p99 beyond echo": beyond}

        yield run
        echo.close()


@contextmanager
def million(_tests: str) -> Iterator[Round]:
    """Matches of 1,024 of a million blocks."""
    count = MILLION // GROUP * GROUP
    with client_of("4GiB") as (client, _):
        space = client.open(tiny_spec())
        fill(client, space, count)
        chance = random.Random(1)

        def run() -> Values:
            times = []
            for _ in range(ASKS // 4):
                keys = space.keys(chain(chance.randrange(count // GROUP)))
                started = time.perf_counter()
                ready = space.match(keys).ready
                times.append(time.perf_counter() - started)
                assert ready == GROUP
            return {"match among 1,000,000 blocks, p50": median(times) * 1e6}

        yield run


@contextmanager
def views(_tests: str) -> Iterator[Round]:
    """256 blocks as views, with match, lease and release."""
    with client_of("640MiB") as (client, _):
        space = client.open(spec_of(2 * MIB))
        keys = fresh_keys(space, VIEWS)
        assert space.save(keys, bytearray(VIEWS * 2 * MIB), checksum=False).stored == VIEWS

        def load() -> None:
            with space.load(keys) as blocks:
                assert len(blocks) == VIEWS

        def run() -> Values:
            times = [seconds(load) for _ in range(VIEW_ROUNDS)]
            return {"load 256 blocks as views, with release, p50": median(times) * 1e6}

        yield run


@contextmanager
def copies(_tests: str) -> Iterator[Round]:
    """Saves with checksums and loads of 128 MiB."""
    with client_of("512MiB") as (client, _):
        space = client.open(spec_of(2 * MIB))
        sources, targets = (buffers(COPY_BLOCKS, 2 * MIB) for _ in range(2))

        def run() -> Values:
            keys = fresh_keys(space, COPY_BLOCKS)
            save = seconds(lambda: space.save(keys, sources))
            load = seconds(lambda: space.load_into(keys, targets))
            assert targets[-1] == sources[-1], "loaded bytes are not the saved ones"
            return {"save 64 blocks of 2 MiB": save * 1e6, "load 64 blocks of 2 MiB": load * 1e6}

        for _ in range(5):  # until a save evicts
            run()
        yield run


@contextmanager
def plugin(tests: str) -> Iterator[Round]:
    """What the scheduler's thread spends on one request that hits, without an engine."""
    sys.path.insert(0, tests)  # before this tree's own, which `harness` appends
    in_package = (Path(tests) / "support" / "fake_engine.py").exists()
    fake = importlib.import_module("support.fake_engine" if in_package else "fake_engine")
    # The fake request hashes its blocks again at every look; an engine does it once.
    hashes = cached_property(fake.FakeRequest.block_hashes.fget)
    hashes.__set_name__(fake.FakeRequest, "block_hashes")
    fake.FakeRequest.block_hashes = hashes
    spent = 0.0

    def timed(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        nonlocal spent
        if arguments and isinstance(arguments[0], fake.FakeRequest):
            _ = arguments[0].block_hashes
        started = time.perf_counter()
        result = call(*arguments, **named)
        spent += time.perf_counter() - started
        return result

    with tempfile.TemporaryDirectory() as name, Daemon(Path(name), "256MiB") as daemon:
        daemon.wait_for_arena()
        with contextlib.closing(fake.FakeEngine(daemon.socket, pages=4 * PROMPT_BLOCKS)) as engine:
            for call in SCHEDULER_CALLS:
                setattr(engine.scheduler, call, partial(timed, getattr(engine.scheduler, call)))
            prompt = list(range(PROMPT_BLOCKS * fake.BLOCK + 1))

            def hit() -> float:
                nonlocal spent
                spent = 0.0
                request = engine.serve(prompt)
                assert request.cached == PROMPT_BLOCKS * fake.BLOCK, "not a hit"
                assert spent, "no call of the scheduler was measured"
                return spent

            engine.until(lambda: engine.serve(prompt).cached > 0)

            def run() -> Values:
                times = [hit() for _ in range(HITS)]
                return {"plugin: scheduler's calls of one hit": median(times) * 1e6}

            yield run


GROUPS = {each.__name__: each for each in (match, views, copies, plugin, million)}


def main() -> int:
    name, tests = sys.argv[1:]
    with GROUPS[name](tests) as run:
        run()
        print(kvtier.__file__, flush=True)
        for _ in sys.stdin:
            print(json.dumps(run()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
