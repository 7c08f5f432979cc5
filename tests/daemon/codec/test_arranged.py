"""Pages in the memory orders of engines: the parts that codecs get, and the decoded pages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conformance.codec_tests import kv
from kvtier import KvSpec
from kvtier.errors import FrameError
from kvtier.frame import ELEMENTS, RAW, Template, stamp
from kvtier_daemon.codec import block_parts, framing, grid
from kvtier_daemon.codec.arranged import Arranged, order_of
from kvtier_daemon.codec.losses import NAMES, OPAQUE, Loss, Losses
from kvtier_daemon.codec.table import BY_NAME
from kvtier_kernels import (
    decode_frame,
    force,
    implementations,
    reorder_pages,
    seal_frame,
    xxh3_128,
)
from models.codecs import decode, decode_frame_by, encode
from support.losses_by_twins import block_of, encode_lossy_by, profile_of
from support.specs import spec_of

LAYERS, HEADS, TOKENS, DIM = 3, 2, 32, 64
PLAIN = spec_of("order", layers=LAYERS, kv_heads=HEADS, head_dim=DIM, block_tokens=TOKENS)
Words = npt.NDArray[np.uint16]


def ordered(order: str, **changes: Any) -> KvSpec:
    return spec_of(
        "order", layers=LAYERS, kv_heads=HEADS, head_dim=DIM, block_tokens=TOKENS,
        layout=f"LBHNC 0123 page:{order}", **changes,
    )  # fmt: skip


def vec(k: Words, v: Words) -> list[Words]:
    """[token, head, dim]: for each head K dim by dim, then V token by token."""
    return [part for h in range(HEADS) for part in (k[:, h].T, v[:, h])]


def amx(k: Words, v: Words) -> list[Words]:
    """K in tiles of 16 tokens, V in tiles of 16 dims with two dims interleaved in each."""
    found = []
    for h in range(HEADS):
        tiles = k[:, h].reshape(TOKENS // 16, 16, DIM // 2, 2).transpose(0, 2, 1, 3)
        columns = v[:, h].reshape(TOKENS // 2, 2, DIM // 16, 16).transpose(2, 0, 3, 1)
        found += [tiles, columns]
    return found


def side_by_side(k: Words, v: Words) -> list[Words]:
    """For each head, each token's K and V."""
    return [np.stack([k[t, h], v[t, h]]) for h in range(HEADS) for t in range(TOKENS)]


def halves(k: Words, v: Words) -> list[Words]:
    """An attention kernel's blocks, which are half as large."""
    n = TOKENS // 2
    return [part for at in (0, n) for part in vec(k[at : at + n], v[at : at + n])]


ORDERS = {
    "hpdt|hptd": vec,
    "hpt/16d/2t%16d%2|hpd/16t/2d%16t%2": amx,
    "htpd|htpd": side_by_side,
    "t/16hpdt%16|t/16hpt%16d": halves,
    "pthd|pthd": lambda k, v: [k, v],
}


def page_of(order: str, k: Words, v: Words) -> Words:
    return np.concatenate([part.ravel() for part in ORDERS[order](k, v)])


@pytest.mark.parametrize("order", ORDERS)
def test_pages_are_reordered_and_restored(order: str) -> None:
    values = np.random.default_rng(0).permutation(2 * TOKENS * HEADS * DIM * LAYERS)
    parts = values.astype(np.uint16).reshape(LAYERS, 2, TOKENS, HEADS, DIM)
    block = np.concatenate([page_of(order, *layer) for layer in parts]).tobytes()
    found = order_of(ordered(order), 0)
    assert found is not None
    into, back = bytearray(len(block)), bytearray(len(block))
    tables = (found.heads, found.tokens, found.dims)
    reorder_pages(2, 2, *tables, block, into, False)
    assert bytes(into) == parts.tobytes()
    reorder_pages(2, 2, *tables, into, back, True)
    assert bytes(back) == block
    wide = np.frombuffer(block, np.uint16).astype(np.uint32).tobytes()
    into = bytearray(len(wide))
    reorder_pages(4, 2, *tables, wide, into, False)
    assert bytes(into) == parts.astype(np.uint32).tobytes()


