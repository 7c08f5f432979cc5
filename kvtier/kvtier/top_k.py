"""Load chosen tokens of a prefix, for attention that selects the tokens that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtier.arguments import Checking
from kvtier.errors import InvalidArgument
from kvtier.key import Keys
from kvtier.loading import Lease
from kvtier.parts import Selection, token_places
from kvtier.space import Space, check_place, check_threads, copy_threads
from kvtier_kernels import Buffers

if TYPE_CHECKING:
    from kvtier_kernels._native import _Integers


def load_tokens(
    space: Space,
    keys: Keys | Sequence[bytes] | Lease,
    tokens: _Integers,
    targets: Sequence[Any] | Any,
    deadline_ms: int = 500,
    group: int = 0,
    shard: int = 0,
    threads: int | None = None,
    *,
    layers: Sequence[int] | None = None,
    wait_ms: int = 0,
) -> bool:
    """Copy these tokens, given by their places in the prefix and in any order, from blocks in memory. Returns
    whether all of them were copied; otherwise the content of `targets` is undefined.

    `targets` is one buffer per layer and part, or one buffer for all: layer after layer, in each part after
    part, and in each of these the tokens in the order of `tokens`. A layout with heads before tokens has a
    buffer per head too. `layers`, and what is verified: as in `Space.load_into`. The prefix must be in memory
    as a whole: the load first waits for blocks from disk, for at most `wait_ms`, and these are read whole.

    In place of `keys`, a caller that loads several times passes a lease that it holds, from `Space.lease`.
    """
    if not isinstance(space, Space):
        raise InvalidArgument(f"space: expected a Space, got {type(space).__name__}")
    block_tokens = space.spec.block_tokens
    check_place(space.spec, group, shard)
    starts, each = token_places(space.spec, group, layers)
    chosen = Selection(space.group_block_bytes(group), starts, each, 0)
    check_threads(threads)
    with Checking("tokens"):
        count = len(tokens)  # type: ignore[arg-type]  # only a sequence or an array has places
    with Checking("targets"):
        wanted = Buffers(targets, 0, len(starts), count * each, writable=True)
    many = threads or copy_threads(count * chosen.nbytes)

    def copied(lease: Lease) -> bool:
        if not lease.ready:
            return False
        part = lease.part(group, shard)
        return lease.copy_tokens(part, chosen, tokens, block_tokens, wanted, many)

    if isinstance(keys, Lease):
        return copied(keys)
    keys = Keys.of(keys)
    lease, is_whole = space.lease(keys, deadline_ms, [shard], wait_ms=wait_ms), False
    try:
        is_whole = copied(lease)
        if not is_whole and max(tokens, default=0) >= len(keys) * block_tokens:  # type: ignore[arg-type]
            raise InvalidArgument(f"tokens: the prefix has {len(keys) * block_tokens} tokens")
    finally:
        lease.release(0, count * chosen.nbytes if is_whole else 0)
    return is_whole
