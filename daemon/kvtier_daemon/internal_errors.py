"""Internal errors in periodic work: counted, logged once per place, and the daemon continues."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable
from typing import Any, TypeVarTuple

log = logging.getLogger(__name__)
Args = TypeVarTuple("Args")


class InternalErrors:
    """`count` is called for each failure."""

    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count
        self._logged: set[tuple[type, str, int]] = set()  # error and place

    def tried(self, what: str, step: Callable[[*Args], object], *args: *Args) -> bool:
        """Call this; return whether it succeeded. An exception is counted, and logged the first time."""
        try:
            step(*args)
        except Exception as error:
            self._count()
            *_, (frame, line) = traceback.walk_tb(error.__traceback__)
            place = type(error), frame.f_code.co_filename, line
            if place not in self._logged:
                log.exception(
                    "internal error in periodic work (%s); logged once for each cause", what
                )
            self._logged.add(place)
            return False
        return True

    def of_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count a failed callback of the loop."""
        self._count()
        loop.default_exception_handler(context)
