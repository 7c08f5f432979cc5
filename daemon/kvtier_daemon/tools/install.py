"""The systemd units of the daemon: the files to write, and the commands to run afterwards.

All files are below /etc. The first line of each names kvtier as its author; files without that line are
never overwritten or removed.
"""

from __future__ import annotations

import os
import shlex
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
from kvtier_daemon.config.schema import SYSTEM_UNITS, Config, load

MARK: Final = "# written by `kvtier install-service`; changes belong into a drop-in beside it"
UNITS: Final = SYSTEM_UNITS.relative_to("/")
SOCKET_UNIT: Final = "kvtierd.socket"
GPU_UNIT: Final = "kvtier-gpu@.service"
USER: Final = "kvtier"  # from systemd/kvtier.sysusers.conf
CONFIGS: Final = Path("etc/kvtier")
OWN_STATE: Final = Path("/var/lib/kvtier")
RELOADS_SINCE: Final = 253  # the first systemd with Type=notify-reload
# Lines of the unit, and their replacements in the template for NUMA nodes (%i), which have no socket unit.
OF_NODES: Final = (
    ("Description=KV cache of LLM inference engines",
     "Description=KV cache of LLM inference engines, NUMA node %i"),
    ("ExecStart=/usr/bin/env kvtier serve --config /etc/kvtier/kvtier.toml",
     "ExecStart=/usr/bin/env kvtier serve --config /etc/kvtier/node%i/kvtier.toml"),
    ("Environment=KVTIER_SOCKET=/run/kvtier/kvtier.sock KVTIER_STATE=/var/lib/kvtier",
     "Environment=KVTIER_SOCKET=/run/kvtier-node%i/kvtier.sock KVTIER_STATE=/var/lib/kvtier-node%i"),
    ("Sockets=kvtierd.socket", ""),
    ("RuntimeDirectory=kvtier", "RuntimeDirectory=kvtier-node%i"),
    ("# The socket may be kvtierd.socket's, and outlives the daemon.\nRuntimeDirectoryPreserve=yes", ""),
    ("StateDirectory=kvtier", "StateDirectory=kvtier-node%i"),
)  # fmt: skip
HEAD_OF_NODES: Final = """\
# A daemon for one NUMA node, kvtierd@0 for the first, which a drop-in keeps there with its memory and
# threads. It reads /etc/kvtier/node0/kvtier.toml and its conf.d, keeps its tenants' secrets in
# /var/lib/kvtier-node0 and listens at /run/kvtier-node0/kvtier.sock. Otherwise as kvtierd.service.
"""
# Directories that the unit's sandbox hides, and the setting that does it.
HOMES, TEMPORARY = "ProtectHome=", "PrivateTmp="
HIDDEN: Final = {
    "/home": HOMES, "/root": HOMES, "/run/user": HOMES, "/tmp": TEMPORARY, "/var/tmp": TEMPORARY,
}  # fmt: skip
SHARE: Final = 4  # of the machine's memory in a first configuration
TOOLS: Final = "/usr/bin:/bin:/usr/sbin:/sbin"  # where the programs of the printed commands are


