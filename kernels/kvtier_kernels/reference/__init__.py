"""Twins of the native kernels in plain Python and NumPy: slow, short and read first.

Nothing imports this at run time; the tests hold each kernel against its twin.
"""

from kvtier_kernels.reference.blake3 import blake3
from kvtier_kernels.reference.blocks import (
    SLOT,
    Pieces,
    copy,
    copy_in,
    copy_out,
    fresh,
    gather,
    scatter,
)
from kvtier_kernels.reference.codec import decode_part, encode_parts, split_planes
from kvtier_kernels.reference.disk import OPERATION, Disk
from kvtier_kernels.reference.names import chain_hashes, chain_keys
from kvtier_kernels.reference.notes import Notes
from kvtier_kernels.reference.quantized import decode_quantized, encode_quantized
from kvtier_kernels.reference.xxh3 import xxh3_128

__all__ = [
    "OPERATION",
    "SLOT",
    "Disk",
    "Notes",
    "Pieces",
    "blake3",
    "chain_hashes",
    "chain_keys",
    "copy",
    "copy_in",
    "copy_out",
    "decode_part",
    "decode_quantized",
    "encode_parts",
    "encode_quantized",
    "fresh",
    "gather",
    "scatter",
    "split_planes",
    "xxh3_128",
]
