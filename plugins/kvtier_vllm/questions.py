"""What the daemon is asked for prompts, and its answers, which nobody waits for but for a moment.

A prompt's ticket stands for the answer that it waits for; one that is let go of is nobody's when it comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from kvtier import KvtierError
from kvtier.client import Answer
from kvtier_vllm.daemon import Daemon
from kvtier_vllm.ear import Ear
from kvtier_vllm.forecast import Forecast
from kvtier_vllm.layout import Layout
from kvtier_vllm.line import Session
from kvtier_vllm.naming import Names
from kvtier_vllm.options import Options
from kvtier_vllm.prompt import Prompt, Question

LONGER_S = 0.01  # to listen for an answer where the next step would be too late for it
LISTEN_S = 1.0  # how often to see whether a daemon that was asked nothing is still there


class Questions:
    """Those of one engine."""

    def __init__(
        self, layout: Layout, options: Options, daemon: Daemon, names: Names, forecast: Forecast,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._layout = layout
        self._options = options
        self._daemon = daemon
        self._names = names
        self._forecast = forecast
        self._clock = clock
        self._ear = Ear(clock)
        self._listened = float("-inf")
        self._tickets: dict[int, tuple[Prompt, float]] = {}  # who asked, and when
        self._tickets_of: Session | None = None
        self._soon: dict[str, Prompt] = {}
        self._told = (0.0, 0.0)
        self._told_to: Session | None = None

    def __len__(self) -> int:
        """How many are not answered yet."""
        return len(self._tickets)

    # --- asking ------------------------------------------------------------------------------

    def ask(self, prompt: Prompt, session: Session, question: Question | None = None) -> bool:
        """Whether it was asked: not before all of a long prompt has keys. Without a `question`, as last."""
        prompt.asked = question or prompt.asked
        keys = self._names.of(prompt, session)
        prompt.ticket = 0  # what it has so far it keeps until the answer
        shards = range(self._layout.shards.count)
        block = self._layout.block_tokens
        count = min(prompt.loadable(block), session.space.most_keys(len(shards)))
        whole = len(prompt.request.block_hashes) * self._layout.hash_tokens
        if len(keys) < min(count, whole // block):
            self.soon(prompt)
            return False
        if self._tickets_of is not session:
            self._tickets, self._tickets_of = {}, session
        try:
            self._tell_prefill(session)
            ticket = session.space.begin_lease(
                keys[:count], self._options.lease_ms, shards,
                request=prompt.number, within_ms=self._options.patience_ms,
                wait_ms=int(prompt.wait_s * 1000), first=min(prompt.asked.first, count),
                bring=prompt.asked.bring,
            )  # fmt: skip
        except KvtierError as error:
            self._daemon.lost(session, error)
            return False
        prompt.ticket, prompt.asked_at, prompt.wait_s = ticket, self._clock(), 0.0
        self._tickets[ticket] = prompt, prompt.asked_at
        return True

    def _tell_prefill(self, session: Session) -> None:
        """Have the daemon know what computing takes, each time that this has changed by a tenth."""
        fit = self._forecast.prefill
        told = self._told if self._told_to is session else (0.0, 0.0)
        if any(abs(now - was) > 0.1 * was for now, was in zip(fit, told, strict=True)):
            session.space.prefill(*fit)
            self._told, self._told_to = fit, session

    def soon(self, prompt: Prompt, question: Question | None = None) -> None:
        """Ask with the next step; unless an answer is still to come."""
        if not prompt.ticket:
            prompt.asked = question or prompt.asked
            self._soon[prompt.request.request_id] = prompt

    def take_soon(self) -> Iterable[Prompt]:
        """Those that are to be asked for with this step."""
        self._ear.next_step()
        if not self._soon:
            return ()
        soon, self._soon = self._soon, {}
        return soon.values()

    def end(self, prompt: Prompt, waited: bool) -> None:
        """Ask no more for this prompt. Where it waited for something, the daemon is told that nobody does."""
        self._soon.pop(prompt.request.request_id, None)
        session = self._daemon.session
        if waited and session is not None and prompt.session is session:
            try:
                session.space.cancel(prompt.number)
            except KvtierError as error:
                self._daemon.lost(session, error)

    def move(self, session: Session | None) -> None:
        """Keep nothing of other sessions: their arena would stay mapped."""
        if self._tickets_of is not session:
            self._tickets, self._tickets_of = {}, None
        if self._told_to is not session:
            self._told_to = None

    # --- answers -----------------------------------------------------------------------------

    def heard(self, prompt: Prompt, session: Session, longer: bool = False) -> bool:
        """Listen for the answer, for a moment, so that the step that is to come has it."""
        there = session is self._daemon.session
        most_s = LONGER_S if longer else 0.0
        return bool(prompt.ticket) and there and self._ear.wait(session.client.fileno(), most_s)

    def answers(self) -> Iterator[tuple[Prompt | None, Answer]]:
        """What has come, and who waits for it. A daemon that answers nobody is left alone."""
        session = self._daemon.session
        if session is None:
            return
        now = self._clock()
        if not session.client.awaits and now - self._listened < LISTEN_S:
            return
        self._listened = now
        try:
            answers = session.client.poll()
        except KvtierError as error:
            self._daemon.lost(session, error)
            return
        if answers:
            self._ear.heard()
        for ticket, answer in answers.items():
            yield self._answered(session, ticket), answer
        if self._tickets_of is session and self._tickets:
            _, asked_at = next(iter(self._tickets.values()))
            if now - asked_at > self._options.patience_ms / 1000:
                self._daemon.lost(session, "it does not answer")

    def _answered(self, session: Session, ticket: int) -> Prompt | None:
        # Another session gives the same numbers again, to others.
        if self._tickets_of is not session or ticket not in self._tickets:
            return None
        prompt, _ = self._tickets.pop(ticket)
        if prompt.ticket != ticket:
            return None
        prompt.ticket = 0
        return prompt
