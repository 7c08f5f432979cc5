"""Loads of chosen layers and tokens: the same bytes as the same part of a whole load."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import Client, Group, InvalidArgument, KvSpec, StaleLease, load_tokens, wire
from kvtier.client import Lease
from kvtier.parts import Selection, choose
from kvtier_kernels import Buffers, release_views, views
from support.daemons import Daemon
from support.specs import spec_of

BLOCKS, TOKENS = 5, 8
Bytes = npt.NDArray[np.uint8]
SMALL = {"layers": 3, "kv_heads": 2, "head_dim": 8, "block_tokens": TOKENS}
FULL = Group(layers=3, kv_heads=2, head_dim=8, shards=2)
WINDOW = Group(kind="window", layers=2, kv_heads=1, head_dim=4, window_tokens=2 * TOKENS)
STATE = Group(kind="state", layers=4, state_bytes=24)
SPECS = {
    "gqa": spec_of("gqa", **SMALL),
    "fp8": spec_of("fp8", **SMALL, dtype="float8_e4m3fn"),
    "heads first": spec_of("heads", **SMALL, layout="layer,part,head,token,dim"),
    "mla": KvSpec.mla(
        model="mla", weights="1", layers=3, latent_dim=24, rope_dim=8, dtype="bfloat16",
        block_tokens=TOKENS, tensor_parallel=4,
    ),
    "groups": KvSpec.groups(
        [FULL, WINDOW, STATE], model="groups", weights="1", dtype="float16", block_tokens=TOKENS
    ),
}  # fmt: skip
PLACES = [
    (name, group, shard)
    for name, spec in SPECS.items()
    for group, kind in enumerate(spec.cache_groups)
    for shard in range(kind.shards)
]
LAYERS = [None, *(range(a, b) for a in range(3) for b in range(a + 1, 4)), [2, 0], [1], (0, 2, 2)]
TOKEN_RANGES = [None, *(range(a, b) for a in range(TOKENS) for b in range(a + 1, TOKENS + 1))]


def cube(spec: KvSpec, group: int, block: Bytes) -> Bytes:
    """A block as [layer][part, and head if it comes before the token][token][bytes]."""
    kind = spec.cache_groups[group]
    if kind.kind == "state":
        return block.reshape(kind.layers, 1, 1, kind.state_bytes)
    heads = kind.kv_heads if "head,token" in spec.layout else 1
    return block.reshape(kind.layers, kind.parts * heads, spec.block_tokens, -1)


def part_of(spec: KvSpec, group: int, block: Bytes, layers: Any, tokens: range | None) -> Bytes:
    whole = cube(spec, group, block)
    chosen = whole if layers is None else whole[list(layers)]
    return chosen if tokens is None else chosen[:, :, tokens.start : tokens.stop]


class Saved:
    """A space with random blocks in every group and shard."""

    def __init__(self, client: Client, spec: KvSpec, seed: int = 0, blocks: int = BLOCKS) -> None:
        self.spec, self.space = spec, client.open(spec)
        self.keys = self.space.keys([seed + n for n in range(blocks * spec.block_tokens)])
        self.blocks: dict[tuple[int, int], Bytes] = {}
        for group, kind in enumerate(spec.cache_groups):
            for shard in range(kind.shards):
                draw = np.random.default_rng([seed, group, shard])
                shape = blocks, self.space.group_block_bytes(group)
                content = self.blocks[group, shard] = draw.integers(0, 256, shape, np.uint8)
                saved = self.space.save(self.keys, content, group, shard)
                assert saved.stored == blocks

    def expected(self, place: tuple[int, int], layers: Any, tokens: range | None) -> list[Bytes]:
        return [part_of(self.spec, place[0], block, layers, tokens) for block in self.blocks[place]]


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[Client]:
    with shared_daemon.connect() as client:
        yield client


@pytest.mark.parametrize(("name", "group", "shard"), PLACES)
def test_every_part_is_that_of_a_whole_load(
    client: Client, name: str, group: int, shard: int
) -> None:
    spec = SPECS[name]
    saved, kind, place = Saved(client, spec), spec.cache_groups[group], (group, shard)
    needed = kind.needed_blocks(TOKENS, BLOCKS)
    for layers, tokens in itertools.product(LAYERS, TOKEN_RANGES):
        if layers is not None and max(layers) >= kind.layers:
            continue
        if kind.kind == "state" and tokens not in (None, range(TOKENS)):
            continue
        wanted = saved.expected(place, layers, tokens)
        targets = [np.full(one.size, 0xEE, np.uint8) for one in wanted]
        options: Any = {"group": group, "shard": shard, "layers": layers, "tokens": tokens}
        assert saved.space.load_into(saved.keys, targets, **options) == BLOCKS
        for number, (target, one) in enumerate(zip(targets, wanted, strict=True)):
            is_same = target.tobytes() == one.tobytes()
            assert is_same if number in needed else (target == 0xEE).all(), (layers, tokens)
        try:
            loading = saved.space.load(saved.keys, **options)
        except InvalidArgument as error:
            assert "not consecutive" in str(error)
            assert not _is_one_range(spec, group, layers, tokens)
            continue
        with loading as blocks:
            assert [number for number, block in enumerate(blocks) if block is not None] == [*needed]
            assert all(
                bytes(block) == one.tobytes()
                for block, one in zip(blocks, wanted, strict=True)
                if block is not None
            )
    saved.space.forget(saved.keys)


def _is_one_range(spec: KvSpec, group: int, layers: Any, tokens: range | None) -> bool:
    """Whether these bytes are consecutive in a block."""
    numbers = np.arange(spec.group_block_bytes(group))
    found = np.concatenate([one.ravel() for one in part_of(spec, group, numbers, layers, tokens)])
    return bool((np.diff(found) == 1).all())


def test_one_buffer_takes_the_parts_of_all_blocks_and_threads_share_them(client: Client) -> None:
    spec = spec_of("threads", layers=8, kv_heads=8, head_dim=128, block_tokens=64)
    saved = Saved(client, spec, blocks=6)
    for layers, tokens in ((range(1, 5), None), ([5, 0], range(3, 50)), (None, range(64))):
        wanted = b"".join(one.tobytes() for one in saved.expected((0, 0), layers, tokens))
        for threads in (1, 3):
            target = bytearray(len(wanted))
            assert saved.space.load_into(
                saved.keys, target, threads=threads, layers=layers, tokens=tokens
            ) == len(saved.keys)
            assert target == wanted
    saved.space.forget(saved.keys)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("gqa", {"layers": []}, "layers"),
    ("gqa", {"layers": [3]}, "not within 0 to 2"),
    ("gqa", {"layers": [-1]}, "not within"),
    ("gqa", {"layers": 1}, "not a range or a list"),
    ("gqa", {"layers": "01"}, "not a range or a list"),
    ("gqa", {"layers": [True]}, "not an integer"),
    ("gqa", {"tokens": range(0)}, "consecutive"),
    ("gqa", {"tokens": range(0, 8, 2)}, "consecutive"),
    ("gqa", {"tokens": range(3, 9)}, "not within 1 to 8"),
    ("gqa", {"tokens": range(-1, 2)}, "not within 0 to 7"),
    ("gqa", {"tokens": [1]}, "consecutive"),
    ("groups", {"group": 2, "tokens": range(1)}, "a state"),
    ("opaque", {"layers": [0]}, "cannot be divided"),
    ("opaque", {"tokens": range(1)}, "cannot be divided"),
    ("strides", {"layers": [0]}, "cannot be divided"),
    ("engine", {"layers": [0]}, "cannot be divided"),
    ("pages", {"layers": [0]}, "cannot be divided"),
    ("unknown", {"tokens": range(1)}, "no place of their own"),
    ("no tokens", {"tokens": range(1)}, "no place of their own"),
]
ODD = {
    "opaque": KvSpec.groups(
        [Group(layers=2, opaque_bytes=64)], model="opaque", weights="1", dtype="uint8", block_tokens=TOKENS
    ),
    "strides": spec_of("strides", **SMALL, strides=(1, 2)),
    "engine": spec_of("engine", **SMALL, layout="NHD page:hpdt|hptd"),
    "pages": spec_of("pages", **SMALL, layout="layer,part,token,head,dim page:hpdt|hptd"),
    "unknown": spec_of("unknown", **SMALL, layout="layer,dim,token"),
    "no tokens": spec_of("no tokens", **SMALL, layout="layer,part"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "options", "text"), WRONG)
def test_parts_that_a_block_does_not_have_are_refused(
    client: Client, name: str, options: dict[str, Any], text: str
) -> None:
    space = client.open((SPECS | ODD)[name])
    keys = space.keys(list(range(TOKENS)))
    with pytest.raises(InvalidArgument, match=text):
        space.load_into(keys, bytearray(1), **options)
    with pytest.raises(InvalidArgument, match=text):
        space.load(keys, **options)


def test_targets_of_the_size_of_whole_blocks_are_refused(client: Client) -> None:
    saved = Saved(client, SPECS["gqa"])
    targets = [bytearray(saved.space.block_bytes) for _ in saved.keys]
    with pytest.raises(InvalidArgument, match="targets"):
        saved.space.load_into(saved.keys, targets, layers=[0])
    saved.space.forget(saved.keys)


def test_parts_of_forgotten_blocks_are_misses(client: Client) -> None:
    saved = Saved(client, SPECS["gqa"])
    saved.space.forget(saved.keys[3:4])
    wanted = saved.expected((0, 0), [1], None)
    target = bytearray(BLOCKS * wanted[0].size)
    assert saved.space.load_into(saved.keys, target, layers=[1]) == 3
    assert target == b"".join(one.tobytes() for one in wanted[:3]) + bytes(2 * wanted[0].size)
    assert not load_tokens(saved.space, saved.keys, [3 * TOKENS], bytearray(192))
    assert load_tokens(saved.space, saved.keys, [3 * TOKENS - 1], bytearray(192))
    saved.space.forget(saved.keys)


def reuse(client: Client, spec: KvSpec, lease: Lease, seeds: Iterator[int]) -> None:
    """Save other blocks until the slots of this lease are reused."""
    for seed in itertools.islice(seeds, 1000):
        Saved(client, spec, seed * 1_000_000, blocks=16)
        if lease.fresh(lease.part(0, 0)) == 0:
            return
    raise AssertionError("never evicted")


def test_parts_of_blocks_that_are_evicted_under_the_read_are_misses(
    daemon_of: Callable[..., Daemon],
) -> None:
    daemon = daemon_of(warm="16MiB")
    spec, seeds = (
        spec_of("reused", layers=4, kv_heads=8, head_dim=64, block_tokens=64),
        itertools.count(1),
    )
    with daemon.connect() as reader, daemon.connect() as writer:
        saved = Saved(reader, spec)
        with (
            pytest.raises(StaleLease),
            saved.space.load(saved.keys, deadline_ms=50, layers=[2]) as blocks,
        ):
            assert len(blocks) == BLOCKS
            reuse(writer, spec, saved.space.lease(saved.keys, deadline_ms=50), seeds)
        saved = Saved(reader, spec)
        lease = saved.space.lease(saved.keys, deadline_ms=50)
        part = lease.part(0, 0)
        reuse(writer, spec, lease, seeds)
        chosen = choose(spec, 0, [2], range(5, 9))
        assert isinstance(chosen, Selection)
        into = Buffers(bytearray(BLOCKS * chosen.nbytes), 0, BLOCKS, chosen.nbytes, writable=True)
        assert lease.copy_out(part, into, 1, chosen) == 0
        into = Buffers(bytearray(2048), 0, 1, 2048, writable=True)
        one = Selection(chosen.block_bytes, (0,), 1024, 0)
        assert not lease.copy_tokens(part, one, [0, 9], 64, into, 1)


def scribble(daemon: Daemon, saved: Saved, block: int, at: int) -> None:
    """Overwrite one byte of a block as another client of the tenant."""
    with daemon.connect() as other:
        space = other.open(saved.spec)
        lease = space.lease(saved.keys)
        slots = lease.part(0, 0).slots[block * wire.SLOT_BYTES :][: wire.SLOT_BYTES]
        (slot,) = views(other.link.mappings[0], slots, space.group_block_bytes(0), True)
        slot[at] ^= 1
        release_views([slot])
        lease.release()


@pytest.mark.parametrize("how", ["copy", "views", "tokens"])
def test_a_client_with_verify_reads_no_part_of_an_overwritten_block(
    shared_daemon: Daemon, how: str
) -> None:
    """Also if the part itself was not overwritten: the checksum covers the whole block."""
    with shared_daemon.connect(verify=True) as client, shared_daemon.connect() as other:
        saved = Saved(client, msgspec.structs.replace(SPECS["gqa"], model=f"verify {how}"))
        spec, space, keys = saved.spec, saved.space, saved.keys
        trusting = other.open(spec)
        wanted = saved.expected((0, 0), [2], None)
        whole = b"".join(one.tobytes() for one in wanted)
        scribble(shared_daemon, saved, 3, 0)  # in layer 0
        target = bytearray(len(whole))
        assert trusting.load_into(keys, target, layers=[2]) == BLOCKS and target == whole
        if how == "copy":
            assert space.load_into(keys, target, layers=[2]) == 3
        elif how == "views":
            with space.load(keys, layers=[2]) as blocks:
                assert b"".join(map(bytes, blocks)) == whole[: 3 * wanted[0].size]  # type: ignore[arg-type]
        else:
            size = 2 * wanted[0].size // TOKENS
            assert load_tokens(trusting, keys, [4, 5], bytearray(size), layers=[2])
            assert not load_tokens(space, keys, [4, 5], bytearray(size), layers=[2])
        shared_daemon.wait_for(lambda _: space.match(keys).ready == 3)
        space.forget(keys)


def test_the_layers_of_a_block_count_its_tokens_once(client: Client) -> None:
    saved = Saved(client, SPECS["gqa"])

    def used() -> tuple[int, int]:
        client.ping()
        stats = client.stats()
        return stats["used_tokens"]["warm"], stats["bytes"]["loaded"]

    tokens, nbytes = used()
    for layer in range(3):
        target = bytearray(BLOCKS * saved.space.block_bytes // 3)
        assert saved.space.load_into(saved.keys, target, layers=[layer]) == BLOCKS
    assert used() == (tokens + BLOCKS * TOKENS, nbytes + BLOCKS * saved.space.block_bytes)
    with saved.space.load(saved.keys, layers=[0]):
        pass
    assert used()[0] == tokens + 2 * BLOCKS * TOKENS
    saved.space.forget(saved.keys)


def test_layers_that_are_loaded_under_one_lease_are_one_lookup(client: Client) -> None:
    saved = Saved(client, SPECS["gqa"], 300)
    size = BLOCKS * saved.space.block_bytes // 3

    def requested() -> int:
        client.ping()
        return int(client.stats()["lookup_tokens"])

    before = requested()
    lease = saved.space.lease(saved.keys)
    for layer in range(3):
        target = bytearray(size)
        assert saved.space.load_into(lease, target, layers=[layer]) == BLOCKS
        assert target == b"".join(one.tobytes() for one in saved.expected((0, 0), [layer], None))
    assert requested() == before + BLOCKS * TOKENS
    with pytest.raises(InvalidArgument, match="wait_ms"):
        saved.space.load_into(lease, bytearray(size), layers=[0], wait_ms=10)
    lease.release()
    saved.space.forget(saved.keys)
    assert not saved.space.load_into(saved.space.lease(saved.keys), bytearray(size), layers=[0])


@pytest.fixture(scope="module")
def spaces(shared_daemon: Daemon) -> Iterator[dict[str, Saved]]:
    with shared_daemon.connect() as client:
        yield {name: Saved(client, spec, 7_000) for name, spec in SPECS.items()}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_chosen_tokens_are_those_of_a_whole_load(spaces: dict[str, Saved], data: Any) -> None:
    name, group, shard = data.draw(st.sampled_from([one for one in PLACES if one[1] == 0]))
    saved = spaces[name]
    places = st.integers(0, BLOCKS * TOKENS - 1)
    chosen: list[int] = data.draw(st.lists(places, max_size=40))
    layers = data.draw(st.none() | st.lists(st.integers(0, 2), min_size=1, max_size=4))
    prefix = np.concatenate(
        [cube(saved.spec, group, block) for block in saved.blocks[group, shard]], axis=2
    )
    wanted = (prefix if layers is None else prefix[layers])[:, :, chosen]
    one = bytearray(wanted.size)
    options: Any = {"group": group, "shard": shard, "layers": layers}
    options["threads"] = data.draw(st.sampled_from([None, 2]))
    assert load_tokens(saved.space, saved.keys, chosen, one, **options)
    assert one == wanted.tobytes()
    lease = saved.space.lease(saved.keys, shards=[shard])
    one[:] = bytes(len(one))
    assert load_tokens(saved.space, lease, chosen, one, **options) and one == wanted.tobytes()
    assert (
        not load_tokens(saved.space, lease, [BLOCKS * TOKENS] * len(chosen), one, **options)
        or not chosen
    )
    lease.release()
    many = [np.zeros(wanted[0, 0].size, np.uint8) for _ in range(wanted.shape[0] * wanted.shape[1])]
    numbers: Sequence[int] | Any = np.array(chosen, np.int64)
    assert load_tokens(saved.space, saved.keys, numbers, many, **options)
    assert b"".join(target.tobytes() for target in many) == wanted.tobytes()


def test_chosen_tokens_of_a_window_are_those_of_its_blocks(spaces: dict[str, Saved]) -> None:
    saved = spaces["groups"]
    prefix = np.concatenate([cube(saved.spec, 1, one) for one in saved.blocks[1, 0]], axis=2)
    first = (BLOCKS - 2) * TOKENS
    chosen = random.Random(1).sample(range(first, BLOCKS * TOKENS), 9)
    target = bytearray(prefix[:, :, chosen].size)
    assert load_tokens(saved.space, saved.keys, chosen, target, group=1)
    assert target == prefix[:, :, chosen].tobytes()
    assert not load_tokens(saved.space, saved.keys, [first - 1, *chosen[1:]], target, group=1)


def test_tokens_outside_of_the_prefix_and_of_no_place_are_refused(
    spaces: dict[str, Saved],
) -> None:
    saved = spaces["gqa"]
    for chosen in ([BLOCKS * TOKENS], [-1], ["1"], 3):
        with pytest.raises(InvalidArgument, match="tokens"):
            load_tokens(saved.space, saved.keys, chosen, bytearray(192))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="a state"):
        load_tokens(spaces["groups"].space, saved.keys, [1], bytearray(192), group=2)
    with pytest.raises(InvalidArgument, match="targets"):
        load_tokens(saved.space, saved.keys, [1], bytearray(191))
    with pytest.raises(InvalidArgument, match="threads"):
        load_tokens(saved.space, saved.keys, [1], bytearray(192), threads=0)
    with pytest.raises(InvalidArgument, match="group"):
        load_tokens(saved.space, saved.keys, [1], bytearray(192), group=5)
    for wait_ms in (-5, "x"):
        with pytest.raises(InvalidArgument, match="wait_ms"):
            saved.space.load_into(saved.keys, bytearray(1), layers=[0], wait_ms=wait_ms)  # type: ignore[arg-type]
