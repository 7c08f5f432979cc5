"""A causal language model of Hugging Face: its K and V, and its predictions with other K and V.

The only module here that needs torch and transformers; the serving parts never import it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import pi
from pathlib import Path
from textwrap import shorten

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

from kvtier.errors import ConfigError

# K and V of each layer: [sequence, head, token, dim]; for MLA the latent, and the dims with RoPE.
Cached = list[tuple[Tensor, Tensor]]
SHIFT = 256  # tokens: the distance at which K is compared to find its rotation
SHIFTED_TOKENS = 64
STATES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}  # kinds of layers
LIMIT_MISMATCH = 0.05  # of K: the largest error of bf16 at a distant position
LIMIT_SAID = 240  # most characters of a message of transformers, which may list every known model


@dataclass(frozen=True)
class Rotation:
    """Rotates pairs of a head's first dims by the token's position times these angles."""

    angles: Tensor  # radians per token, float64
    interleaved: bool
    name: str = ""  # of the buffer that contains them

    def turn(self, x: Tensor, first: int, back: bool = False) -> Tensor:
        """Rotate the tokens from position `first` on."""
        at = torch.arange(first, first + x.shape[-2], dtype=torch.float64)[:, None] * self.angles
        cos, sin = at.cos().to(x), (-at.sin() if back else at.sin()).to(x)
        pairs = len(self.angles)
        turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        if self.interleaved:
            low, high = turned[..., ::2], turned[..., 1::2]
        else:
            low, high = turned[..., :pairs], turned[..., pairs:]
        both = low * cos - high * sin, high * cos + low * sin
        joined = torch.stack(both, -1).flatten(-2) if self.interleaved else torch.cat(both, -1)
        return torch.cat([joined, rest], -1)


class Model:
    """Computes in float32 on a CPU, and in the checkpoint's type elsewhere. K and V are always rounded to
    the checkpoint's type, as in an engine's cache."""

    def __init__(self, path: Path, device: str = "auto") -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        with _told(f"--device {device}"):
            torch.zeros(1, device=device).item()
        self._runs = f"{path}: cannot run the model"
        with _told(f"{path}: not a causal language model"):
            config = AutoConfig.from_pretrained(path)
            self.tokenizer = AutoTokenizer.from_pretrained(path)
            self.kept = getattr(config.get_text_config(), "dtype", None) or torch.float32
            if isinstance(self.kept, str):
                self.kept = getattr(torch, self.kept)
            self.module = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32 if device == "cpu" else self.kept,
                attn_implementation="eager",  # its gradients are deterministic
            ).to(device).eval().requires_grad_(False)  # fmt: skip
        self.device = torch.device(device)
        self.config = self.module.config.get_text_config()
        found = STATES.intersection(getattr(self.config, "layer_types", None) or ())
        if found:
            raise ConfigError(
                f"{path}: layers keep a state ({', '.join(sorted(found))}), not only K and V: "
                "such a model cannot be calibrated"
            )

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def prefix(self, ids: Tensor, first: int = 0) -> Cached:
        """Return K and V of these sequences, whose first tokens have position `first`."""
        cache = DynamicCache()
        at = torch.arange(first, first + ids.shape[1], device=self.device)[None]
        with torch.no_grad(), _told(self._runs):
            self.module(
                ids.to(self.device), past_key_values=cache, position_ids=at.expand(ids.shape),
                use_cache=True,
            )  # fmt: skip
        if not cache.layers:
            raise ConfigError("no layer has K and V: such a model cannot be calibrated")
        found = []
        for number, layer in enumerate(cache.layers):
            if getattr(layer, "keys", None) is None or layer.keys.dim() != 4:
                raise ConfigError(
                    f"layer {number} has no K and V: such a model cannot be calibrated"
                )
            found.append((self.rounded(layer.keys), self.rounded(layer.values)))
        return found

    def exact_dims(self, prefix: Cached) -> int:
        """Return how many dims of each token's latent (MLA) have RoPE; 0 for a model that caches K and V."""
        latent = getattr(self.config, "kv_lora_rank", None)
        if not latent:
            return 0
        turned = int(self.config.qk_rope_head_dim)
        for number, (keys, values) in enumerate(prefix):
            if (keys.shape[1::2], values.shape[1::2]) != ((1, latent), (1, turned)):
                raise ConfigError(
                    f"layer {number}: this version of transformers caches K and V instead of "
                    "the latents (MLA) that an engine caches: such a model cannot be "
                    "calibrated"
                )
        return turned

    def rounded(self, x: Tensor) -> Tensor:
        return x.to(self.kept).to(self.module.dtype)

    def scores(self, prefix: Cached, ids: Tensor) -> Tensor:
        """Return the log probabilities of the tokens after each of these tokens, given the prefix."""
        cache = DynamicCache()
        for number, (keys, values) in enumerate(prefix):
            cache.update(keys, values, number)
        with _told(self._runs):
            found = self.module(ids.to(self.device), past_key_values=cache, use_cache=True)
            return torch.log_softmax(found.logits.float(), -1)

    def sensitivity(self, prefix: Cached, ids: Tensor, chance: torch.Generator) -> Cached:
        """Return gradients of the model's own predictions with respect to each element of the prefix. The
        mean of their squares is the diagonal of the Fisher information, thus the curvature of KL."""
        leaves = [(k.requires_grad_(), v.requires_grad_()) for k, v in prefix]
        with torch.enable_grad(), _told(self._runs):
            logs = self.scores(leaves, ids)
            flat = logs.detach().cpu().exp().flatten(0, -2)
            said = torch.multinomial(flat, 1, generator=chance).to(logs.device)
            loss = -logs.flatten(0, -2).gather(1, said).sum()
            flat_leaves = [leaf for pair in leaves for leaf in pair]
            found = torch.autograd.grad(loss, flat_leaves)
        for leaf in flat_leaves:
            leaf.requires_grad_(False)
        return list(zip(found[::2], found[1::2], strict=True))

    def rotations(self, ids: Tensor) -> list[Rotation | None]:
        """Find how each layer rotates K: the rotation that makes K equal at two positions."""
        ids = ids[:1, :SHIFTED_TOKENS]
        here, there = self.prefix(ids), self.prefix(ids, SHIFT)
        candidates: list[Rotation | None] = [None]
        for name, buffer in self.module.named_buffers():
            if name.endswith("inv_freq") and "original" not in name:
                angles = buffer.detach().double().cpu()
                candidates += [Rotation(angles, False, name), Rotation(angles, True, name)]
        found = []
        for number, ((one, _), (other, _)) in enumerate(zip(here, there, strict=True)):
            misses = [_mismatch(one, other, candidate) for candidate in candidates]
            best = misses.index(min(misses))
            if misses[best] > LIMIT_MISMATCH:
                raise ConfigError(
                    f"layer {number}: K is rotated in a way that is not known here"
                    f" ({misses[best]:.0%} is left between two positions)"
                )
            found.append(candidates[best])
        return found

    def rope_origin(self, rotation: Rotation) -> tuple[float, str]:
        """Return theta and the kind of scaling from the model's configuration; 0 if it contains neither."""
        said = getattr(self.config, "rope_parameters", None) or {}
        # If layers differ, there is one for each kind of layer, and the name of the buffer begins with the
        # kind.
        for kind, one in said.items():
            if isinstance(one, dict) and kind in rotation.name:
                said = one
        theta = said.get("rope_theta") or getattr(self.config, "rope_theta", 0.0)
        kind = said.get("rope_type", "")
        return (float(theta) if isinstance(theta, int | float) else 0.0), str(kind)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Make one line of other libraries' exceptions: damaged checkpoints, full devices and so on."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{what}: {shorten(str(error), LIMIT_SAID, placeholder=' ...')}"
        ) from error


