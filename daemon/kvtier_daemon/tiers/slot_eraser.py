"""Overwrites the slots of purged blocks with zeros, and their notes for the next daemon.

A slot is erased in the same call of the loop that frees it, so no other block can be in it.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections.abc import Sequence
from typing import Final

from kvtier.wire import SLOT
from kvtier_daemon.tiers.kept_arena import NOTE_BYTES, PAGE
from kvtier_daemon.tiers.warm import Extent
from kvtier_kernels import Mapping

log = logging.getLogger(__name__)

ZEROS: Final = bytes(1 << 20)
GENERATION: Final = struct.Struct("<Q")


class SlotEraser:
    """Erases slots in the extents of one tenant."""

    def __init__(self, tenant: str, extents: Sequence[Extent]) -> None:
        self._tenant = tenant
        self._extents = extents

    def erase(self, slot: bytes, nbytes: int) -> None:
        """Overwrite a slot that was freed since this place was read. Never raises: a failure is logged."""
        number, _, offset, generation = SLOT.unpack(slot)
        extent, page = self._extents[number], offset // PAGE
        (now,) = GENERATION.unpack_from(extent.table, page * GENERATION.size)
        assert now != generation, "the slot is still in use"
        try:
            for at in range(0, nbytes, len(ZEROS)):
                _overwrite(extent, offset + at, min(nbytes - at, len(ZEROS)))
        except OSError as error:
            log.error(
                "warm: a purged block of tenant %s was not erased from memory: %s; its bytes stay until the "
                "slot is reused or the daemon ends", self._tenant, error.strerror,
            )  # fmt: skip
        if extent.notes is not None:
            memoryview(extent.notes)[page * NOTE_BYTES : (page + 1) * NOTE_BYTES] = ZEROS[
                :NOTE_BYTES
            ]


def _overwrite(extent: Extent, offset: int, nbytes: int) -> None:
    # A write needs no mapping, and no page faults. Files in reserved huge pages have no write.
    try:
        written = os.pwrite(extent.fd, memoryview(ZEROS)[:nbytes], offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        mapping = Mapping(extent.fd, extent.nbytes, True)
        mapping.guard()
        memoryview(mapping)[offset : offset + nbytes] = ZEROS[:nbytes]
        if mapping.lost:
            raise OSError(errno.EFAULT, "a client has removed its pages") from error
        return
    if written < nbytes:
        _overwrite(extent, offset + written, nbytes - written)
