"""A causal language model of Hugging Face: its K and V, and what it says when others stand in their place.

The one module here that needs torch and transformers; nothing that serves imports it.
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

# K and V of each layer: [sequence, head, token, dim]; of MLA a latent, and what RoPE has turned beside it.
Cached = list[tuple[Tensor, Tensor]]
SHIFT = 256  # tokens: where K is looked at again, to see how it is rotated
SHIFTED_TOKENS = 64
STATES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}  # kinds of layers
LIMIT_MISMATCH = 0.05  # of K: what bf16 and a position that is far off may do
LIMIT_SAID = 240  # letters of what transformers say, which may be a name of every model there is


@dataclass(frozen=True)
class Rotation:
    """Turns pairs of a head's first dims by the token's position times these angles."""

    angles: Tensor  # radians a token, float64
    interleaved: bool
    name: str = ""  # of the buffer that has them

    def turn(self, x: Tensor, first: int, back: bool = False) -> Tensor:
        """Of tokens from position `first` on."""
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
    """Computes in float32 on a CPU, in the checkpoint's own type elsewhere; K and V are always rounded to the
    latter, as an engine's cache would have them."""

    def __init__(self, path: Path, device: str = "auto") -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        with _told(f"--device {device}"):
            torch.zeros(1, device=device).item()
        self._runs = f"{path}: the model can't be run here"
        with _told(f"{path}: no causal language model"):
            config = AutoConfig.from_pretrained(path)
            self.tokenizer = AutoTokenizer.from_pretrained(path)
            self.kept = getattr(config.get_text_config(), "dtype", None) or torch.float32
            if isinstance(self.kept, str):
                self.kept = getattr(torch, self.kept)
            self.module = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32 if device == "cpu" else self.kept,
                attn_implementation="eager",  # which has gradients that come out the same every time
            ).to(device).eval().requires_grad_(False)  # fmt: skip
        self.device = torch.device(device)
        self.config = self.module.config.get_text_config()
        found = STATES.intersection(getattr(self.config, "layer_types", None) or ())
        if found:
            raise ConfigError(
                f"{path}: layers keep a state ({', '.join(sorted(found))}), and no K and V alone:"
                " such a model can't be calibrated"
            )

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def prefix(self, ids: Tensor, first: int = 0) -> Cached:
        """K and V of these sequences, whose first tokens have position `first`."""
        cache = DynamicCache()
        at = torch.arange(first, first + ids.shape[1], device=self.device)[None]
        with torch.no_grad(), _told(self._runs):
            self.module(
                ids.to(self.device), past_key_values=cache, position_ids=at.expand(ids.shape),
                use_cache=True,
            )  # fmt: skip
        if not cache.layers:
            raise ConfigError("no layer has K and V: such a model can't be calibrated")
        found = []
        for number, layer in enumerate(cache.layers):
            if getattr(layer, "keys", None) is None or layer.keys.dim() != 4:
                raise ConfigError(
                    f"layer {number} has no K and V: such a model can't be calibrated"
                )
            found.append((self.rounded(layer.keys), self.rounded(layer.values)))
        return found

    def exact_dims(self, prefix: Cached) -> int:
        """Of each token's latent (MLA), the dims that RoPE has turned; 0 of a model that caches K and V."""
        latent = getattr(self.config, "kv_lora_rank", None)
        if not latent:
            return 0
        turned = int(self.config.qk_rope_head_dim)
        for number, (keys, values) in enumerate(prefix):
            if (keys.shape[1::2], values.shape[1::2]) != ((1, latent), (1, turned)):
                raise ConfigError(
                    f"layer {number}: this transformers caches K and V in place of the latents (MLA)"
                    " that an engine would: such a model can't be calibrated"
                )
        return turned

    def rounded(self, x: Tensor) -> Tensor:
        return x.to(self.kept).to(self.module.dtype)

    def scores(self, prefix: Cached, ids: Tensor) -> Tensor:
        """Logarithms of what comes after each of these tokens with what probability, given the prefix."""
        cache = DynamicCache()
        for number, (keys, values) in enumerate(prefix):
            cache.update(keys, values, number)
        with _told(self._runs):
            found = self.module(ids.to(self.device), past_key_values=cache, use_cache=True)
            return torch.log_softmax(found.logits.float(), -1)

    def sensitivity(self, prefix: Cached, ids: Tensor, chance: torch.Generator) -> Cached:
        """Gradients of what the model itself would say next, for each element of the prefix. In expectation
        their squares are the diagonal of Fisher's information, and so the curvature of KL."""
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
        """How each layer rotates K: by what makes it the same at two positions."""
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
        """Theta and the kind of scaling, as the model's configuration has them; 0 where it has none such."""
        said = getattr(self.config, "rope_parameters", None) or {}
        # Where layers differ, there is one for each kind of layer, which the buffer's name begins with.
        for kind, one in said.items():
            if isinstance(one, dict) and kind in rotation.name:
                said = one
        theta = said.get("rope_theta") or getattr(self.config, "rope_theta", 0.0)
        kind = said.get("rope_type", "")
        return (float(theta) if isinstance(theta, int | float) else 0.0), str(kind)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Say what others' code raises in a line of ours: checkpoints may be damaged and devices full, and each
    library has errors of its own for that."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{what}: {shorten(str(error), LIMIT_SAID, placeholder=' ...')}"
        ) from error


def _mismatch(one: Tensor, other: Tensor, rotation: Rotation | None) -> float:
    """How much K at two places differs, as a share of K, once it is rotated back."""
    one, other = one.double().cpu(), other.double().cpu()
    if rotation is not None:
        if 2 * len(rotation.angles) > one.shape[-1]:
            return float("inf")
        one, other = rotation.turn(one, 0, True), rotation.turn(other, SHIFT, True)
    return float((one - other).norm() / one.norm().clamp_min(1e-30))


def divergence(base: Tensor, other: Tensor) -> float:
    """Mean KL of one prediction from another, both as logarithms."""
    return float((base.exp() * (base - other)).sum(-1).double().mean())


def surprise(logs: Tensor, ids: Tensor) -> float:
    """Mean negative logarithm of what really came next."""
    return float(-logs.gather(-1, ids.to(logs.device)[..., None]).double().mean())


def chunks(tokens: Sequence[int], size: int, most: int) -> Tensor:
    """Sequences of `size` tokens, evenly over the text; at most so many."""
    whole = len(tokens) // size
    count = min(whole, most)
    starts = [number * whole // count * size for number in range(count)] if count else []
    found: Tensor = torch.tensor([tokens[start : start + size] for start in starts])
    return found


def turns(angles: Tensor) -> list[int]:
    """Radians a token as parts of a turn, of which 2^64 are one."""
    return [round(angle / (2 * pi) * (1 << 64)) % (1 << 64) for angle in angles.tolist()]
