import os
import resource
import subprocess
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, TierError
from kvtier.units import GIB, MIB
from kvtier_daemon.config import preflight
from kvtier_daemon.config.preflight import MachineFinding
from kvtier_daemon.config.schema import load
from kvtier_daemon.tiers.cold.directory_lock import claim

as_user = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def make(tmp_path):
    """Load a configuration whose places are in the test's own directory."""

    def make(size="64GiB", **flags):
        values = {"warm.size": size, "socket": str(tmp_path / "k.sock"), "state": str(tmp_path)}
        values |= {key.replace("__", "."): value for key, value in flags.items()}
        return load(None, values, environ={})

    return make


@pytest.fixture
def machine(tmp_path):
    """Write a /proc and a /sys/fs/cgroup with the values of the test."""

    class Machine:
        proc = tmp_path / "proc"
        cgroup = tmp_path / "cgroup"

        def has(self, available, groups=""):
            (self.proc / "self").mkdir(parents=True)
            rows = f"MemTotal:  999999999 kB\nMemAvailable: {available // 1024} kB\nBroken\n"
            (self.proc / "meminfo").write_text(rows)
            (self.proc / "self" / "cgroup").write_text(groups)

        def write(self, directory, **files):
            (self.cgroup / directory).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (self.cgroup / directory / name.replace("__", ".")).write_text(f"{text}\n")

        def look(self, warm):
            return preflight.memory(warm, self.proc, self.cgroup)

    return Machine()


# --- memory ---------------------------------------------------------------------------------------


def test_an_arena_that_fits_is_accepted(make, machine):
    machine.has(65 * GIB)
    finding = machine.look(make("64GiB").config.warm)
    assert finding.ok
    assert "65 GiB available (MemAvailable)" in str(finding)


def test_the_generation_tables_are_included(make, machine):
    machine.has(64 * GIB)
    warm = make("64GiB").config.warm
    assert preflight.arena_bytes(warm) == 64 * GIB + 64 * GIB // 512
    finding = machine.look(warm)
    assert not finding.ok
    assert finding.fix == "set warm.size to less than 63.9 GiB, or free memory"


V2 = "0::/system.slice/kvtier.service\n"
V1 = "9:name=systemd:/x\n4:cpu,memory:/docker/abc\n0::/\n"


def test_the_limit_of_a_control_group_applies(make, machine):
    machine.has(100 * GIB, V2)
    machine.write("system.slice/kvtier.service", memory__max=8 * GIB, memory__current=GIB)
    finding = machine.look(make("8GiB").config.warm)
    assert not finding.ok
    assert "7 GiB available (memory limit of the control group" in finding.value
    assert finding.fix == "set warm.size to less than 6.99 GiB, or raise the limit"
    assert machine.look(make("6GiB").config.warm).ok


def test_the_limit_of_a_parent_control_group_applies(make, machine):
    machine.has(100 * GIB, V2)
    machine.write("system.slice/kvtier.service", memory__max="max", memory__current=GIB)
    machine.write("system.slice", memory__max=4 * GIB, memory__current=GIB)
    assert "3 GiB available" in machine.look(make("8GiB").config.warm).value


def test_the_inactive_page_cache_counts_as_available(make, machine):
    machine.has(100 * GIB, V2)
    machine.write(
        "system.slice/kvtier.service",
        memory__max=8 * GIB,
        memory__current=7 * GIB,
        memory__stat=f"anon 5\ninactive_file {5 * GIB}",
    )
    assert "6 GiB available" in machine.look(make("8GiB").config.warm).value


def test_limits_of_control_groups_v1_apply(make, machine):
    machine.has(100 * GIB, V1)
    files = {"memory__limit_in_bytes": 4 * GIB, "memory__usage_in_bytes": 2 * GIB}
    machine.write("memory/docker/abc", **files, memory__stat=f"total_inactive_file {GIB}")
    assert "3 GiB available" in machine.look(make("8GiB").config.warm).value


def test_in_a_container_the_mounted_root_is_the_group(make, machine):
    machine.has(100 * GIB, V1)  # /docker/abc is the name of the group on the host
    machine.write("memory", memory__limit_in_bytes=GIB, memory__usage_in_bytes=0)
    assert "1 GiB available" in machine.look(make("8GiB").config.warm).value


def test_a_path_outside_the_namespace_is_not_followed(make, machine):
    machine.has(100 * GIB, "0::/../../other\n")
    machine.write("", memory__max=GIB, memory__current=0)
    assert "1 GiB available" in machine.look(make("8GiB").config.warm).value


def test_a_group_without_a_limit_does_not_limit(make, machine):
    machine.has(100 * GIB, V1)
    no_limit = 9223372036854771712
    machine.write("memory", memory__limit_in_bytes=no_limit, memory__usage_in_bytes=GIB)
    assert "100 GiB available (MemAvailable)" in machine.look(make("8GiB").config.warm).value


