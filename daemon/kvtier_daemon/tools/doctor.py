"""Checks of the machine, its configuration and its daemon: one for each problem that has occurred, with the
measured value and the command that solves it.

The environment is a parameter: files under `root`, limits, libraries. A check only reads, except for a probe
file that it removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import resource
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvtier.units import GIB, MIB, format_bytes
from kvtier_daemon.config import preflight
from kvtier_daemon.config.schema import Config, LoadedConfig
from kvtier_daemon.observing.hints import LOST
from kvtier_daemon.tiers.cold.directory_lock import distrust_cold
from kvtier_daemon.tiers.cold.forget_count import lost_rounds
from kvtier_daemon.tiers.states import is_away, is_drained, is_switched_off, meaning, remedy
from kvtier_daemon.tiers.tier_keys import key_files

PROBE_BYTES: Final = 64 * 1024
PAGE: Final = 4096
SHM_LEAST: Final = GIB
COLLAPSES: Final = (6, 1)  # the first kernel with MADV_COLLAPSE
NO_DISKS: Final = {"tmpfs": "memory", "ramfs": "memory", "overlay": "a container's layer"}
ELSEWHERE: Final = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "virtiofs", "lustre")
COPYING: Final = ("btrfs", "zfs", "bcachefs")
GOOD_CLOCKS: Final = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
NVIDIA: Final = "0x10de"
LOST_SHARE: Final = 0.01  # of the blocks that were to be written
COUNTED_READS: Final = re.compile(r"^Reads\s*:.*\bn=\d", re.MULTILINE)  # by nvidia-fs
LIMITS: Final = {
    resource.RLIMIT_MEMLOCK: "Max locked memory", resource.RLIMIT_NOFILE: "Max open files",
    resource.RLIMIT_FSIZE: "Max file size",
}  # fmt: skip
DAEMON: Final = "daemon"  # the check whether the daemon answers


class Severity(StrEnum):
    ok = "ok"
    warn = "warn"
    fail = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `fix` is the remedy, or empty."""

    name: str
    level: Severity
    value: str
    fix: str = ""


def ok(name: str, value: str) -> Finding:
    return Finding(name, Severity.ok, value)


def warn(name: str, value: str, fix: str) -> Finding:
    return Finding(name, Severity.warn, value, fix)


def fail(name: str, value: str, fix: str) -> Finding:
    return Finding(name, Severity.fail, value, fix)


def _loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class World:
    """The machine that is examined."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    loadable: Callable[[str], bool] = _loadable
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs
    device: Callable[[Path], int] = lambda path: path.stat().st_dev
    release: str = field(default_factory=lambda: os.uname().release)

    def text(self, path: str) -> str:
        """Return the content of a file; empty if it does not exist."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def there(self, path: str) -> bool:
        return (self.root / path).exists()

    def under(self, path: str, pattern: str) -> list[Path]:
        return sorted((self.root / path).glob(pattern))

    @property
    def gpus(self) -> list[Path]:
        """The display controllers of NVIDIA."""
        return [
            device
            for device in self.under("sys/bus/pci/devices", "*")
            if (device / "vendor").exists()
            and (device / "vendor").read_text().strip() == NVIDIA
            and (device / "class").read_text().startswith("0x03")
        ]