@dataclass(frozen=True, slots=True)
class Installation:
    """Files by their paths; existing files in `once` stay. `commands` are to be run afterwards."""

    files: dict[Path, str]
    once: dict[Path, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ()


def texts() -> Path:
    """Return the directory with the texts of the units: in the sources, or where the wheel installed it."""
    beside = Path(__file__).parents[3] / "systemd"
    places = [beside, *(Path(sysconfig.get_path("data", scheme)) / "share/kvtier/systemd"
                        for scheme in (sysconfig.get_default_scheme(), "posix_user"))]  # fmt: skip
    for place in places:
        if (place / "kvtierd.service").is_file():
            return place
    raise ConfigError(
        f"the unit files are missing in {', '.join(map(str, places))}: install kvtier again"
    )


def systemd_version() -> int:
    """Return the version of systemd; if there is no systemd, the oldest version with all used features."""
    systemctl = shutil.which("systemctl")
    if systemctl is None:
        return RELOADS_SINCE
    done = subprocess.run([systemctl, "--version"], capture_output=True, text=True, check=False)
    words = done.stdout.split()
    return int(words[1]) if len(words) > 1 and words[1].isdecimal() else RELOADS_SINCE


def plan(
    root: Path, program: Path, version: int, *, http: bool = False, nodes: Sequence[int] = (),
) -> Installation:  # fmt: skip
    """Return the files below `root` for a daemon that is started as `program`. Writes nothing. Raises
    ConfigError if an existing configuration is invalid, or uses other places than the unit."""
    folder = texts()
    once: dict[Path, str] = {}
    checks: list[str] = []
    directories: list[Path] = []
    tmpfiles = (folder / "kvtier.tmpfiles.conf").read_text()
    files = {
        Path("etc/sysusers.d/kvtier.conf"): (folder / "kvtier.sysusers.conf").read_text(),
        Path("etc/tmpfiles.d/kvtier.conf"): tmpfiles + _places_of_nodes(nodes),
    }
    names = [f"kvtierd@{node}.service" for node in nodes] or ["kvtierd.service"]
    text = (folder / "kvtierd.service").read_text()
    if nodes:
        files[UNITS / "kvtierd@.service"] = _unit(_of_nodes(text), program, version)
    else:
        files[UNITS / "kvtierd.service"] = _unit(text, program, version)
        files[UNITS / SOCKET_UNIT] = (folder / SOCKET_UNIT).read_text()
    hot = False
    numbers: list[int | None] = [*nodes] or [None]
    for node, name in zip(numbers, names, strict=True):
        suffix = "" if node is None else f"-node{node}"
        place = CONFIGS if node is None else CONFIGS / f"node{node}"
        state, socket = Path(f"{OWN_STATE}{suffix}"), f"/run/kvtier{suffix}/kvtier.sock"
        config = _config(root / place / "kvtier.toml", socket, state)
        if config is None:
            once[place / "kvtier.toml"] = _first_config(max(1, len(nodes)))
        own = f"/usr/bin/env KVTIER_SOCKET={socket} KVTIER_STATE={state} " if suffix else ""
        checks.append(
            f"{own}{shlex.quote(str(program))} config check --user {USER} /{place}/kvtier.toml"
        )
        cold = config.cold.directories if config and config.cold else ()
        directories += cold
        dropins = UNITS / f"{name}.d"
        if not all(one.is_relative_to(state) for one in cold):
            files[dropins / "cold.conf"] = (folder / "cold.conf").read_text()
        if node is not None:
            text = f"[Service]\nNUMAPolicy=bind\nNUMAMask={node}\nCPUAffinity=numa\n"
            files[dropins / "numa.conf"] = text
        if http or (config is not None and config.http is not None):
            files[dropins / "http.conf"] = (folder / "http.conf").read_text()
        if config is not None and config.remote is not None:
            files[dropins / "remote.conf"] = (folder / "remote.conf").read_text()
        if node is None and config is not None and config.hot.sizes:
            hot = True
            files[UNITS / GPU_UNIT] = _gpu_unit((folder / GPU_UNIT).read_text(), program, config)
    below = {root / path: f"{MARK}\n{text}" for path, text in files.items()}
    commands = (
        f"{_tool('systemd-sysusers')} kvtier.conf",
        f"{_tool('systemd-tmpfiles')} --create kvtier.conf",
        *(
            f"{_tool('install')} -d -o {USER} -g {USER} -m 0700 {shlex.quote(str(one))}"
            for one in directories
        ),
        *checks,
        *_starting(below.get(root / UNITS / SOCKET_UNIT), root / UNITS / SOCKET_UNIT, names),
        *((f"{_tool('systemctl')} enable --now kvtier-gpu@0",) if hot else ()),
    )
    return Installation(below, {root / path: text for path, text in once.items()}, commands)


def hidden(program: Path) -> str:
    """Return why the unit's sandbox prevents it from running `program`, or an empty string. Checks the
    program, and the Python in its first line, with links followed."""
    places = [program, program.resolve()]
    try:
        with program.open("rb") as file:
            line = file.readline(512)
    except OSError:  # it does not exist yet, which another check reports
        line = b""
    if line.startswith(b"#!/"):
        places.append(Path(os.fsdecode(line[2:].split()[0])).resolve())
    for place in places:
        for one in HIDDEN:
            if place.is_relative_to(one):
                what = program if place == program else f"{program} needs {place}, which"
                return (
                    f"{what} is below {one}, which the service's sandbox hides: install "
                    "kvtier into a venv such as /opt/kvtier, made by a Python that is not "
                    f"below {one}, and run its own `kvtier install-service`, or give it with "
                    "--program"
                )
    return ""


def write(installation: Installation) -> list[Path]:
    """Write the files and return their paths. If a file of another author exists, writes nothing."""
    for path in installation.files:
        if path.exists() and not _is_ours(path):
            raise ConfigError(f"{path}: was not written by kvtier install-service; move it away")
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
            f"{error.filename}: {error.strerror}; run this as root, or use --dry-run"
        ) from error
    return written


