"""The decoders, built with the sanitizers, on parts that were damaged."""

from __future__ import annotations

import os
import shutil
import subprocess
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
)
FLAGS = ("-std=c++20", "-O1", "-g", "-ffp-contract=off", "-fno-sanitize-recover=all",
         "-fsanitize=address,undefined", "-pthread")  # fmt: skip
ROUNDS = 1_000_000 if os.environ.get("KVTIER_FAULTS") else 30_000
SECONDS = 1800


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++ here")
def test_damaged_parts_are_refused_or_give_bytes_and_touch_nothing_else(tmp_path: Path) -> None:
    objects = []
    sources = [KERNELS / "cpu" / f"{name}.cpp" for name in SOURCES]
    sources.append(Path(__file__).with_name("fuzz_codecs.cpp"))
    builds = []
    for source in sources:
        objects.append(tmp_path / f"{source.stem}.o")
        command = [
            "g++",
            *FLAGS,
            *(f"-I{place}" for place in INCLUDED),
            "-c",
            source,
            "-o",
            objects[-1],
        ]
        builds.append(subprocess.Popen(command))
    for build in builds:
        assert build.wait(300) == 0
    program = tmp_path / "fuzz_codecs"
    subprocess.run(["g++", *FLAGS, *objects, "-o", program], check=True, timeout=300)
    found = subprocess.run(
        [program, str(ROUNDS), "7"], capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert found.returncode == 0, found.stderr[-4000:]
    damaged, refused = (int(word) for word in found.stdout.split() if word.isdigit())
    assert damaged >= ROUNDS and damaged / 3 < refused < damaged
