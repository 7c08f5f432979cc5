"""Copies of blocks in the memory of a GPU: a client asks for slots there. It maps that memory itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvtier import wire
from kvtier.errors import ProtocolError
from kvtier_kernels import Mapping, fresh

if TYPE_CHECKING:
    from kvtier.client import Client
    from kvtier.link import BothMappings, Link


class HotMemory(NamedTuple):
    """Memory of a GPU that slots name `number`. The taker closes `fd`."""

    number: int
    gpu: str
    nbytes: int
    fd: int


class CopySlots:
    """Slots for copies of blocks, which the client may write until `end`."""

    is_lost = True  # it gets no slots in a later connection

    def __init__(self, link: Link, reserved: wire.Reserved) -> None:
        self.slots = reserved.slots
        self.granted = [
            at for at, outcome in enumerate(reserved.outcomes) if outcome == wire.GRANTED
        ]
        self._link = link
        self._lease = reserved.lease
        link.begin_writing(self)

    def end(self, good: bool) -> None:
        """The copies are complete, or with `good` false nothing writes them. Does not wait. If the state of
        the device is unknown, do not call this: the slots are then held until this process ends."""
        lease, self._lease = self._lease, 0
        if lease:
            try:
                self._link.tell(wire.HotEnd(0, lease, good))
            finally:
                self._link.end_writing(self)

    def again(self, request_id: int) -> None:
        """Slots of an earlier connection are not asked for again."""

    def taken(self, reply: wire.Reply, mappings: BothMappings) -> None:
        """There is no answer, because nothing is asked for."""


class HotClient:
    """The requests of one client about the memory of one GPU. Only for the connection it was made with."""

    def __init__(self, client: Client) -> None:
        self._link = client.link
        self._connection = client.link.connection
        self._tables: list[Mapping | None] = []

    def join(self, gpu: str, shards: Sequence[int]) -> None:
        """Copy blocks of these shards from and to this GPU. Raises Refused if the daemon has no memory for
        this client there in principle."""
        self._link.ask(wire.HotJoin(self._link.new_id(), gpu, list(shards)), wire.Done)

    def arrived(self) -> Iterator[HotMemory | int]:
        """Yield the memory that was added, and the index of memory that is gone, in order."""
        while self._connection.hot:
            event = self._connection.hot.popleft()
            if isinstance(event, int):
                yield event
                continue
            index, gpu, nbytes, fd, table_fd = event
            try:
                table = Mapping(table_fd, os.fstat(table_fd).st_size, False)
            except BaseException:
                os.close(fd)
                raise
            finally:
                os.close(table_fd)
            if not 0 <= index < 1 << 20:
                os.close(fd)
                raise ProtocolError(f"memory {index} of GPU {gpu}: not a valid number")
            self._tables.extend([None] * (index + 1 - len(self._tables)))
            self._tables[index] = table
            yield HotMemory(index, gpu, nbytes, fd)

    def forget(self, number: int) -> None:
        """No slot of this memory is asked about from now on."""
        self._tables[number] = None

    def reserve(self, slots: bytes, again: bool) -> CopySlots | None:
        """Get slots for copies of the blocks in these slots of the arena; None if no block gets one. `again`:
        they were loaded, not saved."""
        taken: list[CopySlots] = []

        def take(reply: wire.Reserved, _: BothMappings) -> None:
            if reply.lease:
                taken.append(CopySlots(self._link, reply))

        request = wire.HotReserve(self._link.new_id(), slots, again)
        self._link.ask(request, wire.Reserved, take)
        return taken[0] if taken else None

    def fresh(self, slots: bytes) -> int:
        """Return how many leading slots still have the same copies. Call it after reading them."""
        return fresh(self._tables, slots)
