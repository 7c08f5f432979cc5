"""A request as the scheduler's side knows it: its keys, and the state of its lookup, load, save and pin.

Each state is written by one module, which its docstring names; others read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from kvtier import Keys
from kvtier.client import Lease, Match
from kvtier_vllm.daemon import DaemonSession
from kvtier_vllm.options import PARAMETER, RequestOptions
from kvtier_vllm.stats import NO_ADAPTER

WaitPart = Literal["answer", "disk", "scheduler"]  # of the time that a request is held back


@dataclass(slots=True)
class Hit:
    """The tokens of one load, by the tier that held them when the request first asked."""

    request_id: str
    warm: int
    cold: int
    good: bool = True


@dataclass(frozen=True, slots=True)
class LookupQuery:
    """A lookup at the daemon: from which block on, and whether to read blocks from disk."""

    first: int = 0
    read_disk: bool = False


@dataclass(slots=True)
class Wait:
    """The time that a request is held back before it has pages. `since`: it is held back; `counted`: its time
    is in the statistics; `gave_up`: it is computed; `parts`: the seconds per reason."""

    since: float | None = None
    counted: bool = False
    gave_up: bool = False
    reason: WaitPart | None = None  # of the last call that held it back
    held_at: float = 0.0  # time of that call
    arrived_at: float | None = None  # end of that reason
    parts: dict[WaitPart, float] = field(default_factory=dict)

    def begin(self, now: float) -> float:
        """Start the wait unless it has started; return its start."""
        if self.since is None:
            self.since = now
        if self.reason is not None:
            arrived_at = now if self.arrived_at is None else min(self.arrived_at, now)
            arrived_at = max(self.held_at, arrived_at)
            self._add(self.reason, arrived_at - self.held_at)
            self._add("scheduler", now - arrived_at)
            self.reason = None
        return self.since

    def hold(self, reason: WaitPart, now: float) -> None:
        """Count the time until the next call for this reason."""
        self.reason, self.held_at, self.arrived_at = reason, now, None

    def arrived(self, reason: WaitPart, now: float) -> None:
        """The reason has ended: from now on the request waits for the scheduler."""
        if self.reason == reason and self.arrived_at is None:
            self.arrived_at = now

    def _add(self, part: WaitPart, seconds: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + seconds

    def end(self, now: float) -> float | None:
        """End the wait; return its seconds, None if they were counted already."""
        since, self.since = self.since, None
        if self.counted or since is None:
            return None
        self.counted = True
        return now - since


@dataclass(slots=True)
class LookupState:
    """What the daemon was asked about a prompt, and its answer. Written by `lookups`."""

    ticket: int = 0  # of the pending lookup
    sent_at: float = 0.0
    query: LookupQuery = LookupQuery()  # sent last, or to be sent next
    answer_within_s: float = 0.0  # how long the daemon may delay its next answer
    lease: Lease | None = None
    leased_at: float = 0.0
    answered: LookupQuery = LookupQuery()  # that the lease answers
    lease_first: int = 0  # the ready blocks of the lease begin here
    wait: Wait = field(default_factory=Wait)
    wait_until: float | None = None  # for blocks from disk, while the time to recompute is unknown
    stored: int | None = None  # leading blocks that the daemon has
    on_disk: tuple[int, int] = (0, 0)  # range of blocks that were on disk when first asked for
    computed: int = 0  # leading tokens that the engine has

    @property
    def pending(self) -> bool:
        """Whether an answer, or blocks from disk, will arrive."""
        return bool(self.ticket or (self.lease is not None and self.lease.coming))

    def take_lease(self) -> Lease | None:
        """Return the lease, which now belongs to the caller, and ignore a pending answer."""
        lease, self.lease, self.ticket = self.lease, None, 0
        return lease

    def release(self) -> None:
        """Release the lease and ignore a pending answer."""
        lease = self.take_lease()
        if lease is not None:
            lease.release()


@dataclass(slots=True)
class LoadState:
    """The loads of a prompt. Written by `loads`."""

    hit: Hit | None = None  # of the last load
    tokens: tuple[int, int] = (0, 0)  # loaded from memory and from disk
    between_steps: bool = False  # rather than within a step
    direct: bool = False  # the ranks read the blocks on disk themselves


@dataclass(slots=True)
class SaveState:
    """Which blocks of a prompt are saved. Written by `saves`."""

    saved: int | None = None  # leading blocks that need no save
    holes: int = 0  # left by saves
    tries: int = 0  # to save the same blocks again
    hole: int = -1  # first block of the last hole
    dropped: int = 0  # leading blocks that are saved, or counted as dropped
    finished: bool = False  # the request ended
    unfilled: bool = False  # a load has failed, and its blocks were not computed since

    def save_again(self, first: int) -> None:
        """Blocks from `first` on are not saved."""
        if self.saved is not None:
            self.saved = min(self.saved, first)


@dataclass(slots=True)
class PinState:
    """What the daemon was told to keep of a prompt. Written by `pins`."""

    requested: bool = False
    blocks: int | None = None  # pinned, as the daemon has confirmed
    prefetched: Match | None = None  # the daemon's answer to the prefetch


@dataclass(slots=True, eq=False)
class Prompt:
    """One request, by `number` for the daemon. `session`: that its keys, ticket and lease are of."""

    request: Any
    extras: bytes
    may_load: bool
    may_save: bool
    options: RequestOptions = field(default_factory=RequestOptions)
    number: int = 0
    compute_last: int = 1  # tokens that are computed even if their blocks are found
    keys: Keys | None = None
    session: DaemonSession | None = None
    lookup: LookupState = field(default_factory=LookupState)
    load: LoadState = field(default_factory=LoadState)
    save: SaveState = field(default_factory=SaveState)
    pin: PinState = field(default_factory=PinState)
    resident: int = 0  # leading blocks whose pages in the engine are known

    @property
    def adapter(self) -> str:
        """The name of its LoRA adapter, for metrics."""
        lora = getattr(self.request, "lora_request", None)
        return NO_ADAPTER if lora is None else str(lora.lora_name)

    def loadable(self, block_tokens: int) -> int:
        """How many leading blocks can be loaded: the last tokens, at least one, are computed."""
        tokens: int = self.request.num_tokens
        return max(0, tokens - self.compute_last) // block_tokens

    def response(self) -> dict[str, Any] | None:
        """What the request's response contains, if the request has options."""
        if not self.options.given:
            return None
        warm, cold = self.load.tokens
        fields: dict[str, Any] = {"warm_tokens": warm, "cold_tokens": cold}
        if self.options.pin_s:
            fields["pinned_blocks"] = self.pin.blocks
        if self.options.warm:
            found = self.pin.prefetched
            fields["memory_blocks"] = None if found is None else found.ready
            fields["coming_blocks"] = None if found is None else found.coming
        return {PARAMETER: fields}

    def use_session(self, session: DaemonSession) -> None:
        """Discard what is known from another session than this."""
        if self.session is not session:
            self.leave_session()
            self.session = session

    def leave_session(self) -> None:
        """Discard what is known from its session."""
        self.lookup.release()
        if self.session is not None:
            # The next daemon may lack these blocks: all are offered to it, and it accepts those it lacks.
            self.lookup.stored, self.save.saved = 0, None
        self.session = self.keys = None

    def forget_keys(self) -> None:
        """From now on its blocks have other keys: none of them is found, saved or pinned."""
        self.lookup.release()
        self.keys = self.lookup.stored = self.save.saved = None
        self.pin.requested = False
        # Tokens that were computed before, and those computed from them, belong to the old keys.
        self.may_save = self.may_save and not self.request.num_computed_tokens
