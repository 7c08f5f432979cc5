"""The requests that wait until other clients have written blocks. Synchronous, and without a clock.

A request waits for one block of its prefix at a time, the last one that is being written: a save of many
blocks commits them in order, so most requests are looked at once. If a writer gives up, or blocks are
forgotten, all requests for blocks of that space are answered: that is rare, and each one that still has
blocks to wait for asks again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvtier.key import KEY_BYTES
from kvtier.wire import IN_PROGRESS, PRESENT
from kvtier_daemon.catalog.holds import Request
from kvtier_daemon.catalog.spaces import IDENTITY, KnownSpace
from kvtier_kernels import Store

LIMIT_WAITING: Final = 1024  # requests of a tenant
LIMIT_SESSION: Final = 256  # of one session
AWAITED_BLOCKS: Final = 1024  # of a request that are looked at
THERE: Final = bytes([PRESENT, IN_PROGRESS])

Part = tuple[int, int, int, bytes]  # index of the space, group, shard, key


@dataclass(slots=True)
class Waiting:
    """A request. `keys` of blocks that are all in memory or being written; in the `places` that are not
    listed, all are in memory. `part` is not."""

    index: int
    keys: bytes
    places: list[tuple[int, int]]
    then: Callable[[], None]
    part: Part | None = None


class AwaitedWrites:
    """The waiting requests of one tenant. A call of theirs must not use the catalog at once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[Request, Waiting] = {}
        self._of_part: dict[Part, set[Request]] = {}
        self._of_session: Counter[int] = Counter()

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def count(self, space: KnownSpace, keys: bytes, first: int) -> int:
        """How many blocks of this prefix from `first` on are in memory or being written, in all parts."""
        rest = keys[first * KEY_BYTES : (first + AWAITED_BLOCKS) * KEY_BYTES]
        count = len(rest) // KEY_BYTES
        for group, shard in _places(space) if count and space.index >= 0 else ():
            try:
                codes = self._codes(space.index, group, shard, rest[: count * KEY_BYTES])
            except ValueError:  # a key is given twice
                return 0
            if not (count := min(count, len(codes) - len(codes.lstrip(THERE)))):
                return 0
        return count if space.index >= 0 else 0

    def _codes(self, index: int, group: int, shard: int, keys: bytes) -> bytes:
        return self._store.probe(index, group, shard, keys, live=True)

    def call_when_written(
        self, request: Request, space: KnownSpace, keys: bytes, first: int, then: Callable[[], None]
    ) -> bool:
        """Call `then` once when all blocks are in memory that `count` counts now, or when some of them may
        not be written. Return False, without a call, if none is being written or too many requests wait."""
        self.cancel_calls(request)
        most = LIMIT_SESSION - self._of_session[request[0]], LIMIT_WAITING - len(self._waiting)
        count = self.count(space, keys, first) if min(most) > 0 else 0
        chain = keys[first * KEY_BYTES : (first + count) * KEY_BYTES]
        waiting = Waiting(space.index, chain, _places(space)[::-1], then)
        if not (count and self._wait(request, waiting)):
            return False
        self._waiting[request] = waiting
        self._of_session[request[0]] += 1
        return True

    def _wait(self, request: Request, waiting: Waiting) -> bool:
        """Wait for the last block that is being written; return False if none is, or one is missing."""
        while waiting.places:
            group, shard = waiting.places[-1]
            codes = self._codes(waiting.index, group, shard, waiting.keys)
            if codes.strip(THERE):
                return False
            if (at := codes.rfind(IN_PROGRESS)) >= 0:
                key = waiting.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
                waiting.part = waiting.index, group, shard, key
                self._of_part.setdefault(waiting.part, set()).add(request)
                return True
            waiting.places.pop()
        return False

    def cancel_calls(self, request: Request) -> None:
        """Cancel the pending call of this request."""
        waiting = self._waiting.pop(request, None)
        if waiting is None:
            return
        self._of_session[request[0]] -= 1
        if not self._of_session[request[0]]:
            del self._of_session[request[0]]
        if waiting.part is not None:
            requests = self._of_part[waiting.part]
            requests.discard(request)
            if not requests:
                del self._of_part[waiting.part]

    def written(self, ids: bytes) -> None:
        """These blocks are READY from now on."""
        if not self._waiting:
            return
        for index, group, shard, _, key, _ in IDENTITY.iter_unpack(self._store.identities(ids)):
            for request in self._of_part.pop((index, group, shard, key), ()):
                waiting = self._waiting[request]
                waiting.part = None
                if not self._wait(request, waiting):
                    self._call(request)

    def given_up(self, index: int | None = None) -> None:
        """Some blocks of this space, or of any, will not be written, or are forgotten."""
        for request, waiting in list(self._waiting.items()):
            if index is None or waiting.index == index:
                self._call(request)

    def _call(self, request: Request) -> None:
        then = self._waiting[request].then
        self.cancel_calls(request)
        then()


def _places(space: KnownSpace) -> list[tuple[int, int]]:
    """The groups and shards of a space."""
    groups = enumerate(space.spec.cache_groups)
    return [(group, shard) for group, kind in groups for shard in range(kind.shards)]
