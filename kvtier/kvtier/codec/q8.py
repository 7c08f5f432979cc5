"""Lossy: 8 bits an element, in steps of each channel for K and of each token and head for V.

Half of bf16's size, and errors of half a percent. What is no finite number, or too large, is kept raw with
its part.
"""

from kvtier.codec import base

CODEC: base.Codec = base.Native("q8", base.Q8, lossy=True)
