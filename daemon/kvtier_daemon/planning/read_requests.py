"""Requests that wait for reads, the reads, and the planner's verdict on a request."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtier_daemon.planning.links import DiskLink

WHY = (
    "faster",  # the load is expected to end first
    "unknown",  # the client did not report how long recomputing takes
    "prefetch",  # no request waits for it
    "tried_load",  # it is expected to end last, by little; done to check the estimate
    "tried_compute",  # the same for computing
    "slower",  # recomputing is expected to end first
    "crowded",  # the disk has too many other reads before it
    "unreliable",  # the disk's last reads ended later than was forecast
    "late",  # the load was started and did not end in time
    "too_many",  # too many requests wait already
)
LOADS, COMPUTE = frozenset(WHY[:4]), frozenset(WHY[4:])
Position = tuple[bool, float, int]
NewRead = tuple[Hashable, DiskLink, int]  # block, the link it is read from, bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to load, why, and how long both ways take. `first`: the request had no verdict before."""

    load: bool
    why: str
    load_s: float
    recompute_s: float
    first: bool = True


@dataclass(slots=True, eq=False)
class ReadRequest:
    """A request that waits until all its reads have ended or until its deadline."""

    name: Hashable
    number: int
    urgent: bool
    rank_at: float  # time that defines its position in the order
    deadline: float  # when it gives up
    recompute_s: float  # a load was promised within this time; infinite: no promise
    verdict: Verdict
    decided_at: float
    released_at: float = float("inf")
    bytes_left: Counter[DiskLink] = field(default_factory=Counter)  # read at its position
    announced: Counter[DiskLink] = field(default_factory=Counter)  # of `bytes_left`: not added yet
    reads: dict[PlannedRead, None] = field(default_factory=dict)  # that it waits for
    links: Counter[DiskLink] = field(default_factory=Counter)  # number of these reads per link
    open_lists: int = 0  # lists of reads that are not complete yet
    queued_reads: dict[DiskLink, deque[PlannedRead]] = field(default_factory=dict)
    queued_on: set[DiskLink] = field(default_factory=set)  # links whose queue contains it
    due_at: float = 0.0  # if its reads end later than this, the forecast failed

    @property
    def position(self) -> Position:
        return not self.urgent, self.rank_at, self.number

    @property
    def is_done(self) -> bool:
        """Whether it waits for nothing."""
        return not self.reads and not self.open_lists


@dataclass(slots=True, eq=False)
class PlannedRead:
    """A block to read, at the position of the first request that waits for it."""

    name: Hashable
    link: DiskLink
    nbytes: int
    number: int
    requests: list[ReadRequest] = field(default_factory=list)  # that wait for it, by position
    queued_in: list[ReadRequest] = field(default_factory=list)  # whose `queued_reads` contain it
    submitted: bool = False
    urgent: bool = False  # when it was submitted


def position_of(request: ReadRequest) -> Position:
    return request.position


def bytes_by_link(new: Sequence[NewRead]) -> Counter[DiskLink]:
    """How many bytes of these reads each link reads."""
    total: Counter[DiskLink] = Counter()
    for _, link, nbytes in new:
        total[link] += nbytes
    return total


def alone_s(nbytes: Mapping[DiskLink, int]) -> float:
    """How long these bytes take if nothing else is read."""
    return max((count / link.bytes_s for link, count in nbytes.items()), default=0.0)
