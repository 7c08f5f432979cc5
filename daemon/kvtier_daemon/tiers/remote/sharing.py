"""Writes blocks to the store, after they were saved, in the background: no save waits for it."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
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
from kvtier_daemon.tiers.remote.known import NAME_BYTES, KnownObjects, names_of
from kvtier_daemon.tiers.remote.messages import DONE, Answer, DeleteObjects, PutObject
from kvtier_daemon.tiers.remote.objects import encode, object_name
from kvtier_daemon.tiers.remote.places import Place, Places
from kvtier_kernels import Mapping

LIMIT_SAVED: Final = 1 << 16  # blocks that wait; the oldest are dropped
LIMIT_USED: Final = 1024  # prefixes that wait
LIMIT_USED_BYTES: Final = 4 << 20  # of their keys
PORTION: Final = 4  # blocks that are encoded at once: a fraction of a millisecond of the loop
POLL_S: Final = 0.2
GOOD: Final = bytes([1])
ALL, USED, NONE = "all", "used", "none"


@dataclass(slots=True, eq=False)
class Sending:
    """A block on its way, and its place in the buffer."""

    plan: WritePlan
    place: Place
    name: bytes
    at: int
    room: int


class Sharer:
    """The writes and the forgets of one tenant. `memory` has its extents, in their order."""

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
        if self._write != ALL or not self.accepts:
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
                await self._share(ids)
            self._is_sharing = False

    def _next(self) -> Iterator[bytes]:
        """The next blocks, in portions."""
        store = self._tenant.catalog.blocks.store
        if self._saved:
            some = array("I", bytes(self._saved[: PORTION * ID_BYTES]))
            del self._saved[: PORTION * ID_BYTES]
            # Some may have been evicted, and their ids reused: then other blocks are shared.
            each = (array("I", [one]).tobytes() for one in dict.fromkeys(some))
            yield b"".join(one for one in each if store.ready(one))
            return
        space, keys = self._used.popleft()
        self._used_bytes -= len(keys)
        step = PORTION * KEY_BYTES
        for at in range(0, len(keys), step):
            for place in self._places.of(space):
                if space.index < 0:
                    return
                names = names_of(keys[at : at + step], place.mask)
                new = b"".join(
                    keys[at + i * KEY_BYTES : at + (i + 1) * KEY_BYTES]
                    for i, is_known in enumerate(self._known.good(names))
                    if not is_known
                )
                if new:
                    yield store.present(space.index, place.group, place.shard, new)

    async def _share(self, ids: bytes) -> None:
        """Write these blocks, which are READY. Those that cannot be written are dropped."""
        blocks, store = self._tenant.catalog.blocks, self._tenant.catalog.blocks.store
        if blocks.expiring.time_of:
            ids = blocks.expiring.lasting(ids)
        lossy = set(array("I", store.lossy(ids)))
        ids = array("I", (one for one in array("I", ids) if one not in lossy)).tobytes()
        if not ids:
            return
        try:
            blocks.lease([ids])
        except Refused:  # too many leases
            return
        sending: list[Sending] = []
        child = self._driver.child
        try:
            plans = self._tenant.catalog.demotions.described(ids, store.slots(ids))
            for plan in plans:
                if child is not None and (one := await self._begin(child, plan)) is not None:
                    sending.append(one)
            loop = asyncio.get_running_loop()
            sizes = [0] * len(sending)
            if child is not None and sending:
                work = loop.run_in_executor(self._threads, self._encode, child, sending)
                try:
                    sizes = await asyncio.shield(work)
                except asyncio.CancelledError:
                    await asyncio.wait([work])  # the thread reads the slots
                    raise
        finally:
            blocks.unlease(ids)
        for one, nbytes in zip(sending, sizes, strict=True):
            assert child is not None
            self._send(child, one, nbytes)

    async def _begin(self, child: StoreProcess, plan: WritePlan) -> Sending | None:
        """Take room in the buffer for this block, unless it needs not be written."""
        space, of = plan.space, plan.identity
        places = self._places.of(space)
        if not places:
            return None
        place = places[space.place_of(of.group, of.shard)]
        name = names_of(of.key, place.mask)
        is_known = self._known.good(name) == GOOD or name in self._sending
        if is_known or self._tenant.losses.of(of.space, space.spec, self._tenant.name) is not None:
            return None
        room = place.headers.most_bytes
        self._sending.add(name)
        while (at := child.writes.take(room)) is None:
            await asyncio.sleep(POLL_S / 10)
            if self._driver.child is not child:
                self._sending.discard(name)
                return None
        return Sending(plan, place, name, at, room)

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
        def sent(answer: Answer) -> None:
            child.writes.give(one.at, one.room)
            self._sending.discard(one.name)
            if answer.outcome == DONE:
                self._known.note(one.name, True)
                self._known.trust(one.name)
                self.counts["written"] += 1
                self.bytes_written += nbytes
            else:
                self.counts["not_written"] += 1

        if not nbytes or self._driver.child is not child:
            sent(Answer(0, "not sent"))
            return
        request = PutObject(self._driver.next_id(), object_name(one.plan.identity), one.at, nbytes)
        self._driver.ask(request, sent)

    # --- forgets -----------------------------------------------------------------------------

    def forget(self, space: KnownSpace, keys: bytes, done: Callable[[str], None] | None) -> bytes:
        """Delete the objects of these blocks, after those of them that are being written. Later `done` gets
        the failure, or an empty text. Return the names."""
        objects, names = list[str](), list[bytes]()
        for place in self._places.of(space):
            names.append(names_of(keys, place.mask))
            objects += [
                object_name(place.identity(space, keys[at : at + KEY_BYTES]))
                for at in range(0, len(keys), KEY_BYTES)
            ]
        packed = b"".join(names)
        self._known.note(packed, False)
        self._delete(objects, packed, done)
        return packed

    def _delete(self, objects: list[str], names: bytes, done: Callable[[str], None] | None) -> None:
        each = (names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES))
        if self._sending and not self._sending.isdisjoint(each):
            asyncio.get_running_loop().call_later(
                POLL_S / 4, partial(self._delete, objects, names, done)
            )
            return

        def deleted(answer: Answer) -> None:
            self._known.note(names, False)
            if done is not None:
                done(answer.text and f"the remote store: {answer.text}")

        self._driver.ask(DeleteObjects(self._driver.next_id(), objects), deleted)
