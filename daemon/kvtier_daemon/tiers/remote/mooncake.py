"""Objects in a Mooncake Store: memory that hosts lend, pooled by a master. Runs in the process of the store.

The client copies between the buffer, which is registered with it, and the memory of other hosts, over TCP or
RDMA. Its calls block, so they run in threads, and each call takes the requests that have arrived since the
last one. A call cannot be cancelled, and writes to the buffer until it ends: a request is answered after its
call. A call that takes too long makes the daemon replace the process, and with it the buffer.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, Generic, TypeVar

from mooncake.store import MooncakeDistributedStore

from kvtier_daemon.tiers.remote.messages import (
    ABSENT,
    CONNECT_S,
    FAILED,
    LOST,
    TOO_LARGE,
    Answer,
    GetObject,
    OpenPool,
    PutObject,
    StoreFailedError,
    be_nice,
)

# Error codes of the client.
FULL, WRONG_SIZE, NOT_FOUND, NO_TRANSFER = -200, -600, -704, -800
TEXTS: Final = {
    FULL: "the pool is full",
    NO_TRANSFER: "a transfer failed",
    -900: "the master does not answer",
}
BATCH_BYTES: Final = 16 << 20  # of one call: the blocks of one are verified during the next
AT_ONCE: Final = 2  # calls of reads, and of writes: one asks the master while the other one waits
# A call of the client waits actively: the client's own threads, which transfer the data, go before it. The
# daemon's thread that encodes (+10) goes before writes.
READS_NICE, WRITES_NICE = 10, 15
OWN_BYTES: Final = 1 << 20  # of the client's own buffer, which nothing uses
T = TypeVar("T", GetObject, PutObject)
U = TypeVar("U")


def reason_of(code: int) -> str:
    return TEXTS.get(code, f"error {code} of Mooncake's client")


class Batches(Generic[T]):
    """Passes requests to `call`, many at once, in a thread. `size` returns the bytes of one."""

    def __init__(
        self, call: Callable[[list[T]], list[int]], size: Callable[[T], int], nice: int, timeout_s: float
    ) -> None:  # fmt: skip
        self._call: Callable[[list[T]], list[int]] = call
        self._size: Callable[[T], int] = size
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(AT_ONCE, initializer=be_nice, initargs=(nice,))
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[T, asyncio.Future[int], float]] = []
        self._running = 0

    def result(self, request: T) -> asyncio.Future[int]:
        """Return what `call` will return for this request. It fails if its turn does not come in time: then
        nothing uses its place in the buffer."""
        future: asyncio.Future[int] = self._loop.create_future()
        self._waiting.append((request, future, self._loop.time() + self._timeout_s))
        self._loop.call_soon(self._start)
        return future

    def _start(self) -> None:
        while self._waiting and self._running < AT_ONCE:
            batch: list[tuple[T, asyncio.Future[int]]] = []
            left, now = BATCH_BYTES, self._loop.time()
            while self._waiting and left > 0:
                request, future, until = self._waiting.pop(0)
                if until < now:
                    future.set_exception(StoreFailedError("timed out: the store is too slow"))
                    continue
                batch.append((request, future))
                left -= self._size(request)
            if not batch:
                return
            work = self._loop.run_in_executor(self._threads, self._call, [one for one, _ in batch])
            self._running += 1
            work.add_done_callback(partial(self._ended, [future for _, future in batch]))

    def _ended(self, futures: list[asyncio.Future[int]], work: asyncio.Future[list[int]]) -> None:
        self._running -= 1
        error = work.exception()
        codes = [0] * len(futures) if error is not None else work.result()
        for future, code in zip(futures, codes, strict=True):
            if error is not None:
                future.set_exception(StoreFailedError(str(error)))
            else:
                future.set_result(code)
        self._start()


def address_to(host: str, port: int) -> str:
    """Return this host's address on the way to that one."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(address)
        return str(way.getsockname()[0])


