"""The operator's commands: keys, purge, monitor, top; and all commands without a working daemon."""

from __future__ import annotations

import asyncio
import contextlib
import html
import io
import json
import os
import pty
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pytest

from e2e.test_shown import HTTP, get
from kvtier import Client, wire
from kvtier.errors import FrameError
from kvtier.frame import PAGE
from kvtier_daemon.cli import COMMANDS, listing
from kvtier_daemon.cli.connecting import ANSWER_S, LEAST_ANSWER_S
from kvtier_daemon.cli.top_views import VIEWS, Moment, ScreenHistory
from kvtier_daemon.observing.events import LIMIT_KEPT
from kvtier_daemon.tiers.cold.segment import Head, Trailer
from support.daemons import Daemon, kvtier
from support.specs import pattern, spec_of

NOBODY = 65_534
COMMAND = [sys.executable, "-m", "kvtier_daemon.cli"]


def json_of(*arguments: str) -> Any:
    done = kvtier(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def saved(client: Client, name: str, count: int, first: int = 0) -> list[bytes]:
    """Save a chain of `count` blocks in a space of this name."""
    space = client.open(spec_of(name))
    keys = space.keys([first] * count * 16)
    space.save(keys, [pattern(key, space.spec.block_bytes) for key in keys])
    return list(keys)


# --- where no daemon serves ----------------------------------------------------------------------

TALKS = {
    "config": ["diff"],
    "explain": [],
    "keys": [],
    "monitor": ["--limit", "1"],
    "purge": ["--all", "--yes"],
    "record": ["status"],
    "reload": [],
    "status": [],
    "tier": ["status", "cold"],
    "top": ["--once"],
}
AT_ONCE = 6
GOES_ON = {"bugreport": ["--dry-run"], "doctor": []}  # they report that the daemon did not answer
ASKS_NOBODY = {
    "bench",
    "calibrate",
    "completion",
    "demo",
    "fsck",
    "hold-gpu",  # waits for a daemon
    "install-service",
    "serve",
    "sim",
    "size",
}


def test_every_command_is_known_to_talk_or_not() -> None:
    assert set(COMMANDS) == TALKS.keys() | GOES_ON.keys() | ASKS_NOBODY


@contextlib.contextmanager
def listening(path: Path, answer: bytes) -> Iterator[None]:
    """A server that sends this answer to every client, and closes the connection."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(8)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client:
                    client.recv(65_536)
                    client.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, str]]]:
    """Sockets without a working daemon, each with the expected message."""
    folder = tmp_path_factory.mktemp("places")
    newer = wire.Failed(
        1, "wrong_schema", "the daemon is kvtier 99.9 and uses another schema", True
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(listening(folder / "newer", wire.encode(newer)))
        stack.enter_context(listening(folder / "other", b"HTTP/1.1 400 Bad Request\r\n\r\n"))
        hung = stack.enter_context(socket.socket(socket.AF_UNIX))
        hung.bind(str(folder / "hung"))
        hung.listen(64)
        yield {
            "dead": (str(folder / "dead"), "No such file or directory"),
            "hung": (str(folder / "hung"), "did not answer within 1."),
            "newer": (str(folder / "newer"), "kvtier 99.9"),
            "other": (str(folder / "other"), "not a kvtier daemon of this version"),
        }


@pytest.mark.parametrize("how", ["dead", "hung", "newer", "other"])
def test_commands_without_a_working_daemon_report_it_in_one_line(
    places: dict[str, tuple[str, str]], how: str
) -> None:
    path, text = places[how]
    asked = [(name, *TALKS[name], *more) for name in sorted(TALKS) for more in ([], ["--json"])]
    with ThreadPoolExecutor(AT_ONCE) as together:  # most of them only wait
        for words, done in zip(
            asked, together.map(lambda words: kvtier(*words, "--socket", path), asked), strict=True
        ):
            assert (done.returncode, done.stdout) == (3, ""), (words, done.stderr)
            assert done.stderr.startswith("kvtier: ") and done.stderr.count("\n") == 1, words
            assert text in done.stderr and path in done.stderr, words
    assert LEAST_ANSWER_S <= ANSWER_S < 2


def test_a_command_that_took_long_to_start_waits_less_for_a_daemon_that_hangs(
    places: dict[str, tuple[str, str]],
) -> None:
    """The user gets the message within the same total time."""
    path, _ = places["hung"]
    slow = "import sys, time; time.sleep(1); from kvtier_daemon.cli import main; main(sys.argv[1:])"
    for words in (["status"], ["purge", "--all", "--yes"]):
        done = subprocess.run(
            [sys.executable, "-c", slow, *words, "--socket", path], capture_output=True, text=True
        )
        assert done.returncode == 3
        assert f"did not answer within {LEAST_ANSWER_S} s" in done.stderr, words


@pytest.mark.parametrize("how", ["dead", "hung", "newer", "other"])
@pytest.mark.parametrize("command", sorted(GOES_ON))
def test_commands_that_work_without_a_daemon_report_why_it_is_missing(
    places: dict[str, tuple[str, str]], command: str, how: str
) -> None:
    path, text = places[how]
    done = kvtier(command, *GOES_ON[command], "--socket", path)
    assert "Traceback" not in done.stderr
    if command == "doctor":
        assert text in " ".join(done.stdout.split())
    else:
        assert done.returncode == 0, done.stderr


def test_doctor_distinguishes_a_missing_daemon_from_failed_checks(tmp_path: Path) -> None:
    """A script may run it before the first start."""
    nobody = ("--socket", str(tmp_path / "dead"))
    done = kvtier("doctor", "--json", *nobody)
    levels = {one["name"]: one["level"] for one in json.loads(done.stdout)}
    assert levels.pop("daemon") == "fail"
    assert done.returncode == (2 if "fail" in levels.values() else 3)
    wrong = tmp_path / "kvtier.toml"
    wrong.write_text("warm = 1\n")
    assert kvtier("doctor", "--config", str(wrong), *nobody).returncode == 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_commands_print_in_every_encoding(tmp_path: Path, encoding: str) -> None:
    done = kvtier("doctor", "--socket", str(tmp_path / "dead"), PYTHONIOENCODING=encoding)
    assert done.returncode in (2, 3) and not done.stderr
    assert "-> start one with" in " ".join(done.stdout.split())


def test_purge_asks_what_it_would_forget(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of()
    asked = kvtier("purge", "--all", "--socket", daemon.socket)
    assert asked.returncode == 2
    assert "no space has blocks; data of forgotten blocks would be erased from disk" in asked.stderr
    with daemon.connect() as client:
        saved(client, "purge", 5)
        for form in ((), ("--json",)):
            asked = kvtier("purge", "--all", *form, "--socket", daemon.socket)
            assert asked.returncode == 2 and not asked.stdout
            assert "5 blocks in memory and 0 on disk, in 1 space of default" in asked.stderr
        assert client.stats()["tiers"]["warm"]["blocks"] == 5


def test_a_command_reports_that_its_daemon_stopped(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of()
    with started("monitor", "--socket", daemon.socket) as watching:
        wait_for_a_monitor(daemon)
        daemon.process.send_signal(signal.SIGSTOP)
        _, err = watching.communicate(timeout=60)
    assert watching.returncode == 3
    assert "does not serve" in err and err.count("\n") == 1


# --- keys ----------------------------------------------------------------------------------------


def test_keys_lists_spaces_and_their_blocks(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of()
    with daemon.connect() as client:
        keys = saved(client, "listed", 40)
        saved(client, "another", 3)
        (spaces,) = json_of("keys", "--socket", daemon.socket)["tenants"].values()
        held = {space["model"]: space for space in spaces}
        assert held["listed"]["memory_blocks"] == 40
        assert held["listed"]["memory_bytes"] == 40 * spec_of().block_bytes
        assert held["another"]["memory_blocks"] == 3
        assert held["another"]["sessions"] == 1
        number = str(held["listed"]["space"])
        identity = held["listed"]["identity"]
        for name in (number, identity[:8]):
            report = json_of("keys", "--space", name, "--limit", "100", "--socket", daemon.socket)
            assert {one["key"] for one in report["keys"]} == {key.hex() for key in keys}
        few = json_of("keys", "--space", number, "--limit", "7", "--socket", daemon.socket)
        assert len(few["keys"]) == 7
        with client.open(spec_of("listed")).load(keys[:5], deadline_ms=60_000):
            report = json_of("keys", "--space", number, "--limit", "100", "--socket", daemon.socket)
            leased = {one["key"] for one in report["keys"] if one["leases"]}
            assert leased == {key.hex() for key in keys[:5]}
        table = kvtier("keys", "--space", number, "--socket", daemon.socket).stdout
        assert keys[0].hex()[:16] in table and "20" in table
        assert all(len(line) <= 80 for line in table.splitlines()[1:])
    nothing = kvtier("keys", "--space", "77", "--socket", daemon.socket)
    assert nothing.returncode == 2 and "kvtier keys" in nothing.stderr


def test_a_long_list_is_sent_in_parts(shared_daemon: Daemon) -> None:
    spec = spec_of("small", layers=1, kv_heads=1, head_dim=32, block_tokens=1)
    count = wire.LIMIT_LISTED + 500
    with shared_daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys([7] * count)
        space.save(keys, [bytes(spec.block_bytes)] * count)
        number = str(space.index)
        report = json_of(
            "keys", "--space", number, "--limit", "9999", "--socket", shared_daemon.socket
        )
        assert sorted(one["key"] for one in report["keys"]) == sorted(key.hex() for key in keys)
        space.forget(keys)


# --- permissions ---------------------------------------------------------------------------------

BE_NOBODY = f"""
import contextlib, io, os
from kvtier import Client, KvSpec, KvtierError, Refused, wire
from kvtier_daemon.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
    main(["status", "--socket", "/no/such/socket"])
os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})
def attempt(client, request, kind):
    try:
        return type(client.link.ask(request, kind)).__name__
    except Refused as error:
        return error.code
