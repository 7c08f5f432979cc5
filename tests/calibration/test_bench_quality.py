"""The calculations of the quality benchmark, with generated values and with a tiny model."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch and transformers: make test-engines")
pytest.importorskip("transformers", reason="needs torch and transformers: make test-engines")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from functools import partial

import bench_quality as bench
from draw_quality import drawn
from kvtier_daemon.calibration import measuring
from kvtier_daemon.codec import profile as files
from kvtier_daemon.codec.calibrated import Calibrated
from kvtier_daemon.codec.table import BY_NAME
from support.profiles import profile_of
from support.tiny_models import LATENT_KINDS, save_model, words

pytestmark = pytest.mark.filterwarnings("default")  # warnings of the libraries
N = 256 * 2 * 64


def values_of(seed: int = 0) -> bench.Floats:
    drawn = np.random.default_rng(seed).standard_normal((256, 2, 64)).astype(np.float32)
    return bench.rounded(drawn * 2.0 ** np.linspace(-3, 3, 64, dtype=np.float32))


@pytest.mark.parametrize(
    ("way", "bits"),
    [
        (bench.raw, (16, 16)),
        (bench.Grouped(8, 256, 64), (8 + 16 / 256, 8 + 16 / 64)),
        (bench.Grouped(4, 256, 64), (4 + 32 / 256, 4 + 32 / 64)),
        (bench.Grouped(2, 32, 32), (3, 3)),
        (bench.Ours(BY_NAME["q8"]), (8 + 16 / 256 + 128 / N, 8 + 16 / 64 + 128 / N)),
        (bench.Ours(BY_NAME["q4"]), (4 + 32 / 256 + 128 / N, 4 + 32 / 64 + 128 / N)),
        (bench.Ours(BY_NAME["q2"]), (2 + 32 / 256 + 128 / N, 2 + 32 / 64 + 128 / N)),
        (bench.Ours(BY_NAME["e5m2"]), (8 + 128 / N, 8 + 128 / N)),
        (bench.Ours(BY_NAME["nvfp4"]), (4 + 8 / 16 + 160 / N, 4 + 8 / 16 + 160 / N)),
        (bench.ByToken(BY_NAME["nvfp4"]), (4 + 8 / 16 + 160 / N, 4 + 8 / 16 + 160 / N)),
        (bench.Ours(BY_NAME["mxfp4"]), (4 + 8 / 32 + 128 / N, 4 + 8 / 32 + 128 / N)),
        (bench.Turbo(3), (3 + 16 / 64, 3 + 16 / 64)),
        (bench.Fp8(False), (8, 8)),
        (bench.Fp8(True), (8 + 32 / N, 8 + 32 / N)),
    ],
)
def test_bytes_of_a_fixed_rate_have_the_stated_size(
    way: bench.Way, bits: tuple[float, float]
) -> None:
    for part in range(2):
        nbytes, _ = way(values_of(), 0, part, 0)
        assert abs(8 * nbytes / N - bits[part]) < 1e-9


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_groups_are_within_half_of_their_own_step(bits: int) -> None:
    x = values_of()
    for part, axis in ((0, 0), (1, 2)):
        _, back = bench.Grouped(bits, 256, 64)(x, 0, part, 0)
        if bits == 8:
            step = np.abs(x).max(axis, keepdims=True) / 127
        else:
            step = (x.max(axis, keepdims=True) - x.min(axis, keepdims=True)) / ((1 << bits) - 1)
        # Steps and least values are rounded to bf16, as are the decoded values.
        assert (
            np.abs(back - x) <= 0.5 * step + np.abs(x) / 128 + step / 20 * (1 << bits) / 16
        ).all()
        assert np.abs(back - x).max() > 0.4 * step.max()


def test_fp8_has_three_bits_of_mantissa() -> None:
    _, back = bench.Fp8(False)(np.array([1.0625, 1.07, 3.9, 500, -1000], "f4"), 0, 0, 0)
    assert back.tolist() == [1.0, 1.125, 4.0, 448, -448]
    _, back = bench.Fp8(True)(np.array([896, 2.125, 0], "f4"), 0, 0, 0)
    assert back.tolist() == [896, 2.0, 0]


@pytest.mark.parametrize(("bits", "error"), [(4, 0.0975), (3, 0.186), (2, 0.343)])
def test_turbo_has_the_error_of_the_best_quantizer_of_normal_values(
    bits: int, error: float
) -> None:
    """Whatever the deviations of the channels are."""
    x = values_of()
    _, back = bench.Turbo(bits)(x, 0, 0, 0)
    found = np.linalg.norm(back - x, axis=-1) / np.linalg.norm(x, axis=-1)
    assert error * 0.9 < np.sqrt(np.mean(found**2)) < error * 1.1


def test_released_cachegen_stores_a_table_for_each_channel_of_a_chunk() -> None:
    x = np.ones((256, 1, 4), np.float32)
    nbytes, back = bench.Released(32)(x, 0, 0, 0)
    # Only one number: no entropy; a byte to end each channel's stream.
    assert nbytes == 2 * 256 + 4 * (1 + 4 + 66) and (back == 1).all()
    x[::2, :, 1] = -1  # one bit per token
    nbytes, back = bench.Released(32)(x, 0, 0, 0)
    assert nbytes == 2 * 256 + 4 * (1 + 4 + 66) + 32 and (back == x).all()
    _, back = bench.Released(16)(np.array([[[7.0, 3.4, -0.6]]], "f4"), 0, 0, 0)
    assert back.ravel().tolist() == [7, 3, -1]


def test_a_part_that_does_not_shrink_counts_as_raw() -> None:
    profile = profile_of(heads=2, dim=6)
    level = files.Level(bytes([160] * 12), bytes([64] * 4))
    part = msgspec.structs.replace(profile.layers[0][0], ecsq=(level,) * 3)
    profile = msgspec.structs.replace(profile, layers=((part,), *profile.layers[1:]))
    way = bench.Ours(partial(Calibrated, "ecsq")(profile, "hi"))
    x = np.random.default_rng(0).standard_normal((600, 2, 6)).astype(np.float32)
    nbytes, back = way(bench.rounded(x), 0, 0, 0)
    assert nbytes < x.size and (back != x).any()
    x = bench.rounded(x[:2])
    nbytes, back = way(x, 0, 0, 0)
    assert nbytes == 2 * x.size and (back == x).all()


def test_errors_are_relative_and_kept_apart() -> None:
    import torch

    def halved(x: bench.Floats, layer: int, part: int, position: int) -> tuple[float, bench.Floats]:
        assert len(x) == 16 and position in (0, 16)
        return x.size / 2, x * np.float32(0.5 if part == 0 else 0.75)

    found = bench.Found(halved, 16)
    both = torch.ones(2, 1, 32, 4), torch.full((2, 1, 32, 4), 3.0)
    ((k, v),) = found.replace([both])
    assert found.bits == 4 and (found.error(0), found.error(1)) == (0.5, 0.25)
    assert (k == 0.5).all() and (v == 2.25).all() and k.shape == both[0].shape


def test_equal_loss_is_interpolated_only_between_two_points() -> None:
    curve = [(4.0, 1e-3), (2.0, 1e-1), (3.0, 1e-2)]
    assert bench.at_equal_loss(curve, 1e-2) == pytest.approx(3)
    assert bench.at_equal_loss(curve, 10**-2.5) == pytest.approx(3.5)
    assert bench.at_equal_loss(curve, 2e-1) is None
    assert bench.at_equal_loss(curve, 1e-4) is None


def test_levels_are_held_to_their_bars() -> None:
    found = bench.Found(bench.raw, 16, nbytes=3.0, elements=8, squares=[1.0, 1.0])  # 3 bits
    assert [row.ok for row in bench.judged("ecsq-hi", found, 1e-3, 0.004)] == [True, True, True]
    assert [row.ok for row in bench.judged("ecsq-mid", found, 6e-3, -0.008)] == [False] * 3
    assert [row.ok for row in bench.judged("cachegen-mid", found, 1e-2, 0.5)] == [True, True]
    row, apart = bench.judged("q4", found, 0.5, 1.0)
    assert row.ok is None and row.value == pytest.approx(16 / 3)
    assert (apart.ok, apart.name, apart.value) == (None, "q4 KL", 0.5)


@pytest.mark.parametrize("kind", LATENT_KINDS)
def test_a_model_of_latents_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model(tmp_path / "tiny", kind)
    monkeypatch.setattr(sys, "argv", ["bench", "--model", str(path), "--device", "cpu"])
    with pytest.raises(SystemExit, match=r"tiny: .* caches latents \(MLA\): `kvtier calibrate`"):
        bench.main()


def test_a_tiny_model_is_measured_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SEQUENCE", 81)
    for name, value in (("PREFIX", 64), ("NEXT", 16), ("SEQUENCE", 81), ("TRIALS", 4)):
        monkeypatch.setattr(measuring, name, value)
    path = save_model(tmp_path / "tiny")
    (path / "calib.txt").write_text(words(1200))
    (path / "valid.txt").write_text(words(700)[::-1])
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = ["bench", "--model", str(path), "--sequences", "4", "--block-tokens", "32",
                 "--device", "cpu", "--out", str(out), "--plot", str(plot)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    bench.main()
    result = json.loads(out.read_text())
    rows = {row["name"]: row for row in result["rows"]}
    about = result["environment"]
    assert (about["model"], about["calibrated"], about["scored"]) == (
        "tiny",
        "calib.txt",
        "valid.txt",
    )
    assert about["sequences"] == 4 and about["perplexity"] > 1
    assert rows["raw"]["more"]["KL"] == 0 and rows["raw"]["value"] == 1
    order = ["q8", "q4", "q2"]
    assert [rows[n]["more"]["KL"] for n in order] == sorted(rows[n]["more"]["KL"] for n in order)
    for codec in ("ecsq", "cachegen"):
        bits = [rows[f"{codec}-{level}"]["more"]["bits"] for level in ("hi", "mid", "lo")]
        assert bits == sorted(bits, reverse=True) and 0 < bits[0] < 16
    picture = ET.fromstring(plot.read_text())
    texts = {element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert {"q8", "ecsq-lo", "cachegen-hi", "fp8 scaled"} <= texts and "raw" not in texts
    assert drawn(result["rows"], "tiny") == plot.read_text()
