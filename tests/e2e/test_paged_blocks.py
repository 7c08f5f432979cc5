"""An engine's paged blocks, saved and read by several clients: one takes the lease, another reads."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier import Client, KvSpec, loading, wire
from kvtier.client import Lease, Reader, Space
from kvtier_kernels import Mapping, Pieces
from support.daemons import Daemon
from support.specs import spec_of

LAYERS, BLOCKS = 4, 12
SPEC = spec_of("paged")
PAGE_BYTES = SPEC.block_bytes // LAYERS

Paged = tuple[NDArray[np.uint8], Pieces]


def paged(seed: int | None) -> Paged:
    """An engine's cache: the pages of each layer are contiguous, and the layers are too."""
    shape = (LAYERS, BLOCKS, PAGE_BYTES)
    memory = np.zeros(shape, np.uint8)
    if seed is not None:
        memory = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    flat = memory.reshape(-1)
    offsets = [layer * BLOCKS * PAGE_BYTES for layer in range(LAYERS)]
    return memory, Pieces([flat] * LAYERS, offsets, [PAGE_BYTES] * LAYERS, [PAGE_BYTES] * LAYERS)


def saved(space: Space, pieces: Pieces, ids: list[int], seed: int = 0) -> Lease:
    """Save these blocks as a prompt, and lease them."""
    keys = space.keys([seed] * (SPEC.block_tokens * len(ids)))
    with space.reserve(keys) as saving:
        saving.gather(pieces, ids)
        saving.commit(len(saving))
    lease = space.lease(keys)
    assert lease.ready == len(ids)
    return lease


def test_a_copy_yields_after_each_piece(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waits for the end of the copy waits for one piece at most; blocks that were not
    copied are not committed."""
    monkeypatch.setattr("kvtier.saving.PIECE_BYTES", 2 * SPEC.block_bytes)
    source, pieces = paged(5)
    turns: list[int] = []

    class Turn:
        most = 3

        def __enter__(self) -> None:
            if len(turns) == self.most:
                raise InterruptedError
            turns.append(1)

        def __exit__(self, *_: object) -> None:
            pass

    with shared_daemon.connect() as client:
        space = client.open(SPEC)
        keys = space.keys([177] * (SPEC.block_tokens * 5))
        Turn.most = 2
        with pytest.raises(InterruptedError), space.reserve(keys) as saving:
            saving.gather(pieces, [3, 1, 7, 2, 9], turn=Turn())
        assert len(turns) == 2 and space.match(keys).ready == 0
        turns.clear()
        Turn.most = 3
        with space.reserve(keys) as saving:
            saving.gather(pieces, [3, 1, 7, 2, 9], turn=Turn())
            whole = saving.checksums
            saving.gather(pieces, [3, 1, 7, 2, 9])
            assert len(turns) == 3 and whole == saving.checksums
            saving.commit(5)
        target, to = paged(None)
        lease = space.lease(keys)
        assert client.reader().scatter(lease.part(0, 0).slots, to, [1, 2, 3, 4, 5]) == 5
        assert np.array_equal(target[:, 1:6], source[:, [3, 1, 7, 2, 9]])
        lease.release()


def test_without_granted_slots_nothing_is_copied(shared_daemon: Daemon) -> None:
    _, pieces = paged(5)
    with shared_daemon.connect() as client:
        space = client.open(SPEC)
        saved(space, pieces, [3, 1, 7], 181).release()
        saved(space, pieces, [3, 1, 7], 181).release()


def test_the_number_of_pages_must_match_slots_and_parts(shared_daemon: Daemon) -> None:
    _, pieces = paged(6)
    with shared_daemon.connect() as client:
        space = client.open(SPEC)
        slots = saved(space, pieces, [3, 1, 7], 178).part(0, 0).slots
        with pytest.raises(ValueError, match="6 paged blocks do not match 3 slots of 1 parts"):
            client.reader().scatter(slots, pieces, [1, 2, 3, 4, 5, 6])
        with (
            pytest.raises(ValueError, match="5 paged blocks do not match 3 keys"),
            space.reserve(space.keys([179] * (SPEC.block_tokens * 3))) as saving,
        ):
            saving.gather(pieces, [1, 2, 3, 4, 5])


def test_a_client_reads_blocks_leased_by_another(shared_daemon: Daemon) -> None:
    source, from_ = paged(1)
    target, to = paged(None)
    with shared_daemon.connect() as writer, shared_daemon.connect() as other:
        lease = saved(writer.open(SPEC), from_, [3, 1, 7])
        other.ping()
        reader = other.reader()
        assert reader.daemon_run == writer.reader().daemon_run
        assert reader.extents >= lease.extents > 0
        assert reader.scatter(lease.part(0, 0).slots, to, [0, 5, 2]) == 3
        assert np.array_equal(target[:, [0, 5, 2]], source[:, [3, 1, 7]])
        assert not target[:, [1, 3, 4, 6]].any()
        lease.release()


def test_a_block_may_consist_of_several_engine_blocks(shared_daemon: Daemon) -> None:
    """They are contiguous in the slot; a reader may leave some of them out."""
    source, from_ = paged(7)
    target, to = paged(None)
    spec = spec_of("pairs", block_tokens=2 * SPEC.block_tokens)
    assert spec.block_bytes == 2 * SPEC.block_bytes
    with shared_daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys([7] * (3 * spec.block_tokens))
        space.save(keys[:1], b"".join(source[:, page].tobytes() for page in (3, 1)))
        with space.reserve(keys) as saving:
            assert saving.granted == [1, 2]
            saving.gather(from_, [3, 1, 0, 7, 11, 4])
            saving.commit(len(saving))
        lease = space.lease(keys)
        whole = b"".join(source[:, page].tobytes() for page in (0, 7))
        assert bytes(lease.views(lease.part(0, 0), spec.block_bytes)[1]) == whole
        reader = client.reader()
        assert reader.scatter(lease.part(0, 0).slots, to, [0, 5, 2, 8, 9, 10], parts=2) == 3
        assert reader.scatter(lease.part(0, 0).slots, to, [0, 5, 2, 8, 0, 6], parts=2) == 3
        lease.release()
    assert np.array_equal(target[:, [5, 2, 8, 9, 10, 6]], source[:, [1, 0, 7, 11, 4, 4]])
    assert not target[:, [0, 1, 3, 4, 7, 11]].any()


def test_a_reader_needs_neither_its_client_nor_the_daemon(
    daemon_of: Callable[..., Daemon],
) -> None:
    daemon = daemon_of()
    source, from_ = paged(2)
    target, to = paged(None)
    with daemon.connect() as writer:
        lease = saved(writer.open(SPEC), from_, [4, 8])
        other = daemon.connect()
        other.ping()
        reader = other.reader()
        other.close()
        daemon.process.kill()
        daemon.process.wait()
        assert reader.scatter(lease.part(0, 0).slots, to, [1, 2]) == 2
    assert np.array_equal(target[:, [1, 2]], source[:, [4, 8]])


def test_a_reader_detects_a_reused_slot(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(warm="1MiB")
    _, from_ = paged(3)
    _, to = paged(None)
    with daemon.connect() as client:
        space = client.open(SPEC)
        lease = saved(space, from_, [0, 1, 2])
        slots = lease.part(0, 0).slots
        assert client.reader().scatter(slots, to, [0, 1, 2]) == 3
        lease.release()
        for seed in range(1, 9):
            saved(space, from_, list(range(BLOCKS)), seed).release()
        assert client.reader().scatter(slots, to, [0, 1, 2]) == 0


def test_a_slot_that_is_reused_during_its_copy_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the copy every slot is unchanged."""
    pages, copied = SPEC.block_bytes // 4096, []
    extent, table = anonymous(3 * SPEC.block_bytes), anonymous(8 * 3 * pages)
    generations = memoryview(table).cast("Q")
    for first in range(0, 3 * pages, pages):
        generations[first] = 7
    slots = b"".join(wire.SLOT.pack(0, 0, at * SPEC.block_bytes, 7) for at in range(3))
    reader, (_, to) = Reader(([extent], [table]), b""), paged(None)
    assert reader.scatter(slots, to, [0, 1, 2]) == 3

    def slow(scatter: Callable[..., None], *arguments: Any, **more: Any) -> None:
        generations[pages] = 8
        scatter(*arguments, **more)
        copied.append(1)

    monkeypatch.setattr(loading, "scatter", partial(slow, loading.scatter))
    assert reader.scatter(slots, to, [0, 1, 2]) == 1
    assert copied == [1]


def anonymous(nbytes: int) -> Mapping:
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, nbytes)
        return Mapping(fd, nbytes, True)
    finally:
        os.close(fd)


