"""Lossless: exponents by entropy, in streams of 32 lanes of rANS; the rest as it is.

J. Duda, "Asymmetric numeral systems" (2013), as range coder; the lanes are F. Giesen's ("Interleaved entropy
coders", 2014), so that one GPU warp, or a few registers, is a stream.
"""

from kvtier.codec import base

CODEC: base.Codec = base.Native("r32", base.R32)
