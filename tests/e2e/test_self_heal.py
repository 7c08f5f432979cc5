"""Damage on the disk is a counted miss, never wrong bytes. A block that is saved again is a hit again,
also after a restart."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier import Client, frame
from kvtier.frame import PAGE
from kvtier_daemon.tiers.cold.recovery import entries_of, recover
from kvtier_daemon.tiers.cold.segment import FooterEntry, decode_entries, first_frame
from support.daemons import Daemon
from support.specs import pattern, spec_of

SPEC = spec_of("self-heal")
CHAINS, CHAIN = 6, 16  # 6 MiB, in segments of 1 MiB
Damage = Callable[[list[Path], random.Random], None]


class Site:
    """A daemon with one directory. Tests start and stop it, and save blocks."""

    def __init__(self, daemon_of: Callable[..., Daemon], folder: Path) -> None:
        self.disk, self._folder, self._start = folder / "disk", folder / "daemon", daemon_of
        self.disk.mkdir()
        self.start()

    def start(self, tenant: str = "default") -> None:
        config = (
            f'[warm]\nsize = "8MiB"\n[cold]\ndirectories = ["{self.disk}"]\nsize = "64MiB"\n'
            f'segment = "1MiB"\nwrite = "through"\nscrub = "0"\n[tenants.{tenant}]\nuids = ["*"]\n'
        )
        self.daemon = self._start(config=config, folder=self._folder)
        self.tenant = tenant
        before = "cold tier is ready"
        starts = self._log().count("serves on")
        until = time.monotonic() + 60
        while self._log().count(before) < starts:
            assert time.monotonic() < until
            time.sleep(0.01)
        self.daemon.wait_for_disks()

    def _log(self) -> str:
        return self.daemon.log.read_text()

    def stop(self, kill: bool = False) -> None:
        if kill:
            self.daemon.process.kill()
            self.daemon.process.wait()
        else:
            self.daemon.stop()

    def cold(self) -> dict[str, Any]:
        found: dict[str, Any] = self.daemon.stats()["tiers"]["cold"]
        return found

    def save(self, chains: range = range(CHAINS), blocks: int = CHAIN) -> None:
        self.settle(0)
        with self.daemon.connect() as client:
            space, wanted = client.open(SPEC), brought_away(self.cold())
            for chain in chains:
                keys = space.keys(tokens(chain))[:blocks]
                data = [pattern(key, SPEC.block_bytes) for key in keys]
                wanted += space.save(keys, data, checksum=chain % 2 == 0).stored
                if chain % 4 == 3:
                    self.settle(wanted)  # blocks must be on disk before they are evicted
            self.settle(wanted)

    def settle(self, wanted: int) -> None:
        """Wait until `wanted` blocks were written or dropped, and no movement is in progress."""

        def settled(stats: dict[str, Any]) -> bool:
            cold = stats["tiers"]["cold"]
            return brought_away(cold) >= wanted and not cold["writing"] and not cold["leaving"]

        self.daemon.wait_for(settled, 60.0)

    def forget_memory(self) -> None:
        """Fill the memory with other blocks, so that the saved ones are only on disk."""
        self.save(range(100, 100 + CHAINS + 3))

    def hits(self) -> int:
        """The number of loaded blocks; each is compared."""
        served = 0
        with self.daemon.connect() as client:
            for chain in range(CHAINS):
                served += loaded(client, chain)
        return served

    def segments(self) -> list[Path]:
        """The segment files with frames, oldest first."""
        paths = sorted((self.disk / "segments" / self.tenant).iterdir())
        return [path for path in paths if entries_of(recover(path, None, {}))]


def brought_away(cold: dict[str, Any]) -> int:
    """The number of blocks that were written, or dropped, since the daemon started."""
    return int(cold["states"]["written"] + sum(cold["unwritten"].values()))


def tokens(chain: int) -> list[int]:
    return [chain * 1_000_000 + n for n in range(16 * CHAIN)]


def loaded(client: Client, chain: int) -> int:
    space = client.open(SPEC)
    keys = space.keys(tokens(chain))
    until = time.monotonic() + 60
    while space.match(keys).coming:
        assert time.monotonic() < until
        time.sleep(0.002)
    with space.load(keys, deadline_ms=10_000) as blocks:
        for key, block in zip(keys, blocks, strict=False):
            assert bytes(block or b"") == pattern(key, SPEC.block_bytes), "wrong bytes"
        return len(blocks)


@pytest.fixture
def site(daemon_of: Callable[..., Daemon], tmp_path: Path) -> Site:
    return Site(daemon_of, tmp_path)


# --- kinds of damage ----------------------------------------------------------------------------


def write_over(path: Path, at: int, text: bytes) -> None:
    """Write to the disk directly, past all caches."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def listed(path: Path) -> list[FooterEntry]:
    one = recover(path, None, {})
    return decode_entries(one.spaces, one.rows)


def in_payload(paths: list[Path], chance: random.Random) -> None:
    path = chance.choice(paths[1:4])
    one = chance.choice(listed(path))
    start = (one.page + one.header_pages) * PAGE
    write_over(path, start + chance.randrange(one.payload_bytes - 64), bytes(64))


def in_header(paths: list[Path], chance: random.Random) -> None:
    path = chance.choice(paths[1:4])
    one = chance.choice(listed(path))
    write_over(path, one.page * PAGE + chance.randrange(frame.HEADER.size - 64), bytes(64))


