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
import re
import resource
import signal
import socket
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import msgspec

from kvtier_daemon.tiers.remote.messages import (
    ABSENT,
    BROKEN,
    FAILED,
    TOO_LARGE,
    Answer,
    DeleteObjects,
    GetObject,
    HeadObjects,
    ListObjects,
    OpenStore,
    PutObject,
    Request,
    packed,
    received,
)

if TYPE_CHECKING:
    from obstore.store import S3Store

CONNECT_S: Final = 3.0
HEADS_AT_ONCE: Final = 32
PAGE_NAMES: Final = 1000
MEMORY_BYTES: Final = (
    2 << 30
)  # that the process may allocate; above this it ends, and is started again
STATUS: Final = re.compile(r"status code: (\d+ [A-Za-z ]+?)(?::|$)", re.MULTILINE)
CODE: Final = re.compile(r"<Code>([A-Za-z]+)</Code>")


def reason(error: Exception) -> str:
    """Return a short reason: the library's texts have many lines."""
    text = str(error)
    found = [*STATUS.findall(text)[:1], *CODE.findall(text)[:1]]
    if found:
        return ": ".join(found)
    for word in ("timed out", "dns error", "certificate", "Connection refused", "Connection reset"):
        if word.lower() in text.lower():
            return word
    return text.splitlines()[0][:200].partition(" - ")[2] or text.splitlines()[0][:200]


class Serving:
    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, buffer: memoryview
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._buffer = buffer
        self._store: S3Store | None = None
        self._heads = asyncio.Semaphore(HEADS_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

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
            answer = Answer(number, ABSENT, reason(error))
        except Exception as error:  # noqa: BLE001  # the library's errors have no common base
            answer = Answer(number, FAILED, reason(error))
        self._send(answer)

    def _send(self, answer: Answer) -> None:
        self._writer.write(packed(answer))

    async def _answer(self, request: Request) -> Answer:
        if isinstance(request, OpenStore):
            return await self._open(request)
        import obstore

        store = self._store
        assert store is not None, "not open"
        match request:
            case PutObject(number, name, at, nbytes):
                content = self._buffer[at : at + nbytes]
                await obstore.put_async(store, name, content, use_multipart=False)
                return Answer(number, nbytes=nbytes)
            case GetObject():
                return await self._get(store, request)
            case HeadObjects(number, names):
                found = await asyncio.gather(*(self._has(store, name) for name in names))
                return Answer(number, found=bytes(found))
            case ListObjects():
                return await self._list(store, request)
            case DeleteObjects(number, names):
                await obstore.delete_async(store, names)
                return Answer(number)

    async def _open(self, request: OpenStore) -> Answer:
        import obstore
        from obstore.store import S3Store

        timeout = timedelta(seconds=request.timeout_s)
        options = {"region": request.region, **request.secrets}
        if request.endpoint:
            options["endpoint"] = request.endpoint
        store = S3Store(
            request.bucket,
            prefix=request.prefix or None,
            config=options,  # type: ignore[arg-type]
            client_options={
                "timeout": timeout,
                "connect_timeout": timedelta(seconds=min(CONNECT_S, request.timeout_s)),
                "allow_http": request.endpoint.startswith("http://"),
            },
            # The daemon decides whether something is worth another try.
            retry_config={"max_retries": 0, "retry_timeout": timeout},
        )
        async for _ in obstore.list(store, chunk_size=1):
            break
        self._store = store
        return Answer(0)

    async def _get(self, store: S3Store, request: GetObject) -> Answer:
        import obstore

        began = time.monotonic()
        found = await obstore.get_async(store, request.name)
        first_s, nbytes, at = time.monotonic() - began, int(found.meta["size"]), request.at
        if nbytes > request.room:
            return Answer(request.id, TOO_LARGE, f"{request.name} has {nbytes} bytes")
        try:
            async for piece in found.stream():
                end = at + len(piece)
                if end > request.at + request.room:
                    return Answer(request.id, TOO_LARGE, f"{request.name} has more bytes")
                self._buffer[at:end] = memoryview(piece)
                at = end
        except Exception as error:  # noqa: BLE001  # the library's errors have no common base
            return Answer(request.id, BROKEN, reason(error))
        return Answer(request.id, nbytes=at - request.at, first_s=first_s)

    async def _has(self, store: S3Store, name: str) -> bool:
        import obstore

        async with self._heads:
            try:
                await obstore.head_async(store, name)
            except FileNotFoundError:
                return False
        return True

    async def _list(self, store: S3Store, request: ListObjects) -> Answer:
        import obstore

        left = request.most
        async for page in obstore.list(store, prefix=request.prefix, chunk_size=PAGE_NAMES):
            self._send(Answer(request.id, names=[one["path"] for one in page]))
            await self._writer.drain()
            left -= len(page)
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
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
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
