"""The demo, run as a new user would."""

from __future__ import annotations

import json
import re
import subprocess
import sys


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "kvtier_daemon.cli",
        "demo",
        "--seconds",
        "3",
        "--warm",
        "256MiB",
    ]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_demo_shows_a_gain_and_says_what_to_do_next() -> None:
    done = run_demo()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loaded instead of computed again" in done.stdout
    assert "all right" in done.stdout
    assert len(re.findall(r"^  kvtier ", done.stdout, re.MULTILINE)) == 3
    assert "Traceback" not in done.stderr


def test_the_demos_summary_is_consistent() -> None:
    done = run_demo("--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["wrong_blocks"] == 0 and summary["engines_failed"] == 0
    assert 0.2 < summary["hit_rate"] < 1
    assert summary["loaded_bytes"] == summary["hit_tokens"] // 16 * (2 << 20)
    assert summary["warm_used_bytes"] <= summary["warm_capacity_bytes"] == 256 << 20
    assert summary["saved_blocks"] * 16 + summary["hit_tokens"] <= summary["prompt_tokens"]
