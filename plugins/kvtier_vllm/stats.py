"""The plugin's counts and times, and the names of their metrics. Imports no vLLM.

The name of a count is `kind` or `kind:label`. Kinds without a series are for tests.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvtier.wire import OUTCOMES

Miss = Literal["absent", "adapter", "media", "no_daemon", "patience", "rank_away", "refused"]
Failure = Literal["error", "no_daemon", "stale", "spoilt"]
Drop = Literal["after_hole", "error", "lost", "no_daemon", "no_time", "overwritten"]
Time = Literal["load_s", "save_s", "wait_s", "wait_answer_s", "wait_disk_s", "wait_scheduler_s"]

WAITED: dict[str, Time] = {
    "answer": "wait_answer_s", "disk": "wait_disk_s", "scheduler": "wait_scheduler_s",
}  # fmt: skip
LIMIT_ADAPTERS = 32  # with series of their own, in each process that exports metrics
LIMIT_KNOWN_ADAPTERS = 1024  # whose requests are counted
RECENT_REQUESTS = 4096  # after which older ones count half
NO_ADAPTER, OTHER_ADAPTERS = "none", "other"
LIMIT_TIMES = 4096  # of each kind between two calls of `take`: an engine may never call it
BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip


@dataclass(frozen=True)
class StatSeries:
    """A counter: one series, or one per value of its label."""

    kind: str
    name: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ()


COUNTERS = (
    StatSeries("hit_tokens", "vllm:kvtier_hit_tokens",
           "Loaded tokens, by the tier that held them when the request first asked.",
           "tier", ("warm", "cold")),
    StatSeries("miss", "vllm:kvtier_misses", "Requests that loaded nothing, by reason.",
           "reason", get_args(Miss)),
    StatSeries("loaded_tokens", "vllm:kvtier_loaded_tokens", "Loaded tokens."),
    StatSeries("loaded_bytes", "vllm:kvtier_loaded_bytes", "Loaded bytes of all ranks."),
    StatSeries("failed_tokens", "vllm:kvtier_failed_tokens",
           "Tokens that were promised and not loaded."),
    StatSeries("load_failed", "vllm:kvtier_failed_loads", "Loads that failed in a rank, by reason.",
           "reason", get_args(Failure)),
    StatSeries("direct", "vllm:kvtier_direct_blocks",
           "Blocks of a rank that direct reads loaded, or that came through the daemon's memory instead.",
           "outcome", ("read", "through_memory")),
    StatSeries("saved_tokens", "vllm:kvtier_saved_tokens", "Saved tokens."),
    StatSeries("saved_bytes", "vllm:kvtier_saved_bytes", "Saved bytes of all ranks."),
    StatSeries("drop", "vllm:kvtier_dropped_blocks",
           "Blocks of a group and rank that were not saved, by reason.",
           "reason", get_args(Drop)),
    StatSeries("not_saved", "vllm:kvtier_unsaved_blocks",
           "Blocks of a group and rank that the daemon did not accept; present means already stored.",
           "reason", OUTCOMES[1:]),
    StatSeries("pin", "vllm:kvtier_pins", "Pins that requests asked for, by outcome.",
           "outcome", ("held", "empty", "refused")),
    StatSeries("lost", "vllm:kvtier_lost_connections", "Lost connections to the daemon."),
    StatSeries("missed", "vllm:kvtier_missed_changes",
           "Changes in the tiers that were too many to report as KV events."),
)  # fmt: skip

Adapted = Literal[
    "adapter_requests", "adapter_prompt_tokens", "adapter_hit_tokens", "adapter_loaded_blocks",
    "adapter_saved_blocks",
]  # fmt: skip
BY_ADAPTER: dict[Adapted, tuple[str, str]] = {
    "adapter_requests": ("vllm:kvtier_adapter_requests", "Requests, by LoRA adapter."),
    "adapter_prompt_tokens": ("vllm:kvtier_adapter_prompt_tokens",
           "Tokens of their prompts, by LoRA adapter."),
    "adapter_hit_tokens": ("vllm:kvtier_adapter_hit_tokens",
           "Tokens that were loaded, by LoRA adapter."),
    "adapter_loaded_blocks": ("vllm:kvtier_adapter_loaded_blocks",
           "Blocks of a group and rank that were loaded, by LoRA adapter."),
    "adapter_saved_blocks": ("vllm:kvtier_adapter_saved_blocks",
           "Blocks of a group and rank that were saved, by LoRA adapter."),
}  # fmt: skip

TIMES: dict[Time, tuple[str, str]] = {
    "load_s": ("vllm:kvtier_load_seconds", "Copy time of a load in one rank."),
    "save_s": ("vllm:kvtier_save_seconds", "Time of a save in one rank, from its turn to its commit."),
    "wait_s": ("vllm:kvtier_wait_seconds",
           "How long a request was held back for an answer or for blocks."),
    "wait_answer_s": ("vllm:kvtier_wait_answer_seconds",
           "Part of the wait of a request: for the daemon's answer."),
    "wait_disk_s": ("vllm:kvtier_wait_disk_seconds",
           "Part of the wait of a request: for its blocks from disk."),
    "wait_scheduler_s": ("vllm:kvtier_wait_scheduler_seconds",
           "Part of the wait of a request: for the next call of the scheduler."),
}  # fmt: skip


class PluginStats:
    """The counts and times of one engine. `counts` only grows; `take` returns the changes."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._taken: dict[str, int] = {}
        self._times: dict[str, list[float]] = {}
        self._adapted: Counter[str] = Counter()  # since the last `take`

    def adapted(self, kind: Adapted, adapter: str, count: int) -> None:
        """Count for a LoRA adapter. Keeps the adapter's name only until the next `take`."""
        name = f"{kind}:{adapter}"
        if count and (name in self._adapted or len(self._adapted) < LIMIT_TIMES):
            self._adapted[name] += count

    def took(self, what: Time, seconds: float) -> None:
        times = self._times.setdefault(what, [])
        if len(times) < LIMIT_TIMES:
            times.append(seconds)

    def take(self) -> dict[str, Any]:
        """The changes since the last call as plain data, {} without changes."""
        # Comparing Counters is slow, and this runs at every step.
        if dict.__eq__(self.counts, self._taken) and not self._times and not self._adapted:
            return {}
        taken = self._taken
        counts = {
            name: count - taken.get(name, 0)
            for name, count in self.counts.items()
            if count != taken.get(name, 0)
        }
        times, self._times = self._times, {}
        self._taken = dict(self.counts)
        counts |= self._adapted
        self._adapted = Counter()
        return {"counts": counts, "times": times}


