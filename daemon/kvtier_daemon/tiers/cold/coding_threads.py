"""Threads that encode blocks, and threads that decode them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any, TypeVar, TypeVarTuple

START_S = 10.0
T = TypeVar("T")
Args = TypeVarTuple("Args")


class CodingThreads:
    """Both kinds of threads, each with their number and name, and the jobs in them."""

    def __init__(self, encoders: tuple[int, str], decoders: tuple[int, str]) -> None:
        """Raises RuntimeError if there are no threads."""
        self._encoders = started(*encoders)
        try:
            self._decoders = started(*decoders)
        except RuntimeError:
            self._encoders.shutdown(wait=False)
            raise
        self._jobs: set[Future[Any]] = set()

    def _submit(
        self, pool: ThreadPoolExecutor, work: Callable[[*Args], T], *args: *Args
    ) -> asyncio.Future[T]:
        job = pool.submit(work, *args)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return asyncio.wrap_future(job)

    def _submit_all(
        self, pool: ThreadPoolExecutor, jobs: Sequence[Callable[[], Any]],
        ended: Callable[[Sequence[Future[Any]]], None],
    ) -> None:  # fmt: skip
        """Run these jobs. `ended` is called once, in the loop, when all have ended or were cancelled."""
        loop, left = asyncio.get_running_loop(), count(1)
        running: list[Future[Any]] = []

        def one_ended(job: Future[Any]) -> None:
            self._jobs.discard(job)
            if next(left) == len(jobs):  # atomic: threads call this
                all_ended = running.copy()
                running.clear()  # else the jobs would refer to each other, until a garbage collection
                with suppress(RuntimeError):  # the loop may be closed
                    loop.call_soon_threadsafe(ended, all_ended)

        for job in jobs:
            running.append(pool.submit(job))
        self._jobs.update(running)
        for one in running.copy():
            one.add_done_callback(one_ended)

    async def close(self, timeout_s: float) -> bool:
        """Cancel the jobs that have not started, and wait for the others. False if one may still write."""
        jobs = [asyncio.wrap_future(job) for job in list(self._jobs)]
        running = asyncio.gather(*jobs, return_exceptions=True)
        self.stop()
        done, _ = await asyncio.wait([running], timeout=timeout_s)
        return bool(done)

    def stop(self) -> None:
        """Cancel the jobs that have not started, without waiting for the others."""
        for pool in (self._encoders, self._decoders):
            pool.shutdown(wait=False, cancel_futures=True)


def started(threads: int, name: str) -> ThreadPoolExecutor:
    """Return an executor whose threads all run, so that no later call fails. Raises RuntimeError."""
    pool, all_run = ThreadPoolExecutor(threads, name), threading.Barrier(threads + 1)
    try:
        for _ in range(threads):
            pool.submit(all_run.wait)
        all_run.wait(START_S)
    except RuntimeError:  # no thread, or, as BrokenBarrierError, not in time
        all_run.abort()
        pool.shutdown(wait=False)
        raise
    return pool


def run_all(jobs: Sequence[Callable[[], T]]) -> list[T]:
    return [job() for job in jobs]
