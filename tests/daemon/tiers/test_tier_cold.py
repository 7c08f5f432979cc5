"""The cold tier passes the conformance suite of tiers, with lifecycle, mover and segments over a real
directory."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from conformance.tier_tests import (
    BLOCK_BYTES,
    GROUPS,
    PART_BYTES,
    SHARDS,
    Identity,
    ServedTenant,
    TierTests,
    name,
)
from kvtier.frame import PAGE
from kvtier_daemon.app import MakeLowerTier
from kvtier_daemon.catalog.compressed import CompressedOrder
from kvtier_daemon.catalog.policy import Policy, make
from kvtier_daemon.tiers.cold import compressor
from kvtier_daemon.tiers.cold.lifecycle import ColdLifecycle
from support.oracle import HIGH

SEGMENT = 1 << 20
SEGMENTS = 9  # the tenant's share of 64 MiB, without the index and the lock
CONFIG = """
[cold]
directories = ["{{folder}}/disk"]
size = "64MiB"
segment = "1MiB"
write = "through"
engine = "{engine}"
codec = "{codec}"
"""


class ColdTierTests(TierTests):
    capacity_bytes = (SEGMENTS - 2) * SEGMENT * 95 // 100  # the rest is kept for the next writes
    engine = "auto"
    codec = "raw"

    @property
    def config(self) -> str:  # type: ignore[override]
        return CONFIG.format(engine=self.engine, codec=self.codec)

    def make_lower(self) -> MakeLowerTier:
        return ColdLifecycle


class PressureInAll(ColdTierTests):
    """Under pressure, `make test` tests only one engine, and one codec with compressed memory."""

    @pytest.mark.slow
    def test_a_full_tier_evicts_old_blocks_for_new_ones(self, tier: ServedTenant) -> None:
        super().test_a_full_tier_evicts_old_blocks_for_new_ones(tier)

    @pytest.mark.slow
    def test_a_held_block_stays_under_pressure(self, tier: ServedTenant) -> None:
        super().test_a_held_block_stays_under_pressure(tier)

    @pytest.mark.slow
    def test_a_tier_full_of_held_blocks_refuses_new_ones_and_keeps_the_held_ones(
        self, tier: ServedTenant
    ) -> None:
        super().test_a_tier_full_of_held_blocks_refuses_new_ones_and_keeps_the_held_ones(tier)


class TestColdTierOfIoUring(ColdTierTests):
    engine = "io_uring"


class TestColdTierOfThreads(PressureInAll):
    engine = "threads"


class EncodedTests(ColdTierTests):
    def data(self, tier: ServedTenant, number: int) -> bytes:
        """Small numbers in bf16."""
        low = random.Random(f"data {number}").randbytes(BLOCK_BYTES // 2)
        words = bytearray(BLOCK_BYTES)
        words[::2], words[1::2] = low, low.translate(HIGH)
        return bytes(words)

    def test_it_is_encoded(self, tier: ServedTenant) -> None:
        for number in range(8):
            assert tier.put(Identity(key=name(number)), self.data(tier, number))
        plain_bytes = (
            8 * GROUPS * SHARDS * (PART_BYTES + PAGE)
        )  # each frame has a header of one page
        assert tier.used_bytes() < 0.95 * plain_bytes


class TestColdTierOfFix4(PressureInAll, EncodedTests):
    codec = "fix4"


class TestColdTierOfR32(PressureInAll, EncodedTests):
    codec = "r32"


class TestColdTierOfZstd(PressureInAll, EncodedTests):
    codec = "zstd"


class TestColdTierWithCompressedMemory(EncodedTests):
    """Blocks are compressed whenever they have a frame on disk, and then read from memory."""

    codec = "r32"
    compressed = "20MiB"  # of which the tenant has 3 MiB

    @pytest.fixture(autouse=True)
    def at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compressor, "PRESSURE", 0.0)
        monkeypatch.setattr(compressor, "COOL_SHARE", 1.0)

    def make_policy(self) -> Policy:
        return CompressedOrder(make("lru"), make("lru"))

    def test_blocks_are_read_from_memory(self, tier: ServedTenant) -> None:
        def figures() -> Mapping[str, int]:
            return tier.tenant.tier.stats().compressed

        for number in range(8):
            assert tier.put(Identity(key=name(number)), self.data(tier, number))
        tier._until(lambda: figures()["compressed"] == 8 * GROUPS * SHARDS)
        for number in range(8):
            assert tier.get(Identity(key=name(number))) == self.data(tier, number)
        assert figures()["read"] == 8 * GROUPS * SHARDS
