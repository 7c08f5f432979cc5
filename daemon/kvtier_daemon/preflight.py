"""What the machine has to offer, looked at before anything is allocated.

Each check returns a Finding. All that fail are reported together, each with its remedy, so that one
start is enough to learn everything that is missing.
"""

import contextlib
import grp
import os
import pwd
import resource
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError
from kvtier.units import MIB, format_bytes
from kvtier.wire import LIMIT_SOCKET_PATH
from kvtier_daemon.config import Config, Loaded, Warm
from kvtier_daemon.observing.web import LIMIT_CONNECTIONS
from kvtier_daemon.problems import Problems
from kvtier_daemon.profiles import losses_of
from kvtier_daemon.values import PAGE_BYTES

GENERATION_BYTES: Final = 8  # one generation a page, in a table beside each extent
FDS_PER_EXTENT: Final = 4  # its memory and its table, both twice while they are allocated
FDS_PER_CLIENT: Final = (
    4  # its socket and its pidfd, and those of another that has yet to say hello
)
FDS_RESERVED: Final = 64  # the loop, logs, the catalog of small things

_CAP_IPC_LOCK = 14
_IDENTITY = ["0", "0", "4294967295"]
_GIVE = "chown it to the daemon's user, or "
_UNLIMITED = 1 << 62  # what cgroup v1 writes where there is no limit is near 2**63