class PooledObjects:
    """`ObjectStore` of a pool."""

    def __init__(self, request: OpenPool, buffer: memoryview) -> None:
        self._request = request
        self._buffer = buffer
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self._store = MooncakeDistributedStore()
        self._round_trip_s = 0.0  # of the last question to the master
        timeout_s = request.timeout_s
        self._reads = Batches(self._get, lambda one: one.room, READS_NICE, timeout_s)
        self._writes = Batches(self._put, lambda one: one.nbytes, WRITES_NICE, timeout_s)
        self._questions = ThreadPoolExecutor(1)

    async def _ask(self, call: Callable[[], U]) -> U:
        return await asyncio.get_running_loop().run_in_executor(self._questions, call)

    async def open(self) -> None:
        await self._ask(self._open)

    def _open(self) -> None:
        request = self._request
        host, _, port = request.master.rpartition(":")
        # The client tries for a long time, and says nothing.
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        # The client logs to the standard error output, at each failure and for each retry.
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        if request.segment_bytes:
            soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (soft + request.segment_bytes, hard))
        own = request.host or address_to(host.strip("[]"), int(port))
        code = self._store.setup(
            own, request.metadata, request.segment_bytes, OWN_BYTES, request.protocol, request.devices,
            request.master,
        )  # fmt: skip
        if code:
            raise StoreFailedError(f"cannot join the pool as {own}: {reason_of(code)}")
        code = self._store.register_buffer(self._at, len(self._buffer))
        if code:
            raise StoreFailedError(f"cannot register the buffer: {reason_of(code)}")
        self._check()

    def _check(self) -> None:
        if self._store.health_check():
            raise StoreFailedError(TEXTS[-900])

    def _name(self, name: str) -> str:
        prefix = self._request.prefix
        return f"{prefix}/{name}" if prefix else name

    async def put(self, request: PutObject) -> None:
        code = await self._writes.result(request)
        if code:
            raise StoreFailedError(reason_of(code))

    def _put(self, requests: list[PutObject]) -> list[int]:
        """In a thread: write these objects, also those that exist: they may be damaged."""
        names = [self._name(one.name) for one in requests]
        places = [self._at + one.at for one in requests]
        sizes = [one.nbytes for one in requests]
        codes: list[int] = self._store.batch_upsert_from(names, places, sizes)
        return codes

    async def get(self, request: GetObject) -> Answer:
        nbytes = await self._reads.result(request)
        if nbytes >= 0:
            return Answer(request.id, nbytes=nbytes, first_s=self._round_trip_s)
        if nbytes == NOT_FOUND:
            return Answer(request.id, ABSENT)
        if nbytes == WRONG_SIZE:
            return Answer(request.id, TOO_LARGE, f"{request.name} does not fit")
        if nbytes == NO_TRANSFER:  # of the host that lent its memory, not of the store
            return Answer(request.id, LOST, reason_of(nbytes))
        return Answer(request.id, FAILED, reason_of(nbytes))

    def _get(self, requests: list[GetObject]) -> list[int]:
        """In a thread: read these objects to their places."""
        names = [self._name(one.name) for one in requests]
        places = [self._at + one.at for one in requests]
        sizes = [one.room for one in requests]
        codes: list[int] = self._store.batch_get_into(names, places, sizes)
        return codes

    async def has(self, names: list[str]) -> bytes:
        return await self._ask(lambda: self._has(names))

    def _has(self, names: list[str]) -> bytes:
        began = time.monotonic()
        found = self._store.batch_is_exist([self._name(name) for name in names])
        self._round_trip_s = time.monotonic() - began
        for code in found:
            if code < 0:
                raise StoreFailedError(reason_of(code))
        return bytes(found)

    async def pages(self, prefix: str) -> AsyncIterator[list[str]]:
        """Name nothing: the client has no list. Raises StoreFailedError if the master does not answer."""
        await self._ask(self._check)
        return
        yield []

    async def delete(self, names: list[str]) -> None:
        await self._ask(lambda: self._delete(names))

    def _delete(self, names: list[str]) -> None:
        # By force: an object that was read lately is leased.
        for code in self._store.batch_remove([self._name(name) for name in names], True):
            if code not in (0, NOT_FOUND):
                raise StoreFailedError(reason_of(code))
