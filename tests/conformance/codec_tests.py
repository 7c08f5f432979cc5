"""The contract of lossless codecs. A test class inherits CodecTests and sets the codec."""

from __future__ import annotations

import random
from functools import lru_cache

import numpy as np
import pytest

from kvtier.errors import FrameError
from kvtier.frame import RAW, Entry, check_entries
from kvtier.layout import DTYPE_BYTES, Group, KvSpec
from kvtier_daemon.codec import base, block_parts
from kvtier_kernels import xxh3_128
from models.codecs import encode
from support.specs import spec_of


@lru_cache(64)
def kv(dtype: str, nbytes: int) -> bytes:
    """Values that resemble K and V; for 8-bit types small numbers."""
    drawn = np.random.default_rng(3).standard_normal(nbytes // DTYPE_BYTES[dtype] + 1)
    if dtype == "float32":
        return drawn.astype(np.float32).tobytes()[:nbytes]
    if dtype == "bfloat16":
        return (drawn.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()[:nbytes]
    if dtype == "float16":
        return drawn.astype(np.float16).tobytes()[:nbytes]
    return (drawn * 16).astype(np.int8).tobytes()[:nbytes]


def opaque(nbytes: int) -> KvSpec:
    group = Group(layers=3, opaque_bytes=nbytes)
    return KvSpec.groups([group], model="m", dtype="bfloat16", block_tokens=16, weights="w")


class CodecTests:
    shrinks = True  # bf16 and fp32, at least

    def codec(self) -> base.Codec:
        raise NotImplementedError

    def encoded(self, spec: KvSpec, block: bytes) -> tuple[tuple[Entry, ...], bytearray]:
        into = bytearray(len(block))
        parts = block_parts.entries(spec, 0)
        return encode(self.codec(), block, parts, spec.dtype, into), into

    @pytest.mark.parametrize("dtype", DTYPE_BYTES)
    def test_a_block_is_decoded_as_a_whole_and_by_parts(self, dtype: str) -> None:
        spec = spec_of(dtype=dtype)
        block = kv(dtype, spec.block_bytes)
        entries, payload = self.encoded(spec, block)
        end = entries[-1].offset + entries[-1].nbytes
        check_entries(entries, end, len(block))
        assert [(e.layer, e.part) for e in entries] == [(n // 2, n % 2) for n in range(8)]
        assert {e.codec for e in entries} <= {RAW, self.codec().number}
        if self.shrinks and dtype in ("bfloat16", "float32"):
            assert end < len(block)
        back = bytearray(len(block))
        self.codec().decode(memoryview(payload)[:end], entries, dtype, back)
        assert back == block
        at = 0
        for entry in entries:
            alone = bytearray(entry.raw_bytes)
            self.codec().decode(payload, [entry], dtype, alone)
            assert alone == block[at : at + entry.raw_bytes]
            at += entry.raw_bytes
        several = bytearray(entries[2].raw_bytes * 2)
        self.codec().decode(payload, entries[2:4], dtype, several)
        assert several == block[2 * entries[0].raw_bytes :][: len(several)]

    @pytest.mark.parametrize("nbytes", [1, 2, 3, 127, 128, 130, 4099, 100_001])
    def test_an_opaque_block_is_one_part_of_any_size(self, nbytes: int) -> None:
        spec = opaque(nbytes)
        block = kv("bfloat16", nbytes)
        entries, payload = self.encoded(spec, block)
        assert len(entries) == 1
        back = bytearray(nbytes)
        self.codec().decode(payload, entries, spec.dtype, back)
        assert back == block

    def test_noise_is_kept_raw(self) -> None:
        spec = spec_of()
        block = random.Random(1).randbytes(spec.block_bytes)
        entries, payload = self.encoded(spec, block)
        assert payload == block and {e.codec for e in entries} == {RAW}

    def test_one_part_that_does_not_shrink_is_raw_among_others(self) -> None:
        spec = spec_of()
        size = spec.block_bytes // 8
        block = bytearray(kv("bfloat16", spec.block_bytes))
        block[3 * size : 4 * size] = random.Random(1).randbytes(size)
        entries, payload = self.encoded(spec, bytes(block))
        assert entries[3].codec == RAW and entries[3].nbytes == size
        back = bytearray(len(block))
        self.codec().decode(payload, entries, spec.dtype, back)
        assert back == block

    def test_the_encoding_does_not_depend_on_the_address_of_a_block(self) -> None:
        spec = spec_of()
        block = kv("bfloat16", spec.block_bytes)
        entries, payload = self.encoded(spec, block)
        shifted = memoryview(b"x" + block)[1:]
        other = memoryview(bytearray(len(block) + 3))[3:]
        parts = block_parts.entries(spec, 0)
        assert encode(self.codec(), shifted, parts, spec.dtype, other) == entries
        end = entries[-1].offset + entries[-1].nbytes
        assert other[:end] == payload[:end]

    def test_damage_is_an_error_or_has_another_digest(self) -> None:
        """Codec and digest together detect damage. A caller that checks neither does not crash."""
        spec = spec_of()
        block = kv("bfloat16", spec.block_bytes)
        entries, payload = self.encoded(spec, block)
        digests = [xxh3_128(payload[e.offset : e.offset + e.nbytes]) for e in entries]
        chance = random.Random(2)
        for _ in range(100):
            number = chance.randrange(len(entries))
            entry = entries[number]
            text = bytearray(payload)
            near = chance.choice([entry.nbytes, 64])
            text[entry.offset + chance.randrange(near)] ^= 1 << chance.randrange(8)
            back = bytearray(len(block))
            try:
                self.codec().decode(text, entries, spec.dtype, back)
            except FrameError as error:
                assert f"layer {entry.layer}, part {entry.part}" in str(error)
                continue
            piece = text[entry.offset : entry.offset + entry.nbytes]
            assert back == block or xxh3_128(piece) != digests[number]

    def test_invalid_entries_are_an_error(self) -> None:
        spec = spec_of()
        block = kv("bfloat16", spec.block_bytes)
        entries, payload = self.encoded(spec, block)
        first, size = entries[0], entries[0].raw_bytes
        lies = [
            first._replace(codec=77),
            first._replace(nbytes=first.nbytes - 1),
            first._replace(nbytes=0),
            first._replace(offset=len(payload)),
            first._replace(raw_bytes=size - 2 * 64),
        ]
        for lie in lies:
            with pytest.raises(FrameError, match="layer 0, part 0"):
                self.codec().decode(payload, [lie], spec.dtype, bytearray(size))
