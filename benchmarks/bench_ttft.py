"""Time to first token with a real vLLM engine: what a hit in kvtier adds to a hit in the engine's own cache.

Each round runs a prompt once as a hit of every kind and once as a resident one. The results are the medians
of the rounds' differences, with a native copy of the same bytes and fio in the same run for comparison. Each
hit is verified: it has as many cached tokens as the resident one, the same token with the same probability,
and, if it is cold, the kernel counted its bytes as read from the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import disks
import harness
from draw_timeline import read_spans
from harness import Daemon, Row, at_least, at_most, interval, percentile
from kvtier import Client
from kvtier_kernels import Mapping, copy
from ttft_journal import events

HERE = Path(__file__).parent
MIB = 1 << 20
BLOCK = 128  # tokens: the engine's on a CPU
PREFIX = 4096
TAILS = (1, 128)
PROMPTS = 3
ENCODED = ("r32", "q8")
KV_BYTES = {"189M": 16 << 10, "KV-heavy": 32 << 10}
COPY_SHARE, SYNC_MS, ASYNC_MS = 1.15, 3.0, 7.0
FIO_SHARE = 0.95
RATIO = 1.10
START_S = ANSWER_S = 240.0
PATIENCE_S = 10.0  # until a timeline is written
BEFORE, AFTER = "the engine takes it in", "its token goes out"
HEADER = 4096  # of a record on disk
THREADS = 2  # of a copy, as the plugin does
ENVIRONMENT = {
    # Threads that compute are bound to a core each, as vLLM does by itself. Unbound, two of them come to
    # share one while the engine's scheduler spins on the other: a step takes 10 to 30 times as long.
    "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "auto", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip
STEP = 1024  # tokens of a step
BURST, BURST_PREFIX, BURST_TAIL = 32, 2048, 16
WAITING = 64
FLIGHTS, FLIGHT_PREFIX, FLIGHT_MIB = 16, 2048, 64
RUNNING, FLIGHT_TOKENS = 4, 240
SAVED_TOKENS, SAVED_DECODE = 1024, 32
Parts = list[tuple[int, int]]
fresh = itertools.count(10_000)  # seeds of new prompts


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    rounds: int
    restarted_rounds: int
    queued_rounds: int
    saving_pairs: int
    waves: int
    bursts: int
    encoded_rounds: int


FULL = Size(15, 9, 9, 30, 12, 3, 15)
QUICK = Size(3, 3, 3, 6, 3, 1, 0)
started = time.monotonic()


def progress(text: str) -> None:
    print(f"{time.monotonic() - started:7.1f} s  {text}", file=sys.stderr, flush=True)


class Engine:
    """A running engine, `ttft_engine.py` under it."""

    def __init__(self, folder: Path, model: str, socket: str, **changes: Any) -> None:
        self.records = Path(tempfile.mkdtemp(dir=folder))
        self.log = self.records / "engine.log"
        extra = {"socket": socket, "patience_ms": 5000} | changes.pop("extra", {})
        transfer = {
            "kv_connector": "BenchConnector", "kv_connector_module_path": "ttft_connector",
            "kv_role": changes.pop("role", "kv_both"), "kv_connector_extra_config": extra,
            "kv_load_failure_policy": "recompute",
        }  # fmt: skip
        arguments = {
            "model": str(folder / model), "dtype": "bfloat16", "enforce_eager": True,
            "max_model_len": 4608, "max_num_batched_tokens": STEP, "max_num_seqs": 64,
            "skip_tokenizer_init": True, "prefix_caching_hash_algo": "sha256_cbor",
            "kv_transfer_config": transfer, "disable_log_stats": True,
        } | changes  # fmt: skip
        environment = os.environ | ENVIRONMENT | {
            "PYTHONPATH": str(HERE), "KVTIER_BENCH_RECORDS": str(self.records),
            "KVTIER_BENCH_FLOOR_BLOCKS": str(PREFIX // BLOCK),
        }  # fmt: skip
        with self.log.open("w") as sink:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "ttft_engine.py"), json.dumps(arguments)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True, env=environment,
                start_new_session=True,
            )  # fmt: skip
        try:
            assert self.answer(START_S) == "ready"
        except BaseException:
            self.stop()
            raise
        progress(f"{model}: an engine has started")

    def answer(self, seconds: float = ANSWER_S) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if ready else ""
        assert line, f"no answer:\n{self.log.read_text()[-4000:]}"
        return json.loads(line)

    def begin(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def order(self, **order: Any) -> Any:
        self.begin(**order)
        return self.answer()

    def generate(self, parts: Parts, tokens: int = 1, **transfer: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.order(
            generate={"parts": parts, "tokens": tokens, "transfer": transfer}
        )
        return found

    def run(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.order(run=requests)
        return found

    def reset(self) -> None:
        """The engine's own cache is empty from now on."""
        assert self.order(reset=True) is True

    def stop(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            # Its core and its workers are processes of their own, and outlive one that was killed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.stdout.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class ColdDaemon(Daemon):
    """A daemon with both tiers that writes saved blocks to disk: raw, so that it reads the same bytes as
    fio, or with a codec."""

    def __init__(self, folder: Path, warm_bytes: int, codec: str = "raw", more: str = "") -> None:
        self.cold = folder / "cold"
        self.cold.mkdir(parents=True, exist_ok=True)
        how = f'write = "through"\nscrub = 0\ncodecs = ["*={codec}"]\n'
        more += f'[cold]\ndirectories = ["{self.cold}"]\nsize = "16GiB"\n{how}'
        # Of prompts in turn, the last one is in memory and nothing of the others.
        super().__init__(folder, str(warm_bytes), more, policy="lru")
        self.wait_for_arena()

    def stats(self) -> dict[str, Any]:
        with Client.connect(self.socket, populate=False) as client:
            return client.stats()

    def wait_for_written(self, blocks: int, patience_s: float = 60.0) -> None:
        until = time.monotonic() + patience_s
        while (found := self.stats()["tiers"]["cold"]["blocks"]) < blocks:
            assert time.monotonic() < until, f"{found} of {blocks} blocks are on disk"
            time.sleep(0.02)

    def codecs(self) -> set[str]:
        """Return the codecs of the stored blocks."""
        return {space["codec"] for space in self.stats()["tiers"]["cold"]["coding"]["spaces"]}

    def files(self) -> list[Path]:
        return sorted((self.cold / "segments" / "default").iterdir())

    def read_bytes(self) -> int:
        return disks.disk_bytes(self.process.pid)[0]


class Copies:
    """A native copy of `nbytes` between two memories of this process."""

    def __init__(self, nbytes: int) -> None:
        self.seconds: list[float] = []
        self._maps = []
        for name in ("source", "target"):
            memory = os.memfd_create(name)
            os.posix_fallocate(memory, 0, nbytes)
            self._maps.append(Mapping(memory, nbytes, True))
            self._maps[-1].populate()
            os.close(memory)
        self._views = [memoryview(one) for one in self._maps]

    def once(self) -> None:
        began = time.perf_counter()
        copy(self._views[1], self._views[0], False, THREADS)
        self.seconds.append(time.perf_counter() - began)

    @property
    def ms(self) -> float:
        return median(self.seconds) * 1e3


@dataclass
class Hits:
    """Seconds of hits of one kind and of the resident hits in the same rounds."""

    hit: list[float] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)

    @property
    def added_ms(self) -> list[float]:
        return [(one - other) * 1e3 for one, other in zip(self.hit, self.resident, strict=True)]

    @property
    def ratios(self) -> list[float]:
        return [one / other for one, other in zip(self.hit, self.resident, strict=True)]


