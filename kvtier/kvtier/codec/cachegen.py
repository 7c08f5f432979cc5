"""Lossy: tokens in groups, each told from its group's first one in steps of each channel, by entropy.

Y. Liu et al., "CacheGen: KV Cache Compression and Streaming for Fast Large Language Model Serving" (SIGCOMM
2024): anchors in 8 bits, deltas from them, coarser in deeper layers. Steps and tables are in a calibration
profile and not in every block, and the 32 lanes of r32 take the place of its arithmetic coder.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.codec import base
from kvtier.codec.calibrated import Calibrated
from kvtier.codec.grid import TOKENS_FIRST
from kvtier.codec.profile import Profile


def codec(
    profile: Profile,
    level: str,
    layout: str = TOKENS_FIRST,
    layers: Sequence[int] | None = None,
    share: tuple[int, int] = (0, 1),
) -> base.Codec:
    """This level of the profile; `Calibrated` says what the others are."""
    return Calibrated("cachegen", profile, level, layout, layers, share)