def examine(
    world: World, loaded: LoadedConfig | None, stats: Mapping[str, Any] | None, trouble: str
) -> list[Finding]:
    """Run all checks except those of engines. `trouble`: why the daemon's status, `stats`, is None."""
    found = [daemon(stats, trouble), huge_pages(world), clock(world), shared_memory(world)]
    found += [gpu_driver(world), gpu_direct(world), udev(world)]
    process = "self"
    if stats is not None:
        found.append(listening(world, pid := int(stats.get("pid", 0))))
        if world.there(f"proc/{pid}/limits"):
            process = str(pid)
        if "cold" in stats.get("tiers", {}):
            found.append(cold_engine(stats["tiers"]["cold"]))
            found.append(lost_unwritten(stats["tiers"]["cold"]))
            found += older_copies(stats["tiers"]["cold"])
        if "remote" in stats.get("tiers", {}):
            found.append(remote_store(stats["tiers"]["remote"]))
        found.append(lately(stats))
    if loaded is None:
        return found
    config = loaded.config
    found += started(world, loaded, stats is not None, process)
    found.append(registered_memory(world, config, process))
    if config.warm.huge_pages:
        found.append(reserved_huge_pages(world, config))
    directories = config.cold.directories if config.cold is not None else ()
    for directory in directories:
        found += [file_system(world, directory), direct_io(directory), owned(directory)]
        found.append(age(directory, config.state))
    found += [
        direct_reads(world, config, name)
        for name, tenant in config.tenants.items()
        if tenant.direct_reads
    ]
    if config.cold is not None:
        found.append(free_space(world, directories, config.cold.size_bytes))
    found.append(nodes(world, directories))
    return found


# --- the daemon ----------------------------------------------------------------------------------


def daemon(stats: Mapping[str, Any] | None, trouble: str) -> Finding:
    """Check whether the daemon answers and has this version."""
    import kvtier

    if stats is None:
        what, _, advice = trouble.partition("; ")
        return fail(DAEMON, what, advice or "see its log")
    version = stats.get("version", "")
    if version != kvtier.__version__:
        fix = "restart it: systemctl restart kvtierd"
        return warn(
            DAEMON, f"the daemon is kvtier {version}, this command is {kvtier.__version__}", fix
        )
    if failure := stats.get("tiers", {}).get("warm", {}).get("failure"):
        return fail(
            DAEMON, f"the warm tier is incomplete: {failure}", "free memory, then restart it"
        )
    return ok(DAEMON, f"kvtier {version} answers, process {stats.get('pid')}")


def limit(world: World, process: str, kind: int) -> tuple[int, int]:
    """Return the soft and the hard limit of a process: of the daemon, whose unit sets its own, or "self"."""
    found = re.search(rf"{LIMITS[kind]} +(\w+) +(\w+)", world.text(f"proc/{process}/limits"))
    words = found.groups() if found else ("unlimited", "unlimited")
    soft, hard = (int(one) if one.isdecimal() else resource.RLIM_INFINITY for one in words)
    return soft, hard


def _whose(process: str) -> str:
    return "this command" if process == "self" else f"the daemon, process {process}"


def started(
    world: World, loaded: LoadedConfig, serves: bool, process: str = "self"
) -> list[Finding]:
    """Run the checks of a start. If the daemon runs, its memory is not needed a second time."""
    config = loaded.config

    def raise_limit(*_: object) -> None:
        if process != "self":  # a daemon that starts raises its own; one that runs has done that
            raise OSError

    checks = (preflight.open_files, preflight.file_size)
    limits = [check(config, partial(limit, world, process), raise_limit) for check in checks]
    looks = [replace(one, value=f"{one.value} of {_whose(process)}") for one in limits]
    looks.append(preflight.socket_path(config.socket))
    if not serves:
        looks += [preflight.memory(config.warm), preflight.locked_memory(config.warm)]
    looks.append(preflight.state_directory(config.state))
    looks += [*preflight.remote_store(config), *key_files(config)]
    if not serves:
        looks += preflight.store_answers(config)
    return [
        ok(look.what, look.value) if look.ok else fail(look.what, look.value, look.fix)
        for look in looks
    ]


def cold_engine(cold: Mapping[str, Any]) -> Finding:
    """Report how the daemon accesses its disks."""
    name = "cold tier"
    if is_away(cold) or (is_drained(cold) and not cold.get("failure")):
        return warn(name, meaning("cold", cold), "kvtier tier on cold")
    if cold.get("given_up") or not cold.get("on", True):
        failure = str(cold.get("failure") or "it does not accept writes")
        again = "then restart the daemon" if cold.get("given_up") else "the daemon retries"
        return fail(name, f"off: {failure}", f"{remedy(failure)}; {again}")
    if cold.get("engine") != "io_uring":
        fix = "sysctl kernel.io_uring_disabled=0, or allow io_uring in the container's seccomp profile"
        return warn(name, f"uses {cold.get('engine')}, not io_uring", fix)
    if cold.get("failure"):
        return warn(name, f"{cold['failure']}", remedy(str(cold["failure"])))
    return ok(name, "uses io_uring")


