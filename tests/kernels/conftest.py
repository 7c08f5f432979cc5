"""Mappings, slots and guarded memory for the kernels' tests."""

import os
import random
import struct
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

import kvtier_kernels as kernels
from kvtier_kernels.cuda import Driver, codecs, compile_kernel
from support.cuda_codecs import DEVICE, DeviceCodecs, use

ON_GPU = os.environ.get("KVTIER_DEVICE") == "gpu"
Bytes = npt.NDArray[np.uint8]
MakeMapping = Callable[..., kernels.Mapping]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a GPU, tests of the driver without a device are left out: they read its memory as the host's."""
    fake = [one for one in items if "fake_cuda" in getattr(one, "fixturenames", ())]
    if ON_GPU and fake:
        config.hook.pytest_deselected(items=fake)
        items[:] = [one for one in items if one not in fake]


@pytest.fixture
def make_mapping() -> MakeMapping:
    def make(size: int, writable: bool = True, content: bytes = b"") -> kernels.Mapping:
        fd = os.memfd_create("test")
        try:
            os.ftruncate(fd, size)
            os.pwrite(fd, content, 0)
            return kernels.Mapping(fd, size, writable)
        finally:
            os.close(fd)

    return make


@pytest.fixture(params=kernels.implementations("copy"))
def copies(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each implementation of the copies in turn."""
    kernels.force("copy", request.param)
    yield request.param
    kernels.force("copy", "auto")


@pytest.fixture
def device_codecs(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DeviceCodecs]:
    """A device's codecs: the kernels' source built for the host, or, if KVTIER_DEVICE is `gpu`, the
    first GPU."""
    if ON_GPU:
        driver = Driver(0)
        monkeypatch.setattr(codecs, "compile_kernel", compiled_once)
    else:
        driver = request.getfixturevalue("fake_cuda").driver()
        monkeypatch.setattr(codecs, "compile_kernel", lambda text, architecture: b"host\0")
    device = DeviceCodecs(driver)
    yield device
    device.close()
    driver.close()


compiled_once = cache(compile_kernel)


@pytest.fixture(params=[*kernels.implementations("codec"), DEVICE])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The implementations of the codecs: each level of processors in turn, and a device."""
    if request.param == DEVICE:
        use(request.getfixturevalue("device_codecs"), monkeypatch.setattr)
    else:
        kernels.force("codec", request.param)
    yield request.param
    kernels.force("codec", "auto")


@pytest.fixture
def random_bytes() -> Callable[..., Bytes]:
    def make(size: int, seed: int = 0) -> Bytes:
        return np.frombuffer(random.Random(seed).randbytes(size), np.uint8).copy()

    return make


@pytest.fixture
def guarded() -> type["Guarded"]:
    return Guarded


@pytest.fixture
def packed() -> Callable[..., bytes]:
    """Packs (extent, offset) or (extent, offset, generation) records."""

    def pack(*slots: tuple[int, ...]) -> bytes:
        return b"".join(
            struct.pack("<IIQQ", slot[0], 0, slot[1], slot[2] if len(slot) == 3 else 0)
            for slot in slots
        )

    return pack


class Guarded:
    """An array that starts `shift` bytes after a page boundary, between guard bytes that must not change."""

    def __init__(self, size: int, shift: int) -> None:
        self.base = np.full(size + 3 * 4096 + shift, 0xA5, np.uint8)
        self.start = -self.base.ctypes.data % 4096 + 4096 + shift
        self.array = self.base[self.start : self.start + size]
        self.array[:] = 0

    def intact(self) -> bool:
        end = self.start + len(self.array)
        return bool((self.base[: self.start] == 0xA5).all() and (self.base[end:] == 0xA5).all())
