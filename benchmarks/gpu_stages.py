"""The stages of gpu_run.py. Each is a function that yields rows; `gpu_stages.py NAME FILE` runs one and
appends its rows to the file.

On the driver without a device, the stages move fewer bytes, and their rates have no verdict.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_int, c_void_p
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import bench_gpu
import harness
import kvtier_kernels as kernels
from harness import Arm, Daemon, Row, pairs
from kvtier import Client, Group, KvSpec
from kvtier_kernels.cuda import CudaError, Driver, Event, blocks, codecs, digests
from kvtier_kernels.cuda.codecs import ENCODED_PART, FIX4, Codecs, Coder
from kvtier_kernels.cuda.digests import RANGE, Digester
from kvtier_kernels.gpu_memory import HeldGpu, MappedGpuMemory

ROOT = Path(__file__).resolve().parent.parent
KIB, MIB = 1 << 10, 1 << 20
MOST_PROCESSES = 12  # of tests
MOST_OUTPUT = 100_000  # characters of tests that failed
NO_DEVICE = "no device"
NVRTC_S = 10.0
DIGEST_BAR = 200.0
HOT_BAR = 0.8  # of one copy within the device
MATMUL_BAR, STEP_BAR_US = 1.03, 20.0

Rows = Iterator[Row]


class Machine:
    """The driver of a stage, and whether there is a device behind it."""

    def __init__(self) -> None:
        self.driver = Driver(0)
        self.real = self.driver.name != NO_DEVICE
        if not self.real:
            # This driver runs the kernels' source, built for the host.
            for module in (blocks, codecs, digests):
                module.compile_kernel = lambda text, architecture: b"host\0"  # type: ignore[attr-defined]
            bench_gpu.TRANSFER_BYTES = bench_gpu.CODED_BYTES = 2 * MIB
            bench_gpu.BLOCK_BYTES = 256 * KIB

    def many(self, on_device: int, emulated: int) -> int:
        return on_device if self.real else emulated

    def judged(self, row: Row) -> Row:
        """A rate: without a device, it has no verdict."""
        if not self.real:
            row.ok = None
            row.more["note"] = NO_DEVICE
        return row


def told(name: str, note: str) -> Row:
    """A row without a verdict: why something was not measured."""
    return Row(name, 0, "", more={"note": note})


def count(name: str, value: float, wanted: float, unit: str = "") -> Row:
    return Row(name, value, unit, f"= {wanted:g}", value == wanted)


def tests(name: str, files: list[str], only: str = "", **variables: str) -> Rows:
    """Run the tests of these files, those that are in this tree; none may fail."""
    there = [file for file in files if (ROOT / file).exists()]
    if not there:
        yield told(name, f"not in this tree: {', '.join(files)}")
        return
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
        *there,
    ]
    if len(there) > 1 and importlib.util.find_spec("xdist") is not None:
        command += ["-p", "xdist", f"-n{min(len(os.sched_getaffinity(0)), MOST_PROCESSES)}"]
    done = subprocess.run(
        [*command, *(["-k", only] if only else [])], capture_output=True, text=True, check=False,
        cwd=ROOT, env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **variables},
    )  # fmt: skip
    counts = {
        word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout)
    }
    row = Row(
        name, counts.get("passed", 0), "passed", "0 failed", done.returncode == 0, more=dict(counts)
    )
    if done.returncode:
        print(done.stdout[-MOST_OUTPUT:], done.stderr[-1000:])
    if not counts.get("passed"):
        row.ok = None if done.returncode == 0 or set(counts) == {"skipped"} else False
        row.more["note"] = "all were skipped"
    yield row


# --- the stages ----------------------------------------------------------------------------------


def environment() -> Rows:
    machine = Machine()
    found: dict[str, Any] = {
        "device": machine.driver.name,
        "architecture": machine.driver.architecture,
    }
    for name in ("torch", "transformers", "cupy", "kvikio"):
        found[name] = importlib.util.find_spec(name) is not None
    for name in ("nvcc", "compute-sanitizer"):
        found[name] = bool(shutil.which(name) or Path("/usr/local/cuda/bin", name).exists())
    found["direct storage"] = Path("/proc/driver/nvidia-fs/stats").exists()
    yield Row("installed", float(os.environ.get("GPU_INSTALL_S", 0)), "s", more=found)


COMPILE = """
import sys, time
from kvtier_kernels.cuda import CudaError, compiler
started = time.perf_counter()
try:
    compiler.compile_kernel(compiler.source(sys.argv[1]), sys.argv[2])
