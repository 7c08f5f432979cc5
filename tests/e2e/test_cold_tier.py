"""The cold tier for its users: evicted blocks are read back, also after a restart or a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtier import Client, Group, InvalidArgument, KvSpec, Lease, Match
from kvtier.client import Answer
from kvtier.frame import PAGE
from kvtier.units import format_bytes
from kvtier_daemon.tiers.cold.index import Index
from kvtier_kernels import release_views
from support.daemons import Daemon, kvtier
from support.effort import effort
from support.gated import gated_daemon
from support.oracle import content
from support.specs import pattern, spec_of

SPEC = spec_of("cold e2e")
SETTLED_TURNS = 4  # of the daemon's own clock, 50 ms each
CHAIN = 32  # blocks: 2 MiB
LONG = 160  # blocks: 10 of the 16 MiB of memory
PATIENCE_MS = 600_000
BUSY = ("crowded", "late")  # the reasons why a block is not read now: the disk has other work
Content = Callable[[bytes, int], bytes]  # the content of a block with this key and size


def cold_daemon(
    daemon_of: Callable[..., Daemon],
    disk: Path,
    write: str = "back",
    policy: str = "auto",
    more: str = "",
    **options: Any,
) -> Daemon:
    warm = f'[warm]\nsize = "16MiB"\npolicy = "{policy}"\n'
    cold = f'[cold]\ndirectories = ["{disk}"]\nsize = "96MiB"\nsegment = "1MiB"\nwrite = "{write}"\n{more}'
    daemon = daemon_of(config=warm + cold, **options)
    daemon.wait_for_disks()
    return daemon


def tokens(chain: int) -> list[int]:
    return [chain * 1_000_000 + n for n in range(16 * CHAIN)]


def save(client: Client, chain: int, spec: KvSpec = SPEC, of: Content = pattern) -> None:
    space = client.open(spec)
    keys = space.keys(tokens(chain))
    space.save(keys, [of(key, spec.block_bytes) for key in keys], checksum=False)


def test_a_client_that_polls_is_counted_once(daemon_of: Callable[..., Daemon], disk: Path) -> None:
    daemon = cold_daemon(daemon_of, disk, "through")
    with daemon.connect() as client:
        for chain in range(10):
            save(client, chain)
            settled(daemon)
        before = daemon.stats()
        space = client.open(SPEC)
        keys = space.keys(tokens(0))
        found = space.match(keys)
        assert found.why not in BUSY and found.ready + found.coming == CHAIN, "an idle disk"
        while found.coming:
            found = space.match(keys)
        with space.load(keys) as blocks:
            assert len(blocks) == CHAIN
        after = daemon.stats()
    assert after["lookup_tokens"] - before["lookup_tokens"] == 16 * CHAIN
    hits = {tier: after["hit_tokens"][tier] - n for tier, n in before["hit_tokens"].items()}
    assert hits["cold"] > 0 and hits["warm"] + hits["cold"] == 16 * CHAIN
    assert after["miss_tokens"] == before["miss_tokens"]


def settled(daemon: Daemon) -> None:
    """Wait until all blocks are on disk and nothing is read. If some stay dirty, or segments are being freed:
    until no write began during several turns of the daemon's clock; a writer checks for work in each turn."""
    last, since, pause_s = None, 0, 0.002
    with daemon.connect() as client:
        while True:
            stats = client.stats()
            cold, turns = stats["tiers"]["cold"], stats["loop"]["counts"][-1]
            now = cold["states"]["written"], cold["writing"], cold["reading"]
            if now[1:] == (0, 0) and not cold["dirty"] and not cold["leaving"]:
                return
            if now != last or now[1:] != (0, 0):
                last, since = now, turns
            elif turns >= since + SETTLED_TURNS:
                return
            time.sleep(pause_s)
            pause_s = min(1.4 * pause_s, 0.02)


def brought(client: Client, chain: int, seconds: float = 60.0, spec: KvSpec = SPEC) -> Match:
    """Match a chain until no block of it is coming. Matches again if the disk has other work, which is
    verified: repeated `crowded` from a disk without reads and writes fails the test. The request waits for
    long: a read during a pause of this machine looks like one of a slow disk. For tests of other subjects."""
    space = client.open(spec)
    keys = space.keys(tokens(chain))
    deadline = time.monotonic() + seconds
    crowded = 0
    while True:
        found = space.match(keys, within_ms=PATIENCE_MS)
        if not (found.coming or found.why in BUSY) or time.monotonic() > deadline:
            return found
        # Another read may begin and end between a match and the check that follows it.
        crowded = crowded + 1 if found.why == "crowded" and is_idle(client) else 0
        assert crowded < 50, found
        time.sleep(0.002)


