"""The disk of the cold tier fails, is full, hangs, or disappears: no client gets wrong bytes, and the
fault is reported."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest

from e2e.test_cold_tier import CHAIN, SPEC, Content, save, settled, tokens
from kvtier import Refused
from kvtier_daemon.planning import COMPUTE
from kvtier_daemon.tiers.cold.disk import FAULTS_TO_OFF
from support.daemons import SERVE, Daemon, hasty_command, start_daemon
from support.disks import HANGS, Mounted, Shim, command, mounted, needs
from support.effort import effort
from support.injected import everything, points, run_one
from support.oracle import content
from support.power import PoweredDisk, image, powered
from support.specs import pattern

MIB = 1 << 20
WARM = 3  # the number of chains that fit into memory; tests request one more
# A busy machine may delay a read of a disk that works by seconds.
PATIENCE = {"PATIENCE_S": 600.0, "READ_MS": 60_000}
HASTE = {"OFF_S": 0.3, "LONGEST_OFF_S": 1.0, "RETRY_GROW_S": 0.5, "HANGS_S": 1.0} | PATIENCE
LONG = bool(os.environ.get("KVTIER_FAULTS"))
WRITES = ("write", "sync", "allocate")
LOOKS = 200
SAMPLE = effort(3, 10, 10)  # the number of tested points at which a call can fail, for each engine
STILL_TURNS = (
    60  # of the daemon's own clock, 50 ms each, without a write: nothing more will be written
)
ANSWER_S = 60.0  # a client's deadline: disks hang for longer, until the test releases them


def numbers(key: bytes, nbytes: int) -> bytes:
    """A block that codecs can shrink."""
    return content(key, 1, nbytes)


class Served:
    """A daemon with a cold tier, and a client that compares every block."""

    def __init__(
        self, folder: Path, disk: Path | list[Path], engine: str, shim: Shim | None, codec: str,
        **haste: float,
    ) -> None:  # fmt: skip
        self._folder, self._disks, self._engine, self._shim = (
            folder, [disk] if isinstance(disk, Path) else disk, engine, shim,
        )  # fmt: skip
        self._codec = codec
        self._content: Content = numbers if codec != "raw" else pattern
        self._haste = HASTE | haste
        folder.mkdir()
        self.daemon = self._started()
        self.client = self.daemon.connect(timeout_s=ANSWER_S)

    def _started(self, is_there: bool = True) -> Daemon:
        config = (
            f'[warm]\nsize = "{WARM * 2 + 1}MiB"\npolicy = "lru"\n'
            f"[cold]\ndirectories = {json.dumps([str(disk) for disk in self._disks])}\n"
            f'size = "{80 * len(self._disks)}MiB"\nsegment = "1MiB"\n'
            f'write = "through"\nengine = "{self._engine}"\n'
            f'codec = "{self._codec}"\n'
        )
        # Wait for an existing directory, even on a busy machine.
        haste = self._haste | {"OPEN_S": 60.0} if is_there else self._haste
        if self._shim is None:
            return start_daemon(self._folder, config=config, haste=haste)
        return start_daemon(
            self._folder, config=config, haste=haste, env=self._shim.env, own_children=True,
            forks=self._shim.server,
        )  # fmt: skip

    def start(self, is_there: bool = True) -> None:
        self.client.close()
        self.daemon = self._started(is_there)
        self.client = self.daemon.connect(timeout_s=ANSWER_S)
        if not is_there:
            return
        self.until(
            lambda: "cold tier is ready" in self.log().rpartition("serves on")[2], "no start"
        )

    def end(self) -> int:
        self.client.close()
        return self.daemon.stop()

    def kill(self) -> None:
        self.client.close()
        if self.daemon.process.poll() is None:
            self.daemon.process.kill()
        self.daemon.process.wait(60)

    @property
    def cold(self) -> dict[str, Any]:
        return dict(self.client.stats()["tiers"]["cold"])

    @property
    def turns(self) -> int:
        """The number of turns of the daemon's clock."""
        return int(self.client.stats()["loop"]["counts"][-1])

    def log(self) -> str:
        return self.daemon.log.read_text()

    def save(self, *chains: int) -> None:
        """Save each chain, and wait until it is written or dropped."""
        for chain in chains:
            before = last = self.cold["states"]["written"]
            save(self.client, chain, of=self._content)
            since = self.turns
            while (now := self.cold["states"]["written"]) < before + CHAIN:
                turns = self.turns
                if now > last:
                    last, since = now, turns
                elif turns > since + STILL_TURNS:
                    return
                time.sleep(0.01)

    def load(self, chain: int, seconds: float = 60.0) -> int:
        """The number of leading blocks that are loaded; each is compared."""
        space = self.client.open(SPEC)
        keys = space.keys(tokens(chain))
        deadline = time.monotonic() + seconds
        while space.match(keys).coming and time.monotonic() < deadline:
            time.sleep(0.002)
        with space.load(keys, deadline_ms=60_000) as blocks:
            for key, block in zip(keys, blocks, strict=False):
                assert bytes(block or b"") == self._content(key, SPEC.block_bytes), "other bytes"
            return len(blocks)

    def forget(self, chain: int) -> int:
        space = self.client.open(SPEC)
        return space.forget(space.keys(tokens(chain)))

    def look_ms(self, chain: int) -> float:
        """The lower quartile of the time of a load of a chain in memory, in ms."""
        space = self.client.open(SPEC)
        keys = space.keys(tokens(chain))
        times = []
        for _ in range(LOOKS):
            begun = time.perf_counter()
            with space.load(keys) as blocks:
                assert len(blocks) == CHAIN
            times.append(time.perf_counter() - begun)
        return quantiles(times, n=4)[0] * 1000

    def until(self, holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"{what}: {self.cold}\n{self.log()[-2000:]}"
            time.sleep(0.01)

    def until_written(self, chains: Iterator[int], seconds: float = 60.0) -> int:
        """Save one chain after another until one is completely on disk. Returns its number."""
        deadline = time.monotonic() + seconds
        for chain in chains:
            settled(self.daemon)  # pending writes of earlier chains
            before = self.cold["states"]["written"]
            self.save(chain)
            if self.cold["states"]["written"] >= before + CHAIN:
                return chain
            assert time.monotonic() < deadline, f"no more is written: {self.cold}"
        raise AssertionError("unreachable: chains do not end")


Serve = Callable[..., Served]


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Mounted]:
    with mounted(tmp_path, 128 * MIB) as disk:
        yield disk


