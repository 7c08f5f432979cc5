"""What should not have failed and did: counted, told once for each place, and no end of anything else."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable
from typing import Any, TypeVarTuple

log = logging.getLogger(__name__)
Args = TypeVarTuple("Args")


class Unforeseen:
    """`count` is called for each failure."""

    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count
        self._told: set[tuple[type, str, int]] = set()  # what went wrong, and where

    def tried(self, what: str, step: Callable[[*Args], object], *args: *Args) -> bool:
        """Do this; whether it went well. A bug of ours here is no end of the daemon, nor of what comes after:
        it is counted, and told the first time."""
        try:
            step(*args)
        except Exception as error:
            self._count()
            *_, (frame, line) = traceback.walk_tb(error.__traceback__)
            place = type(error), frame.f_code.co_filename, line
            if place not in self._told:
                log.exception("%s could not be looked after; this is told once", what)
            self._told.add(place)
            return False
        return True

    def of_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Something that the loop called has failed: others are served all the same."""
        self._count()
        loop.default_exception_handler(context)
