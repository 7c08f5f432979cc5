"""A CUDA driver without a device (tests/cuda/driver.cpp), built where the toolkit's header is."""

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

HERE = Path(__file__).parent / "cuda"
KERNELS = Path(__file__).parents[1] / "kernels"
KINDS = ("streams", "events", "device memory", "pinned", "registered", "modules", "contexts")
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
WAIT_S = 10.0

Bytes = npt.NDArray[np.uint8]


@cache
def toolkit() -> Path | None:
    """Where CUDA's toolkit is."""
    nvcc = shutil.which("nvcc")
    places = [
        os.environ.get("CUDA_HOME"),
        nvcc and str(Path(nvcc).resolve().parents[1]),
        "/usr/local/cuda",
    ]
    return next((Path(one) for one in places if one and Path(one, "include/cuda.h").exists()), None)


def build(folder: Path) -> Path:
    """The library, in this folder."""
    library = folder / "libfakecuda.so"
    include = [f"-I{toolkit()}/include", *(f"-I{KERNELS / name}" for name in ("include", "cuda"))]
    command = ["g++", "-std=c++20", "-O1", "-Wall", "-Werror", "-ffp-contract=off", "-fPIC", "-shared",
               "-pthread", *include, str(HERE / "driver.cpp"), "-o", str(library)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library


class FakeCuda:
    """The library's knobs. Host memory that is given to `device` counts as the device's."""

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
        """Let go of what was given, and of what a test has set."""
        self.hold(False)
        self.library.fake_delay(0)
        self.library.fake_mend()
        self.library.fake_refuse_registration(0)
        for array in self._kept:
            if isinstance(array, np.ndarray):
                self.library.fake_forget_memory(ctypes.c_void_p(array.ctypes.data))
        self._kept = []

    def hold(self, held: bool = True) -> None:
        """No copy begins from now on; or they go on."""
        self.library.fake_hold(int(held))

    def delay(self, microseconds: int) -> None:
        """Each copy waits for up to so long."""
        self.library.fake_delay(microseconds)

    def live(self) -> dict[str, int]:
        """What was made and not freed."""
        counts = {name: self.library.fake_live(kind) for kind, name in enumerate(KINDS)}
        given = sum(isinstance(one, np.ndarray) for one in self._kept)
        counts["device memory"] -= given
        return counts

    @property
    def held(self) -> int:
        """How many copies have begun, and stand before a hold."""
        return int(self.library.fake_held())

    @property
    def broken(self) -> bool:
        """Whether something touched memory that the device can't reach."""
        return bool(self.library.fake_broken())

    def later(self, stream: int, work: Callable[[], None]) -> None:
        """Have a stream do this when it comes to it, as a kernel of the engine's would be."""
        call = HOST_FUNCTION(lambda _: work())
        self._kept.append(call)
        handle = ctypes.c_void_p(stream)
        self.library.cuCtxSetCurrent(ctypes.c_void_p(1))
        assert self.library.cuLaunchHostFunc(handle, call, None) == 0

    def driver(self) -> cuda.Driver:
        return cuda.Driver(0, self.path)

    def copier(self, monkeypatch: pytest.MonkeyPatch, way: Any = "auto") -> cuda.Copier:
        """A copier whose kernel is the host's."""
        monkeypatch.setattr(blocks, "compile_kernel", lambda text, architecture: b"host\0")
        return cuda.Copier(self.driver(), way)


def soon(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"still not so after {WAIT_S} s"
        time.sleep(0.001)