def is_idle(client: Client) -> bool:
    cold = client.stats()["tiers"]["cold"]
    return not (cold["reading"] or cold["writing"])


def whole(client: Client, chain: int, spec: KvSpec = SPEC, of: Content = pattern) -> int:
    """Load a chain and compare each block. Returns the number of leading blocks. Loads again if a read
    was cancelled because the disk has other work. For tests of other subjects."""
    while True:
        given_up = client.stats()["tiers"]["cold"]["states"]["not_read"]
        ready = brought(client, chain, spec=spec).ready
        space = client.open(spec)
        keys = space.keys(tokens(chain))
        with space.load(keys, deadline_ms=60_000) as blocks:
            assert len(blocks) >= ready
            for key, block in zip(keys, blocks, strict=False):
                assert bytes(block or b"") == of(key, spec.block_bytes)
            count = len(blocks)
        if client.stats()["tiers"]["cold"]["states"]["not_read"] == given_up:
            return count


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def test_blocks_are_reported_as_dirty_until_they_are_on_disk(
    daemon_of: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon, gate = gated_daemon(daemon_of, tmp_path, 16 << 20)
    with daemon.connect() as client:
        save(client, 0)
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["writing"])
        cold = daemon.stats()["tiers"]["cold"]
        assert (cold["dirty"], cold["blocks"]) == (CHAIN, 0)
        gate.touch()
        stats = daemon.wait_for(lambda stats: not stats["tiers"]["cold"]["dirty"])
        assert stats["tiers"]["cold"]["blocks"] == CHAIN


@pytest.mark.parametrize("write", ["back", "through"])
def test_evicted_blocks_are_read_from_disk(
    daemon_of: Callable[..., Daemon], disk: Path, write: str
) -> None:
    daemon, chains = cold_daemon(daemon_of, disk, write), effort(12, 20, 20)
    with daemon.connect() as client:
        for chain in range(chains):  # 24 MiB through 16
            save(client, chain)
            settled(daemon)
        cold = daemon.stats()["tiers"]["cold"]
        assert cold["blocks"] > 15 * chains, cold
        space = client.open(SPEC)
        found = space.match(space.keys(tokens(0)))
        assert found.ready + found.coming == CHAIN and found.coming
        for chain in range(chains):
            assert whole(client, chain) == CHAIN, chain
            settled(daemon)
        assert daemon.stats()["tiers"]["cold"]["states"]["read"] > (chains - 9) * CHAIN


def test_a_client_that_waits_for_the_disk_gets_its_blocks_and_keeps_its_session(
    daemon_of: Callable[..., Daemon], disk: Path
) -> None:
    daemon = cold_daemon(daemon_of, disk)
    with daemon.connect() as client:
        for chain in range(10):  # 20 MiB through 16
            save(client, chain)
            settled(daemon)
        space = client.open(SPEC)
        keys = space.keys(tokens(0))
        daemon.process.send_signal(signal.SIGSTOP)  # both requests are sent before a read can end
        first = space.begin_lease(keys, 60_000, request=7)
        second = space.begin_lease(keys, 60_000, request=7, wait_ms=60_000)
        daemon.process.send_signal(signal.SIGCONT)
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + 60
        while len(answers) < 2 and time.monotonic() < deadline:
            answers |= client.poll()
            time.sleep(0.002)
        asked, waited = answers[first], answers[second]
        assert isinstance(asked, Lease) and isinstance(waited, Lease)
        assert asked.coming and (waited.ready, waited.coming) == (CHAIN, 0)
        stats = daemon.stats()
        assert stats["latencies"]["wait"]["counts"][-1] == 1
        assert stats["failures"]["internal"] == 0


