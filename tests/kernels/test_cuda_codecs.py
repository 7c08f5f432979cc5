"""Batches of parts that a device encodes and decodes: what can be requested together, and what is
refused.

The tests of the processor levels check the bytes: `cuda` is one of these levels."""

from __future__ import annotations

import ctypes
import random
import struct
from typing import Any

import numpy as np
import pytest

import kvtier_kernels as kernels
from kvtier_kernels.cuda import CudaError, codecs
from kvtier_kernels.cuda.codecs import (
    CACHEGEN,
    E5M2,
    ECSQ,
    ENCODED_PART,
    FIX4,
    FP8,
    MXFP4,
    NVFP4,
    PAYLOAD,
    Q4,
    Q8,
    R32,
    RAW,
    RAW_PART,
)
from support.cuda_codecs import Calibration, DeviceCodecs
from support.fake_cuda import FakeCuda

BF16 = 0
TOKENS, HEADS, DIM = 20, 2, 32
TABLE = bytes([4, 20, 60, 88, 60, 20, 3, 1])
ROPE = (struct.pack("<4Q", 1 << 60, 1 << 55, 1 << 50, 1 << 40), False)
GRID = (TOKENS, HEADS * DIM, DIM, False)
ALL = [FIX4, R32, Q8, Q4, FP8, E5M2, NVFP4, MXFP4, ECSQ, CACHEGEN]


def drawn(seed: int, elements: int = TOKENS * HEADS * DIM) -> bytes:
    values = np.random.default_rng(seed).standard_normal(elements).astype("<f4")
    return (values.view("<u4") >> 16).astype("<u2").tobytes()


def calibration_of(codec: int) -> Calibration | None:
    if codec not in (ECSQ, CACHEGEN):
        return None
    count = HEADS * DIM
    said = (HEADS, DIM, 0, 0, bytes(4 * count), bytes([130] * count), bytes([148] * count), TABLE)
    return Calibration(codec, 1, 8, [ROPE], [said])


def by_processor(codec: int, parts: list[bytes]) -> tuple[list[tuple[int, int]], bytes]:
    block, into = b"".join(parts), bytearray(sum(map(len, parts)))
    by = calibration_of(codec)
    if by is None:
        sizes, grids = [len(part) for part in parts], [GRID] * len(parts)
        found = kernels.encode_parts(codec, BF16, block, sizes, into, grids)
    else:
        said = [(0, len(part)) for part in parts]
        found = kernels.encode_calibrated(by.native, BF16, block, said, False, 9, into)
    return found, bytes(into[: sum(size for _, size in found)])


@pytest.mark.parametrize("codec", ALL)
def test_each_payload_of_a_batch_equals_that_of_a_processor(
    device_codecs: DeviceCodecs, codec: int
) -> None:
    """Compressible and incompressible parts, in payloads with any number of them."""
    device = device_codecs
    chance = random.Random(codec)
    noise = chance.randbytes(TOKENS * HEADS * DIM * 2)
    for count in (1, 3, 40):  # the memory of a coder grows
        wanted = [
            [
                noise if chance.random() < 0.2 else drawn(chance.randrange(99))
                for _ in range(chance.randrange(5))
            ]
            for _ in range(count)
        ]
        rows, payloads = [], []
        for number, parts in enumerate(wanted):
            room = sum(map(len, parts))
            payloads.append((device._room(room, 1), room))
            for part in parts:
                address = device._put(np.frombuffer(part, np.uint8))
                rows.append((address, len(part), number, 0, *GRID))
        by = device._device(calibration_of(codec))
        device.coder.encode(
            codec, BF16, np.array(rows, RAW_PART), np.array(payloads, PAYLOAD), device.stream, by,
            position=9,
        )  # fmt: skip
        results = list(device.coder.finish())
        for parts, (into, room) in zip(wanted, payloads, strict=True):
            found, text = by_processor(codec, parts)
            mine, results = results[: len(parts)], results[len(parts) :]
            assert [(RAW if one["kept"] else codec, one["bytes"]) for one in mine] == found
            assert device._get(into, room)[: len(text)].tobytes() == text
        device._free()


def test_a_payload_has_many_parts_of_any_size(device_codecs: DeviceCodecs) -> None:
    """Large parts among small ones: all lanes of a warp add up the units of a large one."""
    device, chance = device_codecs, random.Random(5)
    sizes = [TOKENS * HEADS * DIM * (120 if number in (1, 31, 34) else 1) for number in range(70)]
    parts = [
        chance.randbytes(2 * size) if number in (3, 40) else drawn(number, size)
        for number, size in enumerate(sizes)
    ]
    found, text = by_processor(Q8, parts)
    assert {taken for taken, _ in found} == {RAW, Q8}
    room = sum(map(len, parts))
    into = device._room(room, 1)
    rows = [(device._put(np.frombuffer(part, np.uint8)), len(part), 0, 0, *GRID) for part in parts]
    device.coder.encode(
        Q8, BF16, np.array(rows, RAW_PART), np.array([(into, room)], PAYLOAD), device.stream
    )
    results = device.coder.finish()
    assert [(RAW if one["kept"] else Q8, one["bytes"]) for one in results] == found
    ends = np.cumsum([size for _, size in found])
    assert results["offset"].tolist() == [0, *ends[:-1].tolist()]
    assert device._get(into, room)[: len(text)].tobytes() == text
    device._free()


