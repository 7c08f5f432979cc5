"""Notifies the service manager: systemd's notification protocol, one datagram per message, and log lines with
the priority that the journal reads.

Without $NOTIFY_SOCKET every call does nothing.
"""

import logging
import os
import select
import socket
import time
from collections.abc import Mapping
from typing import Final

ERROR: Final = "<3>"  # in front of a line for the journal
BARRIER_S: Final = 2.0
PATIENCE_S: Final = 0.5  # systemd reads at once; a full queue must not hold up start and stop


def watchdog_s(environ: Mapping[str, str] | None = None) -> float:
    """Return how long the manager waits for `alive` before it ends the daemon; 0: it doesn't."""
    environ = os.environ if environ is None else environ
    usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or pid not in ("", str(os.getpid())):
        return 0.0
    return int(usec) / 1_000_000


class LogFormatter(logging.Formatter):
    """Formats a record for a terminal or a file; for the journal, which adds the time by itself, with the
    priority in front of each line."""

    def __init__(self, journal: bool) -> None:
        self._journal = journal
        said = "%(name)s: %(message)s"
        super().__init__(said if journal else f"%(asctime)s %(levelname)s {said}")

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not self._journal:
            return text
        return "\n".join(f"<{_priority(record.levelno)}>{line}" for line in text.splitlines())


def _priority(level: int) -> int:
    """Return the priority of syslog for a level of logging."""
    return next(
        (number for least, number in ((50, 2), (40, 3), (30, 4), (20, 6)) if level >= least), 7
    )


def to_journal(descriptor: int, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether what is written to `descriptor` goes to the journal of the service manager."""
    environ = os.environ if environ is None else environ
    try:
        found = os.fstat(descriptor)
    except OSError:  # closed
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class Notifier:
    """Tells the service manager how the start and the stop go. Never raises, never waits long."""

    def __init__(self, address: str | None) -> None:
        self._address: str | bytes | None = None
        if address and address[0] in "/@":  # other kinds (vsock) are for virtual machines
            # A leading @ stands for the zero byte of the abstract namespace, which has no files.
            abstract = address.startswith("@")
            self._address = b"\0" + os.fsencode(address[1:]) if abstract else address

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> "Notifier":
        """Return one that sends to $NOTIFY_SOCKET if it is set."""
        return cls((os.environ if environ is None else environ).get("NOTIFY_SOCKET"))

    @property
    def is_heard(self) -> bool:
        """Whether there is a manager to tell."""
        return self._address is not None

    def main_pid(self, pid: int) -> bool:
        """Name another process of this service as its main one; return whether the manager has read it."""
        if not self._send(MAINPID=str(pid)) or self._address is None:
            return False
        read, write = os.pipe()
        try:
            # The manager closes it after it has read all earlier messages.
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(PATIENCE_S)
                sender.connect(self._address)
                socket.send_fds(sender, [b"BARRIER=1"], [write])
            os.close(write)
            write = -1
            return bool(select.select([read], [], [], BARRIER_S)[0])
        except OSError:
            return False
        finally:
            os.close(read)
            if write >= 0:
                os.close(write)

    def ready(self, status: str = "") -> bool:
        """Say that clients are served from now on."""
        return self._send(READY="1", STATUS=status)

    def status(self, text: str) -> bool:
        """Set the line of status for `systemctl status`."""
        return self._send(0.0, STATUS=text)

    def reloading(self) -> bool:
        """Say that the configuration is read again; `ready` says that this is over."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        return self._send(RELOADING="1", MONOTONIC_USEC=str(now))

    def stopping(self, status: str = "") -> bool:
        """Say that the stop has begun."""
        return self._send(STOPPING="1", STATUS=status)

    def alive(self) -> bool:
        """Say that the daemon works (watchdog)."""
        return self._send(0.0, WATCHDOG="1")

    def extend_timeout(self, seconds: float) -> bool:
        """Ask for `seconds` from now on for the start or the stop that is under way."""
        return self._send(EXTEND_TIMEOUT_USEC=str(round(seconds * 1_000_000)))

    def store(self, name: str, fd: int, within_s: float = PATIENCE_S) -> bool:
        """Let the manager hold a duplicate of this descriptor over restarts of the service."""
        return self._send(within_s, fd, FDSTORE="1", FDNAME=name, FDPOLL="0")

    def unstore(self, name: str, within_s: float = PATIENCE_S) -> bool:
        """Let the manager close what it holds under this name."""
        return self._send(within_s, FDSTOREREMOVE="1", FDNAME=name)

    def _send(self, within_s: float = PATIENCE_S, descriptor: int = -1, **assignments: str) -> bool:
        """Return whether the manager received the message. Waits at most PATIENCE_S; periodic messages wait
        for nothing, and are dropped if its queue is full."""
        if self._address is None:
            return False
        # A line break starts the next assignment.
        lines = [f"{key}={' '.join(text.split())}" for key, text in assignments.items() if text]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(min(within_s, PATIENCE_S))
                sender.connect(self._address)
                fds = [descriptor] if descriptor >= 0 else []
                socket.send_fds(sender, ["\n".join(lines).encode()], fds)
        except OSError:  # the manager is gone or busy; that is no reason to fail
            return False
        return True
