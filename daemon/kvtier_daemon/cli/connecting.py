"""Connects commands to the daemon. If none answers, the error contains the remedy."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier import Client

# The command answers within 2 s of its start. If its own start took longer, it waits longer for the daemon,
# because the machine is slow.
TOLD_S = 1.75
SHOWN = "`systemctl status kvtierd` shows whether it starts, or why it failed"
ANSWER_S, LEAST_ANSWER_S = 1.5, 1.0


@contextmanager
def connected(socket: Path | None, name: str, answer_s: float = 0.0) -> Iterator[Client]:
    """Connect to the daemon at `socket`, or at the default socket. If no daemon of this version answers,
    Unavailable contains the remedy. `answer_s`: the time limit of later answers, if not that of the first."""
    from kvtier import Client
    from kvtier.client import default_socket
    from kvtier.errors import ProtocolError, Refused, Unavailable

    path = Path(socket or default_socket())
    try:
        first_s = _first_answer_s()
        if answer_s > first_s:  # detect a daemon that does not answer sooner
            Client.connect(str(path), timeout_s=first_s, populate=False, name=name).close()
        timeout_s = max(answer_s, first_s)
        with Client.connect(
            str(path), timeout_s=timeout_s, populate=False, name=name, reconnect_s=0
        ) as client:
            yield client
    except Unavailable as error:
        raise Unavailable(_why(path, error)) from error
    except ProtocolError as error:
        text = f"the process at {path} is not a kvtier daemon of this version: {error}"
        raise Unavailable(
            f"{text}; `kvtier --version` prints the version of this command"
        ) from error
    except Refused as error:
        if error.code != "wrong_schema":
            raise
        from importlib.metadata import version

        text = f"{path}: {error.message}; this command is kvtier {version('kvtier')}"
        raise Unavailable(text) from error


@cache
def _first_answer_s() -> float:
    """Return the time limit of the first answer, which depends on how long this process took to start."""
    return round(min(ANSWER_S, max(LEAST_ANSWER_S, TOLD_S - _age_s())), 1)


def _age_s() -> float:
    # The program's name may contain blanks and brackets; it ends with the last bracket.
    begun = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begun / os.sysconf("SC_CLK_TCK")


def _why(path: Path, error: Exception) -> str:
    """Return why no daemon answers at `path`, and the remedy."""
    from kvtier import client
    from kvtier.errors import ConfigError
    from kvtier.wire import LIMIT_SOCKET_PATH
    from kvtier_daemon.claim import is_stopped, named, owner_of
    from kvtier_daemon.config.schema import SYSTEM_SOCKET, SYSTEM_UNITS, default_socket

    cause = error.__cause__
    if isinstance(cause, PermissionError):
        return _closed(path)
    if len(os.fsencode(path)) > LIMIT_SOCKET_PATH:
        return str(error)
    try:
        owner = owner_of(path)
    except ConfigError:  # the owner is unknown: report what the client found
        owner = None
    if owner == 1:  # kvtierd.socket: systemd starts the daemon for the first client
        return f"systemd listens at {path} for a daemon that does not serve: {error}; {SHOWN}"
    if owner is not None:
        advice = (
            f"it is stopped; `kill -CONT {owner}` continues it"
            if is_stopped(owner)
            else "see its log, and restart it if this continues"
        )
        return f"{named(owner)} listens at {path} and does not serve: {error}; {advice}"
    reason = (cause.strerror or cause) if isinstance(cause, OSError) else error
    own = default_socket(os.environ, os.geteuid())
    nor = f", nor at {own}" if str(path) == client.DEFAULT_SOCKET and own != path else ""
    start = "start one with `kvtier serve --warm-size 8GiB`"
    if path == SYSTEM_SOCKET and (SYSTEM_UNITS / "kvtierd.service").exists():
        start = SHOWN
    return f"no daemon answers at {path}: {reason}{nor}; {start}, or give its path with --socket"


def _closed(path: Path) -> str:
    """Return why this user cannot connect to the socket, and the remedy."""
    uid = os.geteuid()
    try:
        found = path.stat()
    except OSError:
        return (
            f"uid {uid} may not enter the directory of {path}; set socket in the daemon's "
            "configuration to a path in a directory that its users can enter"
        )
    group = _group_name(found.st_gid)
    join = (
        f"become a member of group {group}, or " if found.st_mode & 0o020 and found.st_gid else ""
    )
    return (
        f"uid {uid} may not connect to {path} (owner uid {found.st_uid}, group {group}, mode "
        f"{found.st_mode & 0o777:04o}); {join}set socket_group or socket_mode in the daemon's "
        "configuration"
    )


def _group_name(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
