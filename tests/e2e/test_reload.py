"""A daemon that reloads its configuration: keys that change, keys that need a restart, and errors that
change nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvtier import KvtierError, Refused
from support.daemons import SERVE, Daemon, kvtier
from support.specs import pattern, spec_of

NOBODY = 65_534
CONFIG = """
log_level = "{level}"
max_clients = {clients}
[warm]
size = "{warm}"
keep_s = 0
[cold]
directories = ["{folder}"]
size = "64MiB"
segment = "1MiB"
write = "{write}"
scrub = "{scrub}"
daily_writes = "{daily}"
codec = "{codec}"
[tenants.a]
uids = [{uids}]
"""
FIRST = {
    "level": "warning", "clients": 8, "warm": "16MiB", "write": "back", "scrub": "0", "daily": "0",
    "codec": "raw", "uids": os.geteuid(),
}  # fmt: skip


@pytest.fixture
def configured(tmp_path: Path, daemon_of: Callable[..., Daemon]) -> Callable[..., Daemon]:
    """Starts a daemon, or rewrites its configuration file."""
    folder = tmp_path / "it"
    folder.mkdir()
    (folder / "disk").mkdir()
    started: list[Daemon] = []

    def write(command: Sequence[str] = SERVE, **values: object) -> Daemon:
        text = CONFIG.format(**{**FIRST, **values}, folder=folder / "disk")
        if not started:
            started.append(daemon_of(folder=folder, config=text, command=command))
        else:
            head = f'socket = "{folder}/kvtier.sock"\nstate = "{folder}/state"\n'
            (folder / "kvtier.toml").write_text(head + text)
        return started[0]

    return write


def test_a_reload_changes_what_it_can_and_reports_keys_that_need_a_restart(
    configured: Callable[..., Daemon],
) -> None:
    daemon = configured()
    configured(
        level="debug", clients=4, warm="32MiB", write="through", scrub="8MiB", daily="1GiB",
        codec="fix4",
    )  # fmt: skip
    done = kvtier("config", "diff", "--json", "--socket", daemon.socket)
    assert done.returncode == 1, done.stderr
    live = {
        "log_level", "max_clients", "cold.write", "cold.scrub", "cold.daily_writes", "cold.codec",
    }  # fmt: skip
    changes = {one["key"]: one for one in json.loads(done.stdout)["changes"]}
    assert {key for key, one in changes.items() if one["live"]} == live
    waits = {"warm.size", "warm.extent", "tenants.a.quota"}
    assert {key for key, one in changes.items() if not one["live"]} <= waits
    done = kvtier("reload", "--socket", daemon.socket)
    assert done.returncode == 0, done.stderr
    assert 'warm.size: "16 MiB" -> "32 MiB" (needs a restart)' in done.stdout
    assert 'cold.write: "back" -> "through" (done)' in done.stdout
    with daemon.connect() as client:
        keys = client.settings()["keys"]
        assert keys["cold.write"] == ["through", str(daemon.log.parent / "kvtier.toml")]
        assert keys["warm.size"][0] == 16 << 20, "what it runs with"
        left = {one["key"] for one in client.settings("diff")["changes"]}
        assert left <= waits and "warm.size" in left
        assert client.stats()["tiers"]["cold"]["scrub"]["rate"] == 8 << 20
        assert client.stats()["tiers"]["cold"]["day_limit_bytes"] == 1 << 30
        # No block is close to eviction, so blocks on the disk were written through.
        space = client.open(spec_of("reload"))
        keys = space.keys(list(range(160)))
        space.save(keys, [pattern(key, space.spec.block_bytes) for key in keys])
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == 10)
        (one,) = client.stats()["tiers"]["cold"]["coding"]["spaces"]
        assert one["asked"] == "fix4"
        held = [daemon.connect() for _ in range(3)]
        with pytest.raises(Refused, match="4 clients"):
            daemon.connect()
        for other in held:
            other.close()


def test_an_invalid_file_changes_nothing_and_all_its_errors_are_reported(
    configured: Callable[..., Daemon],
) -> None:
    daemon = configured()
    file = daemon.log.parent / "kvtier.toml"
    with daemon.connect() as client:
        before = client.settings()
    configured(write="sideways", clients=0, scrub="8MiB")
    done = kvtier("reload", "--socket", daemon.socket)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if line.startswith(("write", "max_clients")):
            key = "max_clients" if line.startswith("max") else "cold.write"
            assert f"{file}:{number}: {key}: expected" in done.stderr
    with daemon.connect() as client:
        assert client.settings() == before
    check = kvtier("config", "check", str(file), "--json")
    assert check.returncode == 2
    assert len(json.loads(check.stdout)["problems"]) == 2
    assert "reload refused" in daemon.log.read_text()
    configured()
    assert kvtier("config", "check", str(file)).returncode == 0
    assert kvtier("config", "diff", "--socket", daemon.socket).returncode == 0


def test_more_clients_than_files_may_be_open_are_refused(
    configured: Callable[..., Daemon],
) -> None:
    daemon = configured(command=["sh", "-c", 'ulimit -n 600; exec "$@"', "sh", *SERVE])
    configured(clients=5000)
    done = kvtier("reload", "--socket", daemon.socket)
    assert done.returncode == 2 and "open files" in done.stderr, done.stderr
    with daemon.connect() as client:
        assert client.settings()["keys"]["max_clients"][0] == 8


def test_a_reload_that_removes_the_operator_itself_is_answered(
    configured: Callable[..., Daemon],
) -> None:
    daemon = configured()
    with daemon.connect() as client:
        configured(uids=12_345)
        done = kvtier("reload", "--socket", daemon.socket)
        assert done.returncode == 0, done.stderr
        assert f"tenants.a.uids: [{os.geteuid()}] -> [12345] (done)" in done.stdout
        with pytest.raises(KvtierError, match="connect again"):
            client.ping()
    with daemon.connect() as client:
        assert client.settings()["keys"]["tenants.a.uids"][0] == [12345]
        with pytest.raises(Refused, match="no tenant is configured"):
            client.open(spec_of("whose"))
    configured(uids=f"{os.geteuid()}, 12_345")
    done = kvtier("reload", "--socket", daemon.socket)
    assert "(done)" in done.stdout and "restart" not in done.stdout, done.stdout
    with daemon.connect() as client:
        client.open(spec_of("whose"))


def test_sighup_reloads_and_notifies_the_service_manager(
    tmp_path: Path, daemon_of: Callable[..., Daemon]
) -> None:
    folder = tmp_path / "d"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager_socket:
        manager_socket.bind(str(tmp_path / "notify"))
        manager_socket.settimeout(60)
        environment = dict(os.environ, NOTIFY_SOCKET=str(tmp_path / "notify"))
        daemon = daemon_of(folder=folder, command=SERVE, env=environment)
        file = folder / "kvtier.toml"
        for text, said_last in (
            ("max_clients = 9", "reloaded 1 value"),
            ("max = 9", "reload refused"),
        ):
            file.write_text(text + "\n" + file.read_text())
            daemon.process.send_signal(signal.SIGHUP)
            while not (message := manager_socket.recv(4096).decode()).startswith("RELOADING=1"):
                assert "RELOADING" not in message
            assert "MONOTONIC_USEC=" in message
            while not (message := manager_socket.recv(4096).decode()).startswith("READY=1"):
                assert "READY" not in message
            assert said_last in message
    with daemon.connect() as client:
        assert client.settings()["keys"]["max_clients"][0] == 9


HUNG_UP = """
import signal, sys
from kvtier_daemon.cli import main

