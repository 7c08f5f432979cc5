"""A synthetic chat service: conversations that share system prompts and continue turn by turn.

No model runs: the bytes of a block are its key, repeated, so that every loaded byte can be verified.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from kvtier import Client, KvSpec, Space
from kvtier.key import KEY_BYTES

SYSTEM_PROMPTS = 3
SYSTEM_TOKENS = 256
TURN_TOKENS = (64, 192)
TURNS_MAX = 8

# An 8B model with grouped-query attention: 128 KiB per token, 2 MiB per block.
SPEC = KvSpec.dense(
    model="demo-8b", layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16,
    weights="rev:demo",
)  # fmt: skip


@dataclass(slots=True)
class ChatStep:
    """The costs and results of one turn."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    saved_blocks: int = 0
    wrong_blocks: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    saved_bytes: int = 0
    save_s: float = 0.0


@dataclass(slots=True)
class Conversation:
    tokens: array[int]
    turns: int = 0


@dataclass(slots=True)
class ChatService:
    """The turns of many conversations in random order; popular ones continue sooner."""

    seed: int
    conversations: int = 48
    _living: list[Conversation] = field(default_factory=list)

    def prompts(self) -> Iterator[array[int]]:
        """Yield endless prompts: the whole history and a new question each time."""
        chance = random.Random(self.seed)
        # The system prompts belong to the service: every engine uses the same, independent of its seed.
        common = random.Random("system prompts")
        systems = [_tokens(common, SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
        while True:
            while len(self._living) < self.conversations:
                self._living.append(Conversation(array("I", chance.choice(systems))))
            place = min(int(chance.expovariate(6.0 / self.conversations)), self.conversations - 1)
            talk = self._living[place]
            talk.tokens.extend(_tokens(chance, chance.randint(*TURN_TOKENS)))
            talk.turns += 1
            if talk.turns == TURNS_MAX:
                self._living.pop(place)
            yield talk.tokens


class DemoEngine:
    """Uses kvtier as an inference engine does: loads the prefix, computes the rest, saves it."""

    def __init__(self, client: Client, spec: KvSpec) -> None:
        self._space: Space = client.open(spec)
        self._block_bytes = spec.block_bytes
        self._block_tokens = spec.block_tokens
        most = (SYSTEM_TOKENS + TURNS_MAX * TURN_TOKENS[1]) // spec.block_tokens
        self._memory = memoryview(bytearray(most * spec.block_bytes))

    def serve(self, prompt: array[int]) -> ChatStep:
        step = ChatStep(prompt_tokens=len(prompt))
        keys = self._space.keys(prompt)
        size = self._block_bytes
        started = time.perf_counter()
        ready = self._space.load_into(keys, self._memory[: len(keys) * size])
        step.load_s = time.perf_counter() - started
        step.loaded_bytes = ready * size
        step.hit_tokens = ready * self._block_tokens
        for at in range(ready):
            # A copy: a view is compared one element at a time, which takes 20 times as long.
            block = bytes(self._memory[at * size : (at + 1) * size])
            step.wrong_blocks += block != kv_bytes(keys[at], size)
        computed = [kv_bytes(key, size) for key in keys[ready:]]
        if computed:
            started = time.perf_counter()
            saved = self._space.save(keys[ready:], computed)
            step.save_s = time.perf_counter() - started
            step.saved_blocks = saved.stored
            step.saved_bytes = saved.stored * size
        return step


def kv_bytes(key: bytes, nbytes: int) -> bytes:
    """Return the synthetic K and V of a block; no other block has the same bytes."""
    whole, rest = divmod(nbytes, KEY_BYTES)
    return key * whole + key[:rest]


def _tokens(chance: random.Random, count: int) -> array[int]:
    return array("I", (chance.randrange(128_000) for _ in range(count)))


def serve(socket: str, seed: int, seconds: float) -> None:
    """Run one engine for a while. Prints a line of JSON for each turn."""
    with Client.connect(socket, name=f"engine {seed}") as client:
        engine = DemoEngine(client, SPEC)
        deadline = time.monotonic() + seconds
        for prompt in ChatService(seed).prompts():
            if time.monotonic() >= deadline:
                return
            print(json.dumps(asdict(engine.serve(prompt))), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent process reports the interruption
    serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
