"""The arena's extents, registered with the device one after the other, while copies go on without."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Sequence

from kvtier_kernels._native import Mapping
from kvtier_kernels.cuda.driver import CudaError, Driver

log = logging.getLogger(__name__)

KEPT_ARENAS = 3  # of the last runs of the daemon; older ones go when no copy uses them any more

Extents = Sequence[Mapping | None]


class Pinned:
    """One list of extents, which may grow, and which of them are `ready`. Unregistered when nobody has this
    any more; the mappings last until then. That
    may take seconds: `Pins.drop` is for whoever can't wait."""

    def __init__(self, driver: Driver, extents: Extents) -> None:
        self.extents = extents
        self.ready: set[int] = set()
        self.asked = 0
        self.old = False
        self._registered: list[Mapping] = []
        weakref.finalize(self, _unregister, driver, self._registered).atexit = False

    def register(self, driver: Driver, number: int) -> None:
        extent = self.extents[number]
        if extent is None:
            return
        driver.register(extent.address, extent.size)
        self._registered.append(extent)
        self.ready.add(number)


def _unregister(driver: Driver, registered: list[Mapping]) -> None:
    for extent in registered:
        driver.let_go("cuMemHostUnregister", extent.address)
    registered.clear()


class Pins:
    """Registers what it is shown, in a thread of its own. What the device refuses stays as it is: that is
    said once."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._arenas: list[Pinned] = []
        self._refused = False
        self._todo: queue.SimpleQueue[tuple[Pinned, int] | list[Pinned] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="kvtier-pin", daemon=True)
        self._thread.start()

    def of(self, extents: Extents) -> Pinned:
        """What is known of these extents; those that are new are registered soon. Hold it while a copy
        uses them."""
        with self._lock:
            for arena in self._arenas:
                if arena.extents is extents:
                    break
            else:
                arena = Pinned(self._driver, extents)
                self._arenas.append(arena)
                if len(self._arenas) > KEPT_ARENAS:
                    self._arenas[0].old = True
                    self._todo.put([self._arenas.pop(0)])
            for number in range(arena.asked, len(extents)):
                self._todo.put((arena, number))
            arena.asked = max(arena.asked, len(extents))
        return arena

    def forget(self, extents: Extents) -> None:
        """Nobody begins a copy of these any more: they go with the last one that uses them."""
        with self._lock:
            for at in range(len(self._arenas)):
                if self._arenas[at].extents is extents:
                    self._arenas[at].old = True
                    self._todo.put([self._arenas.pop(at)])
                    return

    def drop(self, users: list[Pinned]) -> None:
        """A copy uses these no more, and the list is not the caller's any more. What nobody else has goes,
        and not in the caller's thread."""
        if any(arena.old for arena in users):
            self._todo.put(users)

    def close(self) -> None:
        """Let everything go. Nothing may be copied any more."""
        self._todo.put(None)
        self._thread.join()
        self._arenas = []

    def _run(self) -> None:
        self._driver.own_thread()
        while (task := self._todo.get()) is not None:
            if isinstance(task, list):
                task.clear()
            else:
                self._register(*task)
            del task  # waiting for the next must not keep this one

    def _register(self, arena: Pinned, number: int) -> None:
        try:
            arena.register(self._driver, number)
        except CudaError as error:
            if not self._refused:
                text = "kvtier: extents stay unregistered, and copies slower: %s"
                log.warning(text, str(error))
            self._refused = True
