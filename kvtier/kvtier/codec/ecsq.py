"""Lossy: K before RoPE and V, each channel less its mean and in steps of its own, by entropy.

Entropy-coded scalar quantisation: one step a channel and one table a part, as a calibration profile has them,
and the 32 lanes of r32. No rotation other than RoPE's is taken back: it buys nothing once there is an entropy
coder. bf16 gets 4.5, 5.6 or 7 times smaller at the levels hi, mid and lo.
"""

from functools import partial

from kvtier.codec.calibrated import Calibrated

codec = partial(Calibrated, "ecsq")
