"""Which NVRTC compiles if several are installed: a driver loads no code of a later major version of CUDA."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvtier_kernels.cuda import CudaError, compile_kernel
from kvtier_kernels.cuda.driver import Architecture
from support.fake_cuda import FakeCuda

# NVRTC's functions; the machine code is the version. No real release has this minor version. As NVIDIA's, it
# opens its second library by name when it compiles.
SOURCE = """
#include <cstddef>
#include <cstring>
#include <dlfcn.h>
extern "C" {
int nvrtcVersion(int* major, int* minor) { *major = MAJOR; *minor = 99; return 0; }
int nvrtcCreateProgram(void**, ...) { return 0; }
int nvrtcCompileProgram(void*, ...) {
    return dlopen("libnvrtc-builtins.so." NAME ".99", RTLD_NOW) == nullptr;
}
int nvrtcDestroyProgram(void*) { return 0; }
int nvrtcGetCUBINSize(void*, size_t* size) { *size = 2; return 0; }
int nvrtcGetCUBIN(void*, char* code) { std::memcpy(code, NAME, 2); return 0; }
const char* nvrtcGetErrorString(int) { return "no"; }
}
"""


@pytest.fixture
def compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the toolkit with the compilers of CUDA 12 and 13. Returns the folder of its libraries."""
    folder = tmp_path / "lib64"
    folder.mkdir()
    for major in (12, 13):
        compiled(folder / f"libnvrtc.so.{major}", SOURCE, f"-DMAJOR={major}", f'-DNAME="{major}"')
        builtins = f"libnvrtc-builtins.so.{major}.99"
        compiled(folder / builtins, "", f"-Wl,-soname,{builtins}")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    return folder


def compiled(to: Path, source: str, *options: str) -> None:
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(to), *options]
    subprocess.run(command, input=source, text=True, check=True)


def architecture(major: int) -> Architecture:
    found = Architecture("sm_90")
    found.cuda = (major, 4)
    return found


@pytest.mark.parametrize("major", [12, 13])
def test_the_newest_compiler_that_the_driver_allows_is_used(compilers: Path, major: int) -> None:
    assert compile_kernel("", architecture(major)) == str(major).encode()


def test_the_driver_s_own_version_counts(compilers: Path, fake_cuda: FakeCuda) -> None:
    fake_cuda.library.fake_version(12090)
    driver = fake_cuda.driver()
    assert compile_kernel("", driver.architecture) == b"12"
    driver.close()


def test_a_compiler_that_is_too_new_is_said(
    compilers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        CudaError, match="CUDA 11: update the driver, or install nvidia-cuda-nvrtc==11"
    ):
        compile_kernel("", architecture(11))
