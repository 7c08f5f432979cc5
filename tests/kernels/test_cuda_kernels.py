"""CUDA's kernels and the driver's functions, as far as they can be tested without a device."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_kernels.cuda import CudaError, codecs, compile_kernel, digests, source
from kvtier_kernels.cuda.blocks import KERNEL, KERNEL_FILE, PIECE, DevicePieces
from kvtier_kernels.cuda.compiler import HEADERS, OPTIONS
from kvtier_kernels.cuda.driver import ARGUMENTS, BATCH
from models import kernels
from support.cached import compiler, digest, files_in, made_once
from support.fake_cuda import toolkit

FOLDER = Path(__file__).parents[2] / "kernels"
KERNELS = sorted((FOLDER / "cuda").glob("*.cu"))
NVCC = ("-Werror", "all-warnings", *(option.decode() for option in OPTIONS))
MOST_REGISTERS = 64  # with this number a processor can run half of its maximum of warps
ARCHITECTURES = (
    pytest.param("sm_80", marks=pytest.mark.slow),
    "sm_90",
    pytest.param("sm_100", marks=pytest.mark.slow),
)
WIDTHS = {"unsigned int": 4, "int": 4, "size_t": 8, "CUdeviceptr": 8, "CUdevice": 4, "CUresult": 4,
          "CUdevice_attribute": 4}  # fmt: skip


def nvcc() -> str:
    found = shutil.which("nvcc")
    if found is None:
        pytest.skip("no nvcc: THE CUDA KERNELS ARE NOT COMPILED HERE")
    return found


def ptx_of(kernel: Path, architecture: str) -> Path:
    """The PTX of a kernel; cached (support/cached.py)."""
    command = [f"-arch={architecture.replace('sm', 'compute')}", *NVCC, "-ptx"]

    def make(into: Path) -> None:
        places = [f"-I{FOLDER / part}" for part in ("cuda", "include")]
        done = subprocess.run(
            [nvcc(), *command, *places, "-o", str(into), str(kernel)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    headers = files_in(FOLDER / "cuda", FOLDER / "include")
    return made_once(digest(compiler(nvcc()), *command, kernel, *headers) + ".ptx", make)


def assembled(ptx: Path, architecture: str) -> str:
    """The assembler's report about the registers of the kernel; cached."""
    command = [f"-arch={architecture}", *NVCC, "-Xptxas", "-v", "-cubin"]

    def make(into: Path) -> None:
        output = into.with_suffix(".cubin")
        done = subprocess.run(
            [nvcc(), *command, "-o", str(output), str(ptx)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert output.read_bytes()[:4] == b"\x7fELF"
        into.write_text(done.stderr)

    return made_once(digest(*command, ptx) + ".registers", make).read_text()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.name)
def test_a_kernel_compiles_without_spills(kernel: Path, architecture: str) -> None:
    reports = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers", assembled(ptx_of(kernel, architecture), architecture), re.DOTALL,
    )  # fmt: skip
    assert {name for name, *_ in reports} == set(named(kernel))
    for name, stores, loads, registers in reports:
        assert (stores, loads) == ("0", "0"), name
        assert int(registers) <= MOST_REGISTERS, name


def named(kernel: Path) -> list[str]:
    """The names of the kernels in a source; those of codecs include one that is common to all."""
    text = kernel.read_text()
    found = re.findall(r"KVTIER_KERNEL\((\w+)\)", text)
    return [*found, codecs.SETTLE] if found else re.findall(r"(kvtier_\w+)\(const", text)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.name)