class HungUp:
    def find_spec(self, name, path, target=None):
        if name == "kvtier_daemon.app":  # the configuration has been read
            with open(sys.argv[-1], "r+") as file:
                text = file.read()
                file.seek(0)
                file.write("max_clients = 9\\n" + text)
            signal.raise_signal(signal.SIGHUP)

sys.meta_path.insert(0, HungUp())
main()
"""


def test_a_sighup_during_the_start_reloads_once_the_daemon_serves(
    daemon_of: Callable[..., Daemon],
) -> None:
    daemon = daemon_of(command=[sys.executable, "-c", HUNG_UP, "serve"])
    with daemon.connect() as client:
        daemon.wait_for(lambda _: bool(client.settings()["keys"]["max_clients"][0] == 9))


def test_only_the_operator_may_read_the_settings(
    open_folder: Path, daemon_of: Callable[..., Daemon]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to run as another user")
    daemon = daemon_of(folder=open_folder, config='socket_mode = "0666"\n[warm]\nsize = "16MiB"\n')
    program = (
        "import os, sys; from kvtier import Client, Refused\n"
        f"client = Client.connect({daemon.socket!r}, populate=False); client.settings(); client.close()\n"
        f"os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})\n"
        f"client = Client.connect({daemon.socket!r}, populate=False)\n"
        "try:\n    client.settings()\nexcept Refused as error:\n    print(error.code, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("no_tenant"), done.stdout + done.stderr
