"""Each check of `kvtier doctor`, without and with a problem."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvtier
from kvtier.units import GIB, MIB
from kvtier_daemon.config.schema import load
from kvtier_daemon.tiers.states import REMOTE_SWITCHED_OFF
from kvtier_daemon.tools import doctor, doctor_vllm
from kvtier_daemon.tools.doctor import Finding, Severity, World
from support.disks import mounted

WARM = {"capacity_bytes": 1, "failure": ""}


@pytest.fixture
def world(tmp_path: Path) -> Callable[..., World]:
    """A machine that has only these files."""

    def world(files: Mapping[str, str] | None = None, **more: Any) -> World:
        for name, text in (files or {}).items():
            place = tmp_path / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        more.setdefault("environ", {})
        more.setdefault("release", "6.18.0")
        more.setdefault("loadable", lambda library: False)
        return World(root=tmp_path, **more)

    return world


def config(tmp_path: Path, **values: Any) -> Any:
    flags = {"warm.size": "1GiB", "socket": str(tmp_path / "k.sock"), "state": str(tmp_path)}
    return load(
        None, flags | {key.replace("__", "."): one for key, one in values.items()}, environ={}
    )


GPU = {
    "sys/bus/pci/devices/0000:41:00.0/vendor": "0x10de\n",
    "sys/bus/pci/devices/0000:41:00.0/class": "0x030200\n",
    "sys/bus/pci/devices/0000:41:00.0/numa_node": "1\n",
}


def test_a_daemon_that_answers_is_ok() -> None:
    stats = {"version": kvtier.__version__, "pid": 7, "tiers": {"warm": WARM}}
    assert doctor.daemon(stats, "").level is Severity.ok
    found = doctor.daemon(None, "no daemon answers at there; start one")
    assert (found.level, found.value, found.fix) == (
        Severity.fail, "no daemon answers at there", "start one",
    )  # fmt: skip
    assert doctor.daemon(stats | {"version": "0.0.1"}, "").level is Severity.warn
    broken = {"warm": WARM | {"failure": "no memory left"}}
    assert "no memory left" in doctor.daemon(stats | {"tiers": broken}, "").value


def test_a_preflight_check_fails_with_its_fix(tmp_path: Path) -> None:
    assert {one.level for one in doctor.started(World(), config(tmp_path), serves=True)} == {
        Severity.ok
    }
    found = doctor.started(World(), config(tmp_path, warm__size="4000TiB"), serves=False)
    (memory,) = (one for one in found if one.level is Severity.fail and "memory" in one.name)
    assert memory.fix.startswith("set warm.size")
    served = doctor.started(World(), config(tmp_path, warm__size="4000TiB"), serves=True)
    assert not any("memory" in one.name for one in served), "it has its memory"


def test_the_cold_tier_check_shows_its_engine() -> None:
    well = {"engine": "io_uring", "on": True, "given_up": False, "failure": ""}
    assert doctor.cold_engine(well).level is Severity.ok
    assert doctor.cold_engine(well | {"engine": "threads"}).level is Severity.warn
    assert doctor.cold_engine(well | {"on": False, "failure": "EIO"}).level is Severity.fail
    assert doctor.cold_engine(well | {"failure": "late"}).level is Severity.warn


@pytest.mark.parametrize("state", ["off", "drained"])
def test_a_cold_tier_that_is_switched_or_full_is_not_reported_as_broken(state: str) -> None:
    switched = {"engine": "io_uring", "on": False, "state": state, "failure": ""}
    found = doctor.cold_engine(switched)
    assert (found.level, found.fix) == (Severity.warn, "kvtier tier on cold")
    assert found.value.startswith(f"{state}: ")
    full = {
        "engine": "io_uring",
        "on": True,
        "failure": "/d/000020 can't be made: No space left on device",
    }
    assert (
        "cold.size" in doctor.cold_engine(full).fix
        and "smartctl" not in doctor.cold_engine(full).fix
    )
    broken = switched | {"given_up": True, "failure": "/d: gone"}
    assert doctor.cold_engine(broken).level is Severity.fail


def tcp(address: str, inode: int) -> str:
    head = "  sl  local_address rem_address   st\n"
    rest = "00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0"
    return f"{head}   0: {address} {rest} {inode} 1\n"


@pytest.mark.parametrize(
    ("table", "address", "level", "said"),
    [
        ("tcp", "0100007F:24C2", Severity.ok, "127.0.0.1:9410"),
        ("tcp", "00000000:24C2", Severity.warn, "0.0.0.0:9410"),
        ("tcp6", "00000000000000000000000001000000:24C2", Severity.ok, "[::1]:9410"),
        ("tcp6", "00000000000000000000000000000000:24C2", Severity.warn, "[::]:9410"),
    ],
)
def test_ports_beyond_loopback_are_reported(
    world: Callable[..., World],
    tmp_path: Path,
    table: str,
    address: str,
    level: Severity,
    said: str,
) -> None:
    machine = world({f"proc/net/{table}": tcp(address, 4711)})
    fds = tmp_path / "proc/9/fd"
    fds.mkdir(parents=True)
    assert doctor.listening(machine, 9).value == "no TCP port is open"
    (fds / "5").symlink_to("socket:[4711]")
    found = doctor.listening(machine, 9)
    assert (found.level, said in found.value) == (level, True), found


def test_the_ports_of_a_real_process_are_found() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert f"127.0.0.1:{port}" in doctor.listening(World(), os.getpid()).value


def test_memlock_below_the_arena_is_reported(world: Callable[..., World], tmp_path: Path) -> None:
    loaded = config(tmp_path).config
    unlimited, low = (
        {"proc/self/limits": f"Max locked memory         {both}            bytes\n"}
        for both in ("unlimited            unlimited", "8388608              8388608")
    )
    assert doctor.registered_memory(world(unlimited), loaded).level is Severity.ok
    found = doctor.registered_memory(world(low), loaded)
    assert found.level is Severity.warn and "LimitMEMLOCK" in found.fix
    assert found.value.startswith("8 MiB for this command, the arena has")
    root = {"proc/self/uid_map": "0 0 4294967295", "proc/self/status": "CapEff:\tffffffffff"}
    assert doctor.registered_memory(world(root), loaded).level is Severity.ok


def test_the_limits_are_those_of_the_daemon(tmp_path: Path) -> None:
    """Root's shell has other limits than the service."""
    lower = "ulimit -Sn 700 && ulimit -Hn 9000 && ulimit -l 64 && echo && exec sleep 600"
    with subprocess.Popen(["sh", "-c", lower], stdout=subprocess.PIPE) as service:
        try:
            assert service.stdout is not None and service.stdout.readline()
            stats = {"version": "1", "pid": service.pid, "tiers": {"warm": WARM}}
            found = doctor.examine(World(), config(tmp_path), stats, "")
        finally:
            service.kill()
    (files,) = (one for one in found if one.name == "open files")
    of = f"the daemon, process {service.pid}"
    assert files.level is Severity.fail and f"the limit is 700 (hard 9000) of {of}" in files.value
    (size,) = (one for one in found if one.name == "size of files")
    assert size.value.endswith(f"the limit is unlimited (hard unlimited) of {of}")
    (memlock,) = (one for one in found if one.name == "memlock")
    assert memlock.value.startswith(f"64 KiB for {of}, ")


