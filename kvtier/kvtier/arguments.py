"""Checks of the arguments of public calls: an invalid one raises InvalidArgument."""

from __future__ import annotations

from numbers import Integral, Real
from types import TracebackType
from typing import Any

from kvtier.errors import InvalidArgument, KvtierError

LONGEST_S = 1e9
A_WEEK_S = 7 * 24 * 3600
# Also scalars of numpy; the first types are compared faster.
NUMBER, INTEGER = (int, float, Real), (int, Integral)
WRONG = (TypeError, ValueError, OverflowError, BufferError, AttributeError)


class Checking:
    """`with Checking("keys"):` converts errors of an invalid argument into an InvalidArgument that names it.

    Only for conversions of arguments: elsewhere these errors are bugs in kvtier.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _t: TracebackType | None,
    ) -> None:
        if isinstance(error, WRONG) and not isinstance(error, KvtierError):
            text = str(error)
            if "incompatible function arguments" in text:  # the signature of a native function
                text = "has the wrong type"
            raise InvalidArgument(f"{self._what}: {text}") from error


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def seconds(name: str, value: Any, least: float = 0.0, most: float = LONGEST_S) -> float:
    """Return the value as seconds. Raises InvalidArgument unless it is from `least` to `most`."""
    if not _is(value, NUMBER):
        raise InvalidArgument(f"{name}: {value!r} is not a number of seconds")
    if not least <= value <= most:  # also false for a NaN
        limit = f"{most:g} s{', a week' if most == A_WEEK_S else ''}"
        raise InvalidArgument(f"{name}: {value!r} s is not within {least:g} to {limit}")
    return float(value)


def share(name: str, value: Any) -> float:
    """Return the value. Raises InvalidArgument unless it is a number from 0 to 1."""
    if not _is(value, NUMBER) or not 0 <= value <= 1:
        raise InvalidArgument(f"{name}: {value!r} is not a number from 0 to 1")
    return float(value)


def whole(name: str, value: Any, least: int, most: int) -> int:
    """Return the value. Raises InvalidArgument unless it is an integer within the limits."""
    if not _is(value, INTEGER):
        raise InvalidArgument(f"{name}: {value!r} is not an integer")
    if not least <= value <= most:
        raise InvalidArgument(f"{name}: {value} is not within {least} to {most}")
    return int(value)
