"""What a policy is: it says which blocks should go first, and nothing else.

A policy knows every block of a tenant from the time it is READY until it is nowhere, by its id. It never
evicts: it is told of all that came, was used and went, and names those that should go next. Those that are
held are not among them; those that are held only while they are written to the disk may be, and keep their
places. Ids come in batches, four bytes each, so that a thousand blocks cost one call; a batch is of one
chain, head first, and a policy sees to it that the head outlives the tail. An id that it doesn't know is
passed over.
"""

from typing import Protocol

from kvtier_kernels import Arc, Attention, Lfu, Lru, Prefix, S3Fifo, Value
from kvtier_kernels import Policy as Native

ID_BYTES, NAME_BYTES = 4, 8
NO_PARENT = 0xFFFFFFFF


class Policy(Protocol):
    """Orders blocks in memory. It has no clock: `now` moves the time in which the other calls happen."""

    def now(self, seconds: float) -> None:
        """It is so late, on a clock that never goes back."""

    def added(self, ids: bytes, names: bytes = b"", parents: bytes = b"") -> None:
        """Blocks are READY, and some request brought them: new ones, or those that had `left`.

        A name, of 8 bytes, is the same when the block comes again after it was gone; a parent is the id of
        the block before it in its chain, or NO_PARENT. Where nobody can say, both are left out.
        """

    def wanted(self, ids: bytes, names: bytes = b"") -> None:
        """A request used these blocks. Told once of each request."""

    def refreshed(self, ids: bytes) -> None:
        """A request that was told already uses these blocks: they are recent, and no more."""

    def held(self, ids: bytes) -> None:
        """Blocks are no victims until they are `freed`: somebody reads them. That alone is no use."""

    def freed(self, ids: bytes) -> None:
        """Blocks may be victims again."""

    def left(self, ids: bytes) -> None:
        """Blocks are on disk alone. They may be `added` again, by the same ids."""

    def gone(self, ids: bytes) -> None:
        """Blocks are nowhere any more, and their ids are free for others."""

    def demoted(self, ids: bytes) -> None:
        """Blocks go first from now on, in the batch's order: no match reaches them any more."""

    def hinted(self, ids: bytes, importance: float) -> None:
        """An engine said how much these blocks matter, up to 1. A policy may pass over it."""

    def victims(self, n: int) -> bytes:
        """The n blocks that should go first, coldest first, or all there are. Asked again, it says the
        same."""

    def __len__(self) -> int:
        """How many blocks it may name."""

    def memory_bytes(self) -> int:
        """Bytes that it occupies."""


NATIVE = {
    "lru": Lru,
    "lfu": Lfu,
    "arc": Arc,
    "s3fifo": S3Fifo,
    "prefix": Prefix,
    "attention": Attention,
    "value": Value,
    "auto": Value,
}


def make(name: str) -> Native:
    """The policy of this name, as the configuration spells it. `auto` is what the measurements pick."""
    if name not in NATIVE:
        raise ValueError(f"no policy is called {name!r}; there is: {', '.join(NATIVE)}")
    return NATIVE[name]()
