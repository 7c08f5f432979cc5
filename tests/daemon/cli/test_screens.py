"""The screens of `kvtier top`, without a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from kvtier.units import GIB
from kvtier_daemon.cli.top_views import LABEL, VIEWS, Moment, ScreenHistory, ScreenRoom, draw
from kvtier_daemon.tiers.states import SWITCHED_OFF

CLIENT = {
    "client": "engine 0", "tenant": "default", "pid": 7, "uid": 0, "spaces": 1, "up_s": 5.0,
}  # fmt: skip


def stats_of(at: int, **cold: Any) -> dict[str, Any]:
    """The stats of a daemon, `at` seconds after its start. Three quarters of its looked-up tokens were
    hits."""
    warm = {"capacity_bytes": 8 * GIB, "used_bytes": 6 * GIB, "blocks": 6000, "states": {}}
    disk = {"capacity_bytes": 800 * GIB, "used_bytes": 99 * GIB, "blocks": 1_234_567}
    moved = {"written": at * 10**8, "read": at * 3 * 10**7}
    return {
        "pid": 1, "version": "0.1.0", "uptime_s": at, "sessions": 5, "engines": 2,
        "tiers": {"warm": warm, "cold": disk | {"bytes": moved, "on": True, "failure": ""} | cold},
        "lookup_tokens": 400 * at, "hit_tokens": {"warm": 200 * at, "cold": 100 * at},
        "miss_tokens": {"absent": 100 * at}, "saved_tokens": 100 * at, "refused_tokens": {"present": at},
        "bytes": {"saved": at * 10**9, "loaded": at * 2 * 10**9}, "evicted_blocks": {"demoted": 5 * at},
        "tenants": {"default": {"capacity_bytes": 8 * GIB, "used_bytes": 6 * GIB, "blocks": 6000}},
    }  # fmt: skip


def drawn(view: str, room: ScreenRoom, **cold: Any) -> list[str]:
    history = ScreenHistory()
    for at in range(1, 200):
        history.add(Moment(float(at), stats_of(at, **cold), [CLIENT] * 3))
    return printed(history, view, room)


def printed(history: ScreenHistory, view: str, room: ScreenRoom) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=room.width + 1).print(draw(history, view, room))
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("width", "rows"), [(78, 20), (78, 41), (138, 20), (138, 41), (60, 12)])
def test_a_screen_fits_the_terminal(view: str, width: int, rows: int) -> None:
    lines = drawn(view, ScreenRoom(width, rows))
    assert max(len(line) for line in lines) <= width + 1
    if rows >= 20:
        assert len("\n".join(lines).rstrip().splitlines()) <= rows + 1


def test_the_first_view_fills_a_large_screen() -> None:
    few, many = drawn("tiers", ScreenRoom(78, 20)), drawn("tiers", ScreenRoom(138, 41))
    assert not any("hit rate" in line or "engine 0" in line for line in few)
    assert sum("engine 0" in line for line in many) == 3
    rate = next(line for line in many if "hit rate" in line)
    assert "75%" in rate
    at = many.index(rate)
    bars = [line.count("█") for line in many[at : at + 4]]
    assert bars == [0, 98, 98, 98], "three quarters of four lines"
    assert sum(bool(line) for line in many) > 30


def test_a_tier_that_fails_or_is_off_does_not_move_the_bars() -> None:
    failure = "/mnt/nvme0/segments/default/000017: write failed: Input/output error"
    broken = drawn("tiers", ScreenRoom(78, 20), on=False, failure=failure)
    assert [line.split()[0] for line in broken[2:4]] == ["warm", "cold"]
    assert "cold tier off: /mnt/nvme0" in " ".join(" ".join(broken).split())
    off = drawn("tiers", ScreenRoom(78, 20), on=False, state="off", failure=SWITCHED_OFF)
    assert [line.split()[0] for line in off[2:4]] == ["warm", "cold"]
    said = " ".join(" ".join(off).split())
    assert "until `kvtier tier on cold`" in said and "switched off" not in said


@pytest.mark.parametrize("view", ["tiers", "hits"])
def test_total_hits_are_shown_before_those_of_each_tier(view: str) -> None:
    rows = [line.split() for line in drawn(view, ScreenRoom(78, 20))]
    lines = [row for row in rows if row[:1] == ["hit"] and row[1] != "rate"]
    names = [line[1] if line[1] in ("warm", "cold") else "all" for line in lines]
    assert names == ["all", "warm", "cold"]
    total, *each = [int(line[-1].replace(",", "")) for line in lines]
    assert total == sum(each) > 0


def test_rates_are_in_a_readable_unit() -> None:
    lines = drawn("tiers", ScreenRoom(78, 20))
    said = [" ".join(line.split()[:5]) for line in lines if "→" in line]
    assert said == [
        "engines → warm 1.00 GB/s", "warm → engines 2.00 GB/s",
        "warm → cold 0.10 GB/s", "cold → warm 30.00 MB/s",
    ]  # fmt: skip


@pytest.mark.parametrize("view", ["tiers", "hits", "moves"])
def test_changing_values_do_not_move_other_columns(view: str) -> None:
    """A tier becomes empty, a rate decreases, one reason replaces another, and one has no value."""

    def moment(at: int, used: int, counts: list[int], moved: int) -> Moment:
        stats = stats_of(at, loads=dict(zip(("read", "crowded", "late"), counts, strict=True)))
        tiers = stats["tiers"]
        warm = tiers["warm"] | {"used_bytes": used, "blocks": used >> 20}
        counted = dict(zip(("absent", "evicted", "late"), counts, strict=True))
        return Moment(float(at), stats | {
            "tiers": tiers | {"warm": warm}, "lookup_tokens": moved, "miss_tokens": counted,
            "refused_tokens": counted, "evicted_blocks": counted, "bytes": {"saved": moved, "loaded": 0},
        })  # fmt: skip

    history = ScreenHistory()
    history.add(moment(1, 6 * GIB, [3, 2, 1], 0))
    history.add(moment(2, 8 * GIB - 4096, [1_000_003, 2, 1], 9 * 10**9))
    before = printed(history, view, ScreenRoom(78, 20))
    history.add(moment(3, 4096, [1_000_003, 900_002, 1], 9 * 10**9 + 10**6))
    after = printed(history, view, ScreenRoom(78, 20))

    def places(lines: list[str]) -> list[tuple[str, list[int]]]:
        """The label of each line, and the positions where its columns begin and end."""
        words = ("%", "blocks", "GB/s", "most", "last")
        bars = str.maketrans(dict.fromkeys("░▁▂▃▄▅▆▇█", " "))
        lines = [line.replace("MB/s", "GB/s").translate(bars) for line in lines]
        return [
            (" ".join(line[:LABEL].split()[:2]), [line.find(word) for word in words])
            for line in lines
        ]

    assert places(before) == places(after)


def test_a_terminal_without_block_characters_gets_no_curves() -> None:
    text = "\n".join(
        drawn("tiers", ScreenRoom(138, 41, ascii_only=True))
        + drawn("moves", ScreenRoom(78, 20, True))
    )
    assert text.isascii() and "engines -> warm" in text