def test_huge_pages_need_kernel_support(world: Callable[..., World]) -> None:
    assert doctor.huge_pages(world()).level is Severity.warn
    place = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    assert doctor.huge_pages(world({place: "always [never] deny"})).level is Severity.ok
    assert doctor.huge_pages(world(release="5.15.0-91")).level is Severity.warn
    assert doctor.huge_pages(world({place: "always never [deny]"})).level is Severity.warn


def test_reserved_huge_pages_must_hold_the_arena(
    world: Callable[..., World], tmp_path: Path
) -> None:
    loaded = config(tmp_path, warm__huge_pages=True).config
    rows = "HugePages_Total:  {}\nHugepagesize: 2048 kB\n"
    enough = world({"proc/meminfo": rows.format(600)})
    assert doctor.reserved_huge_pages(enough, loaded).level is Severity.ok
    found = doctor.reserved_huge_pages(world({"proc/meminfo": rows.format(10)}), loaded)
    assert (found.level, found.fix.split(",")[0]) == (Severity.fail, "sysctl vm.nr_hugepages=513")


def space(free: int, size: int) -> Callable[[Path], Any]:
    return lambda path: SimpleNamespace(f_frsize=4096, f_bavail=free // 4096, f_blocks=size // 4096)


def test_little_shared_memory_is_reported(world: Callable[..., World]) -> None:
    assert doctor.shared_memory(world(statvfs=space(GIB, 8 * GIB))).level is Severity.ok
    found = doctor.shared_memory(world(statvfs=space(MIB, 64 * MIB)))
    assert found.level is Severity.warn and "64 MiB" in found.value
    assert doctor.shared_memory(world()).level is Severity.warn  # there is no shared memory


def test_disks_gpus_and_memory_on_different_nodes_are_reported(
    world: Callable[..., World], tmp_path: Path
) -> None:
    one = {"sys/devices/system/node/node0/x": ""}
    assert doctor.nodes(world(one), []).value == "one node"
    two = one | {
        "sys/devices/system/node/node1/x": "",
        "proc/self/status": "Mems_allowed_list:\t0-1",
    }
    assert doctor.nodes(world(two), []).level is Severity.ok
    found = doctor.nodes(world(GPU), [])
    assert found.level is Severity.warn and "--membind=1" in found.fix
    disk = {"sys/dev/block/259:0/device/numa_node": "0"}
    nvme = world(disk, device=lambda path: os.makedev(259, 0))
    apart = doctor.nodes(nvme, [tmp_path])
    assert apart.level is Severity.warn and "each node" in apart.fix
    bound = world({"proc/self/status": "Mems_allowed_list:\t1"})
    assert doctor.nodes(bound, []).level is Severity.ok


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        ("ext4", Severity.ok), ("xfs", Severity.ok), ("overlay", Severity.fail), ("tmpfs", Severity.fail),
        ("nfs4", Severity.warn), ("fuse.sshfs", Severity.warn), ("btrfs", Severity.warn),
    ],
)  # fmt: skip
def test_a_file_system_that_is_not_on_a_local_disk_is_reported(
    world: Callable[..., World], kind: str, level: Severity
) -> None:
    rows = "1 0 0:1 / / rw - ext4 /dev/root rw\n2 1 0:2 / /cold\\040one rw - {} /dev/x rw\n"
    machine = world({"proc/self/mountinfo": rows.format(kind)})
    found = doctor.file_system(machine, Path("/cold one/kvtier"))
    assert (found.level, f"{kind}" in found.value) == (level, True)
    assert doctor.file_system(machine, Path("/cold oneself")).value == "ext4 at /"


