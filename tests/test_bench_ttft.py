"""The evaluation of one cold hit by the benchmark of first tokens, without an engine; and its picture."""

from __future__ import annotations

import json
import sys
import threading
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import bench_ttft as bench
import draw_timeline
import figures

SVG = "{http://www.w3.org/2000/svg}"
HIT = {"began": 100.0, "seconds": 0.2}


def span(name: str, at_ms: float, for_ms: float, request: str = "a") -> dict[str, Any]:
    args = {"request": request, "tokens": {"warm": 0, "cold": 4096}}
    return {"name": name, "ts": 100_000_000 + at_ms * 1000, "dur": for_ms * 1000, "args": args}


OTHERS = [span("first step", -300, 200, "before"), span("copy, rank 0", 250, 3, "after")]
MINE = [
    span("until it is asked about", 1, 0.5),
    span("blocks come from disk", 1.5, 30),
    span("first step", 40, 150),
    span("copy, rank 0", 41, 3),
]
PARTS = [
    [bench.BEFORE, 0, 1],
    ["until it is asked about", 1, 0.5],
    ["blocks come from disk", 1.5, 30],
    ["first step", 40, 150],
    ["copy, rank 0", 41, 3],
    [bench.AFTER, 190, 10],
]
ROW = {
    "name": figures.COLD_HIT, "value": 200.0, "unit": "ms", "bar": "", "low": None, "high": None,
    "more": {"resident ms": 165.5, "fio ms": 33.0, "parts, from ms, for ms": PARTS},
}  # fmt: skip


def lines(spans: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(one) + ",\n" for one in spans)


def bars(picture: str) -> list[tuple[float, float, str]]:
    """The position, the width and the colour of each bar."""
    found = ET.fromstring(picture).findall(f"{SVG}rect")[1:]
    return [
        (float(one.get("x", "")), float(one.get("width", "")), one.get("fill", "")) for one in found
    ]


def test_the_hit_with_the_median_overhead_is_shown() -> None:
    assert bench.median_at([30.0, 90.0, 20.0, 31.0, 28.0]) == 0
    assert bench.median_at([3.0, 1.0, 2.0]) == 2


def test_the_parts_of_a_hit_cover_its_time_and_belong_to_it(tmp_path: Path) -> None:
    path = tmp_path / "hits.json"
    path.write_text("[\n" + lines(OTHERS + MINE[::-1]))
    row = bench.one_cold("one", HIT, path, **{"resident ms": 165.5, "fio ms": 33.0})
    assert (row.value, row.unit, row.ok) == (200.0, "ms", None)
    assert row.more == ROW["more"]


def test_an_incomplete_timeline_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hits.json"
    path.write_text("[\n" + lines([*OTHERS, *MINE[:3]]))  # half of it
    monkeypatch.setattr(bench, "PATIENCE_S", 0.1)
    with pytest.raises(AssertionError, match="no copy of this hit"):
        bench.one_cold("one", HIT, path)
    monkeypatch.setattr(bench, "PATIENCE_S", 20.0)
    later = threading.Timer(0.2, lambda: path.write_text("[\n" + lines(OTHERS + MINE)))
    later.start()
    assert bench.one_cold("one", HIT, path).more["parts, from ms, for ms"] == PARTS
    later.join()


def test_a_hit_without_a_disk_wait_is_not_shown_as_cold(tmp_path: Path) -> None:
    path = tmp_path / "hits.json"
    path.write_text("[\n" + lines([one for one in MINE if "disk" not in one["name"]]))
    with pytest.raises(AssertionError, match="no cold hit"):
        bench.one_cold("one", HIT, path)


def test_the_compared_times_are_drawn_to_the_scale_of_the_hit() -> None:
    picture, said = figures.cold_hit(ROW)
    drawn = bars(picture)
    x0, whole = drawn[0][0], drawn[-2][1] / 165.5
    for (_, at, took), (x, width, _) in zip(PARTS, drawn, strict=False):
        assert x == pytest.approx(x0 + at * whole, abs=0.2)
        assert width == pytest.approx(max(1.5, took * whole), abs=0.2)
    resident, fio = drawn[-2:]
    assert len(drawn) == len(PARTS) + 2 and resident[0] == x0
    assert fio[0] == drawn[2][0] and fio[1] == pytest.approx(33 * whole, abs=0.2)
    grey = {colour for _, _, colour in drawn[-2:]}
    assert len(grey) == 1 and not grey & {colour for _, _, colour in drawn[:-2]}
    texts = [one.text for one in ET.fromstring(picture).iter(f"{SVG}text")]
    assert {"blocks come from disk", "30.00 ms", "fio, as many bytes", "33.00 ms"} <= set(texts)
    assert "200.0 ms: 34.5 ms more than a hit in the engine's\nown cache (165.5" in said
    assert (
        "takes 30.0 ms; `fio` reads the same number of bytes in 33 ms." in said
        and "takes 3.0 ms." in said
    )


def test_a_measured_hit_is_shown_in_its_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    found = figures.results()
    found["ttft"]["rows"] = [ROW]
    monkeypatch.setattr(figures, "results", lambda: found)
    files = figures.wanted()
    picture, said = figures.cold_hit(ROW)
    assert files[figures.ROOT / "docs" / "cold-hit.svg"] == picture
    for page in figures.HIT_PAGES:
        path = figures.ROOT / "docs" / page
        assert path.read_text().count(figures.BEGIN) == 1, page
        assert said in files[path]
        assert files[path].split(figures.END)[1] == path.read_text().split(figures.END)[1]


def test_the_last_hit_of_a_file_that_is_being_written_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "hits.json", tmp_path / "hit.svg"
    source.write_text("[\n" + lines(OTHERS[:1] + MINE) + '{"name": "first st')
    monkeypatch.setattr(sys, "argv", ["draw", str(source), str(target)])
    draw_timeline.main()
    texts = {one.text for one in ET.fromstring(target.read_text()).iter(f"{SVG}text")}
    assert {"a: 4096 tokens cold, 189.00 ms", "blocks come from disk", "150.00 ms"} <= texts
    assert len(bars(target.read_text())) == len(MINE)
