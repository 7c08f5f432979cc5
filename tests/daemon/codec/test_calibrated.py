"""The calibrated codecs: they are made of a profile and a level, and use the structure of a block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from conformance.codec_tests import kv
from kvtier.errors import FrameError, ProfileError
from kvtier.frame import RAW, Entry, check_entries
from kvtier.layout import KvSpec
from kvtier_daemon.codec import base, block_parts
from kvtier_daemon.codec.calibrated import Calibrated
from kvtier_daemon.codec.grid import HEADS_FIRST, TOKENS_FIRST
from kvtier_daemon.codec.profile import Level, Profile, ProfilePart, Rope
from models.codecs import decode, encode
from support.specs import spec_of

TABLE = bytes([4, 20, 60, 88, 60, 20, 3, 1])
MAKERS = [partial(Calibrated, "ecsq"), partial(Calibrated, "cachegen")]
LEVELS = ("hi", "mid", "lo")


def profile(spec: KvSpec, heads: int, dim: int, exact: int = 0, parts: int = 2) -> Profile:
    """Steps of a quarter, a half and one, for normally distributed values."""
    count = heads * (dim - exact)
    levels = tuple(Level(bytes([144 + 8 * n] * count), TABLE) for n in range(3))
    turns = np.arange(1, 5, dtype="<u8") << np.uint64(60)
    layer = tuple(
        ProfilePart(
            heads,
            dim,
            exact,
            0 if part == 0 else -1,
            bytes(4 * count),
            levels,
            bytes([120] * count),
            levels,
        )
        for part in range(parts)
    )
    rope = Rope(turns.tobytes(), False, 1e4, "default")
    return Profile(spec.model, "", spec.dtype, 1000, 10, (rope,), (layer,) * 4)


@pytest.fixture
def spec() -> KvSpec:
    return spec_of(block_tokens=64)


def floats(text: bytes | bytearray) -> Any:
    return (np.frombuffer(text, "<u2").astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("layout", [TOKENS_FIRST, HEADS_FIRST])
def test_parts_are_decoded_within_half_a_step_and_separately(
    make: Any, layout: str, spec: KvSpec
) -> None:
    block, sizes = kv(spec.dtype, spec.block_bytes), []
    for level in LEVELS:
        codec: base.Codec = make(profile(spec, 4, 64), level, layout)
        into = bytearray(len(block))
        entries = encode(codec, block, block_parts.entries(spec, 0), spec.dtype, into, position=640)
        end = entries[-1].offset + entries[-1].nbytes
        sizes.append(end)
        check_entries(entries, end, len(block))
        assert codec.lossy and {e.codec for e in entries} == {codec.number}
        back = bytearray(len(block))
        decode(codec, memoryview(into)[:end], entries, spec.dtype, back)
        v = floats(back).reshape(4, 2, -1)[:, 1] - floats(block).reshape(4, 2, -1)[:, 1]
        step = {"hi": 0.25, "mid": 0.5, "lo": 1.0}[level]
        assert 0.45 * step < abs(v).max() < 0.52 * step
        size = entries[0].raw_bytes
        alone = bytearray(size)
        decode(codec, into, [entries[3]], spec.dtype, alone)
        assert alone == back[3 * size : 4 * size]
    assert len(block) > sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize("make", MAKERS)
def test_each_order_of_tokens_and_heads_is_encoded_in_the_same_way(make: Any, spec: KvSpec) -> None:
    block = kv(spec.dtype, spec.block_bytes)
    turned = np.frombuffer(block, "<u2").reshape(8, 64, 4, 64).transpose(0, 2, 1, 3).tobytes()
    texts = []
    for layout, data in ((TOKENS_FIRST, block), (HEADS_FIRST, turned)):
        into = bytearray(len(block))
        codec = make(profile(spec, 4, 64), "mid", layout)
        encode(codec, data, block_parts.entries(spec, 0), spec.dtype, into)
        texts.append(into)
    assert texts[0] == texts[1] != bytearray(len(block))


@pytest.mark.parametrize("make", MAKERS)
def test_a_rank_uses_the_steps_of_its_own_heads(make: Any, spec: KvSpec) -> None:
    """The steps of the second half of the heads are twice as large."""
    known = profile(spec, 8, 64)
    coarse = bytes([144] * 256 + [152] * 256)
    layer = tuple(
        msgspec.structs.replace(part, ecsq=(Level(coarse, TABLE),) * 3, cachegen=(Level(coarse, TABLE),) * 3)
        for part in known.layers[0]
    )  # fmt: skip
    known = msgspec.structs.replace(known, layers=(layer,) * 4)
    block = kv(spec.dtype, spec.block_bytes)
    sizes = []
    for rank in range(2):
        codec = make(known, "mid", TOKENS_FIRST, (rank, 2))
        entries = encode(
            codec, block, block_parts.entries(spec, 0), spec.dtype, bytearray(len(block))
        )
        assert {e.codec for e in entries} == {codec.number}
        sizes.append(entries[-1].offset + entries[-1].nbytes)
    assert sizes[0] > 1.2 * sizes[1]
    for share in ((0, 3), (2, 2), (-1, 2)):
        with pytest.raises(ProfileError, match="heads"):
            make(known, "mid", TOKENS_FIRST, share)


@pytest.mark.parametrize("make", MAKERS)
def test_a_group_uses_the_steps_of_its_layers(make: Any) -> None:
    spec = spec_of(block_tokens=64)
    known = profile(spec, 4, 64)
    fine = tuple(
        msgspec.structs.replace(part, ecsq=(Level(bytes([136] * 256), TABLE),) * 3,
                                cachegen=(Level(bytes([136] * 256), TABLE),) * 3)
        for part in known.layers[3]
    )  # fmt: skip
    known = msgspec.structs.replace(known, layers=(*known.layers[:3], fine))
    block = kv(spec.dtype, spec.block_bytes)
    codec = make(known, "mid", TOKENS_FIRST)
    entries = encode(codec, block, block_parts.entries(spec, 0), spec.dtype, bytearray(len(block)))
    assert entries[6].nbytes > 1.2 * entries[0].nbytes
    with pytest.raises(ProfileError, match="has no level"):
        make(known, "high", TOKENS_FIRST)


@pytest.mark.parametrize("make", MAKERS)
def test_the_rope_part_of_latents_is_kept_exactly(make: Any) -> None:
    spec = KvSpec.mla(
        model="m", layers=2, latent_dim=64, rope_dim=16, dtype="bfloat16", block_tokens=64, weights="w"
    )  # fmt: skip
    known = profile(spec, 1, 80, 16, 1)
    block = kv(spec.dtype, spec.block_bytes)
    for rank in range(2):  # each rank has all of it
        codec = make(known, "lo", spec.layout, (rank, 2))
        into, back = bytearray(len(block)), bytearray(len(block))
        entries = encode(codec, block, block_parts.entries(spec, 0), spec.dtype, into)
        assert {e.codec for e in entries} == {codec.number}
        decode(codec, into, entries, spec.dtype, back)
        one, other = (np.frombuffer(x, "<u2").reshape(2, 64, 80) for x in (block, back))
        assert (one[..., 64:] == other[..., 64:]).all() and (one != other).any()
    other_dims = make(known, "lo", "layer,token,latent=60+20")
    assert {
        e.codec for e in encode(other_dims, block, block_parts.entries(spec, 0), spec.dtype, into)
    } == {RAW}


@dataclass
class Case:
    changes: dict[str, Any]
    heads: int = 4


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "case",
    [
        Case({"layout": "LBHNC"}),
        Case({"dtype": "float8_e4m3fn"}),
        Case({"dtype": "int8"}),
        Case({}, heads=3),
        Case({"layers": 5}),
    ],
    ids=["opaque", "8 bits", "integers", "other heads", "unknown layers"],
)
def test_blocks_that_do_not_fit_the_profile_or_layout_are_stored_raw(make: Any, case: Case) -> None:
    spec = spec_of(**({"block_tokens": 64} | case.changes))
    codec = make(profile(spec, case.heads, 64), "mid", spec.layout)
    block = kv(spec.dtype, spec.block_bytes)
    into, back = bytearray(len(block)), bytearray(len(block))
    entries = encode(codec, block, block_parts.entries(spec, 0), spec.dtype, into)
    known = 8 if "layers" in case.changes else 0
    assert [e.codec for e in entries] == [codec.number] * known + [RAW] * (len(entries) - known)
    decode(codec, into, entries, spec.dtype, back)
    size = entries[0].raw_bytes
    assert back[known * size :] == block[known * size :]


@pytest.mark.parametrize("make", MAKERS)
def test_damage_another_level_and_another_codec_are_refused(make: Any, spec: KvSpec) -> None:
    known, block = profile(spec, 4, 64), kv(spec.dtype, spec.block_bytes)
    codec = make(known, "mid")
    into = bytearray(len(block))
    entries = encode(codec, block, block_parts.entries(spec, 0), spec.dtype, into)
    for other in (make(known, "hi"), make(known, "lo")):
        with pytest.raises(FrameError, match=f"part 0: {other.name}"):
            decode(other, into, entries, spec.dtype, bytearray(len(block)))
    another = Entry(0, 0, 15 - codec.number, 0, entries[0].nbytes, entries[0].raw_bytes)
    with pytest.raises(FrameError, match="codec"):
        decode(codec, into, [another], spec.dtype, bytearray(len(block)))
    into[entries[5].offset + 8] ^= 1
    with pytest.raises(FrameError, match="layer 2, part 1"):
        decode(codec, into, entries, spec.dtype, bytearray(len(block)))


def test_codecs_have_their_name_number_and_profile(spec: KvSpec) -> None:
    known = profile(spec, 4, 64)
    found = [make(known, level) for make in MAKERS for level in LEVELS]
    assert [one.name for one in found] == [
        "ecsq-hi", "ecsq-mid", "ecsq-lo", "cachegen-hi", "cachegen-mid", "cachegen-lo",
    ]  # fmt: skip
    assert [one.number for one in found] == [7] * 3 + [8] * 3
    assert {one.profile for one in found} == {known.name}