"""


def test_blocks_of_another_tenant_are_not_listed_forgotten_or_watched(
    open_folder: Path, daemon_of: Callable[..., Daemon]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to run as another user")
    config = (
        f'socket_mode = "0666"\n[warm]\nsize = "64MiB"\n'
        f'[tenants.ours]\nuids = [0]\nquota = "50%"\n'
        f'[tenants.theirs]\nuids = [{NOBODY}]\nquota = "50%"\n'
    )
    daemon = daemon_of(folder=open_folder, config=config)
    with daemon.connect() as client:
        keys = saved(client, "secret-model", 4)
        script = (
            BE_NOBODY
            + f"""
with Client.connect({daemon.socket!r}, populate=False) as client:
    new = client.link.new_id
    for tenant in ("ours", "theirs", "nobodys"):
        print(tenant, attempt(client, wire.Spaces(new(), tenant), wire.Report),
              attempt(client, wire.List(new(), tenant), wire.Listed),
              attempt(client, wire.Purge(new(), tenant, 0), wire.Purged))
    report = client.link.ask(wire.Spaces(new()), wire.Report).stats
    print(b"secret-model" in bytes(report["spaces"]), "tenants" in report)
    client.link.tell(wire.Monitor(new(), ["lookup", "save"]))
    client.ping()
    print("watches", flush=True)
    input()
    print(len(client.link.replies()))
