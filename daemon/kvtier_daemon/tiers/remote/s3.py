"""Objects in a bucket of an S3-compatible store, through obstore. Runs in the process of the store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import obstore
from obstore.store import S3Store

from kvtier_daemon.tiers.remote.http_reads import HttpReads, cut_off
from kvtier_daemon.tiers.remote.messages import (
    CONNECT_S,
    DONE,
    TOO_LARGE,
    Answer,
    GetObject,
    OpenBucket,
    PutObject,
)

if TYPE_CHECKING:
    from obstore.store import S3Config

HEADS_AT_ONCE: Final = 32
READS_AT_ONCE: Final = 32
SIGNED_FOR: Final = timedelta(minutes=15)  # the clocks of S3 may differ by as much
# That the library collects before it passes them on: they are copied from a cache.
PIECE_BYTES: Final = 1 << 20
PAGE_NAMES: Final = 500  # half a millisecond of the daemon's loop


class S3Objects:
    """`ObjectStore` of a bucket."""

    def __init__(self, request: OpenBucket, buffer: memoryview) -> None:
        timeout = timedelta(seconds=request.timeout_s)
        options: S3Config = {"region": request.region, **request.secrets}  # type: ignore[typeddict-item]
        if request.endpoint:
            options["endpoint"] = request.endpoint
        is_plain = request.endpoint.startswith("http://")
        if not is_plain:  # as other clients of S3: TLS protects the bytes, and a frame has digests
            options["unsigned_payload"] = True
        self._buffer = buffer
        self._timeout_s = request.timeout_s
        self._heads = asyncio.Semaphore(HEADS_AT_ONCE)
        self._store = S3Store(
            request.bucket,
            prefix=request.prefix or None,
            config=options,
            client_options={
                "timeout": timeout,
                "connect_timeout": timedelta(seconds=min(CONNECT_S, request.timeout_s)),
                "allow_http": is_plain,
            },
            # The daemon decides whether something is worth another try.
            retry_config={"max_retries": 0, "retry_timeout": timeout},
        )
        self._reads = HttpReads(
            lambda name: obstore.sign(self._store, "GET", name, SIGNED_FOR),
            buffer,
            request.timeout_s,
        )
        self._threads = ThreadPoolExecutor(READS_AT_ONCE)
        self._reading = 0

    async def open(self) -> None:
        trying = asyncio.get_running_loop().run_in_executor(
            self._threads, self._reads.try_to_connect
        )
        async for _ in obstore.list(self._store, chunk_size=1):
            break
        await trying

    async def put(self, request: PutObject) -> None:
        content = self._buffer[request.at : request.at + request.nbytes]
        await obstore.put_async(self._store, request.name, content, use_multipart=False)

    async def get(self, request: GetObject) -> Answer:
        if not self._reads.can_read or self._reading == READS_AT_ONCE:  # none waits for a thread
            return await self._get(request)
        until = time.monotonic() + self._timeout_s
        self._reading += 1
        try:
            answer = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._reads.get, request, until
            )
        finally:
            self._reading -= 1
        if answer is None:
            answer = await self._get(request)
            if answer.outcome == DONE:
                self._reads.only_the_library_can()
        return answer

    async def _get(self, request: GetObject) -> Answer:
        """Read an object with the library."""
        began = time.monotonic()
        found = await obstore.get_async(self._store, request.name)
        first_s, nbytes, at = time.monotonic() - began, int(found.meta["size"]), request.at
        if nbytes > request.room:
            return Answer(request.id, TOO_LARGE, f"{request.name} has {nbytes} bytes")
        try:
            async for piece in found.stream(PIECE_BYTES):
                end = at + len(piece)
                if end > request.at + request.room:
                    return Answer(request.id, TOO_LARGE, f"{request.name} has more bytes")
                self._buffer[at:end] = memoryview(piece)
                at = end
        except Exception as error:  # noqa: BLE001  # the library's errors have no common base
            return cut_off(request, began, self._timeout_s, error)
        return Answer(request.id, nbytes=at - request.at, first_s=first_s)

    async def has(self, names: list[str]) -> bytes:
        return bytes(await asyncio.gather(*(self._has(name) for name in names)))

    async def _has(self, name: str) -> bool:
        async with self._heads:
            try:
                await obstore.head_async(self._store, name)
            except FileNotFoundError:
                return False
        return True

    async def pages(self, prefix: str) -> AsyncIterator[list[str]]:
        async for page in obstore.list(self._store, prefix=prefix, chunk_size=PAGE_NAMES):
            yield [one["path"] for one in page]

    async def delete(self, names: list[str]) -> None:
        await obstore.delete_async(self._store, names)
