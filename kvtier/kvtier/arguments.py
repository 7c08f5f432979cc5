"""Arguments of the public calls, checked at the client's edge: a wrong one raises InvalidArgument."""

from __future__ import annotations

from types import TracebackType

from kvtier.errors import InvalidArgument, KvtierError

LONGEST_S = 1e9
WRONG = (TypeError, ValueError, OverflowError, BufferError, AttributeError)


class Checking:
    """`with Checking("keys"):` makes what a wrong argument causes in here an InvalidArgument that names it.

    For conversions of arguments alone: in any other code these errors are bugs of ours.
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
    """This many seconds, from `least` to what the system's clocks take."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgument(f"{name}: {value!r} is not a number of seconds")
    if not least <= value <= LONGEST_S:  # nor is a NaN
        raise InvalidArgument(f"{name}: {value!r} s is not within {least:g} to {LONGEST_S:g} s")
    return float(value)


def whole(name: str, value: object, least: int, most: int) -> int:
    """This integer, within its limits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f"{name}: {value!r} is not an integer")
    if not least <= value <= most:
        raise InvalidArgument(f"{name}: {value} is not within {least} to {most}")
    return value
