import contextlib
import errno
import gc
import io
import json
import os
import pwd
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import kvtier
from kvtier.errors import KvtierError, ProtocolError, Unavailable
from kvtier.units import GIB, MIB
from kvtier_daemon import app
from kvtier_daemon.cli import main
from kvtier_daemon.cli.progress import progress
from kvtier_daemon.cli.status import draw
from kvtier_daemon.cli.tables import print_fitting, row, table_of
from kvtier_daemon.config import preflight
from kvtier_daemon.config.schema import load, settled
from kvtier_daemon.tiers.cold.directory import LOST
from kvtier_daemon.tiers.states import SWITCHED_OFF
from kvtier_daemon.tools import config_check
from support.daemons import kvtier as command

STATS = {
    "version": "0.1.0",
    "uptime_s": 11523.25,
    "tiers": {
        "warm": {
            "capacity_bytes": 64 * GIB,
            "used_bytes": 40 * GIB,
            "blocks": 162_304,
            "allocated_bytes": 48 * GIB,
            "states": {"ready": 160_000, "writing": 2304, "quarantined": 0},
        }
    },
    "lookup_tokens": 10_000,
    "hit_tokens": {"warm": 7000},
    "miss_tokens": {"in_progress": 10, "absent": 2990},
    "saved_tokens": 4000,
    "refused_tokens": {"no_room": 1000},
    "evicted_blocks": {"room": 12_000},
    "tenants": {
        "default": {
            "capacity_bytes": 64 * GIB,
            "used_bytes": 40 * GIB,
            "blocks": 162_304,
            "spaces": 2,
            "sessions": 4,
            "leases": 17,
        }
    },
    "sessions": 4,
    "used_tokens": {"warm": 2000, "cold": 0},
    "bytes": {"saved": 40 * GIB, "loaded": 66 * GIB},
}


@pytest.fixture(autouse=True)
def signals():
    """`serve` blocks a signal, and processes that this one starts later would inherit that."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run the command in this process; returns its exit code, its output and its errors."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("KVTIER_SOCKET", raising=False)

    def run(*arguments):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def daemon(monkeypatch):
    """Replaces the daemon's main loop; records the configuration it was started with."""
    started = []
    app = types.ModuleType("kvtier_daemon.app")
    app.run = lambda loaded, with_process=None: started.append(loaded)
    monkeypatch.setitem(sys.modules, "kvtier_daemon.app", app)
    return started


@pytest.fixture
def answer(monkeypatch):
    """Make the daemon answer `stats` with this value, or raise it. Returns the sockets that were tried."""
    asked = []

    def answer(stats):
        class Client:
            @classmethod
            def connect(cls, socket=None, **_):
                asked.append(socket)
                if isinstance(stats, BaseException):
                    raise stats
                return cls()

            def __enter__(self):
                return self

            def __exit__(self, *error):
                asked.append("closed")

            def stats(self):
                return stats

        monkeypatch.setattr(kvtier, "Client", Client, raising=False)
        return asked

    return answer


# --- the command itself ---------------------------------------------------------------------------


def test_the_version_is_the_distributions(run):
    assert run("--version") == (0, f"kvtier {version('kvtier')}\n", "")


def test_help_lists_every_command(run):
    for arguments in (["--help"], ["-h"]):
        code, out, _ = run(*arguments)
        assert code == 0
        assert "serve " in out
        assert "status " in out
        assert "..." not in out.partition("Commands:")[2]  # each description fits on its line


def test_a_misspelt_command_is_an_error(run):
    for words, meant in ((["serv"], "serve"), (["tire"], "tier"), (["config", "chek"], "check")):
        code, _, err = run(*words)
        assert code == 2
        assert f"No such command '{words[-1]}'. Did you mean '{meant}'" in err


def test_a_configuration_is_checked_with_the_profiles_that_it_needs(run, tmp_path):
    file, profile = tmp_path / "kvtier.toml", tmp_path / "llama.kvtp"
    cold = (
        f'[warm]\nsize = "1GiB"\n[cold]\nsize = "1GiB"\ndirectories = ["{tmp_path}"]\n'
        f'profiles = ["{profile}"]\n'
        'codecs = ["llama*={}"]\n'
    )
    file.write_text(cold.format("q8"))
    assert run("config", "check", str(file))[0] == 0, "it needs none"
    file.write_text(cold.format("ecsq-mid"))
    code, _, err = run("config", "check", str(file))
    assert code == 2 and f"cold.profiles: {profile}: No such file" in err
    profile.write_bytes(b"no profile")
    code, _, err = run("config", "check", str(file))
    assert code == 2 and f"cold.profiles: {profile}: " in err and "kvtier calibrate" in err


