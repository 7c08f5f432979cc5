"""Records lookups, saves and hints as a trace for `kvtier sim`, on request.

A trace contains only renamed keys: a keyed hash with a secret that is created for one trace and never stored.
So a trace cannot be matched with prompts, keys or another trace. It contains no text and no token.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from aiofiles.threadpool.binary import AsyncBufferedIOBase

from kvtier.errors import Refused, bad_request
from kvtier.key import KEY_BYTES

log = logging.getLogger(__name__)

DIRECTORY = "traces"
LIMIT_TRACES = 16  # in the directory
# Of keys that are not written yet; requests above this are only counted.
LIMIT_WAITING_BYTES = 16 << 20
LIMIT_RECENT = 1 << 16  # names that were looked up: saves of these are omitted
PIECE_KEYS = 512  # hashed at once: less than a millisecond
PAUSE_S = 0.1
NAME_BYTES = 8
SECRET_BYTES = 32


@dataclass(slots=True)
class Seen:
    """A lookup, a save, or a hint."""

    milliseconds: int
    saved: bool
    place: bytes  # names the tenant and the space
    block_tokens: int
    keys: bytes
    importance: float | None = None


@dataclass(slots=True)
class Trace:
    """One recording."""

    path: Path
    limit_bytes: int
    started_at: float
    secret: bytes
    block_tokens: int = 0
    written_bytes: int = 0
    requests: int = 0
    left_out: int = 0
    ending: bool = False  # no further requests are noted
    full: bool = False
    failure: str = ""


class Recorder:
    """Notes requests at once, and writes them later. Callers check `is_on` first."""

    def __init__(self, state: Path, clock: Callable[[], float]) -> None:
        self._directory = state / DIRECTORY
        self._clock = clock
        self._trace: Trace | None = None  # the last one, or the current one
        self._fd = -1  # of the trace that `run` has yet to start
        self.is_on = False  # requests are noted
        self._busy = False  # a trace is being written
        self._waiting: deque[Seen] = deque()
        self._waiting_bytes = 0
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._lines = bytearray()
        self._started = asyncio.Event()

    # --- orders ----------------------------------------------------------------------------------

    def start(self, limit_bytes: int) -> dict[str, Any]:
        """Begin a trace of at most this size. Raises Refused while another is written, or without room."""
        if self._busy:
            raise bad_request("a trace is already being recorded: stop it first")
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}.jsonl"
        path = self._directory / name
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if sum(1 for _ in self._directory.iterdir()) >= LIMIT_TRACES:
                text = f"{self._directory} already has {LIMIT_TRACES} traces: remove some"
                raise Refused("too_many", text)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Refused("disk_failed", f"{path}: {error.strerror}") from error
        self._trace = Trace(path, limit_bytes, self._clock(), secrets.token_bytes(SECRET_BYTES))
        self._busy = self.is_on = True
        self._recent.clear()
        self._started.set()
        log.info("recording lookups into %s", path)
        return self.stats()

    def stop(self) -> dict[str, Any]:
        """End the trace. The requests noted so far are still written: see `writing`."""
        if not self.is_on:
            raise bad_request("no trace is being recorded")
        assert self._trace is not None
        self._end(self._trace)
        return self.stats()

    def _end(self, trace: Trace) -> None:
        trace.ending, self.is_on = True, False

    def stats(self) -> dict[str, Any]:
        trace = self._trace
        if trace is None:
            return {"recording": False, "writing": False}
        return {
            "recording": self.is_on,
            "writing": self._busy,
            "path": str(trace.path),
            "requests": trace.requests,
            "bytes": trace.written_bytes,
            "limit_bytes": trace.limit_bytes,
            "full": trace.full,
            "left_out": trace.left_out,
            "failure": trace.failure,
        }

    # --- what happens ----------------------------------------------------------------------------

    def looked_up(self, tenant: str, space: int, block_tokens: int, keys: bytes) -> None:
        self._note(False, tenant, space, block_tokens, keys)

    def saved(self, tenant: str, space: int, block_tokens: int, parent: bytes, keys: bytes) -> None:
        """Note a save of these keys below `parent`. Keys that were looked up recently are omitted later."""
        self._note(True, tenant, space, block_tokens, parent + keys)

    def hinted(
        self, tenant: str, space: int, block_tokens: int, keys: bytes, importance: float
    ) -> None:
        self._note(False, tenant, space, block_tokens, keys, importance)

    def _note(
        self, saved: bool, tenant: str, space: int, block_tokens: int, keys: bytes,
        importance: float | None = None,
    ) -> None:  # fmt: skip
        trace = self._trace
        if trace is None or not self.is_on or not keys:
            return
        trace.block_tokens = trace.block_tokens or block_tokens
        if block_tokens != trace.block_tokens or self._waiting_bytes > LIMIT_WAITING_BYTES:
            trace.left_out += 1
            return
        now = round((self._clock() - trace.started_at) * 1000)
        self._waiting_bytes += len(keys)
        place = f"{tenant}\0{space}".encode()
        self._waiting.append(Seen(now, saved, place, block_tokens, keys, importance))

    def _put_into_lines(self, trace: Trace) -> Iterator[None]:
        """Convert noted requests to lines with the names of this trace; yield between portions."""
        hashed = 0
        while self._waiting:
            seen = self._waiting[0]
            within = blake2b(seen.place, key=trace.secret).digest()
            names = []
            for at in range(0, len(seen.keys), KEY_BYTES):
                key = seen.keys[at : at + KEY_BYTES]
                name = blake2b(key, key=within, digest_size=NAME_BYTES).digest()
                names.append(int.from_bytes(name))
                hashed += 1
                if hashed % PIECE_KEYS == 0:
                    yield
            self._waiting.popleft()  # after its portions: between them, the daemon may end
            self._waiting_bytes -= len(seen.keys)
            if not seen.saved or not all(name in self._recent for name in names):
                self._add_line(trace, seen, names)

    def _add_line(self, trace: Trace, seen: Seen, names: list[int]) -> None:
        is_hint = seen.importance is not None
        for name in () if is_hint else names:
            self._recent[name] = None
            self._recent.move_to_end(name)
        while len(self._recent) > LIMIT_RECENT:
            self._recent.popitem(last=False)
        line = msgspec.json.encode(
            {
                "timestamp": seen.milliseconds,
                "input_length": 0 if is_hint else len(names) * seen.block_tokens,
                "output_length": 0,
                "hash_ids": names,
                "block_tokens": seen.block_tokens,
                "saved": seen.saved,
            }
            | ({"importance": seen.importance} if is_hint else {})
        )
        if trace.written_bytes + len(line) + 1 > trace.limit_bytes:
            trace.full = True
            self._end(trace)
        if trace.full:
            trace.left_out += 1
            return
        trace.written_bytes += len(line) + 1
        trace.requests += 1
        self._lines += line + b"\n"

    # --- writing ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write the noted requests in portions, as long as the daemon runs."""
        while True:
            await self._started.wait()
            self._started.clear()
            trace, fd = self._trace, self._fd
            assert trace is not None
            try:
                await self._write(trace, fd)
            except OSError as error:
                trace.failure = error.strerror or str(error)
                log.error("%s: %s; recording has stopped", trace.path, trace.failure)
            except Exception as error:
                trace.failure = f"internal error: {error!r}; see the daemon's log"
                log.exception("%s: internal error, recording has stopped", trace.path)
            self._end(trace)
            self._busy = False
            self._waiting.clear()
            self._lines.clear()
            self._waiting_bytes = 0
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError  # the failure replaced the cancellation

    async def _write(self, trace: Trace, fd: int) -> None:
        """Write this trace until it or the daemon ends."""
        from aiofiles.threadpool import wrap

        file = wrap(open(fd, "wb"))  # noqa: ASYNC230, SIM115 - it is open, and a thread may be late
        try:
            while not trace.ending or self._waiting:
                for _ in self._put_into_lines(trace):
                    await asyncio.sleep(0)  # let the loop serve clients
                await self._flush(file)
                if not trace.ending:
                    await asyncio.sleep(PAUSE_S)
        finally:
            try:
                for _ in self._put_into_lines(trace):
                    pass
                await self._flush(file)
            finally:
                await file.close()

    async def _flush(self, file: AsyncBufferedIOBase) -> None:
        """Write the lines. A write that waits for a thread when the daemon ends is not cancelled."""
        lines, self._lines = self._lines, bytearray()
        if not lines:
            return
        writing = asyncio.ensure_future(_write_lines(file, lines))
        try:
            await asyncio.shield(writing)
        finally:
            await writing


async def _write_lines(file: AsyncBufferedIOBase, lines: bytearray) -> None:
    await file.write(lines)
    await file.flush()
