"""The queue in front of a policy delays events; it does not change them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvtier_daemon.catalog.blocks import LIMIT_QUEUED, PORTION_BLOCKS, DeferredPolicy
from kvtier_daemon.catalog.policy import make
from kvtier_kernels import Store


class RecordingPolicy:
    """A policy that records its calls."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def tell(*arguments: Any) -> bytes:
            self.events.append((name, *arguments))
            return b""

        return tell


def ids(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def keys(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(32, "little") for number in numbers)


def test_a_queued_event_reaches_the_policy_when_the_queue_is_settled() -> None:
    policy = RecordingPolicy()
    deferred = DeferredPolicy(policy)  # type: ignore[arg-type]
    deferred.now(1.0)
    deferred.wanted(ids(7), b"12345678")
    deferred.held(ids(7))
    deferred.added(ids(8), b"87654321", ids(7))
    deferred.wanted_keys(ids(7, 8), keys(7, 8), 3)
    assert not policy.events
    deferred.settle()
    assert policy.events == [
        ("now", 1.0),
        ("wanted", ids(7), b"12345678"),
        ("held", ids(7)),
        ("added", ids(8), b"87654321", ids(7)),
        ("wanted", ids(7, 8), Store.names_of_keys(keys(7, 8), 3)),
    ]


@pytest.mark.parametrize(
    "call",
    [
        ("left", ids(1)), ("gone", ids(1)), ("demoted", ids(1)), ("hinted", ids(1), 0.5), ("victims", 1),
    ],
)  # fmt: skip
def test_every_other_call_settles_the_queue_first(call: tuple[Any, ...]) -> None:
    policy = RecordingPolicy()
    deferred = DeferredPolicy(policy)  # type: ignore[arg-type]
    deferred.freed(ids(7))
    getattr(deferred, call[0])(*call[1:])
    assert [event[0] for event in policy.events] == ["freed", call[0]]


def test_the_queue_of_an_idle_tenant_has_one_event() -> None:
    policy = RecordingPolicy()
    deferred = DeferredPolicy(policy)  # type: ignore[arg-type]
    for seconds in range(1000):
        deferred.now(float(seconds))
    deferred.held(ids(7))
    deferred.now(2000.0)
    deferred.now(2001.0)
    deferred.settle()
    assert policy.events == [("now", 999.0), ("held", ids(7)), ("now", 2001.0)]


def test_the_queue_is_bounded() -> None:
    policy = RecordingPolicy()
    deferred = DeferredPolicy(policy)  # type: ignore[arg-type]
    batch = ids(*range(1024))
    for _ in range(LIMIT_QUEUED // 1024 + 1):
        deferred.refreshed(batch)
    assert policy.events


def test_an_event_of_many_blocks_arrives_in_portions_the_last_blocks_first() -> None:
    policy = RecordingPolicy()
    deferred = DeferredPolicy(policy)  # type: ignore[arg-type]
    count = 2 * PORTION_BLOCKS + 100
    blocks, parents = ids(*range(count)), ids(*range(1, count + 1))
    names = b"".join(number.to_bytes(8, "little") for number in range(count))
    deferred.added(blocks, names, parents)
    deferred.wanted_keys(blocks, keys(*range(count)), 3)
    deferred.freed(ids(1))
    assert not deferred.settle_short() and not policy.events
    settled = [deferred.settle_portion()]
    assert sum(len(event[1]) for event in policy.events) == 4 * PORTION_BLOCKS
    while not settled[-1]:
        passed = len(policy.events)
        settled.append(deferred.settle_portion())
        assert sum(len(event[1]) for event in policy.events[passed:]) <= 8 * PORTION_BLOCKS
    assert len(settled) == 5
    assert [event[0] for event in policy.events] == ["added"] * 3 + ["wanted"] * 3 + ["freed"]
    for column, whole in ((1, blocks), (2, names), (3, parents)):
        assert b"".join(event[column] for event in policy.events[2::-1]) == whole
    assert b"".join(event[1] for event in policy.events[5:2:-1]) == blocks
    told = b"".join(event[2] for event in policy.events[5:2:-1])
    assert told == Store.names_of_keys(keys(*range(count)), 3)


@pytest.mark.parametrize("name", ["auto", "lru", "lfu", "arc", "s3fifo"])
def test_the_order_of_a_chain_in_portions_is_that_of_the_whole(name: str) -> None:
    """Its last blocks are evicted first, and all of it after a chain that was used before."""
    count = PORTION_BLOCKS + 1000
    old, chain = list(range(500)), list(range(500, 500 + count))
    plain, queued = make(name), DeferredPolicy(make(name))
    for policy in (plain, queued):
        for blocks in (old, chain):
            above = ids(0xFFFFFFFF, *blocks[:-1])
            policy.added(ids(*blocks), Store.names_of_keys(keys(*blocks), 0), above)
    assert plain.victims(1000) == queued.victims(1000)


@pytest.mark.parametrize("name", ["auto", "lru", "lfu", "arc", "s3fifo", "attention"])
def test_victims_are_the_same_as_without_the_queue(name: str) -> None:
    chance = random.Random(5)
    plain, queued = make(name), DeferredPolicy(make(name))
    names = {block: Store.names_of_keys(keys(block), 0) for block in range(300)}
    held: list[int] = []
    for block in range(0, 300, 10):
        chain = list(range(block, block + 10))
        above = ids(0xFFFFFFFF, *chain[:-1])
        for policy in (plain, queued):
            policy.added(ids(*chain), b"".join(names[one] for one in chain), above)
    for step in range(600):
        first = chance.randrange(30) * 10
        chain = list(range(first, first + chance.randint(1, 10)))
        event = chance.choice(
            ("wanted", "wanted", "refreshed", "held", "freed", "now", "settle", "ask")
        )
        if event == "wanted":
            plain.wanted(ids(*chain), b"".join(names[one] for one in chain))
            queued.wanted_keys(ids(*chain), keys(*chain), 0)
        elif event == "held" and first not in held:
            held.append(first)
            chain = list(range(first, first + 10))
            plain.held(ids(*chain))
            queued.held(ids(*chain))
        elif event == "freed" and held:
            first = held.pop()
            chain = list(range(first, first + 10))
            plain.freed(ids(*chain))
            queued.freed(ids(*chain))
        elif event == "refreshed":
            plain.refreshed(ids(*chain))
            queued.refreshed(ids(*chain))
        elif event == "now":
            plain.now(step / 3)
            queued.now(step / 3)
        elif event == "settle":
            queued.settle()
        else:
            assert plain.victims(40) == queued.victims(40)
    assert plain.victims(300) == queued.victims(300)
