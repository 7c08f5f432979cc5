"""The real kvikio reads frames into the memory of a CUDA driver without a device. It is in its compatibility
mode: whether a disk can write to a device is a property of a machine that has one. With KVTIER_DEVICE=gpu it
reads into the memory of a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
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
    library: Path | None,
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
        env=variables(folder, library), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


def variables(folder: Path, library: Path | None) -> dict[str, str]:
    places = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    found = dict(os.environ) if library is None else environment(folder, library)
    return found | {"PYTHONPATH": places}


@pytest.fixture
def library(request: pytest.FixtureRequest) -> Path | None:
    """The driver without a device, or None if there is one."""
    if os.environ.get("KVTIER_DEVICE") == "gpu":
        return None
    found: Path = request.getfixturevalue("cuda_library")
    return found


def checked(counts: dict[str, int], blocks: int, harmed: int) -> None:
    assert counts.pop("wrong") == 0, counts
    assert counts.pop("sound") == blocks - harmed
    assert len(counts) == KINDS and sum(counts.values()) == harmed, counts


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codec", ["raw", "r32"])
def test_sound_frames_are_loaded_and_all_others_are_misses(
    daemon_of: Callable[..., Daemon], library: Path | None, tmp_path: Path, codec: str
) -> None:
    checked(read(daemon_of, library, tmp_path, codec, 2, 120), 240, 24)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["raw", "r32"])
def test_ten_thousand_frames_of_which_a_thousand_are_not_sound(
    daemon_of: Callable[..., Daemon], library: Path | None, tmp_path: Path, codec: str
) -> None:
    checked(read(daemon_of, library, tmp_path, codec, 40, 250), 10_000, 1_000)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "tested",
    ["read_by_the_ranks and 2-kernel", "loaded_together", "not_read and True", "new_daemon"],
)
def test_the_plugin_of_vllm_reads_by_kvikio(
    library: Path | None, tmp_path: Path, tested: str
) -> None:
    """Tests of the plugin, each in a process where kvikio finds the driver without a device."""
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip(MISSING)
    if library is None:
        pytest.skip("these tests need the driver without a device")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider",
         str(TESTS / "plugins" / "test_vllm_direct.py"), "-k", tested],
        env=variables(tmp_path, library) | {"TESTED_READS": "kvikio"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-4000:]