"""
        )
        command = [sys.executable, "-c", script]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other_user:
            assert other_user.stdout is not None
            lines = [other_user.stdout.readline().split() for _ in range(5)]
            client.open(spec_of("secret-model")).match(keys)
            for _ in range(20):
                client.ping()
            out, _ = other_user.communicate("\n", timeout=60)
        assert lines[:3] == [
            ["ours", "no_tenant", "no_tenant", "no_tenant"],
            ["theirs", "Report", "Listed", "unknown_space"],
            ["nobodys", "no_tenant", "no_tenant", "no_tenant"],
        ]
        assert lines[3:] == [["False", "False"], ["watches"]]
        assert out == "0\n"
        # The operator sees both tenants.
        assert set(json_of("keys", "--socket", daemon.socket)["tenants"]) == {"ours", "theirs"}
        assert client.open(spec_of("secret-model")).match(keys).ready == 4


def test_a_failure_of_the_disk_does_not_name_another_tenant(
    open_folder: Path, daemon_of: Callable[..., Daemon]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to run as another user")
    cold = open_folder / "disk"
    (cold / "segments").mkdir(parents=True, mode=0o700)
    (cold / "segments/secret-corp").touch()  # a folder is expected: the directory cannot be used
    config = (
        f'socket_mode = "0666"\n[warm]\nsize = "64MiB"\n'
        f'[cold]\ndirectories = ["{cold}"]\nsize = "1GiB"\n'
        f'[tenants.secret-corp]\nuids = [0]\nquota = "50%"\n'
        f'[tenants.theirs]\nuids = [{NOBODY}]\nquota = "50%"\n'
    )
    daemon = daemon_of(folder=open_folder, config=config)
    assert "/segments/secret-corp: is not a directory" in daemon.stats()["tiers"]["cold"]["failure"]
    script = (
        BE_NOBODY
        + f"""
spec = KvSpec.dense(
    model="m", layers=1, kv_heads=1, head_dim=64, dtype="bfloat16", block_tokens=16, weights="w"
)
with Client.connect({daemon.socket!r}, populate=False) as client:
    print(client.stats())
    space = client.open(spec)
    keys = space.keys(list(range(16)))
    space.save(keys, [bytes(spec.block_bytes)])
    try:
        space.forget(keys)
    except KvtierError as error:
        print(error)
"""
    )
    told = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True
    )
    assert told.stdout.count("/segments/*: is not a directory") == 2, told.stdout
    assert "secret-corp" not in told.stdout


def test_a_client_that_lists_keys_can_not_load_what_another_has_salted(
    open_folder: Path, daemon_of: Callable[..., Daemon]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to run as another user")
    config = f'socket_mode = "0666"\n[warm]\nsize = "64MiB"\n[tenants.ours]\nuids = [0, {NOBODY}]\n'
    daemon = daemon_of(folder=open_folder, config=config)
    with daemon.connect() as client:
        space = client.open(spec_of("salted"))
        keys = space.keys([7] * 64, salt=b"secret")
        space.save(keys, [pattern(key, space.spec.block_bytes) for key in keys])
        missing = space.keys([8] * 16, salt=b"secret")
        assert space.match(missing).ready == 0
        script = (
            "from kvtier_daemon.cli import listing\nfrom support.specs import spec_of\n"
            + BE_NOBODY
            + f"""
with Client.connect({daemon.socket!r}, populate=False) as client:
    space = client.open(spec_of("salted"))
    listed = [block.key for block in listing.blocks(client, "", space.index)]
    print(len(set(listed)))
    for key in listed:
        print(key.hex(), space.match([key]).ready)
    print(client.explain(), client.explain(lookup=1))
"""
        )
        path = os.pathsep.join(sys.path)
        command = [sys.executable, "-c", script]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60,
            env=dict(os.environ, PYTHONPATH=path),
        )  # fmt: skip
        output = done.stdout
        assert output.startswith("4\n"), ("each block can be told from the others", done.stderr)
        ready = [line.split() for line in output.splitlines()[1:5]]
        assert [count for _, count in ready] == ["0"] * 4, "what was listed can't be loaded"
        every = [key.hex() for key in (*keys, *missing)]
        assert not any(key in output for key in every)
        assert {listed[:16] for listed, _ in ready} == {key[:16] for key in every[:4]}
        # The operator sees the full keys.
        listed = listed_keys(daemon, space.index)
        assert {one["key"] for one in listed} == set(every[:4])


def listed_keys(daemon: Daemon, space: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json_of("keys", "--space", str(space), "--socket", daemon.socket)[
        "keys"
    ]
    return found


# --- purge ---------------------------------------------------------------------------------------


def cold(folder: Path) -> str:
    (folder / "cold").mkdir(parents=True, exist_ok=True)
    return (
        f'[warm]\nsize = "64MiB"\n[cold]\ndirectories = ["{folder / "cold"}"]\nsize = "256MiB"\n'
        'write = "through"\nadmission = "all"\n'
    )


def test_purged_blocks_stay_purged_after_a_kill(
    daemon_of: Callable[..., Daemon], tmp_path: Path
) -> None:
    config = cold(tmp_path)
    daemon = daemon_of(folder=tmp_path / "d", config=config)
    with daemon.connect() as client:
        going = saved(client, "going", 700)
        staying = saved(client, "staying", 20)
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= 720)
        number = str(client.open(spec_of("going")).index)
        asked = kvtier("purge", "--space", number, "--socket", daemon.socket)
        assert asked.returncode == 2 and "--yes" in asked.stderr, "nobody was there to say yes"
        assert client.open(spec_of("going")).match(going).ready == 700
        assert client.open(spec_of("staying")).match(staying).ready == 20
        forgotten = sum(listing.forget_space(client, "", int(number)))
        daemon.process.kill()  # immediately: the last answer confirms that the purge persists
        assert forgotten == 700
    daemon.process.wait(60)
    daemon = daemon_of(folder=tmp_path / "d", config=config)
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= 20)
    with daemon.connect() as client:
        for name, keys, there in (("going", going, 0), ("staying", staying, 20)):
            found = client.open(spec_of(name)).match(keys)
            assert found.ready + found.coming == there
    assert daemon.stats()["tiers"]["cold"]["blocks"] == 20


SERVE_WITH_A_SLOW_DISK = """
import asyncio, os, sys
gate = sys.argv.pop(1)
from kvtier_daemon.tiers.cold import tier, tombstones