def remote_store(remote: Mapping[str, Any]) -> Finding:
    """Report whether the daemon uses its remote store."""
    name, store = "remote tier", remote.get("store", "")
    if is_switched_off(remote):
        return warn(name, f"{store} is switched off", "kvtier tier on remote")
    if not remote.get("on"):
        fix = "check the bucket, the credentials and the network; the daemon retries"
        return warn(name, f"{store} is off: {remote.get('failure')}", fix)
    if said := meaning("remote", remote):
        return warn(name, said, "kvtier tier on remote")
    if not remote.get("writable"):
        return warn(name, f"{store} cannot be written", "the daemon's log says why; it retries")
    if " at http://" in str(store):
        fix = "use https, unless the network between the hosts and the store is trusted"
        return warn(name, f"{store} is used without TLS", fix)
    return ok(name, f"uses {store}")


def lost_unwritten(cold: Mapping[str, Any]) -> Finding:
    """Check whether blocks were evicted before they were on disk, since the daemon's start."""
    name = "blocks lost unwritten"
    written = cold.get("states", {}).get("written", 0)
    unwritten = cold.get("unwritten", {})
    lost = {why: unwritten.get(why, 0) for why in LOST}
    total = sum(lost.values())
    value = ", ".join(f"{why} {n:,}" for why, n in lost.items() if n)
    if total > LOST_SHARE * (total + written):
        worst = max(lost, key=lambda why: lost[why])
        return warn(name, f"{value}; {written:,} were written", LOST[worst])
    return ok(name, value or "none")


def lately(stats: Mapping[str, Any]) -> Finding:
    """Report the hints of the daemon, if it has any."""
    name = "last minutes"
    if "hints" not in stats:
        return ok(name, "not shown to this user: run this as root, or as the daemon's user")
    hints = [str(hint) for hint in stats["hints"]]
    if not hints:
        return ok(name, "no blocks lost unwritten, no disk too slow, no drop of the hit rate")
    what, _, advice = hints[0].partition("; ")
    return warn(name, what, "; ".join([advice, *hints[1:]]))


def owned(directory: Path) -> Finding:
    """Check whether only the directory's owner could have written segments there."""
    name = f"owner of {directory}"
    try:
        why, fix = distrust_cold(directory, directory.stat().st_uid)
    except FileNotFoundError:
        return ok(name, "the directory does not exist yet")
    except OSError as error:
        return fail(name, f"{directory}: {error.strerror}", "run the doctor as the daemon's user")
    return fail(name, why, fix) if why else ok(name, "only the daemon's user can write there")


def age(directory: Path, state: Path) -> Finding:
    """Check whether the directory is an older copy of itself, in which forgotten blocks may be."""
    name = f"age of {directory}"
    try:
        lost = lost_rounds(directory, state)
    except PermissionError:
        return ok(name, "not shown to this user: run this as root, or as the daemon's user")
    except OSError as error:
        return fail(name, f"{error.filename}: {error.strerror}", "repair it, or set state")
    if not lost:
        return ok(name, "it lacks no forgets that the state folder has counted")
    fix = "restore the newest copy; otherwise the next start removes all blocks of this directory"
    return fail(name, f"an older copy: it lacks {lost} rounds of forgets", fix)


def older_copies(cold: Mapping[str, Any]) -> list[Finding]:
    """Report directories that were emptied as older copies, and forgets that could not be counted."""
    name, fix = "older copies", "do not restore cold directories from copies or snapshots"
    found = [warn(name, str(text), fix) for text in cold.get("older_copies", ())]
    if failure := cold.get("not_counted"):
        found.append(warn("count of forgets", str(failure), "repair that; the daemon retries"))
    return found


