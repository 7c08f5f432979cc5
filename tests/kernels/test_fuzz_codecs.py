"""The decoders, built with the sanitizers, on parts and frames that were damaged.

Objects, programs and what programs say that end well are kept from run to run (support/cached.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from support.cached import compiler, digest, files_in, made_once, processor
from support.effort import effort

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"
INCLUDED = (KERNELS / "include", KERNELS / "cuda", HERE.parent / "cuda", KERNELS / "cpu")
SOURCES = (
    "codec",
    "codec_x86",
    "codec_quantized",
    "codec_calibrated",
    "reorder",
    "copy",
    "copy_x86",
    "cpu",
    "blake3",
    "blake3_x86",
    "xxh3",
    "frame",
)
# -Og: with the sanitizers, -O1 takes twice as long to compile.
FLAGS = ("-std=c++20", "-Og", "-g1", "-ffp-contract=off", "-fno-sanitize-recover=all",
         "-fsanitize=address,undefined", "-pthread")  # fmt: skip
ROUNDS = effort(6_000, 30_000, 1_000_000)
SECONDS = 1800

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ here")


@cache
def common() -> str:
    """What every object depends on beside its source. Kernels for a device are included as text."""
    headers = files_in(*INCLUDED, suffixes=(".h", ".cu"))
    return digest(compiler("g++"), " ".join(FLAGS), *headers)


def compiled(source: Path) -> Path:
    def make(into: Path) -> None:
        places = [f"-I{place}" for place in INCLUDED]
        subprocess.run(["g++", *FLAGS, *places, "-c", source, "-o", into], check=True, timeout=600)

    return made_once(digest(common(), source) + ".o", make)


def program(*own: Path) -> Path:
    """The kernels and these sources, built with the sanitizers."""
    sources = [*(KERNELS / "cpu" / f"{name}.cpp" for name in SOURCES), *own]
    with ThreadPoolExecutor(os.cpu_count()) as builds:
        objects = list(builds.map(compiled, sources))

    def make(into: Path) -> None:
        subprocess.run(["g++", *FLAGS, *objects, "-o", into], check=True, timeout=300)

    return made_once(digest(common(), *sources) + ".program", make)


def said(tested: Path, arguments: Sequence[str]) -> str:
    """What the program prints. It has to end well."""

    def make(into: Path) -> None:
        found = subprocess.run(
            [tested, *arguments], capture_output=True, text=True, check=False, timeout=SECONDS
        )
        assert found.returncode == 0, found.stderr[-4000:]
        into.write_text(found.stdout)

    # The program's name says what it was built from.
    settings = [f"{name}={value}" for name, value in os.environ.items() if "SAN_OPTIONS" in name]
    name = digest(tested.name, processor(), *sorted(settings), *arguments)
    return made_once(name + ".said", make).read_text()


@pytest.mark.parametrize("what", ["codecs", "frames"])
def test_what_is_damaged_is_refused_or_gives_bytes_and_nothing_else_is_touched(what: str) -> None:
    found = said(program(HERE / f"fuzz_{what}.cpp"), [str(ROUNDS), "7"])
    damaged, refused = (int(word) for word in found.split() if word.isdigit())
    assert damaged >= ROUNDS and damaged / 3 < refused < damaged


@pytest.fixture(scope="module")
def reads() -> Path:
    """The program that plays a disk that returns less than it was asked for."""
    return program(KERNELS / "cpu" / "disk.cpp", HERE / "fuzz_reads.cpp")


def test_a_frame_written_in_two_calls_is_whole_whatever_the_calls_return(reads: Path) -> None:
    """The payload counts only after all of the header: where the rest begins is one number."""
    assert said(reads, ["writes"]) == "360 pairs\n"


def test_a_frame_in_pieces_is_read_whatever_a_disk_returns(reads: Path) -> None:
    found = said(reads, [str(ROUNDS), "7"])
    read, failed = (int(word) for word in found.split() if word.isdigit())
    assert read >= ROUNDS // 60 and read / 20 < failed < read / 2