flush = tier.ColdTier.flush

async def when_open(self):
    with open(gate + ".tries", "a") as file:
        file.write("x")
    while not os.path.exists(gate):
        await asyncio.sleep(0.001)
    return await flush(self)

tier.ColdTier.flush = when_open
tombstones.FORGET_S = 0.01
from kvtier_daemon.cli import main
main()
"""


def test_purge_waits_for_a_disk_that_confirms_late(
    daemon_of: Callable[..., Daemon], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    command = (sys.executable, "-c", SERVE_WITH_A_SLOW_DISK, str(gate), "serve")
    daemon = daemon_of(folder=tmp_path / "d", config=cold(tmp_path), command=command)
    with daemon.connect() as client, ThreadPoolExecutor(1) as pool:
        saved(client, "going", 60)
        daemon.wait_for(on_disk(60))
        purging = pool.submit(kvtier, "purge", "--all", "--yes", "--socket", daemon.socket)
        tries = tmp_path / "gate.tries"
        daemon.wait_for(lambda _: tries.exists() and len(tries.read_text()) > 1)
        assert not purging.done()
        gate.touch()
        done = purging.result()
    assert done.returncode == 0, done
    assert "60 blocks in 1 space are forgotten, and erased from disk" in done.stdout


PIECE = 64


def pieces_on_disk(folder: Path) -> set[bytes]:
    """All aligned pieces of 64 bytes, except zeros, of the frames in segment files, and of the places
    where frames may be."""
    found: set[bytes] = set()
    for path in (folder / "cold" / "segments").rglob("*"):
        if path.is_file():
            text = path.read_bytes()
            end = len(text) - PAGE
            with contextlib.suppress(FrameError):  # a full segment lists its frames at its end
                end = Trailer.decode(text[-PAGE:], Head.decode(text[:PAGE])).table_at
            found |= {text[at : at + PIECE] for at in range(PAGE, end, PIECE)}
    return found - {bytes(PIECE)}


def on_disk(count: int) -> Callable[[dict[str, Any]], bool]:
    return lambda stats: stats["tiers"]["cold"]["blocks"] >= count


@pytest.mark.parametrize(
    ("what", "codec"),
    [
        ("--space", "r32"),
        ("--all", "raw"),
        pytest.param("--space", "raw", marks=pytest.mark.slow),
        pytest.param("--all", "r32", marks=pytest.mark.slow),
    ],
)
def test_no_bytes_of_purged_blocks_remain_on_disk(
    daemon_of: Callable[..., Daemon], tmp_path: Path, codec: str, what: str
) -> None:
    """Neither the saved nor the encoded bytes remain, even if the daemon is killed right after the
    answer. All other blocks are found again."""
    config = f'{cold(tmp_path)}codec = "{codec}"\n'
    daemon = daemon_of(folder=tmp_path / "d", config=config)
    with daemon.connect() as client:
        staying = saved(client, "staying", 20)
        daemon.wait_for(on_disk(20))
        before = pieces_on_disk(tmp_path) if what == "--space" else set()
        going = saved(client, "going", 60)
        daemon.wait_for(on_disk(80))
        written = pieces_on_disk(tmp_path) - before
        assert len(written) > 60, "what is searched for was there"
        number = str(client.open(spec_of("going")).index)
        flags = [what, number] if what == "--space" else [what]
        done = kvtier("purge", *flags, "--yes", "--socket", daemon.socket)
        assert done.returncode == 0, done
        daemon.process.kill()
    daemon.process.wait(60)
    assert not pieces_on_disk(tmp_path) & written
    text = b"".join(path.read_bytes() for path in (tmp_path / "cold").rglob("*") if path.is_file())
    assert not any(key in text for key in going), "a block is its key, again and again"
    assert "erased from disk" in done.stdout
    daemon = daemon_of(folder=tmp_path / "d", config=config)
    left = 20 if what == "--space" else 0
    with daemon.connect() as client:
        daemon.wait_for(on_disk(left))
        space = client.open(spec_of("staying"))
        found = space.match(staying)
        assert found.ready + found.coming == left
        if left:
            deadline = time.monotonic() + 60
            while space.match(staying).ready < left:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            with space.load(staying) as blocks:
                texts = [bytes(block) for block in blocks]
            assert texts == [pattern(key, space.spec.block_bytes) for key in staying]


def test_purge_all_forgets_leased_blocks_too(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of()
    with daemon.connect() as client:
        keys = saved(client, "held", 30)
        space = client.open(spec_of("held"))
        assert space.pin(keys) > 0
        with space.load(keys, deadline_ms=60_000) as blocks:
            json_of("purge", "--all", "--yes", "--socket", daemon.socket)
            assert bytes(blocks[3]) == pattern(keys[3], len(blocks[3]))
            assert space.match(keys).ready == 0
        assert daemon.stats()["tiers"]["warm"]["used_bytes"] == 0


def test_the_question_before_a_purge_names_its_size_and_can_be_declined(
    shared_daemon: Daemon,
) -> None:
    with shared_daemon.connect() as client:
        saved(client, "asked", 12)
        outer, inner = pty.openpty()
        process = subprocess.Popen(
            [*COMMAND, "purge", "--all", "--socket", shared_daemon.socket],
            stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
        )  # fmt: skip
        try:
            os.close(inner)
            text = b""
            while b"Continue?" not in text:
                text += os.read(outer, 4096)
            assert b"blocks in memory and 0 on disk, in " in text
            # Blocks that are added between the question and the read are seen only after the read.
            deadline = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < deadline:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)
            assert process.returncode == 130
        finally:
            process.kill()
            process.wait()
            os.close(outer)


def test_an_interrupted_purge_reports_it_and_can_be_repeated(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvtier_daemon.cli import main

    spec = spec_of("cut", layers=1, kv_heads=1, head_dim=32, block_tokens=1)
    with shared_daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys([3] * 3000)
        space.save(keys, [bytes(spec.block_bytes)] * 3000)
        pieces = 0
        plain_ask = type(client.link).ask

        def ask(link: Any, request: wire.Message, kind: Any) -> Any:
            nonlocal pieces
            pieces += isinstance(request, wire.Purge)
            if pieces == 3:
                raise KeyboardInterrupt
            return plain_ask(link, request, kind)

        flags = ["--space", str(space.index), "--yes", "--socket", shared_daemon.socket]
        with monkeypatch.context() as patch:
            patch.setattr("kvtier.link.Link.ask", ask)
            with pytest.raises(SystemExit) as left:
                main(["purge", *flags])
        assert left.value.code == 130
        assert capsys.readouterr().out.startswith("interrupted: 1,024 blocks are forgotten")
        left_over = json_of("keys", *flags[:2], "--limit", "5000", *flags[3:])["keys"]
        assert len(left_over) == 3000 - 1024
        assert json_of("purge", *flags)["blocks"] == 3000 - 1024


# --- what commands must not accept ----------------------------------------------------------------


def test_doctor_knows_the_configuration_of_the_daemon_that_answers(
    daemon_of: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = daemon_of(folder=tmp_path / "d", config=cold(tmp_path))
    found = json.loads(kvtier("doctor", "--json", "--socket", daemon.socket).stdout)
    by_name = {one["name"]: one["value"] for one in found}
    assert by_name["configuration"] == f"in force in the daemon, from {tmp_path / 'd/kvtier.toml'}"
    assert {"memlock", f"file system of {tmp_path / 'cold'}"} & by_name.keys(), by_name
    assert by_name["open files"].endswith(f" of the daemon, process {daemon.process.pid}")


@pytest.mark.parametrize("term", ["why=nosuch", "kind=nosuch", "what=nosuch", "lookup,why=nosuch"])
def test_monitor_refuses_values_that_no_event_has(shared_daemon: Daemon, term: str) -> None:
    done = kvtier("monitor", "--filter", term, "--limit", "1", "--socket", shared_daemon.socket)
    assert done.returncode == 2 and "nosuch" in done.stderr
    known = {"why": "slower", "kind": "lookup", "what": "committed"}
    assert known[term.partition("=")[0].rpartition(",")[2]] in " ".join(done.stderr.split())


@pytest.mark.parametrize("term", ["=", "why=", "=absent"])
def test_monitor_refuses_a_filter_without_a_field_or_a_value(
    shared_daemon: Daemon, term: str
) -> None:
    done = kvtier("monitor", "--filter", term, "--limit", "1", "--socket", shared_daemon.socket)
    assert done.returncode == 2 and f"{term}: write FIELD=VALUE" in done.stderr


# --- silent problems -----------------------------------------------------------------------------


def test_blocks_lost_unwritten_are_reported_by_status_top_and_doctor(
    daemon_of: Callable[..., Daemon], tmp_path: Path
) -> None:
    config = HTTP + cold(tmp_path).replace('"64MiB"', '"4MiB"')
    daemon = daemon_of(folder=tmp_path / "d", config=config)
    json_of("tier", "drain", "cold", "--socket", daemon.socket)
    with daemon.connect() as client:
        for number in range(3):
            saved(client, "lost", 60, first=number)
        space = client.open(spec_of("lost"))
        assert space.match(space.keys([2] * 60 * 16)).ready == 60
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["unwritten"].get("off", 0) > 0)
    shown = kvtier("status", "--socket", daemon.socket).stdout
    assert "evicted before they were written to disk" in " ".join(shown.split())
    rows = [line.split()[0] for line in shown.splitlines() if line.split()]
    assert rows.index("hit") == rows.index("tokens") + 1, "the total is first"
    shown = kvtier("doctor", "--socket", daemon.socket).stdout
    assert "blocks lost unwritten" in shown and "off " in shown
    lost = "blocks were evicted before they were written to disk"
    shown = kvtier("top", "--once", "--socket", daemon.socket).stdout
    assert lost in " ".join(shown.split()), shown
    (hint,) = [one for one in json.loads(get(daemon, "/status")[2])["hints"] if lost in one]
    page = get(daemon, "/")[2]
    assert 'id="hints"' in page and "status.hints.map" in page
    if (browser := shutil.which("chromium")) is None:
        return
    seen = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}",
         "--timeout=10000", "--virtual-time-budget=4000", "--dump-dom",
         f"http://{daemon.stats()['http']}/"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert hint in html.unescape(seen.stdout), seen.stdout + seen.stderr


# --- monitor -------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_a_monitor(daemon: Daemon) -> None:
    """Wait until `kvtier monitor` is connected. It may not watch yet."""
    deadline = time.monotonic() + 60
    with daemon.connect() as client:
        while True:
            report = client.link.ask(wire.Spaces(client.link.new_id(), "", -1), wire.Report)
            if b"monitor" in bytes(report.stats["clients"]):
                break
            assert time.monotonic() < deadline
            time.sleep(0.02)


def repeat_until(holds: Callable[[], bool], cause: Callable[[], object]) -> None:
    """Cause events until a monitor has shown one: it misses those that come before it watches."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        cause()
        time.sleep(0.01)


