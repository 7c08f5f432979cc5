"""Reads that were asked for, handed to the disks in the planner's order as there is room."""

from __future__ import annotations

import asyncio
import errno
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING

from kvtier.planning import Link, Planner, Verdict

if TYPE_CHECKING:
    from kvtier_daemon.tiers.cold import ColdTier, Incoming, Read
    from kvtier_daemon.tiers.drive import Drive

READ_BLOCKS = 128  # handed over in one go: each costs the loop some 20 us
LIMIT_SESSION = 256  # requests of one session that wait

Request = tuple[int, Hashable]  # a session, and what tells its requests apart
Name = tuple[str, int]  # a tenant, and the id of one of its blocks


class Reads:
    """For all tenants: a disk knows none."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, cold: ColdTier, clock: Callable[[], float]
    ) -> None:
        self.planner = Planner(clock)
        self._loop = loop
        self._cold = cold
        self._waiting: dict[Name, tuple[Incoming, Read]] = {}
        self._requests: dict[int, set[Request]] = {}  # of each session, that wait
        self._pumping: set[Drive] = set()

    def link_of(self, segment: int) -> Link:
        return self._cold.drive_of(segment).link

    def weigh(
        self,
        request: Request,
        fresh: Mapping[Link, int],
        joined: Iterable[Name],
        urgent: bool,
        within_s: float,
        recompute_s: float,
    ) -> Verdict:
        """Whether these are to be read for this request; then `add` them."""
        if len(self._requests.get(request[0], ())) >= LIMIT_SESSION and not self.planner.knows(
            request
        ):
            return Verdict(False, "too_many", 0.0, recompute_s)
        verdict = self.planner.weigh(
            request, fresh, joined, urgent=urgent, within_s=within_s, recompute_s=recompute_s
        )
        if verdict.first and verdict.load:
            self._requests.setdefault(request[0], set()).add(request)
        return verdict

    def add(
        self, request: Request, tenant: str, blocks: list[Incoming], joined: Iterable[Name], done: Read
    ) -> None:  # fmt: skip
        """Read these, in time; `done` is told of each, with ECANCELED where nobody wants it any more."""
        fresh = []
        for block in blocks:
            name, drive = (tenant, block.id), self._cold.drive_of(block.segment)
            self._waiting[name] = block, done
            self._cold.hold(block)  # until it is over, however long it waits for its turn
            fresh.append((name, drive.link, block.payload_bytes))
            self._pump_soon(drive)
        self.planner.add(request, fresh, joined)

    def cancel(self, request: Request) -> None:
        """Nobody waits for this request any more."""
        self._requests.get(request[0], set()).discard(request)
        self._called_back(self.planner.cancel(request))

    def session_over(self, session: int) -> None:
        for request in self._requests.pop(session, set()):
            self._called_back(self.planner.cancel(request))

    def tend(self) -> None:
        """Give up what is too late."""
        self._called_back(self.planner.tend())
        for session in list(self._requests):
            kept = {one for one in self._requests[session] if self.planner.is_waiting(one)}
            self._requests[session] = kept
            if not kept:
                del self._requests[session]

    # --- to the disks ------------------------------------------------------------------------

    def _called_back(self, names: Iterable[Hashable]) -> None:
        for name in names:
            assert isinstance(name, tuple)
            self._tell(name, errno.ECANCELED)

    def _pump_soon(self, drive: Drive) -> None:
        if drive not in self._pumping:
            self._pumping.add(drive)
            self._loop.call_soon(self._pump, drive)

    def _pump(self, drive: Drive) -> None:
        """Hand over what there is room for, some at a time."""
        self._pumping.discard(drive)
        names = self.planner.take(drive.link, READ_BLOCKS)
        reading: dict[str, list[Incoming]] = {}
        for name in names:
            assert isinstance(name, tuple)
            if drive.reads.is_on:
                reading.setdefault(name[0], []).append(self._waiting[name][0])
            else:
                self._over(name, drive, errno.ECANCELED)
        for tenant, blocks in reading.items():
            self._cold.read(blocks, functools.partial(self._have_read, tenant, drive))
        if len(names) == READ_BLOCKS:
            self._pump_soon(drive)

    def _have_read(self, tenant: str, drive: Drive, block: Incoming, code: int) -> None:
        self._over((tenant, block.id), drive, code)

    def _over(self, name: Name, drive: Drive, code: int) -> None:
        self.planner.over(name, not code)
        self._pump_soon(drive)
        self._tell(name, code)

    def _tell(self, name: Name, code: int) -> None:
        block, done = self._waiting.pop(name)
        done(block, code)
        self._cold.let_go(block)