def test_a_load_waits_for_the_disk_as_long_as_it_is_told(
    daemon_of: Callable[..., Daemon], disk: Path
) -> None:
    daemon = cold_daemon(daemon_of, disk)
    with daemon.connect() as client:
        for chain in range(12):  # 24 MiB through 16
            save(client, chain)
            settled(daemon)
        space = client.open(SPEC)
        for chain, way in enumerate(("wait", "load", "load_into")):
            keys = space.keys(tokens(chain))
            expected = [pattern(key, SPEC.block_bytes) for key in keys]
            assert space.match(keys[:1]).ready == 0  # on disk alone
            if way == "wait":
                found = space.wait(keys, PATIENCE_MS)
                assert (found.ready, found.coming) == (CHAIN, 0)
            if way == "load_into":
                buffers = [bytearray(SPEC.block_bytes) for _ in keys]
                assert space.load_into(keys, buffers, wait_ms=PATIENCE_MS) == CHAIN
                assert buffers == expected
                continue
            with space.load(keys, 60_000, wait_ms=PATIENCE_MS) as blocks:
                assert list(blocks) == expected
        absent = space.keys([7] * 64)
        assert space.wait(absent, PATIENCE_MS).ready == 0  # at once: nothing comes
        with pytest.raises(InvalidArgument, match="within_ms"):
            space.wait(absent, -1)


def test_blocks_that_are_ready_can_be_used_while_others_are_read(
    daemon_of: Callable[..., Daemon], disk: Path
) -> None:
    daemon = cold_daemon(daemon_of, disk, "through")
    with daemon.connect() as client:
        space = client.open(SPEC)
        chains = [space.keys([number] * 16 * LONG) for number in range(3)]
        for keys in chains:
            space.save(keys, [pattern(key, SPEC.block_bytes) for key in keys])
            settled(daemon)
        seen: list[Lease] = []

        def compare(lease: Lease) -> None:
            seen.append(lease)
            if lease.ready:
                part = lease.part(0, 0)
                blocks = lease.views(part, SPEC.block_bytes)
                expected = [pattern(key, SPEC.block_bytes) for key in chains[0][: lease.ready]]
                assert blocks == expected and lease.fresh(part) == lease.ready
                release_views(blocks)

        before = daemon.stats()["lookup_tokens"]
        assert space.match(chains[0], request=7).coming
        lease = space.lease(chains[0], 60_000, wait_ms=PATIENCE_MS, request=7, meanwhile=compare)
        assert (lease.ready, lease.coming) == (LONG, 0)
        ready = [one.ready for one in seen]
        assert ready == sorted(ready) and all(one.coming for one in seen)
        stats = daemon.stats()
        assert stats["tenants"]["default"]["leases"] == 1
        assert stats["lookup_tokens"] - before == 16 * LONG, "match and lease are one lookup"
        lease.release()

        def fail(lease: Lease) -> None:
            raise KeyError(lease.coming)

        with pytest.raises(KeyError):
            space.lease(chains[1], 60_000, wait_ms=PATIENCE_MS, meanwhile=fail)
        assert not daemon.stats()["tenants"]["default"]["leases"]


def test_loads_of_prompts_that_memory_has_no_room_for_at_once_follow_each_other(
    daemon_of: Callable[..., Daemon], disk: Path
) -> None:
    """Each needs more than half of the memory: what a load has read does not stay held for it."""
    daemon = cold_daemon(daemon_of, disk, "through")
    with daemon.connect() as client:
        space = client.open(SPEC)
        prompts = [space.keys([number] * 16 * LONG) for number in range(4)]
        for keys in prompts:
            space.save(keys, [pattern(key, SPEC.block_bytes) for key in keys])
            settled(daemon)
        for keys in prompts * 2:
            with space.load(keys, 60_000, wait_ms=PATIENCE_MS) as blocks:
                assert list(blocks) == [pattern(key, SPEC.block_bytes) for key in keys]


@pytest.mark.parametrize("way", [signal.SIGTERM, signal.SIGKILL])
def test_blocks_on_disk_are_found_after_a_restart(
    daemon_of: Callable[..., Daemon], disk: Path, tmp_path: Path, way: signal.Signals
) -> None:
    folder = tmp_path / "daemon"
    for turn in range(3):
        daemon = cold_daemon(daemon_of, disk, "through", folder=folder)
        with daemon.connect() as client:
            daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= turn * 2 * CHAIN)  # noqa: B023
            for chain in range(2 * turn):
                assert whole(client, chain) == CHAIN, (turn, chain)
            for chain in (2 * turn, 2 * turn + 1):
                save(client, chain)
            settled(daemon)
        daemon.process.send_signal(way)
        daemon.process.wait(60)


