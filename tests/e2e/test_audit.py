"""The audit log: orders and refused attempts, in the log and in a file, which may be rotated."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier_daemon.observing.audit import LIMIT_ENTRIES, WINDOW_S, Actor, AuditLog, Order
from support.daemons import Daemon, kvtier
from support.specs import pattern, spec_of

NOBODY, STRANGER = 65_534, 12_345
CONFIG = """
socket_mode = "0666"
log_level = "warning"
[audit]
path = "{path}"
[warm]
size = "16MiB"
[tenants.team]
uids = [{own}]
readers = [{nobody}]
"""
# Runs as another user: attempts what only others may do, then floods.
HOSTILE = """
import os, sys
sys.path[:0] = sys.argv[2].split(":")
import kvtier_kernels
from kvtier import Client, KvtierError, wire
from support.raw import Raw
class Daemon:
    socket = sys.argv[1]
os.setgroups([]); os.setgid(65534); os.setuid(int(sys.argv[3]))
raw = Raw(Daemon)
secret = "x" * 40_000
for n in range(2000):
    reply = raw.ask(wire.Tier(2, f"{n}" + secret, "off"))
    assert reply.code == "no_tenant", reply
assert raw.ask(wire.Forget(3, 1, bytes(32))).code == "read_only"
assert raw.ask(wire.Settings(4, "reload")).code == "no_tenant"
print("done")
"""


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for(path: Path, holds: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 60
    while not (path.exists() and holds(found := entries(path))):
        assert time.monotonic() < deadline, path.read_text() if path.exists() else "no file"
        time.sleep(0.01)
    return found


@pytest.fixture
def daemon(open_folder: Path, daemon_of: Callable[..., Daemon]) -> Daemon:
    text = CONFIG.format(path=open_folder / "audit.log", own=os.geteuid(), nobody=NOBODY)
    return daemon_of(folder=open_folder, config=text)


def test_orders_are_in_the_file_and_in_the_log_with_who_what_and_outcome(
    daemon: Daemon, open_folder: Path
) -> None:
    path = open_folder / "audit.log"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with daemon.connect(name="an engine\n") as client:
        space = client.open(spec_of("secret-prompt"))
        keys = space.keys(list(range(16 * 8)))
        space.save(keys, [pattern(key, space.spec.block_bytes) for key in keys])
        assert space.forget(keys) == 8
    assert kvtier("purge", "--tenant", "team", "--yes", "--socket", daemon.socket).returncode == 0
    assert kvtier("tier", "off", "warm", "--socket", daemon.socket).returncode == 2, "no cold tier"
    assert kvtier("status", "--socket", daemon.socket).returncode == 0
    found = wait_for(path, lambda found: any(one["order"] == "tier" for one in found))
    forgotten = found[0]
    assert forgotten.pop("time").endswith("+00:00")
    assert forgotten.pop("space") >= 0
    assert forgotten == {
        "order": "forget", "outcome": "done", "uid": os.geteuid(), "pid": os.getpid(),
        "client": "an engine?", "tenant": "team", "keys": 8, "blocks": 8,
        "key": keys[0][:8].hex(),
    }  # fmt: skip
    assert [(one["order"], one.get("what", ""), one["outcome"]) for one in found] == [
        ("forget", "", "done"), ("purge", "erase", "done"),
        ("tier", "warm off", "bad_request"),
    ]  # fmt: skip
    assert keys.packed[:9].hex() not in path.read_text(), "at most 8 bytes of a key"
    log = daemon.log.read_text()
    assert log.count("audit: {") == 3, "whatever log_level is"
    assert '"client": "an engine?"' in log


def test_a_rotated_file_is_opened_again_by_a_reload(daemon: Daemon, open_folder: Path) -> None:
    path, old = open_folder / "audit.log", open_folder / "audit.log.1"
    path.rename(old)
    daemon.process.send_signal(signal.SIGHUP)
    found = wait_for(path, bool)
    assert (found[0]["order"], found[0]["client"], found[0]["outcome"]) == (
        "reload",
        "SIGHUP",
        "done",
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # A link instead of the file: the entry is only in the log, and the loss is counted.
    path.unlink()
    victim = open_folder / "victim"
    victim.write_text("")
    path.symlink_to(victim)
    done = kvtier("reload", "--socket", daemon.socket)
    assert (done.returncode, done.stderr) == (
        1,
        f"audit.path: {path}: it is not a regular file that only the daemon's user can write to; "
        "use a file in a directory that belongs to the daemon's user\n",
    )
    assert kvtier("tier", "off", "warm", "--socket", daemon.socket).returncode == 2, "no cold tier"
    stats = daemon.wait_for(lambda stats: stats["audit"]["lost_entries"] == 1)
    assert stats and not victim.read_text()
    assert "the audit log cannot be written to its file" in daemon.log.read_text()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to be another user")
def test_refused_attempts_are_noted_and_a_hostile_client_cannot_fill_the_disk(
    daemon: Daemon, open_folder: Path
) -> None:
    command = [sys.executable, "-c", HOSTILE, daemon.socket, ":".join(sys.path)]
    done = subprocess.run(
        [*command, str(NOBODY)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "done\n", done.stderr
    refused = subprocess.run(
        [*command, str(STRANGER)], capture_output=True, check=False, timeout=60
    )
    assert refused.returncode != 0
    daemon.stop()
    found = entries(open_folder / "audit.log")
    kinds = {(one["order"], one["outcome"], one["uid"]) for one in found}
    assert kinds >= {
        ("tier", "no_tenant", NOBODY), ("forget", "read_only", NOBODY), ("reload", "no_tenant", NOBODY),
        ("connect", "no_tenant", STRANGER),
    }  # fmt: skip
    assert sum(one.get("orders", 1) for one in found if one["order"] == "tier") == 2000, (
        "none is lost"
    )
    assert (open_folder / "audit.log").stat().st_size < 20_000


def test_equal_orders_of_a_window_are_summed_in_one_entry(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    audit = AuditLog(lambda: now[0], lambda: 1e9)
    actor = Actor(7, 1, "a")

    def written() -> list[dict[str, Any]]:
        lines = [record.getMessage().partition("audit: ")[2] for record in caplog.records]
        caplog.clear()
        return [json.loads(line) for line in lines]

    for pid in range(5):
        audit.note(Order("forget", "t", space=1), "done", actor._replace(pid=pid), blocks=2)
    assert [one["blocks"] for one in written()] == [2]
    audit.flush()
    assert not written()
    now[0] = WINDOW_S
    audit.flush()
    (summed,) = written()
    assert (summed["orders"], summed["blocks"], summed["pid"]) == (4, 8, 4)
    now[0] = 2 * WINDOW_S
    audit.flush()
    for space in range(1000):
        audit.note(Order("forget", "t", space=space), "done", actor, blocks=1)
    found = written()
    assert len(found) == LIMIT_ENTRIES + 1
    assert (found[-1]["what"], "space" in found[-1]) == ("several", False)
    audit.note(Order("forget", "t"), "done", Actor(8, 1, "b"))
    assert written(), "another user's entries are not limited by these"
    audit.close()
    assert sum(one.get("orders", 1) for one in [*found, *written()]) == 1000


def test_a_reload_without_a_file_starts_no_thread(tmp_path: Path) -> None:
    audit = AuditLog(time.monotonic, time.time)
    audit.open(None)
    audit.reopen(None)
    assert audit._file._thread is None
    audit.reopen(tmp_path / "audit.log")
    audit.note(Order("forget"), "done", Actor(0, 1, "client"))
    audit.reopen(None)
    audit.note(Order("purge"), "done", Actor(0, 1, "client"))
    audit.close()
    assert [one["order"] for one in entries(tmp_path / "audit.log")] == ["forget"]