def is_readable(file: IO[str] | None) -> bool:
    return bool(select.select([file], [], [], 0)[0])


def printed_until(
    process: subprocess.Popen[str], complete: Callable[[list[dict[str, Any]]], bool]
) -> str:
    """Read the events that a process prints until they are complete. Returns the output."""
    assert process.stdout is not None
    guard = threading.Timer(60, process.kill)
    guard.start()
    printed, events = "", []
    for line in process.stdout:
        printed += line
        events.append(json.loads(line))
        if complete(events):
            break
    guard.cancel()
    return printed


def test_monitor_prints_events(daemon_of: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = daemon_of(folder=tmp_path / "d", config=cold(tmp_path))
    with started("monitor", "--json", "--socket", daemon.socket) as watching:
        repeat_until(lambda: is_readable(watching.stdout), lambda: daemon.connect().close())
        with daemon.connect(name="engine 7") as client:
            keys = saved(client, "watched", 900)  # 56 MiB
            space = client.open(spec_of("watched"))
            space.match(keys)
            space.match(space.keys([9] * 32))
            daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= 900)
            saved(client, "watched", 300, first=1)

        def complete(events: list[dict[str, Any]]) -> bool:
            went = any(e.get("what") == "went" and e["client"] == "engine 7" for e in events)
            demoted = sum(e["blocks"] for e in events if e["kind"] == "demote")
            evicted = sum(e.get("demoted", 0) for e in events if e["kind"] == "evict")
            return went and demoted >= 900 and evicted >= 150

        printed = printed_until(watching, complete)
        watching.send_signal(signal.SIGINT)
        rest, err = watching.communicate(timeout=60)
        out = printed + rest
    assert watching.returncode == 130, err
    events = [json.loads(line) for line in out.splitlines()]
    engine = [event for event in events if event.get("client") == "engine 7"]
    kinds = {event["kind"] for event in engine}
    assert kinds == {"client", "space", "save", "lookup"}
    assert [event["what"] for event in engine if event["kind"] == "client"] == ["came", "went"]
    assert next(event["model"] for event in engine if event["kind"] == "space") == "watched"
    saves = [event for event in engine if event["kind"] == "save"]
    assert (saves[0]["granted"], saves[1]["blocks"]) == (900, 900)
    hit, miss = (event for event in engine if event["kind"] == "lookup")
    assert (hit["ready"], hit["why"]) == (900, "")
    assert (miss["ready"], miss["why"], len(miss["key"])) == (0, "absent", 8)
    moved = {kind: sum(e["blocks"] for e in events if e["kind"] == kind) for kind in ("demote",)}
    assert moved["demote"] >= 900
    assert sum(e.get("demoted", 0) for e in events if e["kind"] == "evict") >= 150
    whole = {key.hex() for key in keys}
    assert not any(key in out for key in whole), "no key is told in full"


