"""The same work by kvtier's daemon and by LMCache's, side by side in one run, each through its own client.

Both clients have their blocks in host memory, and both daemons are on this machine. A block (LMCache: chunk)
has 16 tokens, and each retrieved block is compared with the stored one. LMCache is installed into its own
Python the first time. Its GPU path is not measured.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Protocol

import disks
import harness
from harness import Daemon, Row, percentile
from kvtier import Client, KvSpec, KvtierError, Space
from kvtier_kernels import memcpy
from peer_bytes import TOKENS, Blocks, tokens_of

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
LMCACHE = "LMCache 0.5.6"
# torch alone and first, and nothing that is resolved: no other torch can come in by that.
TORCH = "torch==2.13.0"
PINS = """
aiofile==3.12.3 aiofiles==25.1.0 aiohappyeyeballs==2.7.1 aiohttp==3.14.5 aiosignal==1.4.0
annotated-doc==0.0.7 annotated-types==0.8.0 anyio==4.16.0 attrs==26.1.0 blake3==1.0.11 cachetools==8.0.1
caio==0.12.10 certifi==2026.10.18 cffi==2.1.1 charset-normalizer==3.5.2 click==8.5.1 cryptography==50.0.2
fastapi==0.165.0 filelock==4.2.11 frozenlist==1.8.0 fsspec==2026.9.0 googleapis-common-protos==1.76.0
grpcio==1.85.1 h11==0.16.0 httpcore==1.0.9 httptools==0.9.0 httpx==0.28.1 idna==3.20 Jinja2==3.1.6
llvmlite==0.50.0 lmcache==0.5.6 MarkupSafe==3.0.4 mpmath==1.3.0 msgspec==0.22.0 multidict==7.2.1
networkx==3.6.1 numba==0.68.1 numpy==2.4.6 opentelemetry-api==1.45.2
opentelemetry-exporter-http-transport==0.66b2 opentelemetry-exporter-otlp==1.45.2
opentelemetry-exporter-otlp-common==0.66b2 opentelemetry-exporter-otlp-proto-common==1.45.2
opentelemetry-exporter-otlp-proto-grpc==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2
opentelemetry-exporter-prometheus==0.66b2 opentelemetry-proto==1.45.2 opentelemetry-sdk==1.45.2
opentelemetry-semantic-conventions==0.66b2 prometheus_client==0.26.0 propcache==0.5.4 protobuf==7.36.2
psutil==7.2.2 py-cpuinfo==9.0.0 pycparser==3.12 pydantic==2.14.3 pydantic_core==2.50.4 PyYAML==6.0.3
pyzmq==27.3.0 redis==8.1.0 requests==2.34.2 safetensors==0.8.0 setuptools==81.0.0 sortedcontainers==2.4.0
starlette==1.10.0 sympy==1.14.0 typing-inspection==0.4.5 typing_extensions==4.16.0 urllib3==2.8.0
uvicorn==0.54.0 yarl==1.25.1
"""
# How the peer ran, said above its figures.
PEER = (
    f"{LMCACHE} is its multiprocess server with {TORCH} and no GPU: engine-driven transfer through shared"
    " memory, LRU, observability off, disk by `fs_native` with O_DIRECT and 8 workers. Its client copies"
    " plainly into and out of that memory; what its vLLM adapter does where there is no GPU has its own rows."
    " Its lookups are polled: they don't hold an engine while they wait."
)
LARGE, SMALL, TINY = 32 * MIB, 2 * MIB, 4096
CHUNKS = 16  # of a request
prompts = itertools.count(1)


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    rounds: int
    warmups: int  # this many requests of the largest chunks fill more than the memory
    memory: int
    lookups: int  # of each length in a round
    indexed: int  # requests of a thousand tiny chunks
    cold: int  # rounds from the disk
    burst_memory: int
    starts: int
    cap: int
    patience_s: float


FULL = Size(7, 9, 4096 * MIB, 20, 40, 5, 1024 * MIB, 4, 256 * MIB, 40.0)
QUICK = Size(2, 2, 2048 * MIB, 5, 4, 1, 256 * MIB, 2, 256 * MIB, 15.0)


class Connection(Protocol):
    """A client of a system, for blocks of one size: each call says what LMCache's client says."""

    def store(self, prompt: int, blocks: int) -> dict[str, Any]: ...
    def lookup(self, prompt: int, blocks: int) -> dict[str, Any]: ...
    def retrieve(self, prompt: int, blocks: int) -> dict[str, Any]: ...
    def wait(self, prompt: int, blocks: int, patience_s: float) -> dict[str, Any]: ...
    def close(self) -> object: ...


