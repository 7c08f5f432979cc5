"""The choice of a codec: by the rule, for any bandwidths, rates and ratios, and from measurements."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.frame import FIX4, R32, RAW, ZSTD
from kvtier.layout import KvSpec
from kvtier_daemon.codec.choice import (
    BLOCK_MOST,
    FIRST_TRIES,
    GAIN,
    LIMIT_SPACES,
    TRY_EVERY,
    Choice,
    Rates,
)
from support.specs import spec_of

SPEC = spec_of("org/model")
SPACE = b"s" * 32
GB = 1e9
MIB = 1 << 20


def choice_of(
    ratios: dict[int, float], rates: dict[int, float], threads: int = 1, spec: KvSpec = SPEC
) -> Choice:
    choice = Choice(Rates(threads))
    for codec, ratio in ratios.items():
        choice.shrank(SPACE, spec, codec, 1 << 20, int((1 << 20) / ratio))
    for codec, rate in rates.items():
        choice.rates.decoded(codec, spec.dtype, 1 << 30, (1 << 30) / rate)
    return choice


def gain(ratio: float, rate: float, link: float) -> float:
    return min(ratio, rate / link)


RATIO = st.floats(0.9, 8)
RATE = st.floats(0.05 * GB, 50 * GB)


@given(RATIO, RATE, RATIO, RATE, RATE, st.integers(1, 4))
def test_the_codec_with_the_largest_gain_is_chosen_and_none_without_a_gain(
    fix4: float, fix4_rate: float, r32: float, r32_rate: float, link: float, threads: int
) -> None:
    choice = choice_of({FIX4: fix4, R32: r32}, {FIX4: fix4_rate, R32: r32_rate}, threads)
    gains = {
        RAW: 1.0,
        FIX4: gain(fix4, fix4_rate * threads, link),
        R32: gain(r32, r32_rate * threads, link),
    }
    taken = choice.codec(SPACE, SPEC, MIB, [link]).number
    assert gains[taken] * GAIN * 1.001 >= max(gains.values())
    if taken != RAW:
        assert gains[taken] > 1, "r > 1 and C > B, or it does not pay"


@given(RATIO, RATE, RATE)
def test_a_choice_does_not_alternate_between_codecs_of_similar_gain(
    r32: float, rate: float, link: float
) -> None:
    choice = choice_of({R32: r32}, {R32: rate})
    taken = [
        choice.codec(SPACE, SPEC, MIB, [link * nearly]).number
        for nearly in (1.0, 0.99, 1.01, 1.0, 0.99, 1.01)
    ]
    assert sum(one != other for one, other in pairwise(taken)) <= 1, "back and forth"


def test_blocks_for_a_disk_faster_than_the_decoder_stay_raw() -> None:
    choice = choice_of({FIX4: 1.33, R32: 1.5}, {FIX4: 14 * GB, R32: 5 * GB})
    assert choice.codec(SPACE, SPEC, MIB, [2 * GB]).name == "r32"
    assert choice.codec(SPACE, SPEC, MIB, [4 * GB]).name == "fix4", "5/4 is less than 1.33"
    assert choice.codec(SPACE, SPEC, MIB, [20 * GB]).name == "raw"
    assert choice.codec(SPACE, SPEC, MIB, [2 * GB]).name == "r32"


def test_blocks_for_disks_of_unknown_speed_stay_raw() -> None:
    choice = choice_of({FIX4: 1.33, R32: 1.5}, {FIX4: 14 * GB, R32: 5 * GB})
    assert choice.codec(SPACE, SPEC, MIB, [0.0, 0.0]).name == "raw"
    assert choice.codec(SPACE, SPEC, MIB, [0.0, 1 * GB]).name == "r32", "the other is as fast"


def test_a_codec_slower_than_the_rate_of_saves_is_not_chosen() -> None:
    choice = choice_of({FIX4: 1.33, R32: 1.5}, {FIX4: 14 * GB, R32: 5 * GB})
    choice.rates.encoded(R32, SPEC.dtype, int(GB), 1.0)
    choice.rates.encoded(FIX4, SPEC.dtype, int(3 * GB), 1.0)
    for saved, taken in (
        (0.9, "r32"), (1.0, "r32"), (1.1, "fix4"), (1.0, "fix4"), (3.1, "raw"), (0.9, "r32"),
    ):  # fmt: skip
        choice.saved_bytes_s = saved * GB
        assert choice.codec(SPACE, SPEC, MIB, [1 * GB]).name == taken, saved


def test_the_latest_rates_determine_the_choice() -> None:
    choice = choice_of({R32: 1.5}, {R32: 5 * GB})
    assert choice.codec(SPACE, SPEC, MIB, [4 * GB]).name == "r32"
    for _ in range(100):
        choice.rates.decoded(R32, SPEC.dtype, int(0.1 * GB), 0.1)  # the processors are busy
    assert choice.codec(SPACE, SPEC, MIB, [4 * GB]).name == "raw"
    for _ in range(100):
        choice.rates.decoded(R32, SPEC.dtype, int(0.5 * GB), 0.1)
    assert choice.codec(SPACE, SPEC, MIB, [4 * GB]).name == "r32"


def test_a_few_measurements_after_a_slow_period_restore_the_rate() -> None:
    now, one = [0.0], 1 << 20
    choice = Choice(Rates(1, lambda: now[0]))
    choice.shrank(SPACE, SPEC, R32, 3 * one, 2 * one)
    choice.rates.decoded(R32, SPEC.dtype, int(5 * GB), 1.0)
    assert choice.codec(SPACE, SPEC, MIB, [4 * GB]).name == "r32"
    for _ in range(50):
        now[0] += 0.1
        choice.rates.decoded(R32, SPEC.dtype, int(0.1 * GB), 0.1)
    assert choice.codec(SPACE, SPEC, MIB, [4 * GB]).name == "raw"
    tries = 0
    while choice.codec(SPACE, SPEC, MIB, [4 * GB]).name == "raw":
        tries += 1
        now[0] += 6.0
        choice.rates.decoded(R32, SPEC.dtype, one, one / (5 * GB))
    assert 5 <= tries <= 30, "nor is one try enough"
    for _ in range(3):
        now[0] += 600.0
        choice.rates.decoded(R32, SPEC.dtype, one, one / (4.5 * GB))
    choice.rates.decoded(R32, SPEC.dtype, one, one / (2 * GB))
    assert choice.codec(SPACE, SPEC, MIB, [4 * GB]).name == "r32", "one slow block"


def test_several_disks_have_equal_weight() -> None:
    choice = choice_of({R32: 1.5}, {R32: 3 * GB})
    assert choice.codec(SPACE, SPEC, MIB, [1 * GB, 1.2 * GB]).name == "r32"
    assert choice.codec(SPACE, SPEC, MIB, [9 * GB, 9 * GB]).name == "raw"


def test_a_new_space_is_tried_at_first_and_periodically_later() -> None:
    choice = Choice(Rates())
    assert choice.codec(SPACE, SPEC, MIB, [2 * GB]).number == RAW, "nothing is known"
    assert choice.tries(SPACE, SPEC, MIB) == FIRST_TRIES and choice.encodes(SPACE, SPEC, MIB)
    choice.wrote(SPACE, SPEC, FIRST_TRIES, FIRST_TRIES)
    assert choice.tries(SPACE, SPEC, MIB) == 0 and not choice.encodes(SPACE, SPEC, MIB)
    tried = 0
    for _ in range(4 * TRY_EVERY):
        some = choice.tries(SPACE, SPEC, MIB)
        choice.wrote(SPACE, SPEC, 1, some)
        tried += some
    assert 3 <= tried <= 4


def test_a_configured_codec_is_used_for_suitable_blocks() -> None:
    for asked in ("raw", "fix4", "r32", "zstd"):
        choice = Choice(Rates(), asked)
        assert choice.codec(SPACE, SPEC, MIB, [GB]).name == asked
        assert choice.tries(SPACE, SPEC, MIB) == 0
    odd = spec_of("odd", dtype="int8")
    assert Choice(Rates(), "r32").codec(b"o" * 32, odd, MIB, [GB]).name == "raw"
    assert Choice(Rates(), "zstd").codec(b"o" * 32, odd, MIB, [GB]).name == "zstd"
    choice = choice_of({ZSTD: 1.5}, {ZSTD: 3 * GB}, spec=odd)
    assert choice.codec(SPACE, odd, MIB, [GB]).name == "zstd"
    assert [one.name for one in choice.candidates(odd)] == ["zstd"]


def test_large_blocks_use_only_codecs_that_workers_decode() -> None:
    large, odd = BLOCK_MOST + 1, spec_of("odd", dtype="int8")
    choice = choice_of({ZSTD: 1.5}, {ZSTD: 3 * GB}, spec=odd)
    assert choice.codec(SPACE, odd, BLOCK_MOST, [GB]).name == "zstd"
    assert choice.codec(SPACE, odd, large, [GB]).name == "raw"
    assert choice.encodes(SPACE, odd, BLOCK_MOST) and not choice.encodes(SPACE, odd, large)
    assert choice.tries(SPACE, odd, BLOCK_MOST) and not choice.tries(SPACE, odd, large)
    assert Choice(Rates(), "zstd").codec(SPACE, SPEC, large, [GB]).name == "raw"
    assert choice.tries(b"n" * 32, SPEC, large) == FIRST_TRIES
    assert [one.name for one in choice.candidates(SPEC, large)] == ["fix4", "r32"]
    assert Choice(Rates(), "r32").codec(SPACE, SPEC, large, [GB]).name == "r32"


def test_models_may_have_their_own_codec() -> None:
    choice = Choice(Rates(), "r32", [("org/*", "fix4"), ("org/model", "raw"), ("x", "zstd")])
    assert choice.codec(SPACE, SPEC, MIB, [GB]).name == "fix4"
    assert choice.codec(b"x" * 32, spec_of("x"), MIB, [GB]).name == "zstd"
    assert choice.codec(b"y" * 32, spec_of("y"), MIB, [GB]).name == "r32"


def test_the_number_of_remembered_spaces_is_limited() -> None:
    choice = Choice(Rates(), "r32")
    for number in range(2 * LIMIT_SPACES):
        choice.codec(number.to_bytes(32, "big"), SPEC, MIB, [GB])
    assert len(choice.report()) == LIMIT_SPACES


def test_a_read_costs_more_if_decoding_is_slower_than_the_disk() -> None:
    choice = choice_of({R32: 1.5}, {R32: 3 * GB})
    slow = choice.slowness
    assert slow(SPACE, SPEC, RAW, 50 * GB) == 1
    assert slow(SPACE, SPEC, R32, 1 * GB) == 1, "decoded while more is read"
    assert slow(SPACE, SPEC, R32, 6 * GB) == pytest.approx(3, rel=1e-3)
    assert slow(SPACE, SPEC, FIX4, 6 * GB) == 1, "its rate is not known"


def test_a_report_contains_the_codec_of_each_space() -> None:
    choice = choice_of({FIX4: 1.33, R32: 1.5}, {R32: 5 * GB})
    choice.rates.encoded(R32, SPEC.dtype, 1 << 30, 0.25)
    choice.codec(SPACE, SPEC, MIB, [GB])
    (one,) = choice.report()
    assert (one["model"], one["dtype"], one["asked"], one["codec"]) == (
        "org/model", "bfloat16", "auto", "r32",
    )  # fmt: skip
    assert one["ratios"] == {"fix4": 1.33, "r32": 1.5}
    assert one["decode_bytes_s"] == {"fix4": 0, "r32": pytest.approx(5 * GB, rel=1e-3)}
    assert one["encode_bytes_s"] == {"fix4": 0, "r32": float(4 << 30)}
