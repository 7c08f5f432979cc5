"""The size limit of a cold tier holds across kills and changes of the size: no file is created before
files without a place are removed."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path

from faults.test_daemon_crash import CHAINS, FOUND, SPECS, Done, Engine, Watcher, used
from support.daemons import start_daemon
from support.effort import effort
from support.oracle import Oracle

MIB = 1 << 20
STARTS = effort(6, 20, 200)
SEGMENTS = (MIB, 5 * MIB // 4, 2 * MIB)
SIZES = (64 * MIB, 80 * MIB, 128 * MIB)


def test_the_size_limit_holds_across_kills_and_other_sizes(tmp_path: Path) -> None:
    disk, log = tmp_path / "disk", tmp_path / "daemon.log"
    disk.mkdir()
    chance, oracle = random.Random(23), Oracle()
    segment, found, kept = MIB, 0, 0
    for _ in range(STARTS):
        size, before = chance.choice(SIZES), used([disk])
        if chance.random() < 0.3:
            segment = chance.choice([one for one in SEGMENTS if one <= size // 64])
        segment = min(segment, size // 64)
        known = log.stat().st_size if log.exists() else 0
        watcher = Watcher([disk])
        watcher.start()
        daemon = start_daemon(
            tmp_path,
            config=f'[warm]\nsize = "16MiB"\n[cold]\ndirectories = ["{disk}"]\nsize = {size}\n'
            f'segment = {segment}\nwrite = "through"\n',
        )
        until = time.monotonic() + 60
        while (line := FOUND.search(log.read_text(), known)) is None:
            assert time.monotonic() < until
            time.sleep(0.005)
        found, kept = found + int(line[1]), kept + (int(line[1]) > 0)
        assert used([disk]) <= size, "what has no place is gone by now"
        smaller = Watcher([disk])
        smaller.start()
        done: list[Done] = []
        stop = threading.Event()
        clients = [daemon.connect() for _ in SPECS]
        engines = [
            Engine(client, own, oracle, done, chance.getrandbits(32), stop)
            for own, client in enumerate(clients)
        ]
        for engine in engines:
            engine.start()
        time.sleep(0.1 + chance.random() * 0.4)
        killed_at = time.monotonic()
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait()
        for engine, client in zip(engines, clients, strict=True):
            engine.join(60)
            client.close()
            assert engine.failure is None, engine.failure
        oracle.killed(killed_at)
        watcher.stop()
        smaller.stop()
        assert watcher.most <= max(before, size), "more was made before the rest was gone"
        assert 0 < smaller.most <= size
    assert not oracle.returned
    assert found > CHAINS * STARTS and STARTS // 3 < kept < STARTS
    assert "Traceback" not in log.read_text()