class System(Protocol):
    """A daemon: started with this much memory and, with a cap, this much disk below its folder."""

    name: ClassVar[str]
    folder: Path

    def start(self, memory: int, disk: int = 0) -> None: ...
    def connect(self, nbytes: int, blocks: int, defaults: bool = False) -> Connection: ...
    def pid(self) -> int: ...
    def until_on_disk(self, blocks: int, nbytes: int) -> None: ...
    def stop(self, how: int = signal.SIGTERM) -> None: ...


def files_of(folder: Path) -> list[Path]:
    return [path for path in sorted((folder / "disk").rglob("*")) if path.is_file()]


def disk_bytes(folder: Path) -> int:
    """What the disk has of this, index and temporary files included."""
    found = 0
    for path in files_of(folder):
        try:
            found += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return found


def wait_until(done: Callable[[], bool], what: str, patience_s: float = 120.0) -> None:
    until = time.monotonic() + patience_s
    while not done():
        assert time.monotonic() < until, f"waited {patience_s:.0f} s for {what}"
        time.sleep(0.02)


# --- kvtier -------------------------------------------------------------------------------------


def spec_of(nbytes: int) -> KvSpec:
    head = min(128, nbytes // (2 * 2 * TOKENS))
    return KvSpec.dense(
        model=f"bench-{nbytes}", layers=1, kv_heads=nbytes // (2 * 2 * TOKENS * head), head_dim=head,
        dtype="bfloat16", block_tokens=TOKENS, weights="rev:1",
    )  # fmt: skip


class OurConnection:
    def __init__(self, client: Client, space: Space, nbytes: int, blocks: int) -> None:
        self.client, self.space = client, space
        self.blocks = Blocks(nbytes, blocks)
        self.sources = [memoryview(each).cast("B") for each in self.blocks.sources]
        self.targets = [memoryview(each).cast("B") for each in self.blocks.targets]

    def close(self) -> None:
        self.client.close()

    def store(self, prompt: int, blocks: int) -> dict[str, Any]:
        self.blocks.fill(prompt)
        tokens = tokens_of(prompt, blocks)
        started = time.perf_counter()
        saved = self.space.save(self.space.keys(tokens), self.sources[:blocks])
        took = time.perf_counter() - started
        return {"s": took, "ok": saved.stored == blocks, "stored": saved.stored}

    def lookup(self, prompt: int, blocks: int) -> dict[str, Any]:
        tokens = tokens_of(prompt, blocks)
        started = time.perf_counter()
        found = self.space.match(self.space.keys(tokens))
        return {"s": time.perf_counter() - started, "found": found.ready}

    def retrieve(self, prompt: int, blocks: int) -> dict[str, Any]:
        self.blocks.targets[:, ::64] = 0
        tokens = tokens_of(prompt, blocks)
        started = time.perf_counter()
        keys = self.space.keys(tokens)
        found = self.space.match(keys)
        while found.coming:
            time.sleep(0.001)
            found = self.space.match(keys)
        ready = (
            self.space.load_into(keys[: found.ready], self.targets[: found.ready])
            if found.ready
            else 0
        )
        took = time.perf_counter() - started
        self.blocks.fill(prompt)
        return {"s": took, "found": ready, "wrong": self.blocks.wrong(ready)}

    def wait(self, prompt: int, blocks: int, patience_s: float) -> dict[str, Any]:
        """One after the other: after the first the client knows."""
        timeout_s = inspect.signature(Client.connect).parameters["timeout_s"].default
        done: dict[str, Any] = {"timeout_s": timeout_s}
        for what, run in (("lookup", self.lookup), ("store", self.store)):
            started = time.perf_counter()
            try:
                run(prompt, blocks)
                end = "answered"
            except KvtierError as error:
                end = type(error).__name__
            done[what] = [time.perf_counter() - started, end]
        return done


class Ours:
    name: ClassVar[str] = "kvtier"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemon: Daemon | None = None

    def start(self, memory: int, disk: int = 0) -> None:
        (self.folder / "disk").mkdir(parents=True, exist_ok=True)
        cold = (
            f'[cold]\ndirectories = ["{self.folder / "disk"}"]\nsize = {disk}\nwrite = "through"\n'
        )
        self.daemon = Daemon(self.folder, str(memory), f'{cold}codec = "raw"' if disk else "")
        self.daemon.wait_for_arena()

    def connect(self, nbytes: int, blocks: int, defaults: bool = False) -> OurConnection:
        assert self.daemon is not None
        client = Client.connect(self.daemon.socket)
        return OurConnection(client, client.open(spec_of(nbytes)), nbytes, blocks)

    def pid(self) -> int:
        assert self.daemon is not None
        return self.daemon.process.pid

    def until_on_disk(self, blocks: int, nbytes: int) -> None:
        assert self.daemon is not None
        with Client.connect(self.daemon.socket, populate=False) as client:

            def written() -> bool:
                states = client.stats()["tiers"]["cold"]["states"]
                return bool(states["written"] >= blocks)

            wait_until(written, f"{blocks} blocks to be written")

    def stop(self, how: int = signal.SIGTERM) -> None:
        if self.daemon is not None:
            self.daemon.process.send_signal(how)
            self.daemon.process.wait(60)
            self.daemon = None


# --- LMCache ------------------------------------------------------------------------------------


def make_python(folder: Path) -> Path:
    """A Python with LMCache in it; made where it isn't there."""
    python, ready = folder / "bin" / "python", folder / ".ready"
    wanted = f"{TORCH} {PINS}"
    if ready.exists() and ready.read_text() == wanted:
        return python
    print(f"making {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*install, TORCH], check=True)
    subprocess.run([*install, *PINS.split()], check=True)
    ready.write_text(wanted)
    return python


class TheirConnection:
    numbers = itertools.count()

    def __init__(self, system: Theirs, **given: Any) -> None:
        self.system, self.name = system, f"connection-{next(self.numbers)}"
        self.ask("connect", **given)

    def ask(self, what: str, **given: Any) -> dict[str, Any]:
        return self.system.ask(self.name, what, given)

    def store(self, prompt: int, blocks: int) -> dict[str, Any]:
        return self.ask("store", prompt=prompt, blocks=blocks)

    def lookup(self, prompt: int, blocks: int) -> dict[str, Any]:
        return self.ask("lookup", prompt=prompt, blocks=blocks)

    def retrieve(self, prompt: int, blocks: int) -> dict[str, Any]:
        return self.ask("retrieve", prompt=prompt, blocks=blocks)

    def wait(self, prompt: int, blocks: int, patience_s: float) -> dict[str, Any]:
        return self.ask("wait", prompt=prompt, blocks=blocks, patience_s=patience_s)

    def close(self) -> None:
        self.ask("close")


class Theirs:
    """LMCache's daemon, all of its memory there from the start and shared with its clients, files with
    O_DIRECT and eviction where it has a disk; and one process that is its client."""

    name: ClassVar[str] = LMCACHE
    PATIENCE_S = 180.0

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder, self.python = folder, python
        self.server: subprocess.Popen[bytes] | None = None
        self.client: subprocess.Popen[str] | None = None
        self.environment = {
            **os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_WAIT_POLICY": "PASSIVE",  # torch's threads spin otherwise: 2 MiB copied in 5 to 100 ms
        }  # fmt: skip

    def start(self, memory: int, disk: int = 0) -> None:
        (self.folder / "disk").mkdir(parents=True, exist_ok=True)
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"tcp://127.0.0.1:{port}"
        adapter = {
            "type": "fs_native", "base_path": str(self.folder / "disk"), "num_workers": 8,
            "use_odirect": True, "max_capacity_gb": disk / 2**30,
            "eviction": {"eviction_policy": "LRU"},
        }  # fmt: skip
        command = [
            str(self.python), "-m", "lmcache.v1.multiprocess.server", "--host", "127.0.0.1",
            "--port", str(port), "--chunk-size", str(TOKENS), "--l1-size-gb", str(memory / 2**30),
            "--no-l1-use-lazy", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto",
            "--max-workers", "2", "--shm-name", f"peers-{os.getpid()}", "--disable-observability",
            *(["--l2-adapter", json.dumps(adapter)] if disk else []),
        ]  # fmt: skip
        with open(self.folder / "server.log", "ab") as log:
            self.server = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder
            )
        if self.client is None:
            with open(self.folder / "client.log", "ab") as log:
                self.client = subprocess.Popen(
                    [str(self.python), str(Path(__file__).parent / "peer_lmcache.py")], env=self.environment,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1,
                )  # fmt: skip

    def connect(
        self, nbytes: int, blocks: int, defaults: bool = False, pages: int = 0
    ) -> TheirConnection:
        return TheirConnection(
            self, url=self.url, nbytes=nbytes, blocks=blocks, pages=pages, defaults=defaults
        )

    def ask(self, who: str, what: str, given: dict[str, Any]) -> dict[str, Any]:
        assert (
            self.client is not None
            and self.client.stdin is not None
            and self.client.stdout is not None
        )
        self.client.stdin.write(json.dumps([who, what, given]) + "\n")
        until = time.monotonic() + self.PATIENCE_S
        while time.monotonic() < until:
            if not select.select([self.client.stdout], [], [], 1.0)[0]:
                if self.server is None or self.server.poll() is not None:
                    break
                continue
            line = self.client.stdout.readline()
            if line.startswith("="):
                answer: dict[str, Any] = json.loads(line[1:])
                return answer
            if not line:
                break
        logs = "".join(
            (self.folder / name).read_text()[-2000:] for name in ("server.log", "client.log")
        )
        raise RuntimeError(f"{self.name}: no answer to {what} {given}\n{logs}")

    def pid(self) -> int:
        assert self.server is not None
        return self.server.pid

    def until_on_disk(self, blocks: int, nbytes: int) -> None:
        wait_until(lambda: disk_bytes(self.folder) >= nbytes, f"{nbytes} bytes on the disk")
        time.sleep(0.5)  # the last file gets its name

    def stop(self, how: int = signal.SIGTERM) -> None:
        if self.server is not None:
            self.server.send_signal(how)
            self.server.wait(60)
            self.server = None
        Path(f"/dev/shm/peers-{os.getpid()}").unlink(missing_ok=True)  # left there by a kill

    def close(self) -> None:
        self.stop()
        if self.client is not None:
            self.client.kill()
            self.client.wait()


# --- rows ---------------------------------------------------------------------------------------


@dataclass
class Times:
    """The times of each system in each round, and those of the limit."""

    limit: list[float] = field(default_factory=list)
    by: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, systems: Sequence[System]) -> Times:
        return cls(by={each.name: [] for each in systems})