@pytest.mark.parametrize("asked", NAMES)
@pytest.mark.parametrize("order", ["hpdt|hptd", "hpt/16d/2t%16d%2|hpd/16t/2d%16t%2"])
def test_codecs_see_the_same_values_in_every_order(order: str, asked: str) -> None:
    plain = block_of(b"one", PLAIN)
    parts = np.frombuffer(plain, np.uint16).reshape(LAYERS, 2, TOKENS, HEADS, DIM)
    block = np.concatenate([page_of(order, *layer) for layer in parts]).tobytes()
    found = []
    for spec, source in ((PLAIN, plain), (ordered(order), block)):
        loss = Losses([("order", asked)], [profile_of(PLAIN)]).find(spec)
        assert isinstance(loss, Loss)
        codec = loss.codec(0, 0)
        assert codec is not None
        into, back = bytearray(len(source)), bytearray(len(source))
        lies = grid.grids(spec, 0, ordered=isinstance(codec, Arranged))
        entries = encode(codec, source, block_parts.entries(spec, 0), spec.dtype, into, lies, 32)
        decode(codec, into, entries, spec.dtype, back)
        size = sum(entry.nbytes for entry in entries)
        found.append((entries, bytes(into[:size]), bytes(back)))
    assert found[0][:2] == found[1][:2], "the same payload"
    lost = np.frombuffer(found[0][2], np.uint16).reshape(LAYERS, 2, TOKENS, HEADS, DIM)
    assert found[1][2] == np.concatenate([page_of(order, *layer) for layer in lost]).tobytes()
    assert found[1][2] != block


def test_one_layer_can_be_decoded_alone_but_not_half_of_one() -> None:
    spec = ordered("hpdt|hptd")
    order = order_of(spec, 0)
    assert order is not None
    codec = Arranged(BY_NAME["q8"], order)
    block, into = block_of(b"x", spec), bytearray(spec.block_bytes)
    entries = encode(
        codec, block, block_parts.entries(spec, 0), "bfloat16", into, grid.grids(spec, 0, True)
    )
    whole, alone = bytearray(len(block)), bytearray(len(block) // LAYERS)
    decode(codec, into, entries, "bfloat16", whole)
    decode(codec, into, entries[2:4], "bfloat16", alone)
    size = len(alone)
    assert alone == whole[size : 2 * size]
    for some in (entries[1:3], entries[:1], entries[:3]):
        with pytest.raises(FrameError, match="only some of a page's parts"):
            decode(codec, into, some, "bfloat16", whole)


@pytest.mark.parametrize(
    "order",
    [
        "", "hpdt", "hpdt|hptd|hptd", "hpd|hptd", "hpdtt|hptd", "hpdt/16|hptd", "hpdt/16t%8|hptd",
        "hpdt/5t%5|hptd", "hpdt/0t%0|hptd", "hpdx|hptd", "hpdt%16|hptd", "h pdt|hptd",
        "t/16hpdt%16|t/16hptd%16", "hpdt|phtd", "phdt|hptd",
    ],
)  # fmt: skip
def test_an_invalid_order_is_opaque(order: str) -> None:
    spec = ordered(order)
    assert order_of(spec, 0) is None
    assert Losses([("order", "q8")]).find(spec) == OPAQUE


def test_an_order_without_heads_is_opaque() -> None:
    assert order_of(ordered("hpdt|hptd", strides=(1,)), 0) is None
    large = spec_of("order", kv_heads=1, layers=1, head_dim=8192, layout="a page:hpdt|hptd")
    assert order_of(large, 0) is None, "nobody waits for its tables"


def test_analysing_a_large_page_takes_as_long_as_a_small_one() -> None:
    """The daemon's event loop analyses the order when a client opens such a space."""

    def seconds(heads: int, dims: int) -> float:
        spec = spec_of(
            "order", layers=1, kv_heads=heads, head_dim=dims, block_tokens=4096,
            layout="page:hpdt|hptd",
        ).checked()  # fmt: skip
        began = time.thread_time()
        assert isinstance(Losses([("order", "q8")]).find(spec), Loss)
        return time.thread_time() - began

    small = min(seconds(1, 480) for _ in range(5))
    assert min(seconds(128, 512) for _ in range(3)) < 30 * small  # for 136 times as many elements


def test_positions_outside_of_a_page_or_used_twice_are_refused() -> None:
    def numbers(*places: int) -> bytes:
        return np.array(places, np.uint32).tobytes()

    good = (numbers(0, 4), numbers(0, 2, 0, 2), numbers(0, 1, 0, 1))
    into = bytearray(16)
    reorder_pages(2, 2, *good, bytes(range(16)), into, False)
    assert bytes(into) == bytes(range(16))
    for tables in (
        (numbers(0, 5), *good[1:]),
        (numbers(0, 2**32 - 1), *good[1:]),
        (numbers(0, 0), *good[1:]),
        (numbers(0), *good[1:]),
        (*good[:2], b""),
        (*good[:2], b"123"),
    ):
        with pytest.raises(ValueError):
            reorder_pages(2, 2, *tables, bytes(16), into, False)
    with pytest.raises(ValueError):
        reorder_pages(2, 2, *good, bytes(15), bytearray(15), False)
    with pytest.raises(ValueError):
        reorder_pages(2, 2, *good, bytes(16), bytearray(32), False)
    with pytest.raises(ValueError):
        reorder_pages(3, 2, *good, bytes(16), into, False)


# --- any order -----------------------------------------------------------------------------------


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, str]:
    """Heads, tokens and dims, and an order of them: the dimensions common to K and V first, then the
    others."""
    heads, tokens = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 6, 16, 32, 48, 96)))
    dims = draw(st.sampled_from((2, 3, 8, 16, 20, 64, 72)))
    sizes = {"h": heads, "t": tokens, "d": dims}

    def pieces(axis: str) -> list[str]:
        whole = [n for n in (2, 8, 16, 32) if sizes[axis] % n == 0]
        number = draw(st.sampled_from((0, *whole)))
        return [f"{axis}/{number}", f"{axis}%{number}"] if number else [axis]

    axes = {axis: pieces(axis) for axis in sizes}
    outer = draw(st.sampled_from(([], axes["h"][:1], axes["t"][:1], axes["t"][:1] + axes["h"][:1])))
    front = "".join(outer) + "p"
    parts = []
    for _ in range(2):
        rest = [
            axis
            for name in sizes
            for axis in (axes[name] if set(axes[name]) & set(outer) else pieces(name))
            if axis not in outer
        ]
        parts.append(front + "".join(draw(st.permutations(rest))))
    return heads, tokens, dims, "|".join(parts)


