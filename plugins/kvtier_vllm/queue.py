"""The requests that have no pages yet, in the order in which they came, and when the scheduler is expected to
ask for one of them again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from kvtier_vllm.forecast import Forecast
from kvtier_vllm.layout import Layout
from kvtier_vllm.prompt import Prompt
from kvtier_vllm.room import Room

AHEAD = 4  # requests whose blocks are read from disk before the scheduler asks for them


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine has before it: requests that wait, the blocks that they take, the tokens that are to be
    computed for them and for those that run."""

    waiting: int
    running: int
    blocks: int
    tokens: int


class Queue:
    """That of one engine."""

    def __init__(self, layout: Layout, forecast: Forecast) -> None:
        self.room = Room()
        self._layout = layout
        self._forecast = forecast
        self._waiting: dict[str, Prompt] = {}
        self._load: Load | None = None  # in this step

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, prompt: Prompt) -> None:
        self._waiting[prompt.request.request_id] = prompt
        self._load = None

    def leave(self, prompt: Prompt) -> None:
        self._waiting.pop(prompt.request.request_id, None)

    def ahead(self) -> Iterator[Prompt]:
        """Those that come next."""
        return islice(self._waiting.values(), AHEAD)

    def own_blocks(self, prompt: Prompt) -> int | None:
        """How many leading blocks the engine has itself; None where it does not say."""
        tokens = self.room.own_tokens(prompt.request)
        return None if tokens is None else tokens // self._layout.block_tokens

    def next_step(self) -> None:
        self._load = None

    def next_ask_s(self, prompt: Prompt, prompts: Iterable[Prompt]) -> float:
        """How long until the scheduler asks for this one again, if it is held back now: without limit where
        others may take its place."""
        load = self._load or self._look(prompts)
        mine = prompt.request.request_id in self._waiting
        others = load.waiting - mine
        if not others and not load.running:
            return 0.0
        blocks = load.blocks - mine * self.room.blocks_for(prompt.request.num_tokens)
        seats = self.room.seats - load.running
        if others and (others >= seats or blocks > self.room.free_blocks()):
            return float("inf")
        tokens = load.tokens - mine * self._to_compute(prompt)
        steps = 1 + max(0, tokens) // self.room.step_tokens
        return steps * self._forecast.longest_step_s()

    def _look(self, prompts: Iterable[Prompt]) -> Load:
        waiting = self._waiting
        running = [one for one in prompts if one.request.request_id not in waiting]
        self._load = Load(
            len(waiting), len(running),
            sum(self.room.blocks_for(one.request.num_tokens) for one in waiting.values()),
            sum(self._to_compute(one) for one in waiting.values())
            + sum(
                max(0, one.request.num_tokens - one.request.num_computed_tokens)
                for one in running
            ),
        )  # fmt: skip
        return self._load

    def _to_compute(self, prompt: Prompt) -> int:
        """Of one that waits: what the daemon is not known to have."""
        known = (prompt.known or 0) * self._layout.block_tokens
        tokens: int = prompt.request.num_tokens
        return max(0, tokens - max(known, prompt.computed))
