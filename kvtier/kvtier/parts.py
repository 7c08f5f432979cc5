"""Parts of blocks: chosen layers, chosen tokens, and where their bytes are in a block."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from kvtier.arguments import whole
from kvtier.errors import InvalidArgument
from kvtier.layout import PAGE_MARK

if TYPE_CHECKING:
    from kvtier.layout import KvSpec


class Selection(NamedTuple):
    """The same bytes of every block, which has `block_bytes`: `each` bytes from each of `starts`. `tokens`:
    how many tokens of a block a load of them counts as used; those of all layers count once."""

    block_bytes: int
    starts: tuple[int, ...]
    each: int
    tokens: int

    @property
    def nbytes(self) -> int:
        return len(self.starts) * self.each


def choose(
    spec: KvSpec, group: int, layers: Sequence[int] | None, tokens: range | None
) -> Selection | None:
    """Return where these layers and tokens are in a block of the group; None for all of it. Raises
    InvalidArgument if the block has no such layers or tokens, or a layout that does not show them."""
    kind, many, nbytes = spec.cache_groups[group], spec.block_tokens, spec.group_block_bytes(group)
    if tokens is not None:
        if not isinstance(tokens, range) or tokens.step != 1 or not tokens:
            raise InvalidArgument(f"tokens: {tokens!r} is not a range of consecutive tokens")
        whole("tokens", tokens.start, 0, many - 1)
        whole("tokens", tokens.stop, 1, many)
        tokens = tokens if len(tokens) < many else None
    if layers is None and tokens is None:
        return None
    numbers = _layers(kind.layers, layers)
    used = len(range(many) if tokens is None else tokens) if 0 in numbers else 0
    if tokens is None:
        _check_layers(spec, group)
        each, starts = nbytes // kind.layers, numbers
        if all(number == numbers[0] + at for at, number in enumerate(numbers)):
            each, starts = each * len(numbers), numbers[:1]
        return Selection(
            nbytes, tuple(number * (nbytes // kind.layers) for number in starts), each, used
        )
    starts, each = token_places(spec, group, numbers)
    first = tokens.start * each
    return Selection(nbytes, tuple(start + first for start in starts), len(tokens) * each, used)


def token_places(
    spec: KvSpec, group: int, layers: Sequence[int] | None
) -> tuple[tuple[int, ...], int]:
    """Return where the first token of these layers is in a block: a place for each layer and part, and for
    each head if the layout has the heads before the tokens. Also return the bytes of a token in each."""
    kind = spec.cache_groups[group]
    _check_layers(spec, group)
    axes = spec.layout.split(",")
    sizes = {"part": kind.parts, "head": kind.kv_heads}
    outer = axes[1 : axes.index("token")] if "token" in axes else ["none"]
    if kind.kind == "state" or not set(outer) <= set(sizes):
        text = "the tokens of a state, or of this layout, have no place of their own in a block"
        raise InvalidArgument(f"tokens: {text}: {spec.layout!r}")
    many = prod(sizes[axis] for axis in outer)
    each = spec.group_block_bytes(group) // (kind.layers * many * spec.block_tokens)
    run = each * spec.block_tokens
    numbers = _layers(kind.layers, layers)
    return tuple((number * many + at) * run for number in numbers for at in range(many)), each


def _layers(count: int, layers: Sequence[int] | None) -> Sequence[int]:
    if layers is None:
        return range(count)
    if not isinstance(layers, Sequence) or isinstance(layers, (str, bytes)) or not layers:
        raise InvalidArgument(f"layers: {layers!r} is not a range or a list of layers")
    return [whole("layers", number, 0, count - 1) for number in layers]


def _check_layers(spec: KvSpec, group: int) -> None:
    if (
        spec.cache_groups[group].opaque_bytes
        or spec.strides
        or not spec.layout.startswith("layer,")
        or PAGE_MARK in spec.layout
    ):
        text = f"blocks of group {group} cannot be divided: opaque, or the layout {spec.layout!r}"
        raise InvalidArgument(f"layers, tokens: {text}")
