"""The kernels of a device with a thread per lane, under ThreadSanitizer.

Several warps and thread blocks run at the same time; only barriers order the accesses of two lanes
(tests/cuda/lane_threads.h). Programs and successful results are cached (support/cached.py)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from support.cached import compiler, digest, files_in, made_once, processor
from support.effort import effort

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCES = ("codec", "codec_x86", "codec_quantized", "codec_calibrated", "copy", "copy_x86", "cpu", "blake3",
           "blake3_x86", "xxh3")  # fmt: skip
FLAGS = ("-std=c++20", "-g1", "-ffp-contract=off", "-pthread")
# A volatile access is not a race: it is how kernels access flags of other warps.
SANITIZED = ("-O1", "-fsanitize=thread", "--param", "tsan-distinguish-volatile=1")
OPTIONS = "halt_on_error=1:exitcode=66:atexit_sleep_ms=0"
RACE, DIVERGED = 66, 3  # exit statuses
CODECS = ("fix4", "r32", "q8", "q4", "q2", "fp8", "e5m2", "nvfp4", "mxfp4", "ecsq", "cachegen")
DAMAGED = effort(120, 1_000, 20_000)
SECONDS = 1_800
MOST_RANDOM_BITS = 28  # of addresses: with more, the sanitizer finds no room

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ here")


def compiled(source: Path, tree: Path, flags: Sequence[str]) -> Path:
    """An object, with the kernels' source of this tree."""
    folders = [tree / "kernels" / "cuda", tree / "tests" / "cuda", ROOT / "kernels" / "include",
               ROOT / "kernels" / "cpu", HERE]  # fmt: skip
    places = [f"-I{folder}" for folder in folders]
    headers = files_in(*folders, suffixes=(".h", ".cu"))

    def make(into: Path) -> None:
        done = subprocess.run(
            ["g++", *FLAGS, *flags, *places, "-c", source, "-o", into],
            capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]

    return made_once(digest(compiler("g++"), *FLAGS, *flags, *headers, source) + ".o", make)


def program(tree: Path = ROOT) -> Path:
    with ThreadPoolExecutor(os.cpu_count()) as builds:
        kernels = builds.submit(compiled, HERE / "lanes.cpp", tree, SANITIZED)
        plain = [*(ROOT / "kernels" / "cpu" / f"{name}.cpp" for name in SOURCES),
                 ROOT / "tests" / "cuda" / "lane_threads.cpp"]  # fmt: skip
        objects = [kernels.result(), *builds.map(lambda one: compiled(one, ROOT, ("-Og",)), plain)]

    def make(into: Path) -> None:
        command = ["g++", "-fsanitize=thread", "-pthread", *objects, "-o", into]
        subprocess.run(command, check=True, timeout=300)

    return made_once(digest(compiler("g++"), *(one.name for one in objects)) + ".program", make)


