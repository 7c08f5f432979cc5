"""Tiers are drained, switched off and on again while the daemon serves clients."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier import Refused, wire
from kvtier.space import Space
from support.daemons import Daemon, kvtier
from support.effort import effort
from support.specs import pattern, spec_of

CONFIG = """
[warm]
size = "{warm}"
[cold]
directories = ["{folder}/disk"]
size = "256MiB"
segment = "4MiB"
codec = "{codec}"
"""
PROMPT = 64


def started(
    daemon_of: Callable[..., Daemon], folder: Path, warm: str = "16MiB", codec: str = "raw"
) -> Daemon:
    folder.mkdir(exist_ok=True)
    (folder / "disk").mkdir(exist_ok=True)
    daemon = daemon_of(folder=folder, config=CONFIG.format(warm=warm, folder=folder, codec=codec))
    daemon.wait_for_disks()
    return daemon


def save(space: Space, number: int) -> bytes:
    keys = space.keys([number] * PROMPT)
    space.save(keys, [pattern(key, space.spec.block_bytes) for key in keys])
    return keys


def loaded(space: Space, keys: bytes, seconds: float = 60.0) -> int:
    """The number of blocks that can be loaded, after all reads ended. Each is compared."""
    until = time.monotonic() + seconds
    while space.match(keys).coming and time.monotonic() < until:
        time.sleep(0.01)
    with space.load(keys) as blocks:
        for key, block in zip(keys, blocks, strict=False):
            assert bytes(block) == pattern(key, space.spec.block_bytes)
        return len(blocks)


def wait_for_disk(daemon: Daemon, blocks: int) -> None:
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == blocks)


def threads_of(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/task"))


def tier(daemon: Daemon, *arguments: str) -> dict[str, object]:
    done = kvtier("tier", *arguments, "--json", "--socket", daemon.socket)
    assert done.returncode == 0, done.stdout + done.stderr
    output = json.loads(done.stdout)
    assert isinstance(output, dict)
    return output


def test_all_blocks_of_a_drained_warm_tier_survive_a_kill(
    tmp_path: Path, daemon_of: Callable[..., Daemon]
) -> None:
    daemon = started(daemon_of, tmp_path / "it")
    with daemon.connect() as client:
        space = client.open(spec_of("drain"))
        prompts, on_disk, blocks = [save(space, number) for number in range(8)], 0, 0
        while on_disk == blocks:  # otherwise there is nothing to drain
            assert len(prompts) < 200
            prompts.append(save(space, len(prompts)))
            blocks = len(prompts) * len(prompts[0])
            on_disk = daemon.stats()["tiers"]["cold"]["blocks"]
        with space.load(prompts[0]) as held:  # leased blocks are drained too
            assert len(held) == len(prompts[0])
            assert tier(daemon, "drain", "warm")["state"] == "drained"
        assert daemon.stats()["tiers"]["warm"]["state"] == "drained"
        late = save(space, 99)
        wait_for_disk(daemon, blocks + len(late))
    daemon.process.send_signal(signal.SIGKILL)
    daemon.process.wait()
    again = started(daemon_of, tmp_path / "it")
    wait_for_disk(again, blocks + len(late))
    assert again.stats()["tiers"]["warm"]["state"] == "on", "a restart knows nothing of it"
    with again.connect() as client:
        space = client.open(spec_of("drain"))
        assert all(loaded(space, keys) == len(keys) for keys in [*prompts, late])


@pytest.mark.parametrize("codec", ["raw", "r32"])
def test_a_cold_tier_that_is_off_releases_its_disk_and_returns_with_all_blocks(
    tmp_path: Path, daemon_of: Callable[..., Daemon], codec: str
) -> None:
    folder = tmp_path / "it"
    daemon = started(daemon_of, folder, warm="4MiB", codec=codec)
    with daemon.connect() as client:
        space = client.open(spec_of("off"))
        tier(daemon, "drain", "warm")
        prompts = []
        for number in range(40):
            prompts.append(save(space, number))
            if number % 8 == 7:  # more at once would be evicted before they are written
                wait_for_disk(daemon, sum(map(len, prompts)))
        tier(daemon, "on", "warm")
        there = daemon.stats()["tiers"]["cold"]["blocks"]
        gone = next(keys for keys in prompts if not space.match(keys).ready)
        assert loaded(space, gone) == len(gone)
        written = daemon.stats()["tiers"]["cold"]["states"]["written"]

        assert tier(daemon, "off", "cold")["state"] == "off"
        fds = Path(f"/proc/{daemon.process.pid}/fd")
        held = [os.readlink(fd) for fd in fds.iterdir() if fd.exists()]
        assert not [path for path in held if path.startswith(str(folder / "disk"))]
        stats = daemon.stats()
        assert stats["tiers"]["cold"]["state"] == "off" and not stats["tiers"]["cold"]["on"]
        cold = next(keys for keys in prompts if not space.match(keys).ready)
        before = daemon.stats()["miss_tokens"]
        found = space.match(space.keys([*[prompts.index(cold)] * PROMPT, 7]))
        assert (found.ready, found.coming) == (0, 0)
        after = daemon.stats()["miss_tokens"]
        assert any(n > before.get(why, 0) for why, n in after.items())
        explained = kvtier("explain", bytes(cold[0]).hex(), "--socket", daemon.socket)
        assert "off" in explained.stdout
        # The memory continues to serve, and blocks forgotten meanwhile stay forgotten.
        fresh = save(space, 1000)
        assert loaded(space, fresh) == len(fresh)
        with pytest.raises(Refused, match="switched off"):
            space.forget(cold)
        done = kvtier("tier", "drain", "warm", "--socket", daemon.socket)
        assert done.returncode == 2 and "switched off" in done.stderr

        assert tier(daemon, "on", "cold")["state"] in ("on", "recovering")
        # Blocks that are also in memory are known to be on disk: only new blocks have to be
        # written.
        tier(daemon, "drain", "warm")
        stats = daemon.stats()
        assert stats["tiers"]["cold"]["blocks"] == there - len(cold) + len(fresh)
        assert stats["tiers"]["cold"]["states"]["written"] == written + len(fresh)
        assert loaded(space, cold, 1.0) == 0, "it was forgotten"
        others = [keys for keys in prompts if keys is not cold]
        assert all(loaded(space, keys) == len(keys) for keys in others)
    assert daemon.stats()["failures"]["internal"] == 0


def test_a_warm_tier_is_drained_although_the_cold_one_was_off_meanwhile(
    tmp_path: Path, daemon_of: Callable[..., Daemon]
) -> None:
    daemon = started(daemon_of, tmp_path / "it")
    with daemon.connect() as client:
        space = client.open(spec_of("both"))
        prompts = [save(space, number) for number in range(40)]
        for which, order in (("warm", "drain"), ("cold", "off")):
            client.link.ask(wire.Tier(client.link.new_id(), which, order), wire.Report)
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["state"] == "off")
        # All blocks may have been written before the cold tier was off.
        assert daemon.stats()["tiers"]["warm"]["state"] in ("draining", "drained")
        assert tier(daemon, "on", "cold")["state"] in ("on", "recovering")
        daemon.wait_for(lambda stats: stats["tiers"]["warm"]["state"] == "drained")
        wait_for_disk(daemon, sum(map(len, prompts)))


def at_random(daemon: Daemon, chance: random.Random) -> None:
    """Send orders without waiting for their results; then switch all tiers on."""
    orders = [("cold", "off"), ("cold", "on"), ("cold", "drain"), ("warm", "drain"), ("warm", "on")]
    with daemon.connect() as client:

        def ask(which: str, order: str) -> str:
            with contextlib.suppress(Refused):
                client.tier(which, order)
            return str(client.tier(which)["state"])

        for _ in range(effort(15, 60, 60)):
            ask(*chance.choice(orders))
            if chance.random() < 0.1:
                daemon.process.send_signal(signal.SIGHUP)
            time.sleep(chance.random() * 0.1)
        until = time.monotonic() + 60
        while ask("cold", "on") != "on" or ask("warm", "on") != "on":
            assert time.monotonic() < until, "it does not come back"
            time.sleep(0.02)


ROUNDS = effort(2, 4, 4)


def test_switching_tiers_under_load_returns_no_wrong_byte(
    tmp_path: Path, daemon_of: Callable[..., Daemon]
) -> None:
    daemon = started(daemon_of, tmp_path / "it", warm="4MiB")
    over, wrong, served = threading.Event(), [], [0]

    def traffic(seed: int) -> None:
        with daemon.connect() as client:
            space = client.open(spec_of("traffic"))
            number = seed
            while not over.is_set():
                number = (number * 17 + 7) % 120
                keys = space.keys([number] * PROMPT)
                try:
                    with space.load(keys) as blocks:
                        for key, block in zip(keys, blocks, strict=False):
                            if bytes(block) != pattern(key, space.spec.block_bytes):
                                wrong.append(key)
                        count = len(blocks)
                    served[0] += count
                    if count < len(keys):
                        save(space, number)
                except Exception as error:  # noqa: BLE001  # reported below
                    wrong.append(error)
                    return

    threads = [threading.Thread(target=traffic, args=(seed,)) for seed in (1, 50)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(ROUNDS):
            for order in (("drain", "warm"), ("drain", "cold"), ("off", "cold"), ("on", "cold")):
                tier(daemon, *order, "--timeout", "30")
            daemon.wait_for(lambda stats: stats["tiers"]["cold"]["state"] == "on")
            tier(daemon, "on", "warm")
        at_random(daemon, random.Random(31))
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert served[0] > 25 * ROUNDS
    assert daemon.stats()["failures"]["internal"] == 0


def test_a_missing_directory_keeps_the_tier_off_with_a_reason(
    tmp_path: Path, daemon_of: Callable[..., Daemon]
) -> None:
    daemon = started(daemon_of, tmp_path / "it")
    disk = tmp_path / "it" / "disk"
    tier(daemon, "off", "cold")
    disk.rename(disk.with_name("away"))
    done = kvtier("tier", "on", "cold", "--socket", daemon.socket)
    assert done.returncode == 2 and str(disk) in done.stderr
    assert done.stderr.strip().count("\n") == 0
    for asked in (("tier", "status", "cold"), ("status",)):
        done = kvtier(*asked, "--socket", daemon.socket)
        output = " ".join((done.stdout + done.stderr).split())
        assert "off" in output and "cannot use " in output and "No such file" in output
    disk.with_name("away").rename(disk)
    assert tier(daemon, "on", "cold")["state"] == "on"


def test_switching_leaks_nothing_and_a_daemon_can_stop_while_a_tier_is_off(
    tmp_path: Path, daemon_of: Callable[..., Daemon]
) -> None:
    daemon = started(daemon_of, tmp_path / "it")
    with daemon.connect() as client:
        save(client.open(spec_of("often")), 1)
    counts = []
    for _ in range(4):
        tier(daemon, "off", "cold")
        tier(daemon, "on", "cold")
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["state"] == "on")
        counts.append((daemon.open_files(), threads_of(daemon)))
    # A segment may be begun at any time; a ring and its eventfds would be three descriptors each time. A
    # thread may be begun or end later; a leak would be three.
    assert counts[-1][0] <= counts[0][0] + 2 and counts[-1][1] <= counts[0][1] + 2, counts
    tier(daemon, "off", "cold")
    assert daemon.stop() == 0


def test_invalid_orders_are_refused_with_a_reason(
    shared_daemon: Daemon, tmp_path: Path, daemon_of: Callable[..., Daemon]
) -> None:
    done = kvtier("tier", "drain", "warm", "--socket", shared_daemon.socket)
    assert done.returncode == 2 and "no cold tier" in done.stderr
    daemon = started(daemon_of, tmp_path / "it")
    done = kvtier("tier", "off", "warm", "--socket", daemon.socket)
    assert done.returncode == 2 and "drain it" in done.stderr
