"""Read parts of blocks on disk from their frames: the pages of the header and of the entries that are needed.

The kernel verifies the header, which names the block, and the digests of the entries that it reads, as they
are on disk. The digest of the whole block is not compared. A block counts only if it is
still stored after the read.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvtier.connection import Clock
from kvtier.direct import LEASE_MS, OpenSpace, codecs_for, read_directly
from kvtier.errors import Refused
from kvtier.frame import ELEMENTS
from kvtier.key import Keys
from kvtier.layout import KvSpec
from kvtier.parts import Selection
from kvtier.wire import LIMIT_DIRECT_BLOCKS
from kvtier_kernels import read_frame_parts

READERS = 8  # threads, which wait for the disk
FEW = 8  # keys whose frames are read without a lease: too soon for their segments to be reused
BATCH_BYTES = 64 << 20  # that are read under one lease, and that are in memory until it ends
BATCH_S = 1.0  # how long a batch may take at the speed of the one before


def batches(
    space: OpenSpace, spec: KvSpec, keys: Keys, chosen: Selection, place: tuple[int, int],
    clock: Clock, until: float,
) -> Iterator[tuple[dict[int, memoryview], int]]:  # fmt: skip
    """Read the chosen bytes of the blocks of this group and shard that are only on disk. Each batch has those
    that were verified and are still stored, by the places of their keys, among the keys before a place, which
    is returned too. Blocks before that place that it does not have are in memory, or their frames are damaged
    or such that only the daemon can read them. The last batch ends with the keys; it has no blocks if the
    tenant's configuration does not permit direct reads. None begins after `until`."""
    nbytes, element = chosen.nbytes, ELEMENTS.get(spec.dtype, 0)
    layer_bytes = chosen.block_bytes // spec.cache_groups[place[0]].layers
    # Layers may be repeated.
    limit = BATCH_BYTES // max(nbytes, _read_bytes(layer_bytes, chosen))
    most = limit = max(1, min(LIMIT_DIRECT_BLOCKS, limit))
    codecs, first, used = codecs_for(spec), 0, (chosen.tokens, nbytes)
    leased = len(keys) > FEW
    while first < len(keys) and clock() < until:
        some, before = keys[first : first + LIMIT_DIRECT_BLOCKS], first
        try:
            lease = read_directly(space, some, codecs, *place, LEASE_MS if leased else 0, 0, most)
        except Refused:
            break
        if not lease.frames:
            first += len(some)
            yield {}, first
            continue
        rows = [
            (
                one.file.fd, one.header_at, one.header_bytes, one.payload_bytes, one.codec, one.epoch,
                one.digest, one.name.encode(),
            )
            for one in lease.frames
        ]  # fmt: skip
        into = memoryview(bytearray(len(rows) * nbytes))
        began = clock()
        places = chosen.starts, chosen.each
        sound = read_frame_parts(
            rows, element, chosen.block_bytes, *places, into, READERS, layer_bytes
        )
        took_s = max(1e-6, clock() - began)
        most = max(1, min(limit, int(len(rows) * BATCH_S / took_s)))
        valid = lease.end([bool(one) for one in sound], used)
        if not leased and any(sound) and not any(valid):
            leased = True  # so that the daemon knows which blocks are still stored
            continue
        first += lease.frames[-1].at + 1
        yield (
            {
                before + frame.at: into[number * nbytes : (number + 1) * nbytes]
                for number, frame in enumerate(lease.frames)
                if valid[number]
            },
            first,
        )
    yield {}, len(keys)


def _read_bytes(layer: int, chosen: Selection) -> int:
    """How many bytes of a block are read: whole layers, of this size."""
    touched = {
        number
        for start in chosen.starts
        for number in range(start // layer, (start + chosen.each - 1) // layer + 1)
    }
    return layer * len(touched)
