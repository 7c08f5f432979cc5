"""The codec functions of the kernels, run on a device, so that the tests of a processor's level also test it.
The device is real, or simulated by the fake driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import kvtier_kernels as kernels
from kvtier_kernels.cuda import Driver
from kvtier_kernels.cuda.codecs import (
    ENCODED_PART,
    FIX4,
    PAYLOAD,
    RAW,
    RAW_PART,
    Codecs,
    Coder,
    DeviceCalibration,
    calibration,
)

Bytes = npt.NDArray[np.uint8]
NO_GRID = (0, 0, 0, False)
DEVICE = "cuda"  # in addition to the levels of a processor
GUARD, GUARD_BYTES = 0x5A, 64


class Calibration:
    """The arguments of a test's calibration, which a device needs too."""

    def __init__(self, codec: int, level: int, group: int, ropes: Any, parts: Any) -> None:
        self.native = NATIVE_CALIBRATION(codec, level, group, ropes, parts)
        self.said = (codec, level, group, list(ropes), list(parts))


NATIVE_CALIBRATION = kernels.Calibration


class DeviceCodecs:
    """Places every buffer between guards, and encoded bytes `shift` bytes after an aligned address."""

    def __init__(self, driver: Driver, shift: int = 1) -> None:
        self.driver, self.shift = driver, shift
        self.codecs = Codecs(driver)
        self.coder = Coder(self.codecs)
        self.stream = driver.stream()
        self._memory: list[tuple[int, int, int]] = []  # start, bytes, bytes with guards
        self._known: dict[int, DeviceCalibration] = {}
        self._kept: list[Calibration] = []

    def close(self) -> None:
        for known in self._known.values():
            known.close()
        self.coder.close()
        self.codecs.close()
        self.driver.try_call("cuStreamDestroy_v2", self.stream)

    # --- the functions of kernels ---------------------------------------------------------------------

    def encode_parts(
        self, codec: int, element: int, block: Any, sizes: Sequence[int], into: Any, grids: Any = (),
    ) -> list[tuple[int, int]]:  # fmt: skip
        lies = grids or [NO_GRID] * len(sizes)
        said = [(size, tuple(grid), -1) for size, grid in zip(sizes, lies, strict=True)]
        return self._encode(codec, element, block, said, into, None, False, 0)

    def encode_calibrated(
        self, by: Calibration, element: int, block: Any, sizes: Sequence[tuple[int, int]],
        heads_first: bool, position: int, into: Any,
    ) -> list[tuple[int, int]]:  # fmt: skip
        said = [(size, NO_GRID, known) for known, size in sizes]
        return self._encode(by.said[0], element, block, said, into, by, heads_first, position)

    def decode_parts(self, element: int, payload: Any, places: Any, into: Any) -> int:
        return self._decode(element, payload, [(-1, *one) for one in places], into, None, False)

    def decode_calibrated(
        self, by: Calibration, element: int, payload: Any, places: Any, heads_first: bool, into: Any
    ) -> int:
        return self._decode(element, payload, places, into, by, heads_first)

    # --- implementation --------------------------------------------------------------------------

    def _encode(
        self, codec: int, element: int, block: Any, said: list[tuple[int, tuple[Any, ...], int]], into: Any,
        by: Calibration | None, heads_first: bool, position: int,
    ) -> list[tuple[int, int]]:  # fmt: skip
        source, target = np.frombuffer(block, np.uint8), np.frombuffer(into, np.uint8)
        parts, at = [], 0
        for size, grid, known in said:
            parts.append((self._put(source[at : at + size]), size, 0, known, *grid))
            at += size
        room = self._room(at, self.shift)
        self.coder.encode(
            codec, element, np.array(parts, RAW_PART), np.array([(room, at)], PAYLOAD), self.stream,
            self._device(by), heads_first, position,
        )  # fmt: skip
        results = self.coder.finish()
        found, total = [], 0
        for one in results:
            assert one["offset"] == total
            found.append((RAW if one["kept"] else codec, int(one["bytes"])))
            total += int(one["bytes"])
        target[:total] = self._get(room, at)[:total]
        for part, (size, _, _) in zip(parts, said, strict=True):
            self._get(part[0], size)
        self._free()
        return found

    def _decode(
        self, element: int, payload: Any, places: Any, into: Any, by: Calibration | None,
        heads_first: bool,
    ) -> int:  # fmt: skip
        source, target = np.frombuffer(payload, np.uint8), np.frombuffer(into, np.uint8)
        parts, ends, at = [], [], 0
        beyond = len(places)
        for number, (known, codec, offset, nbytes, raw_bytes) in enumerate(places):
            if offset > len(source) or nbytes > len(source) - offset:
                beyond = number
                break
            text = self._put(source[offset : offset + nbytes], self.shift)
            parts.append((codec, known, text, nbytes, self._room(raw_bytes), raw_bytes))
            ends.append((at, at + raw_bytes))
            at += raw_bytes
        bad = [False] * len(parts)
        other = by.said[0] if by is not None else FIX4
        for codec in {part[0] for part in parts} - {RAW} or {other}:
            chosen = [n for n, part in enumerate(parts) if part[0] in (RAW, codec)]
            rows = np.array([parts[n] for n in chosen], ENCODED_PART)
            self.coder.decode(codec, element, rows, self.stream, self._device(by), heads_first)
            for n, result in zip(chosen, self.coder.finish(), strict=True):
                bad[n] = bool(result["bad"])
        for (_, _, text, nbytes, room, raw_bytes), (start, end) in zip(parts, ends, strict=True):
            target[start:end] = self._get(room, raw_bytes)
            self._get(text, nbytes)
        self._free()
        return bad.index(True) if any(bad) else beyond

    def _device(self, by: Calibration | None) -> DeviceCalibration | None:
        if by is None:
            return None
        if id(by) not in self._known:
            self._known[id(by)] = calibration(self.driver, *by.said)
            self._kept.append(by)
        return self._known[id(by)]

    def _room(self, nbytes: int, shift: int = 0) -> int:
        return self._put(np.full(nbytes, GUARD, np.uint8), shift)

    def _put(self, content: Bytes, shift: int = 0) -> int:
        whole = np.full(len(content) + 2 * GUARD_BYTES + shift, GUARD, np.uint8)
        start = GUARD_BYTES + shift
        whole[start : start + len(content)] = content
        memory = self.driver.device_memory(len(whole))
        self._copy(memory, whole, inwards=True)
        self._memory.append((memory + start, len(content), memory))
        return memory + start

    def _get(self, address: int, nbytes: int) -> Bytes:
        """Return the bytes there; the guards around them must be unchanged."""
        [(start, size, memory)] = [one for one in self._memory if one[0] == address]
        assert size == nbytes
        first = start - memory
        whole = np.zeros(first + size + GUARD_BYTES, np.uint8)
        self._copy(memory, whole, inwards=False)
        assert (whole[:first] == GUARD).all() and (whole[first + size :] == GUARD).all()
        return whole[first : first + size]

    def _copy(self, memory: int, content: Bytes, inwards: bool) -> None:
        pinned = self.driver.pinned_memory(len(content))
        here = ctypes.addressof(pinned)
        if inwards:
            ctypes.memmove(here, content.ctypes.data, len(content))
            self.driver.copy(memory, here, len(content), self.stream)
        else:
            self.driver.copy(here, memory, len(content), self.stream)
        self.driver.call("cuStreamSynchronize", self.stream)
        if not inwards:
            ctypes.memmove(content.ctypes.data, here, len(content))
        self.driver.free_pinned(pinned)

    def _free(self) -> None:
        for _, _, memory in self._memory:
            self.driver.try_call("cuMemFree_v2", memory)
        self._memory = []


PATCHED = ("encode_parts", "decode_parts", "encode_calibrated", "decode_calibrated")


def use(device: DeviceCodecs, setattr_: Callable[[Any, str, Any], None]) -> None:
    """Replace the functions of kernels by those of this device."""
    for name in PATCHED:
        setattr_(kernels, name, getattr(device, name))
    setattr_(kernels, "Calibration", Calibration)
