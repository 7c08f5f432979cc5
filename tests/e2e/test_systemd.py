"""The units that `kvtier install-service` writes: valid, hardened, and run by a real systemd if the
host permits one in its own namespaces."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.test_cold_tier import SPEC, tokens
from kvtier import Client, Unavailable
from kvtier.errors import ConfigError
from kvtier_daemon.tools import install
from support.daemons import kvtier
from support.disks import Mounted, mounted
from support.specs import pattern

PROGRAM = Path("/opt/kvtier/bin/kvtier")
REPOSITORY = Path(__file__).parents[2]
# The build machine may have another distribution and a newer systemd than the host: debootstrap's
# is sufficient.
ROOT = Path(os.environ.get("SYSTEMD_ROOT", "/"))
MANAGER = ROOT / "lib/systemd/systemd"
STOP_S = 30.0  # of the unit
# The rest is the sandbox, which only the system's manager applies.
KEPT = (
    "Type=",
    "ExecStart",
    "ExecStopPost=",
    "ExecReload=",
    "Restart",
    "StartLimit",
    "WatchdogSec=",
    "Timeout",
    "KillMode=",
    "NotifyAccess=",
    "Listen",
    "SocketMode=",
)
ENTER = """
set -e
for place in {places}; do mkdir -p "{root}$place"; mount --rbind "$place" "{root}$place"; done
mount -t proc proc {root}/proc
mount -t cgroup2 cgroup2 {root}/sys/fs/cgroup
exec chroot {root} bash -c {shell}
"""
SHELL = """
set -e
# Disks of other tests: one that is unmounted elsewhere would stay in use here.
grep ^/dev/loop /proc/mounts | while read -r _ place _; do
    case "$place" in "$FOLDER"/*) ;; *) umount -l "$place" ;; esac
done
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system "$XDG_RUNTIME_DIR"
chmod 700 "$XDG_RUNTIME_DIR"
/lib/systemd/systemd --user >/dev/null 2>&1 &
set +e
while read -r line; do eval "$line"; echo; echo "exit $?"; done
"""


def plan(root: Path, **options: object) -> install.Installation:
    return install.plan(root, PROGRAM, install.systemd_version(), **options)  # type: ignore[arg-type]


needs_analyze = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="needs systemd-analyze"
)


@needs_analyze
def test_the_installed_units_are_valid_and_hardened(tmp_path: Path) -> None:
    # In tenths; loopback sockets are necessary.
    cases: list[tuple[dict[str, object], int]] = [
        ({}, 10),
        ({"http": True}, 15),
        ({"nodes": [0]}, 10),
    ]
    for number, (options, most) in enumerate(cases):
        root = tmp_path / str(number)
        install.write(plan(root, **options))
        units = root / install.UNITS
        # An existing program.
        for unit in units.glob("*.service"):
            unit.write_text(unit.read_text().replace(str(PROGRAM), "/bin/true"))
        names = [path for path in units.iterdir() if path.is_file() and "@" not in path.name]
        if options.get("nodes"):
            template = units / "kvtierd@.service"
            shutil.copy(template, units / "kvtierd@0.service")
            names = [units / "kvtierd@0.service"]
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", *map(str, names)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        service = next(path for path in names if path.suffix == ".service")
        done = subprocess.run(
            ["systemd-analyze", "security", "--offline=true", f"--threshold={most}", str(service)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@needs_analyze
def test_the_unit_that_holds_the_memory_of_a_gpu_is_valid_and_hardened(tmp_path: Path) -> None:
    config = tmp_path / "etc/kvtier/kvtier.toml"
    config.parent.mkdir(parents=True)
    config.write_text('[warm]\nsize = "1GiB"\n')
    assert install.UNITS / install.GPU_UNIT not in plan(tmp_path).files
    config.write_text(
        '[warm]\nsize = "1GiB"\n[hot]\nsizes = ["default=3GiB"]\n[tenants.default]\nuids = ["*"]\n'
    )
    found = plan(tmp_path)
    assert found.commands[-1].endswith("systemctl enable --now kvtier-gpu@0")
    install.write(found)
    unit = tmp_path / install.UNITS / install.GPU_UNIT
    text = unit.read_text()
    assert f"ExecStart={PROGRAM} hold-gpu --gpu %i" in text
    assert f"KVTIER_GPU_SIZE={3 << 30}\n" in text
    instance = unit.parent / "kvtier-gpu@0.service"
    instance.write_text(text.replace(str(PROGRAM), "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(instance)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=35", str(instance)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    instance.unlink()
    install.remove(install.ours(tmp_path))
    assert not unit.exists()


def test_an_uninstall_removes_installed_files_and_keeps_others(tmp_path: Path) -> None:
    flags = ("--root", str(tmp_path), "--program", str(PROGRAM))
    shown = kvtier("install-service", "--dry-run", *flags)
    assert shown.returncode == 0, shown.stderr
    assert "systemctl enable --now" in shown.stdout and str(PROGRAM) in shown.stdout
    assert list(tmp_path.iterdir()) == []
    missing = kvtier("install-service", "--dry-run", *flags[:3], "/opt/none/kvtier")
    assert missing.returncode == 0 and "/opt/none/kvtier does not exist" in missing.stderr
    assert kvtier("install-service", *flags).returncode == 0
    unit = tmp_path / install.UNITS / "kvtierd.service"
    assert f"ExecStart={PROGRAM} serve" in unit.read_text()
    config = tmp_path / "etc/kvtier/kvtier.toml"
    assert kvtier("config", "check", str(config)).returncode == 0
    # Resources that the configuration needs are permitted, and files of the administrator are kept.
    config.write_text(
        '[warm]\nsize = "1GiB"\n[cold]\ndirectories = ["/mnt/a"]\nsize = "1TiB"\n'
        '[http]\nlisten = "127.0.0.1:9410"\n[remote]\nbucket = "blocks"\n'
    )
    admin_file = tmp_path / install.UNITS / "kvtierd.service.d" / "mine.conf"
    admin_file.parent.mkdir()
    admin_file.write_text("[Service]\nNice=5\n")
    done = kvtier("install-service", *flags)
    assert "/install -d -o kvtier -g kvtier -m 0700 /mnt/a" in done.stdout
    assert "ProtectSystem=full" in (admin_file.parent / "cold.conf").read_text()
    assert "IPAddressAllow=localhost" in (admin_file.parent / "http.conf").read_text()
    assert "PrivateNetwork=no" in (admin_file.parent / "remote.conf").read_text()
    assert "1GiB" in config.read_text(), "a configuration that is there stays"
    assert kvtier("install-service", "--uninstall", *flags).returncode == 0
    left = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {config, admin_file}
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    done = kvtier("install-service", *flags)
    assert done.returncode == 2 and str(unit) in done.stderr and done.stderr.count("\n") == 1


def test_daemons_of_nodes_share_the_sandbox_but_no_paths(tmp_path: Path) -> None:
    def lines(unit: str, **options: object) -> set[str]:
        text = plan(tmp_path, **options).files[tmp_path / install.UNITS / unit]
        return {line for line in text.splitlines() if line and not line.startswith("#")}

    one, node = lines("kvtierd.service"), lines("kvtierd@.service", nodes=[0])
    assert all("%i" in line for line in node - one) and len(node - one) == 5
    files = plan(tmp_path, nodes=[0]).files
    places = files[tmp_path / "etc/tmpfiles.d/kvtier.conf"].splitlines()
    assert "d /var/lib/kvtier-node0 0700 kvtier kvtier -" in places
    names = {line.partition("=")[0] for line in one - node}
    assert names == {
        "Description",
        "ExecStart",
        "RuntimeDirectory",
        "RuntimeDirectoryPreserve",
        "StateDirectory",
        "Environment",
        "Sockets",
    }


def test_a_program_that_the_sandbox_hides_is_refused_but_shown_by_a_dry_run(
    tmp_path: Path,
) -> None:
    flags = ("install-service", "--root", str(tmp_path), "--program", "/home/me/venv/bin/kvtier")
    refused = kvtier(*flags)
    assert refused.returncode == 2
    assert "kvtier: /home/me/venv/bin/kvtier is below /home, which" in refused.stderr
    assert list(tmp_path.iterdir()) == []
    shown = kvtier(*flags, "--dry-run")
    assert shown.returncode == 0 and "which the service's sandbox hides" in shown.stderr
    assert "ExecStart=/home/me/venv/bin/kvtier serve" in shown.stdout
    # A venv in a permitted place, made by a Python in a place that the sandbox hides.
    program = tmp_path / "kvtier"
    program.write_text("#!/home/me/python3\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(install, "HIDDEN", ("/home",))
        assert f"{program} needs /home/me/python3, which is below /home" in install.hidden(program)
        program.write_text("#!/usr/bin/python3\n")
        assert install.hidden(program) == ""


def test_the_printed_commands_need_no_path(tmp_path: Path) -> None:
    for options in ({}, {"nodes": [0, 1]}):
        for command in plan(tmp_path, **options).commands:
            assert command.startswith("/"), command


def test_a_rerun_restarts_the_service_and_a_new_socket_unit_its_socket(tmp_path: Path) -> None:
    def starting() -> list[str]:
        found = plan(tmp_path).commands
        return [" ".join(one.split()[1:]) for one in found if "systemctl" in one]

    restart = ["enable --now kvtierd.socket", "enable kvtierd.service", "restart kvtierd.service"]
    assert starting() == ["daemon-reload", *restart]
    install.write(plan(tmp_path))
    assert starting() == ["daemon-reload", *restart], "its socket goes on listening"
    unit = tmp_path / install.UNITS / install.SOCKET_UNIT
    unit.write_text(unit.read_text().replace("Backlog=128", "Backlog=64"))
    assert starting() == ["daemon-reload", "stop kvtierd.socket kvtierd.service", *restart]


def test_a_file_that_names_other_places_than_the_unit_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "etc/kvtier/kvtier.toml"
    config.parent.mkdir(parents=True)
    text = 'socket = "{}"\n[warm]\nsize = "1GiB"\n'
    config.write_text(text.format("/srv/k.sock"))
    with pytest.raises(ConfigError, match=r"kvtier.toml: socket = /srv/k.sock, but the unit"):
        plan(tmp_path)
    config.write_text(text.format("/run/kvtier/kvtier.sock"))
    plan(tmp_path)


def test_a_manager_without_notify_reload_uses_a_signal(tmp_path: Path) -> None:
    unit = Path(install.UNITS) / "kvtierd.service"
    new = install.plan(tmp_path, PROGRAM, 253).files[tmp_path / unit]
    old = install.plan(tmp_path, PROGRAM, 252).files[tmp_path / unit]
    assert "Type=notify-reload\n" in new and "ExecReload" not in new
    assert "Type=notify\n" in old and "ExecReload=/bin/kill -HUP $MAINPID" in old


# --- under a real one ----------------------------------------------------------------------------


class Manager:
    """A separate systemd user manager, and a shell in the same namespaces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.units = folder / "config/systemd/user"
        self.units.mkdir(parents=True)
        environment = dict(
            os.environ, XDG_RUNTIME_DIR="/run/user/0", XDG_CONFIG_HOME=str(folder / "config"),
            KVTIER_STATE=str(folder / "state"), FOLDER=str(folder),
        )  # fmt: skip
        shell = SHELL
        if Path("/") != ROOT:
            places = ["/dev", "/sys", folder, sys.prefix, sys.base_prefix, REPOSITORY]
            shell = ENTER.format(
                root=ROOT, places=shlex.join(map(str, places)), shell=shlex.quote(shell)
            )
        self._process = subprocess.Popen(
            ["unshare", "-mpf", "--kill-child", "--mount-proc", "bash", "-c", shell],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, command: str) -> str:
        """The output of a command, without the newline at its end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        lines: list[str] = []
        while not (line := self._process.stdout.readline()).startswith("exit "):
            assert line, f"the shell ended: {lines}"
            lines.append(line)
        return "".join(lines).strip()

    def version(self) -> int:
        return int(self.run("systemctl --version").split()[1])

    def show(self, name: str, unit: str = "kvtierd.service") -> str:
        return self.run(f"systemctl --user show -P {name} {unit}")

    def wait_for(self, holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < until, f"not so after {seconds} s: {what}"
            time.sleep(0.1)

    def close(self) -> None:
        self.run("systemctl --user stop kvtierd.service kvtierd.socket; systemctl --user exit")
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    if os.geteuid() != 0 or not MANAGER.exists():
        pytest.skip("needs root, and systemd")
    done = subprocess.run(
        ["unshare", "-mpf", "--mount-proc", "mount", "-t", "tmpfs", "tmpfs", "/run"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"needs namespaces: {done.stderr.strip()}")
    manager = Manager(tmp_path)
    try:
        state = ""
        for _ in range(100):
            state = manager.run("systemctl --user is-system-running")
            if state in ("running", "degraded"):
                break
            time.sleep(0.1)
        else:
            pytest.skip(f"systemd --user does not come up here: {state}")
        yield manager
    finally:
        manager.close()


def installed(manager: Manager, watchdog: str = "30") -> Path:
    """The socket of the units that were installed for this manager."""
    folder = manager.folder
    config = folder / "kvtier.toml"
    path = folder / "s" / "kvtier.sock"
    path.parent.mkdir()
    (folder / "disk").mkdir(exist_ok=True)
    config.write_text(
        f'socket = "{path}"\nlog_level = "info"\n[warm]\nsize = "16MiB"\n'
        f'[cold]\ndirectories = ["{folder}/disk"]\nsize = "64MiB"\nsegment = "1MiB"\n'
    )
    found = install.plan(folder / "root", PROGRAM, manager.version())
    for name in ("kvtierd.service", "kvtierd.socket"):
        text = found.files[folder / "root" / install.UNITS / name]
        lines = [line for line in text.splitlines() if line.startswith(("[", *KEPT))]
        text = "\n".join(lines).replace("WatchdogSec=30", f"WatchdogSec={watchdog}")
        text = text.replace(f"{PROGRAM} serve", f"{sys.executable} -m kvtier_daemon.cli serve")
        text = text.replace("/etc/kvtier/kvtier.toml", str(config))
        text = text.replace("/run/kvtier/kvtier.sock", str(path))
        if name == "kvtierd.service":
            text = text.replace("[Service]", f"[Service]\nStandardError=append:{folder}/daemon.log")
        (manager.units / name).write_text(text + "\n")
    manager.run("systemctl --user daemon-reload")
    return path


def asked(path: Path, what: Callable[[Client], object]) -> object:
    with Client.connect(path, populate=False, timeout_s=30.0) as client:
        return what(client)


def test_the_daemon_is_started_by_its_socket_reloaded_and_stopped(manager: Manager) -> None:
    path = installed(manager)
    manager.run("systemctl --user start kvtierd.socket")
    assert manager.show("ActiveState") == "inactive"
    assert path.stat().st_mode & 0o777 == 0o660
    stats = asked(path, Client.stats)  # the first client starts the daemon
    assert isinstance(stats, dict)
    assert manager.show("ActiveState") == "active"
    manager.wait_for(lambda: "cold " in manager.show("StatusText"), "STATUS= is live", 60)
    assert manager.show("StatusText").startswith("warm 0 B of 16 MiB, cold ")

    config = manager.folder / "kvtier.toml"
    main = manager.show("MainPID")
    config.write_text("max_clients = 7\n" + config.read_text())
    assert manager.run("systemctl --user reload kvtierd.service") == ""

    def clients(client: Client) -> object:
        return client.settings()["keys"]["max_clients"][0]

    manager.wait_for(lambda: asked(path, clients) == 7, "the new value is in force", 60)
    config.write_text("max_clients = 0\n" + config.read_text())
    manager.run("systemctl --user reload kvtierd.service")
    log = manager.folder / "daemon.log"
    manager.wait_for(lambda: "reload refused" in log.read_text(), "it is refused", 60)
    assert asked(path, clients) == 7 and manager.show("MainPID") == main
    assert manager.show("ActiveState") == "active"

    manager.run("systemctl --user stop kvtierd.service")
    assert (manager.show("Result"), manager.show("ActiveState")) == ("success", "inactive")
    assert path.exists(), "the manager's socket outlives the daemon"
    manager.run("systemctl --user stop kvtierd.socket")
    with pytest.raises(Unavailable):
        asked(path, Client.ping)


def test_a_reload_has_ended_when_systemctl_returns(manager: Manager) -> None:
    if (version := manager.version()) < install.RELOADS_SINCE:
        pytest.skip(f"systemd {version} knows no notify-reload: SYSTEMD_ROOT names a newer one")
    path = installed(manager)
    manager.run("systemctl --user start kvtierd.socket kvtierd.service")
    assert manager.show("Type") == "notify-reload"
    config, main = manager.folder / "kvtier.toml", manager.show("MainPID")
    text = config.read_text()
    for wanted in range(7, 27):
        config.write_text(f"max_clients = {wanted}\n{text}")
        assert manager.run("systemctl --user reload kvtierd.service") == ""
        assert asked(path, lambda it: it.settings()["keys"]["max_clients"][0]) == wanted  # type: ignore[attr-defined]
        assert (manager.show("ActiveState"), manager.show("SubState")) == ("active", "running")
    config.write_text(f"max_clients = 0\n{text}")
    assert manager.run("systemctl --user reload kvtierd.service") == ""
    assert "reload refused, the previous configuration stays in force" in manager.show("StatusText")
    assert (manager.show("MainPID"), manager.show("ReloadResult")) == (main, "success")


def test_a_daemon_that_hangs_is_restarted_and_one_that_works_is_not(manager: Manager) -> None:
    path = installed(manager, watchdog="4")
    manager.run("systemctl --user start kvtierd.socket kvtierd.service")
    main = manager.show("MainPID")
    time.sleep(9)  # twice the watchdog's interval
    assert (manager.show("MainPID"), manager.show("NRestarts")) == (main, "0")
    assert main != "0", "it does not run"
    manager.run(f"kill -{signal.SIGSTOP.value} {main}")
    manager.wait_for(lambda: manager.show("NRestarts") == "1", "the watchdog bit")
    asked(path, Client.ping)
    assert manager.show("MainPID") != main


def replaced(manager: Manager, command: str, *others: tuple[str, str]) -> None:
    """Let the service run this command instead of the daemon, with other words in place of the unit's."""
    (manager.folder / "state").mkdir(exist_ok=True)
    installed(manager)
    unit = manager.units / "kvtierd.service"
    text = re.sub("(?m)^ExecStart=.*", f"ExecStart=/bin/sh -c '{command}'", unit.read_text())
    for before, after in others:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    unit.write_text(text)
    manager.run("systemctl --user daemon-reload")


def test_a_daemon_that_crashes_again_and_again_is_started_again(manager: Manager) -> None:
    # Without the sleep, five crashes take 0.6 s.
    shorter = ("sleep 2", "sleep 0.4"), ("StartLimitIntervalSec=10s", "StartLimitIntervalSec=1s")
    replaced(manager, "kill -s KILL $$$$", *shorter)
    manager.run("systemctl --user start kvtierd.socket; systemctl --user start kvtierd.service")
    manager.wait_for(lambda: int(manager.show("NRestarts")) > 12, "it is started again", 60)
    assert manager.show("ActiveState") != "failed"


def test_a_crash_soon_after_the_start_delays_the_next_start_and_a_later_one_does_not(
    manager: Manager,
) -> None:
    started, waited = manager.folder / "state" / "started", manager.folder / "waited"
    replaced(
        manager, "systemd-notify --ready; exec tail -f /dev/null", ("sleep 2", f"touch {waited}")
    )
    manager.run("systemctl --user start kvtierd.service")
    os.utime(started, (0, time.time() - 13))
    manager.run("systemctl --user kill -s KILL kvtierd.service")
    manager.wait_for(lambda: manager.show("NRestarts") == "1", "it is started again", 60)
    manager.wait_for(lambda: manager.show("ActiveState") == "active", "it runs", 60)
    assert not waited.exists()
    os.utime(started)  # also on a slow machine
    manager.run("systemctl --user kill -s KILL kvtierd.service")
    manager.wait_for(lambda: manager.show("NRestarts") == "2", "it is started again", 60)
    assert waited.exists()


def test_a_client_does_not_start_a_daemon_with_a_wrong_configuration_forever(
    manager: Manager,
) -> None:
    replaced(manager, "exit 2", ("StartLimitIntervalSec=10s", "StartLimitIntervalSec=60s"))
    manager.run("systemctl --user start kvtierd.socket")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(manager.folder / "s" / "kvtier.sock"))
        state = ("ActiveState", "kvtierd.socket")
        manager.wait_for(lambda: manager.show(*state) == "failed", "its socket is closed", 60)
    assert manager.show("Result", "kvtierd.socket") == "service-start-limit-hit"
    assert manager.show("NRestarts") == "0"


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Mounted]:
    """A disk for the daemon's directory. Request it before the manager, so that the manager ends first."""
    if not os.environ.get("KVTIER_FAULTS"):
        pytest.skip("waits for what hangs; KVTIER_FAULTS=1")
    with mounted(tmp_path, 330 << 20, "xfs") as disk:
        yield disk


@pytest.mark.parametrize("way", ["stop", "restart", "kill -s KILL", "stop at once"])
def test_a_disk_that_hangs_delays_neither_a_stop_nor_the_next_start(
    frozen: Mounted, manager: Manager, way: str
) -> None:
    path = installed(manager)
    manager.run("systemctl --user start kvtierd.socket kvtierd.service")
    log = manager.folder / "daemon.log"

    def saved(client: Client, first: int) -> None:
        space = client.open(SPEC)
        keys = space.keys(tokens(first))
        space.save(keys, [pattern(key, SPEC.block_bytes) for key in keys])

    def serves(client: Client) -> int:
        saved(client, 1000)
        space = client.open(SPEC)
        keys = space.keys(tokens(1000))
        with space.load(keys, deadline_ms=2000) as blocks:
            for key, block in zip(keys, blocks, strict=False):
                assert bytes(block or b"") == pattern(key, SPEC.block_bytes), "other bytes"
            return len(blocks)

    manager.wait_for(lambda: "cold tier is ready" in log.read_text(), "it is open", 60)
    at_once = way == "stop at once"
    with Client.connect(path, populate=False, timeout_s=30.0) as client, frozen.frozen():
        daemon = str(client.settings("log")["pid"])
        saved(client, 0)
        if not at_once:
            client.tier("warm", "drain")
            manager.wait_for(
                lambda: "not used until one completes" in log.read_text(), "it hangs", 60
            )
            manager.wait_for(lambda: manager.show("MainPID") != daemon, "another one stands in", 60)
        began = time.monotonic()
        stops = way.startswith("stop")
        units = "kvtierd.service kvtierd.socket" if stops else "kvtierd.service"
        manager.run(f"systemctl --user {way.split(' at')[0]} {units}")
        seconds = time.monotonic() - began
        assert seconds < STOP_S, "longer than TimeoutStopSec"
        if stops:
            assert manager.show("Result") == "exit-code", log.read_text()
            assert manager.show("ExecMainStatus") == "75"
            manager.run("systemctl --user start kvtierd.socket kvtierd.service")
        manager.wait_for(lambda: manager.show("ActiveState") == "active", "it is started", 60)
        manager.wait_for(lambda: bool(asked(path, serves)), "it serves", 60)
    manager.wait_for(
        lambda: "is available again, reading its segments" in log.read_text(), "taken up", 60
    )
