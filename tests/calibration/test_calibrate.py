"""`kvtier calibrate` with generated models."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.layout import KvSpec
from kvtier_daemon.cli import main
from kvtier_daemon.codec import profile as files
from kvtier_daemon.codec.calibrated import Calibrated
from kvtier_daemon.codec.losses import Loss, Losses
from models.kernels import lossy
from support.tiny_models import KINDS, LATENT, LATENT_KINDS, TURNED, save_model, words


@pytest.fixture
def kvtier(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["calibrate", *map(str, arguments)])
        told = capsys.readouterr()
        return int(left.value.code or 0), told.out, told.err

    return run


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with files that resemble a model, and a text."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "text").write_text(words(1000))
    return tmp_path


def test_without_torch_the_error_names_the_packages_to_install(kvtier, here, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("measuring", "model"):
        monkeypatch.delitem(sys.modules, f"kvtier_daemon.calibration.{name}", raising=False)
    code, out, said = kvtier("--model", here / "model", "--text", here / "text")
    assert code == 2 and not out
    assert "pip install 'torch>=2.6' 'transformers>=5' 'numpy>=2'" in said and said.count("\n") == 1


def test_missing_input_is_named_before_anything_is_loaded(kvtier, here, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    model, text = here / "model", here / "text"
    (here / "latin").write_bytes(b"\xff\xfe\xff")
    for named, arguments in (
        ("none", ("--model", here / "none", "--text", text)),
        ("nothing", ("--model", model, "--text", here / "nothing")),
        ("latin", ("--model", model, "--text", here / "latin")),
        ("away", ("--model", model, "--text", text, "--out", here / "away" / "out")),
    ):
        code, _, said = kvtier(*arguments)
        assert code == 2 and named in said and said.count("\n") == 1


def test_an_unwritable_target_is_reported_before_anything_is_loaded(
    kvtier, here, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (here / "folder").mkdir()
    before = sorted(here.iterdir())
    for out, told in (
        (here / "folder", "is a directory"),
        (here / ("n" * 256), "File name too long"),
        (Path("/proc/out"), "No such file"),
        ("", "is a directory"),
    ):
        code, _, said = kvtier("--model", here / "model", "--text", here / "text", "--out", out)
        assert code == 2 and told in said and said.count("\n") == 1
    assert sorted(here.iterdir()) == before


def test_a_profile_is_written_completely_or_not_at_all(here: Path, monkeypatch) -> None:
    from kvtier_daemon.cli.calibrate import _write

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    target = here / "out.kvtp"
    target.write_bytes(b"before")
    before = sorted(here.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _write(target, b"after")
    assert target.read_bytes() == b"before" and sorted(here.iterdir()) == before
    number = target.stat().st_ino
    _write(target, b"after")
    assert target.stat().st_ino != number  # another, complete file has this name now
    assert target.read_bytes() == b"after" and sorted(here.iterdir()) == before


# --- with torch --------------------------------------------------------------------------------------

try:
    import torch
    import transformers  # noqa: F401

    from kvtier_daemon.calibration import measuring
    from kvtier_daemon.calibration.model import Cached, Model, chunks, turns
except ImportError:
    torch = None  # type: ignore[assignment]

needs_torch = pytest.mark.skipif(
    torch is None, reason="needs torch and transformers: make test-engines"
)
QUIET = pytest.mark.filterwarnings("default")  # warnings of the libraries


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences, and loss limits for untrained models."""
    monkeypatch.setattr(measuring, "PREFIX", 64)
    monkeypatch.setattr(measuring, "NEXT", 16)
    monkeypatch.setattr(measuring, "SEQUENCE", 81)
    monkeypatch.setattr(measuring, "TRIALS", 8)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield save_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@needs_torch
