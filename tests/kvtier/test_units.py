import copy
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import (
    ConfigError,
    KvtierError,
    ProtocolError,
    Refused,
    SpecError,
    StaleLease,
    Unavailable,
)
from kvtier.units import BYTES_MAX, GIB, KIB, MIB, TIB, format_bytes, parse_bytes, parse_share


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("64GiB", 64 * GIB),
        ("512 MiB", 512 * MIB),
        ("2TB", 2 * 10**12),
        ("1.5GiB", 3 * GIB // 2),
        ("0.1GB", 10**8),
        ("1.3 KiB", 1331),
        ("10 kb", 10_000),
        ("7 B", 7),
        ("4096", 4096),
        (" 1tib ", TIB),
        (4096, 4096),
        (0, 0),
        (BYTES_MAX, BYTES_MAX),
    ],
)
def test_an_amount_of_bytes_is_read_in_its_unit(text, amount):
    assert parse_bytes(text) == amount


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "-1GiB", "1e9", "1_000", "0x10", "64GiBs", "1.5", "1.5B", "1 GiB 2", "٣GiB"),
        *("9" * 30, "9000PiB", "1.GiB", ".5GiB", "50%", "1  GiB"),
    ],
)
def test_invalid_amounts_of_bytes_are_refused(text):
    with pytest.raises(ValueError, match=r"."):
        parse_bytes(text)


@pytest.mark.parametrize("number", [-1, True, BYTES_MAX + 1])
def test_invalid_numbers_are_refused(number):
    with pytest.raises(ValueError, match="not an amount of bytes"):
        parse_bytes(number)


def test_a_unit_that_means_two_things_is_refused_with_both():
    with pytest.raises(ValueError, match=r"64GiB.*64GB"):
        parse_bytes("64g")


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (KIB, "1 KiB"),
        (1500, "1.46 KiB"),
        (64 * GIB, "64 GiB"),
        (GIB + 1, "1.00 GiB"),
        (GIB - 1, "1.00 GiB"),
        (1023 * MIB, "1.00 GiB"),
        (39 * GIB + 700 * MIB, "39.7 GiB"),
        (1000 * GIB + 1, "0.98 TiB"),
        (2000 * TIB, "1.95 PiB"),
    ],
)
def test_an_amount_is_written_with_few_digits(amount, text):
    assert format_bytes(amount) == text


@given(st.integers(0, BYTES_MAX))
def test_a_formatted_amount_is_parsed_back_within_a_percent(amount):
    back = parse_bytes(format_bytes(amount))
    assert abs(back - amount) * 100 <= amount


@given(st.integers(1, 999), st.sampled_from([1, KIB, MIB, GIB, TIB]))
def test_whole_multiples_of_a_unit_are_parsed_back_exactly(count, unit):
    assert parse_bytes(format_bytes(count * unit)) == count * unit


@given(st.integers(0, BYTES_MAX))
def test_a_plain_number_is_bytes_as_text_and_as_integer(amount):
    assert parse_bytes(amount) == parse_bytes(str(amount)) == amount


@pytest.mark.parametrize(
    ("share", "whole", "amount"),
    [
        ("40%", 1000, 400),
        ("100%", 7, 7),
        ("33.3 %", 1000, 333),
        ("0.001%", 10**6, 10),
        ("64GiB", 1, 64 * GIB),
        (4096, 1, 4096),
    ],
)
def test_a_share_is_a_percentage_of_the_whole_or_an_amount(share, whole, amount):
    assert parse_share(share, whole) == amount


@pytest.mark.parametrize("share", ["0%", "101%", "-5%", "%", "40%%", "4 0%", "1e1%"])
def test_a_percentage_outside_the_whole_is_refused(share):
    with pytest.raises(ValueError, match="not a share"):
        parse_share(share, 1000)


@given(st.sets(st.integers(1, 9999), max_size=8), st.integers(0, BYTES_MAX))
def test_percentages_that_sum_to_100_never_exceed_the_whole(cuts, whole):
    edges = [0, *sorted(cuts), 10_000]  # in hundredths of a percent
    shares = [f"{(b - a) // 100}.{(b - a) % 100:02d}%" for a, b in itertools.pairwise(edges)]
    assert sum(parse_share(share, whole) for share in shares) <= whole


def test_every_error_is_a_kvtier_error():
    for kind in (ConfigError, Unavailable, ProtocolError, Refused, StaleLease, SpecError):
        assert issubclass(kind, KvtierError)


def test_a_refusal_keeps_its_code_through_a_copy():
    refusal = Refused("quota", "tenant a has used its 4 GiB")
    twin = copy.copy(refusal)
    assert (twin.code, twin.message) == ("quota", "tenant a has used its 4 GiB")
    assert str(refusal) == "tenant a has used its 4 GiB (quota)"
