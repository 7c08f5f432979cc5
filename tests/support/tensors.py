"""The memory of the tensors of a cache."""

from __future__ import annotations

from typing import Any

import torch


def tensor_bytes(root: Any) -> int:
    """The bytes of all tensors on the default device that an object of kvtier_transformers refers to, those
    of models excepted; a tensor and a part of it count once."""
    kind = torch.get_default_device().type
    found: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, torch.nn.Module):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            if one.device.type == kind:
                found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple, set)):
            waiting += one
        elif type(one).__module__.startswith("kvtier_transformers"):
            slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
            waiting += getattr(one, "__dict__", {}).values()
            waiting += [getattr(one, name) for name in slots if hasattr(one, name)]
    return sum(found.values())
