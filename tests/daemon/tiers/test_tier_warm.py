"""The warm tier passes the conformance suite of tiers, with catalog, extents and generations."""

from __future__ import annotations

from conformance.tier_tests import MEMORY_BYTES, TierTests
from kvtier_daemon.app import MakeLowerTier
from kvtier_daemon.tiers.cold.lifecycle import ColdLifecycle


class TestWarmTier(TierTests):
    capacity_bytes = MEMORY_BYTES
    is_lower = False

    def make_lower(self) -> MakeLowerTier:
        return ColdLifecycle  # without a configured directory
