"""`kvtier explain` and the client's planner interface, with a real daemon."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.test_cold_tier import CHAIN, SPEC, brought, cold_daemon, save, settled, tokens
from kvtier import Client, Refused
from kvtier_daemon.planning.recomputed import TRIAL_BLOCKS
from support.daemons import Daemon, kvtier
from support.pages import blocks
from support.specs import pattern, spec_of


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def explained(daemon: Daemon, *arguments: str) -> str:
    done = kvtier("explain", "--socket", daemon.socket, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_miss_is_explained_by_its_number_and_by_its_key(
    daemon_of: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = daemon_of(config='[warm]\nsize = "4MiB"\npolicy = "lru"\n')
    with daemon.connect(name="one") as client:
        assert "no lookup" in explained(daemon)
        space = client.open(SPEC)
        keys = space.keys(tokens(0))
        space.match(keys)
        save(client, 0)
        space.match(keys)
        for chain in (1, 2):
            save(client, chain)
        space.match(keys)
        other = client.open(spec_of("cold e2e", weights="rev:9"))
        other.match(other.keys(tokens(0)))
    lookups = json.loads(explained(daemon, "--json"))["lookups"]
    assert [one["number"] for one in lookups] == [4, 3, 2, 1]
    assert [one["ready"] for one in lookups] == [0, 0, CHAIN, 0]
    assert {one["client"] for one in lookups} == {"one"}
    text = explained(daemon, "3")
    assert "evicted" in text and keys[0].hex() in text
    assert "evicted" in explained(daemon, keys[1].hex())
    assert "weights 'rev:1' (here 'rev:9')" in explained(daemon, "4")
    assert json.loads(explained(daemon, "2", "--json")).keys() == {"lookup"}
    with daemon.connect() as client, pytest.raises(Refused, match="not among the last"):
        client.explain(99)


def test_the_commands_of_the_page_explain_a_lookup_and_a_block(
    daemon_of: Callable[..., Daemon],
) -> None:
    """Only the key is another one than on the page."""
    page = Path(__file__).parents[2] / "docs/planning.md"
    (printed,) = [one.text for one in blocks(page) if one.text.startswith("kvtier explain")]
    daemon = daemon_of(warm="4MiB")
    with daemon.connect() as client:
        space = client.open(SPEC)
        keys = space.keys(tokens(0))
        for _ in range(16):
            space.match(keys)
        save(client, 0)
        space.match(keys)
    commands = [shlex.split(line, comments=True) for line in printed.splitlines()]
    assert [words[:2] for words in commands] == [["kvtier", "explain"]] * 3
    (every, one, block) = [words[2:] for words in commands]
    assert "\n17: " in "\n" + explained(daemon, *every)
    assert f"{CHAIN} ready" in explained(daemon, *one)
    assert len(block) == 1 and "..." in block[0]
    assert "it is in memory" in explained(daemon, keys[0].hex())


def test_an_engine_with_fast_recompute_is_declined(
    daemon_of: Callable[..., Daemon], disk: Path
) -> None:
    daemon = cold_daemon(daemon_of, disk, "through")
    with daemon.connect() as client:
        for chain in range(10):
            save(client, chain)
            settled(daemon)
        space = client.open(SPEC)
        keys = space.keys(tokens(0))
        space.prefill(1e-12, 0.0)
        found = space.match(keys, request=5)
        assert (found.ready + found.coming < CHAIN, found.why) == (True, "slower")
        stats = daemon.stats()
        assert stats["tiers"]["cold"]["loads"]["slower"] == 1
        assert stats["miss_tokens"]["slower"] == 16 * (CHAIN - found.ready)
        number = client.explain()["lookups"][0]["number"]
        explanation = client.explain(number)
        assert explanation["lookup"]["why"] == "slower"
        assert explanation["keys"][0]["why"] == "on_disk"
        assert "recomputing was expected to be faster" in explained(daemon, str(number))
        space.prefill(1.0, 0.0)
        found = space.match(keys, request=6)
        assert (found.ready + found.coming, found.why) == (CHAIN, "faster")
        deadline = time.monotonic() + 60
        while space.match(keys, request=6).ready < CHAIN:
            assert time.monotonic() < deadline
        space.cancel(6)
        for wrong in ((0.0, 0.0), (-1.0, 1.0), (float("nan"), 0.0)):
            space.prefill(*wrong)
        assert space.match(keys).ready == CHAIN, "what makes no sense ended the session"
        assert stats["failures"]["bad_request"] == 0
        assert daemon.stats()["failures"]["bad_request"] == 3


def test_blocks_that_are_recomputed_repeatedly_are_promoted(
    daemon_of: Callable[..., Daemon], disk: Path
) -> None:
    daemon = cold_daemon(daemon_of, disk, "through")
    with daemon.connect() as client:
        for chain in range(10):
            save(client, chain)
            settled(daemon)
        space = client.open(SPEC)
        keys = space.keys(tokens(0))
        space.prefill(1e-12, 0.0)
        for request in (5, 5, 6):  # two requests compute it, and save it without effect
            found = space.match(keys, request=request)
            assert (found.ready + found.coming < CHAIN, found.why) == (True, "slower")
            assert space.save(keys, [pattern(key, SPEC.block_bytes) for key in keys]).present
        deadline = time.monotonic() + 60
        while space.match(keys, request=6).ready < TRIAL_BLOCKS:
            assert time.monotonic() < deadline
        with space.load(keys) as blocks:
            assert len(blocks) == TRIAL_BLOCKS
            assert [bytes(block or b"") for block in blocks] == [
                pattern(key, SPEC.block_bytes) for key in keys[:TRIAL_BLOCKS]
            ]
        loads = daemon.stats()["tiers"]["cold"]["loads"]
        assert loads["prefetch"] == 1 and loads["slower"] >= 2


def test_a_pin_can_be_removed(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(warm="16MiB")
    with daemon.connect() as client:
        save(client, 0)
        space = client.open(SPEC)
        keys = space.keys(tokens(0))
        assert space.pin(keys, 60) == CHAIN
        assert daemon.stats()["tenants"]["default"]["pinned_bytes"] == CHAIN * SPEC.block_bytes
        assert space.unpin(keys) == CHAIN
        assert daemon.stats()["tenants"]["default"]["pinned_bytes"] == 0


def why(client: Client, chain: int, at: int = 0) -> str:
    key = client.open(SPEC).keys(tokens(chain))[at]
    return str(client.explain(keys=key)["keys"][0]["why"])


def test_blocks_evicted_from_memory_are_explained(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(config='[warm]\nsize = "4MiB"\npolicy = "lru"\n')
    with daemon.connect() as client:
        space = client.open(SPEC)
        save(client, 0)
        assert space.pin(space.keys(tokens(0)), 0.2) > 0
        daemon.wait_for(lambda stats: stats["tenants"]["default"]["pinned_bytes"] == 0)
        for chain in (1, 2, 3):
            save(client, chain)
        space.forget(space.keys(tokens(3)))
        assert [why(client, chain) for chain in (0, 1, 2, 3, 4)] == [
            "expired", "evicted", "in_memory", "forgotten", "never_stored",
        ]  # fmt: skip
        for chain, by in ((0, True), (1, True), (3, False)):
            explanation = explained(daemon, space.keys(tokens(chain))[0].hex())
            assert ("s ago, by lru)" in explanation) is by, explanation


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ('admission = "second-touch"\ndaily_writes = "100MiB"\n', "once"),
        ('admission = "all"\ndaily_writes = "4KiB"\n', "budget"),
        ("", "off"),
    ],
)
def test_unwritten_blocks_are_explained(
    daemon_of: Callable[..., Daemon], disk: Path, more: str, reason: str
) -> None:
    daemon = cold_daemon(daemon_of, disk, "through", "lru", more)
    with daemon.connect() as client:
        if reason == "off":
            client.tier("cold", "off")
        for chain in range(12):
            save(client, chain)
            settled(daemon)
        chain = next(one for one in range(12) if why(client, one) not in ("on_disk", "in_memory"))
        assert why(client, chain) == reason
        explanation = explained(daemon, client.open(SPEC).keys(tokens(chain))[0].hex())
        assert "s ago, by lru)" in explanation


def test_blocks_lost_from_disk_are_explained(daemon_of: Callable[..., Daemon], disk: Path) -> None:
    warm = '[warm]\nsize = "16MiB"\npolicy = "lru"\n'
    cold = (
        f'[cold]\ndirectories = ["{disk}"]\nsize = "64MiB"\nsegment = "1MiB"\nwrite = "through"\n'
    )
    daemon = daemon_of(config=warm + cold)
    chains = range(40)  # 80 MiB
    with daemon.connect() as client:
        for chain in chains:
            save(client, chain)
            if chain % 4 == 3:
                settled(daemon)
        assert why(client, 0) == "lost"
        # The newest: the oldest may leave at any time, because segments are freed in advance.
        chain = next(one for one in reversed(chains) if why(client, one) == "on_disk")
        for segment in disk.rglob("*"):
            if segment.is_file() and "index" not in segment.parts:
                with segment.open("r+b") as file:
                    for at in range(0, segment.stat().st_size, 4096):
                        file.seek(at + 2048)
                        file.write(b"damaged!")
        space = client.open(SPEC)
        brought(client, chain)
        assert why(client, chain) == "spoilt"
        other = next(one for one in chains if why(client, one) == "on_disk")
        client.tier("cold", "off")
        assert why(client, other) == "tier_off"
        found = space.match(space.keys(tokens(other)))
        assert found.ready + found.coming == 0
        assert "the disk is off" in explained(daemon, str(client.explain()["lookups"][0]["number"]))
