"""What requests want kept in memory, and how much it matters: the daemon is told when it is there, and when
all of it has keys."""

from __future__ import annotations

from collections import Counter, deque
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
    """What a prompt wants of these blocks, once they are here."""

    session: Session
    keys: Keys
    prompt: Prompt


class Pins:
    """Those of one engine. `counts` is told what became of them."""

    def __init__(self, layout: Layout, daemon: Daemon, names: Names, counts: Counter[str]) -> None:
        self._layout = layout
        self._daemon = daemon
        self._names = names
        self._counts = counts
        self._unnamed: dict[str, Prompt] = {}  # not all of whose keys are known yet
        self._unsaved: dict[int, Pin] = {}  # of what a save has yet to bring
        self._begun: deque[Pin] = deque()  # in the order in which they are answered

    def __len__(self) -> int:
        """How many the daemon is not told of yet."""
        return len(self._unnamed) + len(self._unsaved)

    def pin(self, prompt: Prompt) -> None:
        """Tell what its request wants of what is here of a prompt: once all of it has keys."""
        session = self._daemon.session
        if not prompt.wishes.keeps or prompt.pinned or session is None:
            return
        named = len(prompt.request.block_hashes) * self._layout.hash_tokens
        blocks = min(prompt.request.num_prompt_tokens, named) // self._layout.block_tokens
        keys = self._names.of(prompt, session)
        if len(keys) < blocks:
            self._unnamed[prompt.request.request_id] = prompt
            return
        prompt.pinned = True
        self._begin(Pin(session, keys[:blocks], prompt))

    def go_on(self) -> None:
        """Name more of the long prompts that are to be pinned."""
        if not self._unnamed:
            return
        unnamed, self._unnamed = self._unnamed, {}
        for prompt in unnamed.values():
            self.pin(prompt)

    def when_saved(self, prompt: Prompt, session: Session, save: int) -> None:
        """Once this save is over, tell what is wanted of what is saved of the prompt."""
        if prompt.wishes.keeps:
            blocks = prompt.request.num_prompt_tokens // self._layout.block_tokens
            keys = self._names.of(prompt, session)[: min(blocks, prompt.saved or 0)]
            self._unsaved[save] = Pin(session, keys, prompt)

    def saved(self, save: int) -> None:
        pin = self._unsaved.pop(save, None)
        if pin is not None:
            self._begin(pin)

    def _begin(self, pin: Pin) -> None:
        if self._daemon.session is pin.session and len(pin.keys):
            wishes = pin.prompt.wishes
            try:
                if wishes.priority is not None:
                    pin.session.space.begin_hint(pin.keys, wishes.priority)
                if wishes.pin_s:
                    pin.session.space.begin_pin(pin.keys, wishes.pin_s)
                    self._begun.append(pin)
            except KvtierError as error:
                self._daemon.lost(pin.session, error)

    def answered(self, answer: Pinned) -> None:
        while self._begun:
            pin = self._begun.popleft()
            if pin.session is self._daemon.session:
                pin.prompt.pinned_blocks = max(answer.blocks, pin.prompt.pinned_blocks or 0)
                break
        outcome = "held" if answer.blocks else "refused" if answer.refused else "empty"
        self._counts[f"pin:{outcome}"] += 1

    def forget_names(self) -> None:
        """What was named so far is called otherwise now."""
        self._unnamed.clear()
        self._unsaved.clear()