@pytest.fixture(params=implementations("codec"))
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    force("codec", request.param)
    yield request.param
    force("codec", "auto")


@pytest.mark.usefixtures("level")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes(), st.sampled_from((2, 4)), st.integers(0, 3))
def test_any_order_is_restored(shape: tuple[int, int, int, str], width: int, beside: int) -> None:
    """The page is copied correctly at any address."""
    heads, tokens, dims, text = shape
    spec = spec_of(
        "order", layers=2, kv_heads=heads, head_dim=dims, block_tokens=tokens, layout=f"page:{text}"
    )
    order = order_of(spec, 0)
    assert order is not None, text
    h, t, d = (
        np.frombuffer(table, np.uint32).reshape(2, -1)
        for table in (order.heads, order.tokens, order.dims)
    )
    places = t[:, :, None, None] + h[:, None, :, None] + d[:, None, None, :]
    size = places.size
    values = np.arange(2 * size, dtype=np.uint16 if width == 2 else np.uint32) * 40503
    room = np.zeros((2, values.nbytes + beside), np.uint8)
    page, back = room[0, beside:], room[1, beside:]
    page[:] = values.view(np.uint8)
    into = np.empty_like(values)
    reorder_pages(width, 2, order.heads, order.tokens, order.dims, page, into, False)
    assert (into.reshape(2, -1) == values.reshape(2, size)[:, places.ravel()]).all()
    reorder_pages(width, 2, order.heads, order.tokens, order.dims, into, back, True)
    assert (back == page).all()


@pytest.mark.usefixtures("level")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(shapes(), st.sampled_from(("bfloat16", "float16", "float32")), st.sampled_from(NAMES))
def test_frames_of_any_order_equal_those_of_the_model(
    shape: tuple[int, int, int, str], dtype: str, asked: str
) -> None:
    """A flipped bit is detected."""
    heads, tokens, dims, text = shape
    spec = spec_of(
        "order", layers=2, kv_heads=heads, head_dim=dims, block_tokens=tokens, dtype=dtype,
        layout=f"page:{text}",
    )  # fmt: skip
    loss = Losses([("order", asked)], [profile_of(spec)]).find(spec)
    assert isinstance(loss, Loss)
    codec = loss.codec(0, 0)
    assert isinstance(codec, Arranged)
    block, lies = kv(dtype, spec.block_bytes), grid.grids(spec, 0, ordered=True)
    found = []
    for make in (framing.encode_lossy, encode_lossy_by):
        header = Template(bytes(32), 0, 1, RAW, block_parts.entries(spec, 0)).blank(xxh3_128(block))
        into = bytearray(len(block))
        nbytes = make(codec, dtype, header, block, into, lies, 32)
        found.append((nbytes, bytes(header), bytes(into[:nbytes])))
    assert found[0] == found[1]
    nbytes, text_of, payload = found[0]
    if nbytes == len(block):
        return  # too small to shrink
    header, digest = bytearray(text_of), bytes(16)
    stamp(header, bytes(32), bytes(32), 7, 8)
    digest = seal_frame(header, payload)
    back, by_twin = bytearray(len(block)), bytearray(len(block))
    assert decode_frame(ELEMENTS[dtype], header, payload, digest, back, codec.recipe)
    decode_frame_by(bytes(header) + payload, len(header), digest, dtype, by_twin, codec)
    assert back == by_twin
    odd = bytearray(payload)
    odd[nbytes // 2] ^= 1
    assert not decode_frame(ELEMENTS[dtype], header, odd, digest, back, codec.recipe)
