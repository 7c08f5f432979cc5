"""The K and V with which codecs are measured, from a generated encoder."""

from __future__ import annotations

import argparse
import json
import math
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import bench_codec as bench
from kv import Bert, Floats

LAYERS, WIDTH, HEADS, INNER, POSITIONS = 2, 256, 8, 512, 512
WORDS = ["[UNK]", "un", "##aff", "##able", "able", "!", "?", "a", "##a"]


def encoder(folder: Path) -> dict[str, Floats]:
    """Random weights; the first layer's queries are zero, so that every token attends equally to all
    others."""
    chance = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(WORDS), WIDTH),
        "embeddings.position_embeddings.weight": (POSITIONS, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        "embeddings.LayerNorm.weight": (WIDTH,),
        "embeddings.LayerNorm.bias": (WIDTH,),
    }
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}."
        for part, out, into in (
            ("attention.self.query", WIDTH, WIDTH), ("attention.self.key", WIDTH, WIDTH),
            ("attention.self.value", WIDTH, WIDTH), ("attention.output.dense", WIDTH, WIDTH),
            ("intermediate.dense", INNER, WIDTH), ("output.dense", WIDTH, INNER),
        ):  # fmt: skip
            shapes |= {f"{name}{part}.weight": (out, into), f"{name}{part}.bias": (out,)}
        for part in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"{name}{part}.weight": (WIDTH,), f"{name}{part}.bias": (WIDTH,)}
    weights = {
        name: chance.standard_normal(shape).astype("<f4") / 8 for name, shape in shapes.items()
    }
    weights["encoder.layer.0.attention.self.query.weight"][:] = 0
    weights["encoder.layer.0.attention.self.query.bias"][:] = 0
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = struct.pack("<2q", 0, 1)
    entries["embeddings.position_ids"] = {"dtype": "I64", "shape": [1, 2], "data_offsets": [0, 16]}
    for name, values in weights.items():
        ends = [len(data), len(data) + values.nbytes]
        entries[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": ends}
        data += values.tobytes()
    header = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    config = {
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": WIDTH,
        "max_position_embeddings": POSITIONS, "layer_norm_eps": 1e-12,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return weights


def test_words_are_split_into_the_longest_known_pieces_or_are_unknown(tmp_path: Path) -> None:
    encoder(tmp_path)
    found = Bert(tmp_path).tokens("Unaffable able! unable, a? aab")
    pieces = ["un", "##aff", "##able", "able", "!", "un", "##able", "[UNK]", "a", "?", "[UNK]"]
    assert found == [WORDS.index(piece) for piece in pieces]


def test_an_encoders_k_and_v_equal_its_definition(tmp_path: Path) -> None:
    weights = {name: values.astype(float) for name, values in encoder(tmp_path).items()}
    tokens = [1, 2, 7, 4, 4]

    def linear(x: Floats, name: str) -> Floats:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def normed(x: Floats, name: str) -> Floats:
        around = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
        return around * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    word, position, kind = (
        weights[f"embeddings.{of}_embeddings.weight"] for of in ("word", "position", "token_type")
    )
    x = normed(word[tokens] + position[:5] + kind[0], "embeddings.LayerNorm")
    layers = list(Bert(tmp_path).kv(tokens))
    assert len(layers) == LAYERS
    name = "encoder.layer.0."
    values = linear(x, name + "attention.self.value")
    np.testing.assert_allclose(layers[0][0], linear(x, name + "attention.self.key"), atol=1e-5)
    np.testing.assert_allclose(layers[0][1], values, atol=1e-5)
    mixed = np.tile(values.mean(0), (5, 1))
    x = normed(
        x + linear(mixed, name + "attention.output.dense"), name + "attention.output.LayerNorm"
    )
    inner = linear(x, name + "intermediate.dense")
    inner *= (1 + np.vectorize(math.erf)(inner / 2**0.5)) / 2
    x = normed(x + linear(inner, name + "output.dense"), name + "output.LayerNorm")
    name = "encoder.layer.1.attention.self."
    np.testing.assert_allclose(layers[1][0], linear(x, name + "key"), atol=1e-4)
    np.testing.assert_allclose(layers[1][1], linear(x, name + "value"), atol=1e-4)


def test_a_block_contains_all_layers_of_half_of_the_tokens_read_together(tmp_path: Path) -> None:
    encoder(tmp_path)
    text = tmp_path / "text"
    text.write_text("able! a " * 800)
    found = bench.real_minilm(tmp_path, text, 2)
    model = Bert(tmp_path)
    tokens = model.tokens(text.read_text())
    parts = found.reshape(2, 2, LAYERS, WIDTH // 128, 2, 256, 128)
    for sequence in (0, 1):
        whole = model.kv(tokens[512 * sequence : 512 * (sequence + 1)])
        for layer, pair in enumerate(whole):
            for kind, values in enumerate(pair):
                for half in (0, 1):
                    for piece in (0, 1):
                        rows = values[
                            256 * half : 256 * (half + 1), 128 * piece : 128 * (piece + 1)
                        ]
                        assert (parts[sequence, half, layer, piece, kind] == rows).all()


def test_minilm_is_measured_if_it_is_present_and_otherwise_reported_as_omitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder(tmp_path)
    (tmp_path / "README.md").write_text("able! a " * 800)
    arguments = argparse.Namespace(
        model=None, text=None, profile=None, minilm=tmp_path, codecs=["zstd", "r32", "q2", "q8", "ecsq-hi"]
    )  # fmt: skip
    *drawn, found = bench.inputs(arguments)
    assert {one.name for one in drawn} == {"drawn"} and "left out" not in capsys.readouterr().out
    assert (found.name, found.codecs) == ("minilm", ["r32", "q8"])
    assert (found.head, found.layers) == (WIDTH // HEADS, LAYERS * WIDTH // 128)
    arguments.minilm = None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [one.name for one in bench.inputs(arguments)] == ["drawn"] * 5
    assert "minilm: not here, so left out" in capsys.readouterr().out
