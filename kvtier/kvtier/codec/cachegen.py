"""Lossy: tokens in groups, each told from its group's first one in steps of each channel, by entropy.

Y. Liu et al., "CacheGen: KV Cache Compression and Streaming for Fast Large Language Model Serving" (SIGCOMM
2024): anchors in 8 bits, deltas from them, coarser in deeper layers. Steps and tables are in a calibration
profile and not in every block, and the 32 lanes of r32 take the place of its arithmetic coder.
"""

from functools import partial

from kvtier.codec.calibrated import Calibrated

codec = partial(Calibrated, "cachegen")