def test_direct_io_is_tried(tmp_path: Path) -> None:
    before = os.listdir(tmp_path)
    found = doctor.direct_io(tmp_path)
    assert found.level is Severity.ok, found
    assert doctor.direct_io(tmp_path / "not yet").level is Severity.ok
    cut = doctor.direct_io(tmp_path, write=lambda fd, data: 4096)
    assert cut.level is Severity.fail and "cut short" in cut.value

    def other(fd: int, data: mmap.mmap) -> int:
        with mmap.mmap(-1, len(data)) as zeros:
            return os.pwrite(fd, zeros, 0)

    assert "differ from the bytes written" in doctor.direct_io(tmp_path, write=other).value

    def failing(fd: int, data: mmap.mmap) -> int:
        raise OSError(5, "Input/output error")

    assert doctor.direct_io(tmp_path, write=failing).value == "Input/output error"
    assert os.listdir(tmp_path) == before, "nothing is left behind"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_examination_by_a_user_who_may_not_look_into_a_directory_ends(tmp_path: Path) -> None:
    """Clients are such users. The first directory exists, the parent of the second is closed too."""
    closed = tmp_path / "closed"
    (tmp_path / "cold" / "segments").mkdir(parents=True)
    (closed / "cold").mkdir(parents=True)
    places = (tmp_path / "cold", closed / "cold")
    for place in (*places, closed):
        place.chmod(0o700)
    tmp_path.chmod(0o755)
    reads, writes = os.pipe()
    if os.fork() == 0:
        with contextlib.suppress(BaseException):
            os.chdir(tmp_path)  # its parents are closed as well
            os.setuid(54321)
            near = [place.relative_to(tmp_path) for place in places]
            text = [doctor.free_space(World(), near, 1).value]
            text += [doctor.direct_io(place).fix or "ok" for place in near]
            os.write(writes, "\n".join(text).encode())
        os._exit(0)
    os.close(writes)
    with open(reads) as told:
        space, exists, _ = told.read().splitlines()
    os.wait()
    assert "free or used by it" in space and exists.startswith("run this as the daemon's user")