def listening(world: World, pid: int) -> Finding:
    """Check that the daemon listens on TCP ports beyond loopback only if that is configured."""
    name = "ports"
    mine = set()
    for link in world.under(f"proc/{pid}/fd", "*"):
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if match := re.fullmatch(r"socket:\[(\d+)\]", target):
            mine.add(match[1])
    ports = [at for at, inode in _listeners(world) if inode in mine]
    if outside := [at for at in ports if not at.startswith(("127.", "[::1]"))]:
        fix = 'set http.listen to a loopback address, such as "127.0.0.1:9410"'
        return warn(name, f"the daemon listens on {', '.join(outside)}", fix)
    return ok(name, f"listens on {', '.join(ports)}" if ports else "no TCP port is open")


def _listeners(world: World) -> Iterator[tuple[str, str]]:
    """Yield the address and the inode of each listening socket."""
    for table in ("proc/net/tcp", "proc/net/tcp6"):
        for line in world.text(table).splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[3] == "0A":
                host, port = words[1].split(":")
                yield f"{_address(host)}:{int(port, 16)}", words[9]


def _address(host: str) -> str:
    words = struct.pack(
        f"={len(host) // 8}I", *(int(host[at : at + 8], 16) for at in range(0, len(host), 8))
    )
    text = socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)
    return text if len(words) == 4 else f"[{text}]"


# --- memory --------------------------------------------------------------------------------------


def registered_memory(world: World, config: Config, process: str = "self") -> Finding:
    """Check whether the arena can be registered with io_uring, and pinned by engines."""
    name = "memlock"
    soft, _ = limit(world, process, resource.RLIMIT_MEMLOCK)
    need = preflight.arena_bytes(config.warm)
    said = f"{preflight._amount(soft)} for {_whose(process)}"
    if soft == resource.RLIM_INFINITY or soft >= need:
        return ok(name, said)
    if preflight._has_capability(world.root / "proc", preflight._CAP_IPC_LOCK, process):
        return ok(name, f"{said}, lifted by CAP_IPC_LOCK")
    fix = "LimitMEMLOCK=infinity in the unit, or `ulimit -l unlimited` as root before the start"
    return warn(
        name, f"{said}, the arena has {format_bytes(need)}: it cannot be registered as a whole", fix
    )


def huge_pages(world: World) -> Finding:
    """Check whether the kernel can use huge pages for the arena (MADV_COLLAPSE)."""
    name = "huge pages"
    place = "sys/kernel/mm/transparent_hugepage"
    shmem = re.search(r"\[(\w+)\]", world.text(f"{place}/shmem_enabled"))
    numbers = [int(word) for word in re.findall(r"\d+", world.release)[:2]]
    if not world.there(place):
        fix = "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE; without, clients map 150 times slower"
        return warn(name, "this kernel does not support them", fix)
    if tuple(numbers) < COLLAPSES:
        fix = f"echo advise > /{place}/shmem_enabled, or use Linux 6.1 or later"
        return warn(name, f"Linux {world.release} cannot collapse pages of shared memory", fix)
    if shmem and shmem[1] == "deny":
        return warn(name, "shmem_enabled is deny", f"echo never > /{place}/shmem_enabled")
    return ok(name, f"by collapse (shmem_enabled {shmem[1] if shmem else 'unknown'})")


def reserved_huge_pages(world: World, config: Config) -> Finding:
    """Check whether the pages for warm.huge_pages are reserved."""
    name = "hugetlbfs"
    table = preflight._table(world.root / "proc" / "meminfo")
    each = table.get("Hugepagesize:", 2048) * 1024
    total = table.get("HugePages_Total:", 0) * each
    need = preflight.arena_bytes(config.warm)
    if total >= need:
        return ok(name, f"{format_bytes(total)} set aside")
    value = f"{format_bytes(total)} set aside, the arena has {format_bytes(need)}"
    fix = f"sysctl vm.nr_hugepages={-(-need // each)}, or warm.huge_pages = false"
    return fail(name, value, fix)


