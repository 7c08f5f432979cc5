"""As a service: the daemon notifies the service manager when it is ready and when it stops."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def test_the_service_manager_is_notified(tmp_path: Path) -> None:
    manager_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager_socket.bind(str(tmp_path / "notify"))
    manager_socket.settimeout(60)
    environment = dict(
        os.environ, NOTIFY_SOCKET=str(tmp_path / "notify"), KVTIER_STATE=str(tmp_path / "state")
    )
    command = [sys.executable, "-m", "kvtier_daemon.cli", "serve", "--warm-size", "64MiB"]
    command += ["--socket", str(tmp_path / "kvtier.sock"), "--log-level", "warning"]
    daemon = subprocess.Popen(command, env=environment)
    try:
        with manager_socket:
            message = manager_socket.recv(4096).decode()
            while "READY=1" not in message:
                message = manager_socket.recv(4096).decode()
            assert "STATUS=" in message
            while "64 MiB of 64 MiB" not in message:
                message = manager_socket.recv(4096).decode()
            daemon.terminate()
            while "STOPPING=1" not in message:
                message = manager_socket.recv(4096).decode()
        assert daemon.wait(60) == 0
    finally:
        daemon.kill()
        daemon.wait()
