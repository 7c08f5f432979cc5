"""kvtier: a KV cache for inference engines, in memory and on disk."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.client import Blocks, Client, Lease, Match, Saved, Saving, Space
    from kvtier.errors import (
        ConfigError,
        FrameError,
        InvalidArgument,
        KvtierError,
        NotReady,
        ProtocolError,
        Refused,
        SpecError,
        StaleLease,
        TierError,
        Unavailable,
        ViewsInUse,
    )
    from kvtier.key import Key, Keys
    from kvtier.layout import Group, KvSpec
    from kvtier.top_k import load_tokens

__version__ = "0.1.0"

__all__ = [
    "Blocks",
    "Client",
    "ConfigError",
    "FrameError",
    "Group",
    "InvalidArgument",
    "Key",
    "Keys",
    "KvSpec",
    "KvtierError",
    "Lease",
    "Match",
    "NotReady",
    "ProtocolError",
    "Refused",
    "Saved",
    "Saving",
    "Space",
    "SpecError",
    "StaleLease",
    "TierError",
    "Unavailable",
    "ViewsInUse",
    "load_tokens",
]

_HOME = {
    "client": ("Blocks", "Client", "Lease", "Match", "Saved", "Saving", "Space"),
    "key": ("Key", "Keys"),
    "layout": ("Group", "KvSpec"),
    "top_k": ("load_tokens",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import on first use: a command that needs no client starts without it."""
    module = _MODULE_OF.get(name, "errors" if name in __all__ else None)
    if module is None:
        raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
    return getattr(import_module(f"kvtier.{module}"), name)
