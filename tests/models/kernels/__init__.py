"""Models of the native kernels in plain Python and NumPy: slow and short.

Nothing imports them at run time; tests compare each kernel with its model.
"""

from models.kernels.blake3 import blake3
from models.kernels.blocks import (
    SLOT,
    Pieces,
    copy,
    copy_in,
    copy_out,
    copy_parts,
    copy_runs,
    copy_tokens,
    fresh,
    gather,
    scatter,
)
from models.kernels.codec import decode_part, encode_parts, split_planes
from models.kernels.disk import OPERATION, Disk
from models.kernels.names import chain_hashes, chain_keys
from models.kernels.notes import Notes
from models.kernels.quantized import decode_quantized, encode_quantized
from models.kernels.xxh3 import xxh3_128

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
    "copy_parts",
    "copy_runs",
    "copy_tokens",
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
