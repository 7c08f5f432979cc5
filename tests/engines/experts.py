"""The recording connector, for ranks that step together, as data-parallel ranks of a model with experts
do.

vLLM's communicator for CPUs lacks the two calls with which such ranks exchange tokens, so that its
engine ends with the first request, with or without a connector. This module implements them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from recording import RecordingConnector
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase


class ExpertsConnector(RecordingConnector):
    """The recording connector, for ranks that step together."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        DeviceCommunicatorBase.all_gatherv = all_gatherv
        DeviceCommunicatorBase.reduce_scatterv = reduce_scatterv


def all_gatherv(ranks: Any, found: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    if isinstance(found, list):
        return [all_gatherv(ranks, one, dim, sizes) for one in found]
    assert dim == 0 and sizes
    padded = found.new_zeros((max(sizes), *found.shape[1:]))
    padded[: len(found)] = found
    all_ = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(all_, padded, group=ranks.cpu_group)
    return torch.cat([one[:size] for one, size in zip(all_, sizes, strict=True)])


def reduce_scatterv(ranks: Any, found: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    assert dim == 0 and sizes
    added = found.clone()
    torch.distributed.all_reduce(added, group=ranks.cpu_group)
    return added.split(sizes)[ranks.rank_in_group].contiguous()