def added_row(name: str, hits: Hits, bar_ms: float, **more: Any) -> Row:
    low, high = interval(hits.added_ms)
    value = median(hits.added_ms)
    more["resident ms"] = median(hits.resident) * 1e3
    return Row(name, value, "ms", f"<= {bar_ms:.2f}", value <= bar_ms, low, high, more)


def share_row(name: str, ratios: Sequence[float], bar: float, **more: Any) -> Row:
    low, high = interval(ratios)
    value = median(ratios)
    return Row(name, value, "x", f"<= {bar:g}", value <= bar, low, high, more)


def same(hit: dict[str, Any], resident: dict[str, Any]) -> None:
    """Both are hits of the whole prefix, and say the same."""
    assert hit["cached"] == resident["cached"] == PREFIX, (hit, resident)
    assert hit["tokens"] == resident["tokens"], (hit, resident)
    apart = abs(hit["logprobs"][0] - resident["logprobs"][0])
    assert apart < 1e-2, f"{apart} apart: {hit} {resident}"


# --- hits --------------------------------------------------------------------------------------


@dataclass
class Scene:
    """An engine and a daemon, and the prompts that are on disk. `timelines`: where the engine writes them."""

    model: str
    engine: Engine
    daemon: ColdDaemon
    codec: str = "raw"
    timelines: Path | None = None
    reads: list[int] = field(default_factory=list)  # bytes, of each cold hit

    def __post_init__(self) -> None:
        self.seeds = range(1, 1 + PROMPTS)
        # Memory has room for one and a half: the next one is never there.
        self.turns = itertools.cycle(self.seeds)

    @property
    def nbytes(self) -> int:
        return PREFIX * KV_BYTES[self.model]

    def parts(self, seed: int, tail: int) -> Parts:
        return [(seed, PREFIX), (1000 + tail, tail)]

    def fill(self) -> None:
        """Compute and save each prefix."""
        for number, seed in enumerate(self.seeds, 1):
            self.engine.generate(self.parts(seed, 1))
            self.daemon.wait_for_written(number * PREFIX // BLOCK)
            progress(f"{self.model}: prompt {number} of {len(self.seeds)} is saved")
        assert self.daemon.codecs() == {self.codec}, self.daemon.stats()["tiers"]["cold"]["coding"]

    def hit(self, seed: int, tail: int, load: str, cold: bool | None) -> dict[str, Any]:
        self.engine.reset()
        before = self.daemon.read_bytes()
        found = self.engine.generate(self.parts(seed, tail), bench={"load": load})
        read = self.daemon.read_bytes() - before
        if cold:
            least = self.nbytes if self.codec == "raw" else 1
            assert read >= least, f"{read} of {self.nbytes} bytes came from the disk"
            self.reads.append(read)
        elif cold is not None:
            assert not read, f"{read} bytes came from the disk"
        return found

    def floor(self, seed: int, tail: int, load: str) -> dict[str, Any]:
        self.engine.reset()
        return self.engine.generate(
            self.parts(seed, tail),
            bench={"load": load, "floor": True},
            kvtier={"load": False, "save": False},
        )


def warm(scene: Scene, tail: int, size: Size) -> list[Row]:
    """Hits in memory, and those of a connector that has all in memory of its own."""
    kinds = [(kind, load) for kind in ("kvtier", "floor") for load in ("sync", "async")]
    found = {kind: Hits() for kind in kinds}
    copies = Copies(scene.nbytes)
    seed = scene.seeds[-1]
    for number in range(-1, size.rounds):
        seconds = {}
        at = number % len(kinds)
        residents = "sync" if number % 2 else "async"
        for kind, load in kinds[at:] + kinds[:at]:
            copies.once()
            if kind == "floor":
                one = scene.floor(seed, tail, load)
                assert one["cached"] == PREFIX, one
            else:
                one = scene.hit(seed, tail, load, None if number < 0 else False)
                if load == residents:
                    resident = scene.engine.generate(scene.parts(seed, tail))
                    same(one, resident)
            seconds[kind, load] = one["seconds"]
        if number >= 0:
            for key, hits in found.items():
                hits.hit.append(seconds[key])
                hits.resident.append(resident["seconds"])
    rows = []
    for load, least in (("sync", SYNC_MS), ("async", ASYNC_MS)):
        hits, perfect = found["kvtier", load], found["floor", load]
        name = f"{scene.model}, tail of {tail}: warm hit, {load}"
        more = {"memcpy ms": copies.ms, "floor ms": median(perfect.added_ms)}
        rows.append(added_row(f"{name}, added", hits, COPY_SHARE * copies.ms + least, **more))
        if scene.model == "189M" and tail == TAILS[-1]:
            more = {"floor": median(perfect.ratios)}
            rows.append(share_row(f"{name}, ratio", hits.ratios, RATIO, **more))
    rows += [timeline(scene, seed, tail, load) for load in ("sync", "async")]
    progress(f"{scene.model}, tail of {tail}: warm hits")
    return rows


def timeline(scene: Scene, seed: int, tail: int, load: str) -> Row:
    """Where the time of one hit goes: when each call of the connector began, and how long it took."""
    one = scene.hit(seed, tail, load, False)
    until = one["began"] + one["seconds"]
    calls = [
        f"{what} {(began - one['began']) * 1e3:.2f}+{(ended - began) * 1e3:.2f}"
        for what, _, began, ended in events(scene.engine.records)
        if one["began"] <= began <= until
    ]
    name = f"{scene.model}, tail of {tail}: one warm hit, {load}, in all"
    return Row(name, one["seconds"] * 1e3, "ms", more={"calls, at ms + for ms": ", ".join(calls)})


def cold(scene: Scene, tail: int, rounds: int, when: str) -> list[Row]:
    """Hits that are only on disk: the prompts alternate, because memory has room for one. Encoded blocks are
    compared with fio reading their raw size; a lossy hit is compared with a resident hit on the same
    pages."""
    found = {load: Hits() for load in ("sync", "async")}
    ones: dict[str, list[dict[str, Any]]] = {load: [] for load in found}
    copies = Copies(scene.nbytes)
    file = max(scene.daemon.files(), key=lambda path: path.stat().st_size)
    fio = disks.Fio([file], scene.nbytes, 2 * MIB, 8)
    for number in range(-1, rounds):
        loads = list(found) if number % 2 else list(found)[::-1]
        for load in loads:
            seed = next(scene.turns)
            copies.once()
            one = scene.hit(seed, tail, load, True)
            resident = scene.engine.generate(scene.parts(seed, tail))
            same(one, resident)
            if number >= 0:
                ones[load].append(one)
                found[load].hit.append(one["seconds"])
                found[load].resident.append(resident["seconds"])
        fio.once()
        if number < 0:
            fio.forget()
    assert disks.cached_bytes(scene.daemon.files()) == 0
    rows = []
    disk_ms = median(fio.seconds) * 1e3 / FIO_SHARE
    for load, least in (("sync", SYNC_MS), ("async", ASYNC_MS)):
        name = f"{scene.model}, tail of {tail}: cold hit{when}, {load}"
        bar = disk_ms + COPY_SHARE * copies.ms + least
        more = {"memcpy ms": copies.ms, "fio ms": median(fio.seconds) * 1e3}
        more["read MiB"] = median(scene.reads) / MIB
        rows.append(added_row(f"{name}, added", found[load], bar, **more))
        if scene.model == "189M" and tail == TAILS[-1]:
            rows.append(share_row(f"{name}, ratio", found[load].ratios, RATIO))
    if scene.timelines is not None:
        for load, hits in found.items():
            at = median_at(hits.added_ms)
            beside = {"resident ms": hits.resident[at] * 1e3, "fio ms": fio.seconds[at] * 1e3}
            name = f"{scene.model}, tail of {tail}: one cold hit{when}, {load}, in all"
            rows.append(one_cold(name, ones[load][at], scene.timelines, **beside))
    progress(f"{scene.model}, tail of {tail}: cold hits{when}")
    return rows


def median_at(values: Sequence[float]) -> int:
    """Where the median is, of an odd number of values."""
    return sorted(range(len(values)), key=values.__getitem__)[len(values) // 2]


def one_cold(name: str, one: dict[str, Any], timelines: Path, **beside: float) -> Row:
    """Where the time of one hit goes, as the plugin tells it; what is before and after that is the engine's.
    Beside it what the others of its round took."""
    until = time.monotonic() + PATIENCE_S
    spans = parts_of(read_spans(timelines.read_text()), one)
    while not any(what.startswith("copy") for what, _, _ in spans):  # what is written last
        assert time.monotonic() < until, f"{timelines} has no copy of this hit: {one}"
        time.sleep(0.05)
        spans = parts_of(read_spans(timelines.read_text()), one)
    # The drawn part is what the disk has delivered.
    assert any(what == "blocks come from disk" for what, _, _ in spans), f"no cold hit: {one}"
    begun, ended = spans[0][1], max(at + took for _, at, took in spans)
    in_all = one["seconds"] * 1e3
    parts = [(BEFORE, 0.0, begun), *spans, (AFTER, ended, in_all - ended)]
    told = [[what, round(at, 2), round(took, 2)] for what, at, took in parts]
    return Row(name, in_all, "ms", more={**beside, "parts, from ms, for ms": told})


def parts_of(spans: list[dict[str, Any]], one: dict[str, Any]) -> list[tuple[str, float, float]]:
    """The spans within a hit's time, by their begin: name, when it began and how long it took, in ms
    of that hit. The clocks are one: `perf_counter` is the monotonic one here."""
    began_us = one["began"] * 1e6
    parts = [(span["name"], (span["ts"] - began_us) / 1e3, span["dur"] / 1e3) for span in spans]
    mine = [part for part in parts if 0 <= part[1] <= one["seconds"] * 1e3]
    return sorted(mine, key=lambda part: (part[1], part[1] + part[2]))


# --- many at once ------------------------------------------------------------------------------

OFF = {"kvtier": {"load": False, "save": False}}


def asked(parts: Parts, tokens: int = 1, **more: Any) -> dict[str, Any]:
    return {"parts": parts, "tokens": tokens, **more}


def first_token_s(one: dict[str, Any]) -> float:
    return float(one["times"][0] - one["began"])


def gaps_ms(one: dict[str, Any], since: float = 0.0, until: float = float("inf")) -> list[float]:
    """The times between this request's tokens that end within these."""
    pairs = itertools.pairwise(one["times"])
    return [(later - earlier) * 1e3 for earlier, later in pairs if since < later <= until]


def queued(scene: Scene, rounds: int) -> list[Row]:
    """A hit on the disk that waits for another request, measured from the first token of that request. An
    engine notices a new request when a step ends, so the first of two requests ends before the scheduler
    sees the second."""
    found = {load: Hits() for load in ("sync", "async")}
    in_all = {load: Hits() for load in found}
    copies = Copies(scene.nbytes)
    for number in range(-1, rounds):
        for load in found:
            parts = scene.parts(next(scene.turns), 1)
            scene.engine.reset()
            before, seconds = scene.daemon.read_bytes(), []
            for _ in range(2):  # the second time it is resident
                step = asked([(next(fresh), 2 * STEP)], transfer=OFF)
                hit = asked(parts, transfer={"bench": {"load": load}})
                first, one = scene.engine.run([step, hit])
                assert one["cached"] == PREFIX, one
                seconds.append((one["times"][0] - first["times"][0], first_token_s(one)))
            assert scene.daemon.read_bytes() - before == scene.nbytes
            copies.once()
            if number >= 0:
                for at, hits in enumerate((found[load], in_all[load])):
                    hits.hit.append(seconds[0][at])
                    hits.resident.append(seconds[1][at])
    rows = []
    for load, least in (("sync", SYNC_MS), ("async", ASYNC_MS)):
        name = f"{scene.model}, tail of 1: cold hit that queued for two steps of {STEP} tokens, {load}, added"
        more = {"memcpy ms": copies.ms, "with its time in the queue": median(in_all[load].added_ms)}
        rows.append(added_row(name, found[load], COPY_SHARE * copies.ms + least, **more))
    progress(f"{scene.model}: queued hits")
    return rows


def bursts(scene: Scene, count: int) -> list[Row]:
    """Many requests at once on a prefix that is on the disk alone; the same, computed."""
    engine, daemon = scene.engine, scene.daemon
    kinds: dict[str, list[float]] = {"hits": [], "computed": []}
    reads, hit = [], 0
    for _ in range(count):
        scene.hit(next(scene.turns), 1, "sync", None)
        scene.hit(next(scene.turns), 1, "sync", None)
        seed = next(scene.turns)
        for kind, times in kinds.items():
            engine.reset()
            before = daemon.read_bytes()
            transfer = {} if kind == "hits" else OFF
            told = engine.run(
                [
                    asked([(seed, BURST_PREFIX), (next(fresh), BURST_TAIL)], transfer=transfer)
                    for _ in range(BURST)
                ]
            )
            times += [first_token_s(one) for one in told]
            if kind == "hits":
                reads.append(daemon.read_bytes() - before)
                hit += sum(one["cached"] == BURST_PREFIX for one in told)
    nbytes = BURST_PREFIX * KV_BYTES[scene.model]
    name = f"{BURST} requests at once on one cold prefix of {BURST_PREFIX} tokens"
    slow, computed = (percentile(times, 0.99) * 1e3 for times in kinds.values())
    rows = [
        at_most(f"{name}: disk reads of a key", max(reads) / nbytes, "", 1.0),
        at_most(
            f"{name}: TTFT p99 relative to recompute's", slow / computed, "x", 1.0,
            **{"p99 ms": slow, "recompute's": computed, "p50 ms": median(kinds["hits"]) * 1e3},
        ),
        at_least(f"{name}: hits", hit / (count * BURST), "", 1.0),
    ]  # fmt: skip
    rows.append(asking(scene))
    progress(f"{scene.model}: bursts")
    return rows


def asking(scene: Scene) -> Row:
    """Requests that wait for a daemon that says nothing for a while: each step asks for each of them."""
    engine, daemon = scene.engine, scene.daemon
    since = time.perf_counter()
    daemon.process.send_signal(signal.SIGSTOP)
    engine.begin(run=[asked([(next(fresh), 2 * BLOCK)]) for _ in range(WAITING)])
    time.sleep(1.0)
    daemon.process.send_signal(signal.SIGCONT)
    engine.answer()
    calls = [one for one in events(engine.records) if one[0] == "matched" and one[2] > since]
    us = [(ended - began) * 1e6 for _, _, began, ended in calls]
    again = sum(1 for _, answer, _, _ in calls if not answer)
    assert again >= 10 * WAITING, f"{again} of {len(calls)} were to be asked again: nobody waited"
    more = {"p50 us": median(us), "calls": len(us), "of them to be asked again": again}
    return at_most(
        f"asking with {WAITING} requests waiting, p99", percentile(us, 0.99), "us", 20, **more
    )


def flights(engine: Engine, waves: int) -> list[Row]:
    """Return the times between tokens of running requests while others load; and the same with resident
    hits."""
    prompts = [[(100 + at, FLIGHT_PREFIX), (7, 1)] for at in range(FLIGHTS)]
    for parts in prompts:
        engine.generate(parts)
    rows = []
    for at_once in (1, 4, 16):
        gaps: dict[str, list[float]] = {"load": [], "resident": [], "alone": []}
        for number in range(waves):
            for kind in ("load", "resident") if number % 2 else ("resident", "load"):
                engine.reset()
                if kind == "resident":
                    engine.run([asked(parts) for parts in prompts])
                running = [
                    asked([(next(fresh), 64)], FLIGHT_TOKENS, transfer=OFF) for _ in range(RUNNING)
                ]
                loads = [
                    asked(parts, after=(0, 16 + at // at_once * 12 * at_once))
                    for at, parts in enumerate(prompts)
                ]
                told = engine.run(running + loads)
                steady, flown = told[0], told[RUNNING:]
                assert all(one["cached"] == FLIGHT_PREFIX for one in flown), flown
                for first in range(0, FLIGHTS, at_once):
                    some = flown[first : first + at_once]
                    began = min(one["began"] for one in some)
                    gaps[kind] += gaps_ms(steady, began, max(one["times"][0] for one in some))
                gaps["alone"] += gaps_ms(steady, 0.0, flown[0]["began"])
        p99 = {kind: percentile(values, 0.99) for kind, values in gaps.items()}
        more = {f"{kind} ms": value for kind, value in p99.items()} | {"gaps": len(gaps["load"])}
        name = f"ITL p99 while {at_once} loads of {FLIGHT_MIB} MiB fly, relative to resident hits"
        rows.append(at_most(name, p99["load"] / p99["resident"], "x", 1.10, **more))
        progress(f"{at_once} loads at once")
    return rows


def saving(engine: Engine, pairs: int) -> list[Row]:
    """The same work with and without saving; nothing of it is ever found."""
    speeds: dict[str, list[float]] = {"on": [], "off": []}
    gaps: dict[str, list[float]] = {"on": [], "off": []}
    engine.reset()
    since = time.perf_counter()
    for number in range(-1, pairs):
        for kind in ("on", "off") if number % 2 else ("off", "on"):
            requests = [
                asked(
                    [(next(fresh), SAVED_TOKENS)],
                    SAVED_DECODE,
                    transfer={} if kind == "on" else OFF,
                )
                for _ in range(4)
            ]
            told = engine.run(requests)
            time.sleep(0.2)  # what it still has to save is not the other's
            if number < 0:
                continue
            took = max(one["times"][-1] for one in told) - told[0]["began"]
            speeds[kind].append(len(told) * (SAVED_TOKENS + SAVED_DECODE) / took)
            gaps[kind] += [gap for one in told for gap in gaps_ms(one)]
    ratios = [on / off for on, off in zip(speeds["on"], speeds["off"], strict=True)]
    low, high = interval(ratios)
    speed = {f"{kind} tokens/s": median(values) for kind, values in speeds.items()}
    p99 = {kind: percentile(values, 0.99) for kind, values in gaps.items()}
    costs, parts = saving_us(engine, since)
    progress("saving")
    return [
        Row("KV-heavy, saving: throughput, lower bound", low, "x", ">= 0.97", low >= 0.97,
            more={"median": median(ratios), "upper bound": high, **speed}),
        at_most("KV-heavy, saving: the steps' threads, p50 of a step that saves", median(costs), "us",
                200, p99=percentile(costs, 0.99), steps=len(costs), **parts),
        at_most("KV-heavy, saving: ITL p99", p99["on"] / p99["off"], "x", 1.05,
                **{f"{kind} ms": value for kind, value in p99.items()}),
    ]  # fmt: skip


def saving_us(engine: Engine, since: float) -> tuple[list[float], dict[str, float]]:
    """What the calls of each step that saves took, of the scheduler's and of the worker's together; and the
    median of each call's share."""
    costs: list[float] = []
    parts: dict[str, list[float]] = {}
    step: dict[str, float] = {}
    saves = False
    for what, much, began, ended in events(engine.records):
        if began < since:
            continue
        if what == "build":
            step, saves = {}, much > 0
        if what in ("build", "output", "begin", "start_load", "saved", "results", "report"):
            step[what] = step.get(what, 0.0) + (ended - began) * 1e6
        if what == "output" and saves:
            costs.append(sum(step.values()))
            for call, us in step.items():
                parts.setdefault(call, []).append(us)
    return costs, {call: median(us) for call, us in parts.items()}


# --- all of it ---------------------------------------------------------------------------------


def hits(folder: Path, model: str, size: Size) -> Iterator[Row]:
    """All hits on one model, in memory, on the disk, and there after everything was restarted."""
    place = folder / f"{model} tiers"
    place.mkdir()
    room = PREFIX * KV_BYTES[model] * 3 // 2
    timelines = place / "hits.json" if model == "189M" else None
    extra = {"timeline": str(timelines)} if timelines else {}
    with (
        ColdDaemon(place, room) as daemon,
        Engine(folder, model, daemon.socket, extra=extra) as engine,
    ):
        scene = Scene(model, engine, daemon, timelines=timelines)
        scene.fill()
        for tail in TAILS:
            yield from warm(scene, tail, size)
        for tail in TAILS:
            yield from cold(scene, tail, size.rounds, "")
        if model == "KV-heavy":
            yield from queued(scene, size.queued_rounds)
            yield from bursts(scene, size.bursts)
    with ColdDaemon(place, room) as daemon, Engine(folder, model, daemon.socket) as engine:
        scene = Scene(model, engine, daemon)
        for tail in TAILS:
            yield from cold(scene, tail, size.restarted_rounds, " after a restart of both")
    if model == "189M":
        yield from encoded(folder, model, size)


def encoded(folder: Path, model: str, size: Size) -> Iterator[Row]:
    """Hits on the disk that are read as fewer bytes, and decoded."""
    for codec in ENCODED if size.encoded_rounds else ():
        place = folder / f"{model} {codec}"
        place.mkdir()
        room = PREFIX * KV_BYTES[model] * 3 // 2
        with (
            ColdDaemon(place, room, codec) as daemon,
            Engine(folder, model, daemon.socket) as engine,
        ):
            scene = Scene(model, engine, daemon, codec)
            scene.fill()
            yield from cold(scene, TAILS[-1], size.encoded_rounds, f", encoded {codec}")


def serving(folder: Path, model: str, size: Size) -> Iterator[Row]:
    """What loads and saves cost those who are served meanwhile."""
    place = folder / "serving"
    place.mkdir()
    with ColdDaemon(place, 1280 * MIB) as daemon, Engine(folder, model, daemon.socket) as engine:
        yield from flights(engine, size.waves)
        yield from saving(engine, size.saving_pairs)


def make(folder: Path, model: str) -> None:
    command = [sys.executable, str(HERE / "ttft_engine.py"), "make", model, str(folder / model)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | ENVIRONMENT)
    progress(f"{model}: made")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--folder", help="where models and segments lie; a temporary one otherwise")
    parser.add_argument("--only", help="parts whose name has this in it")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    probes = [harness.noise()]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        parts: dict[str, Callable[[], Iterator[Row]]] = {
            f"hits {model}": (lambda model=model: hits(folder, model, size)) for model in KV_BYTES
        }
        parts["serving KV-heavy"] = lambda: serving(folder, "KV-heavy", size)
        for part, rows_of in parts.items():
            if not options.only or options.only in part:
                make(folder, part.split()[1])
                progress(part)
                for row in rows_of():
                    rows.append(row)
                    progress(row.line()[:300])
    probes.append(harness.noise())
    return harness.report("ttft", rows, probes, options.out)


if __name__ == "__main__":
    sys.exit(main())