@QUIET
@pytest.mark.parametrize("kind", KINDS)
def test_k_rotated_back_equals_k_before_the_rotation(kind: str, tmp_path: Path) -> None:
    model = Model(save_model(tmp_path / "model", kind), "cpu")
    model.kept = torch.float32
    seen: list[Any] = []
    name = KINDS[kind][2]
    for module_name, module in model.module.named_modules():
        if module_name.endswith(name):
            module.register_forward_hook(lambda _, __, out: seen.append(out.detach().clone()))
    ids = torch.arange(160).reshape(2, 80) * 7 % 251
    rotations = model.rotations(ids)
    seen.clear()
    prefix = model.prefix(ids, 37)
    assert len(seen) == len(prefix) == 3
    for (keys, _), before, rotation in zip(prefix, seen, rotations, strict=True):
        assert rotation is not None
        wanted = before
        if before.dim() == 3:
            wanted = before.unflatten(-1, (keys.shape[1], -1))
        if wanted.shape[1] != keys.shape[1]:
            wanted = wanted.transpose(1, 2)
        assert torch.allclose(rotation.turn(keys, 37, back=True), wanted, atol=2e-4, rtol=1e-3)
        assert not torch.allclose(keys, wanted, atol=2e-2, rtol=1e-2)
        assert rotation.interleaved == (kind == "cohere")
        assert len(rotation.angles) == (3 if kind == "stablelm" else keys.shape[-1] // 2)
    different = {tuple(rotation.angles.tolist()) for rotation in rotations}
    assert len(different) == (2 if kind == "gemma3" else 1)


@needs_torch
@QUIET
def test_a_model_with_other_position_embeddings_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    save_model(tmp_path)  # for its tokenizer
    GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=2, n_positions=512,
                   initializer_range=0.4)
    ).save_pretrained(tmp_path)  # fmt: skip
    with pytest.raises(ConfigError, match="layer 0: K is rotated in a way that is not known"):
        Model(tmp_path, "cpu").rotations(torch.arange(64)[None])


@needs_torch
@QUIET
def test_rotations_of_a_profile_equal_those_of_the_model(llama: Path) -> None:
    model = Model(llama, "cpu")
    (rotation, *_) = model.rotations(torch.arange(64)[None])
    assert rotation is not None
    rope = lossy.Rope(np.array(turns(rotation.angles), np.uint64), rotation.interleaved)
    x = torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(1))
    mine = lossy.rotated(x[0].transpose(0, 1).numpy(), rope, 1000)
    assert np.abs(mine - rotation.turn(x, 1000)[0].transpose(0, 1).numpy()).max() < 1e-5


@needs_torch
@QUIET
def test_a_calibration_is_deterministic_and_reports_its_loss(
    kvtier, llama: Path, tmp_path: Path, small: None
) -> None:
    (tmp_path / "text").write_text(words(1500))
    texts, reports = [], []
    for number in range(2):
        out = tmp_path / f"{number}.kvtp"
        code, told, said = kvtier(
            "--model", llama, "--text", tmp_path / "text", "--out", out, "--tokens", 5000,
            "--device", "cpu", "--weights", "rev:1", "--json",
        )  # fmt: skip
        assert code == 0, said
        texts.append(out.read_bytes())
        reports.append(json.loads(told))
    assert texts[0] == texts[1]
    profile, report = files.decode(texts[0]), reports[0]
    assert (profile.model, profile.weights, profile.dtype) == ("tiny-llama", "rev:1", "bfloat16")
    assert report["name"] == profile.name.hex() and report["bytes"] == len(texts[0])
    assert profile.ropes[0].theta == 10_000.0 and profile.ropes[0].dims == 16
    assert [[part.rope for part in layer] for layer in profile.layers] == [[0, -1]] * 3
    levels = {one["codec"]: one for one in report["levels"]}
    for codec, losses in (
        ("ecsq", measuring.ECSQ_LOSS), ("cachegen", measuring.CACHEGEN_LOSS),
    ):  # fmt: skip
        assert levels[f"{codec}-hi"]["bits"] > levels[f"{codec}-mid"]["bits"]
        assert levels[f"{codec}-mid"]["bits"] > levels[f"{codec}-lo"]["bits"]
        for level, loss in losses.items():
            assert 0.5 * loss < levels[f"{codec}-{level}"]["divergence"] <= loss
    _check_what_was_said(llama, profile, levels, (tmp_path / "text").read_text())


