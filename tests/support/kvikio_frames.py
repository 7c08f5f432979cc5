"""Reads frames by kvikio into the memory of a CUDA driver without a device, in a process that finds the
driver as libcuda.so.1: some are damaged, torn, of another use of the segment, or forgotten during the read.

Arguments: the daemon's socket, the number of chains, and the blocks of each. Prints a JSON object with
counts, of blocks that had to be loaded or missed, and of those that were not as they had to be."""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier import Client
from kvtier.direct import DirectFrame, read_directly
from kvtier.frame import DIGEST_AT, DIGEST_BYTES, HEADER, PAGE, TIME_AT
from kvtier_kernels import xxh3_128
from kvtier_kernels.cuda import Copier, Driver, blocks, codecs, digests
from kvtier_plugins.direct import open_source
from kvtier_plugins.payload_reads import CuFileReads, DirectReadsError
from support.direct_engine import UNTOUCHED, DirectEngine
from support.specs import spec_of

SPEC = spec_of("kvikio", kv_heads=1)  # blocks of 16 KiB
SHARE = 10  # one frame of as many is not sound


def tokens(chain: int, length: int) -> list[int]:
    return [chain * 1_000_000 + n for n in range(SPEC.block_tokens * length)]


def content(key: bytes) -> bytes:
    """A block of a key, half of whose bytes are easy to encode."""
    return b"".join(
        bytes([byte, 63]) for byte in random.Random(key).randbytes(SPEC.block_bytes // 2)
    )


def save(client: Client, chain: int, length: int) -> None:
    space = client.open(SPEC)
    keys = space.keys(tokens(chain, length))
    assert space.save(keys, [content(key) for key in keys]).stored == length


# --- what can happen to a frame ---------------------------------------------------------------------


def damage_header(file: int, frame: DirectFrame, chance: random.Random) -> None:
    _flip(file, frame.header_at + chance.randrange(HEADER.size), chance)


def damage_payload(file: int, frame: DirectFrame, chance: random.Random) -> None:
    _flip(file, frame.payload_at + chance.randrange(frame.payload_bytes), chance)


def tear(file: int, frame: DirectFrame, chance: random.Random) -> None:
    """Only the first pages of the payload have been written."""
    written = chance.randrange(frame.read_bytes // PAGE) * PAGE
    os.pwrite(file, bytes(frame.read_bytes - written), frame.payload_at + written)


def use_again(file: int, frame: DirectFrame, chance: random.Random) -> None:
    """The segment was used again: here is a sound frame of the same block, written in another use."""
    text = bytearray(os.pread(file, frame.header_bytes, frame.header_at))
    text[TIME_AT : TIME_AT + 8] = chance.randbytes(8)
    text[DIGEST_AT : DIGEST_AT + DIGEST_BYTES] = bytes(DIGEST_BYTES)
    text[DIGEST_AT : DIGEST_AT + DIGEST_BYTES] = xxh3_128(text)
    os.pwrite(file, text, frame.header_at)


def replace(file: int, frame: DirectFrame, chance: random.Random) -> None:
    """Here are the bytes of another block."""
    os.pwrite(file, content(chance.randbytes(32))[: frame.payload_bytes], frame.payload_at)


def _flip(file: int, at: int, chance: random.Random) -> None:
    (byte,) = os.pread(file, 1, at)
    os.pwrite(file, bytes([byte ^ 1 << chance.randrange(8)]), at)


HARMS: dict[str, Callable[[int, DirectFrame, random.Random], None]] = {
    "header": damage_header, "payload": damage_payload, "torn": tear, "reused": use_again,
    "replaced between header and payload": replace,
}  # fmt: skip
LATE = "replaced between header and payload"
FORGOTTEN = "forgotten during the read"


class HarmedReads(CuFileReads):
    """Harms frames after their headers were read, and lets blocks be forgotten after their payloads were."""

    def __init__(self, base: int, nbytes: int) -> None:
        super().__init__(base, nbytes)
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None

    def read(
        self, frames: Sequence[DirectFrame], addresses: Sequence[int], stream: int
    ) -> list[bool]:
        self.before()
        arrived = super().read(frames, addresses, stream)
        self.after()
        return arrived


def harm(
    frames: Sequence[DirectFrame], chosen: dict[int, str], late: bool, chance: random.Random
) -> None:
    for at, what in chosen.items():
        if what == FORGOTTEN or (what == LATE) != late:
            continue
        path = Path(f"/proc/self/fd/{frames[at].file.fd}").resolve()
        file = os.open(path, os.O_RDWR)
        HARMS[what](file, frames[at], chance)
        os.close(file)


def main(socket: str, chains: int, length: int) -> dict[str, int]:
    import rapids_logger

    rapids_logger.load_library()  # libkvikio needs it, and does not find it itself
    for module in (blocks, codecs, digests):
        module.compile_kernel = lambda text, architecture: b"host\0"
    counts: Counter[str] = Counter(sound=0, wrong=0)
    driver = Driver(0)
    copier = Copier(driver, "kernel")
    engine = DirectEngine(driver, copier, SPEC, length, 2 * length * SPEC.block_bytes)
    ring = engine.reader.ring
    source = HarmedReads(ring.payloads, ring.nbytes)
    assert source.is_compatible_only, "there is no device: kvikio cannot read directly"
    for mode, expected in (
        ("auto", "compatibility mode; blocks"),
        ("on", "pinned memory, because kvikio"),
    ):
        assert expected in selected(mode, engine), mode
    with Client.connect(socket, populate=False) as client:
        for chain in range(chains):
            load(client, engine, source, chain, length, counts)
    source.close()
    engine.close()
    copier.close()
    driver.close()
    return dict(counts)


def selected(mode: str, engine: DirectEngine) -> str:
    """What the log says about the way to read in this mode."""
    try:
        source, text = open_source(mode, engine.reader)
    except DirectReadsError as error:
        return str(error)
    source.close()
    return text


def load(
    client: Client, engine: DirectEngine, source: HarmedReads, chain: int, length: int, counts: Counter[str]
) -> None:  # fmt: skip
    chance, space = random.Random(chain), client.open(SPEC)
    keys = space.keys(tokens(chain, length))
    lease = read_directly(space, keys, engine.reader.codecs, deadline_ms=600_000)
    assert len(lease.frames) == length, (len(lease.frames), length)
    kinds = (*HARMS, FORGOTTEN)
    chosen = {
        at: kinds[n % len(kinds)]
        for n, at in enumerate(chance.sample(range(length), length // SHARE))
    }
    gone = [at for at, what in chosen.items() if what == FORGOTTEN]
    harm(lease.frames, chosen, False, chance)
    source.before = lambda: harm(lease.frames, chosen, True, chance)
    source.after = lambda: [space.forget(keys[at : at + 1]) for at in gone]
    engine.clear()
    batch = engine.reader.read(lease, source)
    engine.write(batch)
    found, pages = {one.at for one in batch}, engine.content()
    for at in range(length):
        page = pages[:, at].tobytes()
        if at in chosen:
            counts[chosen[at]] += 1
            counts["wrong"] += at in found or page != bytes([UNTOUCHED]) * len(page)
        else:
            counts["sound"] += 1
            counts["wrong"] += at not in found or page != content(keys[at])


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
