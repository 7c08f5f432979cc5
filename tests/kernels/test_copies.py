"""Copies into and out of slots compared with their models, and the bytes around their targets."""

import contextlib
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash

import kvtier_kernels as kernels
from models import kernels as reference

MIB = 1 << 20
SIZES = [*range(70), 127, 239, 240, 241, 255, 256, 1023, 1024, 1025, 4095, 4096, 4097, 9999]
# From 512 KiB on the kernels use streaming stores.
BIG = [512 * 1024 + d for d in (-1, 0, 1, 63, 64, 65, 1024, 4097)]


class OnlyDlpack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("checksum", [False, True])
def test_copy_matches_its_model_and_touches_no_other_bytes(copies, guarded, random_bytes, checksum):
    source = random_bytes(max(BIG) + 100)
    shifts = [(0, 0), (1, 0), (0, 1), (16, 0), (33, 64), (63, 63)]
    for size, (to, start) in itertools.product(SIZES + BIG, shifts):
        src, target = source[start : start + size], guarded(size, to)
        digest = kernels.copy(target.array, src, checksum)
        assert np.array_equal(target.array, src) and target.intact(), (size, to, start)
        assert digest == (xxhash.xxh3_128_digest(src) if checksum else b"")


def test_copy_matches_the_reference_digest(copies, random_bytes):
    for size in (0, 1, 240, 241, 1024, 5000):
        src, dst, twin = random_bytes(size), np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        assert kernels.copy(dst, src, True) == reference.copy(twin, src)
        assert np.array_equal(dst, twin)


def test_runs_match_their_model_and_stay_in_their_buffers(guarded, random_bytes):
    chance = random.Random(11)
    refused = 0
    for _ in range(500):
        size, other = chance.randrange(200), chance.randrange(200)
        numbers = [chance.randrange(limit) for limit in (9, 40, 60, 50, 60, 50)]
        count, nbytes, dst_at, dst_step, src_at, src_step = numbers
        src, target, twin = random_bytes(other), guarded(size, 3), np.zeros(size, np.uint8)
        target.array[:] = 0
        last = max(count, 1) - 1
        fits = (
            dst_at + last * dst_step + nbytes <= size and src_at + last * src_step + nbytes <= other
        )
        if fits:
            kernels.copy_runs(target.array, src, *numbers)
            reference.copy_runs(twin, src, *numbers)
        else:
            refused += 1
            with pytest.raises(ValueError, match="runs are not in its"):
                kernels.copy_runs(target.array, src, *numbers)
        assert np.array_equal(target.array, twin) and target.intact(), numbers
    assert 50 < refused < 450
    top = (1 << 64) - 1
    for numbers in (
        (2, 1, 0, top, 0, 1),
        (top, 1, 0, 1, 0, 1),
        (1, 1, top, 1, 0, 1),
        (1, top, 0, 1, 0, 1),
    ):
        with pytest.raises(ValueError, match="runs are not in its"):
            kernels.copy_runs(bytearray(9), bytes(9), *numbers)
    with pytest.raises(TypeError):
        kernels.copy_runs(bytearray(9), bytes(9), -1, 1, 0, 1, 0, 1)


def test_copy_shares_one_big_buffer_between_threads(copies, guarded, random_bytes):
    source = random_bytes(5 * MIB + 77)
    for threads, to in itertools.product((2, 3, 7), (0, 5)):
        target = guarded(len(source), to)
        kernels.copy(target.array, source, threads=threads)
        assert np.array_equal(target.array, source) and target.intact()
        digest = kernels.copy(target.array, source, checksum=True, threads=threads)
        assert digest == xxhash.xxh3_128_digest(source)


def test_baselines_copy_too(copies, guarded, random_bytes):
    source = random_bytes(10007)
    for loop, to in itertools.product((True, False), (0, 9)):
        target = guarded(len(source), to)
        if loop:
            kernels.nt_loops([target.array], [source])
        else:
            kernels.memcpy(target.array, source)
        assert np.array_equal(target.array, source) and target.intact()


def test_copy_refuses_buffers_that_do_not_fit():
    with pytest.raises(ValueError, match="dst has 3"):
        kernels.copy(bytearray(3), b"four")
    with pytest.raises(ValueError, match="dst"):
        kernels.copy(b"abc", b"abc")
    with pytest.raises(ValueError, match="src"):
        kernels.copy(bytearray(3), np.zeros(6, np.uint8)[::2])
    with pytest.raises(TypeError, match="neither"):
        kernels.copy(bytearray(3), "abc")
    with pytest.raises(ValueError, match="threads"):
        kernels.copy(bytearray(3), b"abc", threads=0)


