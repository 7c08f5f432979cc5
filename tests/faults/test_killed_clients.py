"""Clients that are killed at any step leave no resources in use."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvtier import Unavailable
from support.daemons import Daemon, running
from support.specs import pattern, spec_of

STEPS = (
    "connected",
    "opened",
    "matched",
    "reserved",
    "copied",
    "half-committed",
    "committed",
    "loading",
    "adopted",
)
KILLS = 1000 if os.environ.get("KVTIER_FAULTS") else 100

# Executes the protocol up to the given step, and waits there until it is killed.
CLIENT = """
import sys, time
from kvtier import Client
from support.specs import pattern, spec_of

def at(step):
    if step == sys.argv[2]:
        print("here", flush=True)
        time.sleep(60)

spec = spec_of("killed")
client = Client.connect(sys.argv[1], populate=False)
at("connected")
space = client.open(spec)
at("opened")
shared = space.keys(list(range(16 * 8)))
space.match(shared)
at("matched")
own = space.keys([int(sys.argv[3])] * 16 + list(range(16 * 15)))
saving = space.reserve(own)
saving.__enter__()
at("reserved")
for key, buffer in saving.items():
    buffer[:] = pattern(key, spec.block_bytes)
at("copied")
saving.commit(5)
at("half-committed")
saving.__exit__(None, None, None)
at("committed")
lease = space.lease(shared, deadline_ms=3_600_000)
at("loading")
client.adopt(lease.token)
at("adopted")
"""


def at_rest(stats: dict[str, Any]) -> bool:
    states = stats["tiers"]["warm"]["states"]
    tenant = stats["tenants"]["default"]
    return (
        not states["writing"] and not states["quarantined"] and not tenant["leases"]
        and tenant["sessions"] <= 1  # the session of the test
    )  # fmt: skip


def test_killed_clients_leave_no_lease_slot_or_descriptor(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(warm="32MiB")
    chance = random.Random(7)
    spec = spec_of("killed")
    with daemon.connect() as watching:
        space = watching.open(spec)
        shared = space.keys(list(range(16 * 8)))
        space.save(shared, [pattern(key, spec.block_bytes) for key in shared])
        daemon.wait_for(at_rest)
        while watching.stats()["sessions"] > 1:  # the connection of the stats request
            time.sleep(0.01)
        files = daemon.open_files()
        plan = [STEPS[n % len(STEPS)] for n in range(KILLS)]
        chance.shuffle(plan)
        at_once = 4
        for first in range(0, KILLS, at_once):
            with contextlib.ExitStack() as stack:
                clients = [
                    stack.enter_context(running(CLIENT, daemon.socket, step, str(first + n)))
                    for n, step in enumerate(plan[first : first + at_once])
                ]
                for client, output in clients:
                    assert output.readline() == "here\n"
                    client.kill()
        stats = daemon.wait_for(at_rest)
        daemon.wait_for_open_files(files)
        assert stats["sessions"] == 1
        # All slots that the clients held can be used again: the arena can be filled.
        assert space.match(shared).ready == 8
        many = space.keys(list(range(10**8, 10**8 + 16 * 504)))
        assert space.save(many, bytes(504 * spec.block_bytes)).stored == 504
        assert space.match(shared).ready == 8, "what was matched last is the last to go"


def test_slots_of_a_stopped_writer_are_not_reused(
    daemon_of: Callable[..., Daemon],
) -> None:
    """A process that closed its connection but still runs may still write: its slots stay in quarantine
    until it ends."""
    daemon = daemon_of(warm="16MiB")
    spec = spec_of("killed")
    code = CLIENT.replace("time.sleep(60)", "client.link.connection._sock.close(); time.sleep(60)")
    with running(code, daemon.socket, "copied", "1") as (_, output):
        assert output.readline() == "here\n"
        daemon.wait_for(lambda stats: stats["tiers"]["warm"]["states"]["quarantined"] == 16)
        turns = daemon.stats()["loop"]["counts"][-1]
        daemon.wait_for(lambda stats: stats["loop"]["counts"][-1] >= turns + 6)
        with daemon.connect() as other:
            space = other.open(spec)
            keys = space.keys(list(range(10**7, 10**7 + 16 * 256)))
            assert space.save(keys, bytes(256 * spec.block_bytes)).stored == 240
    daemon.wait_for(lambda stats: stats["tiers"]["warm"]["states"]["quarantined"] == 0)


def test_slots_of_a_lost_connection_are_free_when_their_client_reconnects(
    daemon_of: Callable[..., Daemon],
) -> None:
    """An engine survives many connections: slots that one of them reserved must not stay lost."""
    daemon = daemon_of(warm="16MiB")
    spec = spec_of("back again")

    def quarantined(stats: dict[str, Any]) -> int:
        return int(stats["tiers"]["warm"]["states"]["quarantined"])

    with daemon.connect() as watching:
        for lost in ("hung up on", "timed out"):
            client = daemon.connect(reconnect_s=0)
            space = client.open(spec)
            saving = space.reserve(space.keys([len(lost)] * 256))
            saving.__enter__()
            if lost == "hung up on":
                client.link.connection._sock.shutdown(socket.SHUT_RDWR)
            else:
                client.link.connection.timeout_s = 0.3
                daemon.process.send_signal(signal.SIGSTOP)
            with pytest.raises(Unavailable):
                client.ping()
            daemon.process.send_signal(signal.SIGCONT)
            if lost == "hung up on":
                daemon.wait_for(lambda stats: quarantined(stats) == 16)
                assert quarantined(watching.stats()) == 16, "another client is no proof"
            client.close()
            with contextlib.suppress(Unavailable):
                saving.__exit__(None, None, None)
            daemon.connect().close()
            daemon.wait_for(at_rest)
