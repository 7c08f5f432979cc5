"""Removes operations from a plan that fails, as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrunk(plan: Sequence[T], fails: Callable[[Sequence[T]], bool], most: int = 400) -> list[T]:
    """Return a part of this plan that fails, and of which no single operation can be left out; after `most`
    attempts, the shortest part so far. Smaller and smaller parts are left out (delta debugging)."""
    plan, size, tries = list(plan), max(1, len(plan) // 2), 0
    while True:
        at, found = 0, False
        while at < len(plan) and tries < most:
            some = plan[:at] + plan[at + size :]
            tries += 1
            if fails(some):
                plan, found = some, True
            else:
                at += size
        if tries >= most or (size == 1 and not found):
            return plan
        if not found:
            size = max(1, size // 2)
