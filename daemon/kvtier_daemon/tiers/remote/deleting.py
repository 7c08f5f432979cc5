"""Deletes the objects of forgotten blocks, in portions: a forget of many blocks does not stop the loop. Notes
which spaces were purged, for the next start."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from kvtier.key import KEY_BYTES
from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.tiers.remote.driver import StoreDriver
from kvtier_daemon.tiers.remote.known import KnownObjects, each_of, names_of
from kvtier_daemon.tiers.remote.messages import Answer, DeleteObjects
from kvtier_daemon.tiers.remote.objects import object_name
from kvtier_daemon.tiers.remote.places import Place
from kvtier_daemon.tiers.remote.warming import Warming
from kvtier_daemon.tiers.remote.writing import ObjectWriter

PORTION: Final = 512  # names in one request: about a millisecond of the loop
LIMIT_BYTES: Final = 64 << 20  # of names that wait; more forgets fail
POLL_S: Final = 0.05  # while an object is being written
PURGED: Final = "fleet-purged"  # in the state folder: identities of spaces


def note_purged(state: Path, space: bytes) -> None:
    """Note that this space was purged. Raises OSError."""
    with (state / PURGED).open("ab") as file:
        file.write(space)
        file.flush()
        os.fsync(file.fileno())


def take_purged(state: Path) -> set[bytes]:
    """Return the spaces that were purged since the last start, and forget that."""
    file, found = state / PURGED, b""
    with contextlib.suppress(OSError):
        found = file.read_bytes()
        file.unlink()
    return set(each_of(found))


@dataclass(slots=True, eq=False)
class Deletion:
    space: KnownSpace
    places: list[Place]
    keys: bytes
    names: list[bytes]  # of each place
    lists: Sequence[str]  # objects that name these blocks
    done: Callable[[str], None] | None


class Deleter:
    """The forgets of one tenant."""

    def __init__(
        self, driver: StoreDriver, known: KnownObjects, writer: ObjectWriter, warming: Warming
    ) -> None:
        self._driver = driver
        self._known = known
        self._writer = writer
        self._warming = warming
        self._bytes = 0
        self._loop = asyncio.get_running_loop()

    def forget(
        self, space: KnownSpace, places: list[Place], keys: bytes, done: Callable[[str], None] | None,
        lists: Sequence[str] = (),
    ) -> bytes:  # fmt: skip
        """Delete the objects of these blocks and these lists, after those of them that are being written.
        From now on the blocks are not known; later `done` gets the failure, or "". Return the names."""
        names = [names_of(keys, place.mask) for place in places]
        packed = b"".join(names)
        if self._bytes + len(packed) > LIMIT_BYTES:
            self._known.note(packed, False)
            if done is not None:
                done("the remote store: too many blocks are being forgotten; try again later")
            return packed
        self._bytes += len(packed)
        self._known.begin_delete(packed)
        self._delete(Deletion(space, places, keys, names, lists, done), 0)
        return packed

    def _delete(self, forget: Deletion, at: int) -> None:
        """Delete the portion that begins with this block."""
        end = at + max(1, PORTION // len(forget.places)) * KEY_BYTES
        names = b"".join(each[at:end] for each in forget.names)
        lists = forget.lists if not at else ()
        if self._writer.is_sending(each_of(names)) or (lists and self._warming.is_telling):
            self._loop.call_later(POLL_S, self._delete, forget, at)
            return
        objects = [
            object_name(place.identity(forget.space, key))
            for place in forget.places
            for key in each_of(forget.keys[at:end])
        ]
        objects += lists
        request = DeleteObjects(self._driver.next_id(), objects)
        self._driver.ask(request, partial(self._deleted, forget, end))

    def _deleted(self, forget: Deletion, at: int, answer: Answer) -> None:
        if not answer.outcome and at < len(forget.keys):
            self._delete(forget, at)
            return
        packed = b"".join(forget.names)
        self._bytes -= len(packed)
        self._known.end_delete(packed)
        if forget.done is not None:
            forget.done(answer.text and f"the remote store: {answer.text}")
