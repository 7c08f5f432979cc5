"""A CUDA driver without a device (tests/cuda/driver.cpp); it is built if cuda.h is installed."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtier_kernels import cuda
from kvtier_kernels.cuda import blocks
from support import host_functions
from support.cached import compiler, digest, files_in, made_once

HERE = Path(__file__).parents[1] / "cuda"
KERNELS = Path(__file__).parents[2] / "kernels"
KINDS = (
    "streams", "events", "device memory", "pinned", "registered", "modules", "contexts", "allocations",
    "reservations", "mapped", "graphs",
)  # fmt: skip
WAIT_S = 60.0
UNKNOWN = 999  # CUDA_ERROR_UNKNOWN, for example of a device that has left the bus
MOST_DEVICES, DEVICE_BYTES = 4, 16 << 30

Bytes = npt.NDArray[np.uint8]


@cache
def toolkit() -> Path | None:
    """Return the folder of the CUDA toolkit."""
    nvcc = shutil.which("nvcc")
    places = [
        os.environ.get("CUDA_HOME"),
        nvcc and str(Path(nvcc).resolve().parents[1]),
        "/usr/local/cuda",
    ]
    return next((Path(one) for one in places if one and Path(one, "include/cuda.h").exists()), None)


def build() -> Path:
    """Return the library, which is cached from run to run (support/cached.py)."""
    include = [f"-I{toolkit()}/include", *(f"-I{KERNELS / name}" for name in ("include", "cuda"))]
    command = ["g++", "-std=c++20", "-O1", "-Wall", "-Werror", "-ffp-contract=off", "-fPIC", "-shared",
               "-pthread", "-Wl,-z,defs", *include,
               *(str(HERE / f"driver{name}.cpp") for name in ("", "_memory", "_streams"))]  # fmt: skip
    sources = files_in(HERE, KERNELS / "include", KERNELS / "cuda", suffixes=(".h", ".cu", ".cpp"))
    sources.append(Path(f"{toolkit()}/include/cuda.h"))

    def make(library: Path) -> None:
        done = subprocess.run(
            [*command, "-o", str(library)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    return made_once(digest(compiler("g++"), *command, *sources) + ".so", make)


def environment(folder: Path, library: Path, **settings: int) -> dict[str, str]:
    """Return the environment in which other processes find the library as libcuda.so.1, in this folder.
    Settings are `devices`, `bytes` of each device, and the `version` of the driver."""
    link = folder / "libcuda.so.1"
    if not link.exists():
        link.symlink_to(library)
    set_before = os.environ.get("LD_LIBRARY_PATH")
    folders = [str(folder), *([set_before] if set_before else [])]
    chosen = {f"KVTIER_CUDA_{name.upper()}": str(value) for name, value in settings.items()}
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(folders), **chosen}


class FakeCuda:
    """The controls of the library. Host memory that is passed to `device` counts as device memory."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.library = ctypes.CDLL(self.path)
        self.library.fake_calls.restype = ctypes.c_long
        self._kept: list[Bytes] = []

    def device(self, array: Bytes) -> Bytes:
        self.library.fake_device_memory(
            ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        )
        self._kept.append(array)
        return array

    def pin(self, array: Bytes) -> None:
        """Do nothing: `copy` reads and writes any memory."""

    def copy(self, stream: int, to: int, source: int, nbytes: int) -> None:
        """Enqueue a copy in a stream, as an engine does. It is neither held nor delayed."""
        handle, count = ctypes.c_void_p(stream), ctypes.c_size_t(nbytes)
        self.library.fake_copy(handle, ctypes.c_void_p(to), ctypes.c_void_p(source), count)

    def forget(self) -> None:
        """Reset the library: it forgets its memory and the settings of the test."""
        self.hold(False)
        self.library.fake_delay(0)
        self.library.fake_mend()
        self.library.fake_refuse_registration(0)
        self.library.fake_devices(1)
        self.library.fake_version(13000)
        for device in range(MOST_DEVICES):
            self.library.fake_bytes(device, ctypes.c_size_t(DEVICE_BYTES))
            self.library.fake_taken(device, 0)
        for array in self._kept:
            self.library.fake_forget_memory(ctypes.c_void_p(array.ctypes.data))
        self._kept = []
        self.library.fake_forget_objects()

    def hold(self, held: bool = True) -> None:
        """Let no copy begin from now on, or let them continue."""
        self.library.fake_hold(int(held))

    def delay(self, microseconds: int) -> None:
        """Delay each copy by a random time up to this one."""
        self.library.fake_delay(microseconds)

    def live(self) -> dict[str, int]:
        """Count the objects that were created and not freed."""
        counts = {name: self.library.fake_live(kind) for kind, name in enumerate(KINDS)}
        counts["device memory"] -= len(self._kept)
        return counts

    @property
    def held(self) -> int:
        """Count the copies that have begun and wait because of `hold`."""
        return int(self.library.fake_held())

    @property
    def broken(self) -> bool:
        """Return whether a copy used memory that the device cannot access."""
        return bool(self.library.fake_broken())

    def later(self, stream: int, work: Callable[[], None]) -> None:
        """Enqueue a function in a stream, as an engine does with a kernel."""
        self.library.fake_later(
            ctypes.c_void_p(stream), host_functions.call, host_functions.kept(work)
        )

    def calls(self, name: str | None = None) -> int:
        """Count the calls of a function of the driver, or of all functions."""
        return int(self.library.fake_calls(None if name is None else name.encode()))

    def devices(self, count: int) -> None:
        """Let the machine have this number of devices, up to four."""
        self.library.fake_devices(count)

    def memory(self, nbytes: int, device: int = 0) -> None:
        """Let a device have this much memory."""
        self.library.fake_bytes(device, ctypes.c_size_t(nbytes))

    def lose(self, device: int = 0, error: int = UNKNOWN) -> None:
        """Let every call for this device return an error, until `mend`."""
        self.library.fake_lose(device, error)

    def mend(self) -> None:
        self.library.fake_mend()

    def driver(self, device: int = 0) -> cuda.Driver:
        return cuda.Driver(device, self.path)

    def copier(self, monkeypatch: pytest.MonkeyPatch, way: Any = "auto") -> cuda.Copier:
        """Return a copier whose kernel runs on the host."""
        monkeypatch.setattr(blocks, "compile_kernel", lambda text, architecture: b"host\0")
        return cuda.Copier(self.driver(), way)


def soon(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"still not so after {WAIT_S} s"
        time.sleep(0.001)
