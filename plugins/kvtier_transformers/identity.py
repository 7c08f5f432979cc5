"""The identity of a model's cache: its weights, its configuration, its adapters, and how it caches.

Weights are identified by samples of every tensor. A change in place is noticed before the next lookup if
PyTorch counts it, if the library of adapters (PEFT) records it, or if it changes one of a few elements.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from kvtier import KvSpec
from kvtier_transformers.layout import CacheLayout
from kvtier_transformers.options import CacheOptions, UnsupportedModel

SAMPLES = 256  # elements of each tensor
GLANCES = 16  # elements of each tensor, before each lookup
# Forward hooks of these do not change results.
OWN_HOOKS = ("kvtier_transformers.", "transformers.", "accelerate.")
DIGEST_CHARS = 32
VOLATILE = ("_name_or_path", "transformers_version", "use_cache")
UNIFORM = "layer,part,head,token,dim"


def describe(model: Any, layout: CacheLayout, options: CacheOptions) -> KvSpec:
    """The KvSpec of this model's cache."""
    groups = [group.described(options.block_tokens) for group in layout.groups]
    opaque = any(group.opaque_bytes for group in groups)
    config = {name: value for name, value in model.config.to_dict().items() if name not in VOLATILE}
    return KvSpec.groups(
        groups,
        model=Path(str(model.config.name_or_path)).name or str(model.config.model_type),
        dtype=layout.dtype,
        block_tokens=options.block_tokens,
        weights=options.weights or weights_digest(model),
        layout=f"parts:{_digest(layout.text())}" if opaque else UNIFORM,
        rope=f"config:{_digest(json.dumps(config, sort_keys=True, default=str))}",
        engine="transformers",
        engine_layout=f"transformers {transformers.__version__} {_digest(layout.text())}",
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS]


def weights_digest(model: Any) -> str:
    """A digest of the names, shapes and types of all tensors of the model, and of samples of their bytes.
    Excludes adapters, which change from one call to the next."""
    digest = hashlib.sha256()
    adapters = {id(one) for tuner in _tuners(model) for one in _weights_of(tuner).values()}
    # Adapters put their layers around the model and around its layers.
    named = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if id(tensor) not in adapters
    }
    for name, tensor in sorted(named.items()):
        _add(digest, name, tensor)
    return f"samples:{digest.hexdigest()[:DIGEST_CHARS]}"


def _add(digest: hashlib._Hash, name: str, tensor: torch.Tensor) -> None:
    # DeepSpeed leaves parameters without elements, and other processes have them.
    if tensor.is_meta or (isinstance(tensor, torch.nn.Parameter) and not tensor.numel()):
        raise UnsupportedModel(
            f"{name} is not in memory: set the option 'weights' to a name of the weights"
        )
    digest.update(f"{name}\0{tensor.dtype}{tuple(tensor.shape)}\0".encode())
    count = tensor.numel()
    if count:
        flat = tensor.detach().reshape(-1)
        places = torch.linspace(
            0, count - 1, min(count, SAMPLES), dtype=torch.float64, device="cpu"
        )
        sample = flat[places.long().to(flat.device)].contiguous()
        digest.update(sample.view(torch.uint8).cpu().numpy().tobytes())


def fingerprint(model: Any) -> tuple[Any, ...]:
    """Changes with the model's tensors and their versions, and with its adapters."""
    seen: list[Any] = []
    for module in model.modules():
        for tensor in _tensors(module):
            version = 0 if tensor.is_inference() else tensor._version
            place = tensor.data_ptr() if _is_in_memory(tensor) else 0
            seen.append((id(tensor), place, version))
        if getattr(type(module), "adapter_layer_names", None):
            seen.append(_settings(module))
    return tuple(seen)


def glance(model: Any) -> list[bytes]:
    """A few elements of each of the model's tensors."""
    parts: dict[Any, list[torch.Tensor]] = {}
    for module in model.modules():
        for tensor in _tensors(module):
            if _is_in_memory(tensor) and tensor.is_contiguous():
                step = max(1, -(-tensor.numel() // GLANCES))
                found = tensor.detach().view(-1)[::step]
                parts.setdefault((tensor.dtype, tensor.device), []).append(found)
    return [torch.cat(some).view(torch.uint8).cpu().numpy().tobytes() for some in parts.values()]


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of a module itself."""
    both = (*module._parameters.values(), *module._buffers.values())
    return [one for one in both if one is not None]


def _is_in_memory(tensor: torch.Tensor) -> bool:
    """Whether this is no tensor of a class that keeps its elements elsewhere."""
    return not tensor.is_meta and type(tensor.data) is torch.Tensor


def unsuited(model: Any) -> str:
    """Why K and V depend on more than tokens and tensors now; empty if they do not."""
    for module in model.modules():
        # PEFT leaves new layers in training mode, in which only their dropout matters.
        is_plain = type(module).__module__.startswith(("torch.nn.", "peft."))
        if module.training and (not is_plain or getattr(module, "p", 0)):
            return "training mode, which model.eval() ends"
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not str(getattr(hook, "__module__", "")).startswith(OWN_HOOKS):
                return "forward hooks"
    return ""


def placement(model: Any) -> tuple[Any, ...]:
    """The types and devices of the model's parameters."""
    return tuple((one.dtype, one.device) for one in model.parameters())


def adapters_digest(model: Any) -> bytes:
    """The content and the settings of the active adapters; empty if there are none."""
    digest, found = hashlib.sha256(), False
    for number, tuner in enumerate(_tuners(model)):
        settings = _settings(tuner)
        active, disabled = settings[:2]
        if disabled or not active:
            continue
        found = True
        digest.update(f"{number}\0{settings}\0".encode())
        for name, tensor in sorted(_weights_of(tuner).items()):
            if any(f".{adapter}." in f".{name}." for adapter in active):
                _add(digest, name, tensor)
    return digest.digest() if found else b""


def _tuners(model: Any) -> Iterator[Any]:
    """The modules of PEFT that contain adapters."""
    return (one for one in model.modules() if getattr(type(one), "adapter_layer_names", None))


def _weights_of(tuner: Any) -> dict[str, torch.Tensor]:
    """The tensors of all adapters of a module."""
    found: dict[str, torch.Tensor] = {}
    for name in tuner.adapter_layer_names:
        part: Any = getattr(tuner, name, None)
        if hasattr(part, "named_parameters"):
            found |= {f"{name}.{inner}": one for inner, one in part.named_parameters()}
    return found


def _settings(tuner: Any) -> tuple[Any, ...]:
    return (
        tuple(tuner.active_adapters), bool(tuner.disable_adapters), tuple(tuner.merged_adapters),
        str(getattr(tuner, "scaling", "")),
    )  # fmt: skip


def precision() -> bytes:
    """The types that autocast computes with now; empty without it."""
    types = [
        f"{kind}:{torch.get_autocast_dtype(kind)}"
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]
    return ",".join(types).encode()