def test_monitor_shows_only_the_requested_events(shared_daemon: Daemon) -> None:
    flags = ["--filter", "lookup,space", "--filter", "why=absent", "--limit", "2"]
    with started("monitor", *flags, "--socket", shared_daemon.socket) as watching:
        with shared_daemon.connect() as client:
            keys = saved(client, "filtered", 2)
            space = client.open(spec_of("filtered"))

            def look() -> None:
                space.match(keys)
                space.match(space.keys([5] * 16))

            repeat_until(lambda: watching.poll() is not None, look)
            space.forget(keys)
        out, err = watching.communicate(timeout=60)
    assert watching.returncode == 0, err
    lines = out.splitlines()
    assert len(lines) == 2
    assert all(" lookup " in line and "why absent" in line for line in lines)
    refused = kvtier("monitor", "--filter", "lokup", "--socket", shared_daemon.socket)
    assert refused.returncode == 2 and "'lokup'" in refused.stderr and "lookup" in refused.stderr


def test_monitor_reports_a_filter_that_no_event_can_match(shared_daemon: Daemon) -> None:
    flags = ["--filter", "lookup", "--filter", "wy=absent", "--filter", "tenant=default"]
    with started("monitor", *flags, "--socket", shared_daemon.socket) as watching:
        assert watching.stderr is not None
        with shared_daemon.connect() as client:
            space = client.open(spec_of("mistyped"))
            keys = space.keys([1] * 16)
            repeat_until(lambda: is_readable(watching.stderr), lambda: space.match(keys))
            line = watching.stderr.readline()
            watching.send_signal(signal.SIGINT)
        out, err = watching.communicate(timeout=60)
    assert "events has 'wy'" in line and "why" in line and "'tenant'" not in line
    assert out == err == ""


