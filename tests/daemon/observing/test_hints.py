"""Hints describe problems of the last minutes, and are empty without problems."""

from __future__ import annotations

from typing import Any

from kvtier_daemon.observing.hints import SPAN_S, Hints
from kvtier_daemon.tools import doctor
from kvtier_daemon.tools.doctor import Severity


def figures(at_s: float, looked: int = 0, found: int = 0, **cold: Any) -> dict[str, Any]:
    return {
        "uptime_s": at_s,
        "lookup_tokens": looked,
        "coming_tokens": 0,
        "coming_remote_tokens": 0,
        "awaited_tokens": 0,
        "hit_tokens": {"warm": found},
        "tiers": {"warm": {}, "cold": cold},
    }


def test_blocks_lost_unwritten_are_reported_for_some_minutes() -> None:
    hints = Hints()
    lost = figures(60.0, unwritten={"slow_disk": 1234, "once": 99})
    (hint,) = hints.of(lost)
    assert "1,234 blocks were evicted before they were written" in hint and "faster disk" in hint
    hints.note(lost)
    later = figures(61.0 + SPAN_S, unwritten={"slow_disk": 1234, "once": 99})
    hints.note(later)
    assert hints.of(later) == []


def test_blocks_that_admission_refused_are_not_reported_as_lost() -> None:
    assert Hints().of(figures(60.0, unwritten={"once": 5000})) == []


def test_a_falling_hit_rate_is_reported_if_it_covers_enough_tokens() -> None:
    hints = Hints()
    for at_s in (900.0, 901.0 + SPAN_S):
        hints.note(figures(at_s, 1_000_000, 620_000))
    (hint,) = hints.of(figures(1300.0, 1_100_000, 635_000))
    assert "15%" in hint and "62%" in hint
    assert hints.of(figures(1300.0, 1_100_000, 670_000)) == []
    assert hints.of(figures(1300.0, 1_000_900, 620_000)) == []


def test_late_loads_are_reported() -> None:
    assert Hints().of(figures(60.0, loads={"faster": 100, "late": 4})) == []
    (hint,) = Hints().of(figures(60.0, loads={"faster": 90, "unknown": 10, "late": 6}))
    assert "6 of 100 loads from disk were late" in hint


def test_the_doctor_reports_blocks_lost_unwritten() -> None:
    well = {"states": {"written": 1000}, "unwritten": {"slow_disk": 3, "once": 500}}
    assert doctor.lost_unwritten(well).level is Severity.ok
    found = doctor.lost_unwritten(well | {"unwritten": {"slow_disk": 200, "off": 1}})
    assert found.level is Severity.warn and "slow_disk 200" in found.value and "disk" in found.fix
    assert doctor.lately({"hints": []}).level is Severity.ok
    found = doctor.lately({"hints": ["the hit rate is 15%, and was 62%; `kvtier explain`"]})
    assert found.level is Severity.warn and "62%" in found.value and found.fix == "`kvtier explain`"
