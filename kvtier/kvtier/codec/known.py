"""The codecs there are, by name and by the number that frames have."""

from kvtier.codec import base, fix4, r32, raw, zstd

CODECS: tuple[base.Codec, ...] = (raw.CODEC, fix4.CODEC, r32.CODEC, zstd.CODEC)
BY_NAME = {codec.name: codec for codec in CODECS}
BY_NUMBER = {codec.number: codec for codec in CODECS}