def _mismatch(one: Tensor, other: Tensor, rotation: Rotation | None) -> float:
    """Return how much K differs at two positions after it is rotated back, as a share of K."""
    one, other = one.double().cpu(), other.double().cpu()
    if rotation is not None:
        if 2 * len(rotation.angles) > one.shape[-1]:
            return float("inf")
        one, other = rotation.turn(one, 0, True), rotation.turn(other, SHIFT, True)
    return float((one - other).norm() / one.norm().clamp_min(1e-30))


def divergence(base: Tensor, other: Tensor) -> float:
    """Return the mean KL of one prediction from another, both as log probabilities."""
    return float((base.exp() * (base - other)).sum(-1).double().mean())


def surprise(logs: Tensor, ids: Tensor) -> float:
    """Return the mean negative log probability of the actual next token."""
    return float(-logs.gather(-1, ids.to(logs.device)[..., None]).double().mean())


def chunks(tokens: Sequence[int], size: int, most: int) -> Tensor:
    """Return at most `most` sequences of `size` tokens, spread evenly over the text."""
    whole = len(tokens) // size
    count = min(whole, most)
    starts = [number * whole // count * size for number in range(count)] if count else []
    found: Tensor = torch.tensor([tokens[start : start + size] for start in starts])
    return found


def turns(angles: Tensor) -> list[int]:
    """Return radians per token as parts of a turn; 2^64 is one turn."""
    return [round(angle / (2 * pi) * (1 << 64)) % (1 << 64) for angle in angles.tolist()]
