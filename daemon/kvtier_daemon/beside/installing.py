"""The units that run the daemon as a service: what is written where, and what is to be run then.

Everything is written under /etc, which is the administrator's, each file with a first line that says by whom;
without that line nothing is overwritten or removed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError
from kvtier.units import GIB
from kvtier_daemon.config import Config, load

MARK: Final = "# written by `kvtier install-service`; changes belong into a drop-in beside it"
UNITS: Final = Path("etc/systemd/system")
CONFIGS: Final = Path("etc/kvtier")
OWN_STATE: Final = Path("/var/lib/kvtier")
RELOADS_SINCE: Final = 253  # systemd with Type=notify-reload
# Lines of the unit, and what stands for them in the template for NUMA nodes (%i), which have no socket unit.
OF_NODES: Final = (
    ("Description=KV cache of LLM inference engines",
     "Description=KV cache of LLM inference engines, NUMA node %i"),
    ("ExecStart=/usr/bin/env kvtier serve --config /etc/kvtier/kvtier.toml",
     "ExecStart=/usr/bin/env kvtier serve --config /etc/kvtier/node%i/kvtier.toml\n"
     "Environment=KVTIER_SOCKET=/run/kvtier-node%i/kvtier.sock KVTIER_STATE=/var/lib/kvtier-node%i"),
    ("RuntimeDirectory=kvtier", "RuntimeDirectory=kvtier-node%i"),
    ("# The socket may be kvtierd.socket's, and outlives the daemon.\nRuntimeDirectoryPreserve=yes", ""),
    ("StateDirectory=kvtier", "StateDirectory=kvtier-node%i"),
)  # fmt: skip
HEAD_OF_NODES: Final = """\
# A daemon for one NUMA node, kvtierd@0 for the first, which a drop-in keeps there with its memory and
# threads. It reads /etc/kvtier/node0/kvtier.toml and its conf.d, keeps its tenants' secrets in
# /var/lib/kvtier-node0 and listens at /run/kvtier-node0/kvtier.sock. Otherwise as kvtierd.service.
"""
# What the unit's sandbox hides from the program.
HIDDEN: Final = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
SHARE: Final = 4  # of the machine's memory that a first configuration takes


@dataclass(frozen=True, slots=True)
class Installation:
    """Files by their paths, to be written over their own kind alone; one that is there `once` stays as it is.
    `commands` are to be run then."""

    files: dict[Path, str]
    once: dict[Path, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ()


def texts() -> Path:
    """Return the folder that the units' texts lie in: beside the sources, or where the wheel put them."""
    beside = Path(__file__).parents[3] / "systemd"
    places = [beside, *(Path(sysconfig.get_path("data", scheme)) / "share/kvtier/systemd"
                        for scheme in (sysconfig.get_default_scheme(), "posix_user"))]  # fmt: skip
    for place in places:
        if (place / "kvtierd.service").is_file():
            return place
    raise ConfigError(
        f"the units' texts are in none of {', '.join(map(str, places))}: install kvtier again"
    )


def systemd_version() -> int:
    """Return the version of the service manager here; the least with all that is used if there is none."""
    systemctl = shutil.which("systemctl")
    if systemctl is None:
        return RELOADS_SINCE
    done = subprocess.run([systemctl, "--version"], capture_output=True, text=True, check=False)
    words = done.stdout.split()
    return int(words[1]) if len(words) > 1 and words[1].isdecimal() else RELOADS_SINCE


