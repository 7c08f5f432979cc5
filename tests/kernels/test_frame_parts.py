"""Reads of parts of frames compared with their model: the same bytes, or none if anything that they need is
damaged."""

import multiprocessing
import os
import random
import resource
import struct
import threading
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import kvtier_kernels as kernels
from kvtier.frame import ENCRYPTED, PAGE, RAW, Identity, Template, decode, stamp
from kvtier_daemon.codec import framing
from kvtier_daemon.codec.block_parts import entries
from kvtier_daemon.codec.grid import grids
from kvtier_daemon.codec.table import BY_NAME
from models.kernels.frame_parts import read_frame_parts
from support.specs import spec_of

SPEC = spec_of("parts", layers=5, kv_heads=2, head_dim=64, block_tokens=16)
BLOCK = SPEC.block_bytes  # 40 KiB
PART = BLOCK // 10
NAME, EPOCH = Identity(b"s" * 32, 3, 2, b"k" * 32), 9
CODECS = ("raw", "fix4", "r32", "q8", "q4", "q2", "fp8", "e5m2", "nvfp4", "mxfp4")
CHOSEN = [
    ([0], BLOCK), ([0], 1), ([BLOCK - 1], 1), ([2 * PART], 2 * PART), ([8 * PART, 0, 8 * PART], PART),
    ([PART - 1], 2), ([100, 3 * PART + 100], 256), ([n * PART + 512 for n in range(10)], 300),
]  # fmt: skip


