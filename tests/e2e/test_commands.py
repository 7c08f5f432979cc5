"""The commands with real daemons: their output to an operator, with and without problems."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.daemons import Daemon, kvtier
from support.specs import pattern, spec_of

NOBODY = 65_534


def refused(tmp_path: Path, *flags: str, **environment: str) -> str:
    """The one-line error of `kvtier serve` when it refuses to start."""
    environment.setdefault("KVTIER_STATE", str(tmp_path / "state"))
    if "--socket" not in flags and "KVTIER_SOCKET" not in environment:
        flags += ("--socket", str(tmp_path / "kvtier.sock"))
    done = kvtier("serve", *flags, **environment)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_status_shows_the_contents_of_a_real_daemon(shared_daemon: Daemon) -> None:
    spec = spec_of("status")
    with shared_daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys(list(range(160)))
        space.save(keys, [pattern(key, spec.block_bytes) for key in keys])
        space.match(keys)
        space.match(space.keys([7] * 160))
        table = kvtier("status", "--socket", shared_daemon.socket)
        assert table.returncode == 0, table.stderr
        assert all(len(line) <= 80 for line in table.stdout.splitlines())
        assert "warm" in table.stdout and "absent" in table.stdout
        stats = json.loads(kvtier("status", "--json", KVTIER_SOCKET=shared_daemon.socket).stdout)
        assert stats["tiers"]["warm"]["used_bytes"] == 10 * spec.block_bytes
        assert stats["lookup_tokens"] == 320
        assert stats["hit_tokens"] == {"warm": 160}
        assert stats["miss_tokens"] == {"absent": 160}
        assert set(stats) == set(client.stats())
        space.forget(keys)


def test_blocks_that_a_client_saved_after_its_match_are_hits_of_its_load(
    shared_daemon: Daemon,
) -> None:
    spec = spec_of("saved after a match")
    with shared_daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys(list(range(160)))
        before = client.stats()
        assert space.match(keys).ready == 0
        space.save(keys, [pattern(key, spec.block_bytes) for key in keys])
        with space.load(keys) as blocks:
            assert len(blocks) == 10
        space.match(keys)
        with space.load(keys):
            pass
        after = shared_daemon.wait_for(
            lambda stats: (
                stats["used_tokens"]["warm"] >= before["used_tokens"].get("warm", 0) + 320
            ),
            of=client,
        )

    def grown(*path: str) -> int:
        values = []
        for stats in (before, after):
            value: Any = stats
            for name in path:
                value = value.get(name, 0)
            values.append(value)
        return int(values[1] - values[0])

    assert grown("lookup_tokens") == 480
    assert grown("hit_tokens", "warm") == grown("used_tokens", "warm") == 320
    assert grown("miss_tokens", "absent") == 160


def test_status_without_a_daemon_exits_with_three(tmp_path: Path) -> None:
    done = kvtier("status", "--socket", str(tmp_path / "none.sock"))
    assert done.returncode == 3
    assert "kvtier serve" in done.stderr


def test_a_stopped_daemon_is_reported_with_the_command_that_continues_it(
    daemon_of: Callable[..., Daemon],
) -> None:
    daemon = daemon_of()
    pid = daemon.process.pid
    daemon.process.send_signal(signal.SIGSTOP)
    done = kvtier("status", "--socket", daemon.socket)
    assert done.returncode == 3
    assert f"process {pid} " in done.stderr and f"`kill -CONT {pid}`" in done.stderr
    assert done.stderr.count(daemon.socket) == 1
    assert "kvtier serve" not in done.stderr


# One command runs first as root, because other users may not be able to read the installed modules.
BE_NOBODY = f"""
import contextlib, grp, io, os
from kvtier import Client
from kvtier_daemon.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
    main(["status", "--socket", "/no/such/socket"])