def test_direct_io_on_a_full_file_system_needs_room_and_no_other_owner(tmp_path: Path) -> None:
    with mounted(tmp_path, 16 << 20) as disk:
        with contextlib.suppress(OSError):  # it lacks inodes, not bytes
            for number in range(1 << 16):
                (disk.path / str(number)).touch()
        found = doctor.direct_io(disk.path)
    assert found.value == "No space left on device"
    assert found.fix.startswith("free space and inodes there") and "chown" not in found.fix


def test_io_uring_is_tried() -> None:
    assert doctor.io_uring(lambda: ("io_uring", "")).level is Severity.ok
    refused = doctor.io_uring(lambda: ("threads", "Operation not permitted"))
    assert refused.level is Severity.warn and "Operation not permitted" in refused.value
    assert doctor.io_uring().value  # the real kernel


def test_space_must_hold_the_cold_tier(world: Callable[..., World], tmp_path: Path) -> None:
    machine = world(statvfs=space(GIB, 8 * GIB))
    assert doctor.free_space(machine, [tmp_path], GIB).level is Severity.ok
    found = doctor.free_space(machine, [tmp_path, tmp_path / "again"], GIB + MIB)
    assert (
        found.level is Severity.fail
        and found.fix == "set cold.size to less than 1 GiB, or free space"
    )
    (tmp_path / "segments" / "default").mkdir(parents=True)
    (tmp_path / "segments" / "default" / "000001").write_bytes(os.urandom(2 * MIB))
    os.sync()
    assert doctor.free_space(machine, [tmp_path], GIB + MIB).level is Severity.ok, (
        "what it has counts"
    )


def test_a_gpu_needs_a_driver(world: Callable[..., World]) -> None:
    assert doctor.gpu_driver(world()).level is Severity.ok
    assert doctor.gpu_driver(world(GPU)).level is Severity.fail
    assert doctor.gpu_driver(world(GPU, loadable=lambda library: True)).level is Severity.ok


def test_gpudirect_in_compatibility_mode_is_reported(world: Callable[..., World]) -> None:
    assert doctor.gpu_direct(world()).level is Severity.ok
    assert "libcufile" in doctor.gpu_direct(world(GPU)).value
    fallen = doctor.gpu_direct(world(GPU, loadable=lambda library: True))
    assert (
        fallen.level is Severity.warn and "falls back" in fallen.value and "modprobe" in fallen.fix
    )
    stats = {
        "proc/driver/nvidia-fs/stats": "GDS Version: 1.7\nReads\t\t\t\t: err=0 n=1234 ok=1234\n"
    }
    direct = doctor.gpu_direct(world(stats, loadable=lambda library: True))
    assert direct.level is Severity.ok and "1,234 reads" in direct.value


P2PDMA = {
    "etc/cufile.json": '{\n  // comment\n  "properties": {\n    "use_pci_p2pdma": true\n  }\n}',
    "proc/driver/nvidia/params": 'RegistryDwords: "RMForceStaticBar1=1;RmForceDisableIomapWC=1;"',
    "sys/module/nvme_core/parameters/multipath": "N",
}


