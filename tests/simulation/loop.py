"""An event loop without I/O of its own and without threads: the machine says when descriptors are ready."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from .virtual import CLOCK

if TYPE_CHECKING:
    from .machine import Machine


class NumberedTask(asyncio.Task[Any]):
    """Its hash is its number, so that sets of tasks have the same order in each run."""

    made = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        NumberedTask.made += 1
        self.number = NumberedTask.made
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self.number


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs callbacks in the order of `call_soon`, as asyncio promises. The machine says which descriptors are
    ready; their order is random."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.readers: dict[int, asyncio.Handle] = {}
        self.writers: dict[int, asyncio.Handle] = {}
        self.signals: dict[int, asyncio.Handle] = {}
        self.set_task_factory(self._make_task)

    @staticmethod
    def _make_task(
        loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **more: Any
    ) -> NumberedTask:
        return NumberedTask(work, loop=loop, **more)

    def time(self) -> float:
        return CLOCK.now

    def _write_to_self(self) -> None:
        pass

    # --- what the machine asks ---------------------------------------------------------------

    @property
    def next_at(self) -> float:
        """When the loop has something to do, apart from descriptors."""
        if self._ready:
            return 0.0
        while self._scheduled and self._scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(self._scheduled)._scheduled = False
        return self._scheduled[0]._when if self._scheduled else float("inf")

    def run_once(self, ready: list[asyncio.Handle]) -> None:
        """Run one iteration, with these callbacks of descriptors."""
        queue = self._ready
        queue.extend(ready)
        while self._scheduled and (
            self._scheduled[0]._cancelled or self._scheduled[0]._when <= CLOCK.now
        ):
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False
            if timer._cancelled:
                self._timer_cancelled_count -= 1
            else:
                queue.append(timer)
        asyncio._set_running_loop(self)
        try:
            for _ in range(len(queue)):
                handle = queue.popleft()
                if not handle._cancelled:
                    handle._run()
        finally:
            asyncio._set_running_loop(None)

    # --- descriptors and signals -------------------------------------------------------------

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        self.readers[fd] = asyncio.Handle(callback, args, self)
        self.machine.watch(fd)

    def remove_reader(self, fd: Any) -> bool:
        return self._removed(self.readers, fd)

    def add_writer(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        self.writers[fd] = asyncio.Handle(callback, args, self)
        self.machine.watch(fd)

    def remove_writer(self, fd: Any) -> bool:
        return self._removed(self.writers, fd)

    def _removed(self, watched: dict[int, asyncio.Handle], fd: int) -> bool:
        handle = watched.pop(fd, None)
        if handle is not None:
            handle.cancel()
            self.machine.watch(fd)
        return handle is not None

    def add_signal_handler(self, number: int, callback: Callable[..., object], *args: Any) -> None:
        self.signals[number] = asyncio.Handle(callback, args, self)

    def raise_signal(self, number: int) -> None:
        handle = self.signals[number]
        self.call_soon(handle._callback, *handle._args)

    def run_in_executor(self, executor: Any, work: Callable[..., Any], *args: Any) -> Any:
        executor = executor if executor is not None else self.machine.threads
        return asyncio.wrap_future(executor.submit(work, *args), loop=self)
