"""What two routers do with KV events, written from the rules of their parsers: Dynamo and llm-d. Both get the
messages as they are on the wire."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

DYNAMO_TIERS = {
    "GPU": "device", "CPU": "host", "CPU_PINNED": "host", "STORAGE": "disk", "DISK": "disk",
    "NVME": "disk", "EXTERNAL": "shared", "REMOTE": "shared", "SHARED": "shared",
}  # fmt: skip
STORED = {
    "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
    "locality", "ownership", "session_id", "lookahead_token_ids",
}  # fmt: skip
REMOVED = {"type", "block_hashes", "medium", "group_idx", "locality", "ownership"}
MAIN_KINDS = (None, "full_attention", "mla_attention", "sink_full_attention")


def batch(body: bytes) -> tuple[list[dict[str, Any]], int | None]:
    """The events of a message, and its data-parallel rank: an array `[ts, [events], rank]` of maps."""
    decoded = msgspec.msgpack.decode(body)
    assert isinstance(decoded, list) and len(decoded) in (2, 3), "the batch is an array"
    ts, events, *rank = decoded
    assert isinstance(ts, float) and isinstance(events, list)
    for event in events:
        assert isinstance(event, dict), "an event is a map"
        kinds = {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": {"type"}}
        assert event.keys() <= kinds[event["type"]], event.keys()
    return events, rank[0] if rank else None


class Dynamo:
    """The blocks of one worker by tier, named by their tokens, parent and salt. Unknown media
    and other unfit events are dropped, and counted by reason."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.there: dict[str, dict[Any, tuple[Any, ...]]] = {}
        self.dropped: Counter[str] = Counter()
        self._content: dict[Any, tuple[Any, ...]] = {}

    def take(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.there.clear()
            return
        tier = DYNAMO_TIERS.get(event.get("medium") or "GPU")
        if tier is None or event.get("locality") not in (None, "LOCAL"):
            self.dropped["medium" if tier is None else "locality"] += 1
            return
        blocks = self.there.setdefault(tier, {})
        hashes = event["block_hashes"]
        if event["type"] == "BlockRemoved":
            for one in hashes:
                blocks.pop(one, None)
            return
        if event.get("kv_cache_spec_kind") not in MAIN_KINDS:
            self.dropped["kind"] += len(hashes)
            return
        if event["block_size"] != self.block_size:
            self.dropped["block_size"] += len(hashes)
            return
        tokens, parent = event["token_ids"], event["parent_block_hash"]
        assert len(tokens) == len(hashes) * self.block_size, "the tokens of each block"
        extra, lora = event.get("extra_keys") or [None] * len(hashes), event.get("lora_name")
        assert len(extra) == len(hashes), "an entry for each block"
        for at, one in enumerate(hashes):
            part = tuple(tokens[at * self.block_size : (at + 1) * self.block_size])
            content = self._content.get(parent), part, salt_of(extra[at], lora), lora
            known = self._content.setdefault(one, content)
            assert known[1:] == content[1:], "one hash names one content"
            blocks[one] = known
            parent = one

    def prefix(
        self, tier: str, tokens: list[int], salt: str | None = None, lora: str | None = None
    ) -> int:
        """How many leading blocks of this prompt the worker has in this tier."""
        contents, parent, size = set(self.there.get(tier, {}).values()), None, self.block_size
        for at in range(len(tokens) // size):
            part = tuple(tokens[at * size : (at + 1) * size])
            parent = (parent, part, None if at else salt, lora)
            if parent not in contents:
                return at
        return len(tokens) // size


def salt_of(extra: Any, lora: str | None) -> str | None:
    """The cache salt: the string among the additional keys of a block that is not the adapter's name."""
    found = [one for one in extra or () if isinstance(one, str) and one != lora]
    return found[-1] if found else None


class Llmd:
    """The pods that have a block, by tier. It computes its own hashes from tokens, in the order of the chain:
    a block whose parent is unknown is skipped, and empty tokens only add a tier to known blocks."""

    def __init__(self) -> None:
        self.there: dict[Any, set[str]] = {}
        self.skipped = 0
        self._own: dict[Any, tuple[Any, ...]] = {}

    def take(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.there.clear()
            return
        medium = (event.get("medium") or "GPU").lower()
        if event["type"] == "BlockRemoved":
            for one in event["block_hashes"]:
                self.there.get(self._own.get(one), set()).discard(medium)
            return
        tokens, parent = event["token_ids"], event["parent_block_hash"]
        size = event["block_size"]
        if parent is not None and parent not in self._own:
            self.skipped += len(event["block_hashes"])
            return
        before = self._own.get(parent)
        for at, one in enumerate(event["block_hashes"]):
            part = tuple(tokens[at * size : (at + 1) * size])
            if not tokens:
                if one not in self._own:
                    self.skipped += 1
                    continue
            else:
                self._own[one] = (before, part)
            before = self._own[one]
            self.there.setdefault(before, set()).add(medium)

    def prefix(self, medium: str, tokens: list[int], size: int) -> int:
        own: tuple[Any, ...] | None = None
        for at in range(len(tokens) // size):
            own = (own, tuple(tokens[at * size : (at + 1) * size]))
            if medium not in self.there.get(own, set()):
                return at
        return len(tokens) // size


def pod_of(topic: bytes) -> tuple[str, str]:
    """The pod and the model of a topic `kv@POD@MODEL`, which llm-d requires."""
    kind, pod, model = topic.decode().split("@", 2)
    assert kind == "kv"
    return pod, model