def test_gpudirect_over_pci_p2pdma_needs_no_nvidia_fs(world: Callable[..., World]) -> None:
    def found(files: dict[str, str], **options: Any) -> Finding:
        options = {"release": "6.8.0-1", **options}
        return doctor.gpu_direct(world(GPU | files, loadable=lambda library: True, **options))

    assert found(P2PDMA).level is Severity.ok and "P2PDMA" in found(P2PDMA).value
    for name, content, lack in (
        ("proc/driver/nvidia/params", 'RegistryDwords: ""', "RMForceStaticBar1=1"),
        ("sys/module/nvme_core/parameters/multipath", "Y", "multipath=N"),
    ):
        missing = found(P2PDMA | {name: content})
        assert missing.level is Severity.warn and lack in missing.fix
    old = found(P2PDMA, release="5.15.0-91-generic")
    assert old.level is Severity.warn and "6.2 or later (this is 5.15" in old.fix
    commented = P2PDMA["etc/cufile.json"].replace('    "use', '    // "use')
    off = found(P2PDMA | {"etc/cufile.json": commented})
    assert off.level is Severity.warn and "nvidia-fs is not loaded" in off.value
    by_variable = found(P2PDMA | {"etc/cufile.json": ""}, environ={"CUFILE_USE_PCIP2PDMA": "true"})
    assert by_variable.level is Severity.ok


def test_direct_reads_that_cannot_happen_are_reported(
    world: Callable[..., World], tmp_path: Path
) -> None:
    def found(files: Mapping[str, str] | None = None, **values: Any) -> Finding:
        tenant = {"tenants.a.uids": "*", "tenants.a.direct_reads": "true"}
        return doctor.direct_reads(world(files), config(tmp_path, **tenant, **values).config, "a")

    cold = {"cold.directories": str(tmp_path), "cold.size": "64GiB"}
    assert "no cold tier" in found().value
    assert "encrypted" in found(**cold, **{"cold.encryption": "aes-256-gcm"}).value
    assert found(**cold).level is Severity.ok and "own user" in found(**cold).value
    assert "group 7" in found(**cold, **{"tenants.a.direct_group": "7"}).value
    silent = GPU | {"proc/driver/nvidia-fs/stats": "IO stats: Disabled\nReads : err=0\n"}
    assert "rw_stats_enabled" in found(silent, **cold).fix


def test_udev_is_needed_with_a_gpu(world: Callable[..., World]) -> None:
    assert doctor.udev(world()).level is Severity.ok
    assert doctor.udev(world(GPU)).level is Severity.warn
    assert doctor.udev(world({"run/udev/data/x": ""})).value == "there"


def test_a_slow_clock_is_reported(world: Callable[..., World]) -> None:
    place = "sys/devices/system/clocksource/clocksource0/current_clocksource"
    assert doctor.clock(world({place: "tsc\n"})).level is Severity.ok
    found = doctor.clock(world({place: "hpet\n"}))
    assert found.level is Severity.warn and "hpet" in found.value


def test_an_examination_runs_all_checks(world: Callable[..., World], tmp_path: Path) -> None:
    (tmp_path / "cold").mkdir()
    loaded = config(tmp_path, cold__directories=str(tmp_path / "cold"), cold__size="1GiB")
    stats = {"version": "1", "pid": 1, "tiers": {"warm": WARM, "cold": {"engine": "threads"}}}
    names = {one.name for one in doctor.examine(world(), loaded, stats, "")}
    assert {"daemon", "huge pages", "clock", "/dev/shm", "libcuda", "GPUDirect Storage", "/run/udev",
            "ports", "cold tier", "memlock", "NUMA", "space for the cold tier"} <= names  # fmt: skip
    assert f"O_DIRECT in {tmp_path / 'cold'}" in names


# --- vLLM ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("0.32.0", Severity.ok),
        ("1.0.1+cpu", Severity.ok),
        ("0.9.2", Severity.fail),
        ("", Severity.fail),
    ],
)
def test_an_unknown_version_of_the_engine_is_reported(version: str, level: Severity) -> None:
    assert doctor_vllm.version(version).level is level


