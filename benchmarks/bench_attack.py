"""The matches of one tenant while another tenant attacks: the same 1,024 keys, without and with each attack.

The attackers are processes of another user (uid 65534), so it needs root. Each attack lasts a few seconds, on
unix sockets in a folder of its own, and every match is checked. `--only NAME` runs one of them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgpack

import harness
from harness import Daemon, Row, at_most, percentile
from kvtier import Client, Keys, KvSpec, Space, wire

ATTACKER = 65_534
SECONDS = 3.0
BAR_MS = 5.0
BAR_BYTES = 256 << 20
KEYS = 1024
RESERVED = getattr(wire, "LIMIT_RESERVED", wire.LIMIT_KEYS)  # as many as one may ask for
CHANGED = getattr(wire, "LIMIT_CHANGED", wire.LIMIT_KEYS)
STORED = wire.LIMIT_KEYS  # blocks of the attacker
WARM = "1GiB"
CONFIG = """socket_mode = "0666"
max_clients = 512
[tenants.victim]
uids = [0]
quota = "50%"
[tenants.attacker]
uids = ["*"]
quota = "50%"
"""
Request = Callable[[int], bytes]  # of an opened space


def spec_of(name: str) -> KvSpec:
    return KvSpec.dense(
        model=name, layers=1, kv_heads=1, head_dim=8, dtype="bfloat16", block_tokens=16, weights="1",
    )  # fmt: skip


def strides(_: int) -> bytes:
    """A description with 4 million strides."""
    spec = msgpack.unpackb(wire.encode(wire.Open(2, spec_of("strides")))[4:])
    spec[2]["strides"] = [1] * 4_000_000
    body = msgpack.packb(spec)
    return wire.LENGTH.pack(len(body)) + body


def reserves(space: int) -> bytes:
    return wire.encode(wire.Reserve(3, space, 0, 0, b"", os.urandom(32 * RESERVED)))


def stored(count: int) -> bytes:
    """The first keys of the blocks that the attacker has in memory."""
    return hashlib.shake_128(b"stored").digest(32 * STORED)[: 32 * count]


def loads(space: int) -> bytes:
    return wire.encode(wire.Load(3, space, stored(16_384), 60_000, [0]))


def loads_all(space: int) -> bytes:
    return wire.encode(wire.Load(3, space, stored(STORED), 60_000, [0]))


def matches_all(space: int) -> bytes:
    return wire.encode(wire.MatchPrefix(3, space, stored(STORED)))


def hints(space: int) -> bytes:
    return wire.encode(wire.Hint(3, space, stored(CHANGED), 0.5))


def forgets(space: int) -> bytes:
    """Of blocks that are stored the first time, and absent later."""
    return wire.encode(wire.Forget(3, space, stored(CHANGED)))


def stats(_: int) -> bytes:
    return wire.encode(wire.Stats(3)) * 64


def half(_: int) -> bytes:
    """All of the longest request but its last byte."""
    body = msgpack.packb([3, 1, 0, bytes(wire.LIMIT_FRAME_BYTES - 9)])
    return (wire.LENGTH.pack(len(body)) + body)[:-1]


# name, connections, what each sends, and whether again and again
ATTACKS: list[tuple[str, int, Request, bool]] = [
    ("Open of 4 million strides, 1 connection", 1, strides, True),
    ("Open of 4 million strides, 30 connections", 30, strides, True),
    (f"reserves of {RESERVED:,} keys, 60 connections", 60, reserves, True),
    ("loads of 16,384 keys, 120 connections", 120, loads, True),
    (f"loads of {STORED:,} keys, 60 connections", 60, loads_all, True),
    (f"matches of {STORED:,} keys, 60 connections", 60, matches_all, True),
    (f"hints of {CHANGED:,} keys, 60 connections", 60, hints, True),
    (f"forgets of {CHANGED:,} keys, 60 connections", 60, forgets, True),
    ("stats, 60 connections", 60, stats, True),
    ("4 MiB less a byte, 247 connections", 247, half, False),
]


class Sender:
    """A connection that sends as fast as the daemon receives, discards all answers, and reconnects when the
    daemon disconnects it."""

    def __init__(self, path: str, request: Request, again: bool) -> None:
        self._path, self._request, self._again = path, request, again
        self._frame = b""
        self.connect()

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(self._path)
        opening = [wire.Hello(1, wire.SCHEMA, "attack"), wire.Open(2, spec_of("attack"))]
        self.sock.sendall(b"".join(map(wire.encode, opening)))
        framer, space = wire.Framer(), -1
        while space < 0:
            data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 64)
            for fd in fds:
                os.close(fd)
            if not data:
                raise ConnectionError("turned away")
            for body in framer.feed(data):
                reply = wire.decode_reply(body)
                space = reply.space if isinstance(reply, wire.Opened) else space
        self._frame = self._frame or self._request(space)
        self._left = memoryview(self._frame)
        self.sock.setblocking(False)

    @property
    def done(self) -> bool:
        return not self._left

    def step(self) -> None:
        try:
            self._drain()
            self._left = self._left[self.sock.send(self._left[: 1 << 18]) :]
            if not self._left and self._again:
                self._left = memoryview(self._frame)
        except BlockingIOError:
            pass
        except OSError:
            self.sock.close()
            self.connect()

    def _drain(self) -> None:
        try:
            while self.sock.recv(1 << 18):
                pass
        except BlockingIOError:
            return
        raise ConnectionResetError


def attack(path: str, count: int, request: Request, again: bool, ready: int) -> None:
    os.setgroups([])
    os.setgid(ATTACKER)
    os.setuid(ATTACKER)
    senders = []
    for _ in range(count):
        senders.append(Sender(path, request, again))
        if request in (loads, loads_all, matches_all, hints, forgets) and len(senders) == 1:
            keep(path)
    os.write(ready, b"x")
    while True:
        poll = select.poll()
        for sender in senders:
            events = select.POLLIN if sender.done else select.POLLIN | select.POLLOUT
            poll.register(sender.sock, events)
        found = {fd for fd, _ in poll.poll(100)}
        for sender in senders:
            if sender.sock.fileno() in found:
                sender.step()


def keep(path: str) -> None:
    """Have what the attacks ask for in memory, so that there is work to do."""
    with Client.connect(path, timeout_s=60) as client:
        space, keys = client.open(spec_of("attack")), Keys(stored(STORED))
        space.save(keys, bytes(STORED * space.block_bytes), wait_s=60)
        assert space.match(keys).ready == STORED


def daemon_ms(daemon: Daemon) -> float:
    """What the daemon's loop has had of a processor."""
    return int(Path(f"/proc/{daemon.process.pid}/schedstat").read_text().split()[0]) / 1e6