@needs_torch
@QUIET
@pytest.mark.parametrize("kind", LATENT_KINDS)
def test_latents_are_calibrated_and_their_rope_part_stays_exact(
    kvtier, kind: str, tmp_path: Path, small: None
) -> None:
    text, out = words(1500), tmp_path / "out.kvtp"
    (tmp_path / "text").write_text(text)
    path = save_model(tmp_path / "latents", kind)
    code, told, said = kvtier(
        "--model", path, "--text", tmp_path / "text", "--out", out, "--tokens", 5000, "--device", "cpu",
        "--json",
    )  # fmt: skip
    assert code == 0, said
    profile = files.decode(out.read_bytes())
    shapes = [[(p.heads, p.dim, p.exact_dims, p.rope) for p in layer] for layer in profile.layers]
    assert shapes == [[(1, LATENT + TURNED, TURNED, -1)]] * 3
    spec = KvSpec.mla(
        model="latents", layers=3, latent_dim=LATENT, rope_dim=TURNED, dtype="bfloat16", block_tokens=16,
        weights="rev:1",
    )  # fmt: skip
    for codec in ("ecsq-hi", "cachegen-lo"):
        assert isinstance(Losses([("latents", codec)], [profile]).find(spec), Loss)
    levels = {one["codec"]: one for one in json.loads(told)["levels"]}
    assert levels["ecsq-hi"]["bits"] > levels["ecsq-mid"]["bits"] > levels["ecsq-lo"]["bits"]
    _check_what_was_said(path, profile, levels, text)


@needs_torch
@QUIET
def test_latents_that_are_cached_as_k_and_v_are_refused(
    kvtier, llama: Path, tmp_path: Path
) -> None:
    """As older models in transformers do."""
    config = json.loads((llama / "config.json").read_text())
    path = tmp_path / "model"
    path.mkdir()
    for one in llama.iterdir():
        (path / one.name).symlink_to(one)
    (path / "config.json").unlink()
    (path / "config.json").write_text(
        json.dumps(config | {"kv_lora_rank": LATENT, "qk_rope_head_dim": TURNED})
    )
    (tmp_path / "text").write_text(words(4000))
    code, _, said = kvtier("--model", path, "--text", tmp_path / "text", "--out", tmp_path / "out")
    assert code == 2 and "layer 0" in said and "MLA" in said and "\n" not in said.strip()