def row_of(what: str, system: str, value: float, unit: str, **more: Any) -> Row:
    """One system's cell in a line of the table: `said`, if given, is told instead of the value."""
    return Row(f"{system}: {what}", value, unit, more=more)


def speed_rows(what: str, times: Times, nbytes: int) -> list[Row]:
    """The speed of each system relative to the limit, round by round."""
    rows = []
    for system, seconds in times.by.items():
        ratios = [limit / took for limit, took in zip(times.limit, seconds, strict=True)]
        row = row_of(what, system, median(ratios), "x")
        row.low, row.high = harness.interval(ratios)
        row.more |= {
            "GB/s": nbytes / 1e9 / median(seconds),
            "limit GB/s": nbytes / 1e9 / median(times.limit),
        }
        rows.append(row)
    return rows


def yes_row(what: str, system: str, good: bool, said: str) -> Row:
    return row_of(
        what,
        system,
        float(good),
        "yes" if good else "no",
        said=f"{'yes' if good else 'no'}: {said}",
    )


def damage_row(what: str, system: str, answer: dict[str, Any], damaged: int) -> Row:
    """Of a chain with one damaged block: good is whatever doesn't hand out wrong bytes."""
    if answer["wrong"]:
        said = f"{answer['wrong']} wrong of {answer['found']} blocks that were delivered as good"
    elif answer["found"] > damaged:
        said = f"all {answer['found']} delivered, none wrong"
    else:
        said = f"a miss from that block on: {answer['found']} delivered, none wrong"
    return yes_row(what, system, not answer["wrong"], said)