def packages(tmp_path: Path, engine_source: str, plugin_source: str) -> tuple[Path, Path]:
    base = tmp_path / "vllm" / doctor_vllm.BASE
    base.parent.mkdir(parents=True, exist_ok=True)
    base.write_text(
        f"class KVConnectorBase_V1:\n    {engine_source}\nclass SupportsHMA:\n    pass\n"
    )
    plugin = tmp_path / "plugin"
    plugin.mkdir(exist_ok=True)
    (plugin / "connector.py").write_text(f"class KvtierConnector:\n    {plugin_source}\n")
    return tmp_path / "vllm", plugin


def test_the_interface_is_compared_without_importing_it(tmp_path: Path) -> None:
    engine_source = "def start(self, one, two): raise SystemExit"
    well = packages(tmp_path, engine_source, "def start(self, one, other): ...")
    assert doctor_vllm.interface(*well).level is Severity.ok
    for plugin_source in ("def start(self, one): ...", "def begin(self): ..."):
        found = doctor_vllm.interface(*packages(tmp_path, engine_source, plugin_source))
        assert found.level is Severity.fail and found.value.split()[-1] in plugin_source
    private = packages(tmp_path, engine_source, "def _mine(self): ...")
    assert doctor_vllm.interface(*private).level is Severity.ok
    assert doctor_vllm.interface(None, well[1]).level is Severity.fail


def test_a_plugin_that_is_not_loaded_is_reported() -> None:
    assert doctor_vllm.plugin({}, ["kvtier"]).level is Severity.ok
    assert doctor_vllm.plugin({}, ["other"]).level is Severity.fail
    assert doctor_vllm.plugin({"VLLM_PLUGINS": "lora,kvtier"}, ["kvtier"]).level is Severity.ok
    found = doctor_vllm.plugin({"VLLM_PLUGINS": "lora"}, ["kvtier"])
    assert found.level is Severity.fail and "VLLM_PLUGINS=lora,kvtier" in found.fix
    assert doctor_vllm.plugin({"VLLM_PLUGINS": ""}, ["kvtier"]).level is Severity.fail


def engine(transfer: Any, *flags: str, seed: str = "") -> dict[str, str]:
    words = [
        "/usr/bin/python3",
        "/bin/vllm",
        "serve",
        "m",
        "--kv-transfer-config",
        json.dumps(transfer),
    ]
    environ = f"PYTHONHASHSEED={seed}\0" if seed else "A=b\0"
    return {"proc/77/cmdline": "\0".join([*words, *flags, ""]), "proc/77/environ": environ}


@pytest.mark.parametrize(
    ("files", "policy", "hashes"),
    [
        (engine({"kv_load_failure_policy": "recompute"}), Severity.ok, Severity.ok),
        (engine({}), Severity.fail, Severity.ok),
        (engine({}, "--prefix-caching-hash-algo=xxhash"), Severity.fail, Severity.fail),
        (
            engine({}, "--prefix-caching-hash-algo", "sha256_cbor", seed="5"),
            Severity.fail,
            Severity.warn,
        ),
        ({}, Severity.ok, Severity.ok),
    ],
)
def test_the_settings_of_running_engines_are_checked(
    world: Callable[..., World], files: dict[str, str], policy: Severity, hashes: Severity
) -> None:
    engines = list(doctor_vllm.running(world(files)))
    assert len(engines) == bool(files)
    assert [one.level for one in doctor_vllm.policies(engines)] == [policy]
    assert [one.level for one in doctor_vllm.hashes(engines, {})] == [hashes]
    assert doctor_vllm.hashes([], {"PYTHONHASHSEED": "0"})[0].level is Severity.warn


def test_a_remote_store_that_does_not_answer_is_not_blamed_on_an_order() -> None:
    off = {"store": "s3://b", "on": False, "failure": "Connection refused", "state": "off"}
    finding = doctor.remote_store(off)
    assert finding.level is Severity.warn and "Connection refused" in finding.value
    assert "the daemon retries" in finding.fix and "kvtier tier on" not in finding.fix
    ordered = doctor.remote_store(off | {"failure": REMOTE_SWITCHED_OFF})
    assert ordered.fix == "kvtier tier on remote"
