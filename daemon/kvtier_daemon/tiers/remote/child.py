"""The process that talks to the object store: `python -m kvtier_daemon.tiers.remote.child SOCKET BUFFER`.

The client library of the store runs here, so that its crash, its hang and its memory are not the daemon's.
The process ends when the daemon's end of the socket is closed. It can reach the buffer, and none of the
memory of blocks.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator
from typing import Final, Protocol

import msgspec

from kvtier_daemon.tiers.remote.messages import (
    ABSENT,
    FAILED,
    Answer,
    DeleteObjects,
    GetObject,
    HeadObjects,
    ListObjects,
    OpenBucket,
    OpenStore,
    PutObject,
    Request,
    StoreFailedError,
    packed,
    received,
    short_reason,
)

# That the process may allocate; above this it ends, and is started again.
MEMORY_BYTES: Final = 2 << 30


class ObjectStore(Protocol):
    """A store that is being used. Its requests fail with any exception; FileNotFoundError: no such object."""

    async def open(self) -> None:
        """Find out whether the store can be used."""

    async def put(self, request: PutObject) -> None:
        """Write an object from its place in the buffer, also if it exists."""

    async def get(self, request: GetObject) -> Answer:
        """Read an object to its place in the buffer."""

    async def has(self, names: list[str]) -> bytes:
        """Return a byte for each object: 1 if it exists."""

    def pages(self, prefix: str) -> AsyncIterator[list[str]]:
        """Name the objects below this prefix, in pages; none without a list. Fails if nothing can be read."""

    async def delete(self, names: list[str]) -> None:
        """Delete these objects; one that does not exist is no failure."""


def store_of(request: OpenStore, buffer: memoryview) -> ObjectStore:
    """Load the library of this store."""
    if isinstance(request, OpenBucket):
        from kvtier_daemon.tiers.remote.s3 import S3Objects

        return S3Objects(request, buffer)
    try:
        from kvtier_daemon.tiers.remote.mooncake import PooledObjects
    except ImportError as error:
        from kvtier_daemon.config.preflight import missing_library

        raise StoreFailedError(missing_library() or str(error)) from error
    return PooledObjects(request, buffer)


class Serving:
    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, buffer: memoryview
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._buffer = buffer
        self._store: ObjectStore | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsent: list[bytes] = []  # answers

    async def run(self) -> None:
        while True:
            request = msgspec.msgpack.decode(await received(self._reader), type=Request)
            task = asyncio.create_task(self._serve(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, request: Request) -> None:
        number = 0 if isinstance(request, OpenStore) else request.id
        try:
            answer = await self._answer(request)
        except FileNotFoundError as error:
            answer = Answer(number, ABSENT, short_reason(error))
        except Exception as error:  # noqa: BLE001  # the library's errors have no common base
            answer = Answer(number, FAILED, short_reason(error))
        self._send(answer)

    def _send(self, answer: Answer) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(packed(answer))

    def _flush(self) -> None:
        answers, self._unsent = self._unsent, []
        self._writer.write(b"".join(answers))

    async def _answer(self, request: Request) -> Answer:
        if isinstance(request, OpenStore):
            store = store_of(request, self._buffer)
            await store.open()
            self._store = store
            return Answer(0)
        assert self._store is not None, "not open"
        match request:
            case PutObject():
                await self._store.put(request)
                return Answer(request.id, nbytes=request.nbytes)
            case GetObject():
                return await self._store.get(request)
            case HeadObjects(number, names):
                return Answer(number, found=await self._store.has(names))
            case ListObjects():
                return await self._list(self._store, request)
            case DeleteObjects(number, names):
                await self._store.delete(names)
                return Answer(number)

    async def _list(self, store: ObjectStore, request: ListObjects) -> Answer:
        left = request.most
        async for names in store.pages(request.prefix):
            self._send(Answer(request.id, names=names))
            self._flush()
            await self._writer.drain()
            left -= len(names)
            if left <= 0:
                break
        return Answer(request.id)


async def serve(end: socket.socket, buffer: memoryview) -> None:
    reader, writer = await asyncio.open_connection(sock=end)
    await Serving(reader, writer, buffer).run()


def main() -> None:
    # The daemon says when it is over.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, resource.RLIM_INFINITY))
    logging.disable()
    end, buffer_fd = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    buffer = memoryview(mmap.mmap(buffer_fd, 0))
    try:
        asyncio.run(serve(end, buffer))
    except EOFError:
        pass
    finally:
        os._exit(0)  # whatever thread still waits for the network


if __name__ == "__main__":
    main()
