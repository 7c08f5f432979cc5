"""Functions of Python that a driver's threads call.

A thread is still in the native part of a callback for a moment after the function of Python has
returned: a test that frees the callback then may crash. There is one callback, and it is never freed.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable

_waiting: dict[int, Callable[[], None]] = {}
_numbers = itertools.count(1)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def call(number: int) -> None:
    """Run the function that was kept under this number, once."""
    _waiting.pop(number)()


def kept(work: Callable[[], None]) -> ctypes.c_void_p:
    """Keep a function, and return the argument with which `call` runs it."""
    number = next(_numbers)
    _waiting[number] = work
    return ctypes.c_void_p(number)