def _check_what_was_said(
    path: Path, profile: files.Profile, levels: dict[str, Any], text: str
) -> None:
    """The codecs' real bytes have the loss in the report."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from bench_quality import Found, K, Ours

    class Latents(Found):
        def replace(self, prefix: Cached) -> Cached:
            return [
                self._latent(latent, turned, layer) for layer, (latent, turned) in enumerate(prefix)
            ]

        def _latent(self, latent: Any, turned: Any, layer: int) -> tuple[Any, Any]:
            back = self._replaced(torch.cat([latent, turned], -1), layer, K)
            assert (back[..., LATENT:] == turned).all() and (back[..., :LATENT] != latent).any()
            return back[..., :LATENT], turned

    model = Model(path, "cpu")
    ids = chunks(model.tokens(text), measuring.SEQUENCE, 5000 // measuring.SEQUENCE)
    tried = [number * len(ids) // 8 for number in range(8)]
    trial = measuring.Trial(model, ids[tried])
    for name, level in levels.items():
        codec, _, at = name.partition("-")
        make = {"ecsq": partial(Calibrated, "ecsq"), "cachegen": partial(Calibrated, "cachegen")}[
            codec
        ]
        found = (Found if len(profile.layers[0]) == 2 else Latents)(Ours(make(profile, at)), 64)
        apart, change = trial.run(found.replace)
        assert abs(apart / level["divergence"] - 1) < 0.05
        assert abs(change - level["perplexity_change"]) < 2e-3


@needs_torch
@QUIET
def test_a_model_that_can_not_be_loaded_or_run_is_reported_in_one_line(
    kvtier, llama: Path, tmp_path: Path, small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    (tmp_path / "text").write_text(words(1500))

    def copied(name: str, **changes: object) -> Path:
        path = shutil.copytree(llama, tmp_path / name)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | changes))
        return path

    cut = copied("cut")
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    nan = copied("nan")
    module = transformers.AutoModelForCausalLM.from_pretrained(llama)
    module.model.layers[1].self_attn.k_proj.weight.data[0, 0] = float("nan")
    module.save_pretrained(nan)
    state = copied("state")
    transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=256, hidden_size=32, num_hidden_layers=2, state_size=4)
    ).save_pretrained(state)
    cases = (
        (cut, "cpu", "cut: not a causal language model: "),
        (copied("kind", model_type="t5"), "cpu", "kind: not a causal language model: "),
        (copied("type", dtype="nothing"), "cpu", "type: not a causal language model: "),
        (copied("count", num_hidden_layers="x"), "cpu", "count: not a causal language model: "),
        (copied("none", num_hidden_layers=0), "cpu", "no layer has K and V"),
        (save_model(tmp_path / "few", vocab_size=100), "cpu", "few: cannot run the model: "),
        (nan, "cpu", "nan: cannot run the model: "),
        (state, "cpu", "state: layers keep a state (linear_attention)"),
        (llama, "nowhere", "--device nowhere: "),
        (llama, "meta", "--device meta: "),
        (llama, "cuda:77", "--device cuda:77: "),
    )
    capsys.readouterr()  # the output of saving them
    for path, device, told in cases:
        code, _, said = kvtier(
            "--model", path, "--text", tmp_path / "text", "--out", tmp_path / "out", "--tokens", 4096,
            "--device", device,
        )  # fmt: skip
        assert code == 2 and told in said, said
        assert "\n" not in said.strip() and len(said) < 500 and "bug" not in said
    assert not list(tmp_path.glob("*out*"))


@needs_torch
@QUIET
def test_an_interrupted_calibration_leaves_nothing(
    kvtier, llama: Path, tmp_path: Path, small: None, monkeypatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "text").write_text(words(1500))
    monkeypatch.setattr(measuring, "_search", interrupted)
    code, _, _ = kvtier(
        "--model", llama, "--text", tmp_path / "text", "--out", tmp_path / "out", "--tokens", 4096
    )
    assert code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@needs_torch
@QUIET
def test_a_text_that_is_too_short_is_refused(kvtier, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(words(50))
    code, _, said = kvtier("--model", llama, "--text", tmp_path / "text", "--out", tmp_path / "out")
    assert code == 2 and "at least" in said and "are needed" in said
    assert not (tmp_path / "out").exists()


@needs_torch
@QUIET
def test_gradients_predict_the_effect_of_errors(llama: Path, small: None) -> None:
    """Half of the squares times small errors is the KL divergence that they cause."""
    model = Model(llama, "cpu")
    model.kept = torch.float32
    ids = chunks(model.tokens(words(3000)), 81, 24)
    prefix, chance = model.prefix(ids[:, :64]), torch.Generator().manual_seed(3)
    costs = [0.0, 0.0]
    for _ in range(12):
        for pair in model.sensitivity(prefix, ids[:, 64:80], chance):
            for part, slope in enumerate(pair):
                costs[part] += float(slope.double().square().mean((0, 2)).sum()) / 12
    with torch.no_grad():
        base = model.scores(prefix, ids[:, 64:80])
        for part in range(2):
            size = 1e-3
            apart = []
            for _ in range(8):
                changed = [
                    tuple(
                        x + size * torch.randn(x.shape, generator=chance) if at == part else x
                        for at, x in enumerate(pair)
                    )
                    for pair in prefix
                ]
                found = model.scores(changed, ids[:, 64:80])  # type: ignore[arg-type]
                apart.append(measuring.divergence(base, found))
            # An error in each of 64 tokens, and a mean over 16 predictions.
            predicted = 0.5 * costs[part] * size**2 * 64 / 16
            assert 0.6 < float(np.mean(apart)) / predicted < 1.6
