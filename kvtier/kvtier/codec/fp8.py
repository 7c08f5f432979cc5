"""Lossy: floats of 8 bits (e4m3), in steps of each channel for K and of each token and head for V.

Half of bf16's size. Small values keep three bits of mantissa, whatever the largest of their group is: where a
group has outliers that is less of an error than q8's, elsewhere it is four times as much.
"""

from kvtier.codec import base

CODEC: base.Codec = base.Native("fp8", base.FP8, lossy=True)