except CudaError as error:
    sys.exit(str(error))
print(time.perf_counter() - started)
"""


def texts() -> Rows:
    """Each in a process of its own, as an engine's start compiles it."""
    machine = Machine()
    variables = dict(os.environ)
    if not machine.real:
        del variables["LD_LIBRARY_PATH"]  # NVRTC would call this driver
    names = sorted(path.name for path in (ROOT / "kernels" / "cuda").glob("*.cu"))

    def compiled(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", COMPILE, name, machine.driver.architecture]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)

    chosen = names if machine.real else ["copy_blocks.cu", "digest.cu"]
    with ThreadPoolExecutor() as processes:
        for name, done in zip(chosen, processes.map(compiled, chosen), strict=True):
            if done.returncode == 0:
                yield machine.judged(harness.at_most(name, float(done.stdout), "s", NVRTC_S))
            elif machine.real or "NVRTC is not installed" not in done.stderr:
                raise RuntimeError(f"{name}: {done.stderr}")
            else:
                yield told(name, "NVRTC is not installed")


def codecs_stage() -> Rows:
    machine = Machine()
    yield from tests(
        "batches, damage, digests",
        ["tests/kernels/test_cuda_codecs.py", "tests/kernels/test_cuda_digests.py"],
        "" if machine.real else "asynchronously or changed_bit",
        **({"KVTIER_DEVICE": "gpu"} if machine.real else {}),
    )
    yield from damaged(machine)


def damaged(machine: Machine) -> Rows:
    """The warps of damaged parts find the damage at the same time; none may wait for ever."""
    driver, rounds = machine.driver, machine.many(1_000, 3)
    parts, elements = 8, machine.many(4, 1) * codecs.ROW * codecs.STREAM_ROWS
    raw = (np.random.default_rng(1).integers(0, 8, elements) + 0x3F80).astype("<u2").tobytes()
    into = bytearray(len(raw))
    [(taken, size)] = kernels.encode_parts(FIX4, 0, raw, [len(raw)], into, [(0, 0, 0, False)])
    assert taken == FIX4
    text, coder, stream = bytes(into[:size]), Coder(Codecs(driver)), driver.stream()
    sent, back = driver.device_memory(parts * size), driver.device_memory(parts * len(raw))
    host = driver.pinned_memory(parts * max(size, len(raw)))
    shown = np.frombuffer(memoryview(host), np.uint8)
    rows = np.zeros(parts, ENCODED_PART)
    rows["codec"], rows["known"], rows["nbytes"], rows["raw_bytes"] = FIX4, -1, size, len(raw)
    rows["address"] = sent + np.arange(parts) * size
    rows["into"] = back + np.arange(parts) * len(raw)
    for number in range(parts):
        mine = bytearray(text)
        if number % 2:
            mine[4] ^= 1  # the number of escapes
        shown[number * size : (number + 1) * size] = mine
    driver.copy(sent, ctypes.addressof(host), parts * size, stream)
    wrong = 0
    for _ in range(rounds):
        coder.decode(FIX4, 0, rows, stream)
        wrong += int((coder.finish()["bad"] != np.arange(parts) % 2).sum())
    driver.copy(ctypes.addressof(host), back, parts * len(raw), stream)
    driver.call("cuStreamSynchronize", stream)
    wrong += sum(
        shown[number * len(raw) :][: len(raw)].tobytes() != raw for number in range(0, parts, 2)
    )
    yield count(f"damaged parts in {rounds} rounds, wrong results", wrong, 0)


def copies() -> Rows:
    machine = Machine()
    yield from tests(
        "pages, registered and staged",
        ["tests/gpu/test_pages.py" if machine.real else "tests/kernels/test_cuda_blocks.py"],
        "restored" if machine.real else "staged or registered",
    )
    copier, memory = bench_gpu.Copier(machine.driver), bench_gpu.Memory(machine.driver)
    pieces = [8 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB] if machine.real else [16 * KIB, 64 * KIB]
    with serving(machine.many(1 << 30, 64 * MIB)) as (client, _):
        for piece in pieces:
            for row in bench_gpu.copies(client, copier, memory, piece, machine.many(7, 1)):
                yield machine.judged(row)


@contextlib.contextmanager
def serving(warm_bytes: int) -> Iterator[tuple[Client, str]]:
    """A daemon, and a client of it; and the path of its socket."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Daemon(Path(folder), f"{warm_bytes >> 20}MiB") as daemon,
    ):
        daemon.wait_for_arena()
        with Client.connect(daemon.socket) as client:
            yield client, daemon.socket


def captures() -> Rows:
    """Saves that follow work on the default stream read what it wrote; and what they do, and registration,
    fails no capture of a graph."""
    machine = Machine()
    driver, library = machine.driver, machine.driver._library
    nbytes, rounds = 64 * KIB, machine.many(50, 4)
    memory, target = driver.device_memory(nbytes), driver.device_memory(nbytes)
    pinned = driver.pinned_memory(2 * nbytes)
    shown, host = np.frombuffer(memoryview(pinned), np.uint8), ctypes.addressof(pinned)
    copier, stream = bench_gpu.Copier(driver), driver.stream()
    pieces = copier.pieces([memory], [nbytes], [0], [nbytes], [nbytes], blocks=1)
    lane, early, failed = copier.lane(), 0, 0
    over, extent = threading.Event(), np.zeros(16 * MIB, np.uint8)
    errors: list[CudaError] = []

    def register() -> None:
        driver.own_thread()
        while not over.is_set():
            try:
                driver.register(extent.ctypes.data, extent.nbytes)
                driver.call("cuMemHostUnregister", extent.ctypes.data)
            except CudaError as error:
                errors.append(error)
                return

    def save(space: Any, client: Client) -> None:
        nonlocal early
        driver.own_thread()
        for number in range(rounds):
            shown[:nbytes] = number + 1
            driver.call("cuMemcpyAsync", memory, host, nbytes, None)
            keys = space.keys([number])
            with space.reserve(keys) as saving:
                lane.start(
                    pieces, [0], saving.mappings, saving.slots, True, Event(driver).record(None)
                )
                lane.finish()
                saving.commit(len(saving))
            with space.load(keys) as found:
                for view in found:
                    early += bytes(view) != bytes([number + 1]) * nbytes
                    del view

    with serving(64 * MIB) as (client, _):
        group = Group(kind="full", layers=1, opaque_bytes=nbytes)
        spec = KvSpec.groups(
            [group], model="captures", dtype="uint8", block_tokens=1, weights="rev:1"
        )
        saver = threading.Thread(target=save, args=(client.open(spec), client))
        registrar = threading.Thread(target=register)
        saver.start()
        registrar.start()
        shown[nbytes:] = 7
        captured = 0
        while saver.is_alive() or captured < rounds:
            graph, ready = c_void_p(), c_void_p()
            try:
                driver.call(
                    "cuStreamBeginCapture_v2", c_void_p(stream), c_int(0)
                )  # every thread's calls
                driver.copy(target, host + nbytes, nbytes, stream)
                driver.call("cuStreamEndCapture", c_void_p(stream), byref(graph))
                driver.call("cuGraphInstantiateWithFlags", byref(ready), graph, ctypes.c_uint64(0))
                driver.call("cuGraphLaunch", ready, c_void_p(stream))
                driver.call("cuStreamSynchronize", stream)
                driver.call("cuGraphExecDestroy", ready)
                driver.call("cuGraphDestroy", graph)
            except CudaError as error:
                failed += 1
                errors.append(error)
                if failed > 3:
                    break
            captured += 1
        saver.join()
        over.set()
        registrar.join()
    assert library is not None
    for error in errors:
        print(error)
    yield count("saves that read before the default stream had written", early, 0)
    yield Row("captures", captured, "", "0 failed", failed == 0, more={"failed": failed})
    yield count("failed registrations", len(errors) - failed, 0)


KILLED = """
import inspect, os, sys, time
import numpy as np
sys.path.insert(0, sys.argv[1])
import gpu_stages, bench_gpu
from kvtier import Client, Group, KvSpec
from kvtier_kernels.cuda import Event
socket, number, blocks, nbytes, forks = sys.argv[2], *map(int, sys.argv[3:])
machine = gpu_stages.Machine()
driver = machine.driver
more = {"device": True} if "device" in inspect.signature(Client.connect).parameters else {}
client = Client.connect(socket, populate=False, **more)
space = client.open(gpu_stages.killed_spec(nbytes))
copier = bench_gpu.Copier(driver)
memory = driver.device_memory(blocks * nbytes)
pieces = copier.pieces([memory], [blocks * nbytes], [0], [nbytes], [nbytes], blocks=blocks)
lane = copier.lane()
with space.reserve(space.keys([number * 1000 + n for n in range(blocks)])) as saving:
    ids = list(range(len(saving)))
    child = os.fork() if forks else 0
    if forks and not child:
        time.sleep(60)
        os._exit(0)
    print(len(saving), child, flush=True)
    while True:
        lane.start(pieces, ids, saving.mappings, saving.slots, True, Event(driver).record(None))
        lane.finish()
"""


def killed_spec(nbytes: int) -> KvSpec:
    group = Group(kind="full", layers=1, opaque_bytes=nbytes)
    return KvSpec.groups([group], model="killed", dtype="uint8", block_tokens=1, weights="rev:1")


def kills() -> Rows:
    """Engines are killed while they copy into reserved slots, half of them with a forked child. Who gets
    these slots next must not see another byte of the engines."""
    machine = Machine()
    rounds, engines, blocks, nbytes = machine.many(5, 1), machine.many(10, 2), 4, 256 * KIB
    changed, killed, checked = 0, 0, 0
    with serving(32 * MIB) as (client, socket):
        space = client.open(killed_spec(nbytes))
        for number in range(rounds):
            running = [
                subprocess.Popen(
                    [sys.executable, "-c", KILLED, str(Path(__file__).parent), socket,
                     str(number * engines + n), str(blocks), str(nbytes), str(n % 2)],
                    stdout=subprocess.PIPE, text=True,
                )
                for n in range(engines)
            ]  # fmt: skip
            children: list[int] = []
            try:
                for one in running:
                    assert one.stdout is not None
                    granted, child = map(int, one.stdout.readline().split())
                    assert granted == blocks, "an engine got no slots"
                    children += [child] if child else []
                time.sleep(random.Random(number).random() * 0.05)
            finally:
                for one in running:
                    one.kill()
                    one.wait()
                killed += len(running)
            until = time.monotonic() + 20
            while True:
                states = client.stats()["tiers"]["warm"]["states"]
                if not states["writing"] + states["quarantined"]:
                    break
                assert time.monotonic() < until, f"slots are still held: {states}"
                time.sleep(0.02)
            # More than all memory: every slot is written again.
            keys = space.keys([10**6 * (number + 1) + n for n in range(2 * 32 * MIB // nbytes)])
            content = [bytes([n % 251]) * nbytes for n in range(len(keys))]
            space.save(keys, b"".join(content))
            time.sleep(0.2)
            for n in range(len(keys)):
                with space.load(keys[n : n + 1]) as found:
                    for view in found:
                        checked += 1
                        changed += bytes(view) != content[n]
                        del view
            space.forget(keys)
            for child in children:
                os.kill(child, signal.SIGKILL)
    assert checked
    yield count(f"{killed} engines killed; slots that changed afterwards", changed, 0)
    yield from tests("who gets the slots", ["tests/faults/test_killed_device_writers.py"])


def holder() -> Rows:
    machine = Machine()
    yield from tests("memory of the device", ["tests/gpu/test_hot.py"])
    for piece in (64 * KIB, MIB):
        yield machine.judged(hot_to_pages(machine, piece))
    yield from tests("holder, engines and daemons that end", ["tests/e2e/test_hot.py"])


def hot_to_pages(machine: Machine, piece: int) -> Row:
    """Blocks of a holder's memory are copied to pages in no order, relative to one copy within the device."""
    driver, layers = machine.driver, 4
    size = layers * piece
    count = machine.many((1 << 30) // size, 4)
    nbytes = count * size
    held = HeldGpu("0")
    whole = -(-nbytes // held.unit_bytes) * held.unit_bytes
    handle, fd = held.allocate(whole)
    mapped = MappedGpuMemory(driver, fd, whole)
    memory, other, host = (
        driver.device_memory(nbytes), driver.device_memory(nbytes), driver.pinned_memory(nbytes),
    )  # fmt: skip
    copier, stream = bench_gpu.Copier(driver), driver.stream()
    starts = [layer * count * piece for layer in range(layers)]
    pieces = copier.pieces(
        [memory] * layers,
        [nbytes] * layers,
        starts,
        [piece] * layers,
        [piece] * layers,
        blocks=count,
    )
    lane, ids = copier.lane(), np.random.default_rng(5).permutation(count)
    shown = np.frombuffer(memoryview(host), np.uint8)
    shown[:] = np.random.default_rng(6).integers(0, 256, nbytes, np.uint8)
    wanted = shown.copy().reshape(count, layers, piece)
    driver.copy(mapped.address, ctypes.addressof(host), nbytes, stream)
    driver.call("cuStreamSynchronize", stream)
    addresses = (mapped.address + np.arange(count) * size).astype(np.uint64)

    def load() -> None:
        lane.start_at(pieces, ids, addresses, False, None)
        lane.finish()

    def copied() -> None:
        driver.copy(other, mapped.address, nbytes, stream)
        driver.call("cuStreamSynchronize", stream)

    alone, loading = Arm(copied), Arm(load)
    pairs(alone, loading, machine.many(15, 1), warmups=2)
    driver.copy(ctypes.addressof(host), memory, nbytes, stream)
    driver.call("cuStreamSynchronize", stream)
    found = shown.reshape(layers, count, piece)[:, ids].transpose(1, 0, 2)
    assert np.array_equal(found, wanted), "pages differ from the memory of the holder"
    lane.close()
    mapped.close()
    held.release(handle)
    ratio = median(alone.seconds) / median(loading.seconds)
    return harness.at_least(f"hot to pages, pieces of {piece // KIB} KiB", ratio, "x", HOT_BAR)


def kvikio() -> Rows:
    direct = Path("/proc/driver/nvidia-fs/stats").exists()
    files = ["tests/plugins/test_direct_kvikio.py", "tests/plugins/test_direct.py"]
    device = {"KVTIER_DEVICE": "gpu"} if Machine().real else {}
    for row in tests("reads, digests, damage", files, **device):
        row.more["reads"] = "direct storage is there: see the counters" if direct else "compat"
        yield row


def model() -> Rows:
    if importlib.util.find_spec("torch") is None:
        yield told("the same tokens", "torch is not installed")
        return
    import gpu_model

    with serving(256 * MIB) as (_, socket):
        yield from gpu_model.rows(socket)


def transformers() -> Rows:
    if importlib.util.find_spec("transformers") is None:
        yield told("time to the first token", "transformers is not installed")
        return
    import gpu_transformers

    machine = Machine()
    with (
        serving(machine.many(4 << 30, 64 * MIB)) as (_, socket),
        tempfile.TemporaryDirectory() as made,
    ):
        yield from gpu_transformers.rows(machine, socket, Path(made))
    if machine.real:
        files = [
            f"tests/engines/test_transformers_{name}.py" for name in ("models", "cache", "offload")
        ]
        yield from tests("tests of the plugin, on the device", files, KVTIER_DEVICE="gpu")


def rates() -> Rows:
    machine = Machine()
    rounds = machine.many(5, 1)
    for name in bench_gpu.DECODE_BARS:
        for row in bench_gpu.coded(machine.driver, name, rounds):
            if row.name in (f"decode {name}", f"start of decode {name}"):
                yield machine.judged(row)
    driver, stream = machine.driver, machine.driver.stream()
    size, each = bench_gpu.CODED_BYTES, 32 * KIB
    memory, other = driver.device_memory(size + 8), driver.device_memory(size + 8)
    host = driver.pinned_memory(size)
    shown = np.frombuffer(memoryview(host), np.uint8)
    shown[:] = np.random.default_rng(2).integers(0, 256, size, np.uint8)
    digester = Digester(driver, size // each)
    for shift in (0, 3):
        driver.copy(memory + shift, ctypes.addressof(host), size, stream)
        ranges = np.zeros(size // each, RANGE)
        ranges["address"], ranges["nbytes"] = memory + shift + np.arange(len(ranges)) * each, each
        digester.start(ranges, stream)
        found = digester.finish()
        for number in random.Random(1).sample(range(len(found)), 8):
            wanted = kernels.xxh3_128(shown[number * each : (number + 1) * each])
            assert found[number].tobytes() == wanted, "another digest than the processor's"

        def digest(ranges: Any = ranges) -> None:
            digester.start(ranges, stream)
            digester.finish()

        def copied() -> None:
            driver.copy(other, memory, size, stream)
            driver.call("cuStreamSynchronize", stream)

        arm = Arm(digest)
        pairs(arm, Arm(copied), rounds, warmups=2)
        speed = size / median(arm.seconds) / 1e9
        title = "XXH3 of 32 KiB ranges" + (", not aligned" if shift else "")
        yield machine.judged(harness.at_least(title, speed, "GB/s", DIGEST_BAR))


def engine() -> Rows:
    machine = Machine()
    driver = machine.driver
    yield from empty_step(machine)
    copier, memory = bench_gpu.Copier(driver), bench_gpu.Memory(driver)
    if machine.real and importlib.util.find_spec("torch") is not None:
        yield matmul(machine, copier, memory)
    else:
        yield told("a matmul while blocks are saved", NO_DEVICE)
    if machine.real:
        yield from bench_gpu.registering(driver, memory)


class OneGpu:
    """The device for an engine of the tests: its pages are registered memory of the host."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._kept = driver, []  # type: tuple[Driver, list[Any]]

    def driver(self) -> Driver:
        return Driver(0)

    def pin(self, array: Any) -> None:
        self._driver.register(array.ctypes.data, array.nbytes)

    def copy(self, stream: int, to: int, source: int, nbytes: int) -> None:
        self._driver.copy(to, source, nbytes, stream)

    def later(self, stream: int, work: Callable[[], None]) -> None:
        call = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: work())
        self._kept.append(call)
        launch = self._driver._library.cuLaunchHostFunc
        with self._driver.inside:
            assert launch(c_void_p(stream), call, None) == 0


def empty_step(machine: Machine) -> Rows:
    """A step that neither loads nor saves."""
    from kvtier_vllm.messages import Step
    from support.device_engine import DeviceEngine
    from support.fake_engine import BLOCK, layout_of

    with serving(16 * MIB) as (_, socket):
        made = DeviceEngine(OneGpu(machine.driver), socket, layout_of([0]), gpu_copies="batch")
        made.serve(range(4 * BLOCK + 3))
        made.settle()
        [worker] = made.workers
        session = worker.mappings.session
        assert session is not None
        reader, took = session.reader, []
        for number in range(1_000, 3_000):
            step = Step(number, b"", reader.daemon_run, reader.extents, [], [], [], False)
            started = time.perf_counter()
            worker.begin(step)
            worker.loads.start([])
            worker.start_saves([])
            worker.report()
            took.append(time.perf_counter() - started)
        made.close()
    yield machine.judged(harness.at_most("an empty step", median(took) * 1e6, "us", STEP_BAR_US))


def matmul(machine: Machine, copier: Any, memory: Any) -> Row:
    """A matrix product of the engine, while blocks are copied to the arena all the time."""
    import torch

    driver, blocks_, nbytes = machine.driver, 32, 4 * MIB
    one = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    with serving(1 << 30) as (client, _):
        group = Group(kind="full", layers=1, opaque_bytes=nbytes)
        spec = KvSpec.groups(
            [group], model="matmul", dtype="uint8", block_tokens=1, weights="rev:1"
        )
        space = client.open(spec)
        pieces = copier.pieces(
            [memory.device], [blocks_ * nbytes], [0], [nbytes], [nbytes], blocks=blocks_
        )
        reader = client.reader()
        bench_gpu.wait_for(lambda: len(copier.pins.of(reader.mappings).ready) == reader.extents)
        over, busy = threading.Event(), threading.Event()

        def save() -> None:
            driver.own_thread()
            lane = copier.lane()
            with space.reserve(space.keys(list(range(blocks_)))) as saving:
                while not over.is_set():
                    if not busy.wait(0.01):
                        continue
                    lane.start(pieces, list(range(blocks_)), saving.mappings, saving.slots, True,
                               Event(driver).record(lane.stream))  # fmt: skip
                    lane.finish()

        def product() -> None:
            for _ in range(40):
                torch.mm(one, one)
            torch.cuda.synchronize()

        thread = threading.Thread(target=save)
        thread.start()
        try:
            alone, beside = Arm(product, before=busy.clear), Arm(product, before=busy.set)
            ratios = pairs(
                alone, beside, 15, warmups=3
            )  # the time during saves, relative to that without
        finally:
            over.set()
            busy.set()
            thread.join()
    return harness.at_most("a matmul while blocks are saved", median(ratios), "x", MATMUL_BAR)


def sanitizers() -> Rows:
    machine = Machine()
    if not machine.real:
        for name in small():
            yield told(f"{name}, without the sanitizer", NO_DEVICE)
        return
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.access(tool, os.X_OK):
        yield told("all", "compute-sanitizer is not installed")
        return

    def checked(kind: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tool, "--tool", kind, "--error-exitcode", "7", "--target-processes", "application-only",
             sys.executable, __file__, "small", os.devnull],
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    kinds = ("memcheck", "racecheck", "synccheck", "initcheck")
    with ThreadPoolExecutor() as processes:
        for kind, done in zip(kinds, processes.map(checked, kinds), strict=True):
            said = re.search(r"ERROR SUMMARY: (\d+) errors|(\d+) hazards displayed", done.stdout)
            print(kind, done.stdout[-4000:], done.stderr[-500:], flush=True)
            assert said is not None, f"{kind} has said nothing"
            row = count(f"{kind}, errors", int(said[1] or said[2]), 0)
            row.ok = row.ok and done.returncode == 0
            yield row


def small() -> Iterator[str]:
    """Each kernel once, with few bytes, against the processor; names what has run."""
    machine = Machine()
    bench_gpu.CODED_BYTES = MIB
    for name in bench_gpu.CODECS:
        bench_gpu.coded(machine.driver, name, 1)
        yield name
    memory, stream = machine.driver.device_memory(MIB), machine.driver.stream()
    host = machine.driver.pinned_memory(MIB)
    shown = np.frombuffer(memoryview(host), np.uint8)
    shown[:] = np.random.default_rng(3).integers(0, 256, MIB, np.uint8)
    machine.driver.copy(memory, ctypes.addressof(host), MIB, stream)
    digester = Digester(machine.driver, 100)
    ranges = np.array([(memory + 5 * n, 999 * n) for n in range(100)], RANGE)
    digester.start(ranges, stream)
    for n, one in enumerate(digester.finish()):
        assert one.tobytes() == kernels.xxh3_128(shown[5 * n : 5 * n + 999 * n])
    yield "digests"


def small_stage() -> Rows:
    for name in small():
        yield told(name, "equal")


RUN: dict[str, Callable[[], Rows]] = {
    "environment": environment, "texts": texts, "codecs": codecs_stage, "copies": copies,
    "captures": captures, "kills": kills, "holder": holder, "kvikio": kvikio, "model": model,
    "transformers": transformers, "rates": rates, "engine": engine, "sanitizers": sanitizers,
    "small": small_stage,
}  # fmt: skip


def main() -> int:
    name, path = sys.argv[1:]
    with Path(path).open("a") as rows:
        for row in RUN[name]():
            rows.write(json.dumps(asdict(row)) + "\n")
            rows.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