os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})
"""


@pytest.fixture
def as_nobody() -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs a line of Python as a user who owns no files here."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to run as another user")

    def run(line: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", BE_NOBODY + line]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    return run


def test_a_socket_without_permission_is_reported_with_the_remedy(
    open_folder: Path,
    daemon_of: Callable[..., Daemon],
    as_nobody: Callable[[str], subprocess.CompletedProcess[str]],
) -> None:
    daemon = daemon_of(folder=open_folder)
    ask = f"main(['status', '--socket', {daemon.socket!r}])"
    done = as_nobody(ask)
    assert done.returncode == 3, done.stderr
    assert f"uid {NOBODY} may not connect to {daemon.socket} (owner uid 0" in done.stderr
    assert "mode 0660" in done.stderr and "socket_group or socket_mode" in done.stderr
    assert "kvtier serve" not in done.stderr
    open_folder.chmod(0o700)
    done = as_nobody(ask)
    assert done.returncode == 3, done.stderr
    assert f"uid {NOBODY} may not enter the directory of {daemon.socket}" in done.stderr


def test_both_tenants_of_the_documents_example_can_connect(
    open_folder: Path,
    daemon_of: Callable[..., Daemon],
    as_nobody: Callable[[str], subprocess.CompletedProcess[str]],
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    config = re.sub(r'(?m)^socket = ".*$', "", example).replace("64GiB", "64MiB")
    daemon = daemon_of(folder=open_folder, config=config.replace('"vllm"', "0"))
    with daemon.connect() as client:
        assert client.tenant == "serving"
    done = as_nobody(f"print(Client.connect({daemon.socket!r}).tenant)")
    assert done.stdout == "default\n", done.stderr


def test_a_socket_of_a_running_daemon_is_refused_with_its_pid_and_origin(
    shared_daemon: Daemon, tmp_path: Path
) -> None:
    text = refused(tmp_path, "--socket", shared_daemon.socket, "--warm-size", "64MiB")
    assert f"(--socket): taken by process {shared_daemon.process.pid}" in text
    text = refused(tmp_path, "--warm-size", "64MiB", KVTIER_SOCKET=shared_daemon.socket)
    assert f"(environment KVTIER_SOCKET): taken by process {shared_daemon.process.pid}" in text
    with shared_daemon.connect() as client:
        client.ping()


def test_a_socket_of_a_dead_daemon_is_taken_over(daemon_of: Callable[..., Daemon]) -> None:
    dead = daemon_of()
    dead.process.send_signal(signal.SIGKILL)
    dead.process.wait()
    assert Path(dead.socket).exists()
    again = daemon_of(folder=dead.log.parent)
    with again.connect() as client:
        client.ping()


def test_an_arena_larger_than_memory_is_refused_with_the_numbers(tmp_path: Path) -> None:
    text = refused(tmp_path, "--warm-size", "900TiB")
    assert "900 TiB" in text or "901" in text or "902" in text
    assert "GiB" in text


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        ("-n 200", ("200", "LimitNOFILE")),
        ("-f 20480", ("64 MiB needed for an extent", "the limit is 10 MiB", "LimitFSIZE=infinity")),
    ],
)
def test_too_low_limits_are_refused_with_the_number_and_the_fix(
    tmp_path: Path, limit: str, says: tuple[str, ...]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    command = [
        "sh",
        "-c",
        f'ulimit {limit}; exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "kvtier_daemon.cli",
    ]
    command += ["serve", "--socket", str(tmp_path / "s"), "--warm-size", "64MiB"]
    environment = dict(os.environ, KVTIER_STATE=str(tmp_path / "state"))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.returncode == 2, done.stderr
    assert all(one in done.stderr for one in says), done.stderr
    assert (soft, hard) == resource.getrlimit(resource.RLIMIT_NOFILE)


def test_an_unwritable_state_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    text = refused(tmp_path, "--warm-size", "64MiB", KVTIER_STATE=str(tmp_path / "file" / "state"))
    assert "state" in text


def test_an_unknown_key_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    config = tmp_path / "kvtier.toml"
    config.write_text('[warm]\nsise = "1GiB"\n')
    assert "size" in refused(tmp_path, "--config", str(config))


def test_memory_that_may_not_be_locked_is_refused_with_the_fix(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to give its right to lock memory away")
    config = tmp_path / "kvtier.toml"
    config.write_text('[warm]\nsize = "64MiB"\nlock = true\n')
    command = ["capsh", "--drop=cap_ipc_lock", "--", "-c"]
    inner = (
        f"ulimit -l 8192; exec {sys.executable} -m kvtier_daemon.cli serve --config {config}"
        f" --socket {tmp_path / 's'}"
    )
    environment = dict(os.environ, KVTIER_STATE=str(tmp_path / "state"))
    try:
        done = subprocess.run(
            [*command, inner], capture_output=True, text=True, timeout=60, check=False,
            env=environment,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("needs capsh")
    assert done.returncode == 2, done.stderr
    assert "8 MiB" in done.stderr and "LimitMEMLOCK" in done.stderr
