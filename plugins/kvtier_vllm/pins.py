"""What requests want kept in memory: the daemon is told when it is there, and when all of it has keys."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvtier import Keys, KvtierError
from kvtier.client import Pinned
from kvtier_vllm.daemon import Daemon
from kvtier_vllm.layout import Layout
from kvtier_vllm.line import Session
from kvtier_vllm.naming import Names
from kvtier_vllm.prompt import Prompt


@dataclass(slots=True, frozen=True)
class Pin:
    """What is to stay for so long, once it is here."""

    session: Session
    keys: Keys
    seconds: float


class Pins:
    """Those of one engine. `counts` is told what became of them."""

    def __init__(self, layout: Layout, daemon: Daemon, names: Names, counts: Counter[str]) -> None:
        self._layout = layout
        self._daemon = daemon
        self._names = names
        self._counts = counts
        self._unnamed: dict[str, Prompt] = {}  # not all of whose keys are known yet
        self._unsaved: dict[int, Pin] = {}  # of what a save has yet to bring

    def __len__(self) -> int:
        """How many the daemon is not told of yet."""
        return len(self._unnamed) + len(self._unsaved)

    def pin(self, prompt: Prompt) -> None:
        """Have what is here of a prompt stay, if its request wants that: once all of it has keys."""
        session = self._daemon.session
        if not prompt.pin_s or prompt.pinned or session is None:
            return
        named = len(prompt.request.block_hashes) * self._layout.hash_tokens
        blocks = min(prompt.request.num_prompt_tokens, named) // self._layout.block_tokens
        keys = self._names.of(prompt, session)
        if len(keys) < blocks:
            self._unnamed[prompt.request.request_id] = prompt
            return
        prompt.pinned = True
        self._begin(Pin(session, keys[:blocks], prompt.pin_s))

    def go_on(self) -> None:
        """Name more of the long prompts that are to be pinned."""
        if not self._unnamed:
            return
        unnamed, self._unnamed = self._unnamed, {}
        for prompt in unnamed.values():
            self.pin(prompt)

    def when_saved(self, prompt: Prompt, session: Session, save: int) -> None:
        """Once this save is over, have what is saved of the prompt stay."""
        if prompt.pin_s:
            blocks = prompt.request.num_prompt_tokens // self._layout.block_tokens
            keys = self._names.of(prompt, session)[: min(blocks, prompt.saved or 0)]
            self._unsaved[save] = Pin(session, keys, prompt.pin_s)

    def saved(self, save: int) -> None:
        pin = self._unsaved.pop(save, None)
        if pin is not None:
            self._begin(pin)

    def _begin(self, pin: Pin) -> None:
        if self._daemon.session is pin.session and len(pin.keys):
            try:
                pin.session.space.begin_pin(pin.keys, pin.seconds)
            except KvtierError as error:
                self._daemon.lost(pin.session, error)

    def answered(self, answer: Pinned) -> None:
        outcome = "held" if answer.blocks else "refused" if answer.refused else "empty"
        self._counts[f"pin:{outcome}"] += 1

    def forget_names(self) -> None:
        """What was named so far is called otherwise now."""
        self._unnamed.clear()
        self._unsaved.clear()