def test_no_product_and_sum_are_fused(kernel: Path) -> None:
    """PTX states the rounding of each operation on floats, and keeps denormals."""
    operations = set(
        re.findall(
            r"\b(?:add|sub|mul|fma|mad|div|rcp)[a-z.]*\.f32\b", ptx_of(kernel, "sm_90").read_text()
        )
    )
    usual = {"add.rn.f32", "sub.rn.f32", "mul.rn.f32"}
    arithmetic = {
        "codec_lossless.cu": set(),
        "copy_blocks.cu": set(),
        "digest.cu": set(),
        "codec_quantized.cu": usual | {"div.rn.f32", "rcp.rn.f32"},
        "codec_calibrated.cu": usual,
    }
    assert operations == arithmetic[kernel.name]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.name)
def test_a_kernel_compiles_with_the_options_of_an_engine_start(kernel: Path) -> None:
    try:
        binary = compile_kernel(source(kernel.name), "sm_90")
    except CudaError as error:
        if "NVRTC is not installed" not in str(error):
            raise
        pytest.skip(f"{error}: HOW AN ENGINE COMPILES KERNELS IS NOT TESTED HERE")
    assert binary[:4] == b"\x7fELF"
    for name in named(kernel):
        assert name.encode() in binary
    with pytest.raises(CudaError, match="invalid combination"):
        compile_kernel("extern int int;", "sm_90")


def test_the_installed_kernel_source_equals_the_sources() -> None:
    for path in KERNELS:
        assert source(path.name) == path.read_text()
    for name in HEADERS:
        assert source(name) == (FOLDER / ("include" if "/" in name else "cuda") / name).read_text()


def test_the_kernels_that_codecs_launch_exist() -> None:
    others = {KERNEL_FILE, digests.KERNEL_FILE}
    assert others | {one.file for one in codecs.KERNELS.values()} == {path.name for path in KERNELS}
    launched = {KERNEL, digests.KERNEL}
    for one in codecs.KERNELS.values():
        launched |= {*one.decode, *one.begin, one.place, codecs.SETTLE}
    assert launched == {name for path in KERNELS for name in named(path)}


def test_functions_are_called_as_declared_in_the_header() -> None:
    """The number of arguments, and the width of each: a wrong one would not be noticed, or would crash
    an engine."""
    root = toolkit()
    if root is None:
        pytest.skip("no cuda.h: THE DRIVER'S FUNCTIONS ARE NOT CHECKED HERE")
    # With the exported names, which include older versions of functions.
    define = "-D__CUDA_API_VERSION_INTERNAL"
    command = ["g++", "-E", "-P", "-x", "c++", define, f"{root}/include/cuda.h"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    seen = set()
    for name, arguments in re.findall(r"CUresult (cu\w+)\(([^)]*)\);", " ".join(text.split())):
        given = (ARGUMENTS | BATCH).get(name)
        if given is None:
            continue
        declared = [re.sub(r"\bconst\b|\w+$", "", one).strip() for one in arguments.split(",")]
        widths = [
            8 if "*" in one or one in ("CUcontext", "CUstream", "CUevent", "CUmodule", "CUfunction")
            else WIDTHS[one]
            for one in declared
        ]  # fmt: skip
        assert [ctypes.sizeof(one) for one in given] == widths, name
        seen.add(name)
    assert seen == (ARGUMENTS | BATCH).keys()


@st.composite
def paged(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], list[int], int, int, int]:
    """Pieces as (offset, stride, nbytes) that do not overlap; blocks; shifts; a grid."""
    blocks = draw(st.integers(1, 5))
    unit = draw(st.sampled_from([1, 2, 4, 8, 16, 48]))
    rows, at = [], draw(st.integers(0, 3)) * unit
    for _ in range(draw(st.integers(1, 4))):
        nbytes = draw(st.integers(1, 40)) * unit
        if draw(st.integers(0, 7)) == 0:
            nbytes += 40_000 // unit * unit  # more than a unit of the kernel
        stride = nbytes + draw(st.integers(0, 3)) * unit
        rows.append((at, stride, nbytes))
        at += blocks * stride + draw(st.integers(0, 2)) * unit
    ids = draw(st.lists(st.integers(0, blocks - 1), unique=True, max_size=blocks))
    return rows, ids, blocks, draw(st.sampled_from([0, 4, 16])), draw(st.integers(1, 9))