@pytest.mark.parametrize("codec", ALL)
def test_damaged_parts_are_named_and_do_not_affect_others(
    device_codecs: DeviceCodecs, codec: int
) -> None:
    device = device_codecs
    chance = random.Random(codec)
    whole = drawn(3)
    [(taken, size)], text = by_processor(codec, [whole])
    assert taken == codec
    by = calibration_of(codec)
    rows, expected = [], []
    for number in range(60):
        mine = bytearray(text)
        if number % 2:
            mine[chance.randrange(size) if number % 4 == 1 else chance.randrange(48)] ^= (
                1 << chance.randrange(8)
            )
        back = bytearray(len(whole))
        place = (codec, 0, size, len(whole))
        if by is None:
            sound = kernels.decode_parts(BF16, mine, [place], back)
        else:
            sound = kernels.decode_calibrated(by.native, BF16, mine, [(0, *place)], False, back)
        expected.append(bytes(back) if sound else None)
        address = device._put(np.frombuffer(mine, np.uint8), 1)
        rows.append((codec, 0, address, size, device._room(len(whole)), len(whole)))
    device.coder.decode(
        codec, BF16, np.array(rows, ENCODED_PART), device.stream, device._device(by)
    )
    for row, result, wanted in zip(rows, device.coder.finish(), expected, strict=True):
        assert bool(result["bad"]) == (wanted is None)
        found = device._get(row[4], len(whole)).tobytes()
        assert wanted is None or found == wanted
        device._get(row[2], size)
    assert all(expected[::2]) and None in expected
    device._free()


def test_a_batch_after_a_damaged_one_is_sound(device_codecs: DeviceCodecs) -> None:
    device, part = device_codecs, drawn(1)
    [(_, size)], text = by_processor(FIX4, [part])
    room = device._room(len(part))
    for damage in (1, 0):
        mine = bytearray(text)
        mine[4] ^= damage  # the number of escapes
        source = device._put(np.frombuffer(mine, np.uint8))
        rows = np.array([(FIX4, -1, source, size, room, len(part))], ENCODED_PART)
        device.coder.decode(FIX4, BF16, rows, device.stream)
        assert device.coder.finish()["bad"].tolist() == [damage]
    assert device._get(room, len(part)).tobytes() == part
    device._free()


@pytest.mark.parametrize("codec", ALL)
def test_decoded_parts_are_the_same_at_any_alignment(
    device_codecs: DeviceCodecs, codec: int
) -> None:
    """Kernels use wide accesses where addresses allow it. Guards follow the last byte of each part."""
    device, whole = device_codecs, drawn(4, 3 * TOKENS * HEADS * DIM)
    by = calibration_of(codec)
    for part in (whole, whole[: TOKENS * HEADS * DIM * 2]):
        [(taken, size)], text = by_processor(codec, [part])
        assert taken == codec
        back = bytearray(len(part))
        place = (codec, 0, size, len(part))
        if by is None:
            assert kernels.decode_parts(BF16, text, [place], back) == 1
        else:
            assert kernels.decode_calibrated(by.native, BF16, text, [(0, *place)], False, back) == 1
        rows = [
            (codec, 0, device._put(np.frombuffer(text, np.uint8), shift), size,
             device._room(len(part), raw_shift), len(part))
            for shift in range(9) for raw_shift in (0, 2, 4, 8)
        ]  # fmt: skip
        device.coder.decode(
            codec, BF16, np.array(rows, ENCODED_PART), device.stream, device._device(by)
        )
        assert not device.coder.finish()["bad"].any()
        for _, _, address, _, room, _ in rows:
            assert device._get(room, len(part)).tobytes() == back
            device._get(address, size)
        device._free()


def test_a_started_batch_runs_asynchronously(
    fake_cuda: FakeCuda, device_codecs: DeviceCodecs
) -> None:
    device = device_codecs
    part = drawn(1)
    [(_, size)], text = by_processor(R32, [part])
    source, room = device._put(np.frombuffer(text, np.uint8)), device._room(len(part))
    before = ctypes.string_at(room, len(part))
    fake_cuda.hold()
    row = (R32, -1, source, size, room, len(part))
    device.coder.decode(R32, BF16, np.array([row], ENCODED_PART), device.stream)
    assert ctypes.string_at(room, len(part)) == before
    fake_cuda.hold(False)
    assert not device.coder.finish()["bad"].any()
    assert ctypes.string_at(room, len(part)) == part
    device._free()


