"""What the prompts of a trace cost: arithmetic by hand, and the command."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from kvtier_daemon.cli import main
from kvtier_daemon.sim.prices import Prices, cost_of, frontier, read_prices

SMALL = Path(__file__).parents[2] / "traces" / "small.jsonl"
GIB = 1 << 30
GIVEN = "gpu-hour=3.6,memory-gib=4,nvme-gib=0.1"
PRICES = Prices(gpu_hour=3.6, memory_gib=4.0, nvme_gib=0.1, busy=0.5)


def test_a_cost_is_the_sum_of_gpu_time_and_of_what_is_worn_in_that_time() -> None:
    hours = 10
    cost = cost_of(
        PRICES, 2_000_000, hours * 3600, busy_s=1800, memory_bytes=100 * GIB, nvme_bytes=1000 * GIB
    )
    assert cost.engines == pytest.approx(1800 / 0.5 / 36_000)
    assert cost.gpu_per_million == pytest.approx(
        1800 / 0.5 * 0.001 / 2
    )  # 3.6 an hour is 0.001 a second
    assert cost.memory_per_million == pytest.approx(400 * hours / (4 * 8760) / 2)
    assert cost.nvme_per_million == pytest.approx(100 * hours / (4 * 8760) / 2)
    parts = cost.gpu_per_million + cost.memory_per_million + cost.nvme_per_million
    assert cost.per_million == pytest.approx(parts)
    assert cost.bought == 500 and cost.disk_years == 4


def test_a_disk_that_is_written_more_than_it_bears_is_bought_more_often() -> None:
    size = 1000 * GIB
    assert PRICES.disk_years(size, size) == 4  # it would bear that for five years
    assert PRICES.disk_years(size, 5 * size) == pytest.approx(1)
    gentle, hard = (
        cost_of(PRICES, 10**6, 3600, 0, 0, size, written).nvme_per_million
        for written in (size, 5 * size)
    )
    assert hard == pytest.approx(4 * gentle)


def test_each_split_of_a_budget_spends_it() -> None:
    splits = PRICES.splits(1000.0)
    assert splits[-1][1] == 0
    assert [memory for memory, _ in splits] == sorted({memory for memory, _ in splits})
    for memory, nvme in splits:
        assert PRICES.bought(memory, nvme) == pytest.approx(1000.0, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gpu-hour=2.5", "without memory-gib"),
        ("gpu=2.5", "unknown price 'gpu'; known are gpu-hour, memory-gib"),
        (GIVEN + ",years=four", "'four' is not a number"),
        (GIVEN + ",years=0", "0 is not above 0"),
        (GIVEN + ",years=nan", "nan is not above 0"),
        (GIVEN + ",busy=1.5", "busy: 1.5 is above 1"),
        ("", "unknown price ''"),
    ],
)
def test_wrong_prices_are_refused_with_what_is_wrong(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why.replace("?", ".")):
        read_prices(text)


def test_the_frontier_has_the_runs_that_no_other_undercuts() -> None:
    points = [(10.0, 5.0), (20.0, 6.0), (20.0, 4.0), (30.0, 4.0), (40.0, 1.0)]
    runs = [{"cost": {"bought": bought, "per_million": cost}} for bought, cost in points]
    assert frontier(runs) == [(10.0, 5.0), (20.0, 4.0), (40.0, 1.0)]


# --- the command -----------------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["sim", str(SMALL), *flags])
    result = capsys.readouterr()
    return int(left.value.code or 0), result.out, result.err


def test_costs_follow_from_the_times_that_are_simulated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "costs.svg"
    sizes = ("--memory", "1GiB,4GiB", "--nvme", "0,32GiB", "--plot", str(picture))
    code, out, err = told(capsys, "--prices", GIVEN, *sizes, "--json")
    assert not code, err
    result: dict[str, Any] = json.loads(out)
    lines = [json.loads(line) for line in SMALL.read_text().splitlines()]
    tokens = sum(line["input_length"] for line in lines)
    second = 3.6 / 3600 / 0.7
    none = result["recompute_only"]["cost"]
    assert none["per_million"] == pytest.approx(1e-4 * second * 1e6)  # 10,000 tokens a second
    for run in result["runs"]:
        busy_s = run["recompute_s"] + run["bytes"]["memory_read"] / 25e9
        assert run["cost"]["gpu_per_million"] == pytest.approx(busy_s * second / tokens * 1e6)
        assert run["cost"]["per_million"] < none["per_million"]
    cheapest = min(result["runs"], key=lambda run: run["cost"]["per_million"])
    assert result["recommended"] == {name: cheapest[name] for name in result["recommended"]}
    assert picture.read_text().count("<circle") == 4 + len(frontier(result["runs"]))
    ET.fromstring(picture.read_text())


def test_the_life_of_a_disk_is_shown_only_where_there_is_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = told(capsys, "--prices", GIVEN, "--memory", "1GiB", "--nvme", "0,32GiB")
    assert not code, err
    without, disk = out[out.index("costs of") :].splitlines()[3:5]
    assert " y" not in without and " y" in disk


def test_a_budget_is_tried_in_several_splits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "costs.svg"
    code, out, err = told(
        capsys, "--prices", GIVEN, "--budget", "60", "--plot", str(picture), "--engines", "2"
    )
    assert not code, err
    rows = out[out.index("costs of a million") :].splitlines()
    assert len(rows) == 2 + 1 + 9 + 1 and sum(row.endswith(" <") for row in rows) == 1
    assert "memory, of 60 for memory and NVMe" in picture.read_text()
    assert "the trace is too short" in rows[-1]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--budget", "60"), "needs --prices"),
        (("--prices", GIVEN, "--budget", "60", "--memory", "1GiB"), "determines the sizes"),
        (("--prices", GIVEN, "--blocks", "50"), "not with --blocks"),
        (("--prices", "gpu-hour=1"), "without memory-gib"),
        (("--prices", GIVEN, "--budget", "0.0001"), "does not buy memory for one block"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], why: str
) -> None:
    code, _, err = told(capsys, *flags)
    assert code == 2 and why in " ".join(err.split())


def test_size_counts_gpus_and_prices_a_million_tokens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
              "num_key_value_heads": 8, "torch_dtype": "bfloat16"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = [
        "--weights",
        "16GiB",
        "--sequences",
        "100",
        "--gpu-hour",
        "3.6",
        "--tensor-parallel",
        "2",
    ]
    with pytest.raises(SystemExit):
        main(["size", str(tmp_path), *flags, "--json"])
    report = json.loads(capsys.readouterr().out)
    # 72 GiB of each GPU, less 8 GiB of weights, hold 128 sequences of 512 MiB.
    assert report["sequences"] == {"number": 100, "engines": 1, "gpus": 2}
    assert report["prices"]["compute_per_million"] == pytest.approx(1e-4 * 2 * 0.001 * 1e6)
    with pytest.raises(SystemExit):
        main(["size", str(tmp_path), "--weights", "200GiB", *flags[2:]])
    out = capsys.readouterr().out
    assert "none fits into a GPU" in out and "0.2 to compute such tokens" in out
