"""The benchmark of mixed levels and of dropped tokens, with a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch and transformers: make test-engines")
pytest.importorskip("transformers", reason="needs torch and transformers: make test-engines")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import torch

import bench_mixed as bench
import bench_quality
from kvtier_daemon.calibration import measuring
from support.tiny_models import save_model, words

pytestmark = pytest.mark.filterwarnings("default")  # warnings of the libraries


def test_the_most_important_blocks_are_selected_as_a_whole() -> None:
    importance = torch.tensor([[1.0, 5.0, 3.0], [7.0, 0.0, 1.0]])
    found = bench.best(importance, 2)
    assert found[:, :: bench.BLOCK].tolist() == [[False, True, True], [True, False, True]]
    assert found.sum(1).tolist() == [2 * bench.BLOCK] * 2


def test_tokens_are_taken_from_the_one_or_the_other() -> None:
    ones, zeros = torch.ones(1, 2, 4, 3), torch.zeros(1, 2, 4, 3)
    fine = torch.tensor([[True, False, False, True]])
    ((keys, values),) = bench.where(fine, [(ones, ones)], [(zeros, zeros)])
    assert keys[0, 1, :, 2].tolist() == values[0, 0, :, 0].tolist() == [1, 0, 0, 1]


def test_chosen_tokens_keep_their_order() -> None:
    keys = torch.arange(4.0)[None, None, :, None].expand(1, 2, 4, 3)
    chosen = torch.tensor([3, 0]).expand(1, 1, 2, 2)
    ((found, _),) = bench.kept([(keys, keys)], chosen)
    assert found[0, 1, :, 0].tolist() == [0, 3]


def test_tails_of_turns_are_blocks_at_their_ends() -> None:
    found = bench.tails(torch.zeros(1), 4)[0].nonzero().flatten().tolist()
    assert found == [n for n in range(bench.PREFIX) if n % bench.TURN >= bench.TURN - bench.BLOCK]


def test_an_exact_window_is_exact_and_counts_as_such() -> None:
    import numpy as np

    x = bench_quality.rounded(np.random.default_rng(0).standard_normal((32, 2, 64)).astype("f4"))
    way = bench_quality.Exact(bench_quality.Grouped(2, 32, 64), 72)
    nbytes, found = way(x, 0, 1, 64)
    assert (found[8:] == x[8:]).all() and (found[:8] != x[:8]).any()
    assert nbytes == 2 * 24 * 128 + 8 * 128 // 4 + 8 * 2 * 4
    assert way(x, 0, 1, 72)[0] == 2 * x.size and way(x, 0, 1, 0)[0] < x.size


def test_bits_between_two_levels_are_interpolated() -> None:
    curve = [(4.0, 1e-3), (2.0, 1e-1)]
    assert bench_quality.at_equal_bits(curve, 3.0) == pytest.approx(1e-2)
    assert bench_quality.at_equal_bits(curve, 5.0) == pytest.approx(1e-4)


def test_a_tiny_model_is_measured_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = (("PREFIX", 64), ("NEXT", 16), ("SEQUENCE", 81), ("TRIALS", 4))
    for name, value in small:
        monkeypatch.setattr(measuring, name, value)
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "TURN", 32)
    path = save_model(tmp_path / "tiny")
    (path / "calib.txt").write_text(words(1200))
    (path / "valid.txt").write_text(words(700)[::-1])
    out = tmp_path / "out.json"
    arguments = [
        "bench",
        "--model",
        str(path),
        "--sequences",
        "4",
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    bench.main()
    rows = {row["name"]: row["value"] for row in json.loads(out.read_text())["rows"]}
    assert rows["q2, the last 16 tokens computed again: KL"] > 0
    windows = [rows[f"q2, the last {window} tokens exact: KL"] for window in (16, 32, 64)]
    assert rows["q2: KL"] > windows[-1] == 0 and windows[0] > 0
    assert {"StreamingLLM drops tokens: KL of plain ecsq's", "ecsq-hi KL"} <= set(rows)


def test_a_prefix_with_all_of_its_tokens_gives_the_same_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "PREFIX", 64)
    model = bench.Shortened(save_model(tmp_path / "tiny"), "cpu")
    ids = torch.randint(0, 50, (2, 80), generator=torch.Generator().manual_seed(1))
    prefix = model.prefix(ids[:, :64])
    everything = torch.arange(64).expand(len(prefix), 2, prefix[0][0].shape[1], 64)
    same = model.scores(bench.kept(prefix, everything), ids[:, 64:])
    assert torch.equal(same, bench.Model.scores(model, prefix, ids[:, 64:]))
    fewer = model.scores(bench.kept(prefix, everything[..., 1:]), ids[:, 64:])
    assert fewer.shape == same.shape and not torch.allclose(fewer, same)
