"""A policy that hears of a lookup after it is answered.

What a policy makes of a use takes longer than finding the blocks, and no answer depends on it: only the next
choice of victims does. So the events of lookups are queued until `settle`; every other call tells the policy
of the queue first. The policy hears of the same events in the same order as without the queue.
"""

from collections.abc import Callable
from typing import Any

from kvtier.policy.base import ID_BYTES, Policy

LIMIT_QUEUED = 1 << 16  # blocks and events; beyond, the policy hears of all of them at once


class Deferred:
    """A Policy in front of another. A use carries its blocks' names, so it stays true when an id is given to
    another block before the policy hears of it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._queue: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._queued = 0

    def settle(self) -> None:
        """Tell the policy of what is queued, oldest first."""
        if self._queue:
            queue, self._queue, self._queued = self._queue, [], 0
            for tell, arguments in queue:
                tell(*arguments)

    def _later(self, blocks: int, tell: Callable[..., None], *arguments: Any) -> None:
        self._queue.append((tell, arguments))
        self._queued += 1 + blocks
        if self._queued > LIMIT_QUEUED:
            self.settle()

    # Events of lookups.

    def now(self, seconds: float) -> None:
        self._later(0, self.policy.now, seconds)

    def wanted(self, ids: bytes, names: bytes = b"") -> None:
        self._later(len(ids) // ID_BYTES, self.policy.wanted, ids, names)

    def refreshed(self, ids: bytes) -> None:
        self._later(len(ids) // ID_BYTES, self.policy.refreshed, ids)

    def held(self, ids: bytes) -> None:
        self._later(len(ids) // ID_BYTES, self.policy.held, ids)

    def freed(self, ids: bytes) -> None:
        self._later(len(ids) // ID_BYTES, self.policy.freed, ids)

    # Events of saves, evictions and forgets.

    def added(self, ids: bytes, names: bytes = b"", parents: bytes = b"") -> None:
        self.settle()
        self.policy.added(ids, names, parents)

    def left(self, ids: bytes) -> None:
        self.settle()
        self.policy.left(ids)

    def gone(self, ids: bytes) -> None:
        if ids:
            self.settle()
            self.policy.gone(ids)

    def demoted(self, ids: bytes) -> None:
        self.settle()
        self.policy.demoted(ids)

    def hinted(self, ids: bytes, importance: float) -> None:
        self.settle()
        self.policy.hinted(ids, importance)

    def victims(self, n: int) -> bytes:
        self.settle()
        return self.policy.victims(n)

    def __len__(self) -> int:
        self.settle()
        return len(self.policy)

    def memory_bytes(self) -> int:
        return self.policy.memory_bytes()
