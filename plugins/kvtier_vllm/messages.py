"""The messages between the two sides of the connector, one per step in each direction: plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from kvtier_vllm.layout import Layout

Name = TypeVar("Name", int, str)


@dataclass(slots=True)
class ReadOrder:
    """Slots of one group and shard, and the engine's blocks, `parts` for each slot; 0: not needed. `digests`:
    the checksums of the slots' blocks, if they are to be verified. `hot`: the slots of their copies in the
    memory of a GPU, zeros for a block without one; or empty."""

    group: int
    block_ids: list[int]
    slots: bytes
    digests: bytes = b""
    hot: bytes = b""


@dataclass(slots=True)
class DirectOrder:
    """Consecutive blocks of a prefix on disk, which each rank reads itself, and the engine's blocks."""

    block_ids: list[int]
    keys: bytes
    parent: bytes


@dataclass(slots=True)
class LoadOrder:
    """Blocks of one request, for each shard. The scheduler's side holds the lease until every rank has
    reported. `daemon_run`: the run of the daemon that owns the slots; `now`: this step needs the blocks."""

    number: int
    request_id: str
    daemon_run: bytes
    now: bool
    shards: list[list[ReadOrder]]
    direct: DirectOrder | None = None


@dataclass(slots=True)
class WriteOrder:
    """Consecutive blocks of a prefix in one group, and the engine's blocks that contain them: `parts`
    blocks of the group for each of the packed keys."""

    group: int
    block_ids: list[int]
    keys: bytes
    parent: bytes


@dataclass(slots=True)
class Save:
    """Blocks to save. `ttl_s`: the time after which they expire; None: never."""

    number: int
    writes: list[WriteOrder]
    ttl_s: float | None = None


@dataclass(slots=True)
class Step:
    """From the scheduler to every rank. `spec`: the engine's name and its KvSpec, until all ranks have opened
    the space. `daemon_run`: the daemon that the scheduler is connected to, with `extents` extents.
    `overwritten`: saves whose pages this step gives to another request. `idle`: the step computes nothing."""

    number: int
    spec: bytes
    daemon_run: bytes
    extents: int
    loads: list[LoadOrder]
    saves: list[Save]
    overwritten: list[int]
    idle: bool


@dataclass(slots=True, frozen=True)
class RankMapping:
    """The daemon that a rank is connected to, how many of its extents the rank has mapped, and whether it
    reads blocks on disk itself."""

    daemon_run: bytes
    identity: bytes
    extents: int
    direct: bool = False


@dataclass(slots=True, frozen=True)
class Copied:
    """A load or a save has ended in a rank; times of the host's monotonic clock. `blocks`: of all groups.
    If it failed, `nbytes` and `blocks` are 0."""

    number: int
    rank: int
    begun: float
    ended: float
    nbytes: int
    good: bool
    blocks: int = 0


@dataclass(slots=True, frozen=True)
class Hole:
    """Blocks of a save that a rank did not store. `again`: try to save them again; `drops`: blocks per
    reason; `growing`: the only reason is that the daemon is still allocating its memory."""

    again: bool
    drops: Counter[str]
    growing: bool = False

    def add(self, other: Hole) -> Hole:
        """The hole of both ranks. No rank tries again unless all do."""
        again, growing = self.again and other.again, self.growing and other.growing
        return Hole(again, self.drops + other.drops, growing)


@dataclass(slots=True, frozen=True)
class RankPages:
    """The layout and `Pages.digest` of a rank's memory, or the reason why kvtier cannot use that memory."""

    digest: str
    why_not: str = ""
    layout: Layout | None = None


@dataclass(slots=True)
class RankReport:
    """From the ranks to the scheduler: in how many ranks loads and saves have ended. `step`: the last one
    executed. `pages`: in a rank's first report. `failed`: loads that left pages unfilled. `holes`: saves with
    missing blocks. Each rank makes a report in every step, so no field is a Counter: slow to create."""

    step: int = 0
    mappings: dict[int, RankMapping] = field(default_factory=dict)
    loads: dict[int, int] = field(default_factory=dict)
    saves: dict[int, int] = field(default_factory=dict)
    pages: dict[int, RankPages] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    holes: dict[int, Hole] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    loaded: list[Copied] = field(default_factory=list)
    saved: list[Copied] = field(default_factory=list)
    load_bytes: int = 0
    load_s: float = 0.0
    direct_bytes: int = 0
    direct_s: float = 0.0

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], RankReport], tuple[dict[str, Any]]]:
        """Pickle only the fields that are set: the report of most steps contains only its number."""
        return _report, ({name: value for name in NAMES if (value := getattr(self, name))},)

    def count(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count

    def add(self, other: RankReport) -> RankReport:
        """The report of both."""
        both = {
            save: self.holes[save].add(hole)
            for save, hole in other.holes.items()
            if save in self.holes
        }
        holes = self.holes | other.holes | both
        return RankReport(
            max(self.step, other.step), self.mappings | other.mappings, _sums(self.loads, other.loads),
            _sums(self.saves, other.saves), self.pages | other.pages, self.failed | other.failed, holes,
            _sums(self.counts, other.counts), self.loaded + other.loaded, self.saved + other.saved,
            self.load_bytes + other.load_bytes, self.load_s + other.load_s,
            self.direct_bytes + other.direct_bytes, self.direct_s + other.direct_s,
        )  # fmt: skip


NAMES = tuple(field.name for field in fields(RankReport))


def _sums(one: Mapping[Name, int], other: Mapping[Name, int]) -> dict[Name, int]:
    return dict(Counter(one) + Counter(other))


def _report(fields: dict[str, Any]) -> RankReport:
    return RankReport(**fields)
