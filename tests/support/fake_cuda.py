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
from support.cached import compiler, digest, files_in, made_once

HERE = Path(__file__).parents[1] / "cuda"
KERNELS = Path(__file__).parents[2] / "kernels"
KINDS = ("streams", "events", "device memory", "pinned", "registered", "modules", "contexts")
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
WAIT_S = 60.0

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
               "-pthread", *include, str(HERE / "driver.cpp")]  # fmt: skip
    sources = files_in(HERE, KERNELS / "include", KERNELS / "cuda", suffixes=(".h", ".cu", ".cpp"))
    sources.append(Path(f"{toolkit()}/include/cuda.h"))

    def make(library: Path) -> None:
        done = subprocess.run(
            [*command, "-o", str(library)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    return made_once(digest(compiler("g++"), *command, *sources) + ".so", make)


class FakeCuda:
    """The controls of the library. Host memory that is passed to `device` counts as device memory."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.library = ctypes.CDLL(self.path)
        self._kept: list[Any] = []

    def device(self, array: Bytes) -> Bytes:
        self.library.fake_device_memory(
            ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        )
        self._kept.append(array)
        return array

    def forget(self) -> None:
        """Reset the library: it forgets its memory and the settings of the test."""
        self.hold(False)
        self.library.fake_delay(0)
        self.library.fake_mend()
        self.library.fake_refuse_registration(0)
        for array in self._kept:
            if isinstance(array, np.ndarray):
                self.library.fake_forget_memory(ctypes.c_void_p(array.ctypes.data))
        self._kept = []

    def hold(self, held: bool = True) -> None:
        """Let no copy begin from now on, or let them continue."""
        self.library.fake_hold(int(held))

    def delay(self, microseconds: int) -> None:
        """Delay each copy by a random time up to this one."""
        self.library.fake_delay(microseconds)

    def live(self) -> dict[str, int]:
        """Count the objects that were created and not freed."""
        counts = {name: self.library.fake_live(kind) for kind, name in enumerate(KINDS)}
        given = sum(isinstance(one, np.ndarray) for one in self._kept)
        counts["device memory"] -= given
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
        call = HOST_FUNCTION(lambda _: work())
        self._kept.append(call)
        handle = ctypes.c_void_p(stream)
        self.library.cuCtxSetCurrent(ctypes.c_void_p(1))
        assert self.library.cuLaunchHostFunc(handle, call, None) == 0

    def driver(self) -> cuda.Driver:
        return cuda.Driver(0, self.path)

    def copier(self, monkeypatch: pytest.MonkeyPatch, way: Any = "auto") -> cuda.Copier:
        """Return a copier whose kernel runs on the host."""
        monkeypatch.setattr(blocks, "compile_kernel", lambda text, architecture: b"host\0")
        return cuda.Copier(self.driver(), way)


def soon(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"still not so after {WAIT_S} s"
        time.sleep(0.001)
