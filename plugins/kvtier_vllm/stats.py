"""What is counted and timed, and what each of it is called where somebody looks. No vLLM here.

A count's name is `kind` or `kind:label`. Kinds that are in no series are for tests.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvtier.wire import OUTCOMES

Miss = Literal["absent", "adapter", "no_daemon", "patience", "rank_away", "refused"]
Failure = Literal["error", "no_daemon", "stale"]
Drop = Literal["after_hole", "error", "lost", "no_daemon", "no_time", "overwritten"]
Time = Literal["load_s", "save_s", "wait_s", "wait_answer_s", "wait_disk_s", "wait_scheduler_s"]

WAITED: dict[str, Time] = {
    "answer": "wait_answer_s", "disk": "wait_disk_s", "scheduler": "wait_scheduler_s",
}  # fmt: skip
LIMIT_TIMES = 4096  # of each kind that wait to be told: an engine that never asks costs no more
BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip


@dataclass(frozen=True)
class Series:
    """A counter: one, or one for each value of its label."""

    kind: str
    name: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ()


COUNTERS = (
    Series("hit_tokens", "vllm:kvtier_hit_tokens",
           "Tokens that were loaded, by where they were when they were asked for.",
           "tier", ("warm", "cold")),
    Series("miss", "vllm:kvtier_misses", "Requests for which nothing was loaded, by the reason.",
           "reason", get_args(Miss)),
    Series("loaded_tokens", "vllm:kvtier_loaded_tokens", "Tokens that were loaded."),
    Series("loaded_bytes", "vllm:kvtier_loaded_bytes", "Bytes that were loaded, of all ranks."),
    Series("failed_tokens", "vllm:kvtier_failed_tokens",
           "Tokens that were promised and then not loaded."),
    Series("load_failed", "vllm:kvtier_failed_loads", "Loads that a rank failed, by the reason.",
           "reason", get_args(Failure)),
    Series("saved_tokens", "vllm:kvtier_saved_tokens", "Tokens that were saved."),
    Series("saved_bytes", "vllm:kvtier_saved_bytes", "Bytes that were saved, of all ranks."),
    Series("drop", "vllm:kvtier_dropped_blocks",
           "Blocks of a group and rank that were not offered, by the reason.",
           "reason", get_args(Drop)),
    Series("not_saved", "vllm:kvtier_unsaved_blocks",
           "Blocks of a group and rank that the daemon did not take; those present it has already.",
           "reason", OUTCOMES[1:]),
    Series("pin", "vllm:kvtier_pins", "Pins that requests asked for.",
           "outcome", ("held", "empty", "refused")),
    Series("lost", "vllm:kvtier_lost_connections", "Connections to the daemon that were given up."),
    Series("missed", "vllm:kvtier_missed_changes",
           "Changes in the tiers that came too fast to be told as KV events."),
)  # fmt: skip

TIMES: dict[Time, tuple[str, str]] = {
    "load_s": ("vllm:kvtier_load_seconds", "How long a rank copied for a load."),
    "save_s": (
        "vllm:kvtier_save_seconds",
        "How long a rank took for a save, from its turn to its commit.",
    ),
    "wait_s": (
        "vllm:kvtier_wait_seconds",
        "How long a request was held back for an answer or for blocks that came.",
    ),
    "wait_answer_s": (
        "vllm:kvtier_wait_answer_seconds",
        "Of the time that a request was held back: until the daemon answered.",
    ),
    "wait_disk_s": (
        "vllm:kvtier_wait_disk_seconds",
        "Of the time that a request was held back: until its blocks had come from the disk.",
    ),
    "wait_scheduler_s": (
        "vllm:kvtier_wait_scheduler_seconds",
        "Of the time that a request was held back: until the scheduler asked again.",
    ),
}


class Stats:
    """What has happened since it was last asked for. `counts` only grows."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._told: dict[str, int] = {}
        self._times: dict[str, list[float]] = {}

    def took(self, what: Time, seconds: float) -> None:
        times = self._times.setdefault(what, [])
        if len(times) < LIMIT_TIMES:
            times.append(seconds)

    def take(self) -> dict[str, Any]:
        """Plain data, {} where nothing happened."""
        # A Counter compares slowly, and this is asked at every step.
        if dict.__eq__(self.counts, self._told) and not self._times:
            return {}
        told = self._told
        counts = {
            name: count - told.get(name, 0)
            for name, count in self.counts.items()
            if count != told.get(name, 0)
        }
        times, self._times = self._times, {}
        self._told = dict(self.counts)
        return {"counts": counts, "times": times}


def added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both, as one."""
    if not one or not other:
        return one or other
    counts = Counter(one["counts"])
    counts.update(other["counts"])
    times = {
        name: [*one["times"].get(name, ()), *other["times"].get(name, ())]
        for name in [*one["times"], *(set(other["times"]) - set(one["times"]))]
    }
    return {"counts": dict(counts), "times": times}