def test_a_stop_right_after_a_save_keeps_its_blocks(
    daemon_of: Callable[..., Daemon], disk: Path, tmp_path: Path
) -> None:
    """Their writes are planned already, but not all of them are submitted."""
    chains = 0
    for turn in range(4):
        daemon = cold_daemon(daemon_of, disk, folder=tmp_path / "daemon")
        with daemon.connect() as client:
            daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= chains * CHAIN)  # noqa: B023
            assert all(whole(client, chain) == CHAIN for chain in range(chains)), turn
            for _ in range(turn + 1):
                save(client, chains)
                chains += 1
        assert daemon.stop() == 0
        assert "lost 0" in daemon.log.read_text()


@pytest.mark.parametrize("way", [signal.SIGTERM, signal.SIGKILL])
def test_the_index_keeps_requests_across_a_restart(
    daemon_of: Callable[..., Daemon], disk: Path, way: signal.Signals
) -> None:
    daemon = cold_daemon(daemon_of, disk, "through", haste={"ACCESS_LOG_S": 0.1})
    with daemon.connect() as client:
        save(client, 0)
        settled(daemon)
        assert whole(client, 0) == CHAIN
        if way == signal.SIGKILL:
            turns = daemon.stats()["loop"]["counts"][-1]
            daemon.wait_for(lambda stats: stats["loop"]["counts"][-1] >= turns + 6)
            # The description of another space is flushed after all that was noted.
            save(client, 0, spec_of("another"))
            daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == 2 * CHAIN)
    daemon.process.send_signal(way)
    daemon.process.wait(60)
    with closing(Index(disk / "index", 16 << 20)) as index:
        assert sum(len(pages) for _, pages in index.entries(b"segments")) == 4 * CHAIN


@pytest.mark.parametrize("way", [signal.SIGTERM, signal.SIGKILL])
def test_forgotten_blocks_stay_forgotten_after_a_restart(
    daemon_of: Callable[..., Daemon], disk: Path, tmp_path: Path, way: signal.Signals
) -> None:
    folder = tmp_path / "daemon"
    daemon = cold_daemon(daemon_of, disk, "through", folder=folder)
    with daemon.connect() as client:
        for chain in range(3):
            save(client, chain)
        settled(daemon)
        space = client.open(SPEC)
        assert space.forget(space.keys(tokens(1))) == CHAIN
        assert brought(client, 1).ready == 0
    daemon.process.send_signal(way)
    daemon.process.wait(60)
    daemon = cold_daemon(daemon_of, disk, "through", folder=folder)
    with daemon.connect() as client:
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= 2 * CHAIN)
        assert [whole(client, chain) for chain in range(3)] == [CHAIN, 0, CHAIN]


