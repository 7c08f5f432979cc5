"""The demo, as a new user runs it."""

from __future__ import annotations

import json
import re
import subprocess
from array import array

import pytest

from kvtier_daemon.tools.workload import SPEC, DemoEngine, kv_bytes
from support.daemons import Daemon, kvtier

ENOUGH = 20  # turns, of two engines


def run_demo(*arguments: str, seconds: int = 1) -> subprocess.CompletedProcess[str]:
    return kvtier("demo", "--seconds", str(seconds), "--warm", "256MiB", *arguments)


def test_the_demo_shows_a_gain_and_the_next_steps() -> None:
    done = run_demo()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loaded instead of computed again" in done.stdout
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
        ("--seconds", "nan", "--seconds: expected 1 to 86400, got nan"),
        ("--seconds", "inf", "--seconds: expected 1 to 86400, got inf"),
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
