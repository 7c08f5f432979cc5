"""A serving engine with a daemon that dies, hangs, restarts, sends invalid replies, has a full disk, or
reads damaged blocks, in an order drawn from a seed. No request fails, all answers are
correct, and hits return."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.served import ANSWER_S, Records, Served
from kvtier import Unavailable, wire
from support.daemons import Daemon, start_daemon
from support.disks import Mounted, mounted
from support.effort import effort
from support.prompts import BLOCK, check_same, prompt

SEED = 5
FAULTS = effort(16, 50, 500)
CLIENTS = 3
TOKENS = 12
PROMPTS = [
    prompt(seed % 4, 5 * BLOCK) + prompt(seed, 5 * BLOCK + 10 + seed % 20)
    for seed in range(100, 124)
]
PAGES = 64  # in the engine's own cache: a sixth of what the prompts need
PATIENCE_S = 1.0  # the option's default
AGAIN_S = 60.0
MIB = 1 << 20


class Daemons:
    """Consecutive daemons at one socket, with a cold tier on a separate small disk."""

    def __init__(self, folder: Path, disk: Mounted | None) -> None:
        self.folder, self.disk = folder, disk
        self.cold = folder / "cold" if disk is None else disk.path
        self.cold.mkdir(exist_ok=True)
        self.spoilt = 0
        self.now = self.start()

    def start(self) -> Daemon:
        self.now = start_daemon(
            self.folder,
            config=f'[warm]\nsize = "16MiB"\n[cold]\ndirectories = ["{self.cold}"]\n'
            f'size = "96MiB"\nsegment = "1MiB"\nwrite = "through"\nscrub = 0\n',
            wait=False,
        )
        return self.now

    def kill(self) -> None:
        self.look()
        self.now.process.kill()
        self.now.process.wait()

    def end(self) -> None:
        self.look()
        assert self.now.stop() == 0

    def look(self) -> None:
        """Record what this daemon has found, unless it has not started completely."""
        with contextlib.suppress(Unavailable):
            self.spoilt += self.now.stats()["tiers"]["cold"]["states"]["spoilt"]

    def said(self) -> str:
        return self.now.log.read_text()[-2000:]

    def damage(self, chance: random.Random) -> None:
        """Flip a bit in each 16 KiB of most segments."""
        for path in sorted(self.cold.rglob("*")):
            if path.is_file() and chance.random() < 0.8:
                with contextlib.suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
                    for at in range(0, os.fstat(file.fileno()).st_size, 1 << 14):
                        at += chance.randrange(1 << 14)
                        was = os.pread(file.fileno(), 1, at)
                        if was:
                            os.pwrite(file.fileno(), bytes([was[0] ^ 16]), at)


class Impostor(threading.Thread):
    """Listens at the socket of the daemon, and sends invalid replies."""

    def __init__(self, path: str, answer: Callable[[wire.Hello], bytes | None]) -> None:
        super().__init__(daemon=True)
        self._answer = answer
        self._held: list[socket.socket] = []
        Path(path).unlink(missing_ok=True)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen(16)
        self.served = 0
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self._held.append(client)
                client.settimeout(1.0)
                self._serve(client)

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            framer = wire.Framer()
            bodies = list(framer.feed(client.recv(1 << 16)))
            hello = wire.decode_request(bodies[0])
            assert isinstance(hello, wire.Hello)
            self.served += 1
            answer = self._answer(hello)
            if answer is not None:
                client.sendall(answer)

    def close(self) -> None:
        # Wakes the thread from its accept.
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.join()
        for client in self._held:
            client.close()


def other_schema(hello: wire.Hello) -> bytes:
    return wire.encode(wire.Failed(hello.id, "wrong_schema", "another version", True))


def garbage(hello: wire.Hello) -> bytes:
    return random.Random(1).randbytes(4096)


def another_answer(hello: wire.Hello) -> bytes:
    return wire.encode(wire.Done(hello.id))


def silence(hello: wire.Hello) -> None:
    return None


def welcome_and_silence(hello: wire.Hello) -> bytes:
    return wire.encode(wire.Welcome(hello.id, "0", "default", bytes(16), bytes(16)))


IMPOSTORS = (other_schema, garbage, another_answer, silence, welcome_and_silence)


# --- what may happen --------------------------------------------------------------------------


def killed(daemons: Daemons, chance: random.Random) -> None:
    daemons.kill()
    time.sleep(chance.uniform(0.0, 1.0))
    daemons.start()


def hung(daemons: Daemons, chance: random.Random) -> None:
    daemons.now.process.send_signal(signal.SIGSTOP)
    time.sleep(chance.choice([0.02, 0.2, 1.5, 2.5]))
    daemons.now.process.send_signal(signal.SIGCONT)


def hung_and_killed(daemons: Daemons, chance: random.Random) -> None:
    daemons.look()
    daemons.now.process.send_signal(signal.SIGSTOP)
    time.sleep(chance.uniform(0.0, 1.5))
    daemons.now.process.kill()
    daemons.now.process.wait()
    daemons.start()


def restarted(daemons: Daemons, chance: random.Random) -> None:
    daemons.end()
    time.sleep(chance.uniform(0.0, 0.3))
    daemons.start()


def replaced(daemons: Daemons, chance: random.Random) -> None:
    chance.choice([daemons.kill, daemons.end])()
    impostor = Impostor(daemons.now.socket, chance.choice(IMPOSTORS))
    deadline = time.monotonic() + AGAIN_S
    while not impostor.served:
        assert time.monotonic() < deadline, "nobody tries to connect"
        time.sleep(0.02)
    time.sleep(chance.uniform(0.0, 1.0))
    impostor.close()
    daemons.start()


def out_of_disk(daemons: Daemons, chance: random.Random) -> None:
    assert daemons.disk is not None
    daemons.disk.fill()
    try:
        time.sleep(chance.uniform(0.2, 1.0))
        if chance.random() < 0.3:
            restarted(daemons, chance)
            time.sleep(chance.uniform(0.2, 1.0))
    finally:
        daemons.disk.drain()


def damaged(daemons: Daemons, chance: random.Random) -> None:
    daemons.damage(chance)
    if chance.random() < 0.5:
        # With an empty memory, the next requests are read from the disk.
        killed(daemons, chance)


KINDS = (killed, hung, hung_and_killed, restarted, replaced, out_of_disk, damaged)


# --- who asks meanwhile -----------------------------------------------------------------------


class Traffic:
    """Threads that send requests without a pause, and compare every answer."""

    def __init__(self, engine: Served, right: list[dict[str, Any]]) -> None:
        self._engine, self._right = engine, right
        self._ending = threading.Event()
        self.failures: list[BaseException] = []
        self.answered: Counter[str] = Counter()
        self._threads = [
            threading.Thread(target=self._ask, args=(random.Random(SEED + number),), daemon=True)
            for number in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, chance: random.Random) -> None:
        while not self._ending.is_set():
            which = chance.randrange(len(PROMPTS))
            abort = chance.choice(["queued", "loading", "running", "saving"])
            more = {"abort": abort} if chance.random() < 0.1 else {}
            try:
                answer = self._engine.begin(PROMPTS[which], TOKENS, **more).result(ANSWER_S)
                self.answered["aborted" if "aborted" in answer else "whole"] += 1
                if "aborted" not in answer:
                    check_same(answer, self._right[which])
            except BaseException as error:  # noqa: BLE001  # the test reports it
                self.failures.append(error)
                return

    def end(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(ANSWER_S)


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    folder = tmp_path_factory.mktemp("daemon")
    with contextlib.ExitStack() as stack:
        disk = None
        try:
            disk = stack.enter_context(mounted(folder, 192 * MIB))
        except pytest.skip.Exception as why:
            print(f"there is no disk to fill: {why}")
        daemons = Daemons(folder, disk)
        yield daemons
        daemons.now.stop()
        _, raised, what = daemons.now.log.read_text().partition("Traceback")
        assert not raised, what[:4000]


@pytest.fixture(scope="module")
def engine(daemons: Daemons, engine_of: Callable[..., Any]) -> Served:
    started = engine_of(
        "llama", daemons.now.socket, script="serving.py", num_gpu_blocks_override=PAGES,
        max_model_len=512, disable_log_stats=False,
    )  # fmt: skip
    return Served(started)


def hits(engine: Served) -> int:
    counts = engine.state()["counts"]
    return sum(n for name, n in counts.items() if name.startswith("hit_tokens:")) // BLOCK


def test_no_request_fails_whatever_happens_to_the_daemon(
    engine: Served, daemons: Daemons, request: pytest.FixtureRequest
) -> None:
    right = engine.compute(PROMPTS, TOKENS)
    records, chance = Records(engine.engine.records), random.Random(SEED)
    traffic = Traffic(engine, right)
    request.addfinalizer(traffic.end)
    kinds = [kind for kind in KINDS if kind is not out_of_disk or daemons.disk is not None]
    happened: Counter[str] = Counter()
    away_s = []
    for number in range(FAULTS):
        # Every kind once before any is repeated.
        kind = kinds[number] if number < len(kinds) else chance.choice(kinds)
        time.sleep(chance.uniform(0.0, 0.3))
        kind(daemons, chance)
        happened[kind.__name__] += 1
        what = f"fault {number}, {kind.__name__}, seed {SEED}"
        before, since = hits(engine), time.monotonic()
        while hits(engine) < before + BLOCK:
            ended = daemons.now.process.poll()
            assert ended is None, f"{what}: the daemon ended, {ended}: {daemons.said()}"
            assert time.monotonic() < since + AGAIN_S, (
                f"{what}: no hits any more: {engine.state()}: {daemons.said()}"
            )
            time.sleep(0.05)
        away_s.append(time.monotonic() - since)
        assert not traffic.failures, f"{what}: {traffic.failures}"
        assert records.wrong() == [], what
    traffic.end()
    assert not traffic.failures, traffic.failures
    daemons.look()
    state = engine.check_nothing_is_held(daemons.now)
    assert records.wrong() + records.wrong() == []
    print(dict(happened), dict(traffic.answered), state["counts"], f"{daemons.spoilt} spoilt")
    print(
        f"{records.compared} pages compared, longest wait {records.longest_wait_s:.3f} s,"
        f" hits again after {sorted(away_s)[len(away_s) // 2]:.2f} s, {max(away_s):.2f} s at most"
    )
    print({name: f"{s * 1000:.1f} ms" for name, s in records.longest_calls.items()})
    assert records.longest_wait_s <= PATIENCE_S
    # All promised blocks were available, also those of daemons that had ended.
    assert not any(name.startswith("load_failed") for name in state["counts"]), state["counts"]
    assert not records.waits, "a step waited for the daemon"
    assert records.compared > FAULTS * BLOCK
    assert daemons.spoilt, "nothing that was damaged was read"
