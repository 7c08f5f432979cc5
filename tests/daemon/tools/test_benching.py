"""`kvtier bench`: measured copies are verified byte by byte, and results are compared by their intervals."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier_daemon.cli import main
from kvtier_daemon.tools import benchmark, machine_limits


def row(name: str, value: float, low: float, high: float, unit: str = "GB/s", bar: str = "") -> Any:
    return {"name": name, "value": value, "low": low, "high": high, "unit": unit, "bar": bar}


def test_only_disjoint_intervals_are_a_difference() -> None:
    before = {"rows": [
        row("faster", 10, 9, 11), row("alike", 10, 9, 11), row("slower", 10, 9, 11),
        row("later", 10, 9, 11, "us"), row("sooner", 10, 9, 11, "us"),
        row("cheaper", 1.0, 0.9, 1.1, "x", "<= 1.1"), row("gone", 1, 1, 1),
    ]}  # fmt: skip
    after = {"rows": [
        row("faster", 12, 11.5, 13), row("alike", 11, 10, 12), row("slower", 8, 7, 8.5),
        row("later", 12, 11.5, 13, "us"), row("sooner", 8, 7, 8.5, "us"),
        row("cheaper", 0.5, 0.4, 0.6, "x", "<= 1.1"), row("new", 1, 1, 1),
        {"name": "alike", "value": 3.0, "unit": "x", "low": None, "high": None},
    ]}  # fmt: skip
    report = benchmark.compare(before, after)
    assert [one["verdict"] for one in report["rows"]] == [
        "better", "same", "worse", "worse", "better", "better", "no interval",
    ]  # fmt: skip
    assert report["rows"][0]["change"] == pytest.approx(0.2)
    assert report["remarks"] == ["only in one of them: gone, new"]


def test_results_of_other_machines_and_of_busy_machines_have_a_remark() -> None:
    before = {"rows": [row("a", 1, 1, 1)], "environment": {"cores": 2, "commit": "a"}}
    after = before | {"environment": {"cores": 64, "commit": "b"}, "valid": False}
    remarks = benchmark.compare(before, after)["remarks"]
    assert remarks == [
        "not the same machine or software: cores differ",
        "B was measured on a busy machine",
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"name": 1}]}', '{"rows": 5}'])
def test_a_file_that_is_not_a_result_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=r"a\.json"):
        benchmark.read(tmp_path / "a.json")


def test_results_of_the_benchmarks_can_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(Path(__file__).parents[3] / "benchmarks" / "results" / "warm.json")
    with pytest.raises(SystemExit) as left:
        main(["bench", "compare", path, path, "--json"])
    assert left.value.code == 0
    verdicts = {one["verdict"] for one in json.loads(capsys.readouterr().out)["rows"]}
    assert verdicts <= {"same", "no interval"}


def test_a_worse_result_has_its_own_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("a", 10.0), ("b", 5.0)):
        text = json.dumps({"rows": [row("speed", value, value, value)]})
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as left:
        main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert left.value.code == 1
    assert "worse" in capsys.readouterr().out


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BLOCKS", 32), ("SET_BYTES", 64 << 20), ("COLD_BYTES", 512 << 20),
                        ("NEEDED_BYTES", 1), ("QUICK_ROUNDS", 3)):  # fmt: skip
        monkeypatch.setattr(benchmark, name, value)


def test_a_measurement_notices_one_wrong_byte() -> None:
    saved, loaded = bytearray(range(200)), bytearray(range(200))
    views, outs = ([memoryview(one)[:100], memoryview(one)[100:]] for one in (saved, loaded))
    assert not benchmark._differ(outs, views)
    for at in (0, 99, 199):
        loaded[at] ^= 1
        assert benchmark._differ(outs, views)
        loaded[at] ^= 1


def test_a_measurement_is_shown_with_its_limits(small: None, tmp_path: Path) -> None:
    steps: list[str] = []
    result = benchmark.run(True, tmp_path, lambda what, done, total: steps.append(what))
    names = [one["name"] for one in result["rows"]]
    assert names[:3] == ["copy in memory", "save, with checksums", "load from memory"]
    assert "direct reads of a file" in names
    assert "at best: " in result["rows"][0]["note"]
    assert all(one["low"] <= one["value"] <= one["high"] for one in result["rows"])
    assert {"memory", "disk, written", "disk, read"} <= set(steps)
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    assert benchmark.compare(result, result)["rows"][0]["verdict"] == "same"


def test_a_place_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(ConfigError, match="--cold"):
        benchmark.run(True, tmp_path, lambda *_: None)


def test_the_limit_is_the_best_of_all_tried_settings() -> None:
    ended = iter([9.0, 9.0, 5.0, 3.0, 4.0, 3.0, 6.0, 3.0])
    clock = [0.0]

    def step() -> None:
        clock[0] += next(ended)

    one, two = partial(step), partial(step)
    found = machine_limits.best({"one": one, "two": two}, clock=lambda: clock[0])
    assert found == ("two", two)


def test_every_copy_used_as_a_limit_copies_all_bytes() -> None:
    source, target = machine_limits.huge(8 << 20), machine_limits.huge(8 << 20)
    source[:] = os.urandom(len(source))
    for copy in machine_limits.copies(_blocks(target), _blocks(source)).values():
        target[:] = bytes(len(target))
        copy()
        assert target == source


def test_every_read_used_as_a_limit_reads_all_bytes(tmp_path: Path) -> None:
    data = os.urandom(8 << 20)
    (tmp_path / "data").write_bytes(data)
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    target = machine_limits.huge(len(data))
    for read in machine_limits.reads(fd, _blocks(target)).values():
        target[:] = bytes(len(target))
        read()
        assert target == data
    os.close(fd)


def _blocks(memory: memoryview) -> list[memoryview]:
    return [memory[at : at + (1 << 20)] for at in range(0, len(memory), 1 << 20)]
