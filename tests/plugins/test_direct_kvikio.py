"""The real kvikio reads frames into the memory of a CUDA driver without a device. It is in its compatibility
mode: whether a disk can write to a device is a property of a machine that has one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.daemons import Daemon
from support.fake_cuda import environment
from support.kvikio_frames import save

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS / "support" / "kvikio_frames.py"
PATIENT = {"LIMIT_DIRECT_S": 600.0}  # the kernels run on a busy processor
KINDS = 6  # of frames that are not sound
MISSING = "kvikio is not installed: NO READ BY KVIKIO IS TESTED HERE"


def read(
    daemon_of: Callable[..., Daemon],
    library: Path,
    folder: Path,
    codec: str,
    chains: int,
    length: int,
) -> dict[str, int]:
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip(MISSING)
    (folder / "disk").mkdir()
    config = (
        f'[warm]\nsize = "16MiB"\n[cold]\ndirectories = ["{folder}/disk"]\nsize = "1GiB"\n'
        f'segment = "8MiB"\ncodec = "{codec}"\nwrite = "through"\n'
        '[tenants.default]\nuids = ["*"]\ndirect_reads = true\n'
    )
    first = daemon_of(config=config, folder=folder, haste=PATIENT)
    first.wait_for_disks()
    with first.connect() as client:
        for chain in range(chains):
            save(client, chain, length)
    first.stop()
    daemon = daemon_of(config=config, folder=folder, haste=PATIENT)
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == chains * length)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), daemon.socket, str(chains), str(length)],
        env=environment(folder, library) | {"PYTHONPATH": str(TESTS)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


def checked(counts: dict[str, int], blocks: int, harmed: int) -> None:
    assert counts.pop("wrong") == 0, counts
    assert counts.pop("sound") == blocks - harmed
    assert len(counts) == KINDS and sum(counts.values()) == harmed, counts


@pytest.mark.parametrize("codec", ["raw", "r32"])
def test_sound_frames_are_loaded_and_all_others_are_misses(
    daemon_of: Callable[..., Daemon], cuda_library: Path, tmp_path: Path, codec: str
) -> None:
    checked(read(daemon_of, cuda_library, tmp_path, codec, 2, 120), 240, 24)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["raw", "r32"])
def test_ten_thousand_frames_of_which_a_thousand_are_not_sound(
    daemon_of: Callable[..., Daemon], cuda_library: Path, tmp_path: Path, codec: str
) -> None:
    checked(read(daemon_of, cuda_library, tmp_path, codec, 40, 250), 10_000, 1_000)
