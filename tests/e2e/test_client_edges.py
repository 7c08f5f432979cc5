"""Edge cases of the client: a close during a save, windows, unwritten slots, wrong arguments, interrupts."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvtier.saving
from kvtier import Lease, Match, Unavailable
from kvtier_kernels import views
from support.daemons import Daemon
from support.specs import pattern, spec_of

TOKENS = list(range(16 * 8))


def filled(space: Any, keys: Any) -> None:
    space.save(keys, [pattern(key, space.spec.block_bytes) for key in keys])


def test_a_close_during_a_save_does_not_free_its_slots(
    daemon_of: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = daemon_of(warm="16MiB")
    spec = spec_of("closing")
    copying, closed = threading.Event(), threading.Event()

    def slow_copy(*_: Any) -> bytes:
        copying.set()
        closed.wait(60)
        return b""

    monkeypatch.setattr(kvtier.saving, "copy_in", slow_copy)
    client = daemon.connect()
    space = client.open(spec)
    keys = space.keys(list(range(16 * 100)))
    failed: list[Exception] = []

    def save() -> None:
        try:
            space.save(keys, bytes(100 * spec.block_bytes))
        except Unavailable as error:
            failed.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    assert copying.wait(60)
    client.close()
    daemon.wait_for(lambda stats: stats["tiers"]["warm"]["states"]["quarantined"] == 100)
    with daemon.connect() as other:
        again = other.open(spec)
        many = again.keys([7] * (16 * 256))
        with again.reserve(many) as saving:
            assert len(saving) == 156, "what is being copied into is not given away"
        assert daemon.stats()["tiers"]["warm"]["states"]["quarantined"] == 100
        closed.set()
        thread.join(60)
        assert failed, "the save says that it failed"
        daemon.connect().close()  # the next client is told that the slots are free
        daemon.wait_for(lambda stats: stats["tiers"]["warm"]["states"]["quarantined"] == 0)


def test_unwritten_slots_are_not_committed(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(warm="16MiB")
    spec = spec_of("unwritten")
    with daemon.connect() as client:
        space = client.open(spec)
        space.save(space.keys([9] * (16 * 256)), b"\7" * (256 * spec.block_bytes))
        keys = space.keys(TOKENS)
        with space.reserve(keys):
            pass
        assert space.match(keys).ready == 0
        with space.reserve(keys) as saving:
            for number, (key, slot) in enumerate(saving.items()):
                if number == 3:
                    break
                slot[:] = pattern(key, spec.block_bytes)
        assert space.match(keys).ready == 3
        with space.load(keys) as blocks:
            assert [bytes(b) for b in blocks] == [pattern(k, spec.block_bytes) for k in keys[:3]]
        with space.reserve(keys) as saving:
            with pytest.raises(ValueError, match="not committed"):
                saving.commit(6)
            saving.commit(2)
        assert space.match(keys).ready == 5
        assert client.stats()["tiers"]["warm"]["states"]["writing"] == 0


def test_slots_requested_late_do_not_overwrite_committed_blocks(shared_daemon: Daemon) -> None:
    spec = spec_of("late look")
    with shared_daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys(TOKENS)
        with space.reserve(keys) as saving:
            extents = client.link.arena.extents
            for key, slot in zip(
                keys, views(extents, saving.slots, spec.block_bytes, True), strict=True
            ):
                slot[:] = pattern(key, spec.block_bytes)
            saving.commit(5)
            assert len(list(saving.values())) == 8
            with pytest.raises(ValueError, match="never written"):
                saving.commit(1)
        assert space.match(keys).ready == 5
        with space.load(keys) as blocks:
            assert [bytes(b) for b in blocks] == [pattern(k, spec.block_bytes) for k in keys[:5]]


def test_a_windows_blocks_keep_their_places_in_the_prefix(shared_daemon: Daemon) -> None:
    spec = spec_of("window", window_tokens=32)
    size = spec.block_bytes
    with shared_daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys(TOKENS)
        filled(space, keys)
        with space.load(keys) as blocks:
            assert len(blocks) == 8 and blocks.first == 6
            assert blocks[:6] == [None] * 6
            assert [bytes(b) for b in blocks[6:] if b] == [pattern(k, size) for k in keys[6:]]
        whole = bytearray(8 * size)
        assert space.load_into(keys, whole) == 8
        assert whole == bytes(6 * size) + b"".join(pattern(k, size) for k in keys[6:])
        each = [bytearray(size) for _ in keys]
        assert space.load_into(keys, each) == 8
        assert b"".join(each) == whole


def test_unknown_groups_and_shards_are_refused_without_a_lease(
    shared_daemon: Daemon,
) -> None:
    with shared_daemon.connect() as client:
        space = client.open(spec_of("places"))
        keys = space.keys(TOKENS)
        filled(space, keys)
        for call in (
            lambda: space.load(keys, group=3),
            lambda: space.load_into(keys, [], shard=1),
            lambda: space.reserve(keys, group=-1),
        ):
            with pytest.raises(ValueError, match="no group"):
                call()
        assert client.stats()["tenants"]["default"]["leases"] == 0


def test_wrong_arguments_are_local_errors_and_the_connection_stays(shared_daemon: Daemon) -> None:
    with shared_daemon.connect() as client:
        space = client.open(spec_of("arguments"))
        keys = space.keys(TOKENS)
        wrong: list[Callable[[], object]] = [
            lambda: client.adopt("text"),  # type: ignore[arg-type]
            lambda: space.hint(keys, "low"),  # type: ignore[arg-type]
            lambda: space.lease(keys, deadline_ms=None),  # type: ignore[arg-type]
            lambda: space.lease(keys, deadline_ms=2**80),
            lambda: space.match(TOKENS),  # type: ignore[arg-type]
            lambda: space.match([b"short", b"er"]),
        ]
        for call in wrong:
            with pytest.raises(TypeError):
                call()
        with pytest.raises(ValueError, match="10 bytes, not 524288"):
            space.save(keys, bytes(10))
        client.ping()


def test_a_view_kept_past_its_load_is_an_error(shared_daemon: Daemon) -> None:
    with shared_daemon.connect() as client:
        space = client.open(spec_of("kept"))
        keys = space.keys(TOKENS)
        filled(space, keys)
        with pytest.raises(BufferError, match="copy instead"), space.load(keys) as blocks:
            kept = np.frombuffer(blocks[0], np.uint8)  # type: ignore[arg-type]
        assert client.stats()["tenants"]["default"]["leases"] == 0
        del kept


@pytest.mark.parametrize("reconnect_s", [2.0, 0.0])
def test_after_an_interrupted_request_the_client_connects_again(
    daemon_of: Callable[..., Daemon], reconnect_s: float
) -> None:
    """As a user of a notebook expects who interrupts a cell."""
    daemon = daemon_of()
    client = daemon.connect(timeout_s=20, reconnect_s=reconnect_s)
    space = client.open(spec_of("interrupted"))
    keys = space.keys(TOKENS)
    filled(space, keys)
    held = space.lease(keys)
    daemon.process.send_signal(signal.SIGSTOP)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            space.lease(keys)  # no caller gets what it grants
    finally:
        signal.signal(signal.SIGALRM, before)
        daemon.process.send_signal(signal.SIGCONT)
    if not reconnect_s:
        with pytest.raises(Unavailable, match="interrupted"):
            client.ping()
    else:
        assert space.match(keys).ready == len(keys)
        assert held.ready == len(keys)
        assert client.stats()["tenants"]["default"]["leases"] == 1
        held.release()
        assert client.stats()["tenants"]["default"]["leases"] == 0
    client.close()


def test_poll_and_begin_calls_never_wait(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of()
    client = daemon.connect()
    space = client.open(spec_of("poll"))
    keys = space.keys(list(range(16 * 512)))
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        # A call that waits would fail with another message: the daemon did not read within 60 s.
        with pytest.raises(Unavailable, match="bytes of requests are waiting"):
            for _ in range(1000):
                space.begin_match(keys)
                assert client.poll() == {}
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    client.close()
    client = daemon.connect()
    locked, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        client.link.lock.acquire()
        locked.set()
        may_end.wait(60)

    holding = threading.Thread(target=hold)
    holding.start()
    assert locked.wait(60)
    assert client.poll() == {}
    assert holding.is_alive(), "the poll waited for the other thread"
    may_end.set()
    holding.join()
    client.link.connection.close(farewell=True)


def test_refused_begin_calls_return_the_requested_type(shared_daemon: Daemon) -> None:
    with shared_daemon.connect() as client:
        space = client.open(spec_of("refused"))
        space.index = 77_777
        keys = space.keys(TOKENS)
        tickets = [space.begin_match(keys), space.begin_lease(keys)]
        found: dict[int, Match | Lease] = {}
        deadline = time.monotonic() + 60
        while len(found) < 2 and time.monotonic() < deadline:
            found |= client.poll()
        match, lease = (found[ticket] for ticket in tickets)
        assert isinstance(match, Match) and "never opened" in match.refused
        assert isinstance(lease, Lease) and "never opened" in lease.refused
        lease.release()


def test_a_child_forked_while_a_lock_is_held_gets_an_error_at_once(shared_daemon: Daemon) -> None:
    with shared_daemon.connect() as client:
        locked, done = threading.Event(), threading.Event()

        def hold() -> None:
            with client.link.lock:
                locked.set()
                done.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        locked.wait()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                client.ping()
            except Unavailable:
                client.close()
                status = 0
            finally:
                os._exit(status)
        deadline = time.monotonic() + 60
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        if not ended[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        done.set()
        thread.join()
        assert ended == (child, 0)
        client.ping()


def test_dropped_clients_leave_no_thread(shared_daemon: Daemon) -> None:
    before = threading.active_count()
    for _ in range(5):
        shared_daemon.connect(populate=True).link.connection.close(farewell=True)
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= before