def test_a_check_finds_what_a_start_would_refuse(run, tmp_path):
    file, missing = tmp_path / "kvtier.toml", tmp_path / "cold"
    text = 'socket = "{}/k.sock"\nstate = "{}"\n[warm]\nsize = "{}"\n'
    cold = f'[cold]\nsize = "1GiB"\ndirectories = ["{missing}"]\n'
    file.write_text(text.format(tmp_path, tmp_path / "state", "64MiB") + cold)
    code, _, err = run("config", "check", str(file))
    assert code == 2 and err.count("\n") == 1
    assert f"cold directory: {missing} does not exist" in err and f"mkdir -p {missing}" in err
    missing.mkdir()
    assert run("config", "check", str(file))[0] == 0
    assert not (tmp_path / "state").exists(), "a check changes nothing"
    file.write_text(text.format(tmp_path / "none", tmp_path, "8000TiB"))
    code, _, err = run("config", "check", str(file))
    assert code == 2 and "the machine has" in err and f"mkdir -p {tmp_path}/none" in err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can check as another user")
def test_a_check_runs_as_the_user_of_the_service(tmp_path):
    place = Path(tempfile.mkdtemp(dir="/tmp"))  # a directory that the other user can reach
    try:
        place.chmod(0o755)
        (place / "state").mkdir()
        (place / "run").mkdir()
        (place / "cold").mkdir()
        text = f'socket = "{place}/run/k.sock"\nstate = "{place}/state"\n[warm]\nsize = "64MiB"\n'
        file = place / "kvtier.toml"
        file.write_text(
            f'{text}[cold]\nsize = "1GiB"\ndirectories = ["{place}/cold", "{place}/none"]\n'
        )
        check = ("config", "check", str(file))
        as_root, as_other = command(*check), command(*check, "--user", "nobody", "--json")
        # Only the missing directory is reported.
        assert as_root.stderr.count("\n") == 1, as_root.stderr
        problems = json.loads(as_other.stdout)["problems"]
        uid = pwd.getpwnam("nobody").pw_uid
        for part in ("run", "state", "cold"):
            assert any(f"{place}/{part} is not writable for uid {uid}" in one for one in problems)
        assert any(f"chown nobody:nogroup {place}/none" in one for one in problems), problems
        for part in ("run", "state", "cold"):
            shutil.chown(place / part, "nobody")
        left = command(*check, "--user", "nobody")
        assert left.returncode == 2 and left.stderr.count("\n") == 1
        (place / "none").mkdir()
        shutil.chown(place / "none", "nobody")
        done = command(*check, "--user", "nobody")
        assert (done.returncode, done.stdout) == (0, f"{file}: ok for user nobody\n")
        unknown = command(*check, "--user", "no-such-user")
        assert unknown.returncode == 2 and "no such user" in unknown.stderr
    finally:
        shutil.rmtree(place)


def test_a_check_finds_directories_that_the_installed_sandbox_hides(tmp_path, monkeypatch):
    file, units = tmp_path / "kvtier.toml", tmp_path / "units"
    places = [tmp_path / "one", tmp_path / "two"]
    listed = ", ".join(f'"{place}"' for place in places)
    file.write_text(f'[warm]\nsize = "64MiB"\n[cold]\nsize = "1GiB"\ndirectories = [{listed}]\n')
    monkeypatch.setattr(config_check, "SYSTEM_UNITS", units)
    monkeypatch.setattr(config_check, "HIDDEN", {str(places[1]): "ProtectHome="})
    monkeypatch.setattr(config_check, "SERVICE_USER", pwd.getpwuid(os.geteuid()).pw_name)

    def hidden():
        found = config_check.problems(file, config_check.SERVICE_USER)
        return [one for one in found if "sandbox" in one]

    assert hidden() == [], "no service is installed"
    dropin = units / "kvtierd.service.d" / "cold.conf"
    dropin.parent.mkdir(parents=True)
    (units / "kvtierd.service").touch()
    dropin.write_text("[Service]\nProtectSystem=full\n")
    (one,) = hidden()
    assert f"{places[1]} is below {places[1]}, which the service's sandbox hides: use a dir" in one
    dropin.write_text("[Service]\nProtectSystem=full\nProtectHome=no\n")
    assert hidden() == []
    monkeypatch.setattr(config_check, "HIDDEN", {})
    dropin.unlink()
    assert [str(place) in one for place, one in zip(places, hidden(), strict=True)] == [True, True]
    dropin.write_text(f"[Service]\nReadWritePaths={places[0]}\n")
    (left,) = hidden()
    assert str(places[1]) in left and "kvtier install-service" in left
    dropin.write_text(f"[Service]\nReadWritePaths=-{tmp_path}\n")
    assert hidden() == []
    dropin.write_text(f'[Service]\nReadWritePaths="{tmp_path}\n')
    assert len(hidden()) == 2, "a line that systemd passes over"
    dropin.write_text("[Service]\nProtectSystem=full\n")
    assert hidden() == []