@pytest.mark.parametrize("inwards", [True, False])
def test_the_kernel_copies_the_same_bytes_as_its_model(cuda_library: Path, inwards: bool) -> None:
    """The kernel's own source, run one thread at a time; every byte of both memories is compared."""
    run = ctypes.CDLL(str(cuda_library)).fake_kernel

    @settings(max_examples=150, deadline=None)
    @given(paged())
    def holds(case: tuple[Any, ...]) -> None:
        rows, ids, blocks, shift, grid = case
        numbers = np.random.default_rng(len(rows) * 1000 + grid)
        size = max(offset + blocks * stride for offset, stride, _ in rows)
        raw = numbers.integers(0, 256, size + 64, np.uint8)
        start = -raw.ctypes.data % 16 + shift
        pages = raw[start : start + size]
        where = ([size] * len(rows), [one[0] for one in rows], [one[1] for one in rows],
                 [one[2] for one in rows])  # fmt: skip
        pieces = DevicePieces([pages.ctypes.data] * len(rows), *where, blocks=blocks)
        step = -(-pieces.block_bytes // 4096) * 4096
        extent = numbers.integers(0, 256, max(1, len(ids)) * step + 4096, np.uint8)
        base = -extent.ctypes.data % 4096
        slots = [base + step * (len(ids) - 1 - at) for at in range(len(ids))]
        wanted_pages, wanted_extent = pages.copy(), extent.copy()
        twin = kernels.Pieces([wanted_pages] * len(rows), *where[1:])
        packed = b"".join(kernels.SLOT.pack(0, 0, slot, 0) for slot in slots)
        (kernels.gather if inwards else kernels.scatter)(twin, ids, [wanted_extent], packed)

        table = pieces.split()
        assert table.dtype == PIECE and int(table["nbytes"].sum()) == pieces.block_bytes
        places = np.array([extent.ctypes.data + slot for slot in slots], np.uint64)
        chosen = np.array(ids, np.uint32)
        pointers = [ctypes.c_void_p(one.ctypes.data) for one in (table, places, chosen)]
        counts = [ctypes.c_uint32(len(table)), ctypes.c_uint32(len(ids)), ctypes.c_uint32(inwards)]
        run(pointers[0], counts[0], pointers[1], pointers[2], *counts[1:],
            ctypes.c_uint32(grid), ctypes.c_uint32(64))  # fmt: skip
        assert np.array_equal(pages, wanted_pages) and np.array_equal(extent, wanted_extent)

    holds()


def test_adjacent_pieces_are_merged() -> None:
    """As in an engine that stores the layers of a block together."""
    together = DevicePieces([1 << 20] * 3, [3000] * 3, [0, 100, 200], [300] * 3, [100] * 3, 10)
    assert together.rows.tolist() == [(1 << 20, 300, 0, 300)]
    assert (together.block_bytes, together.blocks) == (300, 10)
    apart = DevicePieces([1 << 20] * 2, [3000] * 2, [0, 150], [300] * 2, [100] * 2, 9)
    assert len(apart.rows) == 2
    other_stride = DevicePieces([1 << 20] * 2, [3000] * 2, [0, 100], [300, 400], [100] * 2, 7)
    assert len(other_stride.rows) == 2


@pytest.mark.parametrize(
    ("row", "text"),
    [((599, 0, 200, 200), "3 blocks of 200 bytes at offset 0 do not fit into 599"),
     ((999, 0, 100, 200), "overlap"),
     ((700, 200, 200, 200), "at offset 200 do not fit into 700"), ((999, -1, 200, 200), "at offset -1")],
)  # fmt: skip
def test_pieces_out_of_range_are_refused(row: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DevicePieces([4096], *([one] for one in row), blocks=3)
