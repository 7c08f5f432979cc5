"""Compiles kernels to machine code with NVRTC, which torch's CUDA build and the CUDA toolkit
contain."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from importlib import resources
from pathlib import Path

from kvtier_kernels.cuda.driver import Architecture, CudaError

PATTERN = "libnvrtc.so*"
BUILTINS = "libnvrtc-builtins.so*"
# The codecs define results of floats that are rounded after each operation and keep denormals.
OPTIONS = (b"--std=c++17", b"--fmad=false", b"--ftz=false", b"--prec-div=true")
# NVRTC's own: without it, NVRTC 13.0 refuses lambdas in functions of the device, which nvcc accepts.
FOR_DEVICE = b"--device-as-default-execution-space"
# The headers of the kernels: those of this project, and the used part of the standard library,
# which no driver contains.
HEADERS = (
    "addresses.h", "lanes.h", "parts.h", "streams.h", "codec/part.h", "codec/lossless.h",
    "codec/quantized.h", "codec/calibrated.h", "codec/digest.h",
)  # fmt: skip
STANDARD = {
    "cstddef": "#pragma once\nusing size_t = decltype(sizeof 0);\n",
    "cstdint": """#pragma once
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;
""",
    "cstring": "#pragma once\nnamespace std {\nusing ::memcpy;\n}\n",
}


def source(name: str) -> str:
    """The source of a kernel, or of a header of kernels."""
    return (resources.files(__package__) / name).read_text()


def _candidates() -> list[str]:
    found = []
    # NVIDIA's wheels; their layout changes between versions.
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    for folder in folders:
        found += sorted(map(str, folder.glob(f"*/lib/{PATTERN}")), reverse=True)
    root = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    found += sorted(map(str, root.glob(f"lib64/{PATTERN}")), reverse=True)
    return [*found, "libnvrtc.so.13", "libnvrtc.so.12"]


def _version(library: ctypes.CDLL) -> tuple[int, int]:
    major, minor = c_int(), c_int()
    library.nvrtcVersion(byref(major), byref(minor))
    return major.value, minor.value


def _library(newest: int | None) -> ctypes.CDLL:
    """The newest NVRTC of at most this major version of CUDA: a driver loads no code of a later one."""
    found: list[tuple[tuple[int, int], str, ctypes.CDLL]] = []
    for candidate in _candidates():
        try:
            library = ctypes.CDLL(candidate)
            found.append((_version(library), candidate, library))
        except (OSError, AttributeError):
            continue
    if not found:
        raise CudaError("NVRTC is not installed: install nvidia-cuda-nvrtc")
    fits = [one for one in found if newest is None or one[0][0] <= newest]
    if not fits:
        has = ", ".join(sorted({".".join(map(str, version)) for version, _, _ in found}))
        package = (
            f"nvidia-cuda-nvrtc-cu{newest}" if newest == 12 else f"nvidia-cuda-nvrtc=={newest}.*"
        )
        raise CudaError(
            f"NVRTC {has} is newer than the driver, which supports CUDA {newest}: update the driver, or "
            f"install {package}"
        )
    _, path, library = max(fits, key=lambda one: one[0])
    _load_builtins(path)
    return library


def _load_builtins(path: str) -> None:
    """NVRTC opens this library by its name, and in NVIDIA's wheels it does not search its own folder."""
    if Path(path).is_absolute():
        for beside in sorted(Path(path).parent.glob(BUILTINS)):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(beside))


def compile_kernel(text: str, architecture: str) -> bytes:
    """Return machine code for an architecture such as sm_90; CudaError has the compiler's message. The
    architecture of a Driver also selects a compiler whose code this driver loads."""
    cuda = architecture.cuda if isinstance(architecture, Architecture) else None
    nvrtc = _library(None if cuda is None else cuda[0])
    nvrtc.nvrtcGetErrorString.restype = c_char_p
    program = c_void_p()

    def call(name: str, *arguments: object) -> None:
        result = getattr(nvrtc, name)(*arguments)
        if result:
            why = (nvrtc.nvrtcGetErrorString(result) or b"").decode()
            raise CudaError(f"{name}: {why}{_log(nvrtc, program)}")

    options = [f"--gpu-architecture={architecture}".encode(), FOR_DEVICE, *OPTIONS]
    headers = STANDARD | {name: source(name) for name in HEADERS}
    texts = (c_char_p * len(headers))(*(one.encode() for one in headers.values()))
    names = (c_char_p * len(headers))(*(one.encode() for one in headers))
    call(
        "nvrtcCreateProgram",
        byref(program),
        text.encode(),
        b"kernel.cu",
        c_int(len(headers)),
        texts,
        names,
    )
    try:
        given = (c_char_p * len(options))(*options)
        call("nvrtcCompileProgram", program, c_int(len(options)), given)
        size = c_size_t()
        call("nvrtcGetCUBINSize", program, byref(size))
        binary = ctypes.create_string_buffer(size.value)
        call("nvrtcGetCUBIN", program, binary)
        return binary.raw
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def _log(nvrtc: ctypes.CDLL, program: c_void_p) -> str:
    size = c_size_t()
    if not program or nvrtc.nvrtcGetProgramLogSize(program, byref(size)):
        return ""
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    return ": " + log.value.decode(errors="replace").strip()
