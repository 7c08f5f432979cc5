"""The results of a simulation, and the latencies without tiers."""

from __future__ import annotations

from array import array
from typing import Any

from kvtier_daemon.sim.prices import Cost, Prices, cost_of
from kvtier_daemon.sim.tiers import Machine, Simulation, queued
from kvtier_daemon.sim.trace import TraceRequests

DAY_S = 86_400.0
LEAST_SPAN_S = 600.0  # shortest trace that is extrapolated to a day


def percentiles(values: list[float]) -> dict[str, float]:
    """Return p50, p90 and p99 in milliseconds."""
    ranked = sorted(values)
    last = len(ranked) - 1
    return {
        f"p{share}": round(ranked[max(0, -(-share * len(ranked) // 100) - 1)] * 1000, 3)
        if last >= 0
        else 0.0
        for share in (50, 90, 99)
    }


def without_tiers(
    requests: TraceRequests, machine: Machine, hits: array[int] | None = None
) -> dict[str, float]:
    """Return the times to the first token if everything is computed, or everything except these blocks."""
    free = [requests.seconds[0]] * machine.engines
    waits = []
    for index, tokens in enumerate(requests.inputs):
        if requests.saved[index]:
            continue
        blocks = hits[index] if hits is not None else 0
        known = min(blocks * requests.block_tokens, tokens)
        copy_s = blocks * requests.block_tokens * machine.token_bytes / machine.memory_bytes_s
        now = requests.seconds[index]
        take_s = copy_s + machine.prefill.seconds(tokens - known, known)
        waits.append(queued(free, now, take_s) - now)
    return percentiles(waits)


def _prompt_tokens(requests: TraceRequests) -> list[int]:
    return [
        tokens for tokens, saved in zip(requests.inputs, requests.saved, strict=True) if not saved
    ]


def cost_without(requests: TraceRequests, machine: Machine, prices: Prices) -> Cost:
    """Return what the prompts cost if everything is computed."""
    tokens = _prompt_tokens(requests)
    busy_s = sum(map(machine.prefill.seconds, tokens))
    return cost_of(prices, sum(tokens), requests.span_s, busy_s)


def cost_with(
    requests: TraceRequests, machine: Machine, run: dict[str, Any], prices: Prices
) -> Cost:
    """Return what the prompts of a run cost. An engine computes nothing else while it copies."""
    busy_s = run["recompute_s"] + run["bytes"]["memory_read"] / machine.memory_bytes_s
    return cost_of(
        prices, sum(_prompt_tokens(requests)), requests.span_s, busy_s, machine.memory_bytes,
        machine.nvme_bytes, run["nvme_bytes_written_a_day"] or 0,
    )  # fmt: skip


def report(requests: TraceRequests, machine: Machine, simulation: Simulation) -> dict[str, Any]:
    totals = simulation.totals
    looked_up = max(1, totals.looked_up_blocks)
    written = totals.moved["nvme_written"] + totals.moved["nvme_written_again"]
    return {
        "policy": machine.policy,
        "memory_bytes": machine.memory_bytes,
        "nvme_bytes": machine.nvme_bytes,
        "hbm_bytes": machine.hbm_bytes,
        "residency": machine.residency if simulation.hbm_blocks else "",
        "memory_blocks": simulation.memory_blocks,
        "nvme_blocks": simulation.nvme_blocks,
        "hit_rate": sum(totals.hit_blocks.values()) / looked_up,
        "hit_rate_by_tier": {
            tier: totals.hit_blocks[tier] / looked_up
            for tier in ("hbm", "memory", "nvme")[not simulation.hbm_blocks :]
        },
        "ttft_ms": percentiles(totals.waits_s),
        "recompute_s": totals.recompute_s,
        "recompute_s_saved": totals.recompute_s_saved,
        "bytes": {
            way: totals.moved[way]
            for way in (
                "saved",
                "memory_read",
                "nvme_read",
                "nvme_read_back",
                "nvme_written",
                "nvme_written_again",
            )
        },
        "nvme_bytes_written_a_day": _a_day(written, requests.span_s),
        "verdicts": dict(totals.verdicts),
        "lost": dict(totals.lost),
    }


def _a_day(nbytes: int, span_s: float) -> int | None:
    """Return the bytes per day, or None if the trace is too short."""
    if not nbytes:
        return 0
    return round(nbytes / span_s * DAY_S) if span_s >= LEAST_SPAN_S else None
