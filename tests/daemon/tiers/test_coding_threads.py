"""Jobs of threads that end together."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from kvtier_daemon.tiers.cold.coding_threads import CodingThreads


class Batch:
    def run(self) -> None:
        pass


def test_a_batch_is_freed_when_its_jobs_have_ended_without_garbage_collection() -> None:
    """It has the memory of frames and slots."""

    async def work() -> None:
        threads = CodingThreads((1, "encoder"), (2, "decoder"))
        ended = asyncio.Event()
        batch = Batch()
        gone = weakref.ref(batch)

        def have_ended(batch: Batch, jobs: Sequence[Future[Any]]) -> None:
            assert len(jobs) == 2 and all(job.done() for job in jobs)
            ended.set()

        threads._submit_all(
            threads._decoders, [batch.run] * 2, lambda jobs, one=batch: have_ended(one, jobs)
        )
        del batch
        await ended.wait()
        assert await threads.close(30)
        assert not threads._jobs
        while gone() is not None:  # noqa: ASYNC110  # a thread may be about to drop it
            await asyncio.sleep(0.001)

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(work(), 20))
    finally:
        gc.enable()