def burst_row(system: str, acknowledged: int, found: Sequence[int], newest: int) -> Row:
    """`found` blocks of each request of a burst, the oldest first; the memory has room for more than the
    `newest` requests."""
    kept = sum(found[-newest:])
    return yes_row(
        "a burst of 4 times its memory: the newest half of what fits is there", system,
        kept == newest * CHUNKS,
        f"{acknowledged} blocks of {len(found) * CHUNKS} acknowledged; {sum(found)} there, of the newest"
        f" {newest * CHUNKS} {kept}",
    )  # fmt: skip


def cap_row(cap: int, system: str, most: Sequence[int]) -> Row:
    """The most that was seen on the disk in each start."""
    sizes = ", ".join(f"{nbytes / MIB:.0f}" for nbytes in most)
    what = f"a disk cap of {cap // MIB} MiB holds over {len(most)} starts"
    return yes_row(what, system, max(most) <= cap, f"{sizes} MiB at most in each")


def waited_row(
    what: str, system: str, ended: list[Any] | None, patience_s: float, timeout_s: float
) -> Row:
    """How long a call to a daemon that is stopped took, of a client with this timeout."""
    said = (
        f"still waiting after {patience_s:.0f} s"
        if ended is None
        else f"{ended[0]:.1f} s, {ended[1]}"
    )
    took_s = patience_s if ended is None else ended[0]
    return row_of(
        what, system, took_s, "s", said=f"{said} (timeout of a request: {timeout_s:.0f} s)"
    )


