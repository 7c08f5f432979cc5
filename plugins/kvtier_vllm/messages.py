"""What the two sides of the connector tell each other, once a step: plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

Name = TypeVar("Name", int, str)


@dataclass(slots=True)
class Read:
    """Slots of one group and shard, and the engine's blocks that they go to: as many for each slot as the
    group has parts, 0 for what is not wanted."""

    group: int
    block_ids: list[int]
    slots: bytes


@dataclass(slots=True)
class Load:
    """Blocks of one request, for each shard. The scheduler's side holds the lease until every rank has
    answered. `daemon_run` says whose slots these are; `now`: the step that brings this needs them."""

    number: int
    request_id: str
    daemon_run: bytes
    now: bool
    shards: list[list[Read]]


@dataclass(slots=True)
class Write:
    """Consecutive blocks of a prefix in one group, as the engine has them in its pages: as many for each of
    the packed keys as the group has parts."""

    group: int
    block_ids: list[int]
    keys: bytes
    parent: bytes


@dataclass(slots=True)
class Save:
    number: int
    writes: list[Write]


@dataclass(slots=True)
class Step:
    """From the scheduler to every rank. `spec`: the engine's name and its space, until all have opened it.
    `daemon_run`: the daemon that the scheduler is connected to, with `extents` extents. `overwritten`:
    saves whose pages this step gives to another request. `idle`: nothing is computed."""

    number: int
    spec: bytes
    daemon_run: bytes
    extents: int
    loads: list[Load]
    saves: list[Save]
    overwritten: list[int]
    idle: bool


@dataclass(slots=True, frozen=True)
class Seat:
    """What a rank is connected to, and how much of it is mapped."""

    daemon_run: bytes
    identity: bytes
    extents: int


@dataclass(slots=True, frozen=True)
class Copied:
    """A rank is through with a load or a save: when it began and ended, by the host's monotonic clock. Of one
    that came to nothing `nbytes` is 0."""

    number: int
    rank: int
    begun: float
    ended: float
    nbytes: int
    good: bool


@dataclass(slots=True, frozen=True)
class Hole:
    """Blocks are missing of a rank's part of a save: whether to try them again, what was dropped, and whether
    there is no more to it than that the daemon's memory is still being made."""

    again: bool
    drops: Counter[str]
    grows: bool = False

    def add(self, other: Hole) -> Hole:
        """Both, as one. What one rank will not try again is not tried by any."""
        again, grows = self.again and other.again, self.grows and other.grows
        return Hole(again, self.drops + other.drops, grows)


@dataclass(slots=True, frozen=True)
class PagesTold:
    """What a rank's memory looks like, `Pages.digest`, or why it can't be used."""

    digest: str
    why_not: str = ""


@dataclass(slots=True)
class Report:
    """From the ranks to the scheduler: which loads and saves are over, in how many ranks. A rank makes one
    in every step, so nothing of it is a Counter, which takes long to make. `step` is the last one that was
    carried out. `pages` comes with a rank's first one. `failed`: loads that left pages
    unfilled. `holes`: saves of which blocks are missing."""

    step: int = 0
    seats: dict[int, Seat] = field(default_factory=dict)
    loads: dict[int, int] = field(default_factory=dict)
    saves: dict[int, int] = field(default_factory=dict)
    pages: dict[int, PagesTold] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    holes: dict[int, Hole] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    loaded: list[Copied] = field(default_factory=list)
    saved: list[Copied] = field(default_factory=list)
    load_bytes: int = 0
    load_s: float = 0.0

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], Report], tuple[dict[str, Any]]]:
        """What there is to tell: of most steps, its number. A rank sends one in every step."""
        return _report, ({name: told for name in NAMES if (told := getattr(self, name))},)

    def count(self, counts: Mapping[str, int]) -> None:
        """These have happened as well."""
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count

    def add(self, other: Report) -> Report:
        """Both, as one."""
        both = {
            save: self.holes[save].add(hole)
            for save, hole in other.holes.items()
            if save in self.holes
        }
        holes = self.holes | other.holes | both
        return Report(
            max(self.step, other.step), self.seats | other.seats, _sums(self.loads, other.loads),
            _sums(self.saves, other.saves), self.pages | other.pages, self.failed | other.failed, holes,
            _sums(self.counts, other.counts), self.loaded + other.loaded, self.saved + other.saved,
            self.load_bytes + other.load_bytes, self.load_s + other.load_s,
        )  # fmt: skip


NAMES = tuple(field.name for field in fields(Report))


def _sums(one: Mapping[Name, int], other: Mapping[Name, int]) -> dict[Name, int]:
    return dict(Counter(one) + Counter(other))


def _report(told: dict[str, Any]) -> Report:
    return Report(**told)
