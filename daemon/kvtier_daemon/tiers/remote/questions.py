"""Asks in the background which blocks are in the store, after a match missed them. No match waits for it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from kvtier.key import KEY_BYTES
from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.tiers.remote.driver import StoreDriver
from kvtier_daemon.tiers.remote.known import KnownObjects, names_of, place_mask
from kvtier_daemon.tiers.remote.messages import Answer, HeadObjects, ListObjects, Request
from kvtier_daemon.tiers.remote.objects import folder_of, keys_of, object_name
from kvtier_daemon.tiers.remote.places import LIMIT_SPACES, Places

LIMIT_QUESTIONS: Final = 256  # the oldest are dropped
AT_ONCE: Final = 4
MOST_NAMES: Final = 64  # of one question; the first one is about one block, the next about more
GROWS: Final = 8
# Objects of a space that are listed when it is used for the first time.
LIST_MOST: Final = 1_000_000


class Questions:
    def __init__(self, driver: StoreDriver, known: KnownObjects, places: Places) -> None:
        self._driver = driver
        self._known = known
        self._places = places
        # By the first key.
        self._waiting: OrderedDict[tuple[bytes, bytes], tuple[KnownSpace, bytes]] = OrderedDict()
        self._asked: set[tuple[bytes, bytes]] = set()  # in progress
        self._listed: dict[bytes, int] = {}  # the driver's epoch, by space
        self._more = asyncio.Event()
        # Gets names of objects that exist, and the size of the largest.
        self.found: Callable[[Sequence[str], int], None] = lambda names, most_bytes: None

    def __len__(self) -> int:
        return len(self._waiting) + len(self._asked)

    def ask(self, space: KnownSpace, keys: bytes) -> None:
        """Find out later which of the leading blocks of these exist."""
        name = space.identity, keys[:KEY_BYTES]
        if name in self._asked or name in self._waiting:
            return
        if len(self._waiting) >= LIMIT_QUESTIONS:
            self._waiting.popitem(last=False)
        self._waiting[name] = space, keys
        self._more.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(AT_ONCE):
                tasks.create_task(self._run_one(), name=f"remote questions {number}")

    async def _run_one(self) -> None:
        while True:
            while not self._waiting:
                self._more.clear()
                await self._more.wait()
            name, (space, keys) = self._waiting.popitem()  # the newest: its request may still wait
            self._asked.add(name)
            try:
                await self.find(space, keys)
                if self._listed.get(space.identity) != self._driver.epoch:
                    await self._list(space)
            finally:
                self._asked.discard(name)

    def _answers(self, request: Request) -> asyncio.Queue[Answer]:
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._driver.ask(request, answers.put_nowait)
        return answers

    async def find(self, space: KnownSpace, keys: bytes) -> None:
        """Ask about more and more blocks, until one does not exist."""
        places, many = self._places.of(space), 1
        while keys and places:
            some = keys[: max(1, many // len(places)) * KEY_BYTES]
            each = [some[at : at + KEY_BYTES] for at in range(0, len(some), KEY_BYTES)]
            names = [object_name(place.identity(space, key)) for place in places for key in each]
            answer = await self._answers(HeadObjects(self._driver.next_id(), names)).get()
            if answer.outcome or len(answer.found) != len(names):
                return
            all_found = True
            for number, place in enumerate(places):
                found = answer.found[number * len(each) : (number + 1) * len(each)]
                for key, is_there in zip(each, found, strict=True):
                    name = names_of(key, place.mask)
                    if is_there or not self._known.present(name):  # it may have been written since
                        self._known.note(name, bool(is_there))
                    all_found &= bool(is_there) or place.kind.kind != "full"
            if any(answer.found):
                some_found = [
                    one for one, is_there in zip(names, answer.found, strict=True) if is_there
                ]
                self.found(some_found, max(place.headers.most_bytes for place in places))
            if not all_found:
                return
            keys, many = keys[len(some) :], min(many * GROWS, MOST_NAMES)

    async def _list(self, space: KnownSpace) -> None:
        """Note which blocks of this space exist: a host that is new knows of none."""
        if len(self._listed) >= LIMIT_SPACES:
            del self._listed[next(iter(self._listed))]
        self._listed[space.identity] = self._driver.epoch
        request = ListObjects(self._driver.next_id(), folder_of(space.identity), LIST_MOST)
        answers = self._answers(request)
        while (answer := await answers.get()).names:
            for (group, shard), keys in keys_of(space.identity, answer.names).items():
                mask = place_mask(space.identity, group, shard)
                self._known.note(names_of(keys, mask), True)
            if places := self._places.of(space):
                self.found(answer.names, max(place.headers.most_bytes for place in places))
        if answer.outcome:  # the next question lists it again
            self._listed.pop(space.identity, None)