def test_the_room_of_refused_files_is_shown(
    daemon_of: Callable[..., Daemon], disk: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "daemon"
    daemon = cold_daemon(daemon_of, disk, "through", folder=folder)
    with daemon.connect() as client:
        save(client, 0)
        settled(daemon)
    assert daemon.stop() == 0
    first = min(disk.glob("segments/*/*"))
    first.chmod(0o666)  # another user could have written to it
    daemon = cold_daemon(daemon_of, disk, "through", folder=folder)
    assert daemon.stats()["tiers"]["cold"]["refused"] == {"files": 1, "bytes": first.stat().st_size}
    shown = " ".join(kvtier("status", "--socket", daemon.socket).stdout.split())
    room = format_bytes(first.stat().st_size)
    assert f"cold, refused 1 segment file with {room} of cold.size; the log says why" in shown
    assert "all disks work" not in shown
    assert f"run `chmod go-w {first}`" in daemon.log.read_text()


def test_an_older_copy_of_the_directory_is_emptied_and_reported(
    daemon_of: Callable[..., Daemon], disk: Path, tmp_path: Path
) -> None:
    folder, copy = tmp_path / "daemon", tmp_path / "copy"
    daemon = cold_daemon(daemon_of, disk, "through", folder=folder)
    with daemon.connect() as client:
        for chain in range(2):
            save(client, chain)
        settled(daemon)
        subprocess.run(["cp", "-a", "--sparse=always", disk, copy], check=True)
        space = client.open(SPEC)
        assert space.forget(space.keys(tokens(1))) == CHAIN
    assert daemon.stop() == 0
    for path in disk.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    subprocess.run(["cp", "-a", f"{copy}/.", disk], check=True)
    config = str(folder / "kvtier.toml")
    found = json.loads(kvtier("doctor", "--config", config, "--json").stdout)
    (age,) = [one for one in found if one["name"] == f"age of {disk}"]
    assert age["level"] == "fail" and "lacks 1 rounds of forgets" in age["value"]

    daemon = cold_daemon(daemon_of, disk, "through", folder=folder)
    cold = daemon.stats()["tiers"]["cold"]
    assert cold["blocks"] == 0 and cold["not_counted"] == ""
    (text,) = cold["older_copies"]
    assert f"{disk} was replaced by an older copy of itself" in text
    assert daemon.log.read_text().count("older copy") == 1
    shown = " ".join(kvtier("status", "--socket", daemon.socket).stdout.split())
    assert "was replaced by an older copy" in shown
    with daemon.connect() as client:
        assert [whole(client, chain) for chain in range(2)] == [0, 0]
        save(client, 1)
        settled(daemon)
        assert whole(client, 1) == CHAIN


def test_the_scrub_finds_damage_without_a_request(
    daemon_of: Callable[..., Daemon], disk: Path
) -> None:
    daemon = cold_daemon(daemon_of, disk, "through")
    with daemon.connect() as client:
        for chain in range(3):
            save(client, chain)
        settled(daemon)
        first = disk / "segments" / "default" / "000000"
        with first.open("r+b") as file:
            file.seek(200 << 10)
            file.write(b"damage")
            os.fsync(file.fileno())
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["scrub"]["damaged"] == 1)
        # It was in memory too, so it is written again.
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["states"]["written"] == 3 * CHAIN + 1)
        scrub = daemon.stats()["tiers"]["cold"]["scrub"]
        assert scrub["frames"] > 0 and scrub["bytes"] > 0 and scrub["rate"] == 16 << 20
        assert [whole(client, chain) for chain in range(3)] == [CHAIN] * 3


def test_all_files_together_stay_within_the_size(
    daemon_of: Callable[..., Daemon], disk: Path
) -> None:
    daemon = cold_daemon(daemon_of, disk, "through")

    def used() -> int:
        return sum(path.lstat().st_blocks * 512 for path in disk.rglob("*"))

    with daemon.connect() as client:
        for chain in range(70):  # 140 MiB through 96
            save(client, chain)
            assert used() <= 96 << 20
            if chain % 4 == 3:
                settled(daemon)
        settled(daemon)
        assert used() <= 96 << 20
        assert daemon.stats()["tiers"]["cold"]["blocks"] > 500
        newest = [whole(client, chain) for chain in range(60, 70)]
        assert newest == [CHAIN] * 10


def test_requested_blocks_get_second_chances_during_heavy_writes(
    daemon_of: Callable[..., Daemon], disk: Path
) -> None:
    """Many segments at once: new writes must not displace second chances."""
    daemon = cold_daemon(daemon_of, disk, "through", policy="lru")
    with daemon.connect() as client:
        for chain in range(12):
            save(client, chain)
            settled(daemon)
        assert [whole(client, chain) for chain in range(4)] == [CHAIN] * 4
        for first in range(12, 48, 6):  # 96 MiB, 12 at a time
            for chain in range(first, first + 6):
                save(client, chain)
            saved = CHAIN * (first + 6)
            daemon.wait_for(lambda stats: stats["tiers"]["cold"]["states"]["written"] >= saved)  # noqa: B023
        daemon.wait_for(lambda stats: not stats["tiers"]["cold"]["writing"])
        assert daemon.stats()["evicted_blocks"]["lost"] > 4 * CHAIN, "the segments did not leave"
        assert [whole(client, chain) for chain in range(4)] == [CHAIN] * 4


