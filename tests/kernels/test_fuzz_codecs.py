"""The decoders, built with the sanitizers, with damaged parts and frames.

Objects, programs and successful results of programs are cached (support/cached.py)."""

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
    "encryption",
    "xxh3",
    "frame",
    "page_reads",
    "disk_ring",
)
# -Og: with the sanitizers, -O1 takes twice as long to compile.
FLAGS = ("-std=c++20", "-Og", "-g1", "-ffp-contract=off", "-fno-sanitize-recover=all",
         "-fsanitize=address,undefined", "-pthread")  # fmt: skip
ROUNDS = effort(6_000, 30_000, 1_000_000)
SECONDS = 1800

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ here")


@cache
def common() -> str:
    """The inputs of every object in addition to its source. Kernels for a device are included as source."""
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


def output_of(tested: Path, arguments: Sequence[str]) -> str:
    """The program's output. It must end with 0."""

    def make(into: Path) -> None:
        found = subprocess.run(
            [tested, *arguments], capture_output=True, text=True, check=False, timeout=SECONDS
        )
        assert found.returncode == 0, found.stderr[-4000:]
        into.write_text(found.stdout)

    # The program's name contains a digest of its sources.
    settings = [f"{name}={value}" for name, value in os.environ.items() if "SAN_OPTIONS" in name]
    name = digest(tested.name, processor(), *sorted(settings), *arguments)
    return made_once(name + ".said", make).read_text()


@pytest.mark.parametrize("what", ["codecs", "frames"])
def test_damaged_input_is_refused_or_decoded_and_no_other_memory_is_touched(what: str) -> None:
    found = output_of(program(HERE / f"fuzz_{what}.cpp"), [str(ROUNDS), "7"])
    damaged, refused = (int(word) for word in found.split() if word.isdigit())
    assert damaged >= ROUNDS and damaged / 3 < refused < damaged


@pytest.fixture(scope="module")
def reads() -> Path:
    """The program that simulates a disk that returns fewer bytes than requested."""
    return program(KERNELS / "cpu" / "disk.cpp", HERE / "fuzz_reads.cpp")


def test_a_frame_written_in_two_calls_is_complete_for_any_results_of_the_calls(reads: Path) -> None:
    """The payload counts only after the whole header: the position where the rest begins is one number."""
    assert output_of(reads, ["writes"]) == "360 pairs\n"


def test_a_frame_in_pieces_is_read_for_any_results_of_the_disk(reads: Path) -> None:
    found = output_of(reads, [str(ROUNDS), "7"])
    read, failed = (int(word) for word in found.split() if word.isdigit())
    assert read >= ROUNDS // 60 and read / 20 < failed < read / 2
