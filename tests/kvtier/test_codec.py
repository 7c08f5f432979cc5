"""The codecs, each against the contract, and what is its own."""

from __future__ import annotations

import struct

import pytest

from conformance.codec_tests import CodecTests, kv
from kvtier.codec import base, fix4, r32, raw, zstd
from kvtier.codec.frame import Entry
from kvtier.codec.known import BY_NAME, BY_NUMBER
from kvtier.errors import FrameError
from kvtier_kernels import join_planes, reference, split_planes


class TestRaw(CodecTests):
    shrinks = False

    def codec(self) -> base.Codec:
        return raw.CODEC


class TestFix4(CodecTests):
    def codec(self) -> base.Codec:
        return fix4.CODEC


class TestR32(CodecTests):
    def codec(self) -> base.Codec:
        return r32.CODEC


class TestZstd(CodecTests):
    def codec(self) -> base.Codec:
        return zstd.CODEC

    def test_a_plane_that_says_it_is_huge_is_refused_unread(self) -> None:
        """Or it would get the memory that it asks for."""
        huge = b"\x28\xb5\x2f\xfd\xe0" + (1 << 50).to_bytes(8, "little") + b"\x01\x00\x00"
        text = struct.pack("<II", len(huge), 100) + huge + bytes(100)
        with pytest.raises(FrameError, match="zstd"):
            entry = Entry(0, 0, base.ZSTD, 0, len(text), 200)
            zstd.CODEC.decode(text, [entry], "bfloat16", bytearray(200))

    def test_integers_shrink_too(self) -> None:
        block = kv("int8", 10_000)
        into = bytearray(10_000)
        [entry] = zstd.CODEC.encode(block, [Entry(0, 0, 0, 0, 10_000, 10_000)], "int8", into)
        assert entry.codec == base.ZSTD and entry.nbytes < 9_000


def test_each_codec_has_a_name_and_a_number_of_its_own() -> None:
    assert list(BY_NAME) == ["raw", "fix4", "r32", "zstd", "q8", "q4", "q2"]
    assert list(BY_NUMBER) == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("width", [1, 2, 4])
def test_planes_are_the_twins_and_come_back(width: int) -> None:
    data = kv("float32", 40_000)
    planes, back = bytearray(len(data)), bytearray(len(data))
    split_planes(width, data, planes)
    assert planes == reference.split_planes(width, data)
    join_planes(width, planes, back)
    assert back == data


def test_planes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="width"):
        split_planes(3, b"abc", bytearray(3))
    with pytest.raises(ValueError, match="dst"):
        split_planes(2, b"abcd", bytearray(2))
    with pytest.raises(ValueError, match="whole"):
        join_planes(2, b"abc", bytearray(3))
