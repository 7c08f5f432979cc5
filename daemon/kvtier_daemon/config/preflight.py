"""Checks of the machine before a start. They allocate nothing.

Each check returns a finding. All failures are reported together, each with its remedy, so that one attempt
to start shows all of them.
"""

import contextlib
import ctypes
import grp
import itertools
import os
import pwd
import resource
import socket
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kvtier.errors import ConfigError
from kvtier.units import MIB, format_bytes
from kvtier.wire import LIMIT_SOCKET_PATH
from kvtier_daemon.claim import STORED, keeper_of
from kvtier_daemon.config.problems import Problems
from kvtier_daemon.config.profiles import losses_of
from kvtier_daemon.config.schema import Config, LoadedConfig, WarmConfig
from kvtier_daemon.config.values import PAGE_BYTES
from kvtier_daemon.observing.audit import NOT_OWN, is_own
from kvtier_daemon.observing.web import LIMIT_CONNECTIONS

GENERATION_BYTES: Final = 8  # one generation per page, in a table for each extent
FDS_PER_EXTENT: Final = 4  # its memory and its table, both twice during the allocation
FDS_TAKEN_OVER: Final = 4  # more of an extent of an earlier daemon, for a moment
FDS_PER_CLIENT: Final = 4  # its socket and its pidfd, and those of a client that has not sent Hello
CONNECT_S: Final = 3.0
VERBS: Final = "libibverbs.so.1"
FDS_RESERVED: Final = 64  # for the event loop, logs and other files

_CAP_IPC_LOCK = 14
_IDENTITY = ["0", "0", "4294967295"]
_GIVE = "chown it to the daemon's user, or "
_UNLIMITED = 1 << 62  # cgroup v1 writes a number near 2**63 if there is no limit

Limits = Callable[[int], tuple[int, int]]
SetLimits = Callable[[int, tuple[int, int]], None]


@dataclass(frozen=True, slots=True)
class MachineFinding:
    """The result of one check. `what` and `value` are for people; `fix` is the remedy if it failed. A failure
    that `passes` may be over at the next start."""

    ok: bool
    what: str
    value: str
    fix: str = ""
    passes: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.value}" + ("" if self.ok else f"; {self.fix}")


def look(loaded: LoadedConfig) -> list[MachineFinding]:
    """Return the findings of all checks. Creates the default socket's directory, and allocates nothing."""
    config = loaded.config
    return [
        _memory_of(config),
        locked_memory(config.warm),
        open_files(config),
        file_size(config),
        socket_path(config.socket),
        socket_directory(config.socket.parent, is_default=loaded.origins["socket"] == "default"),
        state_directory(config.state),
        *audit_file(config),
        calibration(config),
        *remote_store(config),
    ]


def look_before_start(loaded: LoadedConfig, of_service: bool = False) -> list[MachineFinding]:
    """Return what would prevent a start with this configuration or disable a tier, as far as that can be
    known while another daemon may run. Changes nothing. `of_service`: the systemd unit sets the limits."""
    config = loaded.config
    is_default = loaded.origins["socket"] == "default"
    findings = []
    if not of_service:
        findings = [locked_memory(config.warm), open_files(config), file_size(config)]
    return [
        *findings,
        memory_of_machine(config.warm),
        socket_path(config.socket),
        socket_directory(config.socket.parent, is_default=is_default, make=False),
        state_directory(config.state),
        *cold_directories(config.cold.directories if config.cold else ()),
        *audit_file(config),
        calibration(config),
        *remote_store(config),
        *store_answers(config),
    ]


def require(loaded: LoadedConfig) -> list[MachineFinding]:
    """Return the findings. Raises a ConfigError with all failures in one line, if there are any."""
    findings = look(loaded)
    problems = Problems("problems prevent the start")
    failed = [finding for finding in findings if not finding.ok]
    for finding in failed:
        problems.note(finding)
    problems.refuse(passes=all(finding.passes for finding in failed))
    return findings


# --- memory --------------------------------------------------------------------------------------


def arena_bytes(warm: WarmConfig) -> int:
    """Return the size of the arena with its generation tables, which are 0.2% of it."""
    return warm.size_bytes + warm.size_bytes // PAGE_BYTES * GENERATION_BYTES


def memory_bytes(warm: WarmConfig) -> int:
    """Return the size of the arena, and of compressed memory."""
    return arena_bytes(warm) + warm.compressed_bytes