def ours(root: Path) -> list[Path]:
    """Return all files of kvtier below `root`, except configurations."""
    places = ("etc/sysusers.d/kvtier.conf", "etc/tmpfiles.d/kvtier.conf", f"{UNITS}/kvtierd*",
              f"{UNITS}/kvtierd*.d/*.conf", f"{UNITS}/*.wants/kvtierd*", f"{UNITS}/{GPU_UNIT}")  # fmt: skip
    found = (path for pattern in places for path in root.glob(pattern))
    return sorted(path for path in found if path.is_file() and _is_ours(path))


def remove(paths: Sequence[Path]) -> None:
    """Remove these files, and the directories of drop-ins that are empty then."""
    try:
        for path in paths:
            path.unlink()
            folder = path.parent
            if folder.name.startswith("kvtierd") and not any(folder.iterdir()):
                folder.rmdir()
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; run this as root") from error


def after_removal() -> tuple[str, ...]:
    """Return the commands to run after the removal."""
    systemctl = _tool("systemctl")
    return f"{systemctl} stop 'kvtierd*' 'kvtier-gpu@*'", f"{systemctl} daemon-reload"


def own_program() -> Path:
    """Return the `kvtier` of the running Python."""
    return Path(sys.executable).parent / "kvtier"


def _unit(text: str, program: Path, version: int) -> str:
    """Return a unit that starts this program, for this version of systemd."""
    text = text.replace("/usr/bin/env kvtier", str(program))
    if version < RELOADS_SINCE:
        reload = "Type=notify\nExecReload=/bin/kill -HUP $MAINPID"
        text = text.replace("Type=notify-reload", reload)
    return text


def _gpu_unit(text: str, program: Path, config: Config) -> str:
    """Return the unit that holds the memory of a GPU, as much as the configuration divides."""
    nbytes = sum(size for _, size in config.hot.sizes)
    text = text.replace("/usr/bin/env kvtier", str(program))
    return text.replace("KVTIER_GPU_SIZE=8GiB\n", f"KVTIER_GPU_SIZE={nbytes}\n")


def _of_nodes(text: str) -> str:
    """Return the unit as a template for the daemons of NUMA nodes, which each have their own paths."""
    text = text[text.index("[Unit]") :]
    for one, of_node in OF_NODES:
        assert text.count(f"{one}\n") == 1, one
        text = text.replace(f"{one}\n", of_node and f"{of_node}\n")
    return HEAD_OF_NODES + text


def _is_ours(path: Path) -> bool:
    return path.read_text(errors="replace").startswith(MARK)


def _config(file: Path, socket: str, state: Path) -> Config | None:
    """Return the existing configuration, if any. Raises ConfigError if it contradicts the unit."""
    if not file.exists():
        return None
    loaded = load(file, environ={}, uid=0)
    for key, of_unit in (("socket", socket), ("state", str(state))):
        value = str(getattr(loaded.config, key))
        if loaded.origins[key] != "default" and value != of_unit:
            raise ConfigError(
                f"{loaded.origins[key]}: {key} = {value}, but the unit sets {of_unit} and its "
                f"sandbox allows nothing else: remove the line {key} = ..."
            )
    return loaded.config


def _places_of_nodes(nodes: Sequence[int]) -> str:
    """Return the lines of tmpfiles.d for the daemons of NUMA nodes."""
    return "".join(
        f"d /run/kvtier-node{node} 0755 {USER} {USER} -\nd {OWN_STATE}-node{node} 0700 {USER} {USER} -\n"
        for node in nodes
    )


def _starting(socket_text: str | None, socket_file: Path, services: Sequence[str]) -> list[str]:
    """Return the commands that start or restart the services. The socket continues to listen, unless its
    unit has changed: it cannot be restarted while its service runs."""
    systemctl = _tool("systemctl")
    commands = [f"{systemctl} daemon-reload"]
    if socket_text is not None:
        if socket_file.exists() and socket_file.read_text() != socket_text:
            commands.append(f"{systemctl} stop {SOCKET_UNIT} {' '.join(services)}")
        commands.append(f"{systemctl} enable --now {SOCKET_UNIT}")
    return [
        *commands,
        f"{systemctl} enable {' '.join(services)}",
        f"{systemctl} restart {' '.join(services)}",
    ]


def _tool(name: str) -> str:
    """Return the absolute path of a program of the system."""
    return shutil.which(name, path=TOOLS) or f"/usr/bin/{name}"


def _first_config(daemons: int) -> str:
    lines = Path("/proc/meminfo").read_text().split()
    size = max(1, int(lines[1]) * 1024 // GIB // SHARE // daemons)
    return (
        f"# Everything else has a default: see docs/configuration.md.\n[warm]\n"
        f'size = "{size}GiB"  # a quarter of the memory of this machine\n'
    )
