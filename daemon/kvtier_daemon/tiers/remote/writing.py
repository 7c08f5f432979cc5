"""Encodes blocks and writes their objects to the store. Blocks come from memory, or are copied for it."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvtier.errors import Refused
from kvtier.wire import SLOT
from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.catalog.demotion import WritePlan
from kvtier_daemon.codec.base import Codec
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.base import CopiedBlock, LeavingBlocks
from kvtier_daemon.tiers.remote.driver import StoreDriver, StoreProcess
from kvtier_daemon.tiers.remote.known import KnownObjects, each_of, names_of
from kvtier_daemon.tiers.remote.messages import ABSENT, DONE, FAILED, Answer, PutObject
from kvtier_daemon.tiers.remote.objects import encode, object_name
from kvtier_daemon.tiers.remote.places import Place, Places
from kvtier_kernels import Mapping as MappedExtent
from kvtier_kernels import Store

ROOM_S: Final = 0.02  # between looks for room in the buffer
GOOD: Final = bytes([1])


def is_ready(store: Store, one: bytes) -> bool:
    """Whether this block is in memory. It may have been forgotten while it waited: then its id is free."""
    try:
        return bool(store.ready(one))
    except ValueError:
        return False


def ignore(_: bool) -> None:
    pass


@dataclass(slots=True, eq=False)
class Sending:
    """A block on its way, and its place in the buffer. `block` and `checksum` are set for a copy of a block
    that is not in memory. `ended` is called once: whether the store has the object."""

    id: int
    plan: WritePlan
    place: Place
    name: bytes
    at: int
    room: int
    checksum: bytes
    block: memoryview | None = None
    ended: Callable[[bool], None] = ignore


class ObjectWriter:
    """The writes of one tenant. `memory` has its extents, in their order."""

    def __init__(
        self, tenant: Tenant, driver: StoreDriver, known: KnownObjects, places: Places, codec: Codec,
        threads: ThreadPoolExecutor, memory: Sequence[MappedExtent],
    ) -> None:  # fmt: skip
        self.counts: Counter[str] = Counter(written=0, not_written=0)
        self.bytes_written = 0
        self.codec = codec  # of later writes
        self._tenant = tenant
        self._driver = driver
        self._known = known
        self._places = places
        self._threads = threads
        self._memory = memory
        self._room = asyncio.Event()  # in the buffer, after a write has ended
        self._sending: set[bytes] = set()  # names
        self._copied: set[bytes] = set()  # those of `copy`
        self.must_describe: Callable[[KnownSpace], bool] = lambda space: False
        self.is_described: Callable[[KnownSpace], bool] = lambda space: True
        self.describe: Callable[[KnownSpace], Awaitable[None]]
        self._undescribed: KnownSpace | None = None  # its description comes before its objects

    @property
    def sending(self) -> int:
        return len(self._sending)

    @property
    def copying(self) -> int:
        return len(self._copied)

    def is_sending(self, names: Iterable[bytes]) -> bool:
        """Whether one of these objects is being written."""
        return bool(self._sending) and not self._sending.isdisjoint(names)

    async def settled(self, names: bytes) -> None:
        """Wait until none of these objects is being written."""
        while self.is_sending(each_of(names)):
            await self._wait_for_room()

    async def share(self, ids: bytes) -> None:
        """Write these blocks. Those that cannot be written are dropped."""
        left = array("I", ids)
        while left and (child := self._driver.child) is not None:
            sending, held = self._begin(child, left)
            if not held:
                if left:  # for room
                    await self._wait_for_room()
                continue
            try:
                await self._write(child, sending)
            finally:
                self._tenant.catalog.blocks.unlease(held)

    async def _write(self, child: StoreProcess, sending: Sequence[Sending]) -> None:
        """Encode these blocks, and send them. After the end, their memory is not used."""
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, self._encode, child, sending)
        try:
            sizes = await asyncio.shield(work)
        except BaseException:
            if not work.done():
                await asyncio.wait([work])  # the thread reads the blocks
            self._drop(child, sending)
            raise
        for one, nbytes in zip(sending, sizes, strict=True):
            self._send(child, one, nbytes)

    async def copy(
        self, leaving: LeavingBlocks, ids: bytes, ended: Callable[[int, bool | None], None]
    ) -> None:
        """Write these blocks, which are only in the tier below memory. `ended` gets each id, and whether its
        object was written, None if it need not be. None is written that was forgotten before the end of its
        read."""
        left = array("I", ids)
        while left and (child := self._driver.child) is not None:
            plans, some, left = leaving.plans(left.tobytes()), left, array("I")
            wanted = array("I", (one for one in some if one in plans))
            sending = self._take(child, wanted, [plans[one] for one in wanted], left)
            for one in sending:
                one.ended = partial(ended, one.id)
                self._copied.add(one.name)
            for number in set(some) - {one.id for one in sending} - set(left):
                is_skipped = number in plans and self.is_described(plans[number].space)
                ended(number, None if is_skipped else False)
            if not sending:
                if left:
                    await self._wait_for_room()
                continue
            copies: Mapping[int, CopiedBlock] = {}
            try:
                copies = await leaving.read({one.id: one.plan for one in sending})
            finally:
                self._drop(child, (one for one in sending if one.id not in copies), ABSENT)
            ready = [one for one in sending if one.id in copies]
            for one in ready:
                one.block, one.checksum = copies[one.id]
            await self._write(child, ready)
        for number in left:
            ended(number, False)

    def _begin(self, child: StoreProcess, left: array[int]) -> tuple[list[Sending], bytes]:
        """Take room in the buffer for the first blocks of `left`, as far as there is some. Remove from `left`
        these and those that need not be written. Return what to write, and its ids, which are leased."""
        blocks, store = self._tenant.catalog.blocks, self._tenant.catalog.blocks.store
        each = (array("I", [one]).tobytes() for one in left)
        ids = b"".join(one for one in each if is_ready(store, one))
        if blocks.expiring.time_of:
            ids = blocks.expiring.lasting(ids)
        lossy = set(array("I", store.lossy(ids)))
        wanted = array("I", (one for one in array("I", ids) if one not in lossy))
        plans = self._tenant.catalog.demotions.described(
            wanted.tobytes(), store.slots(wanted.tobytes())
        )
        del left[:]
        sending = self._take(child, wanted, plans, left)
        held = array("I", (one.id for one in sending)).tobytes()
        try:
            blocks.lease([held])
        except Refused:  # too many leases
            self._drop(child, sending)
            return [], b""
        return sending, held

    def _take(
        self, child: StoreProcess, ids: array[int], plans: Sequence[WritePlan], left: array[int]
    ) -> list[Sending]:
        """Take room in the buffer for the first of these blocks; add those without room to `left`."""
        sending = list[Sending]()
        for at, (one, plan) in enumerate(zip(ids, plans, strict=True)):
            place = self._place_of(plan)
            if place is None:
                continue
            if self.must_describe(plan.space):
                self._undescribed = plan.space
                left.extend(ids[at:])
                break
            if not self.is_described(plan.space):
                self.counts["not_written"] += 1
                continue
            room = place.headers.most_bytes
            if (where := child.writes.take(room)) is None:
                left.extend(ids[at:])
                break
            name = names_of(plan.identity.key, place.mask)
            self._sending.add(name)
            sending.append(Sending(one, plan, place, name, where, room, plan.checksum))
        return sending

    def _drop(self, child: StoreProcess, sending: Iterable[Sending], outcome: str = FAILED) -> None:
        """These are not sent."""
        for one in sending:
            self._sent(child, one, 0, Answer(0, outcome))

    def _place_of(self, plan: WritePlan) -> Place | None:
        """The place of this block; None if it need not be written."""
        space, of = plan.space, plan.identity
        places = self._places.of(space)
        if not places:
            return None
        place = places[space.place_of(of.group, of.shard)]
        name = names_of(of.key, place.mask)
        is_known = self._known.good(name) == GOOD or name in self._sending
        if is_known or self._tenant.losses.of(of.space, space.spec, self._tenant.name) is not None:
            return None
        return place

    async def _wait_for_room(self) -> None:
        """Describe a space whose blocks wait for that. Otherwise wait until a write of this tenant has ended,
        or for a moment: others use the buffer too."""
        if self._undescribed is not None:
            space, self._undescribed = self._undescribed, None
            await self.describe(space)
            return
        self._room.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._room.wait(), ROOM_S)

    def _encode(self, child: StoreProcess, sending: Sequence[Sending]) -> list[int]:
        """In a thread: write the objects to the buffer; return their sizes, 0 for a damaged block."""
        buffer, sizes = memoryview(child.buffer), list[int]()
        cipher = self._driver.keys.of(self._tenant.name)
        for one in sending:
            block = one.block
            if block is None:
                extent, _, offset, _ = SLOT.unpack(one.plan.slot)
                block = memoryview(self._memory[extent])[offset : offset + one.place.block_bytes]
            into = buffer[one.at : one.at + one.room]
            nbytes = encode(
                one.place.headers, self.codec, cipher, one.plan.identity.key, one.plan.parent,
                one.checksum, block, into,
            )  # fmt: skip
            sizes.append(nbytes)
        return sizes

    def _send(self, child: StoreProcess, one: Sending, nbytes: int) -> None:
        sent = partial(self._sent, child, one, nbytes)
        if not nbytes or self._driver.child is not child:
            sent(Answer(0, FAILED))
            return
        request = PutObject(self._driver.next_id(), object_name(one.plan.identity), one.at, nbytes)
        self._driver.ask(request, sent)

    def _sent(self, child: StoreProcess, one: Sending, nbytes: int, answer: Answer) -> None:
        child.writes.give(one.at, one.room)
        self._sending.discard(one.name)
        self._copied.discard(one.name)
        self._room.set()
        if answer.outcome == DONE:
            self._known.note(one.name, True)
            self._known.trust(one.name)
            self.counts["written"] += 1
            self.bytes_written += nbytes
        elif answer.outcome != ABSENT:
            self.counts["not_written"] += 1
        one.ended(answer.outcome == DONE)
