"""The sockets that a client tries without configuration."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from kvtier.client import DEFAULT_SOCKET, default_socket


@pytest.fixture(autouse=True)
def nothing_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVTIER_SOCKET", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def listening(folder: Path) -> str:
    folder.mkdir(parents=True)
    (folder / "kvtier.sock").touch()
    return str(folder / "kvtier.sock")


def test_a_configured_socket_has_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_SOCKET", "/somewhere/k.sock")
    assert default_socket() == "/somewhere/k.sock"


def test_a_users_own_daemon_has_priority_over_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_socket() == DEFAULT_SOCKET
    own = listening(tmp_path / f"kvtier-{os.geteuid()}")
    assert default_socket() == own
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    assert default_socket() == DEFAULT_SOCKET, "with a runtime directory, only there"
    runtime = listening(tmp_path / "run" / "kvtier")
    assert default_socket() == runtime


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_folder_of_another_user_is_ignored(tmp_path: Path) -> None:
    own = listening(tmp_path / f"kvtier-{os.geteuid()}")
    os.chown(Path(own).parent, 12345, 12345)
    assert default_socket() == DEFAULT_SOCKET
