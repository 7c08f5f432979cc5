"""A catalog takes over the blocks of another one, and holds what others may still write to."""

from __future__ import annotations

import mmap

from kvtier.layout import space_id
from kvtier_daemon.catalog import Catalog, SessionId
from kvtier_daemon.catalog.frames import FRAME
from kvtier_daemon.catalog.policy import make
from kvtier_kernels import Store
from support.specs import spec_of
from support.stores import PAGE, keys

PAGES = 2048
SPEC = spec_of("kept", layers=1, kv_heads=1, head_dim=64)
WRITER = SessionId(5)


def test_a_slot_that_a_disk_was_reading_into_has_no_session_that_could_free_it() -> None:
    generations, notes = mmap.mmap(-1, 8 * PAGES), mmap.mmap(-1, 128 * PAGES)
    catalog = Catalog(Store(), make("lru"))
    catalog.add_extent(PAGES * PAGE, generations, notes)
    space = catalog.spaces.open(space_id(SPEC, "t"), SPEC, WRITER)
    granted = catalog.reserve(WRITER, space, 0, 0, b"", keys("a"))
    ids = catalog.commit(WRITER, granted.lease, 0, 1)
    store = catalog.blocks.store
    store.framed(1, ids, FRAME.pack(1, 1, SPEC.block_bytes, 0, 1, 1), bytes(16))
    store.evict(ids)
    store.promote(ids)
    catalog.reserve(WRITER, space, 0, 0, b"", keys("b"))

    later = Catalog(Store(), make("lru"))
    later.add_extent(PAGES * PAGE, generations, notes)
    ready, sessions, dropped = later.kept.adopt(
        {space.number: (space.identity, SPEC)}, [(0, 0, PAGES)]
    )
    assert (ready, sessions, dropped) == (b"", [WRITER], 0)
    assert later.counts()["blocks"]["quarantined"] == 2
    for session in sessions:
        later.process_gone(session)
    assert later.counts()["blocks"]["quarantined"] == 1
