"""How long a request is held back: for an answer, and for blocks that come from the disk while they are
expected to be here before they would be recomputed."""

from __future__ import annotations

from kvtier.client import Lease
from kvtier_vllm.forecast import Forecast
from kvtier_vllm.layout import Layout
from kvtier_vllm.options import Options
from kvtier_vllm.prompt import Prompt

ASK_AGAIN_S = 0.002
ASKING = 8  # requests that may ask as often as one
TOLD_AFTER_S = 0.05  # that blocks are here, or how far they are: so long is nothing asked
UNKNOWN_WAITS, UNKNOWN_WAIT_S = 2, 0.05
LAST_ASK_S = 0.02  # before a request's patience ends: what is ready then is to be known


class Patience:
    """That of an engine's requests. It has no clock: it is told what time it is."""

    def __init__(self, layout: Layout, options: Options, forecast: Forecast) -> None:
        self._layout = layout
        self._forecast = forecast
        self._most_s = options.patience_ms / 1000

    def ended(self, since: float, now: float) -> bool:
        return now - since > self._most_s

    def worth_waiting(self, prompt: Prompt, lease: Lease, computed: int, now: float) -> bool:
        """Whether what is coming is expected here, and loaded, before it would be recomputed. Where nothing
        was computed yet, it has twice the time that was forecast first, whatever is forecast later."""
        block = self._layout.block_tokens
        start = max(lease.ready * block, computed)
        tokens = (lease.ready + lease.coming) * block - start
        if tokens <= 0:
            return False
        nbytes = self._layout.load_bytes(tokens // block)
        load_s = lease.eta_ms / 1000 + self._forecast.load_s(nbytes)
        recompute_s = self._forecast.recompute_s(tokens, start)
        if recompute_s is not None:
            return load_s < recompute_s
        if prompt.due is None:
            prompt.due = now + UNKNOWN_WAITS * load_s + UNKNOWN_WAIT_S
        return now < prompt.due

    def ask_for_s(self, prompt: Prompt, asking: int, now: float) -> float | None:
        """How long the daemon may take to say that what is coming is here, if it is asked now; None where
        it is asked too early, or is too late. Many who ask cost the daemon time."""
        assert prompt.wait.since is not None
        left_s = prompt.wait.since + self._most_s - now
        after_s = ASK_AGAIN_S * (1 + asking / ASKING)
        if now - prompt.asked_at < after_s or left_s <= LAST_ASK_S:
            return None
        return min(TOLD_AFTER_S, left_s - LAST_ASK_S)