def memory(
    warm: WarmConfig, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> MachineFinding:
    """Check whether the arena fits into the available memory of the machine and of the control group."""
    what = "memory for the arena"
    need = memory_bytes(warm)
    available, source = min(_available(proc, cgroup), default=(None, ""))
    if available is None:
        return MachineFinding(
            True, what, f"{format_bytes(need)} needed; the available amount is unknown"
        )
    value = f"{format_bytes(need)} needed, {format_bytes(available)} available ({source})"
    left = max(0, available - warm.compressed_bytes)
    fitting = left * PAGE_BYTES // (PAGE_BYTES + GENERATION_BYTES)
    fix = "free memory" if source == "MemAvailable" else "raise the limit"
    if fitting >= MIB:
        fix = f"set warm.size to less than {format_bytes(fitting)}, or {fix}"
    limits = [_integer(directory / names[0]) for directory, names in _groups(proc, cgroup)]
    fits = all(limit is None or limit >= need for limit in limits)
    passes = fits and memory_of_machine(warm, proc).ok
    return MachineFinding(need <= available, what, value, fix, passes)


def _memory_of(config: Config) -> MachineFinding:
    """Where the memory of an earlier daemon is taken over, it counts as used until then."""
    is_held = STORED in os.environ.get("LISTEN_FDNAMES", "") or keeper_of(config.socket).exists()
    return memory_of_machine(config.warm) if config.warm.keep_s and is_held else memory(config.warm)


def memory_of_machine(warm: WarmConfig, proc: Path = Path("/proc")) -> MachineFinding:
    """Check whether the machine has as much memory as the arena needs, free or not."""
    what, need = "memory for the arena", memory_bytes(warm)
    total = _table(proc / "meminfo").get("MemTotal:", need // 1024 + 1) * 1024
    value = f"{format_bytes(need)} needed, the machine has {format_bytes(total)}"
    return MachineFinding(need <= total, what, value, "lower warm.size")


def _available(proc: Path, cgroup: Path) -> Iterator[tuple[int, str]]:
    """Yield the available bytes by each limit, and the name of the limit."""
    free = _table(proc / "meminfo").get("MemAvailable:")
    if free is not None:
        yield free * 1024, "MemAvailable"
    for directory, names in _groups(proc, cgroup):
        limit, usage = _integer(directory / names[0]), _integer(directory / names[1])
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        # Inactive file pages in the page cache count as used, but are reclaimed on demand.
        cache = _table(directory / "memory.stat").get(names[2], 0)
        yield (
            max(0, min(limit, limit - usage + cache)),
            f"memory limit of the control group {directory}",
        )


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def _groups(proc: Path, cgroup: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the control groups of this process that limit memory, and all their parents."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            roots, names = [cgroup, cgroup / "unified"], _V2
        elif "memory" in controllers.split(","):
            roots, names = [cgroup / "memory"], _V1
        else:
            continue
        # In a container the path may be the host's, of which only the mounted root is visible.
        parts = [part for part in path.split("/") if part]
        below = [] if ".." in parts else parts
        for root in roots:
            for depth in range(len(below), -1, -1):
                directory = root.joinpath(*below[:depth])
                if (directory / names[0]).exists():
                    yield directory, names


def locked_memory(
    warm: WarmConfig,
    proc: Path = Path("/proc"),
    getrlimit: Limits = resource.getrlimit,
    setrlimit: SetLimits = resource.setrlimit,
) -> MachineFinding:
    """Check whether the arena may be locked, if that is configured. Raises the soft limit if that helps."""
    what = "locked memory"
    if not warm.lock:
        return MachineFinding(True, what, "not requested")
    need = arena_bytes(warm)
    if _has_capability(proc, _CAP_IPC_LOCK):
        return MachineFinding(True, what, f"{format_bytes(need)} needed, unlimited by CAP_IPC_LOCK")
    soft, hard = _raised(resource.RLIMIT_MEMLOCK, need, getrlimit, setrlimit)
    value = f"{format_bytes(need)} needed, the limit is {_amount(soft)} (hard {_amount(hard)})"
    fix = (
        f"as root run `ulimit -l {-(-need // 1024)}` before, or write LimitMEMLOCK=infinity into the"
        " unit, or give the daemon CAP_IPC_LOCK; or set warm.lock = false"
    )
    return MachineFinding(_reaches(soft, need), what, value, fix)


def _amount(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)


def _has_capability(proc: Path, capability: int, process: str = "self") -> bool:
    # In a user namespace this bit has no effect: the kernel checks it in the initial namespace.
    if _text(proc / process / "uid_map").split() != _IDENTITY:
        return False
    for line in _text(proc / process / "status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    return False


# --- files ---------------------------------------------------------------------------------------


def extents(config: Config) -> int:
    """Return the number of extents if every tenant fills its quota."""
    each = config.warm.extent_bytes
    return sum(-(-tenant.quota_bytes // each) for tenant in config.tenants.values())


def segments(config: Config) -> int:
    """Return the largest number of files that the cold tier opens."""
    return config.cold.size_bytes // config.cold.segment_bytes if config.cold else 0


def open_files(
    config: Config,
    getrlimit: Limits = resource.getrlimit,
    setrlimit: SetLimits = resource.setrlimit,
) -> MachineFinding:
    """Check whether enough files may be open. Raises the soft limit to the hard limit if necessary."""
    per_extent = FDS_PER_EXTENT + (FDS_TAKEN_OVER if config.warm.keep_s else 0)
    need = extents(config) * per_extent + config.max_clients * FDS_PER_CLIENT + FDS_RESERVED
    need += segments(config) + (LIMIT_CONNECTIONS if config.http else 0)
    soft, hard = _raised(resource.RLIMIT_NOFILE, need, getrlimit, setrlimit)
    value = (
        f"{need} needed for {extents(config)} extents"
        + (f", {segments(config)} segments" if config.cold else "")
        + f" and {config.max_clients} clients,"
        f" the limit is {soft} (hard {hard})"
    )
    fix = (
        f"as root run `ulimit -n {need}` before, or write LimitNOFILE={need} into the unit;"
        f" or lower max_clients, or raise warm.extent{' or cold.segment' if config.cold else ''}"
    )
    return MachineFinding(_reaches(soft, need), "open files", value, fix)


def file_size(
    config: Config,
    getrlimit: Limits = resource.getrlimit,
    setrlimit: SetLimits = resource.setrlimit,
) -> MachineFinding:
    """Check whether files, which memory is too, may be as large as the daemon's. Raises the soft limit if
    that helps."""
    need = max(
        config.warm.extent_bytes,
        config.cold.segment_bytes if config.cold else 0,
        config.remote.buffer_bytes if config.remote else 0,
    )
    soft, hard = _raised(resource.RLIMIT_FSIZE, need, getrlimit, setrlimit)
    value = (
        f"{format_bytes(need)} needed for an extent, a segment or a buffer, the limit is {_amount(soft)} "
        f"(hard {_amount(hard)})"
    )
    fix = (
        "as root run `ulimit -f unlimited` before, or write LimitFSIZE=infinity into the unit; or "
        "lower warm.extent, cold.segment or remote.buffer"
    )
    return MachineFinding(_reaches(soft, need), "size of files", value, fix)


def _raised(kind: int, need: int, getrlimit: Limits, setrlimit: SetLimits) -> tuple[int, int]:
    """Return the soft and the hard limit, after raising the soft limit if that is enough."""
    soft, hard = getrlimit(kind)
    if not _reaches(soft, need) and _reaches(hard, need):
        try:
            setrlimit(kind, (hard, hard))
        except (OSError, ValueError):  # a sandbox may forbid it; the current limit then counts
            return soft, hard
        soft = hard
    return soft, hard


def _reaches(limit: int, need: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= need


# --- places --------------------------------------------------------------------------------------


def socket_path(path: Path) -> MachineFinding:
    """Check whether the kernel accepts the length of the socket's path."""
    length = len(os.fsencode(path))
    value = f"{length} bytes, the kernel accepts at most {LIMIT_SOCKET_PATH}"
    fix = f"use a shorter path than {path} with --socket"
    return MachineFinding(length <= LIMIT_SOCKET_PATH, "length of the socket's path", value, fix)


def socket_directory(
    directory: Path, *, is_default: bool = False, make: bool = True
) -> MachineFinding:
    """Check that no other user can replace a socket there. `make`: create the default directory."""
    what = "socket directory"
    elsewhere = "use another one with --socket"
    uid = os.geteuid()
    if is_default and not make and _missing(directory):
        wrong, remedy = _no_place_for(directory)
        if wrong:
            return MachineFinding(False, what, wrong, remedy + elsewhere)
        return MachineFinding(True, what, f"{directory} will be created")
    if is_default and make:
        try:
            directory.mkdir(mode=0o700)
            # the system's directory is for clients of all users, independent of the umask
            if uid == 0:
                directory.chmod(0o755)
        except FileExistsError:
            pass
        except OSError as error:
            value = f"cannot create {directory}: {error.strerror}"
            return MachineFinding(False, what, value, f"create it, or {elsewhere}")
    try:
        # This process creates the default directory: a link there was created by another user.
        found = directory.lstat() if is_default else directory.stat()
    except OSError as error:
        mend = f"run `mkdir -p {directory}`, or " if isinstance(error, FileNotFoundError) else ""
        return MachineFinding(False, what, f"{directory}: {error.strerror}", mend + elsewhere)
    mode = stat.S_IMODE(found.st_mode)
    wrong, remedy = _unusable(directory, found.st_mode)
    if wrong:
        return MachineFinding(False, what, wrong, remedy + elsewhere)
    # Any user could have created a default directory in the directory of temporary files.
    if is_default and uid != 0 and (found.st_uid != uid or mode & 0o077):
        value = f"{directory} has uid {found.st_uid} and mode {mode:04o}, not {uid} and 0700"
        return MachineFinding(False, what, value, f"remove it, or {elsewhere}")
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        value = f"{directory} has mode {mode:04o}, so any user can replace the socket"
        return MachineFinding(False, what, value, f"run `chmod o-w {directory}`")
    return MachineFinding(True, what, f"{directory} is writable")


def state_directory(directory: Path) -> MachineFinding:
    """Check whether the state directory can be written, or created if it is missing."""
    what = "state directory"
    uid = os.geteuid()
    elsewhere = "set state to a directory of its own"
    there = next(place for place in (directory, *directory.parents) if not _missing(place))
    try:
        found = there.stat()
    except OSError as error:
        return MachineFinding(False, what, f"{there}: {error.strerror}", elsewhere)
    # The owner of a directory could replace it with one that contains their own secrets.
    if stat.S_ISDIR(found.st_mode) and uid != 0 and found.st_uid not in (0, uid):
        return MachineFinding(
            False, what, f"{there} belongs to uid {found.st_uid}", _GIVE + elsewhere
        )
    wrong, remedy = _unusable(there, found.st_mode, None if there == directory else directory)
    if wrong:
        return MachineFinding(False, what, wrong, remedy + elsewhere)
    will_be = "is writable" if there == directory else "will be created"
    return MachineFinding(True, what, f"{directory} {will_be}")


def audit_file(config: Config) -> list[MachineFinding]:
    """Check, if the audit log has a file, whether that can be written, or created if it is missing."""
    path, what, wrong = config.audit.path, "audit.path", ""
    if path is None:
        return []
    try:
        place = path.parent if _missing(path) else path
        found = place.stat(follow_symlinks=place != path)
        if place != path:
            wrong, _ = _unusable(place, found.st_mode)
        elif not is_own(found):
            wrong = f"{path}: {NOT_OWN}"
    except OSError as error:
        wrong = f"{path}: {error.strerror}"
    fix = "use a file in a directory that belongs to the daemon's user"
    return [MachineFinding(not wrong, what, wrong or f"{path} can be written", fix)]


def cold_directories(directories: Sequence[Path]) -> list[MachineFinding]:
    """Check each directory of the cold tier, and that no two paths lead to the same one."""
    findings = [cold_directory(directory) for directory in directories]
    usable = [one for one, finding in zip(directories, findings, strict=True) if finding.ok]
    for one, other in itertools.combinations(usable, 2):
        if one.samefile(other):
            value = f"{one} and {other} are the same directory"
            fix = "remove one of them from cold.directories"
            findings.append(MachineFinding(False, "cold directory", value, fix))
    return findings


def cold_directory(directory: Path) -> MachineFinding:
    """Check whether a directory of the cold tier exists and can be written."""
    what = "cold directory"
    elsewhere = "remove it from cold.directories"
    try:
        found = directory.stat()
    except FileNotFoundError:
        owner = f"{_user(os.geteuid())}:{_group(os.getegid())}"
        fix = f"if it has its own disk, mount it there; then run `mkdir -p {directory}`"
        fix += (
            f" and `chown {owner} {directory}` as root, and `chmod 700 {directory}`; or {elsewhere}"
        )
        return MachineFinding(False, what, f"{directory} does not exist", fix)
    except OSError as error:
        return MachineFinding(False, what, f"{directory}: {error.strerror}", f"{_GIVE}{elsewhere}")
    wrong, remedy = _unusable(directory, found.st_mode)
    return MachineFinding(not wrong, what, wrong or f"{directory} is writable", remedy + elsewhere)


def calibration(config: Config) -> MachineFinding:
    """Check whether the configured lossy codecs have their profiles, and whether those are readable."""
    what = "calibration profiles"
    try:
        losses_of(config)
    except ConfigError as error:
        value, _, fix = str(error).rpartition("; ")
        return MachineFinding(False, what, value, fix)
    return MachineFinding(True, what, "all required profiles exist")


def remote_store(config: Config) -> list[MachineFinding]:
    """Check, if a remote store is configured, whether it can be used from here. Sends nothing."""
    remote, what = config.remote, "remote store"
    if remote is None:
        return []
    module, install = "obstore", "run `pip install 'obstore>=0.12'`"
    if remote.url:
        module = "mooncake"
        install = "run `pip install 'mooncake-transfer-engine-non-cuda>=0.3.13'`"
    if find_spec(module) is None:
        missing = f"the package {module} is not installed"
        return [MachineFinding(False, what, missing, f"{install}, or remove [remote]")]
    if remote.url and (missing := missing_library()):
        return [MachineFinding(False, what, missing, "install it (Debian: libibverbs1)")]
    file = remote.credentials
    if file is not None:
        try:
            mode = file.stat().st_mode
        except OSError as error:
            fix = "correct remote.credentials"
            return [MachineFinding(False, what, f"{file}: {error.strerror}", fix)]
        if stat.S_IMODE(mode) & 0o077:
            value = f"{file}: other users can read the credentials"
            return [MachineFinding(False, what, value, f"chmod 600 {file}")]
        if not os.access(file, os.R_OK, effective_ids=True):
            value = f"{file} is not readable for uid {os.geteuid()}"
            return [MachineFinding(False, what, value, f"{_GIVE}correct remote.credentials")]
    return [MachineFinding(True, what, remote.url or f"bucket {remote.bucket}")]


def missing_library() -> str:
    """What Mooncake's client needs of the system and this machine lacks; empty: nothing. Its package does not
    contain this library, and cannot be imported without it, also where only TCP is used."""
    try:
        ctypes.CDLL(VERBS)
    except OSError:
        return f"the library {VERBS}, which Mooncake's client needs, is not installed"
    return ""


def store_answers(config: Config) -> list[MachineFinding]:
    """Check whether something accepts connections at the address of the remote store. Says nothing to it."""
    remote, what = config.remote, "address of the remote store"
    if remote is None:
        return []
    text = remote.url or remote.endpoint or f"https://s3.{remote.region}.amazonaws.com"
    address = urlsplit(text)
    host, port = address.hostname or "", address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        key = "remote.url" if remote.url else "remote.endpoint"
        fix = f"start the store, or correct {key}; until it answers, its blocks are misses"
        why = error.strerror or str(error)
        return [MachineFinding(False, what, f"{text} does not answer: {why}", fix)]
    return [MachineFinding(True, what, f"{text} accepts connections")]


def _no_place_for(directory: Path) -> tuple[str, str]:
    """Return why a missing directory cannot be created in its parent, and the first part of the remedy."""
    try:
        return _unusable(directory.parent, directory.parent.stat().st_mode, directory)
    except OSError as error:
        return f"{directory.parent}: {error.strerror}, so {directory} cannot be created", ""


def _user(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)


def _group(gid: int) -> str:
    with contextlib.suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)


def _unusable(place: Path, mode: int, missing: Path | None = None) -> tuple[str, str]:
    """Return why nothing can be created in an existing directory, such as the `missing` one, and the first
    part of the remedy."""
    wrong, remedy = "", ""
    if not stat.S_ISDIR(mode):
        wrong = f"{place} is not a directory"
    elif os.statvfs(place).f_flag & os.ST_RDONLY:
        wrong, remedy = f"{place} is on a read-only file system", "mount it read-write, or "
    elif not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        wrong = f"{place} is not writable for uid {os.geteuid()}"
        remedy = f"create {missing} for that user, or " if missing else _GIVE
    if wrong and missing:
        wrong += f", so {missing} cannot be created"
    return wrong, remedy


def _missing(place: Path) -> bool:
    try:
        place.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # it cannot be inspected; the caller reports that
        return False
    return False


# --- reading what the kernel writes --------------------------------------------------------------


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # not mounted, or another system: there is no such limit
        return ""


def _integer(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _table(file: Path) -> Mapping[str, int]:
    """Return the numbers of a file whose lines contain a name and a number."""
    rows = (line.split() for line in _text(file).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdecimal()}
