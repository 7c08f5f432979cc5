"""Which blocks are written to the store after they were saved, in the background: no save waits for it."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter, deque
from collections.abc import Iterator
from typing import Final

from kvtier.key import KEY_BYTES
from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.catalog.blocks import ID_BYTES
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.remote.driver import StoreDriver
from kvtier_daemon.tiers.remote.known import KnownObjects, names_of
from kvtier_daemon.tiers.remote.places import Places
from kvtier_daemon.tiers.remote.writing import ObjectWriter

log = logging.getLogger(__name__)

LIMIT_SAVED: Final = 1 << 16  # blocks that wait; the oldest are dropped
LIMIT_USED: Final = 1024  # prefixes that wait
LIMIT_USED_BYTES: Final = 4 << 20  # of their keys
PORTION: Final = 8  # blocks that are encoded at once: a fraction of a millisecond of the loop
LOOK_BLOCKS: Final = 1024  # of a prefix that are looked up at once
LATELY_S: Final = 10.0  # for which a prefix that the store has is not looked up again
LIMIT_LATELY: Final = 4096  # such prefixes
POLL_S: Final = 0.2
FAILED_S: Final = 10.0  # after an internal error
ALL, USED, NONE = "all", "used", "none"


def zeros(flags: bytes) -> Iterator[int]:
    """The places of the zeros."""
    at = flags.find(0)
    while at >= 0:
        yield at
        at = flags.find(0, at + 1)


class Sharer:
    """The queue of one tenant."""

    def __init__(
        self, tenant: Tenant, driver: StoreDriver, known: KnownObjects, places: Places,
        writer: ObjectWriter, write: str,
    ) -> None:  # fmt: skip
        self.counts: Counter[str] = Counter(dropped=0)
        self._tenant = tenant
        self._driver = driver
        self._known = known
        self._places = places
        self._writer = writer
        self.write = write  # what is written from now on
        self._saved = bytearray()  # ids
        self._used: deque[tuple[KnownSpace, bytes]] = deque()
        self._used_bytes = 0
        self._lately: dict[tuple[int, bytes], float] = {}  # when the store had all of a prefix
        self._clock = asyncio.get_running_loop().time
        self._more = asyncio.Event()
        self.accepts = True  # blocks that are saved or used from now on
        self._is_sharing = False

    @property
    def queued(self) -> int:
        """How many blocks and prefixes wait."""
        return len(self._saved) // ID_BYTES + len(self._used)

    @property
    def left(self) -> int:
        """How many blocks and prefixes are not written yet, at least; 0 if none is. The writes of the archive
        count only after it has begun to end: before that there are always some."""
        sending = self._writer.sending - (self._writer.copying if self.accepts else 0)
        return self.queued + (sending or self._is_sharing)

    def saved(self, ids: bytes) -> None:
        """These blocks were committed to memory."""
        if self.write == ALL:
            self._add(ids)

    def renamed(self, ids: bytes) -> None:
        """These blocks came from the store, which has them only under another secret."""
        if self.write != NONE:
            self._add(ids)

    def _add(self, ids: bytes) -> None:
        if not self.accepts:
            return
        self._saved += ids
        if (over := len(self._saved) - LIMIT_SAVED * ID_BYTES) > 0:
            del self._saved[:over]
            self.counts["dropped"] += over // ID_BYTES
        self._more.set()

    def used(self, space: KnownSpace, keys: bytes) -> None:
        """A request found these blocks in memory: they were saved before, and are worth sharing."""
        if self.write != USED or not self.accepts:
            return
        if (
            self._clock()
            < self._lately.get((space.number, keys[-KEY_BYTES:]), -LATELY_S) + LATELY_S
        ):
            return
        self._used.append((space, keys))
        self._used_bytes += len(keys)
        while len(self._used) > LIMIT_USED or self._used_bytes > LIMIT_USED_BYTES:
            _, dropped = self._used.popleft()
            self._used_bytes -= len(dropped)
            self.counts["dropped"] += len(dropped) // KEY_BYTES
        self._more.set()

    def forgotten(self) -> None:
        """Objects are deleted: look each prefix up again."""
        self._lately.clear()

    async def run(self) -> None:
        """Write until the task is cancelled."""
        while True:
            while not (self._saved or self._used):
                self._more.clear()
                await self._more.wait()
            while not self._driver.is_writable:  # noqa: ASYNC110  # it may be off for long
                await asyncio.sleep(POLL_S)
            self._is_sharing = True
            try:
                for ids in self._next():
                    await (self._writer.share(ids) if ids else asyncio.sleep(0))
            except Exception:
                log.exception("remote: internal error while blocks were shared; some are not")
                await asyncio.sleep(FAILED_S)
            finally:
                self._is_sharing = False

    def _next(self) -> Iterator[bytes]:
        """The next blocks, in portions. An empty one comes after many blocks that need not be written."""
        store = self._tenant.catalog.blocks.store
        if self._saved:
            # Some may have been evicted, and their ids reused: then other blocks are shared.
            some = dict.fromkeys(array("I", bytes(self._saved[: PORTION * ID_BYTES])))
            del self._saved[: PORTION * ID_BYTES]
            yield array("I", some).tobytes()
            return
        space, keys = self._used.popleft()
        self._used_bytes -= len(keys)
        is_there = True
        for at in range(0, len(keys), LOOK_BLOCKS * KEY_BYTES):
            some_keys = keys[at : at + LOOK_BLOCKS * KEY_BYTES]
            for place in self._places.of(space):
                if space.index < 0:
                    return
                good = self._known.good(names_of(some_keys, place.mask))
                is_there = is_there and 0 not in good
                new = b"".join(some_keys[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in zeros(good))
                ids = store.present(space.index, place.group, place.shard, new) if new else b""
                for i in range(0, len(ids), PORTION * ID_BYTES):
                    yield ids[i : i + PORTION * ID_BYTES]
            yield b""
        if is_there:
            if len(self._lately) >= LIMIT_LATELY:
                self._lately.clear()
            self._lately[space.number, keys[-KEY_BYTES:]] = self._clock()