def test_a_refusal_has_a_priority_only_in_the_journal(tmp_path):
    command = [sys.executable, "-m", "kvtier_daemon.cli", "config", "show", "/none.toml"]
    for to_journal in (True, False):
        with open(tmp_path / "stderr", "w+") as stream:
            found = os.fstat(stream.fileno() if to_journal else 0)
            environ = {**os.environ, "JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
            subprocess.run(command, stderr=stream, env=environ, check=False)
            stream.seek(0)
            assert stream.read().startswith("<3>kvtier: " if to_journal else "kvtier: ")


HELP = "import sys; from kvtier_daemon.cli import main\ntry: main(['--help'])\nexcept SystemExit: "


def test_help_imports_nothing_that_it_does_not_need():
    program = HELP + "print(*sys.modules, sep='\\n')"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(ran.stdout.split())
    assert "typer" in loaded
    heavy = {
        "rich",
        "textual",
        "msgspec",
        "asyncio",
        "uvloop",
        "kvtier_kernels",
        "kvtier_daemon.config.schema",
    }
    assert not heavy & loaded


def test_help_takes_little_cpu_time():
    """The help may take about as much CPU time as importing the command-line library; other processes
    do not count."""

    def worked() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    programs = HELP + "pass", "import typer.main"
    took: dict[str, list[float]] = {program: [] for program in programs}
    for _ in range(5):
        for program, each in took.items():
            begin = worked()
            subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
            each.append(worked() - begin)
        ours, floor = map(min, took.values())
        if ours <= 1.6 * floor:
            return
    raise AssertionError(took)


@pytest.mark.parametrize(
    ("error", "code"), [(KvtierError("a\nb"), 2), (ProtocolError("a b"), 3), (Unavailable("x"), 3)]
)
def test_an_environment_error_is_one_line_and_an_exit_code(run, answer, error, code):
    answer(error)
    left, out, err = run("status")
    assert (left, out) == (code, "")
    assert err.startswith("kvtier: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_an_internal_error_is_one_line_that_names_the_debug_flag(run, answer):
    answer(ZeroDivisionError("of nothing"))
    code, out, err = run("status")
    assert (code, out) == (70, "")
    assert err.startswith("kvtier: ZeroDivisionError: of nothing; this is an internal error")
    assert "--debug" in err and "kvtier bugreport" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("error", [ZeroDivisionError(), KvtierError("x"), OSError("x")])
@pytest.mark.parametrize("words", [("--debug", "status"), ("status", "--debug")])
def test_debug_shows_the_traceback(run, answer, error, words):
    answer(error)
    _, _, err = run(*words)
    assert err.startswith("Traceback")
    assert "in status" in err
    assert err.splitlines()[-1].startswith("kvtier: ")


def test_a_file_that_exceeds_a_limit_names_the_limit(run, answer, monkeypatch):
    answer(OSError(errno.EFBIG, os.strerror(errno.EFBIG), "trace"))
    monkeypatch.setattr("kvtier_daemon.cli.getrlimit", lambda kind: (2 << 20, -1))
    code, _, err = run("status")
    assert code == 2 and "'trace'; `ulimit -f` limits files to 2048 KiB here: raise it" in err
    monkeypatch.setattr("kvtier_daemon.cli.getrlimit", lambda kind: (-1, -1))
    assert run("status")[2].rstrip().endswith("'trace'"), "a limit of the file system"


def test_an_interrupt_has_its_own_code(run, answer):
    answer(KeyboardInterrupt())
    assert run("status")[0] == 130


def test_the_status_is_the_same_if_nobody_can_be_told(tmp_path):
    command = [sys.executable, "-m", "kvtier_daemon.cli", "status", "--socket", str(tmp_path / "k")]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stderr=full, check=False).returncode == 3


INTERRUPTED = """
import signal, sys
from importlib.metadata import entry_points

class Interrupted:
    def find_spec(self, name, path, target=None):
        if name == IMPORTED:
            signal.raise_signal(signal.SIGINT)

(entry,) = entry_points(group="console_scripts", name="kvtier")
sys.meta_path.insert(0, Interrupted())
entry.load()()
"""


@pytest.mark.parametrize(
    ("imported", "status"),
    [("typer", -signal.SIGINT), ("kvtier_daemon.cli.size", 130), ("kvtier.client", 130)],
)
def test_an_interrupt_during_an_import_prints_nothing(imported, status):
    command = "status" if imported == "kvtier.client" else "size"
    ran = subprocess.run(
        [sys.executable, "-c", f"IMPORTED = {imported!r}{INTERRUPTED}", command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (status, "", "")


# --- serve ----------------------------------------------------------------------------------------


def test_serve_starts_with_flags_alone(run, daemon, tmp_path):
    code, _, err = run(
        "serve", "--warm-size", "8MiB", "--socket", str(tmp_path / "k"), "--log-level", "debug"
    )
    assert (code, err) == (0, "")
    (loaded,) = daemon
    assert loaded.config.warm.size_bytes == 8 * MIB
    assert loaded.config.socket == tmp_path / "k"
    assert loaded.config.log_level == "debug"
    assert loaded.origins["warm.size"] == "--warm-size"


def test_flags_override_the_file(run, daemon, tmp_path):
    (tmp_path / "k.toml").write_text(
        f'socket = "{tmp_path}/k"\nstate = "{tmp_path}/s"\n[warm]\nsize = "4MiB"\n'
    )
    run("serve", "--config", str(tmp_path / "k.toml"), "--warm-size", "8MiB")
    (loaded,) = daemon
    assert loaded.config.warm.size_bytes == 8 * MIB
    assert loaded.config.state == tmp_path / "s"


@pytest.mark.parametrize("said", ["here.sock", "./here.sock", "~/here.sock"])
def test_a_flag_may_name_a_socket_relative_to_the_working_directory(
    run, daemon, answer, tmp_path, monkeypatch, said
):
    monkeypatch.chdir(tmp_path)
    run("serve", "--warm-size", "8MiB", "--socket", said)
    assert daemon[0].config.socket == tmp_path / "here.sock"
    asked = answer(STATS)
    run("status", "--socket", said)
    assert asked[0] == str(tmp_path / "here.sock")


@pytest.mark.parametrize("said", ["", "~no-such-user-here/k.sock"])
@pytest.mark.parametrize("command", [["serve", "--warm-size", "8MiB"], ["status"]])
def test_a_flag_that_names_no_path_is_refused(run, daemon, command, said):
    code, _, err = run(*command, "--socket", said)
    assert (code, daemon) == (2, [])
    assert "Invalid value for '--socket'" in err


def test_a_file_and_the_environment_name_a_socket_absolutely(run, daemon, tmp_path, monkeypatch):
    (tmp_path / "k.toml").write_text("socket = 'here.sock'\n[warm]\nsize = '8MiB'\n")
    code, _, err = run("serve", "--config", str(tmp_path / "k.toml"))
    assert (code, daemon) == (2, [])
    assert "k.toml:1: socket: expected an absolute path, got 'here.sock'" in err
    monkeypatch.setenv("KVTIER_SOCKET", "here.sock")
    code, _, err = run("serve", "--warm-size", "8MiB")
    assert (code, daemon) == (2, [])
    assert "environment KVTIER_SOCKET: socket: expected an absolute path" in err


def test_the_daemon_reads_the_clients_variable(run, daemon, tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_SOCKET", str(tmp_path / "k.sock"))
    run("serve", "--warm-size", "8MiB")
    assert daemon[0].config.socket == tmp_path / "k.sock"


def test_a_bad_configuration_starts_nothing(run, daemon, tmp_path):
    (tmp_path / "k.toml").write_text("[wram]\nsize = 1\n")
    code, out, err = run("serve", "--config", str(tmp_path / "k.toml"))
    assert (code, out, daemon) == (2, "", [])
    assert err == f"kvtier: {tmp_path}/k.toml: wram: unknown section; did you mean warm?\n"


def test_a_machine_that_is_too_small_starts_nothing(run, daemon, tmp_path):
    code, _, err = run("serve", "--warm-size", "4000TiB", "--socket", str(tmp_path / "k"))
    assert (code, daemon) == (2, [])
    assert err.startswith("kvtier: memory for the arena: ")
    assert err.count("\n") == 1


def test_a_lack_of_free_memory_may_pass(run, daemon, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "_available", lambda *_: [(1 << 20, "MemAvailable")])
    arguments = ("--warm-size", "8MiB", "--socket", str(tmp_path / "k" / "k.sock"))
    code, _, err = run("serve", *arguments)
    assert (code, daemon) == (2, []) and "(2) socket directory" in err, "its directory is missing"
    (tmp_path / "k").mkdir(mode=0o700)
    code, _, err = run("serve", *arguments)
    assert (code, daemon) == (75, [])
    assert err.startswith("kvtier: memory for the arena: ")


# --- status ---------------------------------------------------------------------------------------


def test_status_as_json_is_the_daemons_answer(run, answer):
    asked = answer(STATS)
    code, out, err = run("status", "--json", "--socket", "/tmp/there")
    assert (code, err) == (0, "")
    assert json.loads(out) == STATS
    assert asked == ["/tmp/there", "closed"]


def test_status_uses_the_socket_of_the_environment(run, answer, monkeypatch):
    asked = answer(STATS)
    monkeypatch.setenv("KVTIER_SOCKET", "/tmp/elsewhere")
    run("status")
    assert asked[0] == "/tmp/elsewhere"


def test_status_uses_the_same_default_sockets_as_clients(run, answer, monkeypatch, tmp_path):
    asked = answer(STATS)
    monkeypatch.setattr("kvtier.client.DEFAULT_SOCKET", str(tmp_path / "system.sock"))
    run("status")
    own = tmp_path / "kvtier" / "kvtier.sock"
    own.parent.mkdir()
    own.touch()
    run("status")
    assert [place for place in asked if place != "closed"] == [
        str(tmp_path / "system.sock"),
        str(own),
    ]


def test_no_daemon_is_one_line_that_says_what_to_do(run, tmp_path):
    there = tmp_path / "there"
    code, out, err = run("status", "--socket", str(there))
    assert (code, out) == (3, "")
    assert err == (
        f"kvtier: no daemon answers at {there}: No such file or directory; start one with"
        " `kvtier serve --warm-size 8GiB`, or give its path with --socket\n"
    )


def test_no_daemon_at_the_default_sockets_is_a_line_with_both(run, monkeypatch, tmp_path):
    """A user's daemon in another login session may have another directory for its socket."""
    monkeypatch.delenv("KVTIER_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("kvtier.client.DEFAULT_SOCKET", str(tmp_path / "system.sock"))
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    code, _, err = run("status")
    assert code == 3
    assert f"{tmp_path}/system.sock: No such file or directory, nor at {tmp_path}/kvtier/kv" in err


def test_a_path_that_is_too_long_is_reported_once(run, tmp_path):
    there = tmp_path / ("x" * 120)
    code, _, err = run("status", "--socket", str(there))
    nbytes = len(str(there))
    assert (code, err) == (
        3, f"kvtier: {there} has {nbytes} bytes, a socket's path has at most 107: use a shorter one\n"
    )  # fmt: skip


def test_a_daemon_that_hangs_and_a_missing_one_have_different_errors(run, answer, tmp_path):
    answer(Unavailable("the daemon did not answer within 5.0 s"))
    there = tmp_path / "k.sock"
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(there))
        hung.listen(1)
        code, _, err = run("status", "--socket", str(there))
    assert code == 3
    assert err.startswith(f"kvtier: process {os.getpid()} (")
    assert err.endswith(
        f") listens at {there} and does not serve: the daemon did not answer within 5.0 s; see its"
        " log, and restart it if this continues\n"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may connect everywhere")
def test_a_socket_without_permission_is_reported(run, tmp_path):
    there = tmp_path / "k.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(there))
        listener.listen(1)
        there.chmod(0o020)
        code, _, err = run("status", "--socket", str(there))
    assert code == 3
    assert "may not connect to" in err and "mode 0020); become a member of group" in err


def test_a_check_finds_directories_that_others_can_write_to(run, tmp_path):
    cold = tmp_path / "cold"
    cold.mkdir(mode=0o700)
    file = tmp_path / "kvtier.toml"
    file.write_text(
        f'state = "{tmp_path}/state"\n[warm]\nsize = "64MiB"\n'
        f'[cold]\ndirectories = ["{cold}"]\nsize = "1GiB"\n'
    )
    assert run("config", "check", str(file))[0] == 0
    cold.chmod(0o777)
    code, _, err = run("config", "check", str(file))
    assert code == 2 and f"cold directory: {cold}: has mode 0777: others can write to it" in err
    assert f"the daemon would not use it; run `chmod go-w {cold}`" in err
    cold.chmod(0o1777)
    assert f"run `mkdir -m 700 {cold}/kvtier`" in run("config", "check", str(file))[2]


def test_a_progress_bar_prints_nothing_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress() as bar:
        bar.update(bar.add_task("draining", total=2), completed=1)
    assert capsys.readouterr() == ("", "")


def drawn(stats, width=80, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(width=width, file=file, highlight=False)
    draw(stats, console)
    file.seek(0)
    return [line.rstrip() for line in file.read().splitlines()]


def test_the_table_shows_fill_hit_rate_and_misses_by_reason():
    assert drawn(STATS) == [
        " kvtier 0.1.0   up 3 h 12 min   4 sessions",
        "",
        " warm  ███████████████░░░░░░░░░  62%  40 GiB of 64 GiB  162,304 blocks",
        "       ██████████████████░░░░░░  75%  allocated so far",
        "",
        " tokens looked up                                   10,000",
        "   hit               █████████████████░░░░░░░  70%   7,000",
        "     hit warm        █████████████████░░░░░░░  70%   7,000",
        "   used of these     █████░░░░░░░░░░░░░░░░░░░  20%   2,000",
        "   miss absent       ███████░░░░░░░░░░░░░░░░░  30%   2,990",
        "   miss in_progress  █░░░░░░░░░░░░░░░░░░░░░░░  <1%      10",
        " tokens offered                                      5,000",
        "   saved             ███████████████████░░░░░  80%   4,000",
        "   refused no_room   █████░░░░░░░░░░░░░░░░░░░  20%   1,000",
        "",
        " bytes           saved 40 GiB, loaded 66 GiB",
        " evicted blocks  room 12,000",
        " warm blocks     ready 160,000, writing 2,304",
        "",
        " tenant   fill    used      of   blocks  spaces  sessions  leases",
        " default   62%  40 GiB  64 GiB  162,304       2         4      17",
        "",
    ]


@pytest.mark.parametrize("width", [44, 60])
def test_a_narrow_terminal_shows_every_label_and_number_in_shorter_bars(width):
    lines = drawn(STATS, width)
    assert max(map(len, lines)) <= width
    cells = max(4, width - 56)
    by_label = {line[:20].rstrip("█░ "): line for line in lines}
    for label, rest in {
        "   miss in_progress": "█" + "░" * (cells - 1) + "  <1%      10",
        "   used of these": "20%   2,000",
        " tokens offered": "5,000",
    }.items():
        assert by_label[label].endswith(rest), lines
    (warm,) = [line for line in lines if line.startswith(" warm  █")]
    assert " 62% " in warm and "162,304" in warm and "40 GiB" in warm
    (tenant,) = [line for line in lines if line.startswith(" default")]
    assert tenant.split()[1:6] == ["62%", "40", "GiB", "64", "GiB"]


@pytest.mark.parametrize("blocks", [1, 162_304])
def test_the_copies_on_a_gpu_are_a_line_of_80_columns(blocks):
    one = {"capacity_bytes": 141 * GIB, "used_bytes": 100.25 * GIB, "blocks": blocks}
    hot = {"arena": {"gpus": {"3fa9c2d1-0000": one}}}
    (line,) = [line for line in drawn(STATS | {"hot": hot}) if "GPU" in line or "141 GiB" in line]
    assert line.startswith(" GPU 3fa9c2  █") and " 71% " in line and f"{blocks:,} block" in line


@pytest.mark.parametrize("width", [24, 40, 50, 60, 80])
def test_a_table_of_names_keeps_them_on_a_narrow_terminal(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    table = table_of(">space", "tenant~", "model~", ">warm", ">cold", ">used by")
    row(table, "0", "default", "meta-llama/Llama-3.1-70B", "123,456", "1,234,567", "3")
    print_fitting(table)
    printed = capsys.readouterr().out
    headings, *lines = printed.splitlines()
    assert max(map(len, printed.splitlines())) <= width
    at = [headings.index(name) for name in ("tenant", "model")]
    ends = headings.find("warm") - 5 if "warm" in headings else None
    assert "".join(line[at[0] : at[1]].strip() for line in lines) == "default"
    assert "".join(line[at[1] : ends].strip() for line in lines) == "meta-llama/Llama-3.1-70B"
    assert ("used by" in headings) == (width >= 60)


def test_the_rate_of_a_store_is_shown_after_it_was_measured():
    remote = {
        "store": "s3://b",
        "on": True,
        "read_bytes_s": 100 << 20,
        "latency_s": 0.5,
        "bytes": {"read": 0},
    }
    for read in (0, 1 << 20):
        tiers = STATS["tiers"] | {"remote": remote | {"bytes": {"read": read}}}
        text = "\n".join(drawn(STATS | {"tiers": tiers}, width=200))
        assert ("100 MiB/s" in text and "first byte" in text) == bool(read), text


def test_tokens_that_are_offered_again_count_once():
    lines = drawn(STATS | {"refused_tokens": {"no_room": 1000, "writing": 50_000}})
    assert " tokens offered                                      5,000" in lines
    assert any("80%   4,000" in line for line in lines)
    (told,) = [line for line in lines if "50,000" in line]
    assert told.split(None, 2)[:2] == ["saves", "waited"] and "offered again" in told


COLD = {
    "capacity_bytes": 2048 * GIB,
    "used_bytes": 512 * GIB,
    "blocks": 8_000_000,
    "states": {"written": 9_000_000, "read": 70_000, "written_again": 900_000, "not_read": 3},
    "bytes": {"written": 600 * GIB, "written_again": 60 * GIB, "read": 5 * GIB},
    "day_bytes": 40 * GIB,
    "day_limit_bytes": 1024 * GIB,
    "not_read": {"EBADMSG": 2, "ETIMEDOUT": 3},
    "on": True,
    "given_up": False,
    "faults": 0,
    "failure": "",
    "scrub": {
        "bytes": 1,
        "frames": 1_234_567,
        "damaged": 2,
        "last_round_s": 3725.5,
        "rate": 16 << 20,
    },
}


def cold_lines(**change):
    tiers = STATS["tiers"] | {"cold": COLD | change}
    lines = drawn(STATS | {"tiers": tiers})
    first = next(at for at, line in enumerate(lines) if line.startswith(" cold blocks"))
    return lines[first : lines.index("", first)]


def test_the_table_shows_disk_writes_and_recovered_blocks():
    assert cold_lines() == [
        " cold blocks     written 9,000,000, written_again 900,000, read 70,000, not_read",
        "                 3",
        " cold written    660 GiB, 1.10 for each new byte",
        "   in 24 hours   40 GiB, 984 GiB left of 1 TiB",
        " cold not read   ETIMEDOUT 3, EBADMSG 2",
        " cold scrub      16 MiB/s, 1,234,567 frames, 2 damaged, last round 1 h 2 min",
    ]
    nothing = cold_lines(
        states={"written": 1}, bytes={}, not_read={}, day_bytes=0, day_limit_bytes=0, scrub={}
    )
    assert nothing[1:] == [" cold scrub      off"]
    spaces = [
        {"codec": "raw", "ratios": {"r32": 1.01}},
        {"codec": "r32", "ratios": {"r32": 1.5, "fix4": 1.3}},
        {"codec": "r32", "ratios": {"r32": 1.44}},
    ]
    assert cold_lines(coding={"spaces": spaces})[4] == (
        " cold codecs     r32 in 2 spaces, 1.44 to 1.50 times smaller, raw in 1 space"
    )
    lossy = [{"codec": "q8", "lossy": True, "ratios": {"q8": 1.88}}]
    assert cold_lines(coding={"spaces": lossy})[4] == (
        " cold codecs     q8 (lossy) in 1 space, 1.88 times smaller"
    )
    spaces[0] |= {"asked": "q8", "why": "opaque"}
    lines = " ".join(line.strip() for line in cold_lines(coding={"spaces": spaces}))
    assert "raw in 1 space, no q8 in 1 space: opaque" in lines
    new = COLD["scrub"] | {"last_round_s": None, "frames": 1, "damaged": 0}
    assert cold_lines(scrub=new)[-1] == " cold scrub      16 MiB/s, 1 frame, 0 damaged, first round"


def test_the_table_contains_instructions_for_failing_disks():
    def said(**change):
        text = " ".join(line.strip() for line in cold_lines(**change))
        return "cold faults" + text.partition("cold faults")[2].replace("    ", "")

    failure = "/mnt/nvme0/segments/default/000017: write failed: Input/output error"
    assert said(faults=3, failure=failure).startswith(
        f"cold faults 3; {failure}; the daemon retries"
    )
    assert said(faults=3) == "cold faults 3, all disks work again"
    off = said(faults=5, failure=failure, on=False)
    assert off.startswith(f"cold faults 5; off: {failure}; the daemon retries") and "dmesg" in off
    full = said(faults=1, failure="cannot create /mnt/000020: No space left on device")
    assert "lower cold.size" in full and "smartctl" not in full
    gone = said(failure=f"/mnt/nvme0: No such file or directory; {LOST}")
    assert gone.endswith("restart the daemon; the daemon retries; if it continues, do what it says")
    over = said(failure="cannot map an extent", on=False, given_up=True)
    assert over == "cold faults off: cannot map an extent; repair that and restart the daemon"


def test_the_table_shows_switched_tiers_and_how_to_undo_it():
    off = {"state": "off", "on": False, "failure": SWITCHED_OFF}
    warm = STATS["tiers"]["warm"] | {"state": "drained", "allocated_bytes": 64 * GIB}
    lines = drawn(STATS | {"tiers": {"warm": warm, "cold": COLD | off}})
    assert (lines[3].split(), lines[5].split()) == (["drained"], ["off"])
    said = " ".join(" ".join(lines).split())
    assert (
        "warm tier drained: all blocks are also on disk" in said
        and "`kvtier tier on warm` ends" in said
    )
    assert (
        "cold tier off: requested by an operator" in said
        and "misses until `kvtier tier on cold`" in said
    )
    assert "dmesg" not in said, "no disk is at fault"
    on = drawn(STATS | {"tiers": {"cold": COLD | {"state": "on"}}})
    assert not any("cold tier" in line for line in on)


def test_a_new_daemon_has_a_table():
    stats = {"version": "0.1.0", "tiers": {"warm": {"capacity_bytes": GIB}}}
    assert drawn(stats)[2] == " warm  ░░░░░░░░░░░░░░░░░░░░░░░░  0%  0 B of 1 GiB  0 blocks"
    assert drawn({})[0] == " kvtier    up 0 s   0 sessions"


def test_a_terminal_without_block_characters_gets_a_table():
    assert " warm  ###############---------  62%" in "\n".join(drawn(STATS, encoding="ascii"))


def test_a_shown_configuration_loads_to_the_same_values(run, tmp_path):
    first = tmp_path / "first.toml"
    first.write_text(
        f"""socket = "{tmp_path}/k.sock"\nstate = "{tmp_path}"
[warm]\nsize = 100000000
[cold]\ndirectories = ["{tmp_path}/a", "{tmp_path}/b"]\nsize = "2TiB"\ndaily_writes = "700GiB"
codecs = ["llama*=q8", "x:y=z=fp8"]
[http]\nlisten = "[::1]:9410"\nhosts = ["here"]
[tenants.a]\nuids = [7, "root"]\nquota = "40%"\n[tenants.b]\nuids = ["*"]\nquota = "60%"
"""
    )
    code, shown, err = run("config", "show", str(first))
    assert (code, err) == (0, "")
    assert 'cold.size = "2 TiB"' in shown and 'http.listen = "[::1]:9410"' in shown
    second = tmp_path / "second.toml"
    second.write_text(shown)
    assert settled(load(second).config) == settled(load(first).config)
    code, _, err = run("bench", "compare", str(tmp_path / "gone"), str(first))
    assert (code, err) == (2, f"kvtier: {tmp_path}/gone: No such file or directory\n")


amounts = st.integers(0, 1 << 50)
counts = st.integers(0, 10**9)
reasons = st.dictionaries(st.sampled_from(["absent", "evicted", "in_progress", "no_room"]), counts)
filled = st.tuples(amounts, amounts).map(
    lambda pair: {"capacity_bytes": max(pair), "used_bytes": min(pair)}
)


def with_fill(**others):
    return st.builds(lambda fill, rest: fill | rest, filled, st.fixed_dictionaries(others))


small = st.integers(0, 99_999)
tenants = with_fill(blocks=counts, spaces=small, sessions=small, leases=small)


@given(
    st.fixed_dictionaries(
        {
            "version": st.just("0.1.0"),
            "uptime_s": st.floats(0, 1e9),
            "sessions": st.integers(0, 65_536),
            "tiers": st.fixed_dictionaries(
                {
                    "warm": with_fill(blocks=counts, allocated_bytes=amounts, states=reasons),
                    "cold": with_fill(
                        blocks=counts,
                        states=reasons,
                        not_read=reasons,
                        day_bytes=amounts,
                        day_limit_bytes=amounts,
                        faults=small,
                        on=st.booleans(),
                        failure=st.text("abc /", max_size=200),
                        bytes=st.fixed_dictionaries({"written": amounts, "written_again": amounts}),
                    ),
                }
            ),
            "lookup_tokens": counts,
            "hit_tokens": st.fixed_dictionaries({"warm": counts}),
            "miss_tokens": reasons,
            "saved_tokens": counts,
            "refused_tokens": reasons,
            "evicted_blocks": reasons,
            "tenants": st.dictionaries(
                st.from_regex(r"[a-z0-9][a-z0-9_-]{0,31}", fullmatch=True), tenants, max_size=3
            ),
        }
    )
)
def test_the_table_fits_80_columns_without_truncation(stats):
    lines = drawn(stats)
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    assert any(line.startswith(" tenant ") for line in lines) == bool(stats["tenants"])


def test_a_daemon_serves_with_the_usual_garbage_collections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, seen = gc.get_threshold(), list[tuple[int, int, int]]()
    monkeypatch.setattr(app, "run", lambda *_: seen.append(gc.get_threshold()))
    monkeypatch.setenv("KVTIER_STATE", str(tmp_path / "state"))
    with contextlib.suppress(SystemExit):
        main(["serve", "--socket", str(tmp_path / "socket"), "--warm-size", "16MiB"])
    assert seen == [usual]
    assert gc.get_threshold() == usual


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_limit_on_threads_is_named_and_another_start_may_succeed() -> None:
    """The kernel limits the threads of a user that is not root."""
    program = (
        "import os, resource, threading, typer\n"
        "from kvtier.errors import TierError\n"
        "from kvtier_daemon import cli\n"
        "def starts(**_):\n"
        "    try:\n"
        "        threading.Thread(target=print).start()\n"
        "    except RuntimeError as error:\n"
        "        if wraps:\n"
        "            raise TierError('cold: cannot start threads') from error\n"
        "        raise\n"
        "cli.program = lambda: starts\n"
        "os.setuid(54321)\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))\n"
        "cli.main([])\n"
    )
    for wraps in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", f"wraps = {wraps}\n{program}"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 75, done.stderr
        assert "a limit on threads is reached: raise `ulimit -u`" in done.stderr
        assert "bugreport" not in done.stderr and done.stderr.count("\n") == 1
