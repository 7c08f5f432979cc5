"""Consecutive daemons at one socket, and what happens to them: they are killed, hung, restarted, replaced and
reconfigured, and their disk becomes full, read-only or damaged."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvtier import Client, KvtierError, Refused, Unavailable, wire
from kvtier.connection import checked_frame
from kvtier_daemon.claim import keeper_of
from kvtier_daemon.tiers.fd_store import KeeperStore
from kvtier_daemon.tiers.kept_arena import clear
from support.daemons import Daemon, start_daemon
from support.disks import Mounted
from support.specs import spec_of

AGAIN_S = 60.0
KEEP_S = 600
# `SlotNote` of kernels/include/slot_notes.h: the two lowest bits of `mark` are the state.
NOTE = np.dtype([("generation", "<u8"), ("names", "V20"), ("mark", "<u4"), ("rest", "V96")])
READING = 3


class Daemons:
    """Each daemon leaves its memory to the next one if `keep_s` is not 0. The cold tier is on `disk`."""

    def __init__(
        self, folder: Path, disk: Mounted | None, warm: str = "16MiB", keep_s: int = 0
    ) -> None:
        self.folder, self.disk = folder, disk
        self.cold = folder / "cold" if disk is None else disk.path
        self.cold.mkdir(exist_ok=True)
        self.spoilt = self.taken_over = 0
        self.settings = {"write": "through", "codec": "auto", "daily_writes": "0"}
        self._warm, self.keep_s = warm, keep_s
        self.now = self.start()

    def start(self) -> Daemon:
        self.now = start_daemon(
            self.folder, config=self._config(), wait=False, keep_s=self.keep_s, own_children=True
        )
        return self.now

    def _config(self) -> str:
        settings = "".join(f'{name} = "{value}"\n' for name, value in self.settings.items())
        return (
            f'[warm]\nsize = "{self._warm}"\n[cold]\ndirectories = ["{self.cold}"]\n'
            f'size = "96MiB"\nsegment = "1MiB"\nscrub = 0\n{settings}'
        )

    def reload(self) -> None:
        """Let the daemon read the present settings."""
        file = self.folder / "kvtier.toml"
        head = file.read_text().partition("[warm]")[0]
        text = self._config().replace("[warm]\n", f"[warm]\nkeep_s = {self.keep_s}\n")
        file.write_text(head + text)
        self.now.process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        self.look()
        self.now.process.kill()
        self.now.process.wait()

    def end(self) -> None:
        self.look()
        assert self.now.stop() == 0

    def interrupt(self) -> None:
        """End it as an operator at a terminal does: its memory is freed."""
        self.look()
        self.now.process.send_signal(signal.SIGINT)
        assert self.now.process.wait(AGAIN_S) == 0

    def close(self) -> None:
        """Stop the daemon, and the process that keeps its memory."""
        self.now.stop()
        clear(KeeperStore(keeper_of(Path(self.now.socket)), 0))

    def look(self) -> None:
        """Record what this daemon has found, unless it has not started completely."""
        with contextlib.suppress(Unavailable):
            self.spoilt += self.now.stats()["tiers"]["cold"]["states"]["spoilt"]

    def slots_of_disks(self) -> int:
        """How many slots a disk may still write to because a daemon was killed while it read into them: no
        later daemon uses them."""
        store = KeeperStore(keeper_of(Path(self.now.socket)), 0)
        fds, count = store.take(), 0
        for name, fd in fds.items():
            if name.endswith("-notes"):
                table = fds[name.replace("-notes", "-generations")]
                text = os.pread(table, os.fstat(table).st_size, 0)
                notes = np.frombuffer(os.pread(fd, os.fstat(fd).st_size, 0), NOTE)
                now = np.frombuffer(text, "<u8")[: len(notes)]
                count += int(np.sum((notes["mark"] & 3 == READING) & (notes["generation"] == now)))
        for fd in fds.values():
            os.close(fd)
        store.close()
        return count

    def children(self) -> list[int]:
        """The processes that this daemon has started."""
        with contextlib.suppress(FileNotFoundError):
            pid = self.now.process.pid
            return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
        return []

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
    time.sleep(chance.choice([0.0, chance.uniform(0.0, 1.0)]))
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
    time.sleep(chance.choice([0.0, chance.uniform(0.0, 0.3)]))
    daemons.start()


def interrupted(daemons: Daemons, chance: random.Random) -> None:
    daemons.interrupt()
    daemons.start()


def replaced(daemons: Daemons, chance: random.Random) -> None:
    chance.choice([daemons.kill, daemons.end])()
    # The last one is told which connections of a client no longer write. The next daemon is not, and holds
    # their slots in kept memory until the client's process ends.
    impostors = IMPOSTORS[:-1] if daemons.keep_s else IMPOSTORS
    impostor = Impostor(daemons.now.socket, chance.choice(impostors))
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


def read_only(daemons: Daemons, chance: random.Random) -> None:
    """The file system finds an error; an operator repairs it."""
    assert daemons.disk is not None
    daemons.disk.go_read_only()
    time.sleep(chance.uniform(0.1, 0.8))
    chance.choice([daemons.kill, daemons.end])()
    daemons.disk.repair()
    daemons.start()


def damaged(daemons: Daemons, chance: random.Random) -> None:
    daemons.damage(chance)
    if chance.random() < 0.5:
        # With an empty memory, the next requests are read from the disk.
        interrupted(daemons, chance)


def reconfigured(daemons: Daemons, chance: random.Random) -> None:
    daemons.settings = {
        "write": chance.choice(["back", "through"]), "codec": chance.choice(["auto", "raw", "zstd"]),
        "daily_writes": chance.choice(["0", "1GiB"]),
        "admission": chance.choice(["auto", "second-touch", "all"]),
    }  # fmt: skip
    daemons.reload()
    time.sleep(chance.uniform(0.0, 0.2))


def switched(daemons: Daemons, chance: random.Random) -> None:
    """The cold tier is switched off, and on again."""
    with daemons.now.connect(timeout_s=AGAIN_S) as client:
        order(client, "off")
        time.sleep(chance.uniform(0.0, 0.5))
        order(client, "on")


def order(client: Client, order: str) -> None:
    """Switch the cold tier as soon as it can be: not while it is being opened or closed."""
    deadline = time.monotonic() + AGAIN_S
    while True:
        try:
            client.tier("cold", order)
            return
        except Refused as error:
            assert time.monotonic() < deadline, error
            time.sleep(0.05)


def index_killed(daemons: Daemons, chance: random.Random) -> None:
    """The process of the index ends; another one is started."""
    for pid in daemons.children():
        os.kill(pid, signal.SIGKILL)
    time.sleep(chance.uniform(0.0, 0.2))


@contextlib.contextmanager
def unread_answers(daemon: Daemon) -> Iterator[None]:
    """A client sends requests and reads no answer."""
    client = daemon.connect(timeout_s=AGAIN_S)
    try:
        connection = client.link.connection
        for _ in range(500):
            number = client.link.new_id()
            with contextlib.suppress(KvtierError):
                connection.begin(number, checked_frame(wire.Stats(number)))
        yield
    finally:
        client.close()


@contextlib.contextmanager
def held_slots(daemon: Daemon, number: int) -> Iterator[None]:
    """A client reserves slots, and disconnects before it has written them; its process goes on."""
    client = daemon.connect(timeout_s=AGAIN_S)
    space = client.open(spec_of("faulted"))
    keys = space.keys([number, *range(1, 8 * space.spec.block_tokens)])
    with contextlib.suppress(KvtierError), space.reserve(keys, wait_s=0):
        client.link.connection.give_up("lost")
        yield
    client.close()


def slow_clients(daemons: Daemons, chance: random.Random) -> None:
    with unread_answers(daemons.now), held_slots(daemons.now, chance.randrange(1 << 30)):
        time.sleep(chance.uniform(0.0, 0.5))
        if chance.random() < 0.3:
            killed(daemons, chance)
    # The next connection of this process declares that it does not write to them.
    with contextlib.suppress(Refused, Unavailable):
        Client.connect(daemons.now.socket, populate=False, timeout_s=AGAIN_S).close()


NEEDS_DISK = (out_of_disk, read_only)
KINDS = (
    killed, hung, hung_and_killed, restarted, interrupted, replaced, out_of_disk, read_only, damaged,
    reconfigured, switched, index_killed, slow_clients,
)  # fmt: skip
