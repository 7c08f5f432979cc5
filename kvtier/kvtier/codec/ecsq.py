"""Lossy: K before RoPE and V, each channel less its mean and in steps of its own, by entropy.

Entropy-coded scalar quantisation: one step a channel and one table a part, as a calibration profile has them,
and the 32 lanes of r32. No rotation other than RoPE's is taken back: it buys nothing once there is an entropy
coder. bf16 gets 4.5, 5.6 or 7 times smaller at the levels hi, mid and lo.
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
    return Calibrated("ecsq", profile, level, layout, layers, share)
