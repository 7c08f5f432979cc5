"""Claims the socket's path: only one of two daemons gets it, and the socket of a dead daemon is removed.

All steps hold the lock `<path>.lock`, which is never removed, because another daemon may be about to lock it.
A socket that answers a connect has a live owner and is never touched.
"""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError, TierError

BACKLOG: Final = 128
LISTEN_FIRST: Final = 3  # sd_listen_fds(3)
STORED: Final = "kvtier-"  # how names of stored descriptors begin
PATIENCE_S: Final = 3.0  # another daemon holds the lock for as long as a bind takes
ENDED: Final = ("Z", "X")  # of the states of a process
_PAUSE_S = 0.02

_PEER = struct.Struct("=iII")  # struct ucred: pid, uid, gid


class InUseError(TierError):
    """Another process holds a directory's lock."""

    def __init__(self, text: str, holder: int) -> None:
        super().__init__(text)
        self.holder = holder


def keeper_of(path: Path) -> Path:
    """Return where the keeper process of the daemon with this socket listens."""
    return Path(f"{path}.keeper")


def claim_socket(
    path: Path,
    mode: int,
    group: int | None,
    *,
    origin: str = "default",
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> socket.socket:
    """Return a non-blocking socket that listens at `path`, with this `mode` and `group`.

    No client can connect before the mode is set, independent of the umask. Never takes the path from a live
    process, and removes only sockets: otherwise ConfigError names the owner. `origin`: where the path was
    configured.
    """
    with _locked(path, clock, sleep):
        _clear(path, origin)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # Linux makes the file with the mode of the unbound socket, so there is no moment at
            # which it is open to more; and before listen() a connect is refused anyway.
            os.fchmod(listener.fileno(), 0o600)
            try:
                listener.bind(os.fspath(path))
            except OSError as error:
                raise ConfigError(f"socket {path}: {error.strerror or error}") from error
            try:
                _open_to(path, mode, group)
                listener.listen(BACKLOG)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        return listener


def inherited_fds(
    environ: MutableMapping[str, str] | None = None, first: int = LISTEN_FIRST
) -> tuple[list[int], dict[str, int]]:
    """Return what the service manager handed over: sockets, and the descriptors that an earlier daemon stored
    with it, by name. Removes the manager's variables from the environment."""
    environ = os.environ if environ is None else environ
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count.isdecimal():
        return [], {}
    sockets: list[int] = []
    stored: dict[str, int] = {}
    for at in range(int(count)):
        fd, name = first + at, names[at] if at < len(names) else ""
        if name.startswith(STORED):
            os.set_inheritable(fd, False)
            stored[name] = fd
        else:
            sockets.append(fd)
    return sockets, stored


def inherited_socket(path: Path, sockets: Sequence[int]) -> socket.socket | None:
    """Return the socket that the service manager listens with, non-blocking; None if it handed over none.

    The manager decides which users may connect. ConfigError if it listens at another path than `path`, which
    clients use.
    """
    if not sockets:
        return None
    if len(sockets) > 1:
        raise ConfigError(
            f"socket {path}: the service manager handed over {len(sockets)} sockets, not one"
        )
    try:
        listener = socket.socket(fileno=sockets[0])
    except OSError as error:
        text = (
            f"socket {path}: the service manager handed over something that is not a "
            f"socket: {error.strerror}"
        )
        raise ConfigError(text) from error
    listener.set_inheritable(False)
    is_fit = (listener.family, listener.type) == (socket.AF_UNIX, socket.SOCK_STREAM)
    there = listener.getsockname() if is_fit else f"a socket of {listener.family.name}"
    if not is_fit or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.close()
        raise ConfigError(
            f"socket {path}: the service manager handed over {there}, expected a "
            "listening Unix stream socket"
        )
    if Path(os.fsdecode(there)) != path:
        listener.close()
        raise ConfigError(
            f"socket {path}: the service manager listens at {there}; set ListenStream= and "
            "socket to the same path"
        )
    listener.setblocking(False)
    return listener


def release_socket(listener: socket.socket) -> None:
    """Close `listener` and remove its path, unless another process owns that now. Never connects to a socket
    of the service manager: that would start the daemon again."""
    path = Path(os.fsdecode(listener.getsockname()))
    if _listening_pid(listener) == os.getpid():
        with contextlib.suppress(OSError, ConfigError), _locked(path, time.monotonic, time.sleep):
            if owner_of(path) == os.getpid():
                path.unlink()
    listener.close()


@contextlib.contextmanager
def _locked(
    path: Path, clock: Callable[[], float], sleep: Callable[[float], None]
) -> Iterator[None]:
    lock = Path(f"{path}.lock")
    deadline = clock() + PATIENCE_S
    while True:
        try:
            held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"socket {path}: cannot open {lock}: {error.strerror}") from error
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(held, lock):  # else a cleaner removed it, and the lock is on a dead file
                break
        except BlockingIOError:
            pass
        os.close(held)
        if clock() > deadline:
            raise ConfigError(
                f"socket {path}: {lock} is held by another process that is starting; if it "
                "hangs, end it"
            )
        sleep(_PAUSE_S)
    try:
        yield
    finally:
        os.close(held)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _clear(path: Path, origin: str) -> None:
    """Remove a dead daemon's socket from `path`; refuse anything else."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"socket {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(
            f"socket {path}: a file that is not a socket exists there; move it away or choose "
            "another path"
        )
    owner = owner_of(path)
    if owner is None:
        path.unlink(missing_ok=True)
        return
    who, stop = named(owner), "stop it"
    if who.endswith("(systemd)"):
        stop = "stop its service and socket (`systemctl stop kvtierd.socket kvtierd`)"
    raise ConfigError(
        f"socket {path} ({origin}): taken by {who}; {stop}, or choose another path with --socket"
    )


def owner_of(path: Path) -> int | None:
    """Return the pid that listens at `path`, 0 if it is unknown, None if no process does. A killed
    process that a disk keeps from ending still listens: it counts as gone.

    Never waits. Raises ConfigError if the check fails.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)  # a hung daemon with a full backlog is alive
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EPROTOTYPE):
                return 0
            raise ConfigError(
                f"socket {path}: {error.strerror or error}, so it is unknown whether a daemon "
                "listens there; choose another path with --socket"
            ) from error
        pid = _listening_pid(probe)
    if pid and _state_of(pid) in ENDED:
        return None
    return pid  # 0 for a process outside this pid namespace