def shared_memory(world: World) -> Finding:
    """Check whether /dev/shm has space for an engine's workers. kvtier's own memory is not there."""
    name = "/dev/shm"
    try:
        found = world.statvfs(world.root / "dev/shm")
    except OSError as error:
        return warn(name, str(error.strerror), "mount -t tmpfs tmpfs /dev/shm; engines need it")
    size = found.f_frsize * found.f_blocks
    if size < SHM_LEAST:
        fix = "mount -o remount,size=8g /dev/shm, or --shm-size=8g for the container"
        return warn(name, f"{format_bytes(size)}: little for an engine of several workers", fix)
    return ok(name, f"{format_bytes(found.f_frsize * found.f_bavail)} free of {format_bytes(size)}")


def nodes(world: World, directories: Sequence[Path]) -> Finding:
    """Check whether memory, disks and GPUs are on one NUMA node."""
    name = "NUMA"
    count = len(world.under("sys/devices/system/node", "node[0-9]*"))
    if count <= 1:
        return ok(name, "one node")
    status = re.search(r"Mems_allowed_list:\s*(\S+)", world.text("proc/self/status"))
    memory = status[1] if status else ""
    places = {f"disk of {one}": _disk_node(world, one) for one in directories}
    places |= {f"GPU {gpu.name}": _node(gpu / "numa_node") for gpu in world.gpus}
    known = {name: node for name, node in places.items() if node >= 0}
    value = ", ".join(f"{place} on {node}" for place, node in known.items())
    value = f"{count} nodes, memory from {memory}" + (f"; {value}" if value else "")
    wanted = set(known.values())
    if len(wanted) > 1:
        fix = "run one daemon for each node, with the disks and the GPUs of that node"
        return warn(name, value, fix)
    if wanted and memory != str(*wanted):
        node = str(*wanted)
        return warn(name, value, f"numactl --cpunodebind={node} --membind={node} kvtier serve")
    return ok(name, value)


def _disk_node(world: World, directory: Path) -> int:
    try:
        device = world.device(directory)
    except OSError:
        return -1
    place = world.root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for above in [place.resolve(), *place.resolve().parents]:
        if (above / "device" / "numa_node").exists():
            return _node(above / "device" / "numa_node")
        if (above / "numa_node").exists():
            return _node(above / "numa_node")
    return -1


