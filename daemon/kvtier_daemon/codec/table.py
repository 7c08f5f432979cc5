"""The codecs, by their names in the configuration and by their numbers in frames.

Each codec is one row here. A native codec has its encoder and decoder in kernels/; a codec in Python is a
class, such as Zstd. The calibrated codecs, ecsq and cachegen, are made for a profile: see `calibrated`.
"""

from kvtier.frame import E5M2, FIX4, FP8, MXFP4, NVFP4, Q2, Q4, Q8, R32, RAW
from kvtier_daemon.codec.base import Codec, Native
from kvtier_daemon.codec.zstd import Zstd

CODECS: tuple[Codec, ...] = (
    # No encoding: the payload is the block in memory.
    Native("raw", RAW),
    # Lossless: 4-bit exponents, with escapes outside a window of 15; the other bits unchanged.
    Native("fix4", FIX4),
    # Lossless: entropy-coded exponents in 32 interleaved streams of rANS; the other bits unchanged.
    Native("r32", R32),
    # Lossless, for element types without an exponent, and for comparisons.
    Zstd(),
    # Lossy: 8 bits per element, one step per channel for K, and per token and head for V.
    Native("q8", Q8, lossy=True),
    # Lossy: 4 bits per element, in steps from a minimum, for the same groups as q8.
    Native("q4", Q4, lossy=True),
    # Lossy: 2 bits per element, otherwise as q4.
    Native("q2", Q2, lossy=True),
    # Lossy: e4m3 floats, with the steps of q8. A small value keeps three bits of mantissa however large the
    # maximum of its group is: less error than q8 in groups with outliers, four times as much in others.
    Native("fp8", FP8, lossy=True),
    # Lossy: e5m2 floats, without steps: the fastest one, with twice the error of fp8.
    Native("e5m2", E5M2, lossy=True),
    # Lossy: e2m1 floats of 4 bits, in groups of 16 whose steps are e4m3 floats, relative to the part's scale.
    Native("nvfp4", NVFP4, lossy=True),
    # Lossy: the same in groups of 32 with powers of two as steps.
    Native("mxfp4", MXFP4, lossy=True),
)
BY_NAME = {codec.name: codec for codec in CODECS}
BY_NUMBER = {codec.number: codec for codec in CODECS}