# --- the work -----------------------------------------------------------------------------------


def turns(systems: Sequence[System], number: int) -> Iterator[System]:
    return iter(systems if number % 2 == 0 else systems[::-1])


def kept(client: Connection, blocks: int) -> tuple[int, dict[str, Any], int]:
    """A new prompt that is stored whole, what that took, and how many before it were not, with a pause after
    each of them: a tier that evicts in the background can be full."""
    for short in range(40):
        prompt = next(prompts)
        stored = client.store(prompt, blocks)
        if stored["stored"] == blocks:
            return prompt, stored, short
        time.sleep(0.25)
    raise RuntimeError(f"nothing is stored whole any more: {stored}")


def timed_memcpy(sources: list[memoryview], targets: list[memoryview]) -> float:
    started = time.perf_counter()
    for target, source in zip(targets, sources, strict=True):
        memcpy(target, source)
    return time.perf_counter() - started


def speeds(systems: Sequence[System], nbytes: int, size: Size) -> list[Row]:
    """Store and retrieve requests, relative to memcpy of the same bytes."""
    blocks = Blocks(nbytes, CHUNKS)
    views = [
        [memoryview(each).cast("B") for each in memory]
        for memory in (blocks.sources, blocks.targets)
    ]
    store, retrieve = Times.of(systems), Times.of(systems)
    with ExitStack() as stack:
        clients = {
            each.name: stack.enter_context(closing(each.connect(nbytes, CHUNKS)))
            for each in systems
        }
        short = dict.fromkeys(clients, 0)
        warmups = size.warmups if nbytes == LARGE else 2
        for number in range(warmups + size.rounds):
            if number == warmups:
                store, retrieve = Times.of(systems), Times.of(systems)
            for times in (store, retrieve):
                times.limit.append(timed_memcpy(*views))
            for each in turns(systems, number):
                prompt, stored, missed = kept(clients[each.name], CHUNKS)
                short[each.name] += missed
                found = clients[each.name].retrieve(prompt, CHUNKS)
                assert (found["found"], found["wrong"]) == (CHUNKS, 0), f"{each.name}: {found}"
                store.by[each.name].append(stored["s"])
                retrieve.by[each.name].append(found["s"])
    label = f"{CHUNKS} blocks of {nbytes // MIB} MiB"
    total = CHUNKS * nbytes
    rows = [
        *speed_rows(f"store {label} in memory, relative to memcpy", store, total),
        *speed_rows(
            f"look up and retrieve {label} from memory, relative to memcpy", retrieve, total
        ),
    ]
    what = f"stores of {label}, in a memory of {size.memory // MIB} MiB: not kept whole at the first try"
    for name, missed in short.items():
        said = f"{missed} not kept, {warmups + size.rounds} kept"
        rows.append(row_of(what, name, missed, "", said=said))
    return rows


