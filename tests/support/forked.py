"""Run daemons and commands without their imports: a process that has imported them forks once per command.

Importing takes 0.1 to 0.2 s of CPU time, more than most tests; the fork runs the command from its first line.
The processes that a daemon starts for its indexes and its store are such forks too, and not its children.
Run as a program, this file is that process: it reads requests from its standard input, a socket, and from the
sockets of the daemons that it has forked.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

FORK, WAIT = "fork", "wait"
INDEX, STORE = "index", "store"  # in place of a program: the processes that a daemon starts
ASK_S = 60.0
LONGEST = 1 << 20  # of a request, which consists mostly of the environment


def pair() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
    return ends


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
        with self._lock:
            if self.returncode is not None:
                return self.returncode
            ended = os.dup(self._ended)  # another thread may close the first one meanwhile
        try:
            looking = select.poll()
            looking.register(ended, select.POLLIN)
            if not looking.poll(None if timeout is None else timeout * 1000):
                return None
        finally:
            os.close(ended)
        with self._lock:
            if self.returncode is None:
                status = self._server.ask([WAIT, self.pid])
                os.close(self._ended)
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Server:
    """The connection of the tests, or of a daemon, to the process that forks."""

    def __init__(self, end: socket.socket) -> None:
        self._lock = threading.Lock()
        self._socket = end

    def start(
        self, words: list[str], stdout: int, stderr: int, env: Mapping[str, str] = os.environ,
        haste: Mapping[str, float] | None = None, program: str = "", own_children: bool = False,
        imports: tuple[str, ...] = (),
    ) -> Process:  # fmt: skip
        """Run `kvtier`, or a Python program, with these arguments, without input, in this process's folder.
        `haste`: values of constants (support/hasty.py). `own_children`: a daemon starts its processes itself.
        `imports`: modules that the program needs, imported once for all such forks."""
        request = [
            FORK,
            imports,
            words,
            os.getcwd(),
            dict(env),
            dict(haste or {}),
            program,
            own_children,
        ]
        return Process(self, self.ask(request, stdout, stderr))

    def start_child(
        self, which: str, haste: Mapping[str, float], *fds: int
    ) -> tuple[Process, socket.socket]:
        """Start a process of a daemon, as `child_process.start_child` does."""
        own_end, child_end = socket.socketpair()
        with child_end, open(os.devnull, "wb") as nothing:
            request = [FORK, (), [], "/", dict(os.environ), dict(haste), which, True]
            pid = self.ask(request, nothing.fileno(), 2, child_end.fileno(), *fds)
        return Process(self, pid), own_end

    def run(
        self, words: list[str], env: Mapping[str, str] = os.environ, program: str = "",
        imports: tuple[str, ...] = (), seconds: float = 120.0,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run `kvtier`, or a Python program, with these arguments until it ends."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = self.start(
                words, out.fileno(), err.fileno(), env, program=program, imports=imports
            )
            try:
                code = process.wait(seconds)
            finally:
                process.kill()
                process.wait()
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess(words, code, out.read(), err.read())

    def ask(self, request: list[Any], *descriptors: int) -> int:
        deadline = time.monotonic() + ASK_S
        with self._lock:
            while True:
                try:
                    socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
                    return int(self._socket.recv(64))
                except OSError as error:
                    # The kernel limits the descriptors on their way of all processes of a user, except root:
                    # other tests have connections that never read.
                    if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)


def started(env: Mapping[str, str] | None = None) -> Server:
    """Start the process that forks; it ends with this one."""
    own_end, child_end = pair()
    with child_end:
        process = subprocess.Popen([sys.executable, __file__], stdin=child_end, env=env)

    def close() -> None:
        own_end.shutdown(socket.SHUT_RDWR)  # a fork of this process may also have it open
        own_end.close()
        process.wait()

    atexit.register(close)
    return Server(own_end)


def serve() -> tuple[list[str], str]:
    """Fork and wait on request, until the socket of the tests closes. Returns only in the forks: their
    arguments, and their program if it is not `kvtier`."""
    tests = socket.socket(fileno=os.dup(0))
    ends = {tests.fileno(): tests}
    looking = select.poll()
    looking.register(tests, select.POLLIN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends after its parent
    while True:
        for ready, _ in looking.poll():
            asked = ends[ready]
            text, descriptors, _, _ = socket.recv_fds(asked, LONGEST, 4)
            if not text:
                if asked is tests:
                    os._exit(0)
                looking.unregister(asked)
                ends.pop(ready).close()
                continue
            kind, *rest = json.loads(text)
            if kind == WAIT:
                asked.send(str(os.waitpid(rest[0], 0)[1]).encode())
                continue
            import_once(rest.pop(0))
            own_end, child_end = pair()
            if child := os.fork():
                for descriptor in descriptors:
                    os.close(descriptor)
                child_end.close()
                ends[own_end.fileno()] = own_end
                looking.register(own_end, select.POLLIN)
                asked.send(str(child).encode())
                continue
            for end in (*ends.values(), own_end):
                end.close()
            return forked(rest, descriptors, Server(child_end))


def forked(request: list[Any], descriptors: list[int], server: Server) -> tuple[list[str], str]:
    """Become the process of this request."""
    words, folder, environment, haste, program, own_children = request
    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptors.insert(0, os.open(os.devnull, os.O_RDONLY))
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    encoding = environment.get("PYTHONIOENCODING") or sys.stdout.encoding
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    os.chdir(folder)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    hasty.hurry_all(haste)
    if program in CHILDREN:
        os.setpgid(0, 0)
        sys.argv = [program, *map(str, descriptors[3:])]
        CHILDREN[program].main()
    if not own_children:
        of_index = hasty.of_index(haste)
        index_process.start_child = lambda *_: server.start_child(INDEX, of_index)
        store_driver.start_child = lambda _, fd: server.start_child(STORE, {}, fd)
    return list(words), str(program)


def import_once(modules: Iterable[str]) -> None:
    """Import these modules for all later forks."""
    for name in modules:
        if name not in sys.modules:
            import_module(name)
            settle()


def settle() -> None:
    """Let forks leave alone what has been imported: what native modules free at an exit would be copied
    first, in 1 ms, and a garbage collection would visit, and thereby copy, the pages that forks share."""
    atexit._clear()
    atexit.register(logging.shutdown)  # a fork runs what it registers
    gc.collect()
    gc.freeze()


def end(error: SystemExit) -> None:
    """End this process as Python does, but free no objects: that would copy the memory that it shares with
    the process that forked, and take as long as all that most commands do."""
    if not isinstance(error.code, int | None):
        raise error  # a message
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((error.code or 0) & 0xFF)


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
    hasty, index_process = map(import_module, ("hasty", "kvtier_daemon.tiers.cold.index_process"))
    store_driver = import_module("kvtier_daemon.tiers.remote.driver")
    CHILDREN = {
        INDEX: import_module("kvtier_daemon.tiers.cold.index_child"),
        STORE: import_module("kvtier_daemon.tiers.remote.child"),
    }
    with contextlib.suppress(ImportError):
        import_module("kvtier_daemon.tiers.remote.s3")
    # What each daemon and each command begins with: a fork finds its results in caches.
    cli.program()
    for name in ("serve", "status", "tier"):
        cli.loaded(name)
    import_module("kvtier_daemon.config.schema").load(None, {"warm.size": "4MiB"}, environ={})
    settle()
    sys.path.pop(0)  # this file's folder, which a daemon does not have
    words, program = serve()
    sys.argv = [str(Path(cli.__file__ or "").with_name("__main__.py")), *words]
    try:
        if program:
            exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})  # noqa: S102
        else:
            cli.main()
    except SystemExit as error:
        end(error)
    end(SystemExit(0))
