"""A request as the scheduler's side knows it, what it loads, and what it wants kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtier import Keys
from kvtier.client import Lease
from kvtier_vllm.line import Session


@dataclass(slots=True)
class Hit:
    """What one load brings, in tokens."""

    request_id: str
    warm: int
    cold: int
    good: bool = True


@dataclass(slots=True, frozen=True)
class Pin:
    """What is to stay for so long, once it is here."""

    session: Session
    keys: Keys
    seconds: float


@dataclass(slots=True, eq=False)
class Prompt:
    """A request: its keys, and what is known of them. `due`: when what is coming was to be here, where
    nothing is known of recomputing."""

    request: Any
    extras: bytes
    may_load: bool
    may_save: bool
    pin_s: float = 0.0
    keys: Keys | None = None
    session: Session | None = None  # of whose keys, ticket and lease
    ticket: int = 0
    number: int = 0  # by which the daemon knows it
    asked_at: float = 0.0
    wait_s: float = 0.0  # how long the daemon may take to answer the next time it is asked
    lease: Lease | None = None
    leased_at: float = 0.0
    waits_since: float | None = None
    known: int | None = None  # how many leading blocks the daemon has
    saved: int | None = None  # how many leading blocks need no save any more
    tries: int = 0  # saves that left a hole
    dropped: int = 0  # how many leading blocks are saved, or counted as dropped
    over: bool = False
    unfilled: bool = False  # its load has failed, and it was not computed since
    due: float | None = None
    gave_up: bool = False
    waited: bool = False
    computed: int = 0
    coming: tuple[int, int] = (0, 0)  # blocks that were on disk when they were asked for
    hit: Hit | None = None
    pinned: bool = False
    between: bool = False  # steps, it is loaded
