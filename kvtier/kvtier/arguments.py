"""Checks of the arguments of public calls: an invalid one raises InvalidArgument."""

from __future__ import annotations

from types import TracebackType

from kvtier.errors import InvalidArgument, KvtierError

LONGEST_S = 1e9
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
            raise InvalidArgument(f"{self._what}: {error}") from error


def seconds(name: str, value: object, least: float = 0.0) -> float:
    """Return the value as seconds. Raises InvalidArgument unless it is from `least` to LONGEST_S."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgument(f"{name}: {value!r} is not a number of seconds")
    if not least <= value <= LONGEST_S:  # also false for a NaN
        raise InvalidArgument(f"{name}: {value!r} s is not within {least:g} to {LONGEST_S:g} s")
    return float(value)


def whole(name: str, value: object, least: int, most: int) -> int:
    """Return the value. Raises InvalidArgument unless it is an integer within the limits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f"{name}: {value!r} is not an integer")
    if not least <= value <= most:
        raise InvalidArgument(f"{name}: {value} is not within {least} to {most}")
    return value
