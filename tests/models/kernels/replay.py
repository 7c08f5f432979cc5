"""Replays of a trace in plain Python: the model of `replay.cpp`, and the optimum by exhaustive
search."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Protocol

NO_PARENT = 0xFFFFFFFF
NEVER = float("inf")
Request = Sequence[int]


class Policy(Protocol):
    def now(self, seconds: float) -> None: ...
    def added(self, ids: bytes, names: bytes, parents: bytes) -> None: ...
    def wanted(self, ids: bytes, names: bytes) -> None: ...
    def refreshed(self, ids: bytes) -> None: ...
    def gone(self, ids: bytes) -> None: ...
    def victims(self, n: int) -> bytes: ...


def replay(
    requests: Sequence[Request], seconds: Sequence[float], policy: Policy, blocks: int
) -> list[int]:
    """The number of hits of each request in one tier of `blocks` blocks, which starts empty."""
    held: set[int] = set()
    hits = []
    for request, now in zip(requests, seconds, strict=True):
        policy.now(now)
        hits.append(_prefix(request, held))
        present = [block for block in request if block in held]
        fresh = [block for block in request if block not in held]
        above = dict(zip(request, [NO_PARENT, *request], strict=False))
        policy.wanted(_ids(present), _names(present))
        if not fresh:
            continue
        policy.added(_ids(fresh), _names(fresh), _ids([above[block] for block in fresh]))
        policy.refreshed(_ids(request) if present else b"")
        held.update(fresh)
        if len(held) > blocks:
            victims = policy.victims(len(held) - blocks)
            held.difference_update(array("I", victims))
            policy.gone(victims)
    return hits


def optimum(requests: Sequence[Request], blocks: int) -> list[int]:
    """The same with knowledge of the future: evicts the block with the latest next use, and in a
    chain its end."""
    held: dict[int, tuple[float, int]] = {}  # its next use, and its depth
    hits = []
    for index, request in enumerate(requests):
        hits.append(_prefix(request, held))
        for depth, block in enumerate(request):
            later = range(index + 1, len(requests))
            held[block] = next((at for at in later if block in requests[at]), NEVER), depth
        while len(held) > blocks:
            del held[max(held, key=lambda block: held[block])]
    return hits


def best(requests: Sequence[Request], blocks: int) -> int:
    """The highest number of hits, by trying all choices. Only for the smallest traces."""

    @cache
    def after(index: int, held: frozenset[int]) -> int:
        if index == len(requests):
            return 0
        request = requests[index]
        there = held | set(request)
        return _prefix(request, held) + max(
            after(index + 1, kept) for kept in _subsets(tuple(sorted(there)), blocks)
        )

    return after(0, frozenset())


def _subsets(blocks: tuple[int, ...], most: int) -> list[frozenset[int]]:
    """All choices of `most` of them: keeping fewer is never better."""
    found = [frozenset[int]()]
    for block in blocks:
        found += [one | {block} for one in found if len(one) < most]
    size = min(most, len(blocks))
    return [one for one in found if len(one) == size]


def _prefix(
    request: Request, held: set[int] | frozenset[int] | dict[int, tuple[float, int]]
) -> int:
    return next((depth for depth, block in enumerate(request) if block not in held), len(request))


def _ids(blocks: Sequence[int]) -> bytes:
    return array("I", blocks).tobytes()


def _names(blocks: Sequence[int]) -> bytes:
    return b"".join(_mixed(block).to_bytes(8, "little") for block in blocks)


def _mixed(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (1 << 64) - 1
    return x ^ (x >> 31)
