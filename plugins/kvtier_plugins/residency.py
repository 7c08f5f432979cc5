"""Which blocks an engine holds in its own cache, and the reports of it to the daemon. It imports no engine.

The engine's thread tells what its pages contain and which pages it reuses. A thread of its own sends the
changes, at most every COALESCE_S; a block that came and left in between is not sent. After a lost connection,
or if the thread falls behind, it sends all blocks again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from kvtier import Client, Keys, KvtierError
from kvtier.space import Space

log = logging.getLogger("vllm.kvtier")

LIMIT_BLOCKS = 1 << 17  # that are known: about 40 MB; the engine's other blocks are not reported
LIMIT_QUEUED = 1 << 16  # changes that wait for the thread; above this it gets all blocks at once
SENT_BLOCKS = 1024  # in one message: 32 KiB
COALESCE_S = 0.02
CHECKED_PAGES = 4  # per step, whether the engine has dropped them otherwise
DRAIN_S = 0.5

Block = tuple[int, bytes]  # group and key


class Session(Protocol):
    """A connection of the engine with its space open."""

    @property
    def client(self) -> Client: ...
    @property
    def space(self) -> Space: ...


@dataclass(slots=True, eq=False)
class Copy:
    """One copy of a block in the engine's pages."""

    block: Block
    pages: Sequence[int]


class EngineBlocks:
    """What the pages of an engine contain. Pages of different groups have different numbers. For the engine's
    thread only."""

    def __init__(self) -> None:
        self.copies: dict[Block, int] = {}  # blocks that the engine holds, and how many times
        self._of: dict[int, Copy] = {}  # by page
        self._changes: list[tuple[Block, bool]] = []

    def filled(self, group: int, key: bytes, pages: Sequence[int]) -> None:
        """These pages contain a block from now on, and the engine finds it there."""
        known = self._of.get(pages[0])
        if known is not None and known.block == (group, key):
            return
        self.reused(pages)
        if len(self._of) >= LIMIT_BLOCKS:
            return
        copy = Copy((group, key), pages)
        for page in pages:
            self._of[page] = copy
        before = self.copies.get(copy.block, 0)
        self.copies[copy.block] = before + 1
        if not before:
            self._changes.append((copy.block, True))

    def reused(self, pages: Iterable[int]) -> None:
        """The engine does not find the blocks of these pages any longer."""
        for page in self._of.keys() & pages if isinstance(pages, set) else pages:
            copy = self._of.get(page)
            if copy is None:
                continue
            for part in copy.pages:
                self._of.pop(part, None)
            left = self.copies[copy.block] - 1
            if left:
                self.copies[copy.block] = left
            else:
                del self.copies[copy.block]
                self._changes.append((copy.block, False))

    def check(self, is_held: Callable[[int], bool]) -> None:
        """Ask for a few pages whether the engine still finds their blocks: each in its turn."""
        for page in list(islice(self._of, CHECKED_PAGES)):
            if is_held(page):
                self._of[page] = self._of.pop(page)
            else:
                self.reused((page,))

    def clear(self) -> None:
        """The engine holds nothing."""
        self.reused(list(self._of))

    def take_changes(self) -> list[tuple[Block, bool]]:
        """The changes since the last call, the oldest first."""
        changes, self._changes = self._changes, []
        return changes


class ResidencyReports:
    """Sends what an engine holds. `session` returns the present one, or None."""

    def __init__(self, session: Callable[[], Session | None]) -> None:
        self.ignored = False  # the daemon does not know such reports
        self._session = session
        self._queue: deque[list[tuple[Block, bool]] | frozenset[Block]] = deque()
        self._queued = 0
        self._held: set[Block] = set()  # the thread's own, as the daemon is to know it
        self._news = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvtier-resident", daemon=True)
        self._thread.start()

    def add(self, blocks: EngineBlocks) -> None:
        """Send the changes of these blocks later. Never waits."""
        changes = blocks.take_changes()
        if not changes:
            return
        self._queued += len(changes)
        if self._queued > LIMIT_QUEUED:
            self._queue.clear()
            self._queue.append(frozenset(blocks.copies))
            self._queued = 0
        else:
            self._queue.append(changes)
        self._news.set()

    def wake(self) -> None:
        """The session is another one."""
        self._news.set()

    def close(self) -> None:
        self._closing = True
        self._news.set()
        self._thread.join(DRAIN_S)

    def _run(self) -> None:
        told: Session | None = None
        while True:
            self._news.wait()
            self._news.clear()
            if self._closing:
                return
            time.sleep(COALESCE_S)
            changed = self._merge()
            session = self._session()
            if session is None:
                told = None
                continue
            try:
                if session is not told:
                    told = session
                    self.ignored = "hot" not in session.client.stats()
                    changed = dict.fromkeys(self._held, True)
                    if not self.ignored:
                        session.space.tell_resident(0, reset=True)
                if not self.ignored:
                    for group, entered, left in _messages(changed):
                        self._tell(session, group, entered, left)
            except KvtierError as error:
                # The connection's own thread connects again, and `wake` follows.
                log.info("kvtier: cannot report the engine's own blocks: %s", str(error))
                told = None
            del session

    def _merge(self) -> dict[Block, bool]:
        """Take what is queued; return how the daemon's knowledge has to change."""
        changed: dict[Block, bool] = {}
        while self._queue:
            one = self._queue.popleft()
            if isinstance(one, frozenset):
                changed |= dict.fromkeys(self._held - one, False)
                changed |= dict.fromkeys(one, True)
                self._held = set(one)
                continue
            self._queued = max(0, self._queued - len(one))
            for block, entered in one:
                changed[block] = entered
                (self._held.add if entered else self._held.discard)(block)
        return changed

    def _tell(self, session: Session, group: int, entered: list[bytes], left: list[bytes]) -> None:
        """Send one message, once the daemon has read the last one."""
        while session.client.link.connection.backlog_bytes and not self._closing:
            time.sleep(COALESCE_S)
        session.space.tell_resident(group, Keys(b"".join(entered)), Keys(b"".join(left)))


def _messages(changed: dict[Block, bool]) -> Iterator[tuple[int, list[bytes], list[bytes]]]:
    """The changes in messages of one group each: blocks that left, then blocks that entered."""
    for group in sorted({block[0] for block in changed}):
        for what in (False, True):
            keys = [
                key for (number, key), entered in changed.items()
                if number == group and entered is what
            ]  # fmt: skip
            for first in range(0, len(keys), SENT_BLOCKS):
                part = keys[first : first + SENT_BLOCKS]
                yield (group, part, []) if what else (group, [], part)
