"""Parsing and formatting of amounts of bytes. All other code uses integers."""

import re
from decimal import Decimal
from fractions import Fraction

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

BYTES_MAX = 1 << 62  # 4 EiB, which fits any off_t; more is a typing error

_NAMED = (("PiB", 1 << 50), ("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
_BINARY = {name.lower(): factor for name, factor in _NAMED}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15}
_UNITS = {"": 1, "b": 1, **_BINARY, **_DECIMAL}
_AMOUNT = re.compile(r"([0-9]{1,24}(?:\.[0-9]{1,24})?) ?([A-Za-z]*)", re.ASCII)
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,9})?) ?%", re.ASCII)


def parse_bytes(value: str | int) -> int:
    """Return the bytes that `64GiB`, `512 MiB`, `2TB`, `1.5GiB` or a plain number stands for.

    KiB to PiB are powers of 1024 and KB to PB are powers of 1000, in any case. A fraction of a
    byte is cut off. Never guesses: a bare `64G` is refused, because it means both.
    """
    if isinstance(value, int):
        if isinstance(value, bool) or not 0 <= value <= BYTES_MAX:
            raise ValueError(f"{value!r} is not an amount of bytes")
        return value
    match = _AMOUNT.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is not an amount of bytes, such as 64GiB")
    number, unit = match.groups()
    factor = _UNITS.get(unit.lower())
    if factor is None:
        if unit.lower() + "ib" in _BINARY:
            letter = unit.upper()
            raise ValueError(
                f"{value!r} is ambiguous: write {number}{letter}iB (powers of 1024)"
                f" or {number}{letter}B (powers of 1000)"
            )
        raise ValueError(f"{value!r}: {unit} is not a unit of bytes; use KiB to PiB")
    if factor == 1 and "." in number:
        raise ValueError(f"{value!r}: a fraction of a byte is not possible")
    amount = int(Fraction(Decimal(number)) * factor)
    if amount > BYTES_MAX:
        raise ValueError(f"{value!r} is more than 4 EiB")
    return amount


def format_bytes(amount: int) -> str:
    """Return `amount` for people, in binary units: three significant digits, exact where it can be.

    `parse_bytes` reads it back, off by less than 1% where it is not exact.
    """
    assert amount >= 0, amount
    for name, factor in _NAMED:
        # From 1000 of a unit on, the next unit needs fewer digits: 0.98 GiB, not 1003 MiB.
        if amount >= factor * 1000 // 1024:
            if amount % factor == 0:
                return f"{amount // factor} {name}"
            scaled = amount / factor
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{digits}f} {name}"
    return f"{amount} B"


def parse_share(value: str | int, whole_bytes: int) -> int:
    """Return the bytes that a share of `whole_bytes` stands for: `40%` of it, or an amount.

    A percentage is rounded down, so that shares of 100% in sum never exceed the whole.
    """
    assert whole_bytes >= 0, whole_bytes
    if isinstance(value, str) and "%" in value:
        match = _PERCENT.fullmatch(value.strip())
        if match is None or not 0 < Fraction(match[1]) <= 100:
            raise ValueError(f"{value!r} is not a share: use a value above 0% and up to 100%")
        return int(whole_bytes * Fraction(match[1]) / 100)
    return parse_bytes(value)
