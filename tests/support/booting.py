"""Boot a real systemd as PID 1 of its own namespaces, over a temporary copy of this machine's files.

The root is an overlay: programs in it write into a tmpfs, and the host's files do not change.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SYSTEMD = Path("/lib/systemd/systemd")
PROGRAM = "/opt/kvtier/bin/kvtier"
PACKAGES = (
    "kvtier/kvtier",
    "daemon/kvtier_daemon",
    "kernels/kvtier_kernels",
    "plugins/kvtier_vllm",
)
NAMESPACES = (
    "unshare",
    "--mount",
    "--pid",
    "--fork",
    "--ipc",
    "--uts",
    "--cgroup",
    "--net",
    "--kill-child",
)
BOOT = """
set -e
base=$1 python=$2 library=$3 site=$4 program=$5 disk=$6
mount --make-rprivate /
# Disks of other tests: one that is unmounted elsewhere would stay in use here.
grep ^/dev/loop /proc/mounts | while read -r _ place _; do umount -l "$place"; done
mount -t tmpfs tmpfs "$base"
mkdir "$base/upper" "$base/work" "$base/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" "$base/root"
cd "$base/root"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
for place in dev run tmp opt; do mount -t tmpfs tmpfs $place; done
for node in null zero full random urandom tty; do
    touch dev/$node
    mount --bind /dev/$node dev/$node
done
mkdir dev/shm dev/pts dev/mqueue dev/hugepages
mount -t devpts devpts dev/pts -o newinstance,ptmxmode=0666
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
# Settings and devices are those of the host.
for place in proc/sys sys; do
    test $place = sys || mount --bind $place $place
    mount -o remount,bind,ro $place
done
mkdir -p opt/kvtier opt/python opt/site srv/disk
mount --bind "$disk" srv/disk
mount --bind "$program" opt/kvtier
mount --bind "$python" opt/python
mount --bind "$site" opt/site
# A mount in this system arrives in its services, as on a host.
mount --make-rshared .
if test -n "$library"; then
    cp "$library" usr/lib/
    # That of the distribution's own Python would be found first.
    for own in usr/lib/*/"${library##*/}"; do
        test ! -e "$own" || cp --remove-destination "$library" "$own"
    done
fi
# Start only the journal of the units that this machine starts at boot.
rm -rf etc/systemd/system/* etc/kvtier var/lib/kvtier
find lib/systemd/system/*.wants/ -type l ! -name 'systemd-journald*' -delete
exec chroot . env -i container=kvtier-tests PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --system --unit=basic.target --show-status=no --log-target=journal
"""


class BootError(Exception):
    """This host allows no systemd in namespaces; the text is the reason."""


def make_program(folder: Path) -> None:
    """Create the content of /opt/kvtier: a venv with copies of this tree's packages, not editable."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    for package in PACKAGES:
        shutil.copytree(REPOSITORY / package, site / Path(package).name)
    from kvtier_kernels import _native

    assert _native.__file__ is not None
    shutil.copy(_native.__file__, site / "kvtier_kernels")
    # A directory named by a .pth file is searched for packages, and its own .pth files are not read.
    (site / "dependencies.pth").write_text("/opt/site\n")
    shutil.copytree(REPOSITORY / "systemd", folder / "share/kvtier/systemd")
    programs = folder / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(f"/opt/python/bin/{version}")
    (folder / "pyvenv.cfg").write_text(
        "home = /opt/python/bin\ninclude-system-site-packages = false\n"
    )
    command = programs / "kvtier"
    command.write_text(
        "#!/opt/kvtier/bin/python\nfrom kvtier_daemon.cli import main\nraise SystemExit(main())\n"
    )
    command.chmod(0o755)


class Machine:
    """A booted systemd; `run` runs commands in it as root, from a shell without environment. /srv/disk is a
    directory of the host's file system, not part of the overlay."""

    def __init__(self, folder: Path) -> None:
        base, program, disk = folder / "machine", folder / "program", folder / "disk"
        base.mkdir()
        disk.mkdir()
        make_program(program)
        library = ""
        if sysconfig.get_config_var("Py_ENABLE_SHARED"):
            found = Path(sys.base_prefix, "lib", str(sysconfig.get_config_var("INSTSONAME")))
            library = str(found) if found.exists() else ""
        site = sysconfig.get_path("purelib")
        self._log = (folder / "boot.log").open("w+b")
        self._unshare = subprocess.Popen(
            [*NAMESPACES, "sh", "-c", BOOT, "sh", str(base), sys.base_prefix, library, site, str(program),
             str(disk)],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            self._pid = self._first_process()
            self._wait_until_booted()
        except BaseException:
            self.close()
            raise

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a line in a shell without any environment, at the root directory."""
        return subprocess.run(
            ["nsenter", "-t", str(self._pid), "-m", "-p", "-i", "-u", "-C", "-n", "-r", "-w",
             "/usr/bin/env", "-i", "/bin/sh", "-c", command],
            capture_output=True, text=True, check=False, timeout=120, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def do(self, command: str) -> str:
        """Run a line that must succeed; return its output."""
        done = self.run(command)
        assert done.returncode == 0, (
            f"{command}: {done.returncode}: {done.stdout}{done.stderr}\n{self.journal()}"
        )
        return done.stdout.strip()

    def show(self, name: str, unit: str = "kvtierd.service") -> str:
        return self.do(f"systemctl show -P {name} {unit}")

    def journal(self) -> str:
        return self.run("journalctl --no-pager -o short -n 60").stdout

    def close(self) -> None:
        if self._unshare.poll() is None:
            for pid in self._children():
                os.kill(pid, signal.SIGKILL)  # this ends all processes of its namespace
        self._unshare.wait(30)
        self._log.close()

    def _children(self) -> list[int]:
        pid = self._unshare.pid
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def _first_process(self) -> int:
        pids: list[int] = []
        self._wait(lambda: bool(pids.extend(self._children()) or pids))
        return pids[0]

    def _wait_until_booted(self) -> None:
        # Before the program is PID 1, its root is the host's.
        self._wait(lambda: Path(f"/proc/{self._pid}/comm").read_text().strip() == "systemd")
        state = ""

        def settled() -> bool:
            nonlocal state
            state = self.run("exec systemctl is-system-running").stdout.strip()
            return state in ("running", "degraded")

        self._wait(settled, what=lambda: f"it is {state or 'silent'}")

    def _wait(
        self, holds: Callable[[], bool], seconds: float = 60.0, what: Callable[[], str] = str
    ) -> None:
        until = time.monotonic() + seconds
        while not holds():
            if self._unshare.poll() is not None or time.monotonic() > until:
                self._log.seek(0)
                said = self._log.read().decode(errors="replace").strip()[-500:]
                raise BootError(f"no systemd in namespaces: {what()} {said}")
            time.sleep(0.05)


def reason_not_to() -> str:
    """Return why no systemd can be booted here; empty if no reason is known."""
    missing = [name for name in ("unshare", "nsenter") if not shutil.which(name)]
    if not SYSTEMD.exists():
        missing.append("systemd")
    if missing:
        return f"needs {', '.join(missing)}: apt-get install systemd util-linux"
    if os.geteuid() != 0:
        return "only root can boot a systemd in namespaces"
    return ""