def test_a_lack_of_memory_passes_if_the_limits_are_large_enough(make, machine, tmp_path):
    warm = make("8GiB").config.warm
    machine.has(2 * GIB, V2)
    machine.write("system.slice", memory__max=16 * GIB, memory__current=12 * GIB)
    assert machine.look(warm).passes  # the total of the machine is unknown
    machine.write("system.slice", memory__max=8 * GIB, memory__current=0)
    assert not machine.look(warm).passes, "the tables do not fit"


def test_a_group_above_its_limit_has_no_memory_left(make, machine):
    machine.has(100 * GIB, V2)
    machine.write("system.slice", memory__max=GIB, memory__current=2 * GIB)
    finding = machine.look(make("8GiB").config.warm)
    assert "0 B available" in finding.value
    assert finding.fix == "raise the limit"  # no size would fit


def test_compressed_memory_needs_memory_too(make, machine, tmp_path):
    cold = {"cold__directories": ["/d"], "cold__size": "1TiB"}
    machine.has(64 * GIB)
    warm = make("40GiB", warm__compressed="30GiB", **cold).config.warm
    finding = machine.look(warm)
    assert not finding.ok
    assert "set warm.size to less than 33" in finding.fix
    assert machine.look(make("40GiB", warm__compressed="20GiB", **cold).config.warm).ok
    (tmp_path / "meminfo").write_text("MemTotal: 73000000 kB\n")
    assert not preflight.memory_of_machine(warm, tmp_path).ok


def test_a_machine_without_readable_values_is_accepted(make, tmp_path):
    assert preflight.memory(make().config.warm, tmp_path / "none", tmp_path / "none").ok


def test_the_memory_of_this_machine_is_readable(make):
    assert preflight.memory(make("1MiB").config.warm).ok
    finding = preflight.memory(make("4000TiB").config.warm)
    assert not finding.ok
    assert "available" in finding.value


# --- limits ---------------------------------------------------------------------------------------


class Limited:
    """The limits of a process, controlled by the test."""

    def __init__(self, soft, hard, forbidden=False):
        self.now = (soft, hard)
        self.forbidden = forbidden

    def getrlimit(self, kind):
        return self.now

    def setrlimit(self, kind, limits):
        if self.forbidden:
            raise ValueError("not allowed to raise maximum limit")
        self.now = limits


def files(loaded, limited):
    return preflight.open_files(loaded.config, limited.getrlimit, limited.setrlimit)


def test_a_sufficient_limit_of_open_files_is_not_changed(make):
    limited = Limited(1344, 4096)
    finding = files(make("64GiB"), limited)
    assert finding.ok
    assert finding.value.startswith("1344 needed for 64 extents and 256 clients")  # 256 + 1024 + 64
    assert limited.now == (1344, 4096)


def test_the_segments_of_a_cold_tier_are_included(make):
    loaded = make("64GiB", cold__directories="/d", cold__size="1TiB")
    finding = files(loaded, Limited(1344 + 1024, 4096))
    assert finding.value.startswith("2368 needed for 64 extents, 1024 segments and 256 clients")
    assert finding.ok
    finding = files(loaded, Limited(2367, 2367))
    assert not finding.ok and "raise warm.extent or cold.segment" in finding.fix


def test_the_soft_limit_of_open_files_is_raised_if_the_hard_limit_allows(make):
    limited = Limited(256, 4096)
    assert files(make("64GiB"), limited).ok
    assert limited.now == (4096, 4096)


def test_an_insufficient_hard_limit_is_reported_and_not_changed(make):
    limited = Limited(256, 1343)
    finding = files(make("64GiB"), limited)
    assert not finding.ok
    assert limited.now == (256, 1343)
    assert "LimitNOFILE=1344" in finding.fix


def test_a_sandbox_that_forbids_raising_the_limit_is_reported(make):
    assert not files(make("64GiB"), Limited(256, 4096, forbidden=True)).ok


def test_no_limit_is_enough(make):
    assert files(make("64GiB"), Limited(resource.RLIM_INFINITY, resource.RLIM_INFINITY)).ok
    limited = Limited(10, resource.RLIM_INFINITY)
    assert files(make("64GiB"), limited).ok
    assert limited.now[0] == resource.RLIM_INFINITY


def test_a_tenants_smaller_last_extent_is_counted(make):
    quota = {"tenants__a__uids": "1", "tenants__a__quota": "1.5GiB"}
    loaded = make(
        "4GiB", warm__extent="1GiB", **quota, tenants__b__uids="2", tenants__b__quota="25%"
    )
    assert preflight.extents(loaded.config) == 3


