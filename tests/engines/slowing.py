"""The connector under test, with saves that can be delayed: files in the folder of the records name the
point.

`reserved`: slots are reserved, and nothing is copied yet. `copying`: the first layer of each block is
copied, the others are not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from recording import FOLDER, RecordingConnector

from kvtier import wire
from kvtier.saving import Saving
from kvtier_kernels import Pieces, gather
from kvtier_vllm.worker import WorkerSide

LOOK_S = 0.005


def hold(where: str) -> None:
    """Wait while that file exists; report that the wait has begun."""
    flag = FOLDER / where
    while flag.exists():
        (FOLDER / f"{where}.now").touch()
        time.sleep(LOOK_S)


def copy_slowly(saving: Saving, halves: tuple[Pieces, Pieces], block_ids: Sequence[int]) -> None:
    """Copy both halves of each block in sequence into its slot."""
    ids = [block_ids[at] for at in saving.granted]
    first, rest = halves
    gather(first, ids, saving._extents, saving.slots)
    hold("copying")
    moved = b"".join(
        wire.SLOT.pack(extent, zero, offset + first.block_bytes, generation)
        for extent, zero, offset, generation in wire.SLOT.iter_unpack(saving.slots)
    )
    gather(rest, ids, saving._extents, moved)
    saving.checksums = b""


class SlowConnector(RecordingConnector):
    """See the module's description."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        halves = self._halves(kv_caches)
        entered = Saving.__enter__

        def enter(saving: Saving) -> Saving:
            entered(saving)
            hold("reserved")
            return saving

        def copy(
            saving: Saving,
            pieces: Pieces,
            block_ids: Sequence[int],
            checksum: bool,
            nice: int,
            turn: AbstractContextManager[object],
        ) -> None:
            with turn:
                copy_slowly(saving, halves, block_ids)

        Saving.__enter__ = enter  # type: ignore[method-assign]
        Saving.gather = copy  # type: ignore[assignment, method-assign]

    def _halves(self, kv_caches: dict[str, Any]) -> tuple[Pieces, Pieces]:
        from kvtier_vllm.layout import find_pages

        worker: WorkerSide | None = self._worker
        assert worker is not None and self._layout is not None and len(self._layout.groups) == 1
        pages, arrays = find_pages(self._layout, kv_caches, self._kv_cache_config.num_blocks)
        (group,) = pages.groups

        def pieces(part: Sequence[Any]) -> Pieces:
            return Pieces(
                [arrays[page.array] for page in part], [page.offset for page in part],
                [page.stride for page in part], [page.nbytes for page in part],
            )  # fmt: skip

        return pieces(group[:1]), pieces(group[1:])
