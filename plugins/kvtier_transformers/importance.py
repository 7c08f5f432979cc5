"""The importance of a prompt's blocks: the attention that their tokens get from some queries of the prompt.

Measured while the prompt is computed, in some layers with full attention: `last`, by the last queries, or
`accumulated`, by queries in equal distances (H2O, but sampled). Importance is relative to attention that is
equal for all tokens: 1/2 is that much, 2/3 twice and 1/3 half as much.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvtier_transformers.options import ACCUMULATED, LAST, log

QUERIES = {LAST: 16, ACCUMULATED: 32}
LAYERS = {LAST: 4, ACCUMULATED: 2}
LIMIT_SCORES = 1 << 24  # of one layer: fewer queries of longer prompts


class Importance:
    """The attention that each token of a batch of prompts gets; see `blocks`."""

    def __init__(self, how: str, pads: Sequence[int], queries: int = 0) -> None:
        self.layers = LAYERS[how]
        self._how = how
        self._pads = pads
        self._queries = queries or QUERIES[how]
        self._mass: torch.Tensor | None = None  # [rows, tokens]
        # The same for attention that is equal for all tokens.
        self._equal: torch.Tensor | None = None

    def note(
        self, query: torch.Tensor, key: torch.Tensor, scale: float, softcap: float = 0
    ) -> None:
        """Add the attention of some of these queries, which are the last ones of the prompt."""
        rows, heads, new, _ = query.shape
        count = min(new, self._queries, max(1, LIMIT_SCORES // (rows * heads * key.shape[2])))
        places = torch.arange(new - count, new, device=key.device)
        if self._how == ACCUMULATED:
            places = torch.linspace(0, new - 1, count, device=key.device).long()
        sees = self._visible(places + key.shape[2] - new, key)
        some = query[:, :, places].reshape(rows, key.shape[1], -1, query.shape[3])
        scores = (some @ key.transpose(2, 3)).float() * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.view(rows, key.shape[1], -1, count, key.shape[2])
        scores.masked_fill_(~sees[:, None, None], float("-inf"))
        mass = scores.softmax(-1).nan_to_num_(0).mean((1, 2)).sum(1)
        if self._mass is None:
            self._mass = mass
            self._equal = (sees / sees.sum(-1, keepdim=True).clamp(min=1)).sum(1)
        elif self._mass.shape == mass.shape:
            self._mass += mass.to(self._mass.device)

    def _visible(self, places: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Which tokens these queries see: [rows, queries, tokens]."""
        tokens = torch.arange(key.shape[2], device=key.device)
        pads = torch.tensor(self._pads, device=key.device).repeat_interleave(
            key.shape[0] // len(self._pads)
        )
        return (tokens <= places[:, None]) & (tokens >= pads[:, None, None])

    def blocks(self, row: int, pad: int, block_tokens: int) -> list[float]:
        """The importance of each whole block of a prompt, from 0 to 1; [] if nothing was measured."""
        share, equal = self.shares(row, pad, block_tokens)
        found: list[float] = (share / (share + equal).clamp(min=1e-9)).tolist()
        return found

    def shares(self, row: int, pad: int, block_tokens: int) -> torch.Tensor:
        """The share of each whole block in the attention to all, and its share if all tokens got the same."""
        if self._mass is None or self._equal is None:
            return torch.zeros(2, 0, device="cpu")
        both = torch.stack([self._mass[row, pad:], self._equal[row, pad:]]).cpu()
        both = both[:, : both.shape[1] // block_tokens * block_tokens]
        blocks = both.view(2, -1, block_tokens).sum(-1)
        return blocks / blocks.sum(-1, keepdim=True).clamp(min=1e-9)


class ImportanceMeter:
    """Measures in the layer of a cache, during its first forward pass with attention."""

    def __init__(self, importance: Importance) -> None:
        self._importance = importance
        self._is_done = False

    def expect(self, keys: torch.Tensor) -> None:
        """The next attention in this thread uses these keys."""
        if not self._is_done:
            _next.meter, _next.keys = self, keys

    def measure(self, query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> None:
        self._is_done = True
        scale = options.get("scaling")
        try:
            with torch.no_grad():
                self._importance.note(
                    query, key, query.shape[3] ** -0.5 if scale is None else scale,
                    options.get("softcap") or 0,
                )  # fmt: skip
        except Exception as error:  # noqa: BLE001  # no exception of kvtier reaches `generate`
            log.warning("kvtier: the importance of a prompt is not measured: %s", str(error))


class _Next(threading.local):
    meter: ImportanceMeter | None = None
    keys: torch.Tensor | None = None


_next = _Next()


def measured(attention: Callable[..., Any]) -> Callable[..., Any]:
    """The same attention function, which calls the meter of its keys."""

    def attend(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        meter, keys = _next.meter, _next.keys
        if meter is not None:
            _next.meter = _next.keys = None
            if key is keys:
                meter.measure(query, key, kwargs)
        return attention(module, query, key, *args, **kwargs)

    attend.is_measured = True  # type: ignore[attr-defined]
    return attend


def meters(model: Any, layers: Sequence[Any], importance: Importance) -> dict[int, ImportanceMeter]:
    """Meters for some of these layers, by index; {} if the model has no registered attention."""
    name = getattr(model.config, "_attn_implementation", None)
    attention = ALL_ATTENTION_FUNCTIONS.get(name)
    if attention is None or not layers:
        return {}
    if not hasattr(attention, "is_measured"):
        AttentionInterface.register(name, measured(attention))
    count = importance.layers
    chosen = {layers[(2 * at + 1) * len(layers) // (2 * count)] for at in range(count)}
    return {index: ImportanceMeter(importance) for index in chosen}