@pytest.fixture
def device(tmp_path: Path) -> Iterator[PoweredDisk]:
    """An ext4 on a block device whose requests can fail or hang."""
    with powered(tmp_path, "ext4", image(tmp_path, "ext4")) as disk:
        yield disk


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts daemons. Request it after the disk that they use, so that they end first."""
    yield from serving(tmp_path)


def serving(tmp_path: Path) -> Iterator[Serve]:
    running: list[Served] = []

    def start(
        disk: Path | list[Path],
        engine: str = "auto",
        shim: Shim | None = None,
        codec: str = "raw",
        **haste: float,
    ) -> Served:
        folder = tmp_path / f"daemon-{len(running)}"
        running.append(Served(folder, disk, engine, shim, codec, **haste))
        return running[-1]

    yield start
    for one in running:
        one.kill()
    for one in running:
        assert "Traceback" not in one.log(), one.log()


def segments(disk: Path) -> list[Path]:
    return sorted((disk / "segments").rglob("0*"))


# --- no room, no writing ----------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codec", ["r32", "raw"])
def test_a_full_disk_is_reported_and_freed_space_is_used(
    ext4: Mounted, serve: Serve, codec: str
) -> None:
    one = serve(ext4.path, codec=codec)
    one.save(0, 1, 2, 3)
    ext4.fill()
    chains = count(10)
    one.until(lambda: one.save(next(chains)) or "No space left" in one.cold["failure"], "not said")
    assert one.cold["faults"] and "No space left on device" in one.log()
    before = len(segments(ext4.path))
    last = one.until_written(chains)
    assert len(segments(ext4.path)) == before, "there is no room, and still the newest are on disk"
    assert one.cold["on"], "what is there is read and written"
    assert [one.load(chain) for chain in (last - 1, last)] == [CHAIN, CHAIN]
    assert one.load(1) in range(CHAIN + 1)
    ext4.drain()
    one.until(lambda: one.save(next(chains)) or len(segments(ext4.path)) > before + 2, "no growth")
    one.until(lambda: not one.cold["failure"], "what is over is not said any more")
    last = one.until_written(chains)
    ext4.fill()
    assert one.end() == 0
    one.start()
    assert one.load(last) == CHAIN, "a start needs no room"
    assert one.end() == 0


def test_a_file_system_that_became_read_only_is_still_read(ext4: Mounted, serve: Serve) -> None:
    """`mount -o remount,ro` fails while files are open for writing; a device error makes the file
    system read-only."""
    one = serve(ext4.path)
    one.save(0, 1, 2, 3, 4, 5)
    assert one.cold["states"]["written"] == 6 * CHAIN
    ext4.go_read_only()
    save(one.client, 10)
    one.until(lambda: "Read-only file system" in one.cold["failure"], "not said")
    one.until(lambda: not one.cold["on"], "not off")
    assert one.load(10) == CHAIN, "in memory"
    read = one.cold["states"]["read"]
    assert [one.load(chain) for chain in (0, 1, 2, 3)] == [CHAIN] * 4, "nothing was given away"
    assert one.cold["states"]["read"] >= read + CHAIN
    assert one.end() == 0
    ext4.repair()
    one.start()
    assert [one.load(chain) for chain in (1, 2, 3, 4, 5)] == [CHAIN] * 5
    one.until_written(count(20))


@pytest.mark.parametrize(
    "code, calls",
    [
        (errno.EROFS, WRITES),
        pytest.param(errno.EIO, WRITES, marks=pytest.mark.slow),
        (errno.EIO, ("sync",)),
    ],
    ids=["EROFS", "EIO", "EIO of a sync"],
)
def test_failing_writes_are_reported_and_resumed(
    shim: Shim, serve: Serve, code: int, calls: tuple[str, ...]
) -> None:
    one = serve(shim.path, "threads", shim)
    one.save(0, 1, 2, 3, 4)
    written = one.cold["states"]["written"]
    with shim.failing(code, *calls):
        for chain in (10, 11, 12):
            save(one.client, chain)
        one.until(lambda: os.strerror(code) in one.cold["failure"], "not said")
        one.until(lambda: not one.cold["on"], "not off")
        assert shim.struck(*calls)
        assert one.load(12) == CHAIN, "in memory"
        # A read of a busy machine may take longer than the limit of a read here.
        one.until(lambda: all(one.load(chain) == CHAIN for chain in (2, 3)), "on disk")
        assert one.cold["states"]["written"] == written
    one.until_written(count(20))
    one.until(lambda: one.cold["on"] and not one.cold["failure"], "not on again")
    settled(one.daemon)
    one.save(40, 41, 42, 43)
    assert [one.load(chain) for chain in (40, 41, 42)] == [CHAIN] * 3
    assert one.end() == 0


# --- errors of the device ---------------------------------------------------------------------


def fails_to_read(one: Served, failing: Callable[[], AbstractContextManager[None]]) -> None:
    one.save(0, 1, 2, 3, 4, 5)
    before = one.client.stats()
    with failing():
        asked = [one.load(chain) for chain in (0, 1, 2)]
        assert sum(asked) < 3 * CHAIN, "a read failed"
        one.until(lambda: "Input/output error" in one.cold["failure"], "not said")
        assert not one.cold["on"]
        assert one.load(5) == CHAIN, "in memory"
    after = one.client.stats()
    cold = after["tiers"]["cold"]
    assert cold["faults"] >= FAULTS_TO_OFF
    assert not cold["states"]["spoilt"], "a disk that gives nothing says nothing of its blocks"
    missed = {why: n - before["miss_tokens"].get(why, 0) for why, n in after["miss_tokens"].items()}
    assert missed["cold"] > 0, "it was there, and did not come"
    one.until(lambda: one.load(3) == CHAIN, "it does not come back")
    one.until(lambda: one.cold["on"] and not one.cold["failure"], "nor does it say so")
    assert [one.load(chain) for chain in (0, 1, 2, 4, 5)] == [CHAIN] * 5
    assert one.end() == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codec", ["r32", "raw", "zstd"])
def test_failing_reads_are_misses_and_resumed(shim: Shim, serve: Serve, codec: str) -> None:
    one = serve(shim.path, "threads", shim, codec)
    fails_to_read(one, lambda: shim.failing(errno.EIO, "read"))
    assert shim.struck("read") >= FAULTS_TO_OFF


def test_reads_resume_after_a_failing_block_device_recovers(
    device: PoweredDisk, serve: Serve
) -> None:
    one = serve(device.path)
    fails_to_read(one, lambda: device.failing("read"))


def test_a_block_device_that_fails_to_write_is_still_read(
    device: PoweredDisk, serve: Serve
) -> None:
    """The file system then becomes read-only by itself."""
    one = serve(device.path)
    one.save(0, 1, 2, 3, 4, 5)
    with device.failing("write"):
        for chain in (10, 11, 12):
            save(one.client, chain)
        one.until(lambda: not one.cold["on"], "not off")
        assert one.cold["failure"]
        assert [one.load(chain) for chain in (12, 2, 3)] == [CHAIN] * 3
    assert [one.load(chain) for chain in (3, 4)] == [CHAIN] * 2
    assert one.end() == 0


def test_a_single_reader_of_a_healthy_disk_is_answered_neither_crowded_nor_late(
    tmp_path: Path, serve: Serve
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    one = serve(disk)
    chains = range(4 * WARM)
    one.save(*chains)
    settled(one.daemon)
    space = one.client.open(SPEC)
    for chain in chains:
        keys = space.keys(tokens(chain))
        found = space.match(keys)
        assert (found.ready + found.coming, found.why in COMPUTE) == (CHAIN, False), found
        while found.coming:
            found = space.match(keys)
        assert (found.ready, found.why in COMPUTE) == (CHAIN, False), found
    loads = one.cold["loads"]
    assert loads["unknown"] >= len(chains) - WARM, "most were read from disk"
    assert not any(loads[why] for why in COMPUTE), loads


# --- disks that hang --------------------------------------------------------------------------


def test_a_frozen_file_system_does_not_slow_memory_hits(ext4: Mounted, serve: Serve) -> None:
    one = serve(ext4.path)
    one.save(0, 1, 2, 3, 4)
    before = one.look_ms(4)
    with ext4.frozen():
        save(one.client, 10)
        one.until(lambda: "no request completed" in one.cold["failure"], "not said")
        assert not one.cold["on"] and "not used until one completes" in one.log()
        meanwhile = one.look_ms(10)
        assert meanwhile < 5 * before + 1, (before, meanwhile)
        assert [one.load(chain) for chain in (0, 1, 10)] == [CHAIN] * 3, "reads do not hang"
        assert one.cold["states"]["read"] >= 2 * CHAIN
    one.until(lambda: one.cold["on"] and not one.cold["failure"], "not on again")
    one.until_written(count(20))
    settled(one.daemon)
    one.save(40, 41, 42, 43)
    assert [one.load(chain) for chain in (10, 40, 41)] == [CHAIN] * 3
    assert one.end() == 0


def hangs(one: Served, hanging: AbstractContextManager[None], memory: int) -> None:
    """Reads hang: a client that requests more than is in memory waits no longer than its time limit."""
    before = one.look_ms(memory)
    with hanging:
        assert one.load(0, seconds=0.5) < CHAIN, "a miss: it hangs until the end of the test"
        one.until(lambda: one.load(1, 0.1) < 0 or one.cold["states"]["not_read"] > 0, "no deadline")
        # Repeated requests do not hide that no read completes.
        one.until(
            lambda: one.load(1, 0.1) < 0 or "no request completed" in one.cold["failure"],
            "not said",
        )
        assert not one.cold["on"]
        meanwhile = one.look_ms(memory)
        assert meanwhile < 5 * before + 1, (before, meanwhile)
    one.until(lambda: one.cold["on"] and not one.cold["failure"], "not on again")
    one.until(lambda: one.load(0) == CHAIN, "what is on disk can be had again")
    one.until(lambda: one.load(1) == CHAIN, "nor what was given up meanwhile")
    one.save(20)
    assert one.load(20) == CHAIN
    assert one.end() == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codec", ["raw", "r32"])
def test_reads_that_hang_are_misses(shim: Shim, serve: Serve, codec: str) -> None:
    one = serve(shim.path, "threads", shim, codec, READ_MS=500)
    one.save(0, 1, 2, 3, 4, 5)
    hangs(one, shim.failing(HANGS, "read"), 5)
    assert shim.struck("read")


def test_a_block_device_that_hangs_is_a_miss(device: PoweredDisk, serve: Serve) -> None:
    one = serve(device.path, READ_MS=500)
    one.save(0, 1, 2, 3, 4, 5)
    hangs(one, device.hanging(), 5)


@pytest.mark.skipif(not LONG, reason="waits for what hangs; KVTIER_FAULTS=1")
@pytest.mark.parametrize("calls", [("read",), WRITES], ids=["reads", "writes"])
def test_a_daemon_ends_although_its_disk_hangs(
    shim: Shim, serve: Serve, calls: tuple[str, ...]
) -> None:
    one = serve(shim.path, "threads", shim)
    one.save(0, 1, 2, 3, 4, 5)
    with shim.failing(HANGS, *calls):
        save(one.client, 20)
        one.load(0, seconds=0.1)
        one.until(lambda: shim.struck(*calls) > 0, "nothing hangs")
        one.daemon.process.terminate()
        # Exit status 75: it did not wait for the hanging disk.
        assert one.daemon.process.wait(60) in (0, 75)
    one.start()
    assert [one.load(chain) for chain in (1, 2, 3)] == [CHAIN] * 3


def test_a_disk_that_hangs_when_it_is_switched_on_delays_neither_clients_nor_the_stop(
    shim: Shim, serve: Serve
) -> None:
    one = serve(shim.path, "threads", shim, END_S=2.0)
    one.save(0, 1)
    with one.daemon.connect(timeout_s=ANSWER_S) as asks:
        asks.tier("cold", "off")
        one.until(lambda: asks.tier("cold")["state"] == "off", "it is not off")
        with shim.failing(HANGS, "write"):
            asks.tier("cold", "on")
            one.until(lambda: shim.struck("write") > 0, "nothing hangs")
            assert asks.tier("cold")["state"] == "opening"
            save(one.client, 20)
            assert one.load(20) == CHAIN
            one.daemon.process.terminate()
            assert one.daemon.process.wait(60) == 75
    one.start()
    assert [one.load(chain) for chain in (0, 1)] == [CHAIN] * 2


def test_a_daemon_that_can_not_open_its_disk_yet_can_be_stopped(shim: Shim, tmp_path: Path) -> None:
    config = tmp_path / "kvtier.toml"
    config.write_text(
        f'socket = "{tmp_path}/s"\nstate = "{tmp_path}/state"\n[warm]\nsize = "4MiB"\n'
        f'[cold]\ndirectories = ["{shim.path}"]\nsize = "80MiB"\nsegment = "1MiB"\n'
    )
    words = hasty_command({"END_S": 1.0})
    with shim.failing(HANGS, "write"):
        daemon = subprocess.Popen(
            [*words, "--config", str(config)],
            env=shim.env,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 60
        while not shim.struck("write"):
            assert time.monotonic() < deadline, "nothing hangs"
            time.sleep(0.01)
        daemon.terminate()
        _, log = daemon.communicate(timeout=60)
    assert daemon.returncode == 0 and "Traceback" not in log, log
    assert not (tmp_path / "s").exists()


def test_a_daemon_ends_in_every_state_of_waiting(shim: Shim, serve: Serve) -> None:
    one = serve(shim.path, "threads", shim, END_S=1000.0, STOP_S=2.0)
    one.save(0, 1)
    with shim.failing(HANGS, *WRITES):
        save(one.client, 20)
        one.until(lambda: shim.struck(*WRITES) > 0, "nothing hangs")
        one.daemon.process.terminate()
        assert one.daemon.process.wait(60) == 1
    assert "Timeout (0:00:02)!" in one.log()
    one.start()
    assert [one.load(chain) for chain in (0, 1)] == [CHAIN] * 2


@pytest.mark.parametrize("ends", ["when it is off", "at once"])
def test_a_tier_whose_disk_hangs_is_switched_off_and_the_daemon_serves_and_ends(
    shim: Shim, serve: Serve, ends: str
) -> None:
    one = serve(shim.path, "threads", shim, CLOSE_S=3.0)
    one.save(0, 1, 2, 3)
    with shim.failing(HANGS, *WRITES), one.daemon.connect(timeout_s=ANSWER_S) as asks:
        save(one.client, 20)
        one.until(lambda: shim.struck(*WRITES) > 0, "nothing hangs")
        reply = asks.tier("cold", "off")
        if ends != "at once":
            answers = 0  # while it closes: an event loop that waits for the disk does not answer
            deadline = time.monotonic() + 60
            while reply["state"] == "closing":
                assert time.monotonic() < deadline
                answers += 1
                reply = asks.tier("cold")
                assert one.load(20) == CHAIN
                time.sleep(0.01)
            assert reply["state"] == "off" and "a disk hangs" in reply["failure"]
            assert answers > 2
        one.daemon.process.terminate()
        assert one.daemon.process.wait(60) == 75
    one.start()
    assert [one.load(chain) for chain in (1, 2)] == [CHAIN] * 2


# --- the directory ----------------------------------------------------------------------------


def removed(disk: Path) -> None:
    shutil.rmtree(disk / "segments")


def renamed(disk: Path) -> None:
    disk.rename(disk.with_name("elsewhere"))


def replaced(disk: Path) -> None:
    renamed(disk)
    disk.mkdir()


@pytest.mark.parametrize("happens", [removed, renamed, replaced])
def test_a_removed_directory_disconnects_no_client(
    tmp_path: Path, serve: Serve, happens: Callable[[Path], None]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    one = serve(disk)
    one.save(0, 1, 2, 3, 4)
    happens(disk)
    assert [one.load(chain) for chain in (0, 1, 2)] == [CHAIN] * 3, "its files are open"
    one.save(*range(10, 20))
    assert one.load(19) == CHAIN
    assert one.load(12) in range(CHAIN + 1)
    assert one.end() == 0
    disk.mkdir(exist_ok=True)
    one.start()
    for chain in (0, 1, 10, 15, 19):
        assert one.load(chain) in range(CHAIN + 1)
    last = one.until_written(count(30))
    assert one.load(last) == CHAIN
    assert one.end() == 0


def test_a_second_daemon_is_refused_with_the_owner_of_the_directory(
    tmp_path: Path, serve: Serve
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    first = serve(disk)
    first.save(0)
    folder = tmp_path / "second"
    folder.mkdir()
    config = folder / "kvtier.toml"
    text = (tmp_path / "daemon-0" / "kvtier.toml").read_text()
    config.write_text(text.replace(str(tmp_path / "daemon-0"), str(folder)))
    second = subprocess.run(
        [*SERVE, "--config", config], capture_output=True, text=True, timeout=60, check=False
    )
    assert second.returncode == 2, second
    assert f"pid {first.daemon.process.pid}" in second.stderr and str(disk) in second.stderr
    assert "Traceback" not in second.stderr
    first.save(1, 2, 3, 4)
    assert [first.load(chain) for chain in (0, 1)] == [CHAIN] * 2
    assert first.end() == 0


# --- the index --------------------------------------------------------------------------------


def test_forgets_need_no_room_in_the_index(tmp_path: Path, serve: Serve) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    one = serve(disk, FIRST_MAP_BYTES=40 << 10, INDEX_SHARE=1 / 1024, RESERVE_BYTES=16 << 10)
    one.save(0, 1, 2, 3)
    forgotten = [0, 1, *range(10, 22)]
    for chain in forgotten:
        if chain >= 10:
            one.save(chain)
        assert one.forget(chain) == CHAIN
    one.save(100, 101)
    one.kill()
    one.start()
    assert [one.load(chain) for chain in forgotten] == [0] * len(forgotten)
    assert [one.load(chain) for chain in (2, 3, 100, 101)] == [CHAIN] * 4
    assert one.end() == 0


def test_a_disk_without_space_at_the_start_is_read(shim: Shim, serve: Serve) -> None:
    one = serve(shim.path, "threads", shim)
    one.save(0)
    assert one.end() == 0
    with shim.failing(errno.ENOSPC, "write"):
        one.start()
        assert one.load(0) == CHAIN
        assert f"cannot write {shim.path}/kvtier.lock: No space left" in one.log()
        assert one.end() == 0
    one.start()
    assert one.load(0) == CHAIN
    assert one.end() == 0


def gone(index: Path) -> None:
    (index / "data.mdb").unlink()


def garbled(index: Path) -> None:
    size = (index / "data.mdb").stat().st_size
    (index / "data.mdb").write_bytes(random.Random(1).randbytes(size))


def cut_short(index: Path) -> None:
    os.truncate(index / "data.mdb", (index / "data.mdb").stat().st_size // 2)


def emptied(index: Path) -> None:
    os.truncate(index / "data.mdb", 0)


@pytest.mark.parametrize(
    "happens, way",
    [
        (cut_short, signal.SIGTERM),
        (gone, signal.SIGTERM),
        (garbled, signal.SIGTERM),
        (cut_short, signal.SIGKILL),
        (emptied, signal.SIGKILL),
    ],
)
def test_a_damaged_index_loses_no_block_that_a_footer_lists(
    tmp_path: Path, serve: Serve, happens: Callable[[Path], None], way: signal.Signals
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    one = serve(disk)
    one.save(0, 1, 2, 3)
    one.client.close()
    one.daemon.process.send_signal(way)
    one.daemon.process.wait(60)
    happens(disk / "index")
    one.start()
    found = [one.load(chain) for chain in range(4)]
    # A kill loses the segments whose footer was not written yet.
    assert found == [CHAIN] * 4 or way == signal.SIGKILL
    assert one.forget(1) == found[1]
    one.save(10)
    one.kill()
    one.start()
    assert [one.load(chain) for chain in (0, 1, 10)] == [found[0], 0, CHAIN]
    assert one.end() == 0


def test_a_forget_that_can_not_be_written_is_an_error(shim: Shim, serve: Serve) -> None:
    one = serve(shim.path, "threads", shim)
    one.save(0, 1, 2, 3)
    with shim.failing(errno.ENOSPC, "write", "sync"), pytest.raises(Refused) as reply:
        one.forget(0)
    assert reply.value.code == "disk_failed"
    assert one.load(0) == 0, "for this life it is"
    assert one.forget(1) == CHAIN
    one.kill()
    one.start()
    assert one.load(1) == 0
    assert [one.load(chain) for chain in (2, 3)] == [CHAIN] * 2


def test_an_unwritable_index_is_reported_at_the_start(ext4: Mounted, serve: Serve) -> None:
    """Only a read-only mount prevents root from writing."""
    one = serve(ext4.path)
    one.save(0)
    assert one.end() == 0
    index = ext4.path / "index"
    command("mount", "--bind", index, index)
    command("mount", "-o", "remount,bind,ro", index)
    try:
        one.start(is_there=False)
        one.until(lambda: "Read-only" in one.cold["failure"], "not said")
        assert str(index) in one.cold["failure"] and not one.cold["on"]
        said = one.log().rpartition("serves on")[2]
        assert "damaged" not in one.log()
        assert "directories are not in use: 0 blocks found" in said and "is ready" not in said
        one.save(10)
        assert one.load(10) == CHAIN, "memory serves"
    finally:  # the daemon may be trying to open it
        umount = ["umount", str(index)]
        one.until(lambda: not subprocess.run(umount, capture_output=True).returncode, "in use")
    one.until(lambda: one.load(0) == CHAIN, "it is not used again")
    assert f"cold tier is ready: {CHAIN} blocks found" in one.log().rpartition("serves on")[2]
    assert one.end() == 0


# --- any call, at any time --------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_no_failing_or_hanging_system_call_gives_wrong_bytes(tmp_path: Path, engine: str) -> None:
    """With KVTIER_FAULTS=1, about 1,850 points for each engine."""
    needs("strace")
    folder = tmp_path / "disk"
    whole = run_one(folder, engine, *everything(), counts=tmp_path / "counts")
    assert whole.kind == "went on" and len(whole.landed) > 40 and len(whole.forgotten) > 10
    todo = points(whole.calls)
    moves = "pwritev" if engine == "threads" else "io_uring_enter"
    assert {"openat", "pwrite64", "fdatasync", "fallocate", "mmap", moves} <= set(whole.calls)
    for how in todo if LONG else random.Random(11).sample(todo, SAMPLE):
        kind = run_one(folder, engine, *how).kind
        fits = kind == "went on" or kind.startswith("raised")
        if "KILL" in how[-1]:
            # This run made fewer such calls, or the process that checks the index was killed.
            fits = kind in ("went on", "ended: -9") or kind.endswith("was ended (-9)")
        elif "ENOMEM" in how[-1]:
            # CPython waits forever for a thread that could not start for lack of memory.
            fits = fits or kind == "hung"
        assert fits, f"{how[-1]}: {kind}"