def test_each_run_of_the_daemon_has_its_own_identifier(daemon_of: Callable[..., Daemon]) -> None:
    def run_of(client: Client) -> bytes:
        return client.reader().daemon_run

    one, two = daemon_of(), daemon_of()
    with one.connect() as a, one.connect() as b, two.connect() as c:
        assert run_of(a) == run_of(b) != run_of(c)


def test_a_gather_fills_only_granted_slots(shared_daemon: Daemon) -> None:
    source, from_ = paged(4)
    with shared_daemon.connect() as client:
        space = client.open(KvSpec.groups(SPEC.cache_groups, model="granted", dtype=SPEC.dtype,
                                          block_tokens=16, weights="rev:1"))  # fmt: skip
        keys = space.keys(list(range(16 * 4)))
        with space.reserve(keys[:2]) as saving:
            saving.gather(from_, [9, 10])
            saving.commit(2)
        with space.reserve(keys) as saving:
            assert saving.granted == [2, 3]
            saving.gather(from_, [0, 1, 5, 6])
            saving.commit(2)
        with space.load(keys) as blocks:
            shown = [bytes(block) for block in blocks if block is not None]
        assert shown == [source[:, page].tobytes() for page in (9, 10, 5, 6)]


def test_an_uncommitted_gather_stores_no_block(shared_daemon: Daemon) -> None:
    _, from_ = paged(5)
    with shared_daemon.connect() as client:
        space = client.open(SPEC)
        keys = space.keys([77] * 32)
        with pytest.raises(KeyboardInterrupt), space.reserve(keys) as saving:
            saving.gather(from_, [0, 1])
            raise KeyboardInterrupt
        assert space.match(keys).ready == 0
