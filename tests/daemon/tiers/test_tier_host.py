"""A third tier is served by the daemon as the cold one is: `App` gets its factory, and no product file knows
it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conformance.tier_tests import BLOCK_BYTES, TierTests
from kvtier import Client, Refused
from kvtier.key import KEY_BYTES
from kvtier.space import Space
from kvtier_daemon.app import App, MakeLowerTier
from kvtier_daemon.observing.metrics import SERIES
from support.apps import served
from support.host_tier import DAMAGED, FAILS, HANGS, HostMemory
from support.specs import pattern, spec_of

PROMPT = 16  # blocks
WARM_BLOCKS = 64
WAIT_MS = 500
LONGEST_MS = 60_000


class TestHostTier(TierTests):
    capacity_bytes = 32 * BLOCK_BYTES

    def make_lower(self) -> MakeLowerTier:
        return partial(HostMemory, size_bytes=self.capacity_bytes)


class Prompts:
    """A client of the daemon, and its prompts."""

    def __init__(self, client: Client, host: HostMemory) -> None:
        self.client = client
        self.host = host
        self.space: Space = client.open(spec_of("third"))

    def save(self, number: int) -> bytes:
        keys = self.space.keys([number] * PROMPT * self.space.spec.block_tokens)
        self.space.save(keys, [pattern(key, self.space.block_bytes) for key in keys])
        return b"".join(keys)

    def evict(self, first: int = 1000) -> None:
        """Fill the memory with other prompts."""
        for number in range(WARM_BLOCKS // PROMPT + 1):
            self.save(first + number)

    def load(self, keys: bytes, enough: int = PROMPT, request: int = 1) -> int:
        """Return how many blocks are loaded, after their reads or as soon as there are `enough`; the bytes of
        each must be those that were saved."""
        until = time.monotonic() + LONGEST_MS / 1000
        each = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        while (found := self.space.match(each, request=request)).coming and found.ready < enough:
            assert time.monotonic() < until, found
            time.sleep(0.005)
        with self.space.load(each) as blocks:
            for key, block in zip(each, blocks, strict=False):
                assert bytes(block) == pattern(key, self.space.block_bytes)
            return len(blocks)


def run(folder: Path, work: Callable[[Prompts], Any]) -> None:
    """Run a daemon with the third tier until `work`, which uses it, has ended."""

    def client(host: HostMemory) -> None:
        with Client.connect(str(folder / "s"), populate=False) as connected:
            connected.wait_ready()
            work(Prompts(connected, host))

    async def serve(app: App) -> None:
        assert isinstance(app.lower, HostMemory)
        await asyncio.to_thread(client, app.lower)

    served(folder, serve, lower=HostMemory)


def test_a_saved_block_is_kept_and_comes_back_after_its_eviction(tmp_path: Path) -> None:
    def work(prompts: Prompts) -> None:
        keys = prompts.save(1)
        stats = prompts.client.stats()
        assert stats["tiers"]["host"]["blocks"] == PROMPT
        assert "cold" not in stats["tiers"]
        prompts.evict()
        assert prompts.space.match([keys[:KEY_BYTES]]).ready == 0, "it is still in memory"
        assert prompts.load(keys) == PROMPT
        stats = prompts.client.stats()
        for one in SERIES:
            one.read(stats)

    run(tmp_path, work)


def test_a_damaged_block_is_a_miss_and_can_be_saved_again(tmp_path: Path) -> None:
    def work(prompts: Prompts) -> None:
        keys = prompts.save(1)
        prompts.evict()
        bad = keys[5 * KEY_BYTES : 6 * KEY_BYTES]
        prompts.host.fault_of[bad] = DAMAGED
        assert prompts.load(keys) == 5
        del prompts.host.fault_of[bad]
        assert prompts.load(keys) == 5, "the damaged block was found again"
        prompts.save(1)
        prompts.evict(2000)
        assert prompts.load(keys, request=2) == PROMPT

    run(tmp_path, work)


def test_a_block_whose_read_fails_is_a_miss_until_a_read_succeeds(tmp_path: Path) -> None:
    def work(prompts: Prompts) -> None:
        keys = prompts.save(1)
        prompts.evict()
        bad = keys[5 * KEY_BYTES : 6 * KEY_BYTES]
        prompts.host.fault_of[bad] = FAILS
        assert prompts.load(keys, enough=5) == 5
        del prompts.host.fault_of[bad]
        assert prompts.load(keys, request=2) == PROMPT

    run(tmp_path, work)


def test_a_read_that_hangs_does_not_delay_others(tmp_path: Path) -> None:
    def work(prompts: Prompts) -> None:
        hung, other = prompts.save(1), prompts.save(2)
        prompts.evict()
        prompts.host.fault_of[hung[:KEY_BYTES]] = HANGS
        each = [hung[at : at + KEY_BYTES] for at in range(0, len(hung), KEY_BYTES)]
        assert prompts.space.match(each, request=7).coming == PROMPT
        waiting = prompts.space.begin_lease(each, request=7, within_ms=LONGEST_MS, wait_ms=WAIT_MS)
        assert prompts.load(other) == PROMPT
        assert prompts.host.hanging == 1
        answers: dict[int, Any] = {}
        until = time.monotonic() + LONGEST_MS / 1000
        while waiting not in answers and time.monotonic() < until:
            time.sleep(0.01)
            answers |= prompts.client.poll()
        assert answers[waiting].ready == 0, "an answer waits no longer than its request"
        prompts.host.goes_on.set()
        assert prompts.load(hung, request=7) == PROMPT

    run(tmp_path, work)


def test_a_wait_ends_at_its_limit_and_cancels_its_reads(tmp_path: Path) -> None:
    def work(prompts: Prompts) -> None:
        hung = prompts.save(1)
        prompts.evict()
        prompts.host.fault_of[hung[:KEY_BYTES]] = HANGS
        each = [hung[at : at + KEY_BYTES] for at in range(0, len(hung), KEY_BYTES)]
        assert prompts.space.wait(each, 100).coming == PROMPT
        assert prompts.host.hanging == 1
        with prompts.space.load(each, wait_ms=100) as blocks:
            assert len(blocks) == 0
        prompts.host.goes_on.set()
        assert prompts.space.wait(each, LONGEST_MS).ready == PROMPT

    run(tmp_path, work)


def test_blocks_of_a_tier_that_is_off_are_misses_until_it_is_on_again(tmp_path: Path) -> None:
    def work(prompts: Prompts) -> None:
        keys = prompts.save(1)
        prompts.evict()
        assert prompts.client.tier("host", "off")["state"] == "off"
        assert prompts.load(keys) == 0
        assert prompts.client.tier("host", "on")["state"] == "on"
        assert prompts.load(keys, request=2) == PROMPT

    run(tmp_path, work)


def test_blocks_that_were_saved_while_it_was_off_are_kept_after_a_drain(tmp_path: Path) -> None:
    def work(prompts: Prompts) -> None:
        prompts.client.tier("host", "off")
        keys = prompts.save(1)
        assert prompts.client.stats()["tiers"]["host"]["blocks"] == 0
        prompts.client.tier("host", "on")
        assert prompts.client.tier("warm", "drain")["state"] == "drained"
        assert prompts.client.stats()["tiers"]["host"]["blocks"] == PROMPT
        prompts.evict()
        assert prompts.load(keys) == PROMPT

    run(tmp_path, work)


def test_a_forgotten_block_is_in_no_tier(tmp_path: Path) -> None:
    def work(prompts: Prompts) -> None:
        keys = prompts.save(1)
        prompts.evict()
        kept = prompts.client.stats()["tiers"]["host"]["blocks"]
        each = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        assert prompts.space.forget(each) == PROMPT
        assert prompts.client.stats()["tiers"]["host"]["blocks"] == kept - PROMPT
        assert prompts.load(keys) == 0

    run(tmp_path, work)


def test_the_name_of_no_other_tier_is_accepted(tmp_path: Path) -> None:
    def work(prompts: Prompts) -> None:
        with pytest.raises(Refused, match="unknown tier or order"):
            prompts.client.tier("cold", "off")

    run(tmp_path, work)
