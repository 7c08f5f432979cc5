"""Pins, priorities and prefetches of requests, sent once the prompt's blocks are stored and have keys."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from kvtier import Keys, KvtierError
from kvtier.client import Match, Pinned
from kvtier_vllm.daemon import Daemon, DaemonSession
from kvtier_vllm.identity import BlockKeys
from kvtier_vllm.layout import Layout
from kvtier_vllm.prompt import Prompt


@dataclass(slots=True, frozen=True)
class PinRequest:
    """The request of a prompt for these blocks, once they are stored."""

    session: DaemonSession
    keys: Keys
    prompt: Prompt


class Pins:
    """The pin requests of one engine. Writes the pin state of prompts. `counts` counts their outcomes."""

    def __init__(
        self, layout: Layout, daemon: Daemon, keys: BlockKeys, counts: Counter[str]
    ) -> None:
        self._layout = layout
        self._daemon = daemon
        self._keys = keys
        self._counts = counts
        self._without_keys: dict[str, Prompt] = {}  # whose keys are not all known yet
        self._unsaved: dict[int, PinRequest] = {}  # by the save that stores the blocks
        self._pending_pins: deque[PinRequest] = deque()  # in the order of the answers
        self._pending_prefetches: deque[PinRequest] = deque()  # in the order of the answers

    def __len__(self) -> int:
        """How many requests were not sent yet."""
        return len(self._without_keys) + len(self._unsaved)

    def pin(self, prompt: Prompt) -> None:
        """Send the request of a prompt for its stored blocks, or later, once all of them have keys."""
        session = self._daemon.session
        if not prompt.options.has_pin_requests or prompt.pin.requested or session is None:
            return
        named = len(prompt.request.block_hashes) * self._layout.hash_tokens
        blocks = min(prompt.request.num_prompt_tokens, named) // self._layout.block_tokens
        keys = self._keys.of(prompt, session)
        if len(keys) < blocks:
            self._without_keys[prompt.request.request_id] = prompt
            return
        prompt.pin.requested = True
        self._send(PinRequest(session, keys[:blocks], prompt))

    def next_step(self) -> None:
        """Derive more keys of the long prompts with pin requests."""
        if not self._without_keys:
            return
        prompts, self._without_keys = self._without_keys, {}
        for prompt in prompts.values():
            self.pin(prompt)

    def when_saved(self, prompt: Prompt, session: DaemonSession, save: int) -> None:
        """Send the request for the prompt's saved blocks once this save has ended."""
        if prompt.options.has_pin_requests:
            blocks = prompt.request.num_prompt_tokens // self._layout.block_tokens
            keys = self._keys.of(prompt, session)[: min(blocks, prompt.save.saved or 0)]
            self._unsaved[save] = PinRequest(session, keys, prompt)

    def saved(self, save: int) -> None:
        pin = self._unsaved.pop(save, None)
        if pin is not None:
            self._send(pin)

    def _send(self, pin: PinRequest) -> None:
        if self._daemon.session is pin.session and len(pin.keys):
            options = pin.prompt.options
            try:
                if options.warm and not pin.prompt.save.finished:
                    pin.session.space.begin_prefetch(pin.keys)
                    self._pending_prefetches.append(pin)
                if options.priority is not None:
                    pin.session.space.begin_hint(pin.keys, options.priority)
                if options.pin_s:
                    pin.session.space.begin_pin(pin.keys, options.pin_s)
                    self._pending_pins.append(pin)
            except KvtierError as error:
                self._daemon.lost(pin.session, error)

    def answered(self, answer: Pinned) -> None:
        while self._pending_pins:
            pin = self._pending_pins.popleft()
            if pin.session is self._daemon.session:
                state = pin.prompt.pin
                state.blocks = max(answer.blocks, state.blocks or 0)
                break
        outcome = "held" if answer.blocks else "refused" if answer.refused else "empty"
        self._counts[f"pin:{outcome}"] += 1

    def prefetched(self, answer: Match) -> None:
        while self._pending_prefetches:
            pin = self._pending_prefetches.popleft()
            if pin.session is self._daemon.session:
                pin.prompt.pin.prefetched = answer
                break

    def forget_keys(self) -> None:
        """Discard the requests that are not sent: their blocks have other keys now."""
        self._without_keys.clear()
        self._unsaved.clear()
