"""The queue in front of a policy delays events; it does not change them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvtier_daemon.catalog.blocks import LIMIT_QUEUED, DeferredPolicy
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


def test_the_queue_is_bounded() -> None:
    policy = RecordingPolicy()
    deferred = DeferredPolicy(policy)  # type: ignore[arg-type]
    batch = ids(*range(1024))
    for _ in range(LIMIT_QUEUED // 1024 + 1):
        deferred.refreshed(batch)
    assert policy.events


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
