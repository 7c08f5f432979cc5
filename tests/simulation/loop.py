"""An event loop without I/O of its own and without threads: the machine says when descriptors are ready."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

from .virtual import CLOCK

if TYPE_CHECKING:
    from .machine import Machine


class NumberedTask(asyncio.Task[Any]):
    """Its hash is its number, so that sets of tasks have the same order in each run."""

    numbers = itertools.count(1)

    def __init__(self, work: Coroutine[Any, Any, Any], loop: SimulatedLoop, **more: Any) -> None:
        self.number = next(self.numbers)
        super().__init__(work, loop=loop, **more)

    def __hash__(self) -> int:
        return self.number


class Handle:
    """What a task uses of an `asyncio.Handle`. It is made without questions about debugging."""

    _cancelled = False

    def __init__(self, call: Callable[..., object], args: Any, context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._callback = call
        self._args = args

    def cancel(self) -> None:
        self._cancelled = True
        self._callback, self._args = _nothing, ()

    def cancelled(self) -> bool:
        return self._cancelled


class Timer(Handle):
    def __init__(
        self, when: float, call: Callable[..., object], args: Any, context: Context | None
    ) -> None:
        self._context = copy_context() if context is None else context
        self._callback = call
        self._args = args
        self._when = when

    def when(self) -> float:
        return self._when


def _nothing() -> None:
    """What a cancelled handle calls."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs callbacks in the order of `call_soon`, as asyncio promises. The machine says which descriptors are
    ready; their order is random."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.readers: dict[int, Handle] = {}
        self.writers: dict[int, Handle] = {}
        self.signals: dict[int, Handle] = {}
        self.timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    def create_task(self, work: Any, **more: Any) -> Any:
        return NumberedTask(work, self, **more)

    def time(self) -> float:
        return CLOCK.now

    def _write_to_self(self) -> None:
        pass

    # --- callbacks ---------------------------------------------------------------------------

    def call_soon(self, call: Any, *args: Any, context: Context | None = None) -> Any:
        handle = Handle(call, args, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(self, when: float, call: Any, *args: Any, context: Context | None = None) -> Any:
        timer = Timer(when, call, args, context)
        heapq.heappush(self.timers, (when, next(self._numbers), timer))
        return timer

    def call_later(
        self, delay: float, call: Any, *args: Any, context: Context | None = None
    ) -> Any:
        when = CLOCK.now + delay
        timer = Timer(when, call, args, context)
        heapq.heappush(self.timers, (when, next(self._numbers), timer))
        return timer

    # --- what the machine asks ---------------------------------------------------------------

    @property
    def next_at(self) -> float:
        """When the loop has something to do, apart from descriptors."""
        if self._ready:
            return 0.0
        timers = self.timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        return timers[0][0] if timers else float("inf")

    def run_once(self, ready: Sequence[Handle]) -> None:
        """Run one iteration, with these callbacks of descriptors."""
        queue, timers, now = self._ready, self.timers, CLOCK.now
        queue.extend(ready)
        while timers and timers[0][0] <= now:
            queue.append(heapq.heappop(timers)[2])
        next_of = queue.popleft
        for _ in range(len(queue)):
            handle = next_of()
            if not handle._cancelled:
                try:
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001  # as a handle does
                    text = f"Exception in callback {handle!r}"
                    what = {"message": text, "exception": error, "handle": handle}
                    self.call_exception_handler(what)

    # --- descriptors and signals -------------------------------------------------------------

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        self.readers[fd] = Handle(callback, args, None)
        self.machine.watch(fd)

    def remove_reader(self, fd: Any) -> bool:
        return self._removed(self.readers, fd)

    def add_writer(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        self.writers[fd] = Handle(callback, args, None)
        self.machine.watch(fd)

    def remove_writer(self, fd: Any) -> bool:
        return self._removed(self.writers, fd)

    def _removed(self, watched: dict[int, Handle], fd: int) -> bool:
        handle = watched.pop(fd, None)
        if handle is not None:
            handle.cancel()
            self.machine.watch(fd)
        return handle is not None

    def add_signal_handler(self, number: int, callback: Callable[..., object], *args: Any) -> None:
        self.signals[number] = Handle(callback, args, None)

    def raise_signal(self, number: int) -> None:
        handle = self.signals[number]
        self.call_soon(handle._callback, *handle._args)

    def run_in_executor(self, executor: Any, work: Callable[..., Any], *args: Any) -> Any:
        executor = executor if executor is not None else self.machine.threads
        return wrapped(executor.submit(work, *args), self)


def wrapped(job: Future[Any], loop: SimulatedLoop | None = None) -> asyncio.Future[Any]:
    """Replaces `asyncio.wrap_future`, whose calls are questions about what both futures are."""
    of = loop if loop is not None else asyncio.get_running_loop()
    future: asyncio.Future[Any] = of.create_future()

    def check_cancelled(future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            job.cancel()

    def set_state() -> None:
        if not future.cancelled():
            if job.cancelled():
                future.cancel()
            elif (error := job.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(job.result())

    def has_ended(_: Future[Any]) -> None:
        if not of.is_closed():
            of.call_soon(set_state)

    future.add_done_callback(check_cancelled)
    job.add_done_callback(has_ended)
    return future