class Busiest:
    """Selects the adapters with series of their own: those with the most requests, at most `LIMIT_ADAPTERS`.

    An adapter without series replaces the least busy one once it has more than twice as many recent requests,
    so that equally busy adapters do not alternate. If series cannot be removed (`replaces` is false), the
    first adapters keep theirs.
    """

    def __init__(self, replaces: bool) -> None:
        self._replaces = replaces
        self._named: set[str] = set()
        self._recent: dict[str, int] = {}
        self._counted = 0

    def label(self, adapter: str) -> str:
        return adapter if adapter in self._named or adapter == NO_ADAPTER else OTHER_ADAPTERS

    def requested(self, adapter: str, requests: int) -> str | None:
        """Count requests of an adapter. Returns the adapter that it replaces, if any."""
        if adapter in (NO_ADAPTER, OTHER_ADAPTERS):
            return None
        recent = self._recent
        recent[adapter] = recent.get(adapter, 0) + requests
        self._counted += requests
        if self._counted >= RECENT_REQUESTS:
            self._counted = 0
            for name in recent:
                recent[name] //= 2
        if adapter in self._named:
            return None
        if len(self._named) < LIMIT_ADAPTERS:
            self._named.add(adapter)
            return None
        least = min(self._named, key=recent.__getitem__)
        replaced = self._replaces and recent[adapter] > 2 * recent[least] + 1
        if replaced:
            self._named.remove(least)
            self._named.add(adapter)
        if len(recent) > LIMIT_KNOWN_ADAPTERS:
            del recent[min(recent.keys() - self._named, key=recent.__getitem__)]
        return least if replaced else None


def added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    if not one or not other:
        return one or other
    counts = Counter(one["counts"])
    counts.update(other["counts"])
    times = {
        name: [*one["times"].get(name, ()), *other["times"].get(name, ())]
        for name in [*one["times"], *(set(other["times"]) - set(one["times"]))]
    }
    return {"counts": dict(counts), "times": times}
