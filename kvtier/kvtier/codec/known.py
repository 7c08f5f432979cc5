"""The codecs there are, by name and by the number that frames have."""

from kvtier.codec import base, fix4, fp8, q2, q4, q8, r32, raw, zstd

CODECS: tuple[base.Codec, ...] = (
    raw.CODEC, fix4.CODEC, r32.CODEC, zstd.CODEC, q8.CODEC, q4.CODEC, q2.CODEC, fp8.CODEC,
)  # fmt: skip
BY_NAME = {codec.name: codec for codec in CODECS}
BY_NUMBER = {codec.number: codec for codec in CODECS}
