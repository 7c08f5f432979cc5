"""The plugin's figures in vLLM's log and among its Prometheus metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtier_vllm.stats import BUCKETS_S, COUNTERS, TIMES, added


class KvtierStats(KVConnectorStats):
    """What `Stats.take` says, on its way from the scheduler to whoever logs."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KvtierStats:
        return KvtierStats(added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """For a line in the log: every count, and of what takes time how often and how long in all."""
        figures: dict[str, int | float] = dict(sorted(self.data["counts"].items()))
        for name, times in self.data["times"].items():
            figures[f"{name}_count"] = len(times)
            figures[f"{name}_sum"] = round(sum(times), 4)
        return figures


class KvtierPromMetrics(KVConnectorPromMetrics):
    """Every series is there from the start, for each engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._bound: dict[tuple[int, str], Any] = {}
        for one in COUNTERS:
            names = [*labelnames, one.label] if one.label else labelnames
            metric = metric_types[Counter](name=one.name, documentation=one.help, labelnames=names)
            for engine, values in per_engine_labelvalues.items():
                for label in one.values:
                    self._bound[engine, f"{one.kind}:{label}"] = metric.labels(*values, label)
                if not one.label:
                    self._bound[engine, one.kind] = metric.labels(*values)
        for kind, (name, text) in TIMES.items():
            metric = metric_types[Histogram](
                name=name, documentation=text, buckets=BUCKETS_S, labelnames=labelnames
            )
            for engine, values in per_engine_labelvalues.items():
                self._bound[engine, kind] = metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.get("counts", {}).items():
            metric = self._bound.get((engine_idx, name))
            if metric is not None:
                metric.inc(count)
        for name, times in transfer_stats_data.get("times", {}).items():
            for seconds in times:
                self._bound[engine_idx, name].observe(seconds)
