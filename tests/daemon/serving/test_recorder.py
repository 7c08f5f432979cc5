"""A recorder that is cancelled has written all requests that it noted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtier_daemon.serving import recorder
from kvtier_daemon.serving.recorder import Recorder

KEYS = bytes(range(32)) * 8


def lines_after(folder: Path, cancelled: Callable[[Recorder], Any]) -> list[dict[str, Any]]:
    """Record one lookup, cancel the recorder when `cancelled` returns, and return the lines of the trace."""

    async def work() -> Path:
        one = Recorder(folder, time.monotonic)
        running = asyncio.create_task(one.run())
        path = Path(one.start(1 << 20)["path"])
        one.looked_up("t", 0, 16, KEYS)
        await cancelled(one)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        return path

    path = asyncio.run(asyncio.wait_for(work(), 60))
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("looked_up", [1, 2])
def test_a_write_that_waits_for_a_thread_is_not_lost(tmp_path: Path, looked_up: int) -> None:
    """Of the only lookup, or of a second one."""
    released = threading.Event()

    async def is_queued(one: Recorder) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        for number in range(looked_up):
            is_last = number == looked_up - 1
            if is_last:
                loop.run_in_executor(None, released.wait, 60)
            if number:
                one.looked_up("t", 0, 16, KEYS)
            path = Path(one.stats()["path"])
            # A thread writes the lines of the first one, before the thread is busy.
            while one._waiting or one._lines or not (is_last or path.stat().st_size):  # noqa: ASYNC110, ASYNC240
                await asyncio.sleep(0.001)
        loop.call_later(0.05, released.set)

    found = lines_after(tmp_path, is_queued)
    assert [len(line["hash_ids"]) for line in found] == [8] * looked_up


def test_a_request_of_which_some_keys_are_hashed_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "PIECE_KEYS", 3)

    async def is_between(one: Recorder) -> None:
        portions = one._put_into_lines
        reached = asyncio.Event()

        def told(trace: Any) -> Any:
            for portion in portions(trace):
                reached.set()
                yield portion

        monkeypatch.setattr(one, "_put_into_lines", told)
        await reached.wait()

    found = lines_after(tmp_path, is_between)
    assert [len(line["hash_ids"]) for line in found] == [8]
