"""A model that is stored with a loss, for its users: to disk and back, and over restarts."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path

import msgspec
import numpy as np
import pytest

from e2e.test_cold_tier import CHAIN, brought, cold_daemon, save, settled, tokens
from kvtier import Client, KvSpec
from kvtier_daemon.codec import block_parts
from kvtier_daemon.codec import profile as files
from kvtier_daemon.codec.losses import Loss, Losses
from models import codecs
from support.daemons import Daemon, kvtier
from support.disks import mounted
from support.effort import effort
from support.losses_by_twins import block_of, floats_of, once_lost, once_lost_soon, profile_of
from support.specs import spec_of

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


def began(
    daemon_of: Callable[..., Daemon], disk: Path, asked: str, on: Path | None = None
) -> Daemon:
    more = f'profiles = ["{disk.parent / "profile.kvtp"}"]\n'
    if asked:
        more += f'codecs = ["lossy*={asked}"]\n'
    folder = disk.parent / "daemon"
    return cold_daemon(daemon_of, on or disk, "through", more=more, folder=folder)


def save_all(client: Client, daemon: Daemon, spec: KvSpec) -> None:
    """Save every chain, each after the previous one is on the disk."""
    for chain in range(CHAINS):
        save(client, chain, spec, content)
        settled(daemon)


def found(client: Client, chain: int, spec: KvSpec = SPEC) -> list[tuple[bytes, bytes]]:
    """Key and bytes of each leading block of a chain that is read back."""
    brought(client, chain, spec=spec)
    space = client.open(spec)
    keys = space.keys(tokens(chain))
    with space.load(keys, deadline_ms=60_000) as blocks:
        return [(key, bytes(block or b"")) for key, block in zip(keys, blocks, strict=False)]


def check(asked: str, blocks: list[tuple[bytes, bytes]], whole: bool = True) -> int:
    """The number of blocks with a loss. All others must equal the saved ones."""
    assert len(blocks) == CHAIN or not whole
    lossy = 0
    for at, (key, block) in enumerate(blocks):
        saved = block_of(key, SPEC)
        if block != saved:
            assert asked and block == once_lost_soon(asked, SPEC, 16 * at, saved), (asked, at)
            assert at % 32 != 5 or block == once_lost(asked, SPEC, 16 * at, saved), "slow as it is"
            lossy += 1
    return lossy


@pytest.mark.sampled(1)
@pytest.mark.parametrize("asked", ["q8", "ecsq-mid", "cachegen-mid"])
def test_evicted_blocks_are_read_back_as_the_reference_codec_decodes_them(
    daemon_of: Callable[..., Daemon], disk: Path, asked: str
) -> None:
    daemon = began(daemon_of, disk, asked)
    with daemon.connect() as client:
        save_all(client, daemon, SPEC)
        assert check(asked, found(client, CHAINS - 1)) == 0, "memory has it as it was"
        assert check(asked, found(client, 0)) == CHAIN
        for _ in range(effort(1, 2, 2)):
            for chain in range(CHAINS):
                check(asked, found(client, chain))
                settled(daemon)
        cold = daemon.stats()["tiers"]["cold"]
        assert cold["states"]["written"] == CHAINS * CHAIN, "nothing is written twice"
        (space_report,) = cold["coding"]["spaces"]
        assert (space_report["asked"], space_report["codec"], space_report["why"]) == (
            asked,
            asked,
            "",
        )
        assert space_report["lossy"]
        assert space_report["ratios"][asked] > 1.7
        assert cold["used_bytes"] < CHAINS * CHAIN * SPEC.block_bytes * 0.63
    daemon.stop()
    daemon = began(daemon_of, disk, asked)
    with daemon.connect() as client:
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= CHAINS * CHAIN)
        for chain in range(CHAINS):
            assert check(asked, found(client, chain)) == CHAIN, chain
            settled(daemon)


def test_no_configuration_gets_blocks_of_another(
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


@pytest.mark.parametrize(
    ("before", "stored"), [("q8", "q8"), ("ecsq-lo", "another codec or profile"), ("", "lossless")]
)
def test_blocks_of_an_earlier_configuration_are_counted_explained_and_kept(
    daemon_of: Callable[..., Daemon], disk: Path, before: str, stored: str
) -> None:
    now = "" if before else "q8"
    daemon = began(daemon_of, disk, before)
    with daemon.connect() as client:
        save(client, 0, SPEC, content)
        settled(daemon)
        old = client.open(SPEC).keys(tokens(0))[0].hex()
    daemon.stop()
    daemon = began(daemon_of, disk, now)
    with daemon.connect() as client:
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["unasked"] == CHAIN)
        assert found(client, 0) == []
        number = client.explain()["lookups"][0]["number"]
    answer = explained(daemon, str(number))
    assert f"differs in: cold.codecs '{stored}' (here '{now or 'lossless'}')" in answer
    assert "no request can find it" in explained(daemon, old)
    assert (
        f"{CHAIN} blocks stored with another" in kvtier("status", "--socket", daemon.socket).stdout
    )
    daemon.stop()
    daemon = began(daemon_of, disk, before)
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == CHAIN)
    assert daemon.stats()["tiers"]["cold"]["unasked"] == 0
    assert "it is on disk" in explained(daemon, old)


def explained(daemon: Daemon, what: str) -> str:
    return kvtier("explain", what, "--socket", daemon.socket).stdout


def test_other_models_are_stored_without_loss(daemon_of: Callable[..., Daemon], disk: Path) -> None:
    daemon = began(daemon_of, disk, "q4")
    with daemon.connect() as client:
        save_all(client, daemon, OTHER)
        for chain in range(CHAINS):
            assert [block for _, block in found(client, chain, OTHER)] == [
                block_of(key, OTHER) for key in client.open(OTHER).keys(tokens(chain))
            ]
            settled(daemon)
        (space_report,) = daemon.stats()["tiers"]["cold"]["coding"]["spaces"]
        assert (space_report["asked"], space_report["why"], space_report["lossy"]) == (
            "auto",
            "",
            False,
        )


MLA = KvSpec.mla(
    model="lossy mla", layers=6, latent_dim=128, rope_dim=32, dtype="bfloat16", block_tokens=16,
    weights="rev:1",
)  # fmt: skip
PAGES = msgspec.structs.replace(
    MLA, layout="LBHNC 0123 page:latent=128+32"
)  # the layout of engines
LARGE = msgspec.structs.replace(MLA, block_tokens=24_000)  # 44 MiB per block


def mla_daemon(daemon_of: Callable[..., Daemon], disk: Path, asked: str, large: bool) -> Daemon:
    (disk.parent / "mla.kvtp").write_bytes(files.encode(profile_of(MLA, exact_dims=32)))
    cold = f'''[warm]
size = "{128 if large else 16}MiB"
[cold]
directories = ["{disk}"]
size = "{64 * (48 if large else 1)}MiB"
segment = "{48 if large else 1}MiB"
write = "through"
profiles = ["{disk.parent / "mla.kvtp"}"]
codecs = ["lossy*={asked}"]
'''
    return daemon_of(config=cold, folder=disk.parent / "daemon")


def latents_once_lost(asked: str, spec: KvSpec, position: int, block: bytes) -> bytes:
    """The latents after one loss, by the kernels, part by part."""
    loss = Losses([(spec.model, asked)], [profile_of(MLA, exact_dims=32)]).find(spec)
    assert isinstance(loss, Loss)
    codec, back = loss.codec(0, 0), bytearray(len(block))
    assert codec is not None
    into = bytearray(len(block))
    parts = block_parts.entries(spec, 0)
    entries = codecs.encode(codec, block, parts, spec.dtype, into, (), position)
    codecs.decode(codec, into, entries, spec.dtype, back)
    return bytes(back)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("spec", "blocks", "asked"),
    [
        (MLA, 32, "ecsq-mid"),
        (MLA, 32, "cachegen-lo"),
        (PAGES, 32, "ecsq-hi"),
        (LARGE, 1, "ecsq-mid"),
    ],
    ids=["ecsq", "cachegen", "pages", "44 MiB"],
)
def test_latents_have_a_loss_and_their_rope_part_is_exact(
    daemon_of: Callable[..., Daemon], disk: Path, spec: KvSpec, blocks: int, asked: str
) -> None:
    """For blocks of any size; other chains evict them from memory."""
    daemon = mla_daemon(daemon_of, disk, asked, large=spec is LARGE)
    daemon.wait_for_arena()
    chains = 4 if spec is LARGE else 20
    per_chain = blocks * spec.block_tokens
    with daemon.connect() as client:
        space = client.open(spec)

        def keys_of(chain: int) -> list[bytes]:
            return space.keys([chain * 1_000_000 + n for n in range(per_chain)])

        for chain in range(chains):
            keys = keys_of(chain)
            space.save(keys, [block_of(key, spec) for key in keys], checksum=False)
            if spec is LARGE or chain % 4 == 3:
                settled(daemon)
        stats = daemon.wait_for(lambda stats: not stats["tiers"]["cold"]["coding"]["staged_bytes"])
        cold = stats["tiers"]["cold"]
        assert cold["states"]["written"] == chains * blocks
        assert cold["coding"]["failures"] == 0
        assert cold["used_bytes"] < chains * blocks * (spec.block_bytes * 0.45 + 8192)
        keys, lossy = keys_of(0), 0
        deadline = time.monotonic() + 60
        while space.match(keys).coming and time.monotonic() < deadline:
            time.sleep(0.002)
        with space.load(keys, deadline_ms=5000) as views:
            assert len(views) == blocks
            for at, (key, view) in enumerate(zip(keys, views, strict=True)):
                saved, found = block_of(key, spec), bytes(view or b"")
                if found == saved:
                    continue
                lossy += 1
                assert found == latents_once_lost(asked, spec, at * spec.block_tokens, saved)
                rows = [floats_of(one).reshape(-1, 160) for one in (saved, found)]
                assert (rows[0][:, 128:] == rows[1][:, 128:]).all(), "what RoPE has turned"
                off = np.abs(rows[0][:, :128] - rows[1][:, :128])
                assert 0 < off.max() < 4.0
        assert lossy == blocks


def test_a_profile_that_was_replaced_is_another_identity(
    daemon_of: Callable[..., Daemon], disk: Path
) -> None:
    """The blocks of the first profile are found again when it is back. Neither profile's blocks are
    returned for the other."""
    path = disk.parent / "profile.kvtp"
    first, second = (files.encode(profile_of(SPEC, step=step)) for step in (0, 6))
    for turn, text in enumerate((first, second, first, second)):
        path.write_bytes(text)
        daemon = began(daemon_of, disk, "ecsq-mid")
        with daemon.connect() as client:
            known = min(turn, 2) * CHAIN
            daemon.wait_for(lambda stats, known=known: stats["tiers"]["cold"]["blocks"] >= known)
            blocks = found(client, 0)
            if turn < 2:
                assert blocks == []
                save(client, 0, SPEC, content)
                settled(daemon)
            for at, (key, block) in enumerate(blocks):
                saved = block_of(key, SPEC)
                step = 6 * (turn % 2)
                if at % 8 == 3:
                    assert block == once_lost("ecsq-mid", SPEC, 16 * at, saved, step)
            assert turn < 2 or len(blocks) == CHAIN
            # Changing the file while the daemon runs has no effect.
            path.write_bytes(first if text == second else second)
            client.open(SPEC)
        daemon.stop()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("asked", ["q4", "ecsq-mid"])
def test_a_damaged_lossy_block_is_a_miss_or_decoded_correctly(
    daemon_of: Callable[..., Daemon], disk: Path, asked: str
) -> None:
    daemon = began(daemon_of, disk, asked)
    with daemon.connect() as client:
        save_all(client, daemon, SPEC)
    daemon.process.send_signal(signal.SIGKILL)
    daemon.process.wait()
    chance, hurt = random.Random(4), 0
    for path in sorted((disk / "segments").rglob("0*")):
        with path.open("r+b") as file:
            for _ in range(4):
                file.seek(chance.randrange(path.stat().st_size))
                if byte := file.read(1):
                    file.seek(-1, 1)
                    file.write(bytes([byte[0] ^ 1 << chance.randrange(8)]))
                    hurt += 1
    assert hurt > 20
    daemon = began(daemon_of, disk, asked)
    with daemon.connect() as client:
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] > 0)
        daemon.wait_for_disks()
        came = 0
        for chain in range(CHAINS):
            came += check(asked, found(client, chain), whole=False)
            settled(daemon)
        assert 0 < came < CHAINS * CHAIN
        assert daemon.stats()["tiers"]["cold"]["faults"] == 0, "the disk is sound"


def test_after_a_kill_lossy_blocks_are_correct_or_missing(
    daemon_of: Callable[..., Daemon], disk: Path
) -> None:
    chance, came = random.Random(5), 0
    for cycle in range(effort(3, 4, 4)):
        daemon = began(daemon_of, disk, "ecsq-mid")
        with daemon.connect() as client:
            daemon.wait_for_disks()
            for chain in range(4 * cycle):
                came += check("ecsq-mid", found(client, chain), whole=False)
            for chain in range(4 * cycle, 4 * cycle + 4):
                save(client, chain, SPEC, content)
            least = chance.randrange(2 * CHAIN, 4 * CHAIN)  # others are being encoded or written
            daemon.wait_for(lambda stats: stats["tiers"]["cold"]["states"]["written"] >= least)  # noqa: B023
            daemon.process.send_signal(signal.SIGKILL)
            daemon.process.wait()
    assert came > 4 * CHAIN


def test_a_full_disk_loses_blocks_but_returns_no_wrong_byte(
    daemon_of: Callable[..., Daemon], disk: Path
) -> None:
    folder = disk.parent / "mounted"
    folder.mkdir()
    with mounted(folder, 128 << 20) as file_system:
        daemon = began(daemon_of, disk, "ecsq-mid", on=file_system.path)
        with daemon.connect() as client:
            chains = count()
            for chain in islice(chains, 10):
                save(client, chain, SPEC, content)
                settled(daemon)
            file_system.fill()
            deadline = time.monotonic() + 60
            while "No space left" not in (cold := daemon.stats()["tiers"]["cold"])["failure"]:
                assert time.monotonic() < deadline, cold
                save(client, next(chains), SPEC, content)
                settled(daemon)
            last = next(chains)
            assert sum(
                check("ecsq-mid", found(client, chain), whole=False) for chain in range(0, last, 3)
            )
            file_system.drain()
            wanted = cold["states"]["written"] + 2 * CHAIN
            deadline = time.monotonic() + 60
            while daemon.stats()["tiers"]["cold"]["states"]["written"] < wanted:
                assert time.monotonic() < deadline, "nothing is written though there is room"
                last = next(chains)
                save(client, last, SPEC, content)
                settled(daemon)
            for chain in range(last - 4, last + 1):
                check("ecsq-mid", found(client, chain), whole=False)
            daemon.wait_for(lambda stats: not stats["tiers"]["cold"]["coding"]["staged_bytes"])
        assert daemon.stop() == 0