def through_adapter(theirs: Theirs, size: Size) -> list[Row]:
    """LMCache's own copy between an engine's pages and its memory, which without a GPU is one in torch."""
    blocks = Blocks(LARGE, CHUNKS)
    views = [
        [memoryview(each).cast("B") for each in memory]
        for memory in (blocks.sources, blocks.targets)
    ]
    store, retrieve = Times.of([theirs]), Times.of([theirs])
    with closing(theirs.connect(LARGE, 1, pages=2 * CHUNKS)) as client:
        for _ in range(3):
            prompt = next(prompts)
            time.sleep(1.0)  # what evicts in the background has made room
            store.limit.append(timed_memcpy(*views))
            stored = client.ask("store_pages", prompt=prompt)
            retrieve.limit.append(timed_memcpy(*views))
            found = client.ask("retrieve_pages", prompt=prompt)
            assert stored["ok"] and found["ok"] and not found["wrong"], (stored, found)
            store.by[theirs.name].append(stored["s"])
            retrieve.by[theirs.name].append(found["s"])
    label = f"{CHUNKS} blocks of {LARGE // MIB} MiB through its vLLM adapter's copy for hosts without a GPU"
    return [
        *speed_rows(f"store {label}, relative to memcpy", store, CHUNKS * LARGE),
        *speed_rows(f"retrieve {label}, relative to memcpy", retrieve, CHUNKS * LARGE),
    ]


def anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon")