def _node(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


# --- disks ---------------------------------------------------------------------------------------


def file_system(world: World, directory: Path) -> Finding:
    """Check whether the cold directory is on a local disk."""
    name = f"file system of {directory}"
    kind, point = _mounted(world, directory)
    fix = "use a directory on a local NVMe in cold.directories (ext4 or xfs)"
    if kind in NO_DISKS:
        return fail(name, f"{kind}, which is {NO_DISKS[kind]}, at {point}", fix)
    if kind in ELSEWHERE or kind.startswith("fuse"):
        return warn(name, f"{kind} at {point}: not a local disk", fix)
    if kind in COPYING:
        return warn(name, f"{kind} at {point} copies on every overwrite", f"chattr +C, or {fix}")
    return ok(name, f"{kind or 'unknown'} at {point}")


def _mounted(world: World, directory: Path) -> tuple[str, str]:
    """Return the type and the mount point of the file system of a directory."""
    best = ("", "")
    for line in world.text("proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        if directory.is_relative_to(point) and len(point) >= len(best[1]):
            best = after.split()[0], point
    return best


def direct_io(
    directory: Path,
    write: Callable[[int, mmap.mmap], int] = lambda fd, data: os.pwrite(fd, data, 0),
) -> Finding:
    """Write a file without the page cache, read it, and remove it."""
    name = f"O_DIRECT in {directory}"
    path = directory / f".kvtier-doctor-{os.getpid()}"
    # Without an error where this user may not look.
    there = next(filter(os.path.isdir, (directory, *directory.parents)), directory)
    if there != directory:
        return ok(name, f"{directory} will be created in {there}; nothing to test yet")
    wrong = "use a directory on ext4 or xfs in cold.directories"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        fix = {
            errno.EINVAL: wrong,
            errno.ENOSPC: f"free space and inodes there (`df`, `df -i`), or {wrong}",
            errno.EROFS: f"mount it read-write, or {wrong}",
        }.get(
            error.errno or 0, f"run this as the daemon's user, or chown it to that user, or {wrong}"
        )
        return fail(name, f"{error.strerror}", fix)
    try:
        with mmap.mmap(-1, PROBE_BYTES) as data:
            data[:] = os.urandom(PROBE_BYTES)
            wanted = bytes(data)
            if write(fd, data) != PROBE_BYTES or os.preadv(fd, [data], 0) != PROBE_BYTES:
                return fail(name, "a write or a read was cut short", wrong)
            if bytes(data) != wanted:
                return fail(
                    name, "the bytes read differ from the bytes written", "replace this disk"
                )
    except OSError as error:
        return fail(name, f"{error.strerror}", wrong)
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)
    return ok(name, f"{PROBE_BYTES // 1024} KiB written and read")


def _disk_worker() -> tuple[str, str]:
    from kvtier_kernels import Disk

    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        disk = Disk(fd)
        try:
            return disk.engine, disk.why
        finally:
            disk.stop()
    finally:
        os.close(fd)


def io_uring(make: Callable[[], tuple[str, str]] = _disk_worker) -> Finding:
    """Check whether the kernel allows io_uring for this process."""
    name = "io_uring"
    engine, why = make()
    if engine == "io_uring":
        return ok(name, "allowed")
    fix = "sysctl kernel.io_uring_disabled=0, or allow io_uring in the container's seccomp profile"
    return warn(name, f"refused ({why}): using threads instead", fix)


def free_space(world: World, directories: Sequence[Path], size_bytes: int) -> Finding:
    """Check whether there is space for everything that the cold tier may still write."""
    name = "space for the cold tier"
    free, seen = 0, set()
    for directory in directories:
        there = next(filter(os.path.exists, (directory, *directory.parents)), directory)
        try:
            device = world.device(there)
            found = world.statvfs(there)
        except OSError as error:
            return fail(name, f"{there}: {error.strerror}", "set cold.directories")
        if device not in seen:
            seen.add(device)
            free += found.f_frsize * found.f_bavail
        with contextlib.suppress(PermissionError):  # this user does not see what is used there
            parts = (directory / "segments").glob("*/*")
            free += sum(part.stat().st_blocks * 512 for part in parts)
    value = f"{format_bytes(free)} free or used by it, {format_bytes(size_bytes)} needed"
    if free >= size_bytes:
        return ok(name, value)
    return fail(
        name, value, f"set cold.size to less than {format_bytes(max(MIB, free))}, or free space"
    )


# --- GPUs ----------------------------------------------------------------------------------------


def gpu_driver(world: World) -> Finding:
    """Check whether the GPUs have a driver."""
    name = "libcuda"
    if not world.gpus:
        return ok(name, "no NVIDIA GPU here: not needed")
    if world.loadable("libcuda.so.1"):
        return ok(name, f"installed, {len(world.gpus)} GPUs")
    fix = "install NVIDIA's driver, or start the container with --gpus all"
    return fail(name, f"{len(world.gpus)} GPUs, but libcuda.so.1 cannot be loaded", fix)


def gpu_direct(world: World) -> Finding:
    """Check whether GPUDirect Storage is direct, or silently falls back to copies."""
    name = "GPUDirect Storage"
    if not world.gpus:
        return ok(name, "no NVIDIA GPU here: not needed")
    if not world.loadable("libcufile.so.0"):
        return warn(name, "libcufile.so.0 cannot be loaded", "pip install nvidia-cufile-cu12")
    p2pdma = _p2pdma_lacks(world)
    if p2pdma == []:
        return ok(name, "libcufile is set to PCI P2PDMA, which needs no nvidia-fs")
    if not world.there("proc/driver/nvidia-fs") and p2pdma is not None:
        value = "libcufile is set to PCI P2PDMA, but falls back"
        return warn(name, value, f"set {', '.join(p2pdma)}; or modprobe nvidia-fs")
    if not world.there("proc/driver/nvidia-fs"):
        fix = (
            "modprobe nvidia-fs (package nvidia-gds), or use_pci_p2pdma in cufile.json; without "
            "one of them libcufile copies through memory"
        )
        return warn(name, "nvidia-fs is not loaded: libcufile falls back", fix)
    stats = world.text("proc/driver/nvidia-fs/stats")
    reads = re.search(r"Reads\s*:.*?\bn=(\d+)", stats)
    return ok(name, f"nvidia-fs is loaded, {int(reads[1]) if reads else 0:,} reads by it so far")


def _p2pdma_lacks(world: World) -> list[str] | None:
    """Return what PCI P2PDMA still needs on this machine; None if libcufile is not set to use it."""
    configured = world.text(
        world.environ.get("CUFILE_ENV_PATH_JSON", "etc/cufile.json").lstrip("/")
    )
    chosen = re.search(r'^\s*"use_pci_p2pdma"\s*:\s*true', configured, re.MULTILINE)
    if not chosen and world.environ.get("CUFILE_USE_PCIP2PDMA", "").lower() != "true":
        return None
    lacks = []
    if tuple(map(int, re.findall(r"\d+", world.release)[:2])) < (6, 2):
        lacks.append(f"up a kernel of version 6.2 or later (this is {world.release})")
    if "RMForceStaticBar1=1" not in world.text("proc/driver/nvidia/params"):
        lacks.append("NVreg_RegistryDwords=RMForceStaticBar1=1 for the module nvidia")
    if world.text("sys/module/nvme_core/parameters/multipath") == "Y":
        lacks.append("multipath=N for the module nvme_core")
    return lacks


def direct_reads(world: World, config: Config, tenant: str) -> Finding:
    """Check whether the clients of a tenant that permits direct reads can read frames."""
    name = f"direct reads of tenant {tenant}"
    group, cold = config.tenants[tenant].direct_group, config.cold
    permit = f"tenants.{tenant}.direct_reads"
    if cold is None:
        return warn(name, "permitted, but there is no cold tier", f"remove {permit}")
    if cold.encryption != "off":
        value = "permitted, but encrypted frames are never read directly"
        return warn(name, value, f"remove {permit} or cold.encryption")
    stats = world.text("proc/driver/nvidia-fs/stats")
    if world.gpus and stats and not COUNTED_READS.search(stats):
        fix = "echo 1 > /sys/module/nvidia_fs/parameters/rw_stats_enabled"
        return warn(name, "nvidia-fs counts no reads, so gpu_direct = auto stays off", fix)
    if group is None:
        return ok(name, "permitted; by kvikio only for engines of the daemon's own user")
    return ok(name, f"permitted, also by kvikio for members of group {group}")


def udev(world: World) -> Finding:
    """Check whether libcufile can ask udev which disk contains a file."""
    name = "/run/udev"
    if not world.gpus:
        return ok(name, "no NVIDIA GPU here: not needed")
    if world.there("run/udev"):
        return ok(name, "there")
    return warn(name, "missing", "mount it into the container: -v /run/udev:/run/udev:ro")


# --- the rest ------------------------------------------------------------------------------------


def clock(world: World) -> Finding:
    """Check whether the clock can be read without a system call."""
    name = "clock"
    place = "sys/devices/system/clocksource/clocksource0"
    source = world.text(f"{place}/current_clocksource")
    if not source or source in GOOD_CLOCKS:
        return ok(name, source or "unknown")
    fix = f"echo tsc > /{place}/current_clocksource"
    return warn(name, f"{source}: slow to read", fix)
