"""A model that is stored with a loss, as its users see it: to disk and back, and over restarts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from daemons import Daemon
from e2e.test_cold_tier import CHAIN, brought, cold_daemon, save, settled, tokens
from kvtier import Client, KvSpec
from kvtier.codec import profile as files
from losses_by_twins import block_of, once_lost, once_lost_soon, profile_of
from specs import spec_of

SPEC = spec_of("lossy e2e")
OTHER = spec_of("another e2e")
CHAINS = 10  # 20 MiB through 16


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    (tmp_path / "profile.kvtp").write_bytes(files.encode(profile_of(SPEC)))
    return folder


def content(key: bytes, nbytes: int) -> bytes:
    assert nbytes == SPEC.block_bytes
    return block_of(key, SPEC)


def began(daemon_of: Callable[..., Daemon], disk: Path, asked: str) -> Daemon:
    more = f'profiles = ["{disk.parent / "profile.kvtp"}"]\n'
    if asked:
        more += f'codecs = ["lossy*={asked}"]\n'
    folder = disk.parent / "daemon"
    return cold_daemon(daemon_of, disk, "through", more=more, folder=folder)


def found(client: Client, chain: int, spec: KvSpec = SPEC) -> list[tuple[bytes, bytes]]:
    """Key and bytes of each leading block of a chain that comes back."""
    brought(client, chain, spec=spec)
    space = client.open(spec)
    keys = space.keys(tokens(chain))
    with space.load(keys, deadline_ms=5000) as blocks:
        return [(key, bytes(block or b"")) for key, block in zip(keys, blocks, strict=False)]


def check(asked: str, blocks: list[tuple[bytes, bytes]], whole: bool = True) -> int:
    """How many have lost something: all others are as they were saved."""
    assert len(blocks) == CHAIN or not whole
    lossy = 0
    for at, (key, block) in enumerate(blocks):
        saved = block_of(key, SPEC)
        if block != saved:
            assert asked and block == once_lost_soon(asked, SPEC, 16 * at, saved), (asked, at)
            assert at % 16 != 5 or block == once_lost(asked, SPEC, 16 * at, saved), "slow as it is"
            lossy += 1
    return lossy


@pytest.mark.parametrize("asked", ["q8", "ecsq-mid", "cachegen-mid"])
def test_what_left_memory_comes_back_as_the_twin_says(
    daemon_of: Callable[..., Daemon], disk: Path, asked: str
) -> None:
    daemon = began(daemon_of, disk, asked)
    with daemon.connect() as client:
        for chain in range(CHAINS):
            save(client, chain, SPEC, content)
            settled(daemon)
        assert check(asked, found(client, CHAINS - 1)) == 0, "memory has it as it was"
        assert check(asked, found(client, 0)) == CHAIN
        for _ in range(2):
            for chain in range(CHAINS):
                check(asked, found(client, chain))
                settled(daemon)
        cold = daemon.stats()["tiers"]["cold"]
        assert cold["states"]["written"] == CHAINS * CHAIN, "nothing is written twice"
        (said,) = cold["coding"]["spaces"]
        assert (said["asked"], said["codec"], said["why"]) == (asked, asked, "")
        assert said["lossy"]
        assert said["ratios"][asked] > 1.7
        assert cold["used_bytes"] < CHAINS * CHAIN * SPEC.block_bytes * 0.63
    daemon.stop()
    daemon = began(daemon_of, disk, asked)
    with daemon.connect() as client:
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= CHAINS * CHAIN)
        for chain in range(CHAINS):
            assert check(asked, found(client, chain)) == CHAIN, chain
            settled(daemon)


def test_no_configuration_is_given_what_another_has_stored(
    daemon_of: Callable[..., Daemon], disk: Path
) -> None:
    turns = ["q8", "", "ecsq-lo", "q8", ""]
    seen: set[str] = set()
    for asked in turns:
        daemon = began(daemon_of, disk, asked)
        with daemon.connect() as client:
            known = len(seen) * CHAIN
            daemon.wait_for(lambda stats, known=known: stats["tiers"]["cold"]["blocks"] >= known)
            blocks = found(client, 0)
            if asked in seen:
                assert check(asked, blocks) == (CHAIN if asked else 0)
            else:
                assert blocks == []
                save(client, 0, SPEC, content)
                settled(daemon)
            seen.add(asked)
        daemon.stop()


def test_other_models_lose_nothing(daemon_of: Callable[..., Daemon], disk: Path) -> None:
    daemon = began(daemon_of, disk, "q4")
    with daemon.connect() as client:
        for chain in range(CHAINS):
            save(client, chain, OTHER, content)
            settled(daemon)
        for chain in range(CHAINS):
            assert [block for _, block in found(client, chain, OTHER)] == [
                block_of(key, OTHER) for key in client.open(OTHER).keys(tokens(chain))
            ]
            settled(daemon)
        (said,) = daemon.stats()["tiers"]["cold"]["coding"]["spaces"]
        assert (said["asked"], said["why"], said["lossy"]) == ("auto", "", False)