def plan(
    root: Path, program: Path, version: int, *, http: bool = False, nodes: Sequence[int] = (),
) -> Installation:  # fmt: skip
    """Return what is to be written below `root` for a daemon started as `program`; writes none. ConfigError
    where the unit could not run it, or the configuration that is there is wrong."""
    for hidden in HIDDEN:
        if program.is_relative_to(hidden):
            raise ConfigError(
                f"{program}: a service with a sandbox can't see {hidden}; install kvtier into a venv such as"
                " /opt/kvtier and run its own `kvtier install-service`, or name it with --program"
            )
    folder = texts()
    once, made = {}, []
    files = {
        Path("etc/sysusers.d/kvtier.conf"): (folder / "kvtier.sysusers.conf").read_text(),
        Path("etc/tmpfiles.d/kvtier.conf"): (folder / "kvtier.tmpfiles.conf").read_text(),
    }
    names = [f"kvtierd@{node}.service" for node in nodes] or ["kvtierd.service"]
    text = (folder / "kvtierd.service").read_text()
    if nodes:
        files[UNITS / "kvtierd@.service"] = _unit(_of_nodes(text), program, version)
    else:
        files[UNITS / "kvtierd.service"] = _unit(text, program, version)
        files[UNITS / "kvtierd.socket"] = (folder / "kvtierd.socket").read_text()
    numbers: list[int | None] = [*nodes] or [None]
    for node, name in zip(numbers, names, strict=True):
        place = CONFIGS if node is None else CONFIGS / f"node{node}"
        state = OWN_STATE if node is None else Path(f"{OWN_STATE}-node{node}")
        config = _config(root / place / "kvtier.toml")
        if config is None:
            once[place / "kvtier.toml"] = _first_config(max(1, len(nodes)))
        outside = [
            one
            for one in (config.cold.directories if config and config.cold else ())
            if not one.is_relative_to(state)
        ]
        dropins = UNITS / f"{name}.d"
        if outside:
            # One that is missing is no reason not to start: it is used once it is there.
            paths = " ".join(f"-{path}" for path in outside)
            files[dropins / "cold.conf"] = f"[Service]\nReadWritePaths={paths}\n"
            made += [f"install -d -o kvtier -g kvtier -m 0700 {path}" for path in outside]
        if node is not None:
            text = f"[Service]\nNUMAPolicy=bind\nNUMAMask={node}\nCPUAffinity=numa\n"
            files[dropins / "numa.conf"] = text
        if http or (config is not None and config.http is not None):
            files[dropins / "http.conf"] = (folder / "http.conf").read_text()
    enabled = names if nodes else ["kvtierd.socket", "kvtierd.service"]
    commands = (
        "systemd-sysusers kvtier.conf",
        "systemd-tmpfiles --create kvtier.conf",
        *made,
        *(f"kvtier config check /{path}" for path in once),
        "systemctl daemon-reload",
        f"systemctl enable --now {' '.join(enabled)}",
    )
    return Installation(
        {root / path: f"{MARK}\n{text}" for path, text in files.items()},
        {root / path: text for path, text in once.items()},
        commands,
    )


def write(installation: Installation) -> list[Path]:
    """Write the files; which. One that somebody else wrote stops it before anything is written."""
    for path in installation.files:
        if path.exists() and not _is_ours(path):
            raise ConfigError(f"{path}: is not of kvtier install-service; move it away")
    written = []
    try:
        for path, text in (installation.files | installation.once).items():
            if path in installation.once and path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o644)
            written.append(path)
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}; run it as root, or look at --dry-run"
        ) from error
    return written


def ours(root: Path) -> list[Path]:
    """Return all files below `root` that this has written, configurations not among them."""
    places = ("etc/sysusers.d/kvtier.conf", "etc/tmpfiles.d/kvtier.conf", f"{UNITS}/kvtierd*",
              f"{UNITS}/kvtierd*.d/*.conf")  # fmt: skip
    found = (path for pattern in places for path in root.glob(pattern))
    return sorted(path for path in found if path.is_file() and _is_ours(path))


def remove(paths: Sequence[Path]) -> None:
    """Remove these, and the drop-ins' folders that are empty then."""
    try:
        for path in paths:
            path.unlink()
            folder = path.parent
            if folder.name.startswith("kvtierd") and not any(folder.iterdir()):
                folder.rmdir()
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; run it as root") from error


def own_program() -> Path:
    """Return the `kvtier` that belongs to the Python that runs."""
    return Path(sys.executable).parent / "kvtier"


def _unit(text: str, program: Path, version: int) -> str:
    """Return a unit that starts this program, under this systemd."""
    text = text.replace("/usr/bin/env kvtier", str(program))
    if version < RELOADS_SINCE:
        reload = "Type=notify\nExecReload=/bin/kill -HUP $MAINPID"
        text = text.replace("Type=notify-reload", reload)
    return text


def _of_nodes(text: str) -> str:
    """Return the unit of the one daemon as the template for those of nodes, each with names of its own."""
    text = text[text.index("[Unit]") :]
    for one, of_node in OF_NODES:
        assert text.count(f"{one}\n") == 1, one
        text = text.replace(f"{one}\n", of_node and f"{of_node}\n")
    return HEAD_OF_NODES + text


def _is_ours(path: Path) -> bool:
    return path.read_text(errors="replace").startswith(MARK)


def _config(file: Path) -> Config | None:
    return load(file, environ={}, uid=0).config if file.exists() else None


def _first_config(daemons: int) -> str:
    lines = Path("/proc/meminfo").read_text().split()
    size = max(1, int(lines[1]) * 1024 // GIB // SHARE // daemons)
    return (
        f"# Everything else has a default: see docs/configuration.md.\n[warm]\n"
        f'size = "{size}GiB"  # a quarter of the memory of this machine\n'
    )
