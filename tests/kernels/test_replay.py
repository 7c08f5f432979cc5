"""Replays of traces: the native one, its model, and the optimum."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_daemon.catalog.policy import NAMED, make
from kvtier_kernels import Optimum, Replay, Trace
from models.kernels import replay as reference
from models.policies.lru import LruModel
from models.policies.native import Lru

Requests = list[list[int]]


@st.composite
def chains(draw: st.DrawFn, most: int, longest: int) -> Requests:
    """Requests over a small tree of prefixes: each continues from the root to old and new blocks."""
    children: dict[int, list[int]] = {-1: []}
    requests = []
    for _ in range(draw(st.integers(1, most))):
        at, request = -1, []
        for _ in range(draw(st.integers(0, longest))):
            known = children[at]
            choice = draw(st.integers(0, len(known)))
            if choice == len(known):
                new = len(children) - 1
                known.append(new)
                children[new] = []
            at = known[choice]
            request.append(at)
        requests.append(request)
    return requests


def trace(requests: Sequence[Sequence[int]]) -> Trace:
    names = array("Q", [block for request in requests for block in request])
    lengths = array("I", map(len, requests))
    return Trace(
        names.tobytes(), lengths.tobytes(), array("d", map(float, range(len(requests)))).tobytes()
    )


def played(run: Replay | Optimum) -> list[int]:
    return array("I", run.run(1 << 30)).tolist()


@given(chains(40, 8), st.integers(1, 30))
def test_the_replay_equals_its_model(requests: Requests, blocks: int) -> None:
    want = reference.replay(requests, list(map(float, range(len(requests)))), LruModel(), blocks)
    assert played(Replay(trace(requests), Lru(), blocks)) == want


@given(chains(40, 8), st.integers(1, 30))
def test_an_lru_of_whole_requests_hits_as_much(requests: Requests, blocks: int) -> None:
    held: list[int] = []  # coldest first
    want = []
    for request in requests:
        want.append(next((i for i, block in enumerate(request) if block not in held), len(request)))
        held = [block for block in held if block not in request] + request[::-1]
        held = held[-blocks:]
    assert played(Replay(trace(requests), Lru(), blocks)) == want


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted(NAMED))
@settings(deadline=None)
@given(requests=chains(40, 8), blocks=st.integers(1, 30))
def test_every_policy_replays_like_its_model_and_below_the_optimum(
    name: str, requests: Requests, blocks: int
) -> None:
    seconds = list(map(float, range(len(requests))))
    result = played(Replay(trace(requests), make(name), blocks))
    assert result == reference.replay(requests, seconds, make(name), blocks)
    assert sum(result) <= sum(reference.optimum(requests, blocks))


@given(chains(40, 8), st.integers(1, 30))
def test_the_optimum_equals_its_model(requests: Requests, blocks: int) -> None:
    assert played(Optimum(trace(requests), blocks)) == reference.optimum(requests, blocks)


@given(chains(6, 3), st.integers(1, 4))
def test_no_choice_hits_more_than_the_optimum(requests: Requests, blocks: int) -> None:
    assert sum(played(Optimum(trace(requests), blocks))) == reference.best(requests, blocks)


def test_a_replay_continues_from_its_state() -> None:
    requests = [[0, 1], [0, 2], [0, 1], [0, 2]]
    replay, whole = (Replay(trace(requests), Lru(), 3) for _ in range(2))
    pieces = [array("I", replay.run(n)).tolist() for n in (1, 2, 5, 1)]
    assert pieces == [[0], [1, 2], [2], []] and played(whole) == [0, 1, 2, 2]


def test_a_repeated_block_is_an_error() -> None:
    assert trace([[1, 2], [3, 1, 3]]).repeats == 1
    assert trace([[1, 2], [3, 1]]).repeats is None


def test_names_of_any_size_are_numbered_in_order_of_appearance() -> None:
    top = (1 << 64) - 1
    one = trace([[top, 7], [top, 0]])
    assert array("I", one.nodes()).tolist() == [0, 1, 0, 2]
    assert (one.requests, one.accesses, one.unique) == (2, 4, 3)


@pytest.mark.parametrize(
    ("names", "lengths", "seconds"),
    [(b"1234567", b"", b""), (bytes(8), bytes(4), bytes(8)), (b"", bytes(4), b"")],
)
def test_an_inconsistent_trace_is_refused(names: bytes, lengths: bytes, seconds: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Trace(names, lengths, seconds)


def test_a_policy_that_contains_blocks_is_refused() -> None:
    policy = make("lru")
    policy.added(bytes(4), bytes(8), b"\xff" * 4)
    with pytest.raises(ValueError, match="needs an empty policy"):
        Replay(trace([[1]]), policy, 1)
