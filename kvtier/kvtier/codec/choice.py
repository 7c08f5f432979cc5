"""Which codec pays on the way to a disk, by what was measured. No I/O.

A frame is read and decoded at the same time, so a codec pays where its blocks get smaller (r > 1) and it
decodes faster than the link brings them (C > B); then loads take 1 / min(r, C/B) of the time. What was
measured lately counts, and nothing is encoded before it was: bandwidth of each link, rates of each codec on
each type, and what each makes of a space's data, of which some blocks are tried with all now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.codec.base import ELEMENTS, FIX4, R32, ZSTD, Codec
from kvtier.codec.frame import RAW
from kvtier.codec.framing import NATIVE, suits
from kvtier.codec.known import BY_NAME, BY_NUMBER, CODECS
from kvtier.codec.losses import NAMES as LOSSY
from kvtier.codec.losses import Loss, Losses, fits
from kvtier.layout import KvSpec

AUTO = "auto"
CHOICES = (AUTO, *(codec.name for codec in CODECS if not codec.lossy))
LATELY_S = 1.0  # of work: what was before counts for half
# Of the clock, after which it counts for half, too: few blocks may be tried from then on.
FADES_S = 5.0
FADED_S = 0.002
LATELY_BYTES = 1 << 28
GAIN = 1.05  # of what is done otherwise, so that nothing changes for nothing
FIRST_TRIES = 4  # blocks of a new space
TRY_EVERY = 256  # blocks
BLOCK_MOST = 32 << 20  # a frame that the workers do not decode is read as one
LIMIT_SPACES = 256  # the first ones are learnt anew


@dataclass(slots=True)
class Average:
    """Something for something else, such as bytes for seconds; the latest `lately` of the latter count for
    half and more."""

    lately: float
    top: float = 0.0
    bottom: float = 0.0

    def note(self, top: float, bottom: float) -> None:
        if self.bottom > self.lately:
            self.top, self.bottom = self.top / 2, self.bottom / 2
        self.top += top
        self.bottom += bottom

    def fade(self, factor: float, least: float) -> None:
        """Let it count less, but for so much as `least`."""
        if self.bottom > least:
            factor = max(factor, least / self.bottom)
            self.top, self.bottom = self.top * factor, self.bottom * factor

    @property
    def value(self) -> float:
        """0 where nothing is known."""
        return self.top / self.bottom if self.bottom else 0.0


@dataclass(slots=True)
class Known:
    """What is known of a space's data. `chosen` is a codec's number."""

    spec: KvSpec
    asked: str
    chosen: int = RAW
    loss: Loss | None = None
    why: str = ""  # it has none that was asked for
    ratios: dict[int, Average] = field(default_factory=dict)  # by codec: raw bytes for encoded ones
    blocks: int = 0  # since some were tried
    tried: int = 0

    @property
    def name(self) -> str:
        """By what its blocks are stored now."""
        return self.loss.asked if self.loss is not None else self.name_of(self.chosen)

    def name_of(self, codec: int) -> str:
        """A codec of its blocks; of calibrated ones with the level."""
        if self.loss is not None and codec not in BY_NUMBER:
            return self.loss.asked
        return BY_NUMBER[codec].name


class Rates:
    """How fast each codec encodes and decodes each type here. `threads` is how many decode for a link."""

    def __init__(self, threads: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._threads = threads
        self._clock = clock
        self._faded_at = clock()
        self._encoding: dict[tuple[int, str], Average] = {}  # by codec and type: bytes for seconds
        self._decoding: dict[tuple[int, str], Average] = {}

    def encoded(self, codec: int, dtype: str, raw_bytes: int, seconds: float) -> None:
        """How long a thread took to encode so many bytes of blocks."""
        self._fade()
        self._encoding.setdefault((codec, dtype), Average(LATELY_S)).note(raw_bytes, seconds)

    def decoded(self, codec: int, dtype: str, raw_bytes: int, seconds: float) -> None:
        """How long a thread took to decode so many bytes of blocks."""
        self._fade()
        self._decoding.setdefault((codec, dtype), Average(LATELY_S)).note(raw_bytes, seconds)

    def _fade(self) -> None:
        now = self._clock()
        factor = 0.5 ** ((now - self._faded_at) / FADES_S)
        self._faded_at = now
        for one in (*self._encoding.values(), *self._decoding.values()):
            one.fade(factor, FADED_S)

    def decode_bytes_s(self, codec: int, dtype: str) -> float:
        """How fast blocks are decoded, by all threads; 0 where that is not known."""
        one = self._decoding.get((codec, dtype))
        return one.value * self._threads if one else 0.0

    def encode_bytes_s(self, codec: int, dtype: str) -> float:
        """How fast a thread encodes blocks; 0 where that is not known."""
        one = self._encoding.get((codec, dtype))
        return one.value if one else 0.0


class Choice:
    """Of one tenant. `asked` is a lossless codec's name or "auto"; `by_model` has patterns of models with
    such names, or lossy ones: what those make of a space `losses` says, and blocks that they are not for are
    left to "auto"."""

    def __init__(
        self,
        rates: Rates,
        asked: str = AUTO,
        by_model: Sequence[tuple[str, str]] = (),
        losses: Losses | None = None,
        tenant: str = "",
    ) -> None:
        self.rates = rates
        self.saved_bytes_s = 0.0  # that each thread would have to encode
        self._asked = asked
        self._by_model = by_model
        self._losses = losses if losses is not None else Losses()
        self._tenant = tenant
        self._spaces: dict[bytes, Known] = {}

    def codec(self, space: bytes, spec: KvSpec, nbytes: int, links: Iterable[float]) -> Codec:
        """By which codec a block of so many bytes of this space is to be stored now; `links` are the
        bandwidths of those that it may be read from."""
        known = self._known(space, spec)
        if known.asked == AUTO:
            known.chosen = self._best(known, [one for one in links if one])
        return BY_NUMBER[known.chosen if _takes(known.chosen, nbytes) else RAW]

    def lossy(self, space: bytes, spec: KvSpec, group: int, shard: int) -> Codec | None:
        """The lossy codec of these blocks, if they have one: of all of them, but for those that it made."""
        loss = self._known(space, spec).loss
        return loss.codec(group, shard) if loss is not None else None

    def has_loss(self, space: bytes, spec: KvSpec) -> bool:
        """Whether some blocks of the space have a lossy codec."""
        return self._known(space, spec).loss is not None

    def encodes(self, space: bytes, spec: KvSpec, nbytes: int) -> bool:
        """Whether there is work with such blocks before they are written, as far as is known."""
        if self._known(space, spec).loss is not None:
            return True
        chosen = self._known(space, spec).chosen
        return (chosen != RAW and _takes(chosen, nbytes)) or self.tries(space, spec, nbytes) > 0

    def tries(self, space: bytes, spec: KvSpec, nbytes: int) -> int:
        """How many of the blocks of so many bytes that are written next are to be tried with all codecs;
        `wrote` counts."""
        known = self._known(space, spec)
        if known.asked != AUTO or not self.candidates(spec, nbytes):
            return 0
        if known.tried < FIRST_TRIES:
            return FIRST_TRIES - known.tried
        return 1 if known.blocks >= TRY_EVERY else 0

    def candidates(self, spec: KvSpec, nbytes: int = 0) -> tuple[Codec, ...]:
        """The lossless codecs that can make anything of this space's elements, in a block of so many
        bytes."""
        numbers = (FIX4, R32) if spec.dtype in ELEMENTS else (ZSTD,)
        return tuple(BY_NUMBER[number] for number in numbers if _takes(number, nbytes))

    def ask(self, asked: str, by_model: Sequence[tuple[str, str]]) -> None:
        """Go by these from now on; what was measured stays known, and what loss a space has."""
        self._asked, self._by_model = asked, by_model
        for known in self._spaces.values():
            self._ask_for(known)

    # --- what was measured -------------------------------------------------------------------

    def wrote(self, space: bytes, spec: KvSpec, blocks: int, tried: int) -> None:
        """So many blocks of the space were encoded or left raw, so many of them tried."""
        known = self._known(space, spec)
        known.blocks = 0 if tried else known.blocks + blocks
        known.tried += tried

    def shrank(self, space: bytes, spec: KvSpec, codec: int, raw_bytes: int, nbytes: int) -> None:
        """What a codec made of blocks of this space."""
        ratios = self._known(space, spec).ratios
        ratios.setdefault(codec, Average(LATELY_BYTES)).note(raw_bytes, nbytes)

    def slowness(self, space: bytes, spec: KvSpec, codec: int, link_bytes_s: float) -> float:
        """How many times as long a frame takes to be decoded as to be read; at least 1, as both go on at the
        same time."""
        rate = self.rates.decode_bytes_s(codec, spec.dtype)
        if codec == RAW or not rate:
            return 1.0
        ratio = self._known(space, spec).ratios.get(codec)
        return max(1.0, (ratio.value if ratio is not None else 1.0) * link_bytes_s / rate)

    def report(self) -> list[dict[str, object]]:
        """Of each space: how its blocks are stored, and what is known of that."""
        return [
            {
                "model": known.spec.model,
                "dtype": known.spec.dtype,
                "asked": self._losses.asked(known.spec) or known.asked,
                "codec": known.name,
                "lossy": known.name in LOSSY,
                "why": known.why,
                "ratios": self._named(
                    known, {number: one.value for number, one in known.ratios.items()}, 3
                ),
                "encode_bytes_s": self._rates(known, self.rates.encode_bytes_s),
                "decode_bytes_s": self._rates(known, self.rates.decode_bytes_s),
            }
            for known in self._spaces.values()
        ]

    # --- choosing ----------------------------------------------------------------------------

    def _known(self, space: bytes, spec: KvSpec) -> Known:
        known = self._spaces.get(space)
        if known is None:
            if len(self._spaces) >= LIMIT_SPACES:
                del self._spaces[next(iter(self._spaces))]
            known = self._spaces[space] = Known(spec, AUTO)
            self._ask_for(known)
            # What the identity says, whatever is asked for by now.
            known.loss = self._losses.of(space, spec, self._tenant)
            found = self._losses.look(spec)
            known.why = found if isinstance(found, str) else ""
        return known

    def _ask_for(self, known: Known) -> None:
        asked = self._asked_of(known.spec)
        # What is not lost in a space's blocks is stored as for any other.
        known.asked = AUTO if asked in LOSSY else asked
        known.chosen = _first(known)

    def _asked_of(self, spec: KvSpec) -> str:
        return next(
            (name for pattern, name in self._by_model if fits(spec.model, pattern)),
            self._asked,
        )

    def _best(self, known: Known, links: Sequence[float]) -> int:
        """The codec with which loads take least, what is chosen now unless another is better by a bit."""
        if not links:
            return RAW
        times = {RAW: _mean(1 / link for link in links)}
        for codec in self.candidates(known.spec):
            if not self._keeps_up(codec.number, known):
                continue
            ratio = known.ratios.get(codec.number)
            rate = self.rates.decode_bytes_s(codec.number, known.spec.dtype)
            if ratio is not None and ratio.value > 1 and rate:
                times[codec.number] = _mean(
                    max(1 / (ratio.value * link), 1 / rate) for link in links
                )
        best = min(times, key=lambda number: times[number])
        now = times.get(known.chosen)
        return best if now is None or times[best] * GAIN < now else known.chosen

    def _keeps_up(self, codec: int, known: Known) -> bool:
        """Whether it encodes as fast as blocks are saved; those that wait for it are evicted unwritten."""
        rate = self.rates.encode_bytes_s(codec, known.spec.dtype)
        return not rate or rate >= self.saved_bytes_s * (1 if codec == known.chosen else GAIN)

    def _rates(self, known: Known, rate: Callable[[int, str], float]) -> dict[str, float]:
        return self._named(known, {one: rate(one, known.spec.dtype) for one in known.ratios}, 0)

    @staticmethod
    def _named(known: Known, values: Mapping[int, float], digits: int) -> dict[str, float]:
        return {known.name_of(number): round(value, digits) for number, value in values.items()}


def _first(known: Known) -> int:
    """What blocks of a space are stored by before anything of it was measured."""
    if known.asked == AUTO:
        return known.chosen
    codec = BY_NAME[known.asked]
    return codec.number if suits(codec, known.spec.dtype) else RAW


def _takes(codec: int, nbytes: int) -> bool:
    return codec in NATIVE or nbytes <= BLOCK_MOST


def _mean(values: Iterable[float]) -> float:
    some = list(values)
    return sum(some) / len(some)