def locked(warm, limited, tmp_path, capabilities="0", uid_map="0 0 4294967295"):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    (tmp_path / "self" / "uid_map").write_text(uid_map)
    return preflight.locked_memory(warm, tmp_path, limited.getrlimit, limited.setrlimit)


def test_unlocked_memory_needs_no_limit(make, tmp_path):
    assert locked(make().config.warm, Limited(0, 0), tmp_path).ok


def test_a_low_limit_of_locked_memory_is_reported(make, tmp_path):
    finding = locked(make("1GiB", warm__lock=True).config.warm, Limited(MIB, MIB), tmp_path)
    assert not finding.ok
    assert "ulimit -l 1050624`" in finding.fix


def test_the_soft_limit_of_locked_memory_is_raised_if_the_hard_limit_allows(make, tmp_path):
    limited = Limited(MIB, 2 * GIB)
    assert locked(make("1GiB", warm__lock=True).config.warm, limited, tmp_path).ok
    assert limited.now == (2 * GIB, 2 * GIB)


def test_the_capability_removes_the_limit(make, tmp_path):
    warm = make("1GiB", warm__lock=True).config.warm
    assert locked(warm, Limited(0, 0), tmp_path, capabilities="0000000000004000").ok


def test_a_capability_in_a_user_namespace_does_not_remove_the_limit(make, tmp_path):
    warm = make("1GiB", warm__lock=True).config.warm
    finding = locked(warm, Limited(0, 0), tmp_path, "000001ffffffffff", "0 1000 1")
    assert not finding.ok


# --- places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "ok"), [(107, True), (108, False)])
def test_a_socket_path_has_at_most_107_bytes(length, ok):
    path = Path("/" + "é" * 53 + "x" * (length - 107))
    assert len(os.fsencode(path)) == length
    assert preflight.socket_path(path).ok is ok


def test_a_missing_socket_directory_is_reported_and_not_created(tmp_path):
    finding = preflight.socket_directory(tmp_path / "absent")
    assert not finding.ok
    assert f"mkdir -p {tmp_path / 'absent'}" in finding.fix
    assert not (tmp_path / "absent").exists()


def test_the_default_socket_directory_is_created(tmp_path):
    before = os.umask(0o077)
    try:
        assert preflight.socket_directory(tmp_path / "kvtier", is_default=True).ok
    finally:
        os.umask(before)
    mode = (tmp_path / "kvtier").stat().st_mode & 0o7777
    assert mode == (0o755 if os.geteuid() == 0 else 0o700)
    assert preflight.socket_directory(tmp_path / "kvtier", is_default=True).ok


def test_a_default_directory_that_cannot_be_created_is_reported(tmp_path):
    finding = preflight.socket_directory(tmp_path / "a" / "b", is_default=True)
    assert not finding.ok
    assert "cannot create" in finding.value


def test_a_link_in_place_of_the_default_directory_is_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert not preflight.socket_directory(tmp_path / "link", is_default=True).ok
    assert preflight.socket_directory(tmp_path / "link").ok


@as_user
def test_a_default_directory_that_others_can_enter_is_refused(tmp_path):
    (tmp_path / "kvtier").mkdir()
    (tmp_path / "kvtier").chmod(0o755)
    assert not preflight.socket_directory(tmp_path / "kvtier", is_default=True).ok


def test_a_directory_in_which_any_user_can_replace_the_socket_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    finding = preflight.socket_directory(tmp_path)
    assert not finding.ok
    assert "chmod o-w" in finding.fix
    tmp_path.chmod(0o1777)
    assert preflight.socket_directory(tmp_path).ok


def test_a_file_in_place_of_a_directory_is_reported(tmp_path):
    (tmp_path / "file").touch()
    for finding in (
        preflight.socket_directory(tmp_path / "file"),
        preflight.socket_directory(tmp_path / "file" / "below"),
        preflight.state_directory(tmp_path / "file"),
        preflight.state_directory(tmp_path / "file" / "below"),
    ):
        assert not finding.ok
        # Neither remedy applies if a file is in the way.
        assert "chown" not in finding.fix and "mkdir" not in finding.fix


@as_user
def test_directories_that_are_not_writable_are_reported(tmp_path):
    (tmp_path / "shut").mkdir(mode=0o500)
    assert "not writable" in preflight.socket_directory(tmp_path / "shut").value
    assert "not writable" in preflight.state_directory(tmp_path / "shut").value
    assert "cannot be created" in preflight.state_directory(tmp_path / "shut" / "a" / "b").value


@as_user
def test_a_directory_that_cannot_be_entered_is_reported(tmp_path):
    (tmp_path / "dark" / "state").mkdir(parents=True)
    (tmp_path / "dark").chmod(0o000)
    finding = preflight.state_directory(tmp_path / "dark" / "state")
    (tmp_path / "dark").chmod(0o700)
    assert not finding.ok
    assert "Permission denied" in finding.value