def in_entries(paths: list[Path], chance: random.Random) -> None:
    path = chance.choice(paths[1:4])
    one = chance.choice(listed(path))
    write_over(path, one.page * PAGE + frame.HEADER.size + chance.randrange(128), bytes(64))


def in_head(paths: list[Path], chance: random.Random) -> None:
    write_over(chance.choice(paths[1:4]), chance.randrange(16), bytes(64))


def in_footer(paths: list[Path], chance: random.Random) -> None:
    path = chance.choice(paths[1:4])
    write_over(path, path.stat().st_size - PAGE + chance.randrange(16), bytes(64))


def in_table(paths: list[Path], chance: random.Random) -> None:
    path = chance.choice(paths[1:4])
    write_over(path, path.stat().st_size - 2 * PAGE + chance.randrange(1024), bytes(64))


def copied_over(paths: list[Path], chance: random.Random) -> None:
    path = chance.choice(paths[1:4])
    one, other = chance.sample(listed(path), 2)
    text = path.read_bytes()[one.page * PAGE : (one.page + one.pages) * PAGE]
    write_over(path, other.page * PAGE, text)


def truncated(paths: list[Path], chance: random.Random) -> None:
    path = chance.choice(paths[1:4])
    os.truncate(path, chance.randrange(1, 128) * PAGE)


def swapped(paths: list[Path], chance: random.Random) -> None:
    one, other = chance.sample(paths[:4], 2)
    aside = one.with_suffix(".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


# Damage that loses at least one block: if a running daemon reads it, and if the next start reads
# it.
DAMAGES: dict[Damage, tuple[bool, bool]] = {
    in_payload: (True, True), in_header: (False, False), in_entries: (False, False),
    in_head: (False, True), in_footer: (False, False), in_table: (False, False),
    copied_over: (True, True), truncated: (True, True), swapped: (False, False),
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("running", [True, False], ids=["running", "stopped"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_a_miss_and_heals_by_saving_again(
    site: Site, damage: Damage, running: bool
) -> None:
    chance = random.Random(damage.__name__)
    every = CHAINS * CHAIN
    site.save()
    site.forget_memory()
    if not running:
        site.stop()
    damage(site.segments(), chance)
    if not running:
        site.start()
    served = site.hits()
    after = site.daemon.stats()
    assert (served < every) == DAMAGES[damage][0 if running else 1], served
    spoilt = after["tiers"]["cold"]["states"]["spoilt"]
    missed = sum(after["miss_tokens"].values())
    if running or damage not in (in_head, truncated):
        assert (spoilt > 0) == (served < every)
    else:
        assert missed >= 16 * (every - served) and not spoilt, "a start knows nothing of them"
    assert after["evicted_blocks"]["spoilt"] == spoilt
    assert after["tiers"]["cold"]["on"] and not after["tiers"]["cold"]["failure"]
    site.save()
    assert site.hits() == every
    site.stop(kill=True)
    site.start()
    if running and damage not in (in_payload, copied_over):
        site.save()  # damage that only a start reads was not noticed before
    assert site.hits() == every


def test_no_byte_of_a_header_makes_a_start_serve_other_bytes(site: Site) -> None:
    """A segment that a kill left open is recovered frame by frame; the recovery ends at an invalid header."""
    blocks = 10  # fewer than a segment holds
    site.save(range(1), blocks)
    site.stop(kill=True)
    path = site.disk / "segments" / "default" / "000000"
    text = path.read_bytes()
    chance = random.Random(5)
    first = first_frame(len(text))
    size = frame.peek(text[first : first + PAGE])
    total = frame.decode(text[first : first + size]).total_bytes
    lost = []
    for at in chance.sample(range(frame.HEADER.size + 8 * frame.ENTRY.size), 6):
        block = chance.randrange(blocks)
        path.write_bytes(text)
        place = first + block * total + at
        write_over(path, place, bytes([text[place] ^ 1 << chance.randrange(8)]))
        site.start()
        lost.append((block, site.hits()))
        site.stop(kill=True)
    assert all(hits == block for block, hits in lost), lost
    path.write_bytes(text)
    site.start()
    assert site.hits() == blocks


def test_a_segment_of_another_tenant_is_not_used(site: Site, tmp_path: Path) -> None:
    """Even if both tenants have the same secret, and so the same keys."""
    site.save()
    site.stop()
    segments, secrets = site.disk / "segments", tmp_path / "daemon" / "state" / "secrets"
    shutil.copy(secrets / "default", secrets / "other")
    os.chmod(secrets / "other", 0o600)
    shutil.copytree(segments / "default", segments / "other")
    site.start("other")
    assert site.cold()["blocks"] == 0 and site.hits() == 0
    assert not (segments / "default").exists() or not any((segments / "default").iterdir())
    site.save()
    assert site.hits() == CHAINS * CHAIN


def test_a_daemon_refuses_a_directory_that_is_a_copy_of_another(
    daemon_of: Callable[..., Daemon], tmp_path: Path
) -> None:
    """The copy may contain blocks that were forgotten in the other directory after the copy."""
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    cold = '[cold]\nsize = "128MiB"\nsegment = "1MiB"\ndirectories = '
    assert daemon_of(warm="8MiB", config=f'{cold}["{disk}"]').stop() == 0
    shutil.copytree(disk, copy)
    with pytest.raises(AssertionError, match=f"{copy} is a copy of {disk}"):
        daemon_of(warm="8MiB", config=f'{cold}["{disk}", "{copy}"]')
