"""The decoders, built with the sanitizers, on parts and frames that were damaged."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"
INCLUDED = (KERNELS / "include", KERNELS / "cuda", Path(__file__).parents[1] / "cuda")
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
FLAGS = ("-std=c++20", "-O1", "-g", "-ffp-contract=off", "-fno-sanitize-recover=all",
         "-fsanitize=address,undefined", "-pthread")  # fmt: skip
ROUNDS = 1_000_000 if os.environ.get("KVTIER_FAULTS") else 30_000
SECONDS = 1800


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The kernels, built with the sanitizers."""
    if not shutil.which("g++"):
        pytest.skip("no g++ here")
    folder = tmp_path_factory.mktemp("objects")
    return compiled(folder, [KERNELS / "cpu" / f"{name}.cpp" for name in SOURCES])


def compiled(folder: Path, sources: Sequence[Path]) -> list[Path]:
    made = [folder / f"{source.stem}.o" for source in sources]
    places = [f"-I{place}" for place in INCLUDED]
    builds = [
        subprocess.Popen(["g++", *FLAGS, *places, "-c", source, "-o", into])
        for source, into in zip(sources, made, strict=True)
    ]
    assert [build.wait(300) for build in builds] == [0] * len(builds)
    return made


@pytest.mark.parametrize("what", ["codecs", "frames"])
def test_what_is_damaged_is_refused_or_gives_bytes_and_nothing_else_is_touched(
    what: str, objects: list[Path], tmp_path: Path
) -> None:
    own = compiled(tmp_path, [Path(__file__).with_name(f"fuzz_{what}.cpp")])
    program = tmp_path / what
    subprocess.run(["g++", *FLAGS, *objects, *own, "-o", program], check=True, timeout=300)
    found = subprocess.run(
        [program, str(ROUNDS), "7"], capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert found.returncode == 0, found.stderr[-4000:]
    damaged, refused = (int(word) for word in found.stdout.split() if word.isdigit())
    assert damaged >= ROUNDS and damaged / 3 < refused < damaged


@pytest.fixture(scope="module")
def reads(objects: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that plays a disk that returns less than it was asked for."""
    folder = tmp_path_factory.mktemp("reads")
    own = compiled(
        folder, [KERNELS / "cpu" / "disk.cpp", Path(__file__).with_name("fuzz_reads.cpp")]
    )
    program = folder / "reads"
    subprocess.run(["g++", *FLAGS, *objects, *own, "-o", program], check=True, timeout=300)
    return program


def test_a_frame_written_in_two_calls_is_whole_whatever_the_calls_return(reads: Path) -> None:
    """The payload counts only after all of the header: where the rest begins is one number."""
    found = subprocess.run(
        [reads, "writes"], capture_output=True, text=True, check=False, timeout=60
    )
    assert found.returncode == 0, found.stderr[-4000:]
    assert found.stdout == "360 pairs\n"


def test_a_frame_in_pieces_is_read_whatever_a_disk_returns(reads: Path) -> None:
    found = subprocess.run(
        [reads, str(ROUNDS), "7"], capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert found.returncode == 0, found.stderr[-4000:]
    read, failed = (int(word) for word in found.stdout.split() if word.isdigit())
    assert read >= ROUNDS // 60 and read / 20 < failed < read / 2
