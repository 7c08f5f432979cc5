"""Each codec against the contract, and its own properties."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from conformance.codec_tests import CodecTests, kv
from kvtier.errors import FrameError
from kvtier.frame import RAW, ZSTD, Entry, check_entries
from kvtier.layout import KvSpec
from kvtier_daemon.codec import base, block_parts
from kvtier_daemon.codec.grid import GROUP_CHANNELS, HEADS_FIRST, TOKENS_FIRST, grids
from kvtier_daemon.codec.table import BY_NAME, BY_NUMBER
from kvtier_kernels import join_planes, split_planes
from models import kernels
from models.codecs import encode
from support.specs import spec_of


class TestRaw(CodecTests):
    shrinks = False

    def codec(self) -> base.Codec:
        return BY_NAME["raw"]


class TestFix4(CodecTests):
    def codec(self) -> base.Codec:
        return BY_NAME["fix4"]


class TestR32(CodecTests):
    def codec(self) -> base.Codec:
        return BY_NAME["r32"]


class TestZstd(CodecTests):
    def codec(self) -> base.Codec:
        return BY_NAME["zstd"]

    def test_a_plane_with_a_huge_declared_size_is_refused_unread(self) -> None:
        """The decoder would otherwise allocate the memory that the header requests."""
        huge = b"\x28\xb5\x2f\xfd\xe0" + (1 << 50).to_bytes(8, "little") + b"\x01\x00\x00"
        text = struct.pack("<II", len(huge), 100) + huge + bytes(100)
        with pytest.raises(FrameError, match="zstd"):
            entry = Entry(0, 0, ZSTD, 0, len(text), 200)
            BY_NAME["zstd"].decode(text, [entry], "bfloat16", bytearray(200))

    def test_integers_are_compressed(self) -> None:
        block = kv("int8", 10_000)
        into = bytearray(10_000)
        [entry] = BY_NAME["zstd"].encode(block, [Entry(0, 0, 0, 0, 10_000, 10_000)], "int8", into)
        assert entry.codec == ZSTD and entry.nbytes < 9_000


def quantized(codec: base.Codec, spec: KvSpec) -> tuple[tuple[Entry, ...], bytearray]:
    block = kv(spec.dtype, spec.block_bytes)
    into = bytearray(len(block))
    parts = block_parts.entries(spec, 0)
    entries = encode(codec, block, parts, spec.dtype, into, grids(spec, 0))
    return entries, into


def floats(dtype: str, text: bytes | bytearray) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":
        return (np.frombuffer(text, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(text, dtype).astype(np.float32)


LOSSY = [codec for codec in BY_NAME.values() if codec.lossy]


def test_only_codecs_of_fixed_rate_are_lossy() -> None:
    assert [one for one in BY_NAME.values() if one.lossy] == LOSSY


@pytest.mark.parametrize("layout", [TOKENS_FIRST, HEADS_FIRST])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("codec", LOSSY)
def test_lossy_parts_are_decoded_approximately_and_separately(
    codec: base.Codec, dtype: str, layout: str
) -> None:
    spec = spec_of(dtype=dtype, layout=layout, block_tokens=64)
    block = kv(dtype, spec.block_bytes)
    entries, payload = quantized(codec, spec)
    end = entries[-1].offset + entries[-1].nbytes
    check_entries(entries, end, len(block))
    assert {e.codec for e in entries} == {codec.number} and end < len(block) * 0.6
    back = bytearray(len(block))
    codec.decode(memoryview(payload)[:end], entries, dtype, back)
    off = floats(dtype, back) - floats(dtype, block)
    most = {
        "q8": 0.03, "q4": 0.4, "q2": 1.8, "fp8": 0.26, "e5m2": 0.52, "nvfp4": 0.9, "mxfp4": 1.3,
    }  # fmt: skip
    assert 0 < abs(off).max() < most[codec.name]
    size = entries[0].raw_bytes
    alone = bytearray(size)
    codec.decode(payload, [entries[3]], dtype, alone)
    assert alone == back[3 * size : 4 * size]


@pytest.mark.parametrize("codec", LOSSY)
def test_k_is_quantized_by_channel_and_v_by_token(codec: base.Codec) -> None:
    entries, payload = quantized(codec, spec_of(block_tokens=64))
    assert [payload[e.offset + 2] for e in entries] == [0, 1] * 4


@pytest.mark.parametrize(
    "change", [{"layout": "LBHNC"}, {"strides": (1, 2)}, {"dtype": "float8_e4m3fn"}]
)
@pytest.mark.parametrize("codec", LOSSY)
def test_opaque_and_8_bit_blocks_are_stored_raw(codec: base.Codec, change: dict[str, Any]) -> None:
    spec = spec_of(**change)
    entries, payload = quantized(codec, spec)
    assert {e.codec for e in entries} == {RAW} and payload == kv(spec.dtype, len(payload))


@pytest.mark.parametrize("codec", LOSSY)
def test_a_damaged_lossy_part_is_named(codec: base.Codec) -> None:
    spec = spec_of(block_tokens=64)
    entries, payload = quantized(codec, spec)
    payload[entries[1].offset + 4] ^= 1
    with pytest.raises(FrameError, match="layer 0, part 1"):
        codec.decode(payload, entries, spec.dtype, bytearray(spec.block_bytes))


@pytest.mark.parametrize(
    ("heads", "dim", "counted"),
    [(12, 32, 64), (5, 32, 32), (6, 16, 48), (1, 32, 32), (8, 8, 64), (4, 40, 40), (4, 48, 48), (4, 64, 64),
     (2, 80, 80), (2, 128, 128)],
)  # fmt: skip
def test_adjacent_small_heads_of_v_share_steps(heads: int, dim: int, counted: int) -> None:
    assert GROUP_CHANNELS == kernels.quantized.GROUP_CHANNELS
    found = {
        (layout, ordered): grids(spec_of(kv_heads=heads, head_dim=dim, layout=layout), 0, ordered)[:2]
        for layout in (TOKENS_FIRST, HEADS_FIRST)
        for ordered in (False, True)
    }  # fmt: skip
    apart = found.pop((HEADS_FIRST, False))  # in this layout a head's tokens precede the next head
    assert [(one.channels, one.head, one.by_token) for one in apart] == [
        (dim, dim, False), (dim, dim, True),
    ]  # fmt: skip
    for k, v in found.values():
        assert (k.channels, k.head, k.by_token) == (heads * dim, dim, False)
        assert (v.channels, v.head, v.by_token) == (heads * dim, counted, True)


@pytest.mark.parametrize("codec", LOSSY)
def test_v_with_small_heads_is_encoded_as_small_as_with_wide_heads(codec: base.Codec) -> None:
    entries, _ = quantized(codec, spec_of(kv_heads=12, head_dim=32))
    wide, _ = quantized(codec, spec_of(kv_heads=6, head_dim=64))
    assert [one.nbytes for one in entries] == [one.nbytes for one in wide]


def test_groups_other_than_attention_have_no_grids() -> None:
    mla = KvSpec.mla(
        model="m", layers=2, latent_dim=64, rope_dim=16, dtype="bfloat16", block_tokens=16, weights="w"
    )  # fmt: skip
    assert grids(mla, 0) == () and len(grids(spec_of(), 0)) == len(
        block_parts.entries(spec_of(), 0)
    )


def test_names_and_numbers_of_codecs_are_unique() -> None:
    assert list(BY_NAME) == [
        "raw", "fix4", "r32", "zstd", "q8", "q4", "q2", "fp8", "e5m2", "nvfp4", "mxfp4",
    ]  # fmt: skip
    assert list(BY_NUMBER) == [0, 1, 2, 3, 4, 5, 6, 9, 10, 11, 12]


@pytest.mark.parametrize("width", [1, 2, 4])
def test_planes_equal_those_of_the_model_and_are_restored(width: int) -> None:
    data = kv("float32", 40_000)
    planes, back = bytearray(len(data)), bytearray(len(data))
    split_planes(width, data, planes)
    assert planes == kernels.split_planes(width, data)
    join_planes(width, planes, back)
    assert back == data


def test_planes_of_a_wrong_size_are_refused() -> None:
    with pytest.raises(ValueError, match="width"):
        split_planes(3, b"abc", bytearray(3))
    with pytest.raises(ValueError, match="dst"):
        split_planes(2, b"abcd", bytearray(2))
    with pytest.raises(ValueError, match="whole"):
        join_planes(2, b"abc", bytearray(3))
