"""What the blocks of a request are called."""

from __future__ import annotations

import os

from kvtier import Keys
from kvtier_vllm.events import Events
from kvtier_vllm.layout import Layout
from kvtier_vllm.line import Session
from kvtier_vllm.prompt import Prompt

GENERATION_BYTES = 16
LIMIT_HASHES = 2048  # of blocks that become keys at a time: about a millisecond


class Names:
    """One for each engine. `events` hear them too."""

    def __init__(self, layout: Layout, events: Events | None) -> None:
        self._ratio = layout.block_tokens // layout.hash_tokens
        self._events = events
        self._generation = b""

    def of(self, prompt: Prompt, session: Session) -> Keys:
        """The keys of the whole blocks that this request has so far; of a very long prompt some more."""
        prompt.belong(session)
        ratio, keys = self._ratio, prompt.keys
        done = 0 if keys is None else len(keys)
        hashes = prompt.request.block_hashes
        if keys is None or len(hashes) // ratio > done:
            new = hashes[done * ratio + ratio - 1 : (done + LIMIT_HASHES) * ratio : ratio]
            more = session.space.keys_of_hashes(new, self._generation, prompt.extras, keys)
            keys = prompt.keys = Keys((keys.packed if keys else b"") + more.packed)
            if self._events is not None:
                self._events.name(prompt.request, keys, done)
        return keys

    def change(self) -> None:
        """From now on the same blocks are called otherwise."""
        self._generation = os.urandom(GENERATION_BYTES)
