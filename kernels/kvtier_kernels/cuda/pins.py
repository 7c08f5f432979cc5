"""Registers the arena's extents with the device, one after another, while copies continue without
them."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from kvtier_kernels._native import Mapping
from kvtier_kernels.cuda.driver import CudaError, Driver

log = logging.getLogger(__name__)

KEPT_ARENAS = 3  # of the daemon's last runs; older ones are unregistered after their last copy

Extents = Sequence[Mapping | None]


class PinnedExtent:
    """A list of extents, which may grow; `ready` contains the registered ones. They are
    unregistered with the last reference, and their mappings exist until then. That may take
    seconds: a thread that must not wait uses `ExtentPins.drop`."""

    def __init__(self, extents: Extents) -> None:
        self.extents = extents
        self.ready: set[int] = set()
        self.asked = 0
        self.old = False
        self._registered: list[RegisteredMapping] = []

    def register(self, registered: RegisteredMapping, number: int) -> None:
        self._registered.append(registered)
        self.ready.add(number)


class RegisteredMapping:
    """A mapping that is registered with the device until the last reference to this, or until `free`. Runs of
    the daemon that use the same memory share it."""

    def __init__(self, driver: Driver, mapping: Mapping) -> None:
        if mapping.writable:
            driver.register(mapping.address, mapping.size)
        else:
            driver.register(mapping.address, mapping.size, read_only=True)
        self.free = weakref.finalize(self, _unregister, driver, mapping)
        self.free.atexit = False


def _unregister(driver: Driver, mapping: Mapping) -> None:
    driver.try_call("cuMemHostUnregister", mapping.address)


class ExtentPins:
    """Registers extents in its own thread. Logs once if the device refuses some."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._arenas: list[PinnedExtent] = []
        self._registered: weakref.WeakValueDictionary[Mapping, RegisteredMapping] = (
            weakref.WeakValueDictionary()
        )
        self._refused, self._closing = False, False
        self._todo: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvtier-pin", daemon=True)
        self._thread.start()

    def of(self, extents: Extents) -> PinnedExtent:
        """The state of these extents; new ones will be registered. A copy keeps the reference."""
        with self._lock:
            for arena in self._arenas:
                if arena.extents is extents:
                    break
            else:
                arena = PinnedExtent(extents)
                self._arenas.append(arena)
                if len(self._arenas) > KEPT_ARENAS:
                    self._arenas[0].old = True
                    self._todo.put([self._arenas.pop(0)].clear)
            for number in range(arena.asked, len(extents)):
                self._todo.put(partial(self._register, arena, number))
            arena.asked = max(arena.asked, len(extents))
        return arena

    def forget(self, extents: Extents) -> None:
        """No new copy will use these extents: unregister them after the last one that does."""
        with self._lock:
            for at in range(len(self._arenas)):
                if self._arenas[at].extents is extents:
                    self._arenas[at].old = True
                    self._todo.put([self._arenas.pop(at)].clear)
                    return

    def forget_soon(self, used: Sequence[Extents]) -> None:
        """As `forget` for each, in the other thread. A finalizer may call this: it takes no lock."""
        for extents in used:
            self._todo.put(partial(self.forget, extents))

    def drop(self, users: list[PinnedExtent]) -> None:
        """Release these references in the other thread, after a copy. The list must not be used again."""
        if any(arena.old for arena in users):
            self._todo.put(users.clear)

    def close(self) -> None:
        """Unregister everything, also what a traceback still refers to. No copy may be in progress, and
        registrations that have not begun never do: each may take seconds."""
        self._closing = True
        self._todo.put(None)
        self._thread.join()
        self._arenas = []
        for registered in list(self._registered.values()):
            registered.free()

    def _run(self) -> None:
        self._driver.own_thread()
        while (task := self._todo.get()) is not None:
            task()
            del task  # do not keep the task alive while waiting for the next

    def _register(self, arena: PinnedExtent, number: int) -> None:
        mapping = arena.extents[number]
        if mapping is None or self._closing:
            return
        try:
            registered = self._registered.get(mapping)
            if registered is None:
                registered = self._registered[mapping] = RegisteredMapping(self._driver, mapping)
            arena.register(registered, number)
        except CudaError as error:
            if not self._refused:
                text = "kvtier: cannot register extents with the CUDA driver, copies are slower: %s"
                log.warning(text, str(error))
            self._refused = True