def numbers(key: bytes, nbytes: int) -> bytes:
    """A block that codecs can shrink, for any type."""
    return content(key, 1, nbytes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_each_codec_setting_reads_blocks_of_the_others_after_a_restart(
    daemon_of: Callable[..., Daemon], disk: Path, tmp_path: Path, dtype: str
) -> None:
    spec = spec_of(f"codecs {dtype}", dtype=dtype)
    opaque = KvSpec.groups(
        [Group(layers=4, opaque_bytes=spec.block_bytes)], model=f"opaque {dtype}", dtype=dtype,
        block_tokens=16, weights="rev:1",
    )  # fmt: skip
    chains = 0
    for codec in ("zstd", "r32", "raw", "fix4", "auto"):
        daemon = cold_daemon(
            daemon_of, disk, "through", more=f'codec = "{codec}"\n', folder=tmp_path / "daemon"
        )
        with daemon.connect() as client:
            daemon.wait_for(
                lambda stats: stats["tiers"]["cold"]["blocks"] >= 2 * chains * CHAIN  # noqa: B023
            )
            for chain in range(chains):
                assert whole(client, chain, spec, numbers) == CHAIN, (codec, chain)
                assert whole(client, chain, opaque, numbers) == CHAIN, (codec, chain)
            for written, each in enumerate((spec, opaque), 2 * chains + 1):
                save(client, chains, each, numbers)
                daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= written * CHAIN)  # noqa: B023
            spaces = daemon.stats()["tiers"]["cold"]["coding"]["spaces"]
            fits = codec in ("raw", "zstd") or dtype != "int8"
            for space in spaces:
                assert space["asked"] == codec and space["dtype"] == dtype
                assert codec == "auto" or space["codec"] == (codec if fits else "raw")
            chains += 1
        assert daemon.stop() == 0


def test_a_model_has_its_own_codec_and_stats_show_the_stored_blocks(
    daemon_of: Callable[..., Daemon], disk: Path
) -> None:
    daemon = cold_daemon(
        daemon_of, disk, "through", more='codec = "raw"\ncodecs = ["small*=r32"]\n'
    )
    small, large = spec_of("small-1"), spec_of("large-1")
    with daemon.connect() as client:
        save(client, 0, large, numbers)
        settled(daemon)
        raw = daemon.stats()["tiers"]["cold"]["used_bytes"]
        assert raw == CHAIN * (large.block_bytes + PAGE)
        save(client, 0, small, numbers)
        settled(daemon)
        cold = daemon.stats()["tiers"]["cold"]
        assert (
            raw < cold["used_bytes"] < 1.8 * raw and cold["bytes"]["written"] == cold["used_bytes"]
        )
        found = {one["model"]: one["codec"] for one in cold["coding"]["spaces"]}
        assert found == {"small-1": "r32", "large-1": "raw"}
        for chain in range(1, 12):
            save(client, chain, large, numbers)
            settled(daemon)
        assert whole(client, 0, small, numbers) == CHAIN
        assert whole(client, 0, large, numbers) == CHAIN

        def small_one(stats: dict[str, Any]) -> dict[str, Any]:
            spaces = stats["tiers"]["cold"]["coding"]["spaces"]
            return next(one for one in spaces if one["model"] == "small-1")

        # The disk's worker reports it a moment later.
        stats = daemon.wait_for(lambda stats: small_one(stats)["decode_bytes_s"]["r32"] > 0)
        assert small_one(stats)["ratios"]["r32"] > 1.3
        assert small_one(stats)["encode_bytes_s"]["r32"] > 0


@pytest.mark.parametrize(
    "change",
    [{"kv_heads": 3, "head_dim": 72, "layers": 3}, {"layers": 3000, "kv_heads": 1, "head_dim": 1}],
    ids=["not whole pages", "many layers"],
)
def test_blocks_of_any_shape_are_written_and_read_back(
    daemon_of: Callable[..., Daemon], disk: Path, change: dict[str, int]
) -> None:
    spec = spec_of("shape", **change)
    daemon = cold_daemon(daemon_of, disk, "through")
    with daemon.connect() as client:
        rounds = (24 << 20) // (CHAIN * spec.block_bytes)
        for chain in range(rounds):
            save(client, chain, spec)
            settled(daemon)
        assert whole(client, 0, spec) == CHAIN


def test_a_block_larger_than_a_segment_does_not_affect_others(
    daemon_of: Callable[..., Daemon], disk: Path
) -> None:
    large = spec_of("large", layers=80)  # 1.25 MiB, in segments of 1 MiB
    daemon = cold_daemon(daemon_of, disk, "through")
    with daemon.connect() as client:
        for chain in range(4):
            save(client, chain)
        settled(daemon)
        before = daemon.stats()["tiers"]["cold"]["blocks"]
        space = client.open(large)
        keys = space.keys(tokens(0)[:64])
        space.save(keys, [pattern(key, large.block_bytes) for key in keys])
        settled(daemon)
        assert daemon.stats()["tiers"]["cold"]["blocks"] == before == 4 * CHAIN
        assert space.match(keys).ready == 4
