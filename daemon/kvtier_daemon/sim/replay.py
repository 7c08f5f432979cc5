"""One tier of so many blocks: what a policy hits of a trace, and what the best choice would have."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.policy.base import make
from kvtier_daemon.beside.sizing import Prefill
from kvtier_daemon.sim.trace import Requests
from kvtier_kernels import Optimum, Replay

OPTIMUM = "optimum"
PIECE = 4096  # requests between two looks at what else is to do
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    policy: str
    blocks: int
    hit_blocks: int
    hit_rate: float
    recompute_s: float  # with what hit
    recompute_s_saved: float


def replay(
    requests: Requests,
    policy: str,
    blocks: int,
    prefill: Prefill,
    progress: Progress = lambda n: None,
) -> Outcome:
    """Play the whole trace through one tier, which begins empty. `optimum` knows the future."""
    run: Replay | Optimum
    if policy == OPTIMUM:
        run = Optimum(requests.native, blocks)
    else:
        run = Replay(requests.native, make(policy), blocks)
    hits = array("I")
    while len(hits) < len(requests):
        hits.frombytes(run.run(PIECE))
        progress(min(PIECE, len(requests)))
    return score(requests, policy, blocks, hits, prefill)


def score(
    requests: Requests, policy: str, blocks: int, hits: array[int], prefill: Prefill
) -> Outcome:
    """Count what was looked up; what was only saved is none of it."""
    hit_blocks, saved_s, left_s = 0, 0.0, 0.0
    for hit, tokens, only_saved in zip(hits, requests.inputs, requests.saved, strict=True):
        if only_saved:
            continue
        hit_blocks += hit
        known = min(hit * requests.block_tokens, tokens)
        saved_s += prefill.seconds(known)
        left_s += prefill.seconds(tokens - known, known)
    rate = hit_blocks / requests.looked_up_blocks if requests.looked_up_blocks else 0.0
    return Outcome(policy, blocks, hit_blocks, rate, left_s, saved_s)
