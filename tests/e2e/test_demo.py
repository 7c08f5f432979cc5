"""The demo, as a new user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from functools import partial
from pathlib import Path

import pytest

from kvtier import Client, Unavailable
from kvtier_daemon.tools import demo
from kvtier_daemon.tools.workload import SPEC, DemoEngine, kv_bytes
from support.daemons import Daemon, kvtier

ENOUGH = 20  # turns, of two engines


def run_demo(*arguments: str, seconds: int = 1) -> subprocess.CompletedProcess[str]:
    return kvtier("demo", "--seconds", str(seconds), "--warm", "256MiB", *arguments)


def test_the_demo_shows_a_gain_and_the_next_steps() -> None:
    for seconds in (1, 4, 60):  # a busy machine needs longer for a hit
        done = run_demo(seconds=seconds)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "loaded instead of computed again" in done.stdout
        if "all right" in done.stdout:
            break
        assert "No prompt came a second time: the machine is busy" in done.stdout
    assert "all right" in done.stdout
    assert len(re.findall(r"^  kvtier ", done.stdout, re.MULTILINE)) == 3
    assert "Traceback" not in done.stderr


def test_the_demos_summary_is_consistent() -> None:
    for seconds in (1, 4, 60):  # a busy machine needs longer for enough turns
        done = run_demo("--json", seconds=seconds)
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout)
        assert summary["wrong_blocks"] == 0 and summary["engines_failed"] == 0
        assert summary["loaded_bytes"] == summary["hit_tokens"] // 16 * (2 << 20)
        assert summary["warm_used_bytes"] <= summary["warm_capacity_bytes"] == 256 << 20
        assert summary["saved_blocks"] * 16 + summary["hit_tokens"] <= summary["prompt_tokens"]
        if summary["turns"] >= ENOUGH:
            break
    assert 0.2 < summary["hit_rate"] < 1, summary


def test_a_demo_without_a_hit_does_not_say_that_blocks_are_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    numbers = ("prompt_tokens", "hit_tokens", "hit_rate", "wrong_blocks", "loaded_bytes")
    demo._print_summary(dict.fromkeys((*numbers, "load_gb_s", "load_ms_p50"), 0))
    out = capsys.readouterr().out
    assert "No prompt came a second time" in out and "all right" not in out


def looked_up(place: str) -> int:
    """How many tokens the engines of a demo have looked up in its daemon; 0 before there is one."""
    for path in Path(place).glob("*/kvtier.sock"):
        with contextlib.suppress(Unavailable), Client.connect(str(path), timeout_s=60) as client:
            return int(client.stats()["lookup_tokens"])
    return 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_demo_that_is_ended_leaves_no_files(tmp_path: Path, number: signal.Signals) -> None:
    # The name of the folder is short: it contains a socket.
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-P", "-m", "kvtier_daemon.cli", "demo", "--seconds", "600"]
        environ = {**os.environ, "TMPDIR": place}
        with (tmp_path / "output").open("w+") as output:
            not_ignored = partial(signal.signal, number, signal.SIG_DFL)  # as under nohup
            demo = subprocess.Popen(
                command, stdout=output, stderr=output, env=environ, preexec_fn=not_ignored
            )
            while not looked_up(place):
                assert demo.poll() is None, (tmp_path / "output").read_text()
                time.sleep(0.02)
            demo.send_signal(number)
            assert demo.wait() == 128 + number
        assert os.listdir(place) == []
    assert "Traceback" not in (tmp_path / "output").read_text()


def test_no_file_of_the_working_directory_is_imported(tmp_path: Path) -> None:
    """Neither by the daemon nor by the engines: another user may own the directory."""
    for name in ("http", "json", "queue", "signal"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')\n")
    command = [sys.executable, "-P", "-m", "kvtier_daemon.cli", "demo", "--seconds", "1", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["engines_failed"] == 0


def test_a_block_with_one_wrong_byte_is_counted(shared_daemon: Daemon) -> None:
    prompt = array("I", range(4 * SPEC.block_tokens))
    with shared_daemon.connect() as client:
        space = client.open(SPEC)
        keys = space.keys(prompt)
        blocks = [bytearray(kv_bytes(key, SPEC.block_bytes)) for key in keys]
        assert all(len(block) == SPEC.block_bytes for block in blocks)
        blocks[2][-1] ^= 1
        space.save(keys, blocks)
        step = DemoEngine(client, SPEC).serve(prompt)
        assert (step.hit_tokens, step.wrong_blocks) == (len(prompt), 1)
        space.forget(keys)


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--seconds", "0", "--seconds: expected 1 to 86400, got 0"),
        ("--seconds", "-5", "--seconds: expected 1 to 86400, got -5"),
        ("--warm", "64G", "--warm: '64G' is ambiguous: "),
        ("--warm", "0", "--warm: 0 B is less than 256 MiB"),
        ("--warm", "255MiB", "--warm: 255 MiB is less than 256 MiB"),
    ],
)
def test_demo_settings_that_can_not_show_a_gain_are_refused(
    flag: str, value: str, message: str
) -> None:
    done = run_demo(flag, value)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvtier: {message}")
    assert done.stderr.count("\n") == 1
