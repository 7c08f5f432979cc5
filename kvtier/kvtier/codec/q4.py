"""Lossy: 4 bits an element, from a least value in steps: of each channel for K, of each token and head for V.

Z. Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (ICML 2024), with larger
groups: 256 tokens, and a head of up to 64 channels. bf16 gets 3.7 times smaller.
"""

from kvtier.codec import base

CODEC: base.Codec = base.Native("q4", base.Q4, lossy=True)
