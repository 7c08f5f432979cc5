"""What a policy is: it says which blocks should go first, and nothing else.

A policy knows the blocks that may be evicted now, by their ids; leased blocks are not among them. Only
those that are held while they are written to the disk stay, and keep their places.
It never evicts, and it is told of every block that came or went. Ids come in batches, four bytes
each, so that a thousand blocks cost one call.
"""

from typing import Protocol


class Policy(Protocol):
    """Orders evictable blocks; later in a batch counts as more recent."""

    def added(self, ids: bytes) -> None:
        """Blocks became evictable: committed, or their last lease ended."""

    def touched(self, ids: bytes) -> None:
        """Blocks were wanted again. Ids that the policy does not hold are passed over."""

    def removed(self, ids: bytes) -> None:
        """Blocks are not evictable any more: leased, evicted, forgotten. Others are passed over."""

    def demoted(self, ids: bytes) -> None:
        """Blocks go first from now on, in the batch's order: no match reaches them any more."""

    def hinted(self, ids: bytes, importance: float) -> None:
        """An engine said how much these blocks matter. A policy may pass over it."""

    def victims(self, n: int) -> bytes:
        """The n blocks that should go first, coldest first, or all there are. Changes nothing."""

    def __len__(self) -> int:
        """How many blocks it holds."""

    def memory_bytes(self) -> int:
        """Bytes that it occupies."""


def make(name: str) -> Policy:
    """The policy of this name, as the configuration spells it."""
    if name == "lru":
        from kvtier.policy.lru import Lru

        return Lru()
    raise ValueError(f"no policy is called {name!r}; there is: lru")
