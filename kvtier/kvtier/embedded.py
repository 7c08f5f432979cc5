"""A daemon in a child process of this program, for notebooks, scripts and tests.

It listens in a private folder of temporary files. It ends when its client is closed, when this process exits,
and when this process is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvtier.arguments import Checking
from kvtier.errors import ConfigError, InvalidArgument, Unavailable
from kvtier.units import parse_bytes

START_S = 60.0
STOP_S = 120.0  # more than the daemon's own limit
LOOK_S = 0.02
FAILED_LINES = 3
LONGEST_FOLDER = 70
# Variables that configure the daemon of the host, and those of a service manager for this program.
FOR_OTHERS = (
    "KVTIER_", "NOTIFY_SOCKET", "WATCHDOG_", "LISTEN_", "FDSTORE", "CREDENTIALS_DIRECTORY",
)  # fmt: skip

T = TypeVar("T")


class EmbeddedDaemon:
    """A child process that runs `kvtier serve`, and its folder of temporary files."""

    def __init__(
        self, warm: str | int, cold: str | os.PathLike[str] | None, cold_size: str | int
    ) -> None:
        settings = ['log_level = "warning"', "[warm]", f"size = {_amount('warm', warm)}"]
        settings.append("keep_s = 0")
        state = None
        if cold is not None:
            with Checking("cold"):
                place = Path(os.fsdecode(cold)).expanduser().absolute()
            blocks, state = place / "blocks", place / "state"
            size = _amount("cold_size", cold_size)
            try:
                for folder in (place, blocks, state):  # whatever the umask is
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"cold: cannot create {folder}: {error.strerror}") from error
            except ValueError as error:  # a zero byte, or half of a surrogate pair
                raise InvalidArgument(f"cold: {cold!r}: {error}") from error
            settings += ["[cold]", f"directories = [{json.dumps(str(blocks))}]", f"size = {size}"]
        self._owner = os.getpid()
        # Only this user may enter it. A socket's path has at most 107 bytes.
        usual = len(os.fsencode(tempfile.gettempdir())) <= LONGEST_FOLDER
        self._folder = Path(tempfile.mkdtemp(prefix="kvtier-", dir=None if usual else "/tmp"))
        self._log = self._folder / "daemon.log"
        self.socket = str(self._folder / "kvtier.sock")
        settings.insert(0, f"state = {json.dumps(str(state or self._folder / 'state'))}")
        path = self._folder / "kvtier.toml"
        command = [sys.executable, "-P", "-m", "kvtier_daemon.cli", "serve", "--config", str(path)]
        command += ["--socket", self.socket, "--with-process", str(self._owner)]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(FOR_OTHERS)
        }
        try:
            path.write_text("\n".join(settings) + "\n")
            with self._log.open("wb") as log:
                # In a session of its own, because Ctrl-C is for this program.
                self.process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def connected(self, connect: Callable[[], T]) -> T:
        """Call `connect` until the daemon answers, and return its result. Raises ConfigError with the
        daemon's message if it ends. A failure ends the daemon."""
        try:
            found = first_answer(connect, self.process, START_S)
            if found is None:
                said = self._log.read_text(errors="replace").splitlines()[-FAILED_LINES:]
                raise ConfigError(f"the embedded daemon did not start: {' '.join(said)}")
            return found
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Stop the daemon, wait for its end, and remove its folder. Does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def first_answer(
    connect: Callable[[], T], daemon: subprocess.Popen[bytes], within_s: float
) -> T | None:
    """Call `connect` until the starting daemon answers; None if it ends. Raises Unavailable if late."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return connect()
        except Unavailable:
            if daemon.poll() is not None:
                return None
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK_S)


def _amount(name: str, value: str | int) -> int:
    if not isinstance(value, (int, str)):
        raise InvalidArgument(f"{name}: {value!r} is not an amount of bytes, such as 64GiB")
    with Checking(name):
        return parse_bytes(value)
