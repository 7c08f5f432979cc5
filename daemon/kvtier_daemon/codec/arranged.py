"""Codecs that work on channels, for pages whose elements have another order.

An engine's page contains K and V of one layer for the tokens of one block, in the order that suits its
attention. A layout that ends with `page:K|V` describes it: the axes of K and of V from the outermost to the
innermost, `h` heads, `p` K or V, `t` tokens, `d` dims; of a divided axis, `t/16` selects the 16 tokens and
`t%16` the token in them. The layout of vLLM on a CPU is `page:hpdt|hptd`: for each head K, dim by dim, then
V, token by token.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass

from kvtier.layout import PAGE_MARK, KvSpec
from kvtier_daemon.codec.base import Codec

AXIS = re.compile(r"([hptd])(?:([/%])([0-9]{1,4}))?")
PARTS = 2
LIMIT_AXIS = 4096  # a place is computed for each element of an axis


@dataclass(frozen=True, slots=True)
class PageOrder:
    """The places of each part's heads, tokens and dims in a page, 4 bytes each, as the kernel wants them."""

    heads: bytes
    tokens: bytes
    dims: bytes


def order_of(spec: KvSpec, group: int) -> PageOrder | None:
    """Return the order of a group's pages, or None if the layout contains no complete order."""
    kind = spec.cache_groups[group]
    _, _, said = spec.layout.rpartition(" ")
    if not said.startswith(PAGE_MARK) or kind.parts != PARTS or spec.strides:
        return None
    if kind.kind == "state" or kind.opaque_bytes:
        return None
    sizes = {"h": kind.kv_heads, "p": PARTS, "t": spec.block_tokens, "d": kind.head_dim}
    orders = said.removeprefix(PAGE_MARK).split("|")
    if len(orders) != PARTS or max(sizes.values()) > LIMIT_AXIS:
        return None
    found: dict[str, array[int]] = {axis: array("I") for axis in "htd"}
    apart: set[int] = set()  # the distance from K to V
    for part, text in enumerate(orders):
        places = _places(text, sizes)
        if places is None:
            return None
        apart.add(places["p"][1])
        for axis in "htd":
            base = places["p"][part] if axis == "h" else 0
            found[axis].extend(base + place for place in places[axis])
    if len(apart) > 1:  # K and V would overlap
        return None
    return PageOrder(*(found[axis].tobytes() for axis in "htd"))


def _places(text: str, sizes: dict[str, int]) -> dict[str, list[int]] | None:
    """Return the place of each element of each axis. None unless each axis occurs once and completely."""
    # Axis, whether it is a part, the divisor, its extent.
    axes: list[tuple[str, str, int, int]] = []
    at = 0
    for match in AXIS.finditer(text):
        axis, way, number = match[1], match[2] or "", int(match[3] or 0)
        if match.start() != at or (way and (not number or sizes[axis] % number)):
            return None
        at = match.end()
        extent = {"": sizes[axis], "/": sizes[axis] // max(number, 1), "%": number}[way]
        axes.append((axis, way, number, extent))
    if at != len(text):
        return None
    found: dict[str, list[int]] = {}
    for axis, size in sizes.items():
        mine = sorted((way, number) for name, way, number, _ in axes if name == axis)
        halves = (
            len(mine) == 2 and [way for way, _ in mine] == ["%", "/"] and mine[0][1] == mine[1][1]
        )
        if mine != [("", 0)] and not halves:
            return None
        found[axis] = [0] * size
    stride = 1
    for axis, way, number, extent in reversed(axes):
        for index in range(sizes[axis]):
            part = index // number if way == "/" else index % number if way == "%" else index
            found[axis][index] += part * stride
        stride *= extent
    return found


class Arranged(Codec):
    """A codec for pages of this order. Decodes only whole pages, which means all parts of a layer."""

    lossy = True

    def __init__(self, codec: Codec, order: PageOrder) -> None:
        self.codec = codec
        self.order = order
        self.name = codec.name
        self.number = codec.number
        assert codec.recipe is not None, "a lossless codec needs no order of channels"
        self.recipe = codec.recipe.of_pages(PARTS, order.heads, order.tokens, order.dims)