Limits = Callable[[int], tuple[int, int]]
SetLimits = Callable[[int, tuple[int, int]], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. `what` and `value` are for reading, `fix` says what to do if not ok."""

    ok: bool
    what: str
    value: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.value}" + ("" if self.ok else f"; {self.fix}")


def look(loaded: Loaded) -> list[Finding]:
    """Return what every check found; makes the default socket's directory, allocates nothing."""
    config = loaded.config
    return [
        memory(config.warm),
        locked_memory(config.warm),
        open_files(config),
        socket_path(config.socket),
        socket_directory(config.socket.parent, is_default=loaded.origins["socket"] == "default"),
        state_directory(config.state),
        calibration(config),
    ]


def look_before_start(loaded: Loaded, of_service: bool = False) -> list[Finding]:
    """Return what would stop a start with this configuration, or leave a tier out, as far as that can be
    known while another daemon may be running; changes nothing. `of_service`: its unit sets the limits."""
    config = loaded.config
    is_default = loaded.origins["socket"] == "default"
    findings = [] if of_service else [locked_memory(config.warm), open_files(config)]
    return [
        *findings,
        memory_of_machine(config.warm),
        socket_path(config.socket),
        socket_directory(config.socket.parent, is_default=is_default, make=False),
        state_directory(config.state),
        *(cold_directory(place) for place in (config.cold.directories if config.cold else ())),
        calibration(config),
    ]


def require(loaded: Loaded) -> list[Finding]:
    """Return the findings if all is well; else ConfigError has every one that is not, in a line."""
    findings = look(loaded)
    problems = Problems("things stand in the way of a start")
    for finding in findings:
        if not finding.ok:
            problems.note(finding)
    problems.refuse()
    return findings


# --- memory --------------------------------------------------------------------------------------


def arena_bytes(warm: Warm) -> int:
    """Return what the arena costs with the tables of its generations, 0.2% of it."""
    return warm.size_bytes + warm.size_bytes // PAGE_BYTES * GENERATION_BYTES


def memory(
    warm: Warm, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> Finding:
    """Find whether the arena fits into what the machine and its control group have left."""
    what = "memory for the arena"
    need = arena_bytes(warm)
    available, source = min(_available(proc, cgroup), default=(None, ""))
    if available is None:
        return Finding(True, what, f"{format_bytes(need)} wanted; how much there is can't be told")
    value = f"{format_bytes(need)} wanted, {format_bytes(available)} available ({source})"
    fitting = available * PAGE_BYTES // (PAGE_BYTES + GENERATION_BYTES)
    fix = "free some" if source == "MemAvailable" else "raise the limit"
    if fitting >= MIB:
        fix = f"set warm.size to less than {format_bytes(fitting)}, or {fix}"
    return Finding(need <= available, what, value, fix)


def memory_of_machine(warm: Warm, proc: Path = Path("/proc")) -> Finding:
    """Find whether the machine has as much memory as the arena needs, free or not."""
    what, need = "memory for the arena", arena_bytes(warm)
    total = _table(proc / "meminfo").get("MemTotal:", need // 1024 + 1) * 1024
    value = f"{format_bytes(need)} wanted, the machine has {format_bytes(total)}"
    return Finding(need <= total, what, value, "set warm.size to less")


def _available(proc: Path, cgroup: Path) -> Iterator[tuple[int, str]]:
    """Yield the bytes that each authority would still give, and who it is."""
    free = _table(proc / "meminfo").get("MemAvailable:")
    if free is not None:
        yield free * 1024, "MemAvailable"
    for directory, names in _groups(proc, cgroup):
        limit, usage = _integer(directory / names[0]), _integer(directory / names[1])
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        # Cached file pages that nobody used lately count as used, but go when memory is wanted.
        cache = _table(directory / "memory.stat").get(names[2], 0)
        yield (
            max(0, min(limit, limit - usage + cache)),
            f"memory limit of the control group {directory}",
        )


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def _groups(proc: Path, cgroup: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield this process's control groups that count memory, and all above them: each can limit."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            roots, names = [cgroup, cgroup / "unified"], _V2
        elif "memory" in controllers.split(","):
            roots, names = [cgroup / "memory"], _V1
        else:
            continue
        # In a container the path may be the host's, of which only the mounted root can be seen.
        parts = [part for part in path.split("/") if part]
        below = [] if ".." in parts else parts
        for root in roots:
            for depth in range(len(below), -1, -1):
                directory = root.joinpath(*below[:depth])
                if (directory / names[0]).exists():
                    yield directory, names


def locked_memory(
    warm: Warm,
    proc: Path = Path("/proc"),
    getrlimit: Limits = resource.getrlimit,
    setrlimit: SetLimits = resource.setrlimit,
) -> Finding:
    """Find whether the arena may be locked, if it is to be; raises the soft limit if that helps."""
    what = "locked memory"
    if not warm.lock:
        return Finding(True, what, "not asked for")
    need = arena_bytes(warm)
    if _has_capability(proc, _CAP_IPC_LOCK):
        return Finding(True, what, f"{format_bytes(need)} wanted, unlimited by CAP_IPC_LOCK")
    soft, hard = _raised(resource.RLIMIT_MEMLOCK, need, getrlimit, setrlimit)
    value = f"{format_bytes(need)} wanted, the limit is {_amount(soft)} (hard {_amount(hard)})"
    fix = (
        f"as root run `ulimit -l {-(-need // 1024)}` before, or write LimitMEMLOCK=infinity into the"
        " unit, or give the daemon CAP_IPC_LOCK; or set warm.lock = false"
    )
    return Finding(_reaches(soft, need), what, value, fix)


def _amount(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)


def _has_capability(proc: Path, capability: int) -> bool:
    # In a user namespace the bit may be set, and the kernel asks for it in the first namespace.
    if _text(proc / "self" / "uid_map").split() != _IDENTITY:
        return False
    for line in _text(proc / "self" / "status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    return False


# --- files ---------------------------------------------------------------------------------------


def extents(config: Config) -> int:
    """Return how many extents the arena has when every tenant has filled its quota."""
    each = config.warm.extent_bytes
    return sum(-(-tenant.quota_bytes // each) for tenant in config.tenants.values())


def segments(config: Config) -> int:
    """How many files the cold tier may have open."""
    return config.cold.size_bytes // config.cold.segment_bytes if config.cold else 0


def open_files(
    config: Config,
    getrlimit: Limits = resource.getrlimit,
    setrlimit: SetLimits = resource.setrlimit,
) -> Finding:
    """Find whether enough files may be open; raises the soft limit to the hard one where needed."""
    need = extents(config) * FDS_PER_EXTENT + config.max_clients * FDS_PER_CLIENT + FDS_RESERVED
    need += segments(config) + (LIMIT_CONNECTIONS if config.http else 0)
    soft, hard = _raised(resource.RLIMIT_NOFILE, need, getrlimit, setrlimit)
    value = (
        f"{need} wanted for {extents(config)} extents"
        + (f", {segments(config)} segments" if config.cold else "")
        + f" and {config.max_clients} clients,"
        f" the limit is {soft} (hard {hard})"
    )
    fix = (
        f"as root run `ulimit -n {need}` before, or write LimitNOFILE={need} into the unit;"
        f" or lower max_clients, or raise warm.extent{' or cold.segment' if config.cold else ''}"
    )
    return Finding(_reaches(soft, need), "open files", value, fix)


def _raised(kind: int, need: int, getrlimit: Limits, setrlimit: SetLimits) -> tuple[int, int]:
    """Return the soft and the hard limit, the soft one raised to the hard one if that is enough."""
    soft, hard = getrlimit(kind)
    if not _reaches(soft, need) and _reaches(hard, need):
        try:
            setrlimit(kind, (hard, hard))
        except (OSError, ValueError):  # a sandbox may forbid it; then what we have is what counts
            return soft, hard
        soft = hard
    return soft, hard


def _reaches(limit: int, need: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= need


# --- places --------------------------------------------------------------------------------------


def socket_path(path: Path) -> Finding:
    """Find whether the kernel can hold the socket's path."""
    length = len(os.fsencode(path))
    value = f"{length} bytes, and the kernel takes {LIMIT_SOCKET_PATH}"
    fix = f"name a shorter one than {path} with --socket"
    return Finding(length <= LIMIT_SOCKET_PATH, "length of the socket's path", value, fix)


def socket_directory(directory: Path, *, is_default: bool = False, make: bool = True) -> Finding:
    """Find whether a socket can be made there that no other user can swap; makes the default directory if
    `make` says so."""
    what = "socket directory"
    elsewhere = "name another with --socket"
    uid = os.geteuid()
    if is_default and not make and _missing(directory):
        wrong, remedy = _no_place_for(directory)
        if wrong:
            return Finding(False, what, wrong, remedy + elsewhere)
        return Finding(True, what, f"{directory} will be made")
    if is_default and make:
        try:
            directory.mkdir(mode=0o700)
            if uid == 0:  # the system's is for clients of every user, whatever the umask
                directory.chmod(0o755)
        except FileExistsError:
            pass
        except OSError as error:
            value = f"{directory} can't be made: {error.strerror}"
            return Finding(False, what, value, f"make it, or {elsewhere}")
    try:
        # The default is ours to make: a link there was put by somebody else.
        found = directory.lstat() if is_default else directory.stat()
    except OSError as error:
        mend = f"run `mkdir -p {directory}`, or " if isinstance(error, FileNotFoundError) else ""
        return Finding(False, what, f"{directory}: {error.strerror}", mend + elsewhere)
    mode = stat.S_IMODE(found.st_mode)
    wrong, remedy = _unusable(directory, found.st_mode)
    if wrong:
        return Finding(False, what, wrong, remedy + elsewhere)
    # A default in the directory for temporary files could have been made by anybody.
    if is_default and uid != 0 and (found.st_uid != uid or mode & 0o077):
        value = f"{directory} has uid {found.st_uid} and mode {mode:04o}, not {uid} and 0700"
        return Finding(False, what, value, f"remove it, or {elsewhere}")
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        value = f"{directory} has mode {mode:04o}, so that anybody can swap the socket"
        return Finding(False, what, value, f"run `chmod o-w {directory}`")
    return Finding(True, what, f"{directory} is writable")


def state_directory(directory: Path) -> Finding:
    """Find whether the state directory can be written, or be made where it is missing."""
    what = "state directory"
    uid = os.geteuid()
    elsewhere = "set state to a directory of its own"
    there = next(place for place in (directory, *directory.parents) if not _missing(place))
    try:
        found = there.stat()
    except OSError as error:
        return Finding(False, what, f"{there}: {error.strerror}", elsewhere)
    # Whoever owns a directory can put another one in its place, with secrets of their own in it.
    if stat.S_ISDIR(found.st_mode) and uid != 0 and found.st_uid not in (0, uid):
        return Finding(False, what, f"{there} belongs to uid {found.st_uid}", _GIVE + elsewhere)
    wrong, remedy = _unusable(there, found.st_mode)
    if wrong:
        missing = "" if there == directory else f", so {directory} can't be made"
        return Finding(False, what, wrong + missing, remedy + elsewhere)
    will_be = "is writable" if there == directory else "will be made"
    return Finding(True, what, f"{directory} {will_be}")


def cold_directory(directory: Path) -> Finding:
    """Find whether a directory of the cold tier exists and can be written."""
    what = "cold directory"
    elsewhere = "remove it from cold.directories"
    try:
        found = directory.stat()
    except FileNotFoundError:
        owner = f"{_user(os.geteuid())}:{_group(os.getegid())}"
        fix = f"mount its disk there if it has one of its own, then run `mkdir -p {directory}`"
        fix += (
            f" and `chown {owner} {directory}` as root, and `chmod 700 {directory}`; or {elsewhere}"
        )
        return Finding(False, what, f"{directory} does not exist", fix)
    except OSError as error:
        return Finding(False, what, f"{directory}: {error.strerror}", f"{_GIVE}{elsewhere}")
    wrong, remedy = _unusable(directory, found.st_mode)
    return Finding(not wrong, what, wrong or f"{directory} is writable", remedy + elsewhere)


def calibration(config: Config) -> Finding:
    """Find whether the lossy codecs that are asked for have their profiles, and can read them."""
    what = "calibration profiles"
    try:
        losses_of(config)
    except ConfigError as error:
        value, _, fix = str(error).rpartition("; ")
        return Finding(False, what, value, fix)
    return Finding(True, what, "all that are asked for are there")


def _no_place_for(directory: Path) -> tuple[str, str]:
    """Return why a missing directory can't be made in its parent, and how to begin the remedy."""
    try:
        wrong, remedy = _unusable(directory.parent, directory.parent.stat().st_mode)
    except OSError as error:
        wrong, remedy = f"{directory.parent}: {error.strerror}", ""
    return (f"{wrong}, so {directory} can't be made" if wrong else "", remedy)


def _user(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)


def _group(gid: int) -> str:
    with contextlib.suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)


def _unusable(place: Path, mode: int) -> tuple[str, str]:
    """Return why nothing can be made in a place that is there, and how to begin the remedy."""
    if not stat.S_ISDIR(mode):
        return f"{place} is no directory", ""
    if not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        return f"{place} is not writable for uid {os.geteuid()}", _GIVE
    return "", ""


def _missing(place: Path) -> bool:
    try:
        place.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # it can't be looked at, which is for the caller to find out
        return False
    return False


# --- reading what the kernel writes --------------------------------------------------------------


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # not mounted, or another system: this authority has nothing to say
        return ""


def _integer(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _table(file: Path) -> Mapping[str, int]:
    """Return the numbers of a file whose lines are a name and a number."""
    rows = (line.split() for line in _text(file).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdecimal()}