def lookups(systems: Sequence[System], size: Size) -> list[Row]:
    """Lookups that hit, and the daemon's memory per small chunk in addition to its bytes."""
    many = 1000
    took: dict[tuple[str, int], list[float]] = {}
    rows = []
    with ExitStack() as stack:
        clients = {
            each.name: stack.enter_context(closing(each.connect(TINY, many))) for each in systems
        }
        for each in systems:
            for number in range(size.indexed + size.indexed // 4):
                if number == size.indexed // 4:
                    before = anonymous_bytes(each.pid())
                kept(clients[each.name], many)
            grown = anonymous_bytes(each.pid()) - before
            rows.append(
                row_of("the daemon's memory a block, relative to the blocks' bytes", each.name,
                       grown / (size.indexed * many), "B", blocks=size.indexed * many)
            )  # fmt: skip
        held = {name: kept(client, many)[0] for name, client in clients.items()}
        for number in range(5):
            for each in turns(systems, number):
                for keys in (1, 10, 100, many):
                    for turn in range(size.lookups + 1):
                        found = clients[each.name].lookup(held[each.name], keys)
                        assert found["found"] == keys, f"{each.name}: {found} of {keys}"
                        if turn:
                            took.setdefault((each.name, keys), []).append(found["s"] * 1e3)
    for (name, keys), times in took.items():
        what = f"a lookup that finds {keys:,} blocks, from its tokens, p50"
        rows.append(row_of(what, name, median(times), "ms", p99=percentile(times, 0.99)))
    return rows


def stopped(systems: Sequence[System], size: Size) -> list[Row]:
    """How long a client waits for a daemon that is stopped, by its defaults."""
    rows = []
    for each in systems:
        client = each.connect(SMALL, CHUNKS, defaults=True)
        prompt = next(prompts)
        assert client.store(prompt, CHUNKS)["ok"]
        client.lookup(prompt, CHUNKS)
        os.kill(each.pid(), signal.SIGSTOP)
        try:
            ended = client.wait(prompt, CHUNKS, size.patience_s)
        finally:
            os.kill(each.pid(), signal.SIGCONT)
        for what in ("lookup", "store"):
            name = f"the daemon is stopped (SIGSTOP): a {what} by its client's defaults ends after"
            rows.append(
                waited_row(name, each.name, ended[what], size.patience_s, ended["timeout_s"])
            )
    return rows


def in_memory(systems: Sequence[System], theirs: Theirs, size: Size) -> list[Row]:
    for each in systems:
        each.start(size.memory)
    rows = [
        *speeds(systems, LARGE, size),
        *speeds(systems, SMALL, size),
        *through_adapter(theirs, size),
    ]
    rows += lookups(systems, size)
    rows += stopped(systems, size)
    for each in systems:
        each.stop(signal.SIGKILL)
    theirs.close()
    return rows


def place_of(folder: Path, begins: bytes) -> tuple[Path, int]:
    """Where on the disk a block lies that begins so."""
    for path in sorted(files_of(folder), key=lambda path: path.stat().st_size):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as whole:
            at = whole.find(begins)
        if at >= 0:
            return path, at
    raise AssertionError(f"no block that begins so is below {folder}")


def zero_bytes(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at + 1000)
        file.write(bytes(64))
        os.fsync(file.fileno())


def copy_over(source: tuple[Path, int], target: tuple[Path, int], nbytes: int) -> None:
    """All that the disk has of one block over another's: the header, too, where there is one before it."""
    header = disks.HEADER if source[1] and target[1] else 0
    with open(source[0], "rb") as file:
        file.seek(source[1] - header)
        taken = file.read(header + nbytes)
    with open(target[0], "r+b") as file:
        file.seek(target[1] - header)
        file.write(taken)
        os.fsync(file.fileno())


def on_disk(systems: Sequence[System], folder: Path, size: Size) -> list[Row]:
    """The contents of the disk after a kill and after a stop, loads from there to memory relative to fio,
    and loads of damaged data."""
    chains = [next(prompts) for _ in range(size.cold + 1)]
    small = [next(prompts) for _ in range(3)]
    total = CHUNKS * LARGE
    disk = 2 * (size.cold + 2) * total
    blocks = Blocks(SMALL, CHUNKS)
    rows = []
    for each in systems:
        each.start(size.memory, disk)
        with closing(each.connect(SMALL, CHUNKS)) as client:
            for prompt in small:
                assert client.store(prompt, CHUNKS)["ok"]
        with closing(each.connect(LARGE, CHUNKS)) as client:
            for number, prompt in enumerate(chains):
                assert client.store(prompt, CHUNKS)["stored"] == CHUNKS
                stored = (number + 1) * total + len(small) * CHUNKS * SMALL
                each.until_on_disk((number + 1 + len(small)) * CHUNKS, stored)
        each.stop(signal.SIGKILL)
        each.start(size.memory, disk)
    fio_file = folder / "fio"
    with open(fio_file, "wb") as file:
        for _ in range(total // LARGE):
            file.write(os.urandom(LARGE))
        os.fsync(file.fileno())
    fio = disks.Fio([fio_file], total, disks.BLOCK, 8)
    cold = Times.of(systems)
    with ExitStack() as stack:
        clients = {
            each.name: stack.enter_context(closing(each.connect(LARGE, CHUNKS))) for each in systems
        }
        found_after: dict[str, int] = {each.name: 0 for each in systems}
        for number, prompt in enumerate(chains):
            fio.once()
            for each in turns(systems, number):
                found = clients[each.name].retrieve(prompt, CHUNKS)
                assert not found["wrong"], f"{each.name}: {found}"
                found_after[each.name] += found["found"]
                if number:
                    cold.by[each.name].append(found["s"])
    cold.limit = fio.seconds[1:]
    wanted = len(chains) * CHUNKS
    for each in systems:
        count = found_after[each.name]
        said = f"{count} of {wanted} blocks of 32 MiB found and right"
        rows.append(
            yes_row(
                "what was on disk is found after kill -9 and a start",
                each.name,
                count == wanted,
                said,
            )
        )
    if all(count == wanted for count in found_after.values()):
        what = f"look up and retrieve {CHUNKS} blocks of 32 MiB from disk, relative to fio"
        rows += speed_rows(what, cold, total)
    for each in systems:
        each.stop()
        blocks.fill(small[0])
        zero_bytes(*place_of(each.folder, blocks.begins(5)))
        blocks.fill(small[1])
        copy_over(
            place_of(each.folder, blocks.begins(3)), place_of(each.folder, blocks.begins(5)), SMALL
        )
        each.start(size.memory, disk)
        with closing(each.connect(SMALL, CHUNKS)) as client:
            for what, prompt in zip(
                ("64 bytes zeroed in a block's file", "a block's file copied over another's"),
                small[:2],
                strict=True,
            ):
                found = client.retrieve(prompt, CHUNKS)
                rows.append(damage_row(f"{what}: no wrong bytes", each.name, found, 5))
            whole = client.retrieve(small[2], CHUNKS)
            said = f"{whole['found']} of {CHUNKS} blocks found, {whole['wrong']} wrong"
            good = (whole["found"], whole["wrong"]) == (CHUNKS, 0)
            rows.append(
                yes_row("what was on disk is found after a stop and a start", each.name, good, said)
            )
        each.stop()
    return rows


def burst(systems: Sequence[System], size: Size) -> list[Row]:
    rows = []
    requests = 4 * size.burst_memory // (CHUNKS * SMALL)
    for each in systems:
        each.start(size.burst_memory)
        with closing(each.connect(SMALL, CHUNKS)) as client:
            names = [next(prompts) for _ in range(requests)]
            acknowledged = sum(client.store(prompt, CHUNKS)["ok"] for prompt in names) * CHUNKS
            found = [client.lookup(prompt, CHUNKS)["found"] for prompt in names]
        each.stop()
        rows.append(burst_row(each.name, acknowledged, found, requests // 8))
    return rows


class Watch:
    """The most that a folder's disk has held while this was on."""

    def __init__(self, folder: Path) -> None:
        self.most = 0
        self._folder = folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(0.02):
            self.most = max(self.most, disk_bytes(self._folder))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def caps(systems: Sequence[System], size: Size) -> list[Row]:
    """Half as much again as the disk may hold is stored in each of some starts."""
    rows = []
    for each in systems:
        most = []
        for _ in range(size.starts):
            with Watch(each.folder) as watch:
                each.start(512 * MIB, size.cap)
                with closing(each.connect(SMALL, CHUNKS)) as client:
                    for _ in range(3 * size.cap // 2 // (CHUNKS * SMALL)):
                        client.store(next(prompts), CHUNKS)
                        time.sleep(0.1)
                    time.sleep(2.0)
                each.stop()
            most.append(watch.most)
        rows.append(cap_row(size.cap, each.name, most))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the files go: on the disk in question")
    parser.add_argument(
        "--peers", type=Path, default=ROOT / "build" / "peers", help="LMCache's own Python"
    )
    parser.add_argument(
        "--quick", action="store_true", help="little of everything; nothing is kept"
    )
    parser.add_argument("--only", default="", help="parts whose name has this")
    parser.add_argument("--out")
    given = parser.parse_args()
    size = QUICK if given.quick else FULL
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end what was started
    python = make_python(given.peers.absolute())
    parts: dict[str, Callable[[list[System], Theirs, Path], list[Row]]] = {
        "memory": lambda systems, theirs, _: in_memory(systems, theirs, size),
        "disk": lambda systems, _, folder: on_disk(systems, folder, size),
        "burst": lambda systems, *_: burst(systems, size),
        "cap": lambda systems, *_: caps(systems, size),
    }
    rows: list[Row] = []
    probes = [harness.noise()]
    for name, part in parts.items():
        if given.only not in name:
            continue
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            for system in ("kvtier", "lmcache"):
                (Path(folder) / system).mkdir()
            ours, theirs = Ours(Path(folder) / "kvtier"), Theirs(Path(folder) / "lmcache", python)
            try:
                found = part([ours, theirs], theirs, Path(folder))
            finally:
                ours.stop(signal.SIGKILL)
                theirs.close()
        rows += found
        print(*(row.line() for row in found), sep="\n")
        print(f"({name}: {time.perf_counter() - started:.0f} s)", flush=True)
    probes.append(harness.noise())
    if given.quick or given.only:
        print("nothing is kept of a part, or of so little")
        return 0
    return harness.report("peers", rows, probes, given.out, peer=PEER)


if __name__ == "__main__":
    sys.exit(main())
