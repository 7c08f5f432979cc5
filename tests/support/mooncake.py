"""A real Mooncake Store on loopback for tests: a master, and a process that lends memory, as another host
would. They are ended by their pids."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvtier_daemon.config.preflight import missing_library
from support.ports import reserved_port

START_S = 60.0
LENT_BYTES = 64 << 20
NODE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 20, "tcp", "", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
"""


def master_program() -> Path:
    """The master of the installed package; skips the test where there is no package for this machine."""
    package = find_spec("mooncake")
    if package is None or package.origin is None:
        pytest.skip("there is no mooncake-transfer-engine for this machine")
    if missing := missing_library():
        pytest.skip(missing)
    return Path(package.origin).parent / "mooncake_master"


class MooncakePool:
    """Starts on a free port, and again on the same one. Objects end with the process that lent the memory."""

    def __init__(self, folder: Path, lent_bytes: int = LENT_BYTES) -> None:
        self._program = master_program()
        self._folder = folder
        self._lent_bytes = lent_bytes
        self.port = reserved_port()
        self._running: list[subprocess.Popen[bytes]] = []
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        log = (self._folder / "mooncake.log").open("ab")
        with log:
            master = subprocess.Popen(
                [
                    str(self._program), f"--rpc_port={self.port}", "--rpc_address=127.0.0.1",
                    f"--metrics_port={reserved_port()}", "--enable_metric_reporting=false",
                ],
                stdout=log, stderr=log, env={**os.environ, "GLOG_minloglevel": "2"},
            )  # fmt: skip
            self._running = [master]
            until = time.monotonic() + START_S
            while True:
                assert master.poll() is None and time.monotonic() < until, "the master must run"
                try:
                    socket.create_connection(("127.0.0.1", self.port)).close()
                    break
                except ConnectionRefusedError:
                    time.sleep(0.02)
            if self._lent_bytes:
                self._running.append(self._lend(log.fileno()))

    def _lend(self, log: int) -> subprocess.Popen[bytes]:
        node = subprocess.Popen(
            [sys.executable, "-c", NODE, self.address, str(self._lent_bytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
        assert node.stdout is not None
        with node.stdout:
            assert node.stdout.readline() == b"0\n", "the process must join the pool"
        return node

    def stop(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._running = []

    def stop_lending(self) -> None:
        """Kill the process that lends memory, as a host that dies."""
        lender = self._running.pop()
        assert self._running, "the master must stay"
        lender.kill()
        lender.wait()
        if lender.stdin is not None:
            lender.stdin.close()

    def pause(self) -> None:
        """Let it accept connections and answer none."""
        for process in self._running:
            process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        for process in self._running:
            process.send_signal(signal.SIGCONT)

    def config(self, more: str = "", deadline_s: int = 30) -> str:
        """The section of a daemon's configuration."""
        return (
            f'[remote]\nurl = "mooncake://{self.address}"\nprefix = "fleet"\ndeadline_s = {deadline_s}\n'
            f'buffer = "16MiB"\nknown = "1MiB"\n{more}'
        )