class Place:
    """Two extents with slots at unusual offsets, and the same as plain arrays for the model."""

    def __init__(self, make_mapping, packed, count, nbytes, aligned):
        step = -(-nbytes // 4096) * 4096 + (4096 if aligned else 4097)
        size = (count // 2 + 1) * step + 8192
        self.mappings = [make_mapping(size), None, make_mapping(size)]
        self.views = [None if m is None else np.frombuffer(m, np.uint8) for m in self.mappings]
        for view in (self.views[0], self.views[2]):
            view[:] = 0x5A
        self.twins = [None if v is None else v.copy() for v in self.views]
        self.slots = packed(*((i % 2 * 2, 4096 + i // 2 * step) for i in range(count)))

    def same(self):
        return all(
            v is None or np.array_equal(v, t) for v, t in zip(self.views, self.twins, strict=True)
        )


CASES = [(0, 3), (1, 1), (100, 5), (241, 3), (4096, 9), (70001, 9), (262144, 4), (300007, 4)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("nbytes, count", CASES)
def test_copies_of_blocks_match_their_models(
    copies, make_mapping, packed, random_bytes, guarded, nbytes, count, aligned, checksum, threads
):
    place = Place(make_mapping, packed, count, nbytes, aligned)
    sources = [random_bytes(nbytes, i) for i in range(count)]
    expected = reference.copy_in(place.twins, place.slots, nbytes, sources)
    from_all = kernels.Buffers(sources, 0, count, nbytes)
    digests = kernels.copy_in(place.mappings, place.slots, from_all, threads, checksum)
    assert digests == (expected if checksum else b"")
    assert place.same()

    targets = [guarded(nbytes, 3 * i) for i in range(count)]
    arrays = [target.array for target in targets]
    to_all = kernels.Buffers(arrays, 0, count, nbytes, writable=True)
    digests = kernels.copy_out(place.mappings, place.slots, to_all, threads, checksum)
    assert digests == (expected if checksum else b"")
    for target, source in zip(targets, sources, strict=True):
        assert np.array_equal(target.array, source) and target.intact()


def test_copies_take_one_buffer_for_all_blocks(make_mapping, packed, random_bytes, guarded):
    place = Place(make_mapping, packed, 5, 5000, True)
    source, target = random_bytes(25000), guarded(25000, 0)
    sources = kernels.Buffers(source, 0, 5, 5000)
    digests = kernels.copy_in(place.mappings, place.slots, sources, 1, True)
    parts = source.reshape(5, 5000)
    assert digests == b"".join(xxhash.xxh3_128_digest(part) for part in parts)
    targets = kernels.Buffers(target.array, 0, 5, 5000, writable=True)
    assert kernels.copy_out(place.mappings, place.slots, targets, 1, True) == digests
    assert np.array_equal(target.array, source) and target.intact()


@pytest.mark.parametrize("one", [True, False])
def test_copies_take_the_chosen_of_many_buffers(make_mapping, packed, random_bytes, guarded, one):
    place = Place(make_mapping, packed, 3, 4096, True)
    source, target = random_bytes(7 * 4096), guarded(5 * 4096, 0)
    parts = source.reshape(7, 4096)
    sources = kernels.Buffers(source if one else list(parts), 0, 7, 4096)
    kernels.copy_in(place.mappings, place.slots, sources, at=[6, 0, 3])
    rows = target.array.reshape(5, 4096)
    target.array[:] = 1
    into = kernels.Buffers(target.array if one else list(rows), 1, 3, 4096, True, exact=False)
    kernels.copy_out(place.mappings, place.slots, into)
    assert np.array_equal(rows[1:4], parts[[6, 0, 3]]) and target.intact()
    assert (rows[0] == 1).all() and (rows[4] == 1).all()
    with pytest.raises(IndexError, match="buffer 7 of 7"):
        kernels.copy_in(place.mappings, place.slots, sources, at=[1, 2, 7])
    with pytest.raises(ValueError, match="2 buffers for 3"):
        kernels.copy_in(place.mappings, place.slots, sources, at=[1, 2])


def test_copies_take_tensors_by_dlpack(make_mapping, packed, random_bytes):
    mapping, slots = make_mapping(8192), packed((0, 0), (0, 4096))
    sources = [random_bytes(4096, i).view(np.float32) for i in range(2)]
    targets = [np.zeros_like(source) for source in sources]
    for way, arrays in ((kernels.copy_in, sources), (kernels.copy_out, targets)):
        tensors = [OnlyDlpack(array) for array in arrays]
        way([mapping], slots, kernels.Buffers(tensors, 0, 2, 4096, way is kernels.copy_out))
    for source, target in zip(sources, targets, strict=True):
        assert source.tobytes() == target.tobytes()
    with pytest.raises(ValueError, match="contiguous"):
        kernels.Buffers([OnlyDlpack(np.zeros((64, 128), "u1").T[::2])], 0, 1, 4096)
    frozen = np.zeros(4096, np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="target 0"):
        kernels.Buffers([OnlyDlpack(frozen)], 0, 1, 4096, writable=True)


def test_copies_take_torch_tensors(make_mapping, packed):
    torch = pytest.importorskip("torch", reason="torch is not installed: DLPack by NumPy only")
    mapping, slots = make_mapping(8192), packed((0, 4096))
    source = torch.randn(2048).to(torch.bfloat16)
    target = torch.zeros_like(source)
    digest = kernels.copy_in([mapping], slots, kernels.Buffers([source], 0, 1, 4096), 1, True)
    targets = kernels.Buffers([target], 0, 1, 4096, writable=True)
    assert kernels.copy_out([mapping], slots, targets, 1, True) == digest
    assert torch.equal(source, target)
    pieces = kernels.Pieces([target.view(2, 4, 256).transpose(0, 1)], [0], [4096], [4096])
    assert kernels.gather(pieces, [0], [mapping], slots, 1, True) == digest


def test_copies_check_everything_before_a_byte_moves(make_mapping, packed):
    mapping, frozen = make_mapping(8192), make_mapping(4096, writable=False)
    maps, block = [mapping, None, frozen], b"x" * 4096

    def refuse(error, match, slots, count=1, nbytes=4096, kept=block):
        sources = kernels.Buffers([kept] * count, 0, count, nbytes)
        with pytest.raises(error, match=match):
            kernels.copy_in(maps, slots, sources)

    good = packed((0, 0))
    refuse(IndexError, "extent 3 of 3", good + packed((3, 0)), 2)
    refuse(IndexError, "not mapped", good + packed((1, 0)), 2)
    refuse(IndexError, "4096 bytes at 4097", good + packed((0, 4097)), 2)
    refuse(IndexError, "bytes at", good + packed((0, 2**64 - 1)), 2)
    refuse(IndexError, "bytes at", packed((0, 8192)), 1, 1, b"x")
    refuse(ValueError, "read-only", good + packed((2, 0)), 2)
    refuse(ValueError, "24 bytes", good[:-1])
    refuse(ValueError, "reserved", b"\0\0\0\0\1" + good[5:])
    refuse(ValueError, "2 buffers for 1", good, 2)
    sources = kernels.Buffers([block], 0, 1, 4096)
    with pytest.raises(ValueError, match="read-only"):
        kernels.copy_out([mapping], good, sources)
    with pytest.raises(TypeError, match="mappings"):
        kernels.copy_in([b"not a mapping"], good, sources)
    assert bytes(mapping) == bytes(8192)


def test_buffers_of_the_wrong_size_or_kind_are_refused():
    block = b"x" * 4096

    def refuse(error, match, memory, count=1, nbytes=4096, **options):
        with pytest.raises(error, match=match):
            kernels.Buffers(memory, 0, count, nbytes, **options)

    refuse(ValueError, "sources: 1 buffers, not 2", [block], 2)
    refuse(ValueError, "sources: 3 buffers, not 2", [block] * 3, 2)
    refuse(ValueError, "source 1: 4095 bytes, not 4096", [block, block[1:]], 2)
    refuse(ValueError, "sources: 4095 bytes, not 4096", block[1:])
    refuse(ValueError, "sources: 4096 bytes, not 0", block, 0)
    refuse(ValueError, "too many bytes", block, 2, 2**64 - 1)
    refuse(ValueError, "target 0", [block], writable=True)
    refuse(
        ValueError, "targets: 4096 bytes, not 8192", bytearray(4096), 2, writable=True, exact=False
    )
    refuse(TypeError, "source 0", [7])
    assert len(kernels.Buffers([], 0, 0, 4096)) == 0


PARTS = [([0], 1), ([5], 4000), ([0, 0, 300], 100), ([9000, 64, 4100], 513), ([0, 70000], 70001)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("starts, each", PARTS)
def test_copies_of_parts_match_their_model(
    copies, make_mapping, packed, random_bytes, guarded, starts, each, threads
):
    place = Place(make_mapping, packed, 9, max(starts) + each, False)
    for view, twin in zip(place.views, place.twins, strict=True):
        if view is not None:
            twin[:] = view[:] = random_bytes(len(view))
    size = len(starts) * each
    targets = [guarded(size, 3 * i) for i in range(9)]
    twins = [np.zeros(size, np.uint8) for _ in range(9)]
    reference.copy_parts(place.twins, place.slots, starts, each, twins)
    arrays = [target.array for target in targets]
    into = kernels.Buffers(arrays, 0, 9, size, writable=True)
    kernels.copy_parts(place.mappings, place.slots, starts, each, into, threads)
    for target, twin in zip(targets, twins, strict=True):
        assert np.array_equal(target.array, twin) and target.intact()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("each, block_tokens, count", [(1, 5, 40), (576, 64, 900), (2048, 7, 700)])
def test_copies_of_tokens_match_their_model(
    copies, make_mapping, packed, random_bytes, guarded, each, block_tokens, count, threads
):
    starts = [0, 7 + each * block_tokens, 3]
    place = Place(make_mapping, packed, 9, max(starts) + each * block_tokens, False)
    for view, twin in zip(place.views, place.twins, strict=True):
        if view is not None:
            twin[:] = view[:] = random_bytes(len(view))
    first = 11 * block_tokens
    tokens = random.Random(each).choices(range(first, first + 9 * block_tokens), k=count)
    targets = [guarded(count * each, 5 * i) for i in range(3)]
    twins = [np.zeros(count * each, np.uint8) for _ in starts]
    arrays = [target.array for target in targets]
    into = kernels.Buffers(arrays, 0, 3, count * each, writable=True)
    for outside in (first - 1, first + 9 * block_tokens):
        wrong = [*tokens[1:], outside]
        given = wrong, block_tokens, first
        assert not reference.copy_tokens(place.twins, place.slots, starts, each, *given, twins)
        assert not kernels.copy_tokens(place.mappings, place.slots, starts, each, *given, into)
        assert not any(array.any() for array in arrays)
    given = tokens, block_tokens, first
    assert reference.copy_tokens(place.twins, place.slots, starts, each, *given, twins)
    assert kernels.copy_tokens(place.mappings, place.slots, starts, each, *given, into, threads)
    for target, twin in zip(targets, twins, strict=True):
        assert np.array_equal(target.array, twin) and target.intact()


def test_copies_of_parts_check_everything_before_a_byte_moves(make_mapping, packed):
    mapping, target = make_mapping(8192), bytearray(64)
    mapping_view = np.frombuffer(mapping, np.uint8)
    mapping_view[:] = 7
    one, two = packed((0, 0)), packed((0, 0), (0, 4096))
    into = kernels.Buffers(target, 0, 1, 64, writable=True)

    def refuse(error, match, slots, starts, each, to=into):
        with pytest.raises(error, match=match):
            kernels.copy_parts([mapping], slots, starts, each, to)
        with pytest.raises((ValueError, IndexError)):
            kernels.copy_tokens([mapping], slots, starts, each, [0, 0], 4, 0, to)

    refuse(IndexError, "bytes at", one, [8192], 64)
    refuse(IndexError, "bytes at", packed((0, 4096)), [4090], 64)
    refuse(ValueError, "1 targets of 64 bytes, not 2 of 64", two, [0], 64)
    refuse(ValueError, "not 1 of 128", one, [0, 64], 64)
    refuse(ValueError, "parts", one, [], 64)
    refuse(ValueError, "parts", one, [0], 0)
    refuse(ValueError, "too many bytes", one, [2**64 - 1], 64)
    large = kernels.Buffers(bytearray(), 0, 1, 0, writable=True, exact=False)
    with pytest.raises((ValueError, IndexError)):
        kernels.copy_tokens([mapping], one, [0], 2**31, [], 2**32 - 1, 0, large)
    refuse(ValueError, "read-only", one, [0], 64, kernels.Buffers(bytes(64), 0, 1, 64))
    for wrong in ({"block_tokens": 0}, {"threads": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            given = {"tokens": [1], "block_tokens": 4, "first": 0, "targets": into, **wrong}
            kernels.copy_tokens([mapping], one, [0], 64, **given)
    assert target == bytes(64)


PIECES = {  # name: (piece sizes, array sizes follow from 7 blocks and a gap)
    "one": [4096],
    "a word": [8] * 40,
    "lines": [64, 128, 4096, 64],
    "odd": [1, 63, 65, 4097, 1000, 3, 700],
    "tiny": [3, 5],
    "large": [32768] * 8,
    "larger than the distance ahead": [12288, 65536 + 64, 4096, 4160],
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("nice", [0, 10])
def test_gather_and_scatter_match_their_models(
    copies, make_mapping, packed, random_bytes, guarded, name, checksum, threads, nice
):
    sizes, blocks, gap, offset = PIECES[name], 7, 40, 24
    strides = [size + gap for size in sizes]
    spans = [offset + blocks * stride for stride in strides]
    arrays = [random_bytes(span, j) for j, span in enumerate(spans)]
    offsets = [offset] * len(sizes)
    ids = random.Random(name).sample(range(blocks), 5)
    place = Place(make_mapping, packed, 5, sum(sizes), True)
    ours = kernels.Pieces(arrays, offsets, strides, sizes)
    twins = reference.Pieces(arrays, offsets, strides, sizes)
    assert (ours.block_bytes, ours.blocks, ours.writable) == (sum(sizes), blocks, True)

    expected = reference.gather(twins, ids, place.twins, place.slots)
    digests = kernels.gather(ours, ids, place.mappings, place.slots, threads, checksum, nice)
    assert digests == (expected if checksum else b"")
    assert place.same()

    targets = [guarded(span, j % 64) for j, span in enumerate(spans)]
    copies_of = [target.array.copy() for target in targets]
    back = kernels.Pieces([target.array for target in targets], offsets, strides, sizes)
    reference.scatter(
        reference.Pieces(copies_of, offsets, strides, sizes), ids, place.twins, place.slots
    )
    digests = kernels.scatter(back, ids, place.mappings, place.slots, threads, checksum, nice)
    assert digests == (expected if checksum else b"")
    for target, twin in zip(targets, copies_of, strict=True):
        assert np.array_equal(target.array, twin) and target.intact()


def test_gather_shares_one_big_block_between_threads(copies, make_mapping, packed, random_bytes):
    sizes = [100_003, 262_144, 700_001]
    arrays = [random_bytes(size, j) for j, size in enumerate(sizes)]
    pieces = kernels.Pieces(arrays, [0] * 3, sizes, sizes)
    mapping = make_mapping(2 * MIB)
    kernels.gather(pieces, [0], [mapping], packed((0, 4096)), 4)
    assert bytes(mapping)[4096 : 4096 + sum(sizes)] == b"".join(a.tobytes() for a in arrays)


def nice_values():
    """The nice values of this process's threads."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            found.append(int((task / "stat").read_text().rpartition(")")[2].split()[16]))
    return found


def test_copies_with_low_priority_run_in_separate_threads(make_mapping, packed):
    mapping, array = make_mapping(16 << 20), np.ones(16 << 20, np.uint8)
    pieces = kernels.Pieces([array], [0], [1 << 20], [1 << 20])
    ids, slots = list(range(16)), packed(*((0, at << 20) for at in range(16)))
    ended = threading.Event()
    own = []

    def copy():
        while not ended.is_set():
            kernels.gather(pieces, ids, [mapping], slots, 2, False, 7)
            kernels.scatter(pieces, ids, [mapping], slots, 2, False, 7)
        own.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    copying = threading.Thread(target=copy)
    copying.start()
    deadline = time.monotonic() + 60
    while (most := nice_values().count(7)) < 2 and time.monotonic() < deadline:
        pass
    ended.set()
    copying.join()
    assert (most, own) == (2, [os.getpriority(os.PRIO_PROCESS, 0)])
    with pytest.raises(ValueError, match="nice"):
        kernels.gather(pieces, ids, [mapping], slots, 2, False, 20)


def test_gather_takes_ids_in_any_form(make_mapping, packed, random_bytes):
    array = random_bytes(1024)
    pieces = kernels.Pieces([array], [0], [64], [64])
    mapping, slots = make_mapping(8192), packed((0, 0), (0, 4096))
    ids = [9, 4]
    forms = [ids, np.array(ids, np.uint32), np.array(ids, np.int64), np.array(ids, "<u4").tobytes()]
    for form in forms:
        np.frombuffer(mapping, np.uint8)[:] = 0
        kernels.gather(pieces, form, [mapping], slots)
        assert bytes(mapping)[:64] == array[576:640].tobytes()
        assert bytes(mapping)[4096:4160] == array[256:320].tobytes()


def test_pieces_take_arrays_whose_axes_are_in_another_order(make_mapping, packed):
    base = np.arange(4096, dtype=np.uint8).reshape(4, 16, 64)
    mapping, slots = make_mapping(4096), packed((0, 0))
    for array in (base.transpose(1, 0, 2), OnlyDlpack(base.transpose(2, 0, 1))):
        kernels.gather(kernels.Pieces([array], [0], [1024], [1024]), [2], [mapping], slots)
        assert bytes(mapping)[:1024] == base[2].tobytes()
    for holes in (base[:, ::2], base[:, :, :32], base[::-1], OnlyDlpack(base[:, ::2])):
        with pytest.raises(ValueError, match="array 0"):
            kernels.Pieces([holes], [0], [64], [64])


def test_pieces_outside_their_arrays_are_refused():
    array = bytearray(100)
    for offsets, strides, sizes in (
        ([-1], [10], [10]),
        ([91], [10], [10]),
        ([0], [9], [10]),
        ([0], [10], [0]),
        ([0], [-10], [10]),
        ([101], [10], [1]),
        ([2**62], [2**62], [2**62]),
        ([0, 0], [10], [10]),
    ):
        with pytest.raises(ValueError, match="piece"):
            kernels.Pieces([array], offsets, strides, sizes)
    with pytest.raises(ValueError, match="at least one"):
        kernels.Pieces([], [], [], [])


def test_gather_and_scatter_check_everything_before_a_byte_moves(make_mapping, packed):
    mapping, slots = make_mapping(8192), packed((0, 0), (0, 4096))
    pieces = kernels.Pieces([b"x" * 1000], [0], [100], [100])
    assert pieces.blocks == 10 and not pieces.writable
    for ids in ([0, 10], [0, 2**32 - 1]):
        with pytest.raises(IndexError, match="block_ids"):
            kernels.gather(pieces, ids, [mapping], slots)
    with pytest.raises(ValueError, match="outside"):
        kernels.gather(pieces, [0, -1], [mapping], slots)
    with pytest.raises(ValueError, match="1 block ids for 2"):
        kernels.gather(pieces, [0], [mapping], slots)
    with pytest.raises(IndexError, match="slot 1"):
        kernels.gather(pieces, [0, 1], [mapping], packed((0, 0), (0, 8100)))
    with pytest.raises(ValueError, match="read-only"):
        kernels.scatter(pieces, [0, 1], [mapping], slots)
    assert bytes(mapping) == bytes(8192)


def test_pieces_keep_their_arrays(make_mapping, packed):
    mapping = make_mapping(4096)
    pieces = kernels.Pieces([bytearray(b"k" * 4096)], [0], [4096], [4096])
    _others = [bytearray(4096) for _ in range(50)]
    kernels.gather(pieces, [0], [mapping], packed((0, 0)))
    assert bytes(mapping) == b"k" * 4096


@pytest.mark.parametrize("level", ["scalar", "avx2", "avx512"])
def test_the_environment_caps_the_level(level):
    code = (
        "import kvtier_kernels as k; print(k.cpu_features()['level'], *k.implementations('copy'))"
    )
    environment = os.environ | {"KVTIER_CPU": level}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    taken, *implementations = run.stdout.split()
    order = ["scalar", "sse41", "avx2", "avx512"]
    assert order.index(taken) <= order.index(level)
    assert level in implementations or taken != level
    assert all(order.index(name) <= order.index(level) for name in implementations)


def test_memory_that_is_refused_is_released():
    target, source = bytearray(16), memoryview(np.array([1, 2], dtype=object))
    for refused in (
        lambda: kernels.copy(target, source),
        lambda: kernels.xxh3_128(source),
        lambda: kernels.copy_runs(target, source, 1, 8, 0, 0, 0, 0),
        lambda: kernels.Buffers([source], 0, 1, 16),
    ):
        with pytest.raises(TypeError, match="Python objects"):
            refused()
    source.release()  # raises BufferError while it is in use
    target.append(0)
