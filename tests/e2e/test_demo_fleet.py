"""The demo of two hosts, as a new user runs it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier_daemon.tools import demo_fleet
from support.daemons import kvtier
from support.mooncake import master_program


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: the demo's sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="kvtier-", dir="/tmp") as folder:
        yield Path(folder)


def left_behind(folder: Path) -> list[str]:
    """The command lines of processes that use this folder."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        try:
            line = (one / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            environment = (one / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if int(one.name) != os.getpid() and (str(folder) in line or str(folder) in environment):
            found.append(line)
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("store", ["s3", "mooncake"])
def test_b_hits_what_a_saved_also_after_a_died(
    store: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if store == "mooncake":
        master_program()
    done = kvtier("demo", "--fleet", store, "--json", TMPDIR=str(folder))
    assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout)["steps"]
    assert [one["host"] for one in steps] == ["A", "A", "B", "A", "B", "B"]
    loads = [one for one in steps if one["of_tokens"]]
    assert [one["prompts"] for one in loads] == [3, 3, 6]
    for one in loads:
        assert one["hit_tokens"] == one["of_tokens"] == one["prompts"] * 128
        assert one["wrong_blocks"] == 0 and one["ms_per_prompt"] > 0
    assert not list(folder.iterdir())
    assert not left_behind(folder)
    demo_fleet._print_table(store, [demo_fleet.FleetStep(**one) for one in steps])
    table = capsys.readouterr().out
    for text in ("two hosts and a", "is killed", "loads the rest from there"):
        assert text in table


def test_an_unknown_store_is_refused() -> None:
    done = kvtier("demo", "--fleet", "tape")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvtier: --fleet: expected one of mooncake, s3, got 'tape'\n"
