"""Run daemons and commands without their imports: a process that has imported them forks once per command.

Importing takes 0.1 to 0.2 s of CPU time, more than most tests; the fork runs the command from its first line.
Run as a program, this file is that process: it reads requests from its standard input, a socket.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

FORK, WAIT = "fork", "wait"
LONGEST = 1 << 20  # of a request, which consists mostly of the environment


class Process:
    """A forked process, with the interface of subprocess.Popen."""

    def __init__(self, server: Server, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._ended = os.pidfd_open(pid)  # readable once it has ended
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._wait(timeout) is None:
            raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is not None:
            return self.returncode
        looking = select.poll()
        looking.register(self._ended, select.POLLIN)
        if looking.poll(None if timeout is None else timeout * 1000):
            with self._lock:
                if self.returncode is None:
                    status = self._server.ask([WAIT, self.pid])
                    os.close(self._ended)
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Server:
    """The connection of the tests to the process that forks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            for end in (self._socket, child_end):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
            self._process = subprocess.Popen([sys.executable, __file__], stdin=child_end)
        atexit.register(self.close)

    def start(
        self, words: list[str], stdout: int, stderr: int, env: Mapping[str, str] = os.environ,
        haste: Mapping[str, float] | None = None, program: str = "",
    ) -> Process:  # fmt: skip
        """Run `kvtier`, or a Python program, with these arguments, without input, in this process's folder.
        `haste`: values of constants (support/hasty.py)."""
        request = [FORK, words, os.getcwd(), dict(env), dict(haste or {}), program]
        return Process(self, self.ask(request, stdout, stderr))

    def run(
        self, words: list[str], env: Mapping[str, str] = os.environ, program: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run `kvtier`, or a Python program, with these arguments until it ends."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = self.start(words, out.fileno(), err.fileno(), env, program=program)
            try:
                code = process.wait(120)
            finally:
                process.kill()
                process.wait()
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess(words, code, out.read(), err.read())

    def ask(self, request: list[Any], *descriptors: int) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            return int(self._socket.recv(64))

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # a fork of this process may also have it open
        self._socket.close()
        self._process.wait()


def serve() -> tuple[list[str], str]:
    """Fork and wait on request, until the socket closes. Returns only in the forks: their arguments, and
    their program if it is not `kvtier`."""
    asked = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends after its parent
    while True:
        text, descriptors, _, _ = socket.recv_fds(asked, LONGEST, 2)
        if not text:
            os._exit(0)
        kind, *rest = json.loads(text)
        if kind == WAIT:
            asked.send(str(os.waitpid(rest[0], 0)[1]).encode())
            continue
        if child := os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            asked.send(str(child).encode())
            continue
        asked.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        words, folder, environment, haste, program = rest
        descriptors.insert(0, os.open(os.devnull, os.O_RDONLY))
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        encoding = environment.get("PYTHONIOENCODING") or sys.stdout.encoding
        sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        hasty.hurry_all(haste)
        return list(words), str(program)


if __name__ == "__main__":
    for name in (
        "uvloop",
        "kvtier.client",
        "kvtier_daemon.app",
        "kvtier_daemon.cli.serve",
        "kvtier_daemon.cli.status",
        "kvtier_daemon.config.preflight",
        "rich.table",
    ):
        import_module(name)
    cli = import_module("kvtier_daemon.cli")
    hasty = import_module("hasty")
    # No garbage collection of a fork visits, and thereby copies, the pages that it shares.
    gc.collect()
    gc.freeze()
    sys.path.pop(0)  # this file's folder, which a daemon does not have
    words, program = serve()
    sys.argv = [str(Path(cli.__file__ or "").with_name("__main__.py")), *words]
    if program:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})  # noqa: S102
    else:
        cli.main()
