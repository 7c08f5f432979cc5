"""Writes blocks to the store, after they were saved, in the background: no save waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvtier.errors import Refused
from kvtier.key import KEY_BYTES
from kvtier.wire import SLOT
from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.catalog.blocks import ID_BYTES
from kvtier_daemon.catalog.demotion import WritePlan
from kvtier_daemon.codec.base import Codec
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.remote.driver import StoreDriver, StoreProcess
from kvtier_daemon.tiers.remote.known import KnownObjects, names_of
from kvtier_daemon.tiers.remote.messages import DONE, Answer, PutObject
from kvtier_daemon.tiers.remote.objects import encode, object_name
from kvtier_daemon.tiers.remote.places import Place, Places
from kvtier_kernels import Mapping

LIMIT_SAVED: Final = 1 << 16  # blocks that wait; the oldest are dropped
LIMIT_USED: Final = 1024  # prefixes that wait
LIMIT_USED_BYTES: Final = 4 << 20  # of their keys
PORTION: Final = 4  # blocks that are encoded at once: a fraction of a millisecond of the loop
LOOK_BLOCKS: Final = 1024  # of a prefix that are looked up at once
POLL_S: Final = 0.2
GOOD: Final = bytes([1])
ALL, USED, NONE = "all", "used", "none"


def zeros(flags: bytes) -> Iterator[int]:
    """The places of the zeros."""
    at = flags.find(0)
    while at >= 0:
        yield at
        at = flags.find(0, at + 1)


def each_id(ids: array[int]) -> Iterator[bytes]:
    return (array("I", [one]).tobytes() for one in ids)


@dataclass(slots=True, eq=False)
class Sending:
    """A block on its way, and its place in the buffer."""

    plan: WritePlan
    place: Place
    name: bytes
    at: int
    room: int


class Sharer:
    """The writes of one tenant. `memory` has its extents, in their order."""

    def __init__(
        self, tenant: Tenant, driver: StoreDriver, known: KnownObjects, places: Places, codec: Codec,
        threads: ThreadPoolExecutor, memory: Sequence[Mapping], write: str,
    ) -> None:  # fmt: skip
        self.counts: Counter[str] = Counter(written=0, not_written=0, dropped=0)
        self.bytes_written = 0
        self._tenant = tenant
        self._driver = driver
        self._known = known
        self._places = places
        self._codec = codec
        self._threads = threads
        self._memory = memory
        self._write = write
        self._saved = bytearray()  # ids
        self._used: deque[tuple[KnownSpace, bytes]] = deque()
        self._used_bytes = 0
        self._more = asyncio.Event()
        self._room = asyncio.Event()  # in the buffer, after a write has ended
        self._sending: set[bytes] = set()  # names
        self.accepts = True  # blocks that are saved or used from now on
        self._is_sharing = False

    @property
    def queued(self) -> int:
        """How many blocks and prefixes wait."""
        return len(self._saved) // ID_BYTES + len(self._used)

    @property
    def sending(self) -> int:
        return len(self._sending)

    @property
    def left(self) -> int:
        """How many blocks and prefixes are not written yet, at least; 0 if none is."""
        return self.queued + (len(self._sending) or self._is_sharing)

    def reconfigure(self, write: str, codec: Codec) -> None:
        """Use these for what is written from now on."""
        self._write, self._codec = write, codec

    def saved(self, ids: bytes) -> None:
        """These blocks were committed to memory."""
        if self._write == ALL:
            self._add(ids)

    def renamed(self, ids: bytes) -> None:
        """These blocks came from the store, which has them only under another secret."""
        if self._write != NONE:
            self._add(ids)

    def _add(self, ids: bytes) -> None:
        if not self.accepts:
            return
        self._saved += ids
        if (over := len(self._saved) - LIMIT_SAVED * ID_BYTES) > 0:
            del self._saved[:over]
            self.counts["dropped"] += over // ID_BYTES
        self._more.set()

    def used(self, space: KnownSpace, keys: bytes) -> None:
        """A request found these blocks in memory: they were saved before, and are worth sharing."""
        if self._write != USED or not self.accepts:
            return
        self._used.append((space, keys))
        self._used_bytes += len(keys)
        while len(self._used) > LIMIT_USED or self._used_bytes > LIMIT_USED_BYTES:
            _, dropped = self._used.popleft()
            self._used_bytes -= len(dropped)
            self.counts["dropped"] += len(dropped) // KEY_BYTES
        self._more.set()

    async def run(self) -> None:
        """Write until the task is cancelled."""
        while True:
            while not (self._saved or self._used):
                self._more.clear()
                await self._more.wait()
            while not self._driver.is_writable:  # noqa: ASYNC110  # it may be off for long
                await asyncio.sleep(POLL_S)
            self._is_sharing = True
            for ids in self._next():
                await (self.share(ids) if ids else asyncio.sleep(0))
            self._is_sharing = False

    def _next(self) -> Iterator[bytes]:
        """The next blocks, in portions. An empty one comes after many blocks that need not be written."""
        store = self._tenant.catalog.blocks.store
        if self._saved:
            # Some may have been evicted, and their ids reused: then other blocks are shared.
            some = dict.fromkeys(array("I", bytes(self._saved[: PORTION * ID_BYTES])))
            del self._saved[: PORTION * ID_BYTES]
            yield array("I", some).tobytes()
            return
        space, keys = self._used.popleft()
        self._used_bytes -= len(keys)
        for at in range(0, len(keys), LOOK_BLOCKS * KEY_BYTES):
            some_keys = keys[at : at + LOOK_BLOCKS * KEY_BYTES]
            for place in self._places.of(space):
                if space.index < 0:
                    return
                good = self._known.good(names_of(some_keys, place.mask))
                new = b"".join(some_keys[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in zeros(good))
                ids = store.present(space.index, place.group, place.shard, new) if new else b""
                for i in range(0, len(ids), PORTION * ID_BYTES):
                    yield ids[i : i + PORTION * ID_BYTES]
            yield b""

    async def settled(self) -> None:
        """Wait until no block is being written."""
        while self._sending:
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
            sizes: Sequence[int] = [0] * len(sending)
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._threads, self._encode, child, sending)
            try:
                sizes = await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait([work])  # the thread reads the slots
                raise
            finally:
                self._tenant.catalog.blocks.unlease(held)
            for one, nbytes in zip(sending, sizes, strict=True):
                self._send(child, one, nbytes)

    def _begin(self, child: StoreProcess, left: array[int]) -> tuple[list[Sending], bytes]:
        """Take room in the buffer for the first blocks of `left`, as far as there is some. Remove from `left`
        these and those that need not be written. Return what to write, and its ids, which are leased."""
        blocks, store = self._tenant.catalog.blocks, self._tenant.catalog.blocks.store
        ids = b"".join(one for one in each_id(left) if store.ready(one))
        if blocks.expiring.time_of:
            ids = blocks.expiring.lasting(ids)
        lossy = set(array("I", store.lossy(ids)))
        wanted = array("I", (one for one in array("I", ids) if one not in lossy))
        plans = self._tenant.catalog.demotions.described(
            wanted.tobytes(), store.slots(wanted.tobytes())
        )
        sending, held = list[Sending](), array("I")
        del left[:]
        for at, (one, plan) in enumerate(zip(wanted, plans, strict=True)):
            place = self._place_of(plan)
            if place is None:
                continue
            room = place.headers.most_bytes
            if (where := child.writes.take(room)) is None:
                left.extend(wanted[at:])
                break
            name = names_of(plan.identity.key, place.mask)
            self._sending.add(name)
            sending.append(Sending(plan, place, name, where, room))
            held.append(one)
        try:
            blocks.lease([held.tobytes()])
        except Refused:  # too many leases
            for each in sending:
                self._sent(child, each, 0, Answer(0, "not sent"))
            return [], b""
        return sending, held.tobytes()

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
        """Wait until a write of this tenant has ended, or for a moment: others use the buffer too."""
        self._room.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._room.wait(), POLL_S / 10)

    def _encode(self, child: StoreProcess, sending: Sequence[Sending]) -> list[int]:
        """In a thread: write the objects to the buffer; return their sizes, 0 for a damaged block."""
        buffer, sizes = memoryview(child.buffer), list[int]()
        cipher = self._driver.keys.of(self._tenant.name)
        for one in sending:
            extent, _, offset, _ = SLOT.unpack(one.plan.slot)
            block = memoryview(self._memory[extent])[offset : offset + one.place.block_bytes]
            into = buffer[one.at : one.at + one.room]
            plan = one.plan
            nbytes = encode(
                one.place.headers, self._codec, cipher, plan.identity.key, plan.parent, plan.checksum, block,
                into,
            )  # fmt: skip
            sizes.append(nbytes)
        return sizes

    def _send(self, child: StoreProcess, one: Sending, nbytes: int) -> None:
        sent = partial(self._sent, child, one, nbytes)
        if not nbytes or self._driver.child is not child:
            sent(Answer(0, "not sent"))
            return
        request = PutObject(self._driver.next_id(), object_name(one.plan.identity), one.at, nbytes)
        self._driver.ask(request, sent)

    def _sent(self, child: StoreProcess, one: Sending, nbytes: int, answer: Answer) -> None:
        child.writes.give(one.at, one.room)
        self._sending.discard(one.name)
        self._room.set()
        if answer.outcome == DONE:
            self._known.note(one.name, True)
            self._known.trust(one.name)
            self.counts["written"] += 1
            self.bytes_written += nbytes
        else:
            self.counts["not_written"] += 1

    def is_sending(self, names: Iterable[bytes]) -> bool:
        """Whether one of these objects is being written."""
        return bool(self._sending) and not self._sending.isdisjoint(names)
