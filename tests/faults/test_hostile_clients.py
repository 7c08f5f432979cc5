"""Clients that send invalid data: they get one clear error, and other clients are not affected."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvtier import KvSpec, wire
from kvtier.units import MIB
from kvtier_daemon.serving.session import ERRORS_S, ClientErrors
from support.daemons import Daemon
from support.effort import effort
from support.raw import Raw
from support.specs import pattern, spec_of

FRAMES = effort(1_000, 100_000, 1_000_000)
TOKENS = list(range(64))
TAKE_S = 3.0  # how long a client may leave answers unread


@pytest.fixture
def bystander(shared_daemon: Daemon) -> Iterator[None]:
    """Another client, whose blocks must be stored before and after."""
    spec = spec_of("bystander")
    with shared_daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys(TOKENS)
        space.save(keys, [pattern(key, spec.block_bytes) for key in keys])
        yield
        with space.load(keys) as blocks:
            assert [bytes(b) for b in blocks] == [pattern(key, spec.block_bytes) for key in keys]
    shared_daemon.wait_for(lambda s: s["tenants"]["default"]["sessions"] == 0)


pytestmark = pytest.mark.usefixtures("bystander")


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 1 << 30), struct.pack("<I", 5) + b"\xc1abcd", struct.pack("<I", 0),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["too long", "garbage", "empty", "http"],
)  # fmt: skip
@pytest.mark.parametrize("hello", [True, False])
def test_an_invalid_frame_ends_the_session_with_one_error(
    shared_daemon: Daemon, data: bytes, hello: bool
) -> None:
    raw = Raw(shared_daemon, hello)
    raw.sock.sendall(data)
    raw.ends_with("bad_frame")


def test_invalid_frames_do_not_fill_the_log(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(warm="16MiB")
    began = time.monotonic()
    for _ in range(50):
        raw = Raw(daemon, hello=False)
        raw.sock.sendall(struct.pack("<I", 0))
        raw.ends_with("bad_frame")
    raw = Raw(daemon, hello=False)
    raw.send(wire.Hello(1, bytes(32), "old"))
    raw.ends_with("wrong_schema")
    assert daemon.stats()["failures"]["bad_frame"] == 50
    windows = 1 + (time.monotonic() - began) // ERRORS_S
    lines = daemon.log.read_text().splitlines()
    assert 1 <= sum(": bad_frame: " in line for line in lines) <= windows
    assert sum(": wrong_schema: " in line for line in lines) == 1, "another error is another line"


def test_errors_that_were_not_logged_are_counted_in_the_next_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = [0.0, 1.0, 9.0, 10.0, 20.0, 20.0]
    errors = ClientErrors(iter(times).__next__)
    for _ in times[1:]:
        errors.log("one", 7, "bad_frame", "why")
    errors.log("two", 8, "bad_frame", "why")
    assert [record.getMessage() for record in caplog.records] == [
        "client 'one' (uid 7): bad_frame: why",
        "client 'one' (uid 7): bad_frame: why; 2 others of uid 7 were not logged",
        "client 'one' (uid 7): bad_frame: why",
        "client 'two' (uid 8): bad_frame: why",
    ]


def test_an_incomplete_message_waits_and_affects_no_other_client(shared_daemon: Daemon) -> None:
    raw = Raw(shared_daemon)
    raw.sock.sendall(wire.encode(wire.Ping(5))[:5])
    with shared_daemon.connect() as client:
        client.ping()
    raw.sock.sendall(wire.encode(wire.Ping(5))[5:])
    assert raw.answer() == wire.Done(5)
    raw.sock.close()


def test_another_schema_is_refused_with_the_version_to_use(shared_daemon: Daemon) -> None:
    raw = Raw(shared_daemon, hello=False)
    raw.send(wire.Hello(1, bytes(32), "old"))
    raw.ends_with("wrong_schema")


def test_nothing_is_answered_before_hello_and_hello_comes_once(shared_daemon: Daemon) -> None:
    raw = Raw(shared_daemon, hello=False)
    raw.send(wire.Ping(3))
    raw.ends_with("bad_request")
    raw = Raw(shared_daemon)
    raw.send(wire.Hello(2, wire.SCHEMA, "again"))
    raw.ends_with("bad_request")


def test_unknown_spaces_and_leases_are_refused_and_the_session_continues(
    shared_daemon: Daemon,
) -> None:
    raw = Raw(shared_daemon)
    key = bytes(32)
    for message, code in [
        (wire.MatchPrefix(2, 7777, key), "unknown_space"),
        (wire.MatchPrefix(2, -1, key), "unknown_space"),
        (wire.Load(3, 7777, key, 10, [0]), "unknown_space"),
        (wire.Reserve(4, 7777, 0, 0, b"", key), "unknown_space"),
        (wire.Commit(5, 1, 0, 1), "unknown_lease"),
        (wire.Abort(6, 12345), "unknown_lease"),
        (wire.Release(7, 2**40), "unknown_lease"),
        (wire.Adopt(8, b"x" * 16, [0]), "unknown_lease"),
        (wire.Pin(9, 7777, key, 10), "unknown_space"),
        (wire.Forget(9, 7777, key), "unknown_space"),
    ]:
        assert raw.refusal(message) == code
    assert raw.ask(wire.Ping(99)) == wire.Done(99)
    raw.sock.close()


def test_invalid_requests_are_refused_and_the_session_continues(
    shared_daemon: Daemon,
) -> None:
    raw = Raw(shared_daemon)
    opened = raw.ask(wire.Open(2, spec_of("senseless")))
    assert isinstance(opened, wire.Opened)
    space, key = opened.space, bytes(32)
    for message in [
        wire.MatchPrefix(3, space, b"short"),
        wire.Load(3, space, key, 0, [0]),
        wire.Load(3, space, key, -5, [0]),
        wire.Load(3, space, key, 10, list(range(300))),
        wire.Reserve(3, space, 1, 0, b"", key),
        wire.Reserve(3, space, 0, 9, b"", key),
        wire.Reserve(3, space, -1, -1, b"", key),
        wire.Reserve(3, space, 0, 0, b"parent", key),
        wire.Reserve(3, space, 0, 0, b"", key, -1),
        wire.Reserve(3, space, 0, 0, b"", key, 1 << 62),
        wire.Reserve(3, space, 0, 0, b"", key * (wire.LIMIT_RESERVED + 1)),
        wire.Hint(3, space, key * (wire.LIMIT_CHANGED + 1), 0.5),
        wire.Forget(3, space, key * (wire.LIMIT_CHANGED + 1)),
        wire.Hint(3, space, key, 7.0),
        wire.Hint(3, space, key, float("nan")),
        wire.Pin(3, space, key, 0),
    ]:
        assert raw.refusal(message) == "bad_request"
    bad = msgspec.structs.replace(spec_of("senseless"), weights="")
    assert raw.refusal(wire.Open(4, bad)) == "bad_spec"
    assert raw.ask(wire.Ping(99)) == wire.Done(99)
    raw.sock.close()


def test_a_lease_of_another_session_is_refused(shared_daemon: Daemon) -> None:
    spec = spec_of("lease-of-others")
    with shared_daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys(TOKENS)
        with space.reserve(keys) as saving:
            raw = Raw(shared_daemon)
            assert raw.refusal(wire.Commit(2, saving._lease, 0, 4)) == "unknown_lease"
            assert raw.refusal(wire.Abort(3, saving._lease)) == "unknown_lease"
            raw.sock.close()
            saving.commit(4)
        lease = space.lease(keys)
        raw = Raw(shared_daemon)
        assert raw.refusal(wire.Release(2, lease._id)) == "unknown_lease"
        raw.sock.close()
        lease.release()
        assert space.match(keys).ready == 4


def is_disconnected(client: Raw) -> bool:
    try:
        client.sock.send(b"x")
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return False


def test_a_client_that_never_reads_is_disconnected_but_a_busy_one_is_not(
    daemon_of: Callable[..., Daemon],
) -> None:
    daemon = daemon_of(config='[warm]\nsize = "64MiB"\nextent = "1MiB"', haste={"TAKE_S": TAKE_S})
    lazy, busy = Raw(daemon), Raw(daemon)
    lazy.sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            lazy.sock.send(wire.encode(wire.Stats(4)) * 64)
    busy.send(*(wire.Ping(number) for number in range(100, 164)))
    answered, started = 0, time.monotonic()
    while time.monotonic() < started + TAKE_S + 0.5 or not is_disconnected(lazy):
        assert time.monotonic() < started + TAKE_S + 60, "the lazy client is still connected"
        # 64 requests are always in flight, so the daemon never sees its socket empty.
        assert busy.answer() is not None, f"hung up on after {time.monotonic() - started} s"
        answered += 1
        busy.send(wire.Ping(200 + answered))
    assert answered > 64
    busy.sock.close()
    lazy.sock.close()


def test_unread_answers_wait_and_delay_further_requests(
    daemon_of: Callable[..., Daemon],
) -> None:
    daemon = daemon_of(warm="64MiB")
    spec = KvSpec.dense(
        model="small",
        layers=1,
        kv_heads=1,
        head_dim=64,
        dtype="bfloat16",
        block_tokens=16,
        weights="r",
    )
    keys = os.urandom(32 * 8192)
    raw = Raw(daemon)
    opened = raw.ask(wire.Open(2, spec))
    assert isinstance(opened, wire.Opened)
    for half in (keys[: 32 * 4096], keys[32 * 4096 :]):
        granted = raw.ask(wire.Reserve(3, opened.space, 0, 0, b"", half))
        assert isinstance(granted, wire.Reserved)
        raw.ask(wire.Commit(4, granted.lease, 0, 4096))
    before = daemon.process_bytes()
    sender = threading.Thread(
        target=lambda: raw.send(
            *(wire.Load(number, opened.space, keys, 60_000, [0]) for number in range(10, 210))
        )
    )
    sender.start()
    time.sleep(0.5)
    with daemon.connect() as other:
        other.ping()
    assert daemon.process_bytes() < before + 32 * MIB, "answers of 40 MiB are not made in advance"
    for number in range(10, 210):
        loaded = raw.answer()
        assert isinstance(loaded, wire.Loaded) and loaded.id == number and loaded.ready == 8192
    sender.join()
    raw.sock.close()


def test_no_name_that_a_client_gives_controls_an_operators_terminal(
    shared_daemon: Daemon,
) -> None:
    with shared_daemon.connect(name="a\x1b[2J\nb\u202e\u200fc\xa0d") as client:
        space = client.open(spec_of("named"))
        space.match(space.keys(TOKENS))
        report = client.link.ask(wire.Spaces(client.link.new_id(), "", -1), wire.Report)
        shown = [one["client"] for one in msgspec.msgpack.decode(report.stats["clients"])]
        assert "a?[2J?b??c\xa0d" in shown
        assert client.explain()["lookups"][0]["client"] == "a?[2J?b??c\xa0d"
        raw = Raw(shared_daemon)
        for number, control in enumerate("\x1b\n\u202e\u200f", 2):
            bad = msgspec.structs.replace(spec_of("named"), model=f"a{control}")
            assert raw.refusal(wire.Open(number, bad)) == "bad_spec"
        raw.sock.close()


def test_descriptors_that_a_client_sends_are_not_kept(shared_daemon: Daemon) -> None:
    raw = Raw(shared_daemon)
    before = shared_daemon.open_files()
    with open("/dev/null", "rb") as null:
        for _ in range(50):
            socket.send_fds(raw.sock, [wire.encode(wire.Ping(5))], [null.fileno()] * 4)
            assert raw.answer() == wire.Done(5)
    shared_daemon.wait_for_open_files(before)
    raw.sock.close()


def mutated(chance: random.Random, frames: list[bytes]) -> bytes:
    """A frame with one fault: bits, length, end, or all of it."""
    frame = bytearray(chance.choice(frames))
    kind = chance.random()
    if kind < 0.5:
        for _ in range(chance.randint(1, 4)):
            frame[chance.randrange(4, len(frame))] = chance.randrange(256)
    elif kind < 0.7:
        body = frame[4 : chance.randint(4, len(frame))]
        frame = bytearray(struct.pack("<I", len(body)) + body)
    elif kind < 0.9:
        body = chance.randbytes(chance.randint(0, 60))
        frame = bytearray(struct.pack("<I", len(body)) + body)
    else:
        frame[chance.randrange(4)] = chance.randrange(256)
    return bytes(frame)


def storm(path: str, hello: bytes, frames: list[bytes], chance: random.Random) -> None:
    """FRAMES connections, each with an invalid frame: the daemon disconnects at the first invalid frame."""
    for _ in range(FRAMES):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(path)
            sock.sendall(hello + mutated(chance, frames))
            sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(1 << 16):
                    pass


def test_fuzzed_frames_end_at_most_their_own_session(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(warm="16MiB")
    chance = random.Random(11)
    key = os.urandom(64)
    frames = [
        wire.encode(message)
        for message in (
            wire.Hello(1, wire.SCHEMA, "fuzz"), wire.Open(2, spec_of("fuzz")), wire.MatchPrefix(3, 0, key),
            wire.Load(4, 0, key, 100, [0]), wire.Adopt(5, bytes(16), [0]), wire.Release(6, 1),
            wire.Reserve(7, 0, 0, 0, b"", key), wire.Commit(8, 1, 0, 1, bytes(16)), wire.Abort(9, 1),
            wire.Pin(10, 0, key, 5), wire.Hint(11, 0, key, 0.5), wire.Forget(12, 0, key),
            wire.Stats(13), wire.Ping(14), wire.Bye(0),
        )
    ]  # fmt: skip
    hello = wire.encode(wire.Hello(1, wire.SCHEMA, "fuzz")) + wire.encode(
        wire.Open(2, spec_of("fuzz"))
    )
    # In a separate process: slots that it was granted and did not return are freed when it ends.
    child = os.fork()
    if child == 0:
        status = 1
        try:
            storm(daemon.socket, hello, frames, chance)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    daemon.wait_for(lambda s: s["tiers"]["warm"]["states"]["quarantined"] == 0)
    assert daemon.process.poll() is None
    with daemon.connect() as client:
        spec = spec_of("after the storm")
        space = client.open(spec)
        keys = space.keys(TOKENS)
        assert space.save(keys, [pattern(k, spec.block_bytes) for k in keys]).stored == 4
        with space.load(keys) as blocks:
            assert [bytes(b) for b in blocks] == [pattern(k, spec.block_bytes) for k in keys]
    stats = daemon.wait_for(lambda s: s["sessions"] == 0)
    assert stats["tiers"]["warm"]["states"]["writing"] == 0
    assert stats["failures"]["too_many"] == 0, "every frame was read by a session"
    assert stats["failures"]["bad_frame"] > FRAMES / 4
    assert stats["failures"]["unknown_lease"] > 0 and stats["failures"]["unknown_space"] > 0