def run(tested: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        bits = int(Path("/proc/sys/vm/mmap_rnd_bits").read_text())
    except PermissionError:  # only root may read it
        bits = MOST_RANDOM_BITS + 1
    fixed = ["setarch", "--addr-no-randomize"] if bits > MOST_RANDOM_BITS else []
    return subprocess.run(
        [*fixed, str(tested), *arguments], capture_output=True, text=True, check=False,
        timeout=SECONDS, env={**os.environ, "TSAN_OPTIONS": OPTIONS},
    )  # fmt: skip


def output_of(*arguments: str) -> str:
    """What the program printed. It must end without a report, a diverged warp or a difference."""
    tested = program()

    def make(into: Path) -> None:
        found = run(tested, *arguments)
        assert found.returncode == 0, found.stderr[:6000]
        into.write_text(found.stdout)

    return made_once(digest(tested.name, processor(), *arguments) + ".said", make).read_text()


@pytest.mark.parametrize("codec", CODECS)
def test_lanes_of_a_codec_never_race_or_diverge_and_agree_with_the_processor(codec: str) -> None:
    """Sound and damaged parts of all types, and parts that are stored raw."""
    found = output_of(codec, str(DAMAGED), "7")
    encoded, damaged, refused = (int(word) for word in re.findall(r"\d+", found))
    assert damaged >= DAMAGED and damaged / 3 < refused < damaged
    assert encoded > DAMAGED / 20


@pytest.mark.parametrize("what", ["copies", "digests"])
def test_lanes_of_copies_and_digests_never_race_or_diverge(what: str) -> None:
    assert output_of(what, str(effort(40, 400, 10_000)), "7") == ""


class Planted(NamedTuple):
    """`codec`: the one whose kernels have the bug; `edits`: a text, and what replaces it where `::planted` is
    the bug's number; `status`: how the bug is found."""

    codec: str
    file: str
    edits: tuple[tuple[str, str], ...]
    status: int


def alone(step: str) -> tuple[str, str]:
    """The edit that removes the barrier at the end of a step."""
    either = "[](auto act) { if (PLANTED) act(threadIdx.x % 32); else each(act); }("
    return step, step.replace("each(", either)


FILLED = """each([&](uint32_t lane) {
            uint32_t start = 0;
            for (uint32_t i = 0; i < lane; i++) start += frequencies[i];
            const """
PLANTED = {
    "symbols_to_decode": Planted(
        "r32", "streams.h",
        (alone(FILLED + "uint32_t frequency"),
         alone("each([&](uint32_t lane) {\n            state_[lane] = get32(from + 4 * lane);")), RACE,
    ),
    "symbols_to_encode": Planted(
        "ecsq", "streams.h",
        (alone(FILLED + "codec::Symbol"),
         alone("each([&](uint32_t lane) { state_[lane] = kStateLeast; });")), RACE,
    ),
    "counts_that_are_not_zero_yet": Planted(
        "fix4", "codec_lossless.cu",
        (alone("each([&](uint32_t lane) { counts[first + lane] = 0; });"),), RACE,
    ),
    "counts_that_are_read_early": Planted(
        "r32", "codec_lossless.cu",
        (alone("each([&](uint32_t lane) {\n            const uint32_t k = row * kOfRow + i % 2"),), RACE,
    ),
    "a_flag_that_is_not_volatile": Planted(
        "q8", "lanes.h",
        (("*static_cast<volatile uint32_t*>(&flag) = 1;",
          "if (PLANTED) flag = 1; else *static_cast<volatile uint32_t*>(&flag) = 1;"),), RACE,
    ),
    "each_lane_reads_the_flag_of_damage": Planted(
        "fix4", "parts.h",
        (("return ballot([&](uint32_t) { return is_set(result.bad); }) != 0;",
          "if (PLANTED) return is_set(result.bad);"
          " return ballot([&](uint32_t) { return is_set(result.bad); }) != 0;"),), DIVERGED,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One program with all of these bugs, of which the environment selects one: to build it takes 6 s."""
    tree = tmp_path_factory.mktemp("planted")
    for folder in ("kernels/cuda", "tests/cuda"):
        shutil.copytree(ROOT / folder, tree / folder)
    meetings = tree / "tests" / "cuda" / "lane_meetings.h"
    selected = '#include <cstdlib>\ninline const int planted = std::atoi(std::getenv("PLANTED"));\n'
    meetings.write_text(meetings.read_text() + selected)
    for number, bug in enumerate(PLANTED.values()):
        edited = tree / "kernels" / "cuda" / bug.file
        text = edited.read_text()
        for before, after in bug.edits:
            assert text.count(before) == 1, f"{bug.file} has changed: change the planted bug"
            text = text.replace(before, after.replace("PLANTED", f"::planted == {number}"))
        edited.write_text(text)
    return program(tree)


@pytest.mark.parametrize("name", PLANTED)
def test_a_missing_barrier_is_found(
    name: str, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = PLANTED[name]
    monkeypatch.setenv("PLANTED", str(list(PLANTED).index(name)))
    found = run(planted, bug.codec, "240", "7")
    assert found.returncode == bug.status, found.stderr[:2000]
    said = "WARNING: ThreadSanitizer: data race" if bug.status == RACE else "lanes diverged"
    assert said in found.stderr


def test_the_program_with_planted_bugs_is_sound_without_them(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", "-1")
    found = run(planted, "q8", "24", "7")
    assert found.returncode == 0, found.stderr[:2000]