def _listening_pid(one: socket.socket) -> int:
    """Return which process listens with this socket, or with the one that it is connected to."""
    pid, _, _ = _PEER.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(pid)


def named(owner: int) -> str:
    """Return how to call the process that `owner_of` found."""
    if not owner:
        return "a live process"
    try:
        return f"process {owner} ({Path(f'/proc/{owner}/comm').read_text().strip()})"
    except OSError:
        return f"process {owner}"


def is_stopped(owner: int) -> bool:
    """Return whether the process was stopped by a signal or a debugger."""
    return _state_of(owner) in ("T", "t")


def is_alive(owner: int) -> bool:
    """Whether the process exists and has not ended. It may exist, with its files, while a disk hangs."""
    return _state_of(owner) not in ("", *ENDED)


def _state_of(owner: int) -> str:
    try:
        _, _, fields = Path(f"/proc/{owner}/stat").read_text().rpartition(")")
    except OSError:
        return ""
    return fields.split()[0]


def _open_to(path: Path, mode: int, group: int | None) -> None:
    if group is not None:
        try:
            os.chown(path, -1, group)
        except PermissionError as error:
            raise ConfigError(
                f"socket_group: uid {os.geteuid()} may not change the group of {path} to "
                f"{group}; make that user a member of the group, or remove socket_group"
            ) from error
    path.chmod(mode)