@as_root
def test_a_state_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    os.chown(tmp_path, 12345, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert "belongs to uid 12345" in preflight.state_directory(tmp_path / "state").value


@as_root
def test_no_remedy_gives_a_directory_of_the_system_to_a_user(tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    for finding, missing in (
        (preflight.state_directory(home / "state"), home / "state"),
        (preflight.socket_directory(home, is_default=True, make=False), home),
    ):
        assert f"so {missing} cannot be created" in finding.value
        assert finding.fix.startswith(f"create {missing} for that user, or ")


@pytest.mark.parametrize(
    "name, why",
    [
        ("", ""),
        ("audit.log", ""),
        ("absent/audit.log", "No such file or directory"),
        ("link", "not a regular file"),
        ("open", "only the daemon's user can write to"),
        ("file/audit.log", "is not a directory"),
    ],
)
def test_the_file_of_the_audit_log_is_checked(make, tmp_path, name, why):
    (tmp_path / "file").touch(mode=0o600)
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "open").touch()
    (tmp_path / "open").chmod(0o666)
    before = sorted(os.listdir(tmp_path))
    loaded = make("1MiB", **({"audit__path": str(tmp_path / name)} if name else {}))
    found = preflight.audit_file(loaded.config)
    assert [one.ok for one in found] == ([not why] if name else [])
    assert all(why in one.value for one in found)
    assert all(
        set(found) <= set(look(loaded)) for look in (preflight.look, preflight.look_before_start)
    )
    assert sorted(os.listdir(tmp_path)) == before


def test_a_state_directory_may_be_missing(tmp_path):
    finding = preflight.state_directory(tmp_path / "a" / "b")
    assert finding.ok
    assert "will be created" in finding.value
    assert not (tmp_path / "a").exists()


def test_a_directory_on_a_read_only_file_system_is_refused_with_that_reason(tmp_path):
    mount = ["mount", "--bind", tmp_path, tmp_path], ["mount", "-o", "remount,bind,ro", tmp_path]
    if os.geteuid() != 0 or subprocess.run(mount[0], check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        subprocess.run(mount[1], check=True)
        (found,) = preflight.cold_directories([tmp_path])
        assert (found.ok, found.value) == (False, f"{tmp_path} is on a read-only file system")
        assert found.fix == "mount it read-write, or remove it from cold.directories"
        with pytest.raises(TierError, match="Read-only file system; mount its file system read-w"):
            claim(tmp_path, os.getpid())
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_two_paths_to_the_same_cold_directory_are_refused(tmp_path):
    (tmp_path / "a").mkdir(mode=0o700)
    (tmp_path / "b").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("a")
    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "link", tmp_path / "b" / ".." / "b"]
    assert [one.ok for one in preflight.cold_directories(paths[:2])] == [True, True]
    wrong = [str(one) for one in preflight.cold_directories(paths) if not one.ok]
    assert wrong == [
        f"cold directory: {paths[0]} and {paths[2]} are the same directory; "
        "remove one of them from cold.directories",
        f"cold directory: {paths[1]} and {paths[3]} are the same directory; "
        "remove one of them from cold.directories",
    ]


# --- all together ---------------------------------------------------------------------------------


def test_a_small_tier_has_no_findings(make):
    findings = preflight.require(make("1MiB"))
    assert len(findings) == 8
    assert all(finding.ok for finding in findings)


def test_all_failures_are_reported_together(make, tmp_path):
    loaded = make("4000TiB", socket=str(tmp_path / ("x" * 120) / "k.sock"))
    with pytest.raises(ConfigError) as caught:
        preflight.require(loaded)
    message = str(caught.value)
    assert message.startswith("3 problems prevent the start: (1) memory for the arena: ")
    assert "(2) length of the socket's path" in message
    assert "(3) socket directory" in message
    assert "\n" not in message


def test_a_single_failure_is_the_whole_message(make):
    with pytest.raises(ConfigError, match=r"^memory for the arena: .*; set warm\.size"):
        preflight.require(make("4000TiB"))


def test_a_finding_without_a_problem_has_no_remedy():
    assert str(MachineFinding(True, "a", "b", "c")) == "a: b"
    assert str(MachineFinding(False, "a", "b", "c")) == "a: b; c"


def test_a_store_whose_client_needs_a_missing_library_is_a_problem(make, monkeypatch):
    pytest.importorskip("mooncake")
    config = make(remote__url="mooncake://store.example:50051").config
    monkeypatch.setattr(preflight, "VERBS", "libnone.so.1")
    (finding,) = preflight.remote_store(config)
    assert not finding.ok and "libnone.so.1" in finding.value and "libibverbs1" in finding.fix
