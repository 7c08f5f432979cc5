"""kvtier: a KV cache for inference engines, kept on the cheapest memory that beats recomputing it."""

from kvtier.client import Blocks, Client, Lease, Match, Saved, Saving, Space
from kvtier.errors import (
    ConfigError,
    KvtierError,
    ProtocolError,
    Refused,
    SpecError,
    StaleLease,
    Unavailable,
)
from kvtier.key import Key, Keys
from kvtier.layout import Group, KvSpec

__version__ = "0.1.0"

__all__ = [
    "Blocks",
    "Client",
    "ConfigError",
    "Group",
    "Key",
    "Keys",
    "KvSpec",
    "KvtierError",
    "Lease",
    "Match",
    "ProtocolError",
    "Refused",
    "Saved",
    "Saving",
    "Space",
    "SpecError",
    "StaleLease",
    "Unavailable",
]
