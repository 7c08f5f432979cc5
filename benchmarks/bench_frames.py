"""Encoded frames from a disk, decoded while they are read, relative to reading and decoding alone.

Each round reads frames past the page cache without decoding them, decodes the same number of frames in
memory with one thread, and has a disk worker do both, in alternating order. The results are the medians of
the rounds' ratios to the sum of both, and to the slower of the two, which is the limit. Blocks are normal
values with a different deviation for each channel, 32 layers of K and V.
"""

from __future__ import annotations

import argparse
import os
import select
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import harness
from harness import Arm, Row, interval
from kv import bf16, synthetic
from kvtier import KvSpec
from kvtier.frame import RAW, Template, stamp
from kvtier_daemon.codec import block_parts, framing
from kvtier_daemon.codec.base import Codec
from kvtier_daemon.codec.grid import grids
from kvtier_daemon.codec.table import BY_NAME
from kvtier_kernels import Disk, Mapping, decode_frame, xxh3_128
from models.codecs import seal
from models.kernels.disk import OPERATION, URGENT

MIB, PAGE = 1 << 20, 4096
LAYERS, HEADS, HEAD = 32, 8, 128
ARENA = 256 * MIB
FILE = 192 * MIB  # of each kind of frame: no disk's own memory is to answer twice
SIZES = (2, 8, 32)
CODECS = ("r32", "q8")
ALONE, TOGETHER = 1, 8  # frames at a time


@dataclass(frozen=True)
class Made:
    """One frame, as often as fits a file."""

    codec: Codec
    header: bytes
    payload: bytes
    digest: bytes
    block: bytes  # as it comes back
    file: Path

    @property
    def file_bytes(self) -> int:
        return -(-(len(self.header) + len(self.payload)) // PAGE) * PAGE

    @property
    def count(self) -> int:
        return max(TOGETHER, FILE // self.file_bytes)

    def decode(self, into: memoryview) -> None:
        header = bytearray(self.header)
        assert decode_frame(0, header, self.payload, self.digest, into, self.codec.recipe)


def make(folder: Path, mib: int, name: str) -> Made:
    tokens = mib * MIB // (LAYERS * HEADS * HEAD * 4)
    spec = KvSpec.dense(
        model="m", layers=LAYERS, kv_heads=HEADS, head_dim=HEAD, dtype="bfloat16", block_tokens=tokens,
        weights="rev:1",
    )  # fmt: skip
    block, codec = bf16(synthetic(spec.block_bytes // 2, mib)).tobytes(), BY_NAME[name]
    header = Template(bytes(32), 0, 0, RAW, block_parts.entries(spec, 0)).blank(b"")
    into = bytearray(len(block))
    if codec.lossy:
        size = framing.encode_lossy(codec, spec.dtype, header, block, into, grids(spec, 0), 0)
    else:
        size = framing.encode(codec, spec.dtype, header, block, into)
    stamp(header, bytes(32), b"", 1, 1)
    payload, back = bytes(into[:size]), bytearray(len(block))
    found = Made(
        codec,
        seal(bytes(header), payload),
        payload,
        xxh3_128(payload),
        b"",
        folder / f"{mib}-{name}",
    )
    found.decode(memoryview(back))
    assert codec.lossy or back == block
    text = (found.header + payload).ljust(found.file_bytes, b"\0")
    with found.file.open("wb") as file:
        for _ in range(found.count):
            file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return Made(codec, found.header, payload, found.digest, bytes(back), found.file)


class Worker:
    """A disk worker with one decoder, as a directory of a daemon with two cores has."""

    def __init__(self, engine: str) -> None:
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.disk = Disk(self.bell, engine)
        fd = os.memfd_create("frames")
        os.posix_fallocate(fd, 0, ARENA)
        mapping = Mapping(fd, ARENA, True)
        os.close(fd)
        self.memory = memoryview(mapping)
        self.extent = self.disk.register(mapping)
        self.turn = 0

    def _wait(self, left: int) -> None:
        while left:
            select.select([self.bell], [], [])
            os.eventfd_read(self.bell)
            for _, error, _ in self.disk.done():
                assert not error, os.strerror(error)
                left -= 1

    def places(self, made: Made, count: int) -> Iterator[tuple[int, int]]:
        """Where each frame is in its file, and each block in memory."""
        for number in range(count):
            self.turn += 1
            yield self.turn * 5 % made.count * made.file_bytes, number * len(made.block) % ARENA

    def read(self, made: Made, fd: int, count: int) -> None:
        for at, _ in self.places(made, count):
            self.disk.read_bytes(0, fd, at, len(made.header) + len(made.payload), True, staged=True)
        self._wait(count)

    def decode(self, made: Made, count: int) -> None:
        for _, at in self.places(made, count):
            made.decode(self.memory[at : at + len(made.block)])

    def both(self, made: Made, fd: int, count: int) -> None:
        ops = b"".join(
            OPERATION.pack(0, fd, URGENT, at, len(made.block), self.extent, 0, into, made.digest)
            + struct.pack("<QIHH72x", len(made.payload), len(made.header), 0, made.codec.lossy)
            for at, into in self.places(made, count)
        )
        self.disk.read_frames(ops, [made.codec.recipe] if made.codec.recipe else [])
        self._wait(count)


def measured(worker: Worker, made: Made, mib: int, count: int, rounds: int) -> Iterator[Row]:
    fd = os.open(made.file, os.O_RDONLY | os.O_DIRECT)
    arms = [
        Arm(lambda: worker.read(made, fd, count)),
        Arm(lambda: worker.decode(made, count)),
        Arm(lambda: worker.both(made, fd, count)),
    ]
    worker.memory[: len(made.block)] = bytes(len(made.block))
    arms[2].once()
    assert bytes(worker.memory[: len(made.block)]) == made.block
    for turn in range(rounds + 1):
        for number in range(3):
            arms[(turn + number) % 3].once()
        if not turn:
            for arm in arms:
                arm.seconds.clear()  # the first time pages come
    os.close(fd)
    times = list(zip(*(arm.seconds for arm in arms), strict=True))
    name = f"{count} of {mib} MiB, {made.codec.name}"
    for what, limit in (("in sequence", sum), ("the slower of the two", max)):
        ratios = [limit((read, decode)) / both for read, decode, both in times]
        low, high = interval(ratios)
        more = {
            f"{key} ms": 1000 * median(arm.seconds)
            for key, arm in zip(("read", "decode", "both"), arms, strict=True)
        }
        yield Row(f"{name} / {what}", median(ratios), "x", low=low, high=high, more=more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--engine", default="auto", choices=["auto", "io_uring", "threads"])
    parser.add_argument("--rounds", type=int, default=3 * harness.ROUNDS)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    probes, rows = [harness.noise()], []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        worker = Worker(arguments.engine)
        for mib in SIZES:
            for codec in CODECS:
                made = make(Path(folder), mib, codec)
                for count in (ALONE, TOGETHER):
                    for row in measured(worker, made, mib, count, arguments.rounds):
                        print(row.line(), flush=True)
                        rows.append(row)
                made.file.unlink()
        stopped = worker.disk.stop()
        assert stopped == 0
    probes.append(harness.noise())
    return harness.report("frames", rows, probes, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
