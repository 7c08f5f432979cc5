"""The interface of a policy, which selects the blocks to evict first.

A policy knows every block of a tenant by its id, from the time it is READY until it is gone. It never evicts:
it gets events about blocks that come, are used and go, and selects the next victims. Held blocks are never
victims, except that blocks held only during their write to the disk may be; these keep their places. Ids come
in batches of four bytes each, so that a thousand blocks cost one call. A batch belongs to one chain, head
first, and a policy must keep the head longer than the tail. It ignores unknown ids.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from kvtier_kernels import POLICIES, make_policy

ID_BYTES, NAME_BYTES = 4, 8
NO_PARENT = 0xFFFFFFFF


class Policy(Protocol):
    """Orders blocks in memory. It has no clock: `now` sets the time of the calls that follow."""

    def now(self, seconds: float) -> None:
        """Set the time, of a monotonic clock."""

    def added(self, ids: bytes, names: bytes = b"", parents: bytes = b"") -> None:
        """Blocks became READY because of a request: new ones, or blocks that had `left`.

        A name has 8 bytes, and is the same if the block returns after it was gone. A parent is the id of the
        block before it in its chain, or NO_PARENT. Both are omitted if unknown.
        """

    def wanted(self, ids: bytes, names: bytes = b"") -> None:
        """A request used these blocks. Called once per request."""

    def refreshed(self, ids: bytes) -> None:
        """A request that was counted before uses these blocks: they are recent, without a new use."""

    def held(self, ids: bytes) -> None:
        """Blocks must not be victims until they are `freed`, because a client reads them. This is no use."""

    def freed(self, ids: bytes) -> None:
        """Blocks may be victims again."""

    def left(self, ids: bytes) -> None:
        """Blocks are only on disk now. They may be `added` again with the same ids."""

    def gone(self, ids: bytes) -> None:
        """Blocks are neither in memory nor on disk now. Their ids may be reused."""

    def demoted(self, ids: bytes) -> None:
        """Select these blocks first from now on, in the order of the batch: no match can find them."""

    def hinted(self, ids: bytes, importance: float, names: bytes = b"") -> None:
        """An engine reported the importance of these blocks, up to 1. A policy may ignore it."""

    def victims(self, n: int) -> bytes:
        """The n blocks to evict first, coldest first, or all if there are fewer. Changes nothing."""

    def __len__(self) -> int:
        """How many blocks may be victims."""

    def memory_bytes(self) -> int:
        """The memory that the policy uses."""


AUTO = "value"  # the best one in the measurements
# The names for the configuration. kernels/include/policies.h lists the native ones.
NAMED: dict[str, Callable[[], Policy]] = {
    **{name: partial(make_policy, name) for name in POLICIES},
    "auto": partial(make_policy, AUTO),
}


def make(name: str) -> Policy:
    """A new policy of this name, as the configuration spells it."""
    if name not in NAMED:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(NAMED)}")
    return NAMED[name]()
