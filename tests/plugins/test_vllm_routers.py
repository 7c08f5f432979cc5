"""KV events fulfil the rules of the parsers of routers (support/routers.py)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvtier import wire
from kvtier_vllm.events import KvEvents, Removed, SpecKind, Stored, fields_of
from kvtier_vllm.layout import Cached, Layout, Shards
from support.daemons import Daemon, start_daemon
from support.fake_engine import BLOCK, FakeEngine, layout_of
from support.routers import MAIN_KINDS, REMOVED, STORED, Dynamo, Llmd, batch, pod_of

FULL = {0: SpecKind("full_attention", None)}
PROMPT = list(range(8 * BLOCK))
EngineOf = Callable[..., FakeEngine]


def sent(events: list[Any], layout: Layout, kinds: dict[int, SpecKind] = FULL) -> bytes:
    """The message of these events, as the engine encodes its own ones: maps with a type, without the fields
    that have their default."""

    def packed(event: Any) -> dict[str, Any]:
        fields = fields_of(event, layout, kinds, lambda one: int.from_bytes(one[-8:], "big"))
        kind = "BlockRemoved" if isinstance(event, Removed) else "BlockStored"
        needed = {
            "block_hashes",
            "medium",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "lora_name",
        }
        return {"type": kind} | {
            key: value for key, value in fields.items() if value is not None or key in needed
        }

    return msgspec.msgpack.encode([1.5, [packed(one) for one in events], 0])


class Routers:
    """Both routers, which follow a fake engine."""

    def __init__(
        self, layout: Layout, kinds: dict[int, SpecKind] = FULL, block_size: int = BLOCK
    ) -> None:
        self.layout, self.kinds = layout, kinds
        self.dynamo, self.llmd = Dynamo(block_size), Llmd()
        self.events: list[dict[str, Any]] = []

    def take(self, events: list[Any]) -> None:
        found, rank = batch(sent(events, self.layout, self.kinds))
        assert rank == 0
        self.events += found
        for event in found:
            self.dynamo.take(event)
            self.llmd.take(event)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    (tmp_path / "disk").mkdir()
    cold = f'[cold]\ndirectories = ["{tmp_path}/disk"]\nsize = "64MiB"\nwrite = "through"\n'
    daemon = start_daemon(tmp_path, config='[warm]\nsize = "16MiB"\n' + cold)
    yield daemon
    daemon.stop()


def test_both_routers_follow_blocks_in_memory_and_on_disk(
    daemon: Daemon, engine_of: EngineOf
) -> None:
    engine = engine_of(daemon, layout_of(), events=True)
    routers = Routers(engine.layout)
    engine.serve(PROMPT)

    def heard() -> bool:
        routers.take(engine.scheduler.take_events())
        return bool(
            routers.dynamo.prefix("disk", PROMPT) == routers.dynamo.prefix("host", PROMPT) == 8
        )

    engine.until(heard)
    assert routers.llmd.prefix("cpu", PROMPT, BLOCK) == 8
    assert routers.llmd.prefix("storage", PROMPT, BLOCK) == 8
    assert not routers.dynamo.dropped and not routers.llmd.skipped
    assert routers.dynamo.prefix("host", PROMPT, salt="other") == 0
    assert routers.dynamo.prefix("shared", PROMPT) == 0, "blocks of the store are of no host"
    # The daemon goes: all of them are removed, and nothing of the engine's own blocks is.
    gpu = {
        "type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": PROMPT[:BLOCK],
        "block_size": BLOCK, "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    routers.dynamo.take(gpu)
    engine.scheduler.new_generation()
    routers.take(engine.scheduler.take_events())
    assert routers.dynamo.prefix("host", PROMPT) == routers.dynamo.prefix("disk", PROMPT) == 0
    assert routers.llmd.prefix("cpu", PROMPT, BLOCK) == 0
    assert routers.dynamo.prefix("device", PROMPT[:BLOCK]) == 1
    assert "AllBlocksCleared" not in {event["type"] for event in routers.events}


def test_each_event_has_the_fields_that_routers_need(daemon: Daemon, engine_of: EngineOf) -> None:
    engine = engine_of(daemon, layout_of(), events=True)
    routers = Routers(engine.layout)
    engine.serve(PROMPT)

    def heard() -> bool:
        routers.take(engine.scheduler.take_events())
        return routers.dynamo.prefix("host", PROMPT) == 8

    engine.until(heard)
    engine.scheduler.new_generation()
    routers.take(engine.scheduler.take_events())
    kinds = {event["type"] for event in routers.events}
    assert kinds == {"BlockStored", "BlockRemoved"}
    for event in routers.events:
        is_stored = event["type"] == "BlockStored"
        assert event.keys() <= (STORED if is_stored else REMOVED)
        assert event["locality"] == "LOCAL" and "ownership" not in event
        assert event["medium"] in ("CPU", "STORAGE") and event["group_idx"] == 0
        assert all(isinstance(one, int) for one in event["block_hashes"])
        if is_stored:
            assert event["block_size"] == BLOCK and event["kv_cache_spec_kind"] in MAIN_KINDS
            assert len(event["token_ids"]) == BLOCK * len(event["block_hashes"])


def request_of(tokens: list[int], hash_tokens: int, **more: Any) -> Any:
    hashes = [at.to_bytes(4, "big") * 8 for at in range(1, len(tokens) // hash_tokens + 1)]
    return SimpleNamespace(
        all_token_ids=tokens,
        block_hashes=hashes,
        **{"lora_request": None, "session_id": None} | more,
    )


def stored(layout: Layout, request: Any, extra_keys: Any = None) -> list[Any]:
    """The events after all blocks of this request came to memory and left it again."""
    events = KvEvents(layout, extra_keys or (lambda *_: None))
    keys = [bytes([at + 1]) * 32 for at in range(len(request.all_token_ids) // layout.block_tokens)]
    events.name(request, keys, 0)  # type: ignore[arg-type]
    for what in (wire.CAME, wire.WENT):
        for group in range(len(layout.groups)):
            events.apply([(what, wire.MEMORY, group, 0, key) for key in keys])
    return events.take()


def test_groups_with_other_blocks_publish_the_hashes_of_the_engine_s_own_blocks() -> None:
    """A block of kvtier has 64 tokens: one block of the engine in one group, four in another one."""
    pages = (("layer", 4096),)
    groups = (Cached(0, "full", 0, pages, 4), Cached(2, "window", 128, pages, 1))
    layout = Layout(64, 16, groups, Shards(1, 1))
    kinds = {0: SpecKind("full_attention", None), 2: SpecKind("sliding_window", 128)}
    tokens = list(range(192))
    request = request_of(tokens, 16)
    events = stored(layout, request)
    routers = Routers(layout, kinds, block_size=16)
    routers.take([one for one in events if isinstance(one, Stored)])
    assert routers.dynamo.prefix("host", tokens) == 12
    assert routers.dynamo.dropped == {"kind": 3}, "windows are not prefixes"
    first, second = routers.events
    ints = [int.from_bytes(one[-8:], "big") for one in request.block_hashes]
    assert (first["block_size"], first["block_hashes"], first["group_idx"]) == (16, ints, 0)
    assert (second["block_size"], second["block_hashes"], second["group_idx"]) == (
        64,
        ints[3::4],
        2,
    )
    assert second["kv_cache_spec_sliding_window"] == 128
    assert first["parent_block_hash"] is second["parent_block_hash"] is None
    routers.take([one for one in events if isinstance(one, Removed)])
    assert routers.dynamo.prefix("host", tokens) == 0
    assert [event["block_hashes"] for event in routers.events[2:]] == [ints, ints[3::4]]


def test_the_parent_of_later_blocks_is_the_engine_s_last_hash_before_them() -> None:
    layout = Layout(64, 16, (Cached(0, "full", 0, (("layer", 4096),), 4),), Shards(1, 1))
    request = request_of(list(range(128)), 16)
    events = KvEvents(layout)
    keys = [bytes([1]) * 32, bytes([2]) * 32]
    events.name(request, keys, 1)  # type: ignore[arg-type]
    events.apply([(wire.CAME, wire.DISK, 0, 0, keys[1])])
    (event,) = events.take()
    assert event.parent == request.block_hashes[3] and event.hashes == request.block_hashes[4:]
    llmd = Llmd()
    llmd.take(batch(sent([event], layout))[0][0])
    assert llmd.skipped == 4 and not llmd.there, "llm-d does not know the parent"


def test_salts_adapters_and_sessions_are_published() -> None:
    layout = layout_of()
    tokens = list(range(3 * BLOCK))
    adapter = SimpleNamespace(adapter_id=3, name="sql")

    def extra_keys(request: Any, begin: int, end: int) -> Any:
        assert end - begin == BLOCK
        keys = [request.lora_request.name] if request.lora_request else []
        return (*keys, request.cache_salt) if begin == 0 else tuple(keys) or None

    salted = request_of(tokens, BLOCK, cache_salt="user", session_id="chat-1")
    (event, *_) = stored(layout, salted, extra_keys)
    assert event.extra_keys == [("user",), None, None] and event.session == "chat-1"
    routers = Routers(layout)
    routers.take([event])
    assert routers.dynamo.prefix("host", tokens, salt="user") == 3
    assert routers.dynamo.prefix("host", tokens) == 0
    assert routers.events[-1]["session_id"] == "chat-1"
    both = request_of(tokens, BLOCK, cache_salt="user", lora_request=adapter)
    routers = Routers(layout)
    routers.take([one for one in stored(layout, both, extra_keys) if isinstance(one, Stored)])
    assert routers.dynamo.prefix("host", tokens, salt="user", lora="sql") == 3
    (event,) = routers.events
    assert (event["lora_id"], event["lora_name"]) == (3, "sql")
    assert event["extra_keys"] == [["sql", "user"], ["sql"], ["sql"]]
    plain = stored(layout, request_of(tokens, BLOCK), extra_keys)
    assert "extra_keys" not in batch(sent(plain, layout))[0][0]


def test_blocks_of_other_sessions_are_other_events() -> None:
    layout = layout_of()
    events, tokens = KvEvents(layout), list(range(2 * BLOCK))
    keys = [bytes([1]) * 32, bytes([2]) * 32]
    for at, session in enumerate(("a", "b")):
        events.name(request_of(tokens, BLOCK, session_id=session), keys[: at + 1], at)  # type: ignore[arg-type]
    events.apply([(wire.CAME, wire.MEMORY, 0, 0, key) for key in keys])
    first, second = events.take()
    assert (first.session, second.session) == ("a", "b") and second.parent == first.hashes[0]


@pytest.mark.parametrize("medium", ["PMEM", "cpu"])
def test_a_router_drops_media_that_it_does_not_know(medium: str) -> None:
    """The test of the test: other names than ours would be lost without notice."""
    dynamo = Dynamo(BLOCK)
    event = {
        "type": "BlockStored", "block_hashes": [1], "parent_block_hash": None,
        "token_ids": list(range(BLOCK)), "block_size": BLOCK, "lora_id": None, "medium": medium,
        "lora_name": None,
    }  # fmt: skip
    dynamo.take(event)
    dynamo.take(event | {"medium": "CPU", "locality": "REMOTE"})
    dynamo.take(event | {"medium": "CPU", "block_size": 2 * BLOCK})
    assert dynamo.dropped == {"medium": 1, "locality": 1, "block_size": 1}
    assert dynamo.prefix("host", list(range(BLOCK))) == 0


def test_tokens_of_events_are_the_block_s_own() -> None:
    """Later blocks in the same event do not change them."""
    layout = layout_of()
    (first, *_) = stored(layout, request_of(list(range(2 * BLOCK)), BLOCK))
    assert isinstance(first, Stored) and first.tokens == array("I", range(2 * BLOCK))


def test_the_topic_names_the_pod_and_the_model() -> None:
    assert pod_of(b"kv@pod-7@org/model@v1") == ("pod-7", "org/model@v1")
