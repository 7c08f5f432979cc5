"""A bug report contains the necessary data, and no user's data."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier_daemon.observing.recent_log import KEPT, LINE_CHARS, RecentLog
from kvtier_daemon.tools import bug_report
from support.daemons import Daemon, kvtier
from support.specs import pattern, spec_of

PROMPT = "my grandmother's maiden name"
TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"
PASSWORD = "correct-horse"


def test_a_report_contains_none_of_the_planted_secrets(
    daemon_of: Callable[..., Daemon], tmp_path: Path
) -> None:
    (tmp_path / "cold-of-alice").mkdir()
    daemon = daemon_of(
        folder=tmp_path / "alice-home",
        config=f'[warm]\nsize = "64MiB"\n[tenants.acme-corp]\nuids = ["*"]\nquota = "100%"\n'
        f'[cold]\ndirectories = ["{tmp_path / "cold-of-alice"}"]\nsize = "256MiB"\n'
        'codecs = ["secret-model-9b=raw"]\n',
    )  # fmt: skip
    with daemon.connect() as client:
        spec = spec_of("secret-model-9b")
        space = client.open(spec)
        keys = space.keys(list(range(64)))
        space.save(keys, [pattern(key, spec.block_bytes) for key in keys])
    log = tmp_path / "kvtierd.log"
    log.write_text(
        f"10:00 INFO serving\n10:01 key {keys[0].hex()} missed\n10:02 prompt '{PROMPT}'\n"
        f"10:03 token {TOKEN}\n10:04 password={PASSWORD}\n10:05 from 203.0.113.9 by bob@example.com\n"
        f'10:06 tenant acme-corp is full\n10:07 text: "{PROMPT} and no end\n'
    )
    out = tmp_path / "report.tar.gz"
    config = tmp_path / "alice-home" / "kvtier.toml"
    done = kvtier(
        "bugreport", "-o", str(out), "--config", str(config), "--log", str(log), "--json",
        "--socket", daemon.socket, KVTIER_TEST_TOKEN=TOKEN, USER="alice", HOME="/home/alice",
        HF_TOKEN=TOKEN,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert out.stat().st_mode & 0o777 == 0o600
    with tarfile.open(out) as tar:
        members = {one.name.split("/")[1]: tar.extractfile(one) for one in tar.getmembers()}
        files = {name: part.read().decode() for name, part in members.items() if part is not None}
    assert set(files) == {"versions.json", "machine.txt", "environment.json", "config.toml",
                          "config-in-force.txt", "status.json", "doctor.json", "log.txt"}  # fmt: skip
    assert set(json.loads(done.stdout)["files"]) == set(files)
    whole = "\n".join(files.values())
    secrets = [PROMPT, "maiden", TOKEN, PASSWORD, keys[0].hex(), keys[0].hex()[:16], "203.0.113.9"]
    secrets += ["bob@example.com", "acme-corp", "alice", "secret-model-9b", "cold-of-alice"]
    for secret in secrets:
        assert secret not in whole, secret
    # The necessary data is included.
    assert "10:00 INFO serving" in files["log.txt"]
    assert "missed" in files["log.txt"]
    assert "warm.size = '64MiB'" in files["config.toml"]
    assert json.loads(files["status.json"])["tiers"]["warm"]["blocks"] == 4
    assert json.loads(files["versions.json"])["kvtier"]
    assert json.loads(files["environment.json"])["KVTIER_TEST_TOKEN"] == "<set>"


def test_a_report_contains_the_daemons_configuration_and_log_without_options(
    daemon_of: Callable[..., Daemon], tmp_path: Path
) -> None:
    """A daemon that is not a service keeps the last lines of its log itself."""
    (tmp_path / "cold-of-alice").mkdir()
    daemon = daemon_of(
        folder=tmp_path / "d",
        config='[warm]\nsize = "64MiB"\npolicy = "lru"\n[tenants.acme-corp]\nuids = ["*"]\nquota = "100%"\n'
        f'[cold]\ndirectories = ["{tmp_path / "cold-of-alice"}"]\nsize = "256MiB"\n',
    )
    out = tmp_path / "report.tar.gz"
    done = kvtier("bugreport", "-o", str(out), "--socket", daemon.socket)
    assert done.returncode == 0, done.stderr
    with tarfile.open(out) as tar:
        members = {one.name.split("/")[1]: tar.extractfile(one) for one in tar.getmembers()}
        files = {name: part.read().decode() for name, part in members.items() if part is not None}
    assert "warm.policy = 'lru'  # file" in files["config-in-force.txt"]
    assert "warm.lock = False  # default" in files["config-in-force.txt"]
    assert "cold tier is ready" in files["log.txt"], "an INFO line of the start"
    assert "acme-corp" not in "".join(files.values())
    assert "cold-of-alice" not in files["config-in-force.txt"]


def test_the_log_that_a_daemon_keeps_is_bounded() -> None:
    recent = RecentLog()
    for number in range(KEPT + 5):
        recent.handle(logging.makeLogRecord({"msg": "x" * 5000 + str(number)}))
    recent.handle(logging.makeLogRecord({"msg": "%d", "args": ("no number",), "level": 20}))
    assert len(recent.lines) == KEPT and max(map(len, recent.lines)) <= LINE_CHARS


def test_a_service_is_asked_for_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/cgroup").write_text("0::/system.slice/kvtierd.service\n")
    (tmp_path / "proc/8").mkdir(parents=True)
    (tmp_path / "proc/8/cgroup").write_text("0::/user.slice/session-1.scope\n")
    assert bug_report.unit_of(7, tmp_path) == "kvtierd.service"
    assert bug_report.unit_of(8, tmp_path) == bug_report.unit_of(9, tmp_path) == ""
    tool = tmp_path / "journalctl"
    tool.write_text('#!/bin/sh\necho "said $*"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert bug_report.journal("kvtierd.service").startswith("said --unit kvtierd.service")
    tool.write_text("#!/bin/sh\nexit 1\n")
    assert bug_report.journal("kvtierd.service") == ""


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "report.tar.gz"
    done = kvtier("bugreport", "--dry-run", "-o", str(out), "--socket", str(tmp_path / "none"))
    assert done.returncode == 0, done.stderr
    assert "versions.json" in done.stdout and "nothing was written" in done.stdout
    assert not out.exists()


def test_a_daemon_that_hangs_delays_the_report_once(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(tmp_path / "hung"))
        hung.listen(8)
        hung.setblocking(False)
        done = kvtier("bugreport", "--dry-run", "--socket", str(tmp_path / "hung"))
        assert done.returncode == 0 and "status.txt" in done.stdout, done.stderr
        said_hello = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                client, _ = hung.accept()
                with client:
                    # A process that only checks the owner sends nothing.
                    said_hello += bool(client.recv(1))
        assert said_hello == 1


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "report.tar.gz"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="--out"):
        bug_report.write(out, {"a": "b"})
    assert out.read_text() == "mine"


def test_an_invalid_configuration_is_not_included(tmp_path: Path) -> None:
    path = tmp_path / "kvtier.toml"
    path.write_text(f"password = {TOKEN}")
    text = bug_report.configuration(path, bug_report.Redactor())
    assert "cannot be read" in text and TOKEN not in text


def test_a_configuration_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = kvtier("bugreport", "--dry-run", "--config", str(tmp_path / "typo.toml"))
    assert done.returncode == 2 and "typo.toml does not exist" in " ".join(done.stderr.split())
