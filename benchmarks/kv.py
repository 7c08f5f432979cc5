"""K and V to measure codecs on: a small Llama's own or MiniLM's, by a forward pass in NumPy, or drawn."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint16]


def bf16(values: Floats) -> Words:
    """Rounded to the nearest bf16, ties to even; as bits."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def wide(words: Words) -> Floats:
    return (words.astype(np.uint32) << 16).view(np.float32)


def synthetic(elements: int, seed: int = 0) -> Floats:
    """Normal values, each channel of 128 with a deviation of its own: about 2.7 bits of exponent, as measured
    on trained K/V."""
    chance = np.random.default_rng(seed)
    deviation = np.exp(chance.normal(0.0, 0.5, 128)).astype(np.float32)
    drawn = chance.standard_normal((-(-elements // 128), 128), np.float32) * deviation
    return drawn.reshape(-1)[:elements]


def exponent_bits(words: Words) -> float:
    """Entropy of the exponents."""
    counts = np.bincount((words >> 7) & 0xFF, minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


class Llama:
    """A Llama-like checkpoint in Hugging Face's form (safetensors, bf16), run in float32."""

    def __init__(self, path: Path) -> None:
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.vocabulary: dict[str, int] = json.loads((path / "tokenizer.json").read_text())[
            "model"
        ]["vocab"]
        self.weights: dict[str, Floats] = {}
        for file in sorted(path.glob("*.safetensors")):
            self.weights.update(_tensors(file.read_bytes()))

    def tokens(self, text: str, count: int) -> list[int]:
        """The longest known piece at a time: near enough to the merges for K/V that look real."""
        letters = "".join(_LETTERS[byte] for byte in text.encode()[: 8 * count])
        longest = max(map(len, self.vocabulary))
        found: list[int] = []
        at = 0
        while at < len(letters) and len(found) < count:
            size = min(longest, len(letters) - at)
            while letters[at : at + size] not in self.vocabulary:
                size -= 1
            found.append(self.vocabulary[letters[at : at + size]])
            at += size
        return found

    def kv(self, tokens: list[int]) -> Iterator[tuple[Floats, Floats]]:
        """K (after RoPE) and V of each layer, `[token, channel]`."""
        c, w = self.config, self.weights
        count, heads, shared, dim = (
            len(tokens), c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"],
        )  # fmt: skip
        theta = c.get("rope_parameters", c).get("rope_theta", 10_000.0)
        angles = np.arange(count)[:, None] / theta ** (np.arange(0, dim, 2) / dim)
        cos, sin = np.cos(angles)[:, None].astype("f4"), np.sin(angles)[:, None].astype("f4")

        def turned(x: Floats) -> Floats:
            low, high = x[..., : dim // 2], x[..., dim // 2 :]
            return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

        def normed(x: Floats, name: str) -> Floats:
            mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
            scaled: Floats = x / np.sqrt(mean + c["rms_norm_eps"]) * w[name]
            return scaled

        x = w["model.embed_tokens.weight"][tokens]
        unseen = np.triu(np.full((count, count), -np.inf, np.float32), 1)
        for layer in range(c["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            inner = normed(x, name + "input_layernorm.weight")
            q, k, v = (
                (inner @ w[f"{name}self_attn.{part}_proj.weight"].T).reshape(count, -1, dim)
                for part in "qkv"
            )
            q, k = turned(q), turned(k)
            yield k.reshape(count, -1), v.reshape(count, -1)
            k, v = (np.repeat(part, heads // shared, axis=1).transpose(1, 0, 2) for part in (k, v))
            scores = q.transpose(1, 0, 2) @ k.transpose(0, 2, 1) / np.float32(dim**0.5) + unseen
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = (scores / scores.sum(-1, keepdims=True) @ v).transpose(1, 0, 2)
            x = x + mixed.reshape(count, -1) @ w[name + "self_attn.o_proj.weight"].T
            inner = normed(x, name + "post_attention_layernorm.weight")
            gate = inner @ w[name + "mlp.gate_proj.weight"].T
            up = inner @ w[name + "mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[name + "mlp.down_proj.weight"].T


class Bert:
    """A BERT-like encoder in Hugging Face's form (safetensors, float32), as MiniLM is: all tokens see each
    other, and K has no RoPE."""

    def __init__(self, path: Path) -> None:
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        words = (path / "vocab.txt").read_text().splitlines()
        self.vocabulary = {word: number for number, word in enumerate(words)}
        self.weights = _tensors((path / "model.safetensors").read_bytes())

    def tokens(self, text: str) -> list[int]:
        """WordPiece: of each word the longest known piece at a time, all but the first with `##` before."""
        found: list[int] = []
        for word in re.findall(r"\w+|[^\w\s]", text.lower()):
            pieces: list[int] = []
            at = 0
            while at < len(word):
                size = len(word) - at
                while size and "##" * (at > 0) + word[at : at + size] not in self.vocabulary:
                    size -= 1
                if size == 0:
                    pieces = [self.vocabulary["[UNK]"]]
                    break
                pieces.append(self.vocabulary["##" * (at > 0) + word[at : at + size]])
                at += size
            found += pieces
        return found

    def kv(self, tokens: list[int]) -> Iterator[tuple[Floats, Floats]]:
        """K and V of each layer, `[token, channel]`."""
        w, count, heads = self.weights, len(tokens), self.config["num_attention_heads"]

        def linear(x: Floats, name: str) -> Floats:
            return x @ w[name + ".weight"].T + w[name + ".bias"]

        def normed(x: Floats, name: str) -> Floats:
            x = x - x.mean(-1, keepdims=True)
            scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config["layer_norm_eps"])
            normal: Floats = x / scale * w[name + ".weight"] + w[name + ".bias"]
            return normal

        at = "embeddings."
        x = w[at + "word_embeddings.weight"][tokens] + w[at + "token_type_embeddings.weight"][0]
        x = normed(x + w[at + "position_embeddings.weight"][:count], at + "LayerNorm")
        for layer in range(self.config["num_hidden_layers"]):
            name = f"encoder.layer.{layer}."
            q, k, v = (
                linear(x, f"{name}attention.self.{part}") for part in ("query", "key", "value")
            )
            yield k, v
            q, k, v = (part.reshape(count, heads, -1).transpose(1, 0, 2) for part in (q, k, v))
            scores = q @ k.transpose(0, 2, 1) / np.float32(q.shape[-1] ** 0.5)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = (scores / scores.sum(-1, keepdims=True) @ v).transpose(1, 0, 2)
            mixed = linear(mixed.reshape(count, -1), name + "attention.output.dense")
            x = normed(x + mixed, name + "attention.output.LayerNorm")
            inner = _gelu(linear(x, name + "intermediate.dense"))
            x = normed(x + linear(inner, name + "output.dense"), name + "output.LayerNorm")


def _gelu(x: Floats) -> Floats:
    """x times the normal distribution's share below x, to 7 digits (Abramowitz and Stegun 7.1.26)."""
    size = np.abs(x) * np.float32(0.5**0.5)
    t = 1 / (1 + np.float32(0.3275911) * size)
    terms = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
    tail = np.zeros_like(x)
    for term in terms:
        tail = (tail + np.float32(term)) * t
    tail *= np.exp(-size * size) / 2
    return x * np.where(x < 0, tail, 1 - tail)


def _tensors(text: bytes) -> dict[str, Floats]:
    (size,) = struct.unpack_from("<Q", text)
    found = {}
    for name, one in json.loads(text[8 : 8 + size]).items():
        if name == "__metadata__" or one["dtype"] == "I64":  # position_ids
            continue
        assert one["dtype"] in ("BF16", "F32"), f"{name} is {one['dtype']}: read are BF16 and F32"
        start, end = (8 + size + at for at in one["data_offsets"])
        if one["dtype"] == "F32":
            found[name] = np.frombuffer(text[start:end], "<f4").reshape(one["shape"])
        else:
            found[name] = wide(np.frombuffer(text[start:end], np.uint16)).reshape(one["shape"])
    return found


def _letters() -> list[str]:
    """Byte-level BPE's letter for each byte: itself where it can be seen, else one past 255."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(b) if b in seen else chr(256 + unseen.index(b)) for b in range(256)]


_LETTERS = _letters()
