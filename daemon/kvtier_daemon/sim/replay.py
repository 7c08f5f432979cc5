"""The model of one tier: the hit rate of a policy on a trace, and of the offline optimum."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from kvtier_daemon.catalog.policy import make
from kvtier_daemon.sim.compressed import CompressedReplay
from kvtier_daemon.sim.trace import TraceRequests
from kvtier_daemon.tools.sizing import PrefillCost
from kvtier_kernels import Optimum, Policy, Replay

OPTIMUM = "optimum"
PIECE = 4096  # requests per call of the kernel
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    policy: str
    blocks: int
    hit_blocks: int
    hit_rate: float
    recompute_s: float  # that the hits would have taken to recompute
    recompute_s_saved: float


def replay(
    requests: TraceRequests,
    policy: str,
    blocks: int,
    prefill: PrefillCost,
    progress: Progress = lambda n: None,
    compressed: float = 0.0,
    ratio: float = 1.0,
) -> ReplayOutcome:
    """Replay the whole trace on one tier, which is empty at first. `optimum` knows the future, and compresses
    nothing. `compressed` is the share of compressed memory, and `ratio` the size of frames in blocks."""
    run: Replay | Optimum | CompressedReplay
    if compressed and policy != OPTIMUM:
        run = CompressedReplay(requests, policy, blocks, compressed, ratio)
    elif policy == OPTIMUM:
        run = Optimum(requests.native, blocks)
    else:
        made = make(policy)
        if not isinstance(made, Policy):
            raise ValueError(
                f"policy {policy!r} is not native, so no trace can be replayed with it"
            )
        run = Replay(requests.native, made, blocks)
    hits = array("I")
    while len(hits) < len(requests):
        hits.frombytes(run.run(PIECE))
        progress(min(PIECE, len(requests)))
    return score(requests, policy, blocks, hits, prefill)


def score(
    requests: TraceRequests, policy: str, blocks: int, hits: array[int], prefill: PrefillCost
) -> ReplayOutcome:
    """Count the blocks that were looked up; blocks that were only saved do not count."""
    hit_blocks, saved_s, left_s = 0, 0.0, 0.0
    for hit, tokens, only_saved in zip(hits, requests.inputs, requests.saved, strict=True):
        if only_saved:
            continue
        hit_blocks += hit
        known = min(hit * requests.block_tokens, tokens)
        saved_s += prefill.seconds(known)
        left_s += prefill.seconds(tokens - known, known)
    rate = hit_blocks / requests.looked_up_blocks if requests.looked_up_blocks else 0.0
    return ReplayOutcome(policy, blocks, hit_blocks, rate, left_s, saved_s)
