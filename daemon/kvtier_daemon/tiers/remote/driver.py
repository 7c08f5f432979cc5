"""Runs the process that talks to the object store, and starts another one when it fails.

The store is on or off. It is off from a failure on: a process that ends or hangs, a bucket that cannot be
listed, several failed requests in a row. Then the process is killed, all pending requests fail, and after a
delay another process opens the bucket. So one way back covers every failure, also new credentials.
"""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import logging
import os
import stat
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from kvtier.errors import TierError
from kvtier_daemon.config.schema import RemoteConfig
from kvtier_daemon.tiers.child_process import MODULE, start_child
from kvtier_daemon.tiers.remote.messages import (
    ABSENT,
    DONE,
    FAILED,
    LOST,
    TOO_LARGE,
    Answer,
    ListObjects,
    OpenBucket,
    OpenPool,
    OpenStore,
    PutObject,
    Request,
    packed,
    received,
)
from kvtier_daemon.tiers.remote.space_in_buffer import BufferSpace
from kvtier_daemon.tiers.states import REMOTE_SWITCHED_OFF
from kvtier_daemon.tiers.tier_keys import TierKeys
from kvtier_kernels import Mapping

log = logging.getLogger(__name__)

COMMAND: Final = (*MODULE, "kvtier_daemon.tiers.remote.child")
CREDENTIAL: Final = "kvtier-remote"
POOL: Final = "mooncake://"
KEYS: Final = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
RETRY_S, LONGEST_RETRY_S = 0.5, 15.0
OPEN_S = 10.0  # for the process to start, and for the first answer of the store
HANGS_S = 2.0  # after the deadline of a request, which the process should keep itself
FAULTS_TO_OFF = 4  # failed requests in a row
PAUSE_S = 15.0  # of the writes after as many failed writes
CHECK_S = 0.5
LOG_S = 60.0  # between messages about single failures
ENDED_AT_ONCE: Final = 64  # requests of a process that has ended
PROCESS: Final = ("deadline_s", "buffer_bytes", "credentials")  # what a process has from its start
OPENING: Final = "it is being opened"
CHANGED: Final = "its configuration has changed"

Done = Callable[[Answer], None]


def credentials(config: RemoteConfig) -> dict[str, str]:
    """Return the credentials of a file in the format of AWS (`[default]`), or none: then the library looks
    for those of the environment and of the machine. Raises TierError."""
    file = config.credentials
    if file is None:
        folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
        file = Path(folder) / CREDENTIAL
        if not folder or not file.exists():
            return {}
    try:
        with file.open() as source:
            if stat.S_IMODE(os.fstat(source.fileno()).st_mode) & 0o077:
                raise TierError(f"{file}: other users can read the credentials; chmod 600 it")
            parser = configparser.ConfigParser(interpolation=None)
            parser.read_file(source)
    except OSError as error:
        raise TierError(f"{file}: {error.strerror}") from error
    except (configparser.Error, UnicodeDecodeError) as error:
        raise TierError(f"{file}: is not a credentials file: {type(error).__name__}") from error
    secrets = {
        name: parser["default"][key]
        for key, name in KEYS.items()
        if parser.has_option("default", key)
    }
    if not {"access_key_id", "secret_access_key"} <= secrets.keys():
        raise TierError(
            f"{file}: needs aws_access_key_id and aws_secret_access_key under [default]"
        )
    return secrets


def place_of(config: RemoteConfig) -> str:
    """Return the name of the store for people."""
    if config.url:
        return config.url + (f"/{config.prefix}" if config.prefix else "")
    where = "/".join(part for part in (config.bucket, config.prefix) if part)
    return f"s3://{where}" + (f" at {config.endpoint}" if config.endpoint else "")


def _opening(config: RemoteConfig) -> OpenStore:
    """Return the request that opens the configured store. Raises TierError."""
    if config.url:
        return OpenPool(
            config.url.removeprefix(POOL), config.prefix, config.metadata, config.protocol,
            config.devices, config.host, config.segment_bytes, config.deadline_s,
        )  # fmt: skip
    return OpenBucket(
        config.bucket, config.prefix, config.endpoint, config.region, credentials(config),
        config.deadline_s,
    )  # fmt: skip


@dataclass(slots=True)
class Pending:
    request: Request
    done: Done
    until: float  # when the process should have answered


