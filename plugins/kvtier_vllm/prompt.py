"""A request as the scheduler's side knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from kvtier import Keys
from kvtier.client import Lease
from kvtier_vllm.line import Session
from kvtier_vllm.wishes import PARAMETER, Wishes

Part = Literal["answer", "disk", "scheduler"]  # of the time that a request is held back


@dataclass(slots=True)
class Hit:
    """What one load brings, in tokens."""

    request_id: str
    warm: int
    cold: int
    good: bool = True


@dataclass(frozen=True, slots=True)
class Question:
    """How the daemon is asked for a prompt: from which block on, and whether to read from disk."""

    first: int = 0
    bring: bool = False


@dataclass(slots=True)
class Wait:
    """A request's, until it has pages: `since` when it is held back, whether that was `counted` already, and
    whether it `gave_up`: then it is computed. `parts` says what it was held back for, in seconds."""

    since: float | None = None
    counted: bool = False
    gave_up: bool = False
    reason: Part | None = None  # why the last call held it back
    came_at: float | None = None  # when that was over
    last: float = 0.0  # call that held it back
    parts: dict[Part, float] = field(default_factory=dict)

    def begin(self, now: float) -> float:
        """Since when it waits."""
        if self.since is None:
            self.since = now
        if self.reason is not None:
            came_at = max(self.last, now if self.came_at is None else min(self.came_at, now))
            self._add(self.reason, came_at - self.last)
            self._add("scheduler", now - came_at)
            self.reason = None
        return self.since

    def hold(self, reason: Part, now: float) -> None:
        """It is held back for this; what follows until the next call counts."""
        self.reason, self.last, self.came_at = reason, now, None

    def came(self, reason: Part, now: float) -> None:
        """What it was held back for has come; from now on it waits for the scheduler."""
        if self.reason == reason and self.came_at is None:
            self.came_at = now

    def _add(self, part: Part, seconds: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + seconds

    def end(self, now: float) -> float | None:
        """It waits no more; how long it did, the first time."""
        since, self.since = self.since, None
        if self.counted or since is None:
            return None
        self.counted = True
        return now - since


@dataclass(slots=True, eq=False)
class Prompt:
    """A request: its keys, and what is known of them. `due`: when what is coming was to be here, where
    nothing is known of recomputing."""

    request: Any
    extras: bytes
    may_load: bool
    may_save: bool
    wishes: Wishes = field(default_factory=Wishes)
    keys: Keys | None = None
    session: Session | None = None  # of whose keys, ticket and lease
    ticket: int = 0
    number: int = 0  # by which the daemon knows it
    asked_at: float = 0.0
    wait_s: float = 0.0  # how long the daemon may take to answer the next time it is asked
    lease: Lease | None = None
    leased_at: float = 0.0
    asked: Question = Question()
    answered: Question = Question()  # with its lease
    covers: int = 0  # from this block on its lease has what is ready
    wait: Wait = field(default_factory=Wait)
    known: int | None = None  # how many leading blocks the daemon has
    saved: int | None = None  # how many leading blocks need no save any more
    holes: int = 0  # that saves have left
    tries: int = 0  # to save the same blocks again
    hole: int = -1  # where those begin
    dropped: int = 0  # how many leading blocks are saved, or counted as dropped
    over: bool = False
    unfilled: bool = False  # its load has failed, and it was not computed since
    due: float | None = None
    computed: int = 0
    coming: tuple[int, int] = (0, 0)  # blocks that were on disk when they were asked for
    hit: Hit | None = None
    pinned: bool = False
    pinned_blocks: int | None = None  # as the daemon has confirmed
    got: tuple[int, int] = (0, 0)  # tokens that were loaded, from memory and from disk
    between: bool = False  # steps, it is loaded

    def loadable(self, block_tokens: int) -> int:
        """How many leading blocks can be loaded: one token is left to compute."""
        tokens: int = self.request.num_tokens
        return (tokens - 1) // block_tokens

    def told(self) -> dict[str, Any] | None:
        """What its response says, where it asked for something."""
        if not self.wishes.asked:
            return None
        warm, cold = self.got
        told: dict[str, Any] = {"warm_tokens": warm, "cold_tokens": cold}
        if self.wishes.pin_s:
            told["pinned_blocks"] = self.pinned_blocks
        return {PARAMETER: told}

    @property
    def waits(self) -> bool:
        """Whether it has an answer or blocks to come."""
        return bool(self.ticket or (self.lease is not None and self.lease.coming))

    def take_lease(self) -> Lease | None:
        """What it holds, which is the caller's from now on. No answer that is still to come is taken."""
        lease, self.lease, self.ticket = self.lease, None, 0
        return lease

    def release(self) -> None:
        """Hold nothing, and take no answer that is still to come."""
        lease = self.take_lease()
        if lease is not None:
            lease.release()

    def leave(self) -> None:
        """Forget what is known by its session."""
        self.release()
        if self.session is not None:
            # What that one had, the next may not: all is offered again, and taken where it lacks.
            self.known, self.saved = 0, None
        self.session = self.keys = None

    def belong(self, session: Session) -> None:
        """What is known of it is of this session."""
        if self.session is not session:
            self.leave()
            self.session = session