def matches(
    daemon: Daemon, space: Space, keys: list[bytes], seconds: float
) -> tuple[list[float], list[float]]:
    """Return the milliseconds of each match, and how much of that the daemon's event loop ran, independent
    of other load."""
    took, ran = [], []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        before, began = daemon_ms(daemon), time.perf_counter()
        found = space.match(keys)
        took.append((time.perf_counter() - began) * 1000)
        ran.append(daemon_ms(daemon) - before)
        assert found.ready == len(keys), found
        time.sleep(0.0005)
    return took, ran


def under(daemon: Daemon, name: str, space: Space, keys: list[bytes], base_ms: float) -> list[Row]:
    _, count, request, again = next(one for one in ATTACKS if one[0] == name)
    before = daemon.anonymous_bytes()
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            attack(daemon.socket, count, request, again, writable)
        finally:
            os._exit(1)
    os.close(writable)
    try:
        began = os.read(readable, 1)
        os.close(readable)
        assert began, f"{name}: the attack could not begin"
        took, ran = matches(daemon, space, keys, SECONDS)
        more = daemon.anonymous_bytes() - before
        assert os.waitpid(child, os.WNOHANG)[0] == 0, f"{name}: the attack ended early"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    p99 = percentile(took, 0.99)
    return [
        at_most(
            f"{name}: p99 beyond alone", p99 - base_ms, "ms", BAR_MS,
            p50=percentile(took, 0.5), p99=p99, worst=max(took), matches=len(took),
            loop_p50=percentile(ran, 0.5), loop_p99=percentile(ran, 0.99),
        ),
        at_most(f"{name}: memory beyond before", more / (1 << 20), "MiB", BAR_BYTES / (1 << 20)),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[one[0] for one in ATTACKS])
    parser.add_argument("--out")
    options = parser.parse_args()
    if os.getuid() != 0:
        sys.exit("bench_attack needs root: the attackers are another user")
    names = [options.only] if options.only else [one[0] for one in ATTACKS]
    probes = [harness.noise()]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        with Daemon(folder, WARM, CONFIG) as daemon:
            daemon.wait_for_arena()
            client = Client.connect(daemon.socket, populate=False)
            space = client.open(spec_of("victim"))
            keys = space.keys(list(range(16 * KEYS)))
            space.save(keys, [bytes(space.spec.block_bytes)] * len(keys))
            matches(daemon, space, keys, 0.5)
            alone, ran = matches(daemon, space, keys, SECONDS)
            base_ms = percentile(alone, 0.99)
            rows.append(
                Row(
                    "alone: match of 1,024 keys, p99", base_ms, "ms",
                    more={"p50": percentile(alone, 0.5), "loop_p99": percentile(ran, 0.99)},
                )
            )  # fmt: skip
            for one in names:
                rows += under(daemon, one, space, keys, base_ms)
                matches(daemon, space, keys, 0.5)
            client.close()
    probes.append(harness.noise())
    return harness.report("attack", rows, probes, options.out)


if __name__ == "__main__":
    sys.exit(main())