@cache
def frame(codec: str) -> bytes:
    """A frame as it is in a file."""
    draw = np.random.default_rng(1).standard_normal(BLOCK // 2).astype(np.float32)
    block = (draw.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    by = BY_NAME[codec]
    template = Template(NAME.space, NAME.group, NAME.shard, RAW, entries(SPEC, 0))
    header, into = template.blank(b""), bytearray(BLOCK)
    if by.lossy:
        size = framing.encode_lossy(by, "bfloat16", header, block, into, grids(SPEC, 0), 0)
    elif codec != "raw":
        size = framing.encode(by, "bfloat16", header, block, into)
    else:
        size, into[:] = BLOCK, block
    assert size < BLOCK or codec == "raw"
    stamp(header, NAME.key, b"", EPOCH, 1)
    kernels.seal_frame(header, into[:size])
    text = bytes(header) + bytes(into[:size])
    return text.ljust(-(-len(text) // PAGE) * PAGE, b"\0")


class Files:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "frames"
        self.fd = -1

    def row(self, text: bytes, whole: bytes, at: int = PAGE, **changed: object) -> tuple:
        """Write a frame, damaged or not; return the row of the undamaged one."""
        if self.fd < 0:
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT)
        os.pwrite(self.fd, text, at)
        one = decode(whole)
        row = {
            "fd": self.fd, "at": at, "header": one.header_bytes, "payload": one.payload_bytes,
            "codec": one.codec, "epoch": EPOCH, "digest": one.payload_digest, "name": NAME.encode(),
        }  # fmt: skip
        return tuple((row | changed).values())


@pytest.fixture
def files(tmp_path):
    files = Files(tmp_path)
    yield files
    if files.fd >= 0:
        os.close(files.fd)


@pytest.fixture(params=[0, 2 * PART], ids=["in turn", "at once"])
def layer_bytes(request):
    """With the size of layers, headers and layers of raw frames are read at the same time."""
    return request.param


def read(rows, starts, each, guarded, layer_bytes, threads=1):
    """Read, and check that no other bytes change; return the parts that are sound."""
    size = len(starts) * each
    target = guarded(len(rows) * size, 5)
    given = 0, BLOCK, starts, each, target.array, threads, layer_bytes
    sound = kernels.read_frame_parts(rows, *given)
    assert target.intact()
    parts = target.array.reshape(len(rows), size)
    return [part.tobytes() if good else None for part, good in zip(parts, sound, strict=True)]


@pytest.mark.parametrize("codec", CODECS)
def test_parts_are_those_of_the_model(files, guarded, codec, layer_bytes):
    text = frame(codec)
    row = files.row(text, text)
    for starts, each in CHOSEN:
        expected = read_frame_parts(text, NAME, EPOCH, 0, BLOCK, starts, each)
        assert expected is not None
        assert read([row], starts, each, guarded, layer_bytes) == [expected]


@pytest.mark.parametrize("codec", CODECS)
def test_a_damaged_byte_gives_the_same_bytes_or_none(files, guarded, codec, layer_bytes):
    text, chance = frame(codec), random.Random(codec)
    size = decode(text).header_bytes + decode(text).payload_bytes
    places = [*range(0, 700, 3), *(chance.randrange(size) for _ in range(300))]
    kept = missed = 0
    for place in places:
        bad = bytearray(text)
        bad[place] ^= 1 << chance.randrange(8)
        starts, each = chance.choice(CHOSEN)
        (found,) = read([files.row(bytes(bad), text)], starts, each, guarded, layer_bytes)
        expected = read_frame_parts(bytes(bad), NAME, EPOCH, 0, BLOCK, starts, each)
        assert found == expected
        if found is None:
            missed += 1
        else:
            kept += 1
            assert found == read_frame_parts(text, NAME, EPOCH, 0, BLOCK, starts, each)
    assert missed > 200 and kept > 20


def test_frames_are_read_by_threads_and_each_is_its_own(files, guarded, layer_bytes):
    texts = [frame(codec) for codec in CODECS]
    rows = [files.row(text, text, number * 64 * PAGE) for number, text in enumerate(texts)]
    for starts, each in CHOSEN:
        expected = [read_frame_parts(one, NAME, EPOCH, 0, BLOCK, starts, each) for one in texts]
        assert read(rows * 4, starts, each, guarded, layer_bytes, 4) == expected * 4


@pytest.mark.parametrize(
    "changed",
    [
        {"epoch": 8}, {"name": b"s" * 32 + b"j" * 32 + struct.pack("<HH", 3, 2)},
        {"name": b"s" * 32 + b"k" * 32 + struct.pack("<HH", 3, 1)},
        {"name": b"t" * 32 + b"k" * 32 + struct.pack("<HH", 3, 2)},
        {"digest": bytes(16)}, {"payload": BLOCK - 1}, {"codec": 1}, {"header": 2 * PAGE}, {"at": 0},
        {"at": 2 * PAGE}, {"at": 1 << 40}, {"fd": 1 << 20},
    ],
)  # fmt: skip
def test_a_frame_that_is_not_the_described_one_is_none(files, guarded, changed, layer_bytes):
    text = frame("raw")
    assert read([files.row(text, text)], [0], 64, guarded, layer_bytes) != [None]
    row = dict(zip(("fd", "at", "header", "payload", "codec", "epoch", "digest", "name"),
                   files.row(text, text), strict=True))  # fmt: skip
    assert read([tuple((row | changed).values())], [0], 64, guarded, layer_bytes) == [None]


def test_a_file_that_ends_before_an_entry_is_none(files, guarded, layer_bytes):
    text = frame("raw")
    row = files.row(text, text)
    os.ftruncate(files.fd, PAGE + PAGE + 4 * PART)
    assert read([row], [3 * PART], PART, guarded, layer_bytes) != [None]
    assert read([row], [4 * PART], PART, guarded, layer_bytes) == [None]


CHOICES = [0, 1, PART, 2 * PART, 3 * PART, 4 * PART, BLOCK]


@pytest.mark.parametrize("frames", [1, 3, 8, 9])
@pytest.mark.parametrize("bytes_of_a_layer", CHOICES)
def test_layers_of_another_size_give_the_same_bytes(files, guarded, frames, bytes_of_a_layer):
    """What is read first is a guess."""
    text = frame("raw")
    rows = [files.row(text, text, number * 64 * PAGE) for number in range(frames)]
    for starts, each in CHOSEN:
        expected = read_frame_parts(text, NAME, EPOCH, 0, BLOCK, starts, each)
        assert read(rows, starts, each, guarded, bytes_of_a_layer) == [expected] * frames


def test_one_damaged_frame_of_several_that_are_read_at_once_is_none(files, guarded):
    text = frame("raw")
    rows = [files.row(text, text, number * 64 * PAGE) for number in range(8)]
    bad = bytearray(text)
    bad[PAGE + 3 * PART] ^= 1
    rows[5] = files.row(bytes(bad), text, 5 * 64 * PAGE)
    expected = read_frame_parts(text, NAME, EPOCH, 0, BLOCK, [2 * PART], PART)
    assert read(rows, [2 * PART], PART, guarded, 2 * PART) == [expected] * 8
    expected = read_frame_parts(text, NAME, EPOCH, 0, BLOCK, [3 * PART], PART)
    found = read(rows, [3 * PART], PART, guarded, 2 * PART)
    assert found == [*[expected] * 5, None, *[expected] * 2]


def read_with(row, answer):
    """Read two layers; tell whether they are right."""
    text, into = frame("raw"), bytearray(2 * PART)
    sound = kernels.read_frame_parts([row], 0, BLOCK, [4 * PART], 2 * PART, into, 1, 2 * PART)
    expected = read_frame_parts(text, NAME, EPOCH, 0, BLOCK, [4 * PART], 2 * PART)
    answer.append(sound == b"\1" and into == expected)


def in_a_thread(row):
    """Which has no ring yet."""
    answer = []
    thread = threading.Thread(target=read_with, args=(row, answer))
    thread.start()
    thread.join()
    return answer == [True]


def test_reads_in_threads_and_in_forked_children_use_rings_of_their_own(files):
    text, mine = frame("raw"), []
    row = files.row(text, text)
    read_with(row, mine)
    children = [
        multiprocessing.get_context("fork").Process(target=child, args=(row,)) for _ in range(2)
    ]
    for one in children:
        one.start()
    for _ in range(50):
        read_with(row, mine)
    assert in_a_thread(row)
    for one in children:
        one.join()
    assert [one.exitcode for one in children] == [0, 0] and all(mine)


def child(row):
    answer = []
    for _ in range(50):
        read_with(row, answer)
    os._exit(0 if all(answer) and in_a_thread(row) else 1)


def test_without_io_uring_reads_are_in_turn(files):
    text = frame("raw")
    row = files.row(text, text)
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    spare = [os.dup(files.fd)]
    while spare[-1] < highest:  # no lower descriptor is free
        spare.append(os.dup(files.fd))
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare[-1] + 1, most))
    try:
        with pytest.raises(OSError, match="Too many"):
            os.dup(files.fd)
        assert in_a_thread(row)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
        for fd in spare:
            os.close(fd)


def counted_reads() -> int:
    """How many times this process has read from files."""
    return int(Path("/proc/self/io").read_text().partition("syscr: ")[2].split()[0])


@pytest.mark.parametrize(("layers", "tokens", "reads"), [(8, 256, 3), (2, 2048, 5), (1, 3072, 3)])
def test_adjacent_entries_are_read_in_limited_pieces(files, guarded, layers, tokens, reads):
    """A piece has at most 4 MiB, except for a larger entry. The entries have 512 KiB, 4 MiB and 6 MiB."""
    spec = spec_of("long", layers=layers, kv_heads=1, head_dim=1024, block_tokens=tokens)
    block_bytes = spec.block_bytes
    block = random.Random(layers).randbytes(block_bytes)
    header = Template(NAME.space, NAME.group, NAME.shard, RAW, entries(spec, 0)).blank(b"")
    stamp(header, NAME.key, b"", EPOCH, 1)
    kernels.seal_frame(header, block)
    text = bytes(header) + block
    row = files.row(text, text)
    target = guarded(block_bytes, 5)
    nothing = counted_reads()
    nothing = counted_reads() - nothing
    before = counted_reads()
    sound = kernels.read_frame_parts([row], 0, block_bytes, [0], block_bytes, target.array, 1)
    found = counted_reads() - before - nothing
    assert sound == b"\1" and target.array.tobytes() == block and target.intact()
    assert found == reads, "the header, and the pieces"


def test_invalid_arguments_are_refused(files):
    text = frame("raw")
    good, target = files.row(text, text), bytearray(64)

    def refuse(error, match, row=good, element=0, starts=(0,), each=64, into=target, layer_bytes=0):
        with pytest.raises(error, match=match):
            kernels.read_frame_parts([row], element, BLOCK, starts, each, into, 1, layer_bytes)

    refuse(IndexError, "starts", starts=[BLOCK - 63])
    refuse(IndexError, "starts", starts=[2**64 - 1])
    refuse(IndexError, "starts", each=2**63)
    refuse(ValueError, "layer_bytes", layer_bytes=BLOCK + 1)
    refuse(ValueError, "into", starts=[])
    refuse(ValueError, "into", each=0)
    refuse(ValueError, "into", into=bytearray(65))
    refuse(ValueError, "into", into=bytearray(128))
    refuse(ValueError, "element", element=9)
    for codec in (3, 7, 8, ENCRYPTED):
        refuse(ValueError, "codec", files.row(text, text, codec=codec))
    refuse(ValueError, "header", files.row(text, text, header=100))
    refuse(ValueError, "header", files.row(text, text, header=0))
    refuse(ValueError, "digest", files.row(text, text, digest=b""))
    refuse(ValueError, "identity", files.row(text, text, name=b""))
