"""Tells other hosts which blocks this one wants most, and reads those that others want, so that a new host
starts with hits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from kvtier import frame
from kvtier.errors import FrameError, Refused
from kvtier.frame import ENCRYPTED, HEADER, RAW, Identity
from kvtier.key import KEY_BYTES
from kvtier.layout import KvSpec
from kvtier.wire import PRESENT
from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.catalog.arrivals import ARRIVING
from kvtier_daemon.codec.table import BY_NAME
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.remote.driver import StoreDriver, StoreProcess
from kvtier_daemon.tiers.remote.fetching import LOOK_BLOCKS, Fetcher, FetchQueue
from kvtier_daemon.tiers.remote.known import each_of
from kvtier_daemon.tiers.remote.messages import (
    DONE,
    TOO_LARGE,
    Answer,
    GetObject,
    ListObjects,
    PutObject,
    Request,
)
from kvtier_daemon.tiers.remote.objects import decode, encode
from kvtier_daemon.tiers.remote.places import Places, restorable
from kvtier_daemon.tiers.remote.questions import Questions
from kvtier_daemon.tiers.remote.wanted import (
    MOST_BYTES,
    MergedLists,
    WantedBlocks,
    WantedList,
    decode_list,
    encode_list,
    folder_of,
    in_turn,
    list_headers,
    list_identity,
    list_name,
    list_of,
    lists_of,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
TELL_S: Final = 300.0
MOST_LISTS: Final = 256  # that are used
MOST_TRIED: Final = 1024  # that are read: those of hosts that are gone are old
MOST_NAMES: Final = 16_384  # of lists
ROOM_S: Final = 5.0  # until the buffer has room
PORTION_BYTES: Final = 16 << 20  # that are read at once
ONLY_THERE: Final = bytes(code == PRESENT for code in range(256))
READ_S: Final = 10.0  # for a portion
TRIES: Final = 20  # of a portion without progress
RETRY_S: Final = 0.1


class NotNowError(FrameError):
    """The object may be good: the store or the buffer could not be used."""


class StoreObjects:
    """Writes and reads small objects that are no blocks."""

    def __init__(self, tenant: Tenant, driver: StoreDriver, threads: ThreadPoolExecutor) -> None:
        self._tenant = tenant
        self._driver = driver
        self._threads = threads

    async def ask(self, request: Request) -> Answer:
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._driver.ask(request, answers.put_nowait)
        return await answers.get()

    async def names(self, folder: str, most: int) -> tuple[list[str], str]:
        """Return the names of the objects below this folder, and why some may be missing."""
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        request = ListObjects(self._driver.next_id(), folder, most)
        self._driver.ask(request, answers.put_nowait)
        found: list[str] = []
        while (answer := await answers.get()).names:
            found += answer.names
        return found[:most], answer.outcome and (answer.text or answer.outcome)

    async def put(self, name: str, spec: KvSpec, of: Identity, text: bytes) -> bool:
        """Write this text as the content of a frame. False if that is not possible now."""
        return await self._to_its_end(self._put(name, spec, of, text))

    async def get(self, name: str, of: Identity) -> bytes:
        """Return the content of a frame. Raises FrameError and UnknownKeyError."""
        return await self._to_its_end(self._get(name, of))

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """A request uses the buffer until it is answered, also if nothing waits for that."""
        task = asyncio.create_task(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    async def _taken(self, part: str, nbytes: int) -> tuple[StoreProcess, int] | None:
        """Take this many bytes of a part of the buffer, after some seconds if it has no room now."""
        until = time.monotonic() + ROOM_S
        while (child := self._driver.child) is not None:
            if (at := getattr(child, part).take(nbytes)) is not None:
                return child, at
            if time.monotonic() >= until:
                break
            await asyncio.sleep(RETRY_S)
        return None

    async def _put(self, name: str, spec: KvSpec, of: Identity, text: bytes) -> bool:
        headers = list_headers(spec, of.space, len(text))
        if (taken := await self._taken("writes", headers.most_bytes)) is None:
            return False
        child, at = taken
        cipher = self._driver.keys.of(self._tenant.name)

        def encoded(child: StoreProcess) -> int:
            into = memoryview(child.buffer)[at : at + headers.most_bytes]
            return encode(headers, BY_NAME["raw"], cipher, of.key, b"", b"", memoryview(text), into)

        try:
            nbytes = await self._in_thread(lambda: encoded(child))
            if self._driver.child is not child:
                return False
            answer = await self.ask(PutObject(self._driver.next_id(), name, at, nbytes))
            return not answer.outcome
        finally:
            child.writes.give(at, headers.most_bytes)

    async def _get(self, name: str, of: Identity) -> bytes:
        if (taken := await self._taken("reads", MOST_BYTES)) is None:
            raise NotNowError("the buffer has no room")
        child, at = taken
        cipher = self._driver.keys.of(self._tenant.name)
        try:
            answer = await self.ask(GetObject(self._driver.next_id(), name, at, MOST_BYTES))
            if answer.outcome not in (DONE, TOO_LARGE):
                raise NotNowError(answer.text or answer.outcome)
            if answer.outcome or not HEADER.size <= answer.nbytes <= MOST_BYTES:
                raise FrameError(answer.text or "has no frame")
            text = memoryview(child.buffer)[at : at + answer.nbytes]

            def decoded() -> bytes:
                header = frame.decode(bytes(text[: frame.peek(bytes(text[: HEADER.size]))]))
                is_raw = header.codec & ~ENCRYPTED == RAW
                if not is_raw or header.payload_bytes != header.raw_bytes:
                    raise FrameError("is not the frame of a list")
                into = bytearray(min(header.raw_bytes, MOST_BYTES))
                decode(of, "", cipher, text, memoryview(into))
                return bytes(into)

            return await self._in_thread(decoded)
        finally:
            child.reads.give(at, MOST_BYTES)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class Warming:
    """The lists and the warm-up of one tenant. `share` is that of the memory that a warm-up may fill; 0:
    there are no lists. `left` counts the blocks that a warm-up has yet to read."""

    def __init__(
        self, tenant: Tenant, driver: StoreDriver, places: Places, questions: Questions,
        queue: FetchQueue, fetcher: Fetcher, threads: ThreadPoolExecutor, share: float, host: bytes,
    ) -> None:  # fmt: skip
        self.is_telling = False  # a list may be on its way
        self.skipped: set[bytes] = set()  # spaces that no warm-up reads
        self.share = share
        self.left = 0
        self.lists = self.ignored = self.blocks = 0  # of the last warm-up
        self._tenant = tenant
        self._driver = driver
        self._places = places
        self._questions = questions
        self._queue = queue
        self._fetcher = fetcher
        self.objects = StoreObjects(tenant, driver, threads)
        self._wanted = WantedBlocks()
        self._requests = 0
        self._host = host

    def used(self, space: KnownSpace, keys: bytes) -> None:
        """A request found these blocks in memory."""
        if self.share:
            self._wanted.note(space, keys, self._queue.clock())

    # --- forgets -------------------------------------------------------------------------------

    def forget(self, space: KnownSpace, keys: bytes) -> str:
        """Want these blocks no longer. Return the name of this host's list, which may contain them."""
        self._wanted.forget(space, keys)
        return list_name(self._tenant.secret, list_identity(space.identity, self._host))

    async def purge(self, space: KnownSpace) -> bytes:
        """Want no block of this space. Return the keys that were wanted, and those in this host's list."""
        wanted, secret = self._wanted.forget(space), self._tenant.secret
        of = list_identity(space.identity, self._host)
        try:
            text = await self.objects.get(list_name(secret, of), of)
            listed = await asyncio.to_thread(decode_list, of, secret, text, time.time())
        except Exception as error:  # noqa: BLE001  # it is deleted in any case
            log.debug("remote: the list of a purged space is not read: %s", error)
            return wanted
        return b"".join(dict.fromkeys((*each_of(wanted), *listed.keys)))

    # --- lists ---------------------------------------------------------------------------------

    async def tell(self, host: bytes) -> None:
        """Leave a list for other hosts, again and again until the task is cancelled."""
        self._host = host
        while True:
            await asyncio.sleep(TELL_S)
            if self.share and self._driver.is_writable:
                self.is_telling = True
                try:
                    await self.tell_once(host)
                except Exception:
                    log.exception("remote: internal error in a list of wanted blocks")
                finally:
                    self.is_telling = False

    async def tell_once(self, host: bytes) -> None:
        now_s, secret = self._queue.clock(), self._tenant.secret
        prefixes = [
            one for one in self._wanted.prefixes()
            if self._places.of(one.space) and not self._is_lossy(one.space)
        ]  # fmt: skip
        for one in await asyncio.to_thread(lists_of, prefixes, now_s):
            of = list_identity(one.space, host)
            text = await asyncio.to_thread(encode_list, one, host, secret, time.time())
            if not await self.objects.put(list_name(secret, of), one.spec, of, text):
                log.debug("remote: the list of wanted blocks was not written")

    def _is_lossy(self, space: KnownSpace) -> bool:
        losses = self._tenant.losses
        return losses.of(space.identity, space.spec, self._tenant.name) is not None

    async def _lists(self) -> list[WantedList]:
        """Read the lists of other hosts, and merge them, without those that are damaged, old or others'."""
        secret, both = self._tenant.secret, MergedLists()
        self.lists = self.ignored = self.blocks = 0
        names = set((await self.objects.names(folder_of(secret), MOST_NAMES))[0])
        named = [(name, of) for name in names if (of := list_of(secret, name)) is not None]
        if others := len(names) - len(named):
            self.ignored += others
            log.warning("remote: %d objects in the folder of lists are ignored", others)
        random.shuffle(named)  # not always those of the same hosts
        for name, of in in_turn(named, MOST_TRIED):
            if self.lists >= MOST_LISTS:
                break
            try:
                text = await self.objects.get(name, of)
                one = await asyncio.to_thread(decode_list, of, secret, text, time.time())
                if self._tenant.identity_of(one.spec.checked()) != one.space:
                    raise FrameError("is of another space")
            except Exception as error:  # noqa: BLE001  # one object must not stop the warm-up
                self.ignored += 1
                log.warning("remote: the list %s is ignored: %s", name, error)
                continue
            self.lists += 1
            await asyncio.to_thread(both.add, one)
        return await asyncio.to_thread(both.lists)

    # --- warm-up -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read the blocks that hosts want most, until memory has its share of them. Saves and loads go on."""
        try:
            for one in await self._lists():
                with contextlib.suppress(Refused):  # too many spaces
                    await self._read_space(one)
            log.info(
                "remote: read %d blocks that %d lists name; %d lists were ignored", self.blocks,
                self.lists, self.ignored,
            )  # fmt: skip
        finally:
            self.left = 0

    def _room(self) -> int:
        """How many bytes of memory may still be filled."""
        counts = self._tenant.catalog.blocks.store.counts()
        return int(self.share * self._tenant.quota_bytes) - counts["bytes"]["ready"]

    async def _read_space(self, one: WantedList) -> None:
        catalog = self._tenant.catalog
        if one.space in self.skipped:
            return
        space = catalog.spaces.open(one.space, one.spec, ARRIVING)
        try:
            if not self._places.of(space) or self._is_lossy(space):
                return
            nbytes = sum(space.block_bytes)
            count = min(len(one.keys), max(0, self._room()) // nbytes)
            self.left = count
            for row in leaves(one, count):
                await self._read(space, one.chain(row))
        finally:
            catalog.spaces.leave_one(ARRIVING, space)

    async def _read(self, space: KnownSpace, keys: bytes) -> None:
        """Read the blocks of this prefix that memory lacks."""
        nbytes, portion = sum(space.block_bytes), max(1, PORTION_BYTES // sum(space.block_bytes))
        if any(place.kind.kind != "full" for place in self._places.of(space)):
            portion = len(keys)  # not each shorter prefix can be restored
        first, tries, asked = 0, 0, -1
        while more := self._present(space, keys, first):
            first += more
            await asyncio.sleep(0)
        while first * KEY_BYTES < len(keys) and self._room() >= nbytes and tries < TRIES:
            if space.identity in self.skipped:
                return
            count = min(portion, self._fetcher.beyond(space, keys, first, asks=False))
            if not count and asked < first:
                asked = first
                some = keys[first * KEY_BYTES : (first + LOOK_BLOCKS) * KEY_BYTES]
                await self._questions.find(space, some)
                continue
            if not count:
                return
            self._requests += 1
            request = 0, (self._tenant.name, "warm-up", self._requests)
            coming, _, _ = self._fetcher.fetch(
                space, keys, first, count, request=request, urgent=False, within_s=READ_S
            )
            ended = asyncio.Event()
            if coming and self._queue.pending.call_when_read(request, ended.set):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), READ_S)
            else:
                await asyncio.sleep(RETRY_S)
            more = self._present(space, keys, first)
            tries = 0 if more else tries + 1
            first += more
            self.blocks += more
            self.left = max(0, self.left - more)

    def _present(self, space: KnownSpace, keys: bytes, first: int) -> int:
        """How many of the next blocks are in memory or on disk, after the first ones."""
        some = keys[first * KEY_BYTES : (first + LOOK_BLOCKS) * KEY_BYTES]
        if space.index < 0 or not some:
            return 0
        store, places = self._tenant.catalog.blocks.store, self._places.of(space)
        codes = (store.probe(space.index, one.group, one.shard, some) for one in places)
        return restorable(space, places, [one.translate(ONLY_THERE) for one in codes], first)


def leaves(one: WantedList, count: int) -> Iterator[int]:
    """The rows among the first `count` that are no parent of another one of them, the most wanted first."""
    inner = {one.parents[row] for row in range(count) if one.parents[row] != row}
    return (row for row in range(count) if row not in inner)
