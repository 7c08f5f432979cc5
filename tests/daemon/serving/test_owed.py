"""Lookups equal hits plus misses at every moment, and as metrics they never decrease."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import wire
from kvtier.layout import space_id
from kvtier_daemon.catalog import Catalog
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.observing.events import EventFeed
from kvtier_daemon.observing.histogram import Latencies
from kvtier_daemon.planning import WHY
from kvtier_daemon.serving.requests import Requests
from kvtier_daemon.tiers.base import NullTier
from kvtier_kernels import Store
from support.effort import effort
from support.specs import spec_of

BLOCKS = 8
KEYS = bytes(range(32)) * BLOCKS
numbers = st.integers(0, BLOCKS)
# Blocks in memory and on disk, blocks promised, and the reason; and the request with its id.
lookups = st.tuples(
    st.sampled_from(["match", "load"]), st.integers(0, 2), st.integers(1, BLOCKS),
    numbers, numbers, numbers, st.sampled_from(WHY), st.booleans(),
)  # fmt: skip
steps = st.one_of(lookups, st.tuples(st.just("cancel"), st.integers(0, 2)))


class Asking:
    """Answers requests from a catalog whose prefixes have the lengths of the test."""

    def __init__(self) -> None:
        self.catalog = Catalog(Store(), make("lru"))
        spec = spec_of()
        self.tokens = spec.block_tokens
        self.space = self.catalog.spaces.open(space_id(spec, "t"), spec)
        self.space.prefill = (1.0, 0.0)
        self.there, self.told, self.on = (0, 0), (0, ""), True
        self.catalog.reading.find = lambda space, keys: (*self.there, [])  # type: ignore[method-assign]
        hold = SimpleNamespace(id=1, token=b"")
        self.catalog.reading.hold = lambda *_: hold  # type: ignore
        self.tier: Any = NullTier()
        self.tier.promote = lambda *_, **__: (self.told[0], 1.0, self.told[1])
        tenant = SimpleNamespace(
            name="t",
            catalog=self.catalog,
            tier=self.tier,
            shared=NullTier(),
            pending=self.tier.pending,
        )
        self.tenant: Any = tenant
        server: Any = SimpleNamespace(
            clock=lambda: 0.0,
            recorder=SimpleNamespace(is_on=False),
            events=EventFeed(lambda: 0.0),
            latencies=Latencies(),
        )
        self.answers = Requests(
            SimpleNamespace(id=1, name="one", verifies=False), server  # type: ignore[arg-type]
        )  # fmt: skip

    def answer(self, request: wire.Request) -> None:
        self.answers.handlers[type(request)](self.tenant, request)
        self.answers.settle()

    @property
    def counted(self) -> Any:
        return self.answers.lookups.counted

    def do(self, step: tuple[Any, ...]) -> None:
        if step[0] == "cancel":
            self.answer(wire.Cancel(1, step[1]))
            return
        what, request, blocks, ready, coming, told, why, self.tier.is_on = step
        ready = min(ready, blocks)
        self.there = ready, min(coming, blocks - ready)
        self.told = min(told, self.there[1]), why
        keys = KEYS[: blocks * 32]
        asked: wire.Request = wire.MatchPrefix(1, self.space.number, keys, request)
        if what == "load":
            asked = wire.Load(1, self.space.number, keys, 1000, [0], request)
        self.answer(asked)

    @property
    def shown(self) -> dict[str, float]:
        """The values as metrics."""
        owed, hits = self.counted.pending_tokens, self.catalog.usage.hit_tokens
        return {
            "lookups": self.catalog.usage.lookup_tokens - owed,
            "warm": hits["warm"],
            "cold": hits["cold"] - owed,
            **{f"no: {why}": n for why, n in self.catalog.usage.miss_tokens.items()},
            "avoided": self.catalog.usage.avoided_s,
        }


@settings(max_examples=effort(150, 400, 400), deadline=None)
@given(st.lists(steps, max_size=12))
def test_hits_and_misses_add_up_to_lookups_and_never_fall(taken: list[tuple[Any, ...]]) -> None:
    asking = Asking()
    before = asking.shown
    for step in taken:
        asking.do(step)
        now, catalog = asking.shown, asking.catalog
        found = sum(catalog.usage.hit_tokens.values()) + sum(catalog.usage.miss_tokens.values())
        assert catalog.usage.lookup_tokens == found
        outcomes = [n for name, n in now.items() if name not in ("lookups", "avoided")]
        assert now["lookups"] == sum(outcomes)
        assert min(outcomes, default=0) >= 0
        fallen = {name for name, n in before.items() if now[name] < n}
        assert not fallen, (fallen, before, now)
        assert now["avoided"] <= now["warm"] + now["cold"]  # at one second per token
        assert (asking.counted.waiting > 0) == (asking.counted.pending_tokens > 0)
        before = now


def test_blocks_that_were_ready_once_are_not_pending_hits_of_the_disk() -> None:
    asking = Asking()
    everything = ("match", 1, BLOCKS, BLOCKS, 0, 0, "faster", True)
    on_disk = ("match", 1, BLOCKS, 0, BLOCKS, BLOCKS, "faster", True)
    gone = ("match", 1, BLOCKS, 0, 0, 0, "faster", True)
    for step in (everything, on_disk, gone):
        asking.do(step)
    assert asking.catalog.usage.hit_tokens == {
        "warm": BLOCKS * asking.tokens,
        "cold": 0,
        "remote": 0,
    }


def test_blocks_that_are_coming_count_when_they_are_ready() -> None:
    asking = Asking()
    asking.do(("load", 1, BLOCKS, 2, 6, 6, "faster", True))
    assert (asking.counted.waiting, asking.counted.pending_tokens) == (1, 6 * asking.tokens)
    assert asking.shown["lookups"] == asking.shown["avoided"] == 2 * asking.tokens
    asking.do(("load", 1, BLOCKS, 6, 2, 2, "faster", True))
    assert asking.counted.pending_tokens == 2 * asking.tokens
    assert asking.shown["cold"] == 4 * asking.tokens
    assert asking.shown["avoided"] == 6 * asking.tokens
    asking.do(("cancel", 1))
    assert (asking.counted.waiting, asking.counted.pending_tokens) == (0, 0)
