"""A holder whose memory is the host's: for tests of the daemon, which never looks into that memory."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier import wire
from kvtier.client import Client
from kvtier.connection import Connection, connect
from kvtier.hot import HotClient, HotMemory

GPU = "00000000-0000-0000-0000-000000000001"
UNIT = 1 << 16


class HostHolder:
    """Offers memory, and gives each tenant its share."""

    def __init__(self, socket: str, nbytes: int, gpu: str = GPU) -> None:
        self.connection = Connection(connect(socket, 5.0, time.monotonic), time.monotonic, 30.0)
        hello = wire.Hello(1, wire.SCHEMA, "holder", read_only=True)
        self.connection.wait(self.connection.send(hello))
        self.shares: dict[str, int] = {}
        try:
            offer = wire.HotOffer(2, gpu, nbytes, UNIT)
            reply = self.connection.wait(self.connection.send(offer))
            assert isinstance(reply, wire.HotShares)
            self.shares = reply.shares
            for number, (tenant, share) in enumerate(reply.shares.items(), 3):
                self.grant(number, gpu, tenant, share)
        except BaseException:
            self.close()
            raise

    def grant(self, number: int, gpu: str, tenant: str, nbytes: int) -> wire.Reply:
        fd = os.memfd_create(f"gpu {gpu}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            asked = wire.HotGrant(number, gpu, tenant, nbytes)
            return self.connection.wait(self.connection.send_descriptor(asked, fd))
        finally:
            os.close(fd)

    def close(self) -> None:
        self.connection.close(farewell=False)


class HostMemory:
    """The memory that a client of the daemon has joined, mapped."""

    def __init__(self, client: Client, gpu: str = GPU, shards: tuple[int, ...] = (0,)) -> None:
        self.hot = HotClient(client)
        self.client = client
        self.memory: dict[int, mmap.mmap] = {}
        self.gone: list[int] = []
        self.hot.join(gpu, shards)
        self.follow()

    def follow(self) -> None:
        for event in self.hot.arrived():
            if isinstance(event, HotMemory):
                self.memory[event.number] = mmap.mmap(event.fd, event.nbytes)
                os.close(event.fd)
            else:
                self.gone.append(event)

    def write(self, slots: bytes, blocks: list[bytes]) -> None:
        for (number, _, offset, _), block in zip(wire.SLOT.iter_unpack(slots), blocks, strict=True):
            self.memory[number][offset : offset + len(block)] = block

    def read(self, slots: bytes, nbytes: int) -> list[bytes | None]:
        """The copies in these slots; None for zeros."""
        return [
            self.memory[number][offset : offset + nbytes] if generation else None
            for number, _, offset, generation in wire.SLOT.iter_unpack(slots)
        ]


@contextmanager
def held(socket: str, nbytes: int, gpu: str = GPU) -> Iterator[HostHolder]:
    holder = HostHolder(socket, nbytes, gpu)
    try:
        yield holder
    finally:
        holder.close()