@pytest.mark.parametrize("command", [["config", "show"], ["status"], ["keys"]])
def test_a_closed_output_is_not_an_error(shared_daemon: Daemon, command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*COMMAND, *command], stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False,
        env=dict(os.environ, KVTIER_SOCKET=shared_daemon.socket),
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_monitor_that_does_not_read_learns_the_number_of_missed_events(
    daemon_of: Callable[..., Daemon],
) -> None:
    daemon = daemon_of()
    with daemon.connect() as slow, daemon.connect() as engine:
        space = engine.open(spec_of("busy"))
        ask = slow.link.tell

        def answer(ticket: int) -> wire.Events:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                replies = slow.link.replies()
                if ticket in replies:
                    reply = replies[ticket][1]
                    assert isinstance(reply, wire.Events)
                    return reply
                select.select([slow.fileno()], [], [], 1)
            raise AssertionError("no events")

        first = ask(wire.Monitor(slow.link.new_id(), ["lookup"]))
        slow.ping()  # the daemon has received it
        keys = space.keys([1] * 16)
        space.match(keys)
        assert answer(first).missed == 0
        before = daemon.process_bytes()
        for _ in range(LIMIT_KEPT + 300):  # no client collects the events
            space.match(keys)
        last = answer(ask(wire.Monitor(slow.link.new_id(), ["lookup"])))
        assert last.missed == 300
        assert len(last.events) == wire.LIMIT_EVENTS
        assert daemon.process_bytes() - before < 16 << 20


def test_a_command_whose_reader_ended_exits_silently(shared_daemon: Daemon) -> None:
    with started("monitor", "--filter", "lookup", "--socket", shared_daemon.socket) as watching:
        assert watching.stdout is not None and watching.stderr is not None
        watching.stdout.close()
        with shared_daemon.connect() as client:
            space = client.open(spec_of("pipe"))
            keys = space.keys([1] * 16)
            repeat_until(lambda: watching.poll() is not None, lambda: space.match(keys))
        assert watching.returncode == 141
        assert watching.stderr.read() == ""
        watching.stdout = None  # closed: it must not be read at the end


def test_a_monitor_whose_reader_ended_needs_no_event_to_exit(shared_daemon: Daemon) -> None:
    with started("monitor", "--filter", "fault", "--socket", shared_daemon.socket) as watching:
        assert watching.stdout is not None and watching.stderr is not None
        wait_for_a_monitor(shared_daemon)
        watching.stdout.close()
        assert watching.wait(60) == 141
        assert watching.stderr.read() == ""
        watching.stdout = None  # closed: it must not be read at the end


# --- top -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", VIEWS)
def test_top_once_fits_eighty_columns(shared_daemon: Daemon, view: str) -> None:
    with shared_daemon.connect(name="engine 5") as client:
        keys = saved(client, "top", 5)
        done = kvtier(
            "top", "--once", "--interval", "0.2", "--view", view, "--socket", shared_daemon.socket,
            COLUMNS="80", PYTHONIOENCODING="utf-8",
        )  # fmt: skip
        client.open(spec_of("top")).forget(keys)
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    shown = {
        "tiers": "warm",
        "hits": "tokens offered",
        "moves": "engines → warm",
        "clients": "engine 5",
    }
    assert shown[view] in done.stdout


