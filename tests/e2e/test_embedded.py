"""A client with a daemon of its own: it starts, keeps blocks on disk, and always ends."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier import Client, ConfigError, InvalidArgument, KvSpec, Unavailable

SPEC = KvSpec.dense(
    model="tiny", layers=4, kv_heads=2, head_dim=64, dtype="bfloat16", block_tokens=16, weights="rev:1"
)  # fmt: skip
TOKENS = list(range(64))
BLOCKS = [bytes([number + 1]) * SPEC.block_bytes for number in range(4)]
END_S = 60.0

OWNER = """
import os, sys, time
from kvtier import Client
client = Client.embedded("16MiB")
print(client.stats()["pid"], client.socket, flush=True)
if sys.argv[1] == "fork":
    if not os.fork():
        del client
        sys.exit()  # runs the exit functions of the child
    os.wait()
    client.ping()
    print("answers", flush=True)
elif sys.argv[1] == "wait":
    time.sleep(600)
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of temporary files during the test."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def ended(pidfd: int) -> bool:
    """Whether the process ends in time."""
    return bool(select.select([pidfd], [], [], END_S)[0])


def test_blocks_on_disk_are_found_by_the_next_daemon_of_the_folder(
    tmp_path: Path, temporary: Path
) -> None:
    for turn in range(2):
        with Client.embedded("16MiB", tmp_path / "cold", cold_size="128MiB") as client:
            space = client.open(SPEC)
            keys = space.keys(TOKENS)
            while (found := space.match(keys)).coming:
                time.sleep(found.eta_ms / 1000)
            with space.load(keys, deadline_ms=60_000) as blocks:
                assert [bytes(block) for block in blocks] == (BLOCKS if turn else [])
            assert space.save(keys, BLOCKS).stored == (0 if turn else 4)
            pidfd = os.pidfd_open(client.stats()["pid"])
        assert ended(pidfd)
        os.close(pidfd)
        assert list(temporary.iterdir()) == []  # no files stay behind


def test_its_folders_are_for_its_user_only_whatever_the_umask_is(
    tmp_path: Path, temporary: Path
) -> None:
    before, cold = os.umask(0), tmp_path / "cold"
    try:
        with Client.embedded("16MiB", cold, cold_size="128MiB"):
            (own,) = temporary.iterdir()
            folders = (own, cold, cold / "blocks", cold / "state", cold / "state" / "secrets")
            assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
    finally:
        os.umask(before)


def test_a_second_daemon_of_a_folder_is_refused_with_the_daemons_message(tmp_path: Path) -> None:
    with Client.embedded("16MiB", tmp_path, cold_size="128MiB") as first:
        with pytest.raises(ConfigError, match="is used by another daemon"):
            Client.embedded("16MiB", tmp_path, cold_size="128MiB")
        first.ping()


def test_wrong_sizes_are_refused_before_a_start(tmp_path: Path, temporary: Path) -> None:
    with pytest.raises(InvalidArgument, match="warm: '3 apples'"):
        Client.embedded("3 apples")
    with pytest.raises(InvalidArgument, match="cold_size: '1G' is ambiguous"):
        Client.embedded("16MiB", tmp_path / "cold", cold_size="1G")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cold: cannot create"):
        Client.embedded("16MiB", tmp_path / "file")
    assert list(temporary.iterdir()) == []


def test_variables_for_other_processes_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_SOCKET", str(tmp_path / "other.sock"))
    monkeypatch.setenv("KVTIER_WARM__SIZE", "no size")
    notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notified.bind(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with notified, Client.embedded("16MiB") as client:
        assert client.wait_ready() == 16 << 20
        with Client.connect(client.socket) as other:
            other.ping()
        notified.setblocking(False)
        with pytest.raises(BlockingIOError):  # the service of this program got no message
            notified.recv(100)


def test_a_daemon_that_was_killed_is_unavailable() -> None:
    with Client.embedded("16MiB") as client:
        pid = client.stats()["pid"]
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert ended(pidfd)
        os.close(pidfd)
        with pytest.raises(Unavailable):
            client.ping()


@pytest.mark.parametrize("way", ["exit", "fork", "wait"])
def test_the_daemon_ends_with_its_process(way: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, way], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner, owner.stdout:
        pid = int(owner.stdout.readline().split()[0])
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended already
            assert way == "exit"
            return
        if way == "wait":
            owner.kill()
        if way == "fork":
            assert owner.stdout.readline() == "answers\n"
        assert ended(pidfd)
        os.close(pidfd)
