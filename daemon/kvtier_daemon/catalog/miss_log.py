"""Why a block is not stored: bounded notes on blocks that were evicted or forgotten."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import islice
from typing import Any

import msgspec

from kvtier.layout import KvSpec
from kvtier_daemon.catalog.spaces import KnownSpace
from kvtier_kernels import Notes

NOTES_BYTES = 1 << 20
NEAR_SPACES = 3
FEW_SPACES = 12  # compared in full
LOOK_SPACES = 512  # compared at all; takes a millisecond

# The reasons in `Notes`; the position is the code.
GONE = (
    "",
    "evicted",  # for other blocks; there is no cold tier
    "expired",  # its pin expired, and then it was evicted
    "forgotten",
    "lost",  # was on disk, in a segment that was reused
    "spoilt",  # its frame on disk was damaged, or its slot was overwritten after the save
    "budget",  # evicted without a copy on disk: the daily write budget is used up
    "off",  # the same: the disks are off
    "slow_disk",  # the same: the disks had not written it yet
    "once",  # the same: it was requested once, and only blocks requested twice are written
)
EVICTED, EXPIRED, FORGOTTEN, LOST, SPOILT, BUDGET, OFF, SLOW_DISK, ONCE = range(1, len(GONE))
UNWRITTEN = GONE[BUDGET:]
BY_POLICY = ("evicted", "expired", *UNWRITTEN)
AND_EVICTED = 0x80  # a flag of EXPIRED


class MissLog:
    """Of one tenant. `now` is the time, and is set from outside."""

    def __init__(self, nbytes: int = NOTES_BYTES) -> None:
        self.now = 0.0
        self._notes = Notes(nbytes)

    def note(self, keys: bytes, code: int) -> None:
        """These blocks go for this reason, or may go."""
        if code < BUDGET and code != EVICTED:
            self._notes.note(keys, code, int(self.now))
        else:
            pinned = bytes([EXPIRED, EXPIRED | AND_EVICTED])
            self._notes.note(keys, code, int(self.now), pinned, AND_EVICTED)

    def of(self, key: bytes) -> tuple[str, float]:
        """Why this block went, if known, and how many seconds ago."""
        code, at = self._notes.of(key)
        return GONE[code & ~AND_EVICTED], max(0.0, self.now - at)

    def memory_bytes(self) -> int:
        return self._notes.memory_bytes()


def near(space: KnownSpace, others: Sequence[KnownSpace]) -> list[dict[str, Any]]:
    """The non-empty spaces whose descriptions are most similar to this one's, with the fields that differ.
    Only the newest spaces are compared."""
    held = (one for one in reversed(others) if one is not space and one.index >= 0)
    compared = list(islice(held, LOOK_SPACES))[::-1]
    few = heapq.nsmallest(FEW_SPACES, compared, key=lambda other: _unlike(space.spec, other.spec))
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
    found.sort(key=lambda one: len(one["differs"]))
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
