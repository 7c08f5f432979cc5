"""Requests whose replies come later: change feeds of a space, and pins."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvtier import InvalidArgument, Refused, wire
from kvtier.client import Changes, Client, Match, Pinned, Space
from support.daemons import Daemon
from support.specs import pattern, spec_of

COLD = '[warm]\nsize = "16MiB"\n[cold]\ndirectories = ["{}"]\nsize = "64MiB"\nwrite = "through"\n'


def filled(space: Space, start: int, blocks: int) -> Any:
    keys = space.keys(list(range(start, start + 16 * blocks)))
    space.save(keys, [pattern(key, space.spec.block_bytes) for key in keys])
    return keys


def answer(client: Client, ticket: int, seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        answers = client.poll()
        if ticket in answers:
            return answers[ticket]
        assert time.monotonic() < deadline, f"no answer to {ticket} in {seconds} s"
        time.sleep(0.005)


class Follower:
    """The blocks according to a feed, as (tier, key)."""

    def __init__(self, client: Client, space: Space) -> None:
        self.client, self.space = client, space
        self.there: set[Any] = set()
        self.ticket = space.begin_watch()

    def until(self, holds: Callable[[set[Any]], bool]) -> None:
        while not holds(self.there):
            told = answer(self.client, self.ticket)
            assert isinstance(told, Changes) and not told.refused and not told.missed
            assert 0 < len(told.changes) <= wire.LIMIT_CHANGES
            for what, tier, _, _, key in told.changes:
                (self.there.add if what == wire.CAME else self.there.discard)((tier, key))
            self.ticket = self.space.begin_watch()


def test_a_feed_reports_the_movements_of_a_block(
    daemon_of: Callable[..., Daemon], tmp_path: Any
) -> None:
    """Saved by another client, evicted, written to the disk, promoted, forgotten."""
    (tmp_path / "cold").mkdir()
    daemon = daemon_of(config=COLD.format(tmp_path / "cold"))
    with daemon.connect() as client, daemon.connect() as other:
        space, same = client.open(spec_of("ways")), other.open(spec_of("ways"))
        follower = Follower(client, space)
        keys = filled(same, 0, 100)
        memory = {(wire.MEMORY, key) for key in keys}
        disk = {(wire.DISK, key) for key in keys}
        follower.until(lambda there: memory <= there)
        for start in (100_000, 200_000):
            daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= 100)
            filled(same, start, 200)
        follower.until(lambda there: disk <= there and not memory & there)
        while same.match(keys).ready < 100:
            time.sleep(0.01)
        follower.until(lambda there: memory <= there)
        assert same.forget(keys) == 100
        follower.until(lambda there: not (memory | disk) & there)


def test_a_client_that_does_not_poll_gets_the_number_of_missed_changes(
    daemon_of: Callable[..., Daemon],
) -> None:
    daemon = daemon_of(warm="16MiB")
    with daemon.connect() as client, daemon.connect() as other:
        space, same = client.open(spec_of("slow")), other.open(spec_of("slow"))
        told = space.begin_watch()
        before = daemon.process_bytes()
        answers: dict[int, Any] = {}
        for round_ in range(80):
            filled(same, round_ * 100_000, 250)
            answers |= client.poll()  # a client that never reads is disconnected
        changes = answers[told] if told in answers else answer(client, told)
        assert 0 < len(changes.changes) <= wire.LIMIT_CHANGES
        later = answer(client, space.begin_watch())
        assert later.missed > 16_000
        assert daemon.process_bytes() - before < 16 << 20


def test_only_one_pending_watch_is_permitted(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(warm="16MiB")
    with daemon.connect() as client:
        space = client.open(spec_of("two"))
        first, second = space.begin_watch(), space.begin_watch()
        assert "already watches" in answer(client, second).refused
        filled(space, 0, 1)
        assert len(answer(client, first).changes) == 1


def test_a_begun_pin_keeps_its_blocks(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(warm="16MiB")
    with daemon.connect() as client:
        space = client.open(spec_of("pins"))
        keys = filled(space, 0, 20)
        pinned = answer(client, space.begin_pin(keys, 60.0))
        assert pinned == Pinned(20)
        with pytest.raises(InvalidArgument, match="ttl_s"):
            space.begin_pin(keys, 0.0)
        with pytest.raises(Refused, match="a pin of 0 s"):
            client.link.ask(
                wire.Pin(client.link.new_id(), space.index, keys.packed, 0), wire.Counted
            )
        for round_ in range(1, 4):
            filled(space, round_ * 100_000, 200)
        assert space.match(keys) == Match(20, 0, 0.0)


def test_the_number_of_watched_spaces_of_a_client_is_limited(
    daemon_of: Callable[..., Daemon],
) -> None:
    """The number of kept changes is bounded for any client."""
    daemon = daemon_of(warm="16MiB")
    with daemon.connect() as client:
        spaces = [client.open(spec_of(f"space {number}")) for number in range(5)]
        tickets = [space.begin_watch() for space in spaces]
        assert "already watches 4 spaces" in answer(client, tickets[4]).refused
        filled(spaces[3], 0, 1)
        assert len(answer(client, tickets[3]).changes) == 1
        filled(spaces[3], 10_000, 1)
        assert len(answer(client, spaces[3].begin_watch()).changes) == 1
