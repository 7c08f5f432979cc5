"""The daemon gives free parts of the C library's heaps to the system."""

from __future__ import annotations

import asyncio
import platform
from pathlib import Path

import pytest

from kvtier_daemon import app as app_module
from kvtier_daemon.app import App
from kvtier_kernels import trim_heaps
from support.apps import served

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc")

MIB = 1 << 20
BLOCKS, BLOCK_BYTES = 20_000, 2048


def anonymous_bytes() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(rollup.partition("Anonymous:")[2].split()[0]) * 1024


def leave_free() -> tuple[list[bytes], int]:
    """Allocate 40 MiB in small parts, and free all but some: the C library cannot shrink the heap. Return
    these, and the memory of the process."""
    trim_heaps()  # of what earlier tests left
    before = anonymous_bytes()
    blocks = [bytes(BLOCK_BYTES) for _ in range(BLOCKS)]
    some = blocks[::64]
    del blocks
    now = anonymous_bytes()
    assert now >= before + 25 * MIB, "the C library gives the memory back by itself"
    return some, now


def test_free_pages_return_to_the_system() -> None:
    some, before = leave_free()
    trim_heaps()
    assert anonymous_bytes() <= before - 25 * MIB
    assert not any(map(any, some))


def test_the_daemon_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "TRIM_S", 0.01)

    async def work(_: App) -> None:
        some, before = leave_free()
        while anonymous_bytes() > before - 25 * MIB:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not any(map(any, some))

    served(tmp_path, work)