def raw_rows(*rows: tuple[int, ...]) -> Any:
    return np.array([(*row, *GRID) for row in rows], RAW_PART)


@pytest.mark.parametrize(
    ("parts", "payloads", "text"),
    [(raw_rows((4097, 64, 0, -1)), [(0, 64)], "not aligned to elements of 2 bytes"),
     (raw_rows((4096, 1 << 31, 0, -1)), [(0, 1 << 31)], "at most 2147483647"),
     (raw_rows((4096, 64, 0, -1)), [(0, 63)], "too little room"),
     (raw_rows((4096, 64, 1, -1)), [(0, 64)], "with an unknown payload"),
     (raw_rows((4096, 64, 1, -1), (4096, 64, 0, -1)), [(0, 64)] * 2, "not in the order")],
)  # fmt: skip
def test_parts_that_can_not_be_encoded_are_refused_before_any_work_is_queued(
    device_codecs: DeviceCodecs, parts: Any, payloads: list[tuple[int, int]], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        device_codecs.coder.encode(
            R32, BF16, parts, np.array(payloads, PAYLOAD), device_codecs.stream
        )


def test_parts_of_another_codec_or_calibration_are_refused(device_codecs: DeviceCodecs) -> None:
    device = device_codecs
    by = device._device(calibration_of(ECSQ))
    parts = np.array([(FIX4, -1, 4096, 64, 4096, 64)], ENCODED_PART)
    with pytest.raises(ValueError, match="another codec than 2"):
        device.coder.decode(R32, BF16, parts, device.stream)
    with pytest.raises(ValueError, match="calibration for 7"):
        device.coder.decode(FIX4, BF16, parts, device.stream, by)
    beyond = np.array([(ECSQ, 1, 4096, 64, 4096, 64)], ENCODED_PART)
    with pytest.raises(IndexError, match="1 is outside of a calibration of 1 parts"):
        device.coder.decode(ECSQ, BF16, beyond, device.stream, by)


def test_a_calibration_without_a_size_of_groups_is_refused() -> None:
    """The first part would divide by it, which ends the process."""
    known = np.zeros(1, codecs.KNOWN_PART)
    with pytest.raises(ValueError, match="group_tokens: must be at least 1"):
        codecs.DeviceBatch(CACHEGEN, BF16, False, 0, known, 0)
    codecs.DeviceBatch(ECSQ, BF16, False, 0, known, 0)


@pytest.mark.parametrize(
    ("codec", "into", "raw_bytes", "text"),
    [(R32, 4097, 64, "not aligned to elements of 2 bytes"), (256, 4096, 64, "another codec than 2"),
     (R32, 4096, 1 << 31, "2147483648 bytes, at most 2147483647")],
)  # fmt: skip
def test_parts_that_can_not_be_decoded_are_refused_before_any_work_is_queued(
    device_codecs: DeviceCodecs, codec: int, into: int, raw_bytes: int, text: str
) -> None:
    """A batch after the refused one is sound: the refused one has written a part of its tables."""
    device, part = device_codecs, drawn(1)
    [(_, size)], encoded = by_processor(R32, [part])
    source, room = device._put(np.frombuffer(encoded, np.uint8)), device._room(len(part))
    sound = (R32, -1, source, size, room, len(part))
    rows = np.array([sound, (codec, -1, 4096, 64, into, raw_bytes)], ENCODED_PART)
    for _ in range(2):  # the second time there is memory
        with pytest.raises(ValueError, match=text):
            device.coder.decode(R32, BF16, rows, device.stream)
        device.coder.decode(R32, BF16, rows[:1], device.stream)
        assert not device.coder.finish()["bad"].any()
    assert device._get(room, len(part)).tobytes() == part
    device._free()


def test_an_empty_batch_is_valid(device_codecs: DeviceCodecs) -> None:
    device_codecs.coder.decode(R32, BF16, np.zeros(0, ENCODED_PART), device_codecs.stream)
    assert len(device_codecs.coder.finish()) == 0


def test_a_source_that_does_not_compile_is_an_error_and_leaves_no_work(
    device_codecs: DeviceCodecs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(text: str, architecture: str) -> bytes:
        raise CudaError("NVRTC is not installed: install nvidia-cuda-nvrtc")

    monkeypatch.setattr(codecs, "compile_kernel", refused)
    parts = np.array([(Q8, -1, 4096, 64, 4096, 64)], ENCODED_PART)
    with pytest.raises(CudaError, match="install nvidia-cuda-nvrtc"):
        device_codecs.coder.decode(Q8, BF16, parts, device_codecs.stream)
    device_codecs.coder.decode(R32, BF16, parts[:0], device_codecs.stream)
    assert len(device_codecs.coder.finish()) == 0