def test_top_needs_textual_only_for_its_screen(shared_daemon: Daemon) -> None:
    without = "import sys; sys.modules['textual'] = None; sys.stdout.isatty = lambda: True\n"
    without += "from kvtier_daemon.cli import main; main(sys.argv[1:])"
    place = ["--socket", shared_daemon.socket]
    command = [sys.executable, "-c", without, "top"]
    done = subprocess.run(
        [*command, *place], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "pip install 'textual>=8'" in done.stderr
    done = subprocess.run(
        [*command, "--once", "--interval", "0.2", *place], capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_screen_changes_views_pauses_and_survives_the_daemon() -> None:
    pytest.importorskip("textual")
    from textual.widgets import Static

    from kvtier import Unavailable
    from kvtier_daemon.cli.top_app import Top

    looks = 0
    gone = False

    def look() -> Moment:
        nonlocal looks
        looks += 1
        if gone:
            raise Unavailable("no daemon answers at there")
        tiers = {"warm": {"capacity_bytes": 100, "used_bytes": looks}}
        return Moment(
            float(looks), {"pid": 1, "tiers": tiers, "lookup_tokens": 5, "saved_tokens": 0}
        )

    async def run() -> None:
        nonlocal gone
        history = ScreenHistory()
        history.add(look())
        app = Top(look, history, 0.2, "tiers")

        async def until(holds: Callable[[], bool]) -> None:
            async with asyncio.timeout(60):
                while not holds():
                    await pilot.pause(0.02)

        def text(where: str) -> str:
            return str(app.query_one(where, Static).content)

        async with app.run_test(size=(80, 24)) as pilot:
            await until(lambda: looks >= 3)
            for key, view in (("2", 1), ("right", 2), ("4", 3), ("right", 0), ("left", 3)):
                await pilot.press(key)
                assert app._view == view
            await pilot.press("space")
            await until(lambda: "paused" in text("#views"))
            await pilot.pause(0.5)
            held = looks
            await pilot.pause(0.6)
            assert looks == held
            await pilot.press("space")
            await until(lambda: looks > held)
            gone = True
            await until(lambda: "no daemon answers" in text("#trouble"))
            gone = False
            await until(lambda: not text("#trouble"))
            await pilot.press("plus")
            assert "every 0.4 s" in text("#views")
            await pilot.press("q")

    asyncio.run(run())


@pytest.mark.parametrize("key", [b"q", b"\x03", b""], ids=["q", "Ctrl-C", "SIGTERM"])
def test_top_in_a_terminal_ends_with_q_and_when_interrupted(
    shared_daemon: Daemon, key: bytes
) -> None:
    pytest.importorskip("textual")
    outer, inner = pty.openpty()
    environment = dict(os.environ, TERM="xterm-256color", COLUMNS="80", LINES="24")
    process = subprocess.Popen(
        [*COMMAND, "top", "--socket", shared_daemon.socket],
        stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True,
    )  # fmt: skip
    settings = termios.tcgetattr(inner)
    seen = b""
    deadline = time.monotonic() + 60
    try:
        while b"warm" not in seen:
            assert time.monotonic() < deadline, seen[-500:]
            if select.select([outer], [], [], 0.1)[0]:
                seen += os.read(outer, 65_536)
        assert termios.tcgetattr(inner) != settings
        if not key:
            process.terminate()
        while process.poll() is None:
            assert time.monotonic() < deadline, seen[-500:]
            os.write(outer, key)  # again: top drops what it has not read when it is continued
            while select.select([outer], [], [], 0.1)[0]:
                seen += os.read(outer, 65_536)
        assert process.returncode == (0 if key else 143)
        assert b"Traceback" not in seen
        assert termios.tcgetattr(inner) == settings
    finally:
        process.kill()
        process.wait()
        os.close(inner)
        os.close(outer)


def test_top_gives_the_terminal_back_when_it_is_stopped_and_takes_it_again(
    shared_daemon: Daemon,
) -> None:
    pytest.importorskip("textual")
    outer, inner = pty.openpty()
    shell = subprocess.Popen(
        ["setsid", "--ctty", "bash", "--norc", "-i"], stdin=inner, stdout=inner, stderr=inner,
        env=dict(os.environ, PS1="ready> ", TERM="xterm-256color", COLUMNS="80", LINES="24"),
    )  # fmt: skip
    os.close(inner)
    prompt, seen, at = b"ready> ", b"", 0
    deadline = time.monotonic() + 120

    def until(*texts: bytes, key: bytes = b"") -> bytes:
        """Wait for the first of these texts; return it, and count what precedes it as read. Press the key
        again while nothing is printed: top drops what it has not read when it stops."""
        nonlocal seen, at
        os.write(outer, key)
        while not any(text in seen[at:] for text in texts):
            assert time.monotonic() < deadline, (texts, seen[at:][-2000:])
            if select.select([outer], [], [], 0.5)[0]:
                seen += os.read(outer, 65_536)
            else:
                os.write(outer, key)
        place, text = min((seen.index(text, at), text) for text in texts if text in seen[at:])
        at = place + len(text)
        return text

    def say(line: str) -> None:
        os.write(
            outer, b"\x15" + line.encode() + b"\n"
        )  # Ctrl-U: keys that the shell got instead of top

    def shows(text: bytes, key: bytes = b"") -> None:
        """Wait until top shows this after the key; continue it if something has stopped it meanwhile."""
        while until(text, prompt, key=key) == prompt:
            say("fg")

    def stopped() -> None:
        """Wait until the shell reports that top is stopped."""
        say("jobs")
        while until(b"Stopped", prompt) == prompt:
            say("jobs")
        until(prompt)

    try:
        until(prompt)
        say(shlex.join([*COMMAND, "top", "--socket", shared_daemon.socket]))
        shows(b"blocks")
        until(prompt, key=b"\x1a")  # Ctrl-Z
        stopped()
        say("bg")
        stopped()
        say("fg")
        shows(b"blocks")
        (top,) = map(int, Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split())
        os.kill(top, signal.SIGCONT)  # it runs: no second reader of the terminal may take the keys
        while prompt not in seen[at:]:
            os.kill(top, signal.SIGSTOP)
            assert time.monotonic() < deadline, seen[at:][-2000:]
            if select.select([outer], [], [], 1)[0]:
                seen += os.read(outer, 65_536)
        until(prompt)
        say("fg")
        shows(b"hit rate", key=b"2")
        while Path(f"/proc/{top}").exists():
            until(prompt, key=b"q")
            say("fg")  # if something has stopped it meanwhile
        say("stty -a")
        until(b" icanon ")
        until(b" echo ")
        assert b"Traceback" not in seen
    finally:
        os.close(outer)  # the shell and its jobs get SIGHUP
        shell.wait(60)


# --- completion ----------------------------------------------------------------------------------


def test_a_shell_completes_commands_and_flags() -> None:
    def completed(*words: str) -> set[str]:
        done = kvtier(
            _KVTIER_COMPLETE="complete_bash", COMP_WORDS=" ".join(("kvtier", *words)),
            COMP_CWORD=str(len(words)),
        )  # fmt: skip
        return set(done.stdout.split())

    assert completed("st") == {"status"}
    assert completed("") == set(COMMANDS)
    assert completed("keys", "--sp") == {"--space"}
    assert completed("bench", "c") == {"compare"}
    for shell, mark in (("bash", "complete -o default"), ("zsh", "#compdef"), ("fish", "complete")):
        done = kvtier("completion", shell)
        assert done.returncode == 0 and mark in done.stdout
    assert subprocess.run(
        ["bash", "-n"], input=kvtier("completion", "bash").stdout, text=True, check=False
    ).returncode == 0  # fmt: skip


def test_each_command_has_the_same_description_in_the_list_and_its_help() -> None:
    from kvtier_daemon.cli import loaded, main

    for name, text in COMMANDS.items():
        command = loaded(name)
        assert (command.help or "").splitlines()[0].startswith(text), name
        with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as left:
            main([name, "--help"])
        assert not left.value.code
        inner = getattr(command, "commands", {}).values() or [command]
        for one in inner:
            assert any("--json" in each.opts for each in one.params) or name in (
                "serve",
                "hold-gpu",
            )
