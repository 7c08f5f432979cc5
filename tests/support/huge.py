"""Reserve huge pages for a test, and return them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


@contextlib.contextmanager
def huge_pages(count: int) -> Iterator[None]:
    """Reserve `count` huge pages, or skip the test."""
    before = (POOL / "nr_hugepages").read_text()
    used = int(before) - int((POOL / "free_hugepages").read_text())
    try:
        (POOL / "nr_hugepages").write_text(str(used + count))
    except OSError:
        pytest.skip("may not set huge pages aside")
    try:
        if int((POOL / "free_hugepages").read_text()) != count:
            pytest.skip("no huge pages to be had")
        yield
    finally:
        (POOL / "nr_hugepages").write_text(before)
