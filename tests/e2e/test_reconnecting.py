"""Clients go on over the end and the return of the daemon: no call fails, and no byte is wrong."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier import Keys, Lease, Space, StaleLease, Unavailable, wire
from kvtier.link import ask_delayed
from kvtier.space import Changes
from support.daemons import start_daemon
from support.effort import effort
from support.kept import (
    KEEP_S,
    WAIT_S,
    Loading,
    end,
    folder,
    loading,
    quarantined,
    save,
    start,
    tokens,
)
from support.specs import pattern, spec_of

__all__ = ["folder", "loading"]  # fixtures


@pytest.mark.parametrize("keep_s", [KEEP_S, 0])
def test_no_call_fails_while_the_daemon_ends_and_returns(
    folder: Path, loading: Callable[[str, int], list[Loading]], keep_s: int
) -> None:
    """In 16 MiB, so that saves evict all the time."""
    daemon = start_daemon(folder, keep_s=keep_s, warm="16MiB")
    clients = loading(daemon.socket, 3)
    for round_ in range(effort(2, 30, 300)):
        for one in clients:
            one.wait_for_turns(20)
        end(daemon, signal.SIGTERM if round_ % 3 == 2 else signal.SIGKILL)
        daemon = start_daemon(folder, keep_s=keep_s, warm="16MiB")
    for one in clients:
        one.wait_for_turns(20)
    # Nothing that a client had for writing stays behind while its process lives.
    daemon.wait_for(lambda stats: not stats["tiers"]["warm"]["states"]["quarantined"])
    for counts in [one.stop() for one in clients]:
        assert not counts["failed"], counts
        assert not counts["wrong"] and not counts["returned"], counts
        assert counts["loaded"] and counts["saved"], counts
    assert "internal error" not in daemon.log.read_text()
    daemon.stop()


@pytest.mark.parametrize("keep_s", [KEEP_S, 0])
def test_a_save_goes_on_in_its_slots_if_the_memory_is_kept(folder: Path, keep_s: int) -> None:
    daemon = start(folder, keep_s)
    with daemon.connect(reconnect_s=WAIT_S, timeout_s=WAIT_S) as client:
        space = client.open(spec_of())
        keys = space.keys(tokens(space, 7, 8))
        mapped = list(client.link.arena.extents)
        lost = pytest.raises(StaleLease, match="save again")
        with contextlib.nullcontext() if keep_s else lost, space.reserve(keys) as saving:
            for key in keys[:4]:
                saving[key][:] = pattern(key, space.spec.block_bytes)
            saving.commit(2)
            for _ in range(2):
                end(daemon, signal.SIGKILL)
                daemon = start(folder, keep_s)
                client.ping()
            for key in keys[4:]:
                saving[key][:] = pattern(key, space.spec.block_bytes)
            saving.commit(6)
        assert space.match(keys).ready == (8 if keep_s else 0)
        assert (client.link.arena.extents == mapped) == bool(keep_s), "nothing is mapped again"
        if keep_s:
            with space.load(keys) as blocks:
                assert [bytes(one) for one in blocks if one is not None] == [
                    pattern(key, space.spec.block_bytes) for key in keys
                ]
        assert quarantined(daemon) == 0
    daemon.stop()


def test_a_lost_save_gets_no_slot_of_a_later_one(folder: Path) -> None:
    """A save that a daemon without its memory has ended, another one of the same keys, and another daemon."""
    daemon = start_daemon(folder, keep_s=0)
    with daemon.connect(reconnect_s=WAIT_S, timeout_s=WAIT_S) as client:
        space = client.open(spec_of())
        keys = space.keys(tokens(space, 7, 8))
        with space.reserve(keys):
            end(daemon, signal.SIGKILL)
            daemon = start(folder)
            with space.reserve(keys) as saving:
                for key in keys:
                    saving[key][:] = pattern(key, space.spec.block_bytes)
                end(
                    daemon, signal.SIGTERM
                )  # after a kill, its keeper may not have the new memory yet
                daemon = start(folder)
                client.ping()
        assert space.match(keys).ready == 8
    daemon.stop()


def test_a_commit_whose_answer_is_lost_is_not_repeated(folder: Path) -> None:
    """The daemon ends after it has committed a part: the client commits the rest."""
    daemon = start(folder)
    with daemon.connect(reconnect_s=WAIT_S, timeout_s=WAIT_S) as client:
        space = client.open(spec_of())
        keys = space.keys(tokens(space, 7, 8))
        with space.reserve(keys) as saving:
            for key in keys:
                saving[key][:] = pattern(key, space.spec.block_bytes)
            link = client.link
            link.ask(wire.Commit(link.new_id(), saving._lease, 0, 3), wire.Done)
            end(daemon, signal.SIGKILL)
            daemon = start(folder)
        assert space.match(keys).ready == 8
    daemon.stop()


def test_a_grant_whose_answer_is_lost_is_freed_and_granted_again(folder: Path) -> None:
    daemon = start(folder)
    with daemon.connect(reconnect_s=WAIT_S, timeout_s=WAIT_S) as client:
        space = client.open(spec_of())
        keys = space.keys(tokens(space, 7, 8))
        link = client.link
        asked = wire.Reserve(link.new_id(), space.index, 0, 0, b"", keys.packed)
        link.ask(asked, wire.Reserved)  # and the client does not know it
        end(daemon, signal.SIGKILL)
        daemon = start(folder)
        assert space.save(keys, bytes(8 * space.spec.block_bytes)).stored == 8
    daemon.stop()


def test_slots_are_regained_by_the_process_that_had_them_only(folder: Path) -> None:
    daemon = start(folder)
    with daemon.connect() as client:
        space = client.open(spec_of())
        keys = space.keys(tokens(space, 7, 8))
        with space.reserve(keys):
            end(daemon, signal.SIGKILL)
            daemon = start(folder)
            code = (
                "import sys; from kvtier import Client, wire\n"
                "client = Client.connect(sys.argv[1], populate=False); link = client.link\n"
                "hello = wire.Hello(1, wire.SCHEMA, 'x', False, [], '', resumes=bytes.fromhex(sys.argv[2]))\n"
                "from kvtier.link import NewConnection\n"
                "new = NewConnection(link.caller, 5.0)\n"
                "print(new.ask(hello, wire.Welcome).token == bytes.fromhex(sys.argv[2]))\n"
            )
            token = client.link.welcome.token.hex()
            told = subprocess.check_output([sys.executable, "-c", code, daemon.socket, token])
            assert told == b"False\n" and quarantined(daemon) == 8
            client.ping()
            assert quarantined(daemon) == 0, "they are written to again"
            assert daemon.stats()["tiers"]["warm"]["states"]["writing"] == 8
    daemon.stop()


def test_leases_and_begun_requests_go_on(folder: Path) -> None:
    daemon = start(folder)
    with daemon.connect(reconnect_s=WAIT_S, timeout_s=WAIT_S) as client:
        space = client.open(spec_of())
        blocks = save(client)
        keys = space.keys(tokens(space, 0, len(blocks)))
        lease = space.lease(keys, deadline_ms=600_000)
        watch = space.begin_watch()
        client.ping()
        end(daemon, signal.SIGKILL)
        begun = space.begin_lease(keys)  # its answer is not read
        daemon = start(folder)
        found: dict[int, Any] = {}
        deadline = time.monotonic() + WAIT_S
        while len(found) < 2:
            assert time.monotonic() < deadline
            found |= client.poll()
            time.sleep(0.005)
        assert isinstance(found[begun], Lease) and found[begun].ready == len(blocks)
        found[begun].release()
        assert isinstance(found[watch], Changes) and found[watch].missed, "it must look again"
        assert daemon.stats()["tenants"]["default"]["leases"] == 1, "the lease of before"
        part = lease.part(0, 0)
        assert [bytes(one) for one in lease.views(part, space.block_bytes)] == blocks
        assert lease.fresh(part) == len(blocks)
        lease.release()
        client.ping()
        assert daemon.stats()["tenants"]["default"]["leases"] == 0
    daemon.stop()


def test_a_request_whose_answer_is_delayed_is_sent_again(folder: Path) -> None:
    daemon = start(folder)
    with daemon.connect(reconnect_s=WAIT_S, timeout_s=WAIT_S) as client:
        space, link, found = client.open(spec_of()), client.link, list[wire.Matched]()
        blocks = save(client)
        packed = space.keys(tokens(space, 0, len(blocks))).packed
        daemon.process.send_signal(signal.SIGSTOP)

        def ask() -> None:
            asked = lambda id_: wire.MatchPrefix(id_, space.index, packed)  # noqa: E731
            ask_delayed(link, asked, wire.Matched, lambda reply, _: found.append(reply))

        asking = threading.Thread(target=ask)
        asking.start()
        deadline = time.monotonic() + WAIT_S
        while not link.connection._delayed:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        end(daemon, signal.SIGKILL)
        daemon = start(folder)
        asking.join(WAIT_S)
        assert [one.ready for one in found] == [len(blocks)]
    daemon.stop()


@pytest.mark.parametrize("change", [Space.forget, lambda space, keys: space.hint(keys, 1.0)])
def test_a_change_reaches_its_space_if_the_next_daemon_numbers_spaces_differently(
    folder: Path, change: Callable[[Space, Keys], int]
) -> None:
    daemon = start_daemon(folder, keep_s=0)
    with daemon.connect(reconnect_s=WAIT_S, timeout_s=WAIT_S) as client:
        first = client.open(spec_of("first"))
        space = client.open(spec_of())
        keys, number = space.keys(tokens(space, 7, 8)), space.index
        del first
        end(daemon, signal.SIGKILL)
        daemon = start_daemon(folder, keep_s=0)
        assert change(space, keys) == 0
        assert space.index != number
    daemon.stop()


def test_pins_survive_until_their_deadline(folder: Path) -> None:
    daemon = start(folder, warm="16MiB")
    with daemon.connect(reconnect_s=WAIT_S, timeout_s=WAIT_S) as client:
        space = client.open(spec_of())
        blocks = save(client)
        keys = space.keys(tokens(space, 0, len(blocks)))
        short = space.keys(tokens(space, 500, 4))
        space.save(short, bytes(4 * space.block_bytes))
        assert space.pin(keys, 600.0) == len(blocks) and space.pin(short, 0.5) == 4
        for how in (signal.SIGKILL, signal.SIGTERM):
            end(daemon, how)
            daemon = start(folder, warm="16MiB")
            room = client.stats()["tiers"]["warm"]["capacity_bytes"] // space.block_bytes
            for at in range(0, 2 * room, 48):
                others = space.keys(tokens(space, 10_000 + at, 48))
                space.save(others, bytes(48 * space.block_bytes))
            assert space.match(keys).ready == len(blocks)
        daemon.wait_for(lambda stats: stats["tenants"]["default"]["pinned_bytes"] <= 48 << 16)
        assert space.unpin(keys) == len(blocks)
        end(daemon, signal.SIGKILL)
        daemon = start(folder, warm="16MiB")
        client.ping()
        assert daemon.stats()["tenants"]["default"]["leases"] == 0
    daemon.stop()


def test_a_client_without_reconnection_stays_unavailable(folder: Path) -> None:
    daemon = start(folder)
    client = daemon.connect(reconnect_s=0)
    end(daemon, signal.SIGKILL)
    daemon = start(folder)
    for _ in range(2):
        with pytest.raises(Unavailable):
            client.ping()
    client.close()
    daemon.stop()