class StoreProcess:
    """The process, and the buffer that it alone shares with the daemon: a late one changes nothing."""

    def __init__(self, buffer_bytes: int) -> None:
        fd = os.memfd_create("kvtier-remote", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, buffer_bytes)
            self.buffer = Mapping(fd, buffer_bytes, True)
            self._process, self.end = start_child(COMMAND, fd)
        finally:
            os.close(fd)
        # Writes are never kept from memory by reads, nor reads by writes.
        self.writes = BufferSpace(0, buffer_bytes // 2)
        self.reads = BufferSpace(buffer_bytes // 2, buffer_bytes - buffer_bytes // 2)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> int:
        """Kill the process, and wait for its end; return how it ended."""
        ended = self._process.poll()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return ended if ended is not None else 0


class StoreDriver:
    """`changed` is called after the store went on or off. While there is a process, the keys are loaded."""

    def __init__(self, config: RemoteConfig, keys: TierKeys, changed: Callable[[], None]) -> None:
        self.keys = keys
        self.is_on = False
        self.failure = OPENING
        self.faults = 0
        self.counts: Counter[str] = Counter()  # of requests, by kind and outcome
        self.restarts = 0
        self.child: StoreProcess | None = None
        self.epoch = 0  # counts the processes
        self._config = config
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, Pending] = {}
        self._reading: asyncio.Task[None] | None = None
        self._last = 0
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: list[bytes] = []  # messages to the process
        self._in_a_row = 0
        self._puts_in_a_row = 0
        self._paused_until = 0.0
        self._sick: asyncio.Future[str] = self._loop.create_future()  # why the store fails
        self._wanted = asyncio.Event()  # not set while an operator has switched it off
        self._wanted.set()
        self._changes = False  # the next process has another configuration
        self._logged_at = -LOG_S

    @property
    def pid(self) -> int:
        return self.child.pid if self.child is not None else 0

    @property
    def is_writable(self) -> bool:
        """Whether objects can be written now: a store may be readable only, or full."""
        return self.is_on and self._loop.time() >= self._paused_until

    @property
    def is_opening(self) -> bool:
        """Whether the first attempt to open the store is under way."""
        return not self.is_on and self.failure == OPENING

    @property
    def is_wanted(self) -> bool:
        """Whether the store is used, or will be when it answers; False if an operator has switched it off."""
        return self._wanted.is_set()

    def switch(self, on: bool) -> None:
        """Use the store, or end the process within a moment, until the opposite order."""
        if on:
            if not self.is_on:
                self.failure = OPENING
            self._wanted.set()
        else:
            self._wanted.clear()
            self._fail(REMOTE_SWITCHED_OFF)

    def reconfigure(self, config: RemoteConfig) -> None:
        """Use this configuration. Another deadline, buffer or source of credentials needs another process:
        pending requests fail."""
        before, self._config = self._config, config
        if any(getattr(before, name) != getattr(config, name) for name in PROCESS):
            self._changes = True
            self._fail(CHANGED)

    def next_id(self) -> int:
        self._last += 1
        return self._last

    def ask(self, request: Request, done: Done) -> None:
        """Send a request; `done` is called once, later, also if it fails."""
        number = 0 if isinstance(request, OpenStore) else request.id
        if self._writer is None:
            why = self.failure or "its process ended"
            self._loop.call_soon(done, Answer(number, FAILED, why))
            return
        # A list has many pages, each with a time limit of its own.
        limit_s = self._config.deadline_s + HANGS_S
        self._pending[number] = Pending(request, done, self._loop.time() + limit_s)
        # The process takes the requests that arrive together in one call of its library.
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(packed(request))

    def _flush(self) -> None:
        messages, self._unsent = self._unsent, []
        # Their places are those of one process: in this turn of the loop there is no other one yet.
        # uvloop raises an exception if the process has just ended; `run` learns that a little later, and
        # answers the requests.
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(b"".join(messages))

    async def run(self) -> None:
        """Keep a process running until the task is cancelled."""
        retry_s, told = RETRY_S, ""
        while True:
            why = "its process failed"
            if not self.is_wanted:
                self.failure = REMOTE_SWITCHED_OFF
                log.info("remote: %s is switched off", place_of(self._config))
                await self._wanted.wait()
                retry_s, told, self.failure = RETRY_S, "", OPENING
            self._changes = False
            try:
                await self._open()
                if told:
                    log.info("remote: %s works again", place_of(self._config))
                else:
                    log.info("remote: uses %s", place_of(self._config))
                retry_s, told = RETRY_S, ""
                self.is_on, self.failure = True, ""
                self._changed()
                why = await self._serve()
            except (TierError, EOFError) as error:
                why = str(error).removeprefix("remote: ")
            except OSError as error:
                why = f"cannot start its process: {error.strerror}"
            finally:
                why = await self._end(why)
            if self._changes or not self.is_wanted:
                continue
            if why != told:
                log.error(
                    "remote: %s is off: %s; blocks there are misses, retrying in the background",
                    place_of(self._config), why,
                )  # fmt: skip
            told = why
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ordered(), retry_s)
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)

    async def _ordered(self) -> None:
        """Wait until an operator switches the store off or changes its configuration."""
        while self.is_wanted and not self._changes:  # noqa: ASYNC110
            await asyncio.sleep(CHECK_S)

    async def _open(self) -> None:
        """Start a process that opens the bucket. Raises TierError."""
        config = self._config
        self.epoch += 1
        await asyncio.to_thread(self.keys.load)
        request = await asyncio.to_thread(_opening, config)
        # Not a task: the end of the loop would cancel it, and nothing would end the process.
        starting = self._loop.run_in_executor(None, StoreProcess, config.buffer_bytes)
        try:
            self.child = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_end_started)
            raise
        reader, self._writer = await asyncio.open_connection(sock=self.child.end)
        self._in_a_row, self._sick = 0, self._loop.create_future()
        opened = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._receive(reader))
        if self._writer.is_closing():
            raise TierError("its process ended")
        self._writer.write(packed(request))
        self._pending[0] = Pending(request, opened.set_result, self._loop.time() + OPEN_S)
        await asyncio.wait(
            [opened, self._reading], timeout=OPEN_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not opened.done():
            raise TierError("its process ended" if self._reading.done() else "it does not answer")
        if opened.result().outcome:
            raise TierError(opened.result().text)

    async def _serve(self) -> str:
        """Wait until the store fails; return why."""
        reading = self._reading
        assert reading is not None
        while not (reading.done() or self._sick.done() or self._changes) and self.is_wanted:
            either: list[asyncio.Future[Any]] = [self._sick, reading]
            await asyncio.wait(either, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
            now = self._loop.time()
            if any(one.until < now for one in self._pending.values()):
                return "its process hangs"
        if self._sick.done():
            return self._sick.result()
        return "its process ended" if reading.done() else CHANGED

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        """Take the answers until the process ends."""
        try:
            while True:
                answer = msgspec.msgpack.decode(await received(reader), type=Answer)
                pending = self._pending.get(answer.id)
                if pending is None:
                    continue
                if answer.names:  # of a list, which continues
                    pending.until = self._loop.time() + self._config.deadline_s + HANGS_S
                else:
                    del self._pending[answer.id]
                    self._judge(pending.request, answer)
                pending.done(answer)
        except (EOFError, msgspec.MsgspecError):
            return

    def _judge(self, request: Request, answer: Answer) -> None:
        """Note whether the store works."""
        if isinstance(request, OpenStore):
            return
        self.counts[f"{type(request).__name__}{answer.outcome and '_'}{answer.outcome}"] += 1
        if answer.outcome in (DONE, ABSENT, LOST, TOO_LARGE):
            self._in_a_row = 0
            if isinstance(request, PutObject):
                self._puts_in_a_row = 0
            return
        self.faults += 1
        now = self._loop.time()
        if isinstance(request, PutObject):
            self._puts_in_a_row += 1
            if self._puts_in_a_row >= FAULTS_TO_OFF and self._in_a_row < FAULTS_TO_OFF - 1:
                if now >= self._paused_until:
                    text = "remote: %s: cannot write: %s; trying again in %.0f s"
                    log.error(text, place_of(self._config), answer.text, PAUSE_S)
                self._paused_until = now + PAUSE_S
                self._check_reads()
            return
        self._in_a_row += 1
        if now >= self._logged_at + LOG_S:
            self._logged_at = now
            log.warning("remote: %s: a request failed: %s", place_of(self._config), answer.text)
        if self._in_a_row >= FAULTS_TO_OFF:
            self._fail(answer.text)

    def _fail(self, why: str) -> None:
        """The store has failed."""
        if not self._sick.done():
            self._sick.set_result(why)

    def _check_reads(self) -> None:
        """Writes fail: find out whether reads do too."""
        for _ in range(FAULTS_TO_OFF):
            self.ask(ListObjects(self.next_id(), "", 1), lambda answer: None)

    async def _end(self, why: str) -> str:
        """End the process and its requests; return why it failed."""
        was_on, self.is_on, self.failure = self.is_on, False, why
        child, self.child = self.child, None
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if child is not None:
            if self._reading is not None:
                self._reading.cancel()
            code = await asyncio.shield(asyncio.to_thread(child.kill))
            if code:
                why = self.failure = f"{why}, with code {code}"
            self.restarts += was_on and self.is_wanted and not self._changes
        pending, self._pending = self._pending, {}
        for at, (number, one) in enumerate(pending.items(), 1):
            if number:
                one.done(Answer(number, FAILED, why))
            if not at % ENDED_AT_ONCE:
                await asyncio.sleep(0)
        if was_on:
            self._changed()
        return why


def _end_started(starting: asyncio.Future[StoreProcess]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().kill()
        starting.result().end.close()
