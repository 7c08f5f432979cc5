"""Why a block is not here: what was noted when it went, and of lookups that came for it. It is bounded."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from kvtier.catalog.spaces import Space
from kvtier.layout import KvSpec
from kvtier_kernels import Notes

NOTES_BYTES = 1 << 20
LIMIT_LOOKUPS = 1024
NEAR_SPACES = 3
FEW_SPACES = 12  # compared in full
LOOK_SPACES = 512  # compared at all: a millisecond

# What `Notes` keeps of a block; the position is the code.
GONE = (
    "",
    "evicted",  # for others; there is no cold tier
    "expired",  # its pin ran out, and then it was evicted
    "forgotten",
    "lost",  # was on disk, in a segment that is used again
    "spoilt",  # was on disk, and its frame was damaged
    "budget",  # evicted, and not on disk: what may be written in a day is written
    "off",  # the same: the disks take nothing
    "slow_disk",  # the same: the disks had not written it yet
    "once",  # the same: it was wanted once, and only what is wanted again is written
)
EVICTED, EXPIRED, FORGOTTEN, LOST, SPOILT, BUDGET, OFF, SLOW_DISK, ONCE = range(1, len(GONE))
UNWRITTEN = GONE[BUDGET:]
BY_POLICY = ("evicted", "expired", *UNWRITTEN)
AND_EVICTED = 0x80  # beside EXPIRED


class Departures:
    """Of one tenant. Time is what `now` was set to."""

    def __init__(self, nbytes: int = NOTES_BYTES) -> None:
        self.now = 0.0
        self._notes = Notes(nbytes)

    def note(self, keys: bytes, code: int) -> None:
        """These blocks go, for this reason, or may go."""
        if code < BUDGET and code != EVICTED:
            self._notes.note(keys, code, int(self.now))
        else:
            pinned = bytes([EXPIRED, EXPIRED | AND_EVICTED])
            self._notes.note(keys, code, int(self.now), pinned, AND_EVICTED)

    def of(self, key: bytes) -> tuple[str, float]:
        """Why this one went, if that is known, and how many seconds ago."""
        code, at = self._notes.of(key)
        return GONE[code & ~AND_EVICTED], max(0.0, self.now - at)

    def memory_bytes(self) -> int:
        return self._notes.memory_bytes()


@dataclass(slots=True)
class Lookup:
    """A match or a load, as it was answered. `missing` is the first block that it did not get; `used`: how
    many blocks of it the client has reported as used since."""

    number: int
    at: float
    client: str
    space: Space
    blocks: int
    ready: int
    coming: int
    why: str
    missing: bytes
    used: int = 0


class Lookups:
    """The last ones of a tenant."""

    def __init__(self) -> None:
        self._last: deque[Lookup] = deque(maxlen=LIMIT_LOOKUPS)
        self._numbers = 0

    def note(
        self, at: float, client: str, space: Space, blocks: int, ready: int, coming: int, why: str,
        missing: bytes,
    ) -> Lookup:  # fmt: skip
        self._numbers += 1
        one = Lookup(self._numbers, at, client, space, blocks, ready, coming, why, missing)
        self._last.append(one)
        return one

    def last(self, count: int) -> list[Lookup]:
        """The last ones, the newest first."""
        return list(self._last)[: -count - 1 : -1]

    def numbered(self, number: int) -> Lookup | None:
        at = number - self._numbers - 1
        return self._last[at] if -len(self._last) <= at < 0 else None


def near(space: Space, others: Sequence[Space]) -> list[dict[str, Any]]:
    """The spaces that hold something and are described most like this one: which fields differ, and how. Of
    many such spaces the last ones are looked at."""
    held = (one for one in reversed(others) if one is not space and one.index >= 0)
    looked_at = list(islice(held, LOOK_SPACES))[::-1]
    few = heapq.nsmallest(FEW_SPACES, looked_at, key=lambda other: _unlike(space.spec, other.spec))
    mine = _fields(space.spec)
    found: list[dict[str, Any]] = []
    for other in few:
        theirs = _fields(other.spec)
        differs = {
            name: {"here": mine.get(name), "there": theirs.get(name)}
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        }
        found.append({"space": other.number, "differs": differs})
    found.sort(key=lambda told: len(told["differs"]))
    return found[:NEAR_SPACES]


def _unlike(one: KvSpec, other: KvSpec) -> int:
    """How many fields differ, roughly."""
    return sum(getattr(one, name) != getattr(other, name) for name in KvSpec.__struct_fields__)


def _fields(spec: KvSpec) -> dict[str, Any]:
    named: dict[str, Any] = msgspec.to_builtins(spec)
    groups = named.pop("cache_groups", [])
    for number, group in enumerate(groups):
        named |= {f"cache_groups[{number}].{name}": value for name, value in group.items()}
    return named
