"""Selects the codec with which loads are fastest, from measured rates. No I/O.

A frame is read and decoded at the same time. A codec pays if its blocks get smaller (r > 1) and if it
decodes faster than the link delivers them (C > B); loads then take 1 / min(r, C/B) of the time. The inputs
are recent measurements: the bandwidth of each link, the rates of each codec for each element type, and the
ratio of each codec for the data of a space. Before there are measurements nothing is encoded. From time to
time all codecs are tried on a few blocks to measure the ratios.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.frame import RAW
from kvtier.layout import KvSpec
from kvtier_daemon.codec.base import Codec
from kvtier_daemon.codec.framing import suits
from kvtier_daemon.codec.losses import NAMES as LOSSY
from kvtier_daemon.codec.losses import Loss, Losses, fits
from kvtier_daemon.codec.table import BY_NAME, BY_NUMBER, CODECS

AUTO = "auto"
CHOICES = (AUTO, *(codec.name for codec in CODECS if not codec.lossy))
LATELY_S = 1.0  # of work: older measurements have half of the weight
# Of wall-clock time, after which a measurement also has half of the weight: few blocks may be tried later.
FADES_S = 5.0
FADED_S = 0.002
LATELY_BYTES = 1 << 28
GAIN = 1.05  # an improvement below this factor changes nothing
FIRST_TRIES = 4  # blocks of a new space
TRY_EVERY = 256  # blocks
# largest block that is decoded as a whole, if workers do not decode its codec
BLOCK_MOST = 32 << 20
LIMIT_SPACES = 256  # the oldest entries are dropped, and measured again later


@dataclass(slots=True)
class Average:
    """A decaying average of a ratio; the latest `lately` of the denominator has half of the weight."""

    lately: float
    top: float = 0.0
    bottom: float = 0.0

    def note(self, top: float, bottom: float) -> None:
        if self.bottom > self.lately:
            self.top, self.bottom = self.top / 2, self.bottom / 2
        self.top += top
        self.bottom += bottom

    def fade(self, factor: float, least: float) -> None:
        """Reduce the weight of the measurements by `factor`, down to the weight of `least`."""
        if self.bottom > least:
            factor = max(factor, least / self.bottom)
            self.top, self.bottom = self.top * factor, self.bottom * factor

    @property
    def value(self) -> float:
        """The average; 0 without measurements."""
        return self.top / self.bottom if self.bottom else 0.0


@dataclass(slots=True)
class CodecStats:
    """Measurements of a space's data. `chosen` is the number of a codec."""

    spec: KvSpec
    configured: str
    chosen: int = RAW
    loss: Loss | None = None
    why: str = ""  # why the space does not have the configured codec
    ratios: dict[int, Average] = field(default_factory=dict)  # raw bytes per encoded byte, by codec
    blocks: int = 0  # since the last trial
    tried: int = 0

    @property
    def name(self) -> str:
        """The codec that stores the space's blocks now."""
        return self.loss.configured if self.loss is not None else self.name_of(self.chosen)

    def name_of(self, codec: int) -> str:
        """Return the name of a codec of these blocks; of a calibrated one, with its level."""
        if self.loss is not None and codec not in BY_NUMBER:
            return self.loss.configured
        return BY_NUMBER[codec].name


class Rates:
    """How fast each codec encodes and decodes each element type here. `threads` decode for one link."""

    def __init__(self, threads: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._threads = threads
        self._clock = clock
        self._faded_at = clock()
        # bytes per second, by codec and element type
        self._encoding: dict[tuple[int, str], Average] = {}
        self._decoding: dict[tuple[int, str], Average] = {}

    def encoded(self, codec: int, dtype: str, raw_bytes: int, seconds: float) -> None:
        """Add the time in which a thread encoded blocks of `raw_bytes`."""
        self._fade()
        self._encoding.setdefault((codec, dtype), Average(LATELY_S)).note(raw_bytes, seconds)

    def decoded(self, codec: int, dtype: str, raw_bytes: int, seconds: float) -> None:
        """Add the time in which a thread decoded blocks of `raw_bytes`."""
        self._fade()
        self._decoding.setdefault((codec, dtype), Average(LATELY_S)).note(raw_bytes, seconds)

    def _fade(self) -> None:
        now = self._clock()
        factor = 0.5 ** ((now - self._faded_at) / FADES_S)
        self._faded_at = now
        for one in (*self._encoding.values(), *self._decoding.values()):
            one.fade(factor, FADED_S)

    def decode_bytes_s(self, codec: int, dtype: str) -> float:
        """Return how fast all threads together decode blocks; 0 if unknown."""
        one = self._decoding.get((codec, dtype))
        return one.value * self._threads if one else 0.0

    def encode_bytes_s(self, codec: int, dtype: str) -> float:
        """Return how fast one thread encodes blocks; 0 if unknown."""
        one = self._encoding.get((codec, dtype))
        return one.value if one else 0.0


class Choice:
    """The codecs of one tenant's spaces. `configured` is the name of a lossless codec or "auto". `by_model`
    has pairs of a model pattern and such a name or a lossy one. `losses` defines the lossy codec of a space;
    blocks that it does not apply to use "auto"."""

    def __init__(
        self,
        rates: Rates,
        configured: str = AUTO,
        by_model: Sequence[tuple[str, str]] = (),
        losses: Losses | None = None,
        tenant: str = "",
    ) -> None:
        self.rates = rates
        self.saved_bytes_s = 0.0  # which each thread would have to encode
        self._configured = configured
        self._by_model = by_model
        self._losses = losses if losses is not None else Losses()
        self._tenant = tenant
        self._spaces: dict[bytes, CodecStats] = {}
        self._able: dict[str, list[Codec]] = {}  # the candidates for each element type

    def codec(self, space: bytes, spec: KvSpec, nbytes: int, links: Iterable[float]) -> Codec:
        """Return the codec for a block of `nbytes`, which is read over links with these bandwidths."""
        known = self._known(space, spec)
        if known.configured == AUTO:
            known.chosen = self._best(known, [one for one in links if one])
        return BY_NUMBER[known.chosen if _takes(known.chosen, nbytes) else RAW]

    def lossy(self, space: bytes, spec: KvSpec, group: int, shard: int) -> Codec | None:
        """Return the lossy codec of these blocks, or None. Blocks that it decoded are not for it."""
        loss = self._known(space, spec).loss
        return loss.codec(group, shard) if loss is not None else None

    def has_loss(self, space: bytes, spec: KvSpec) -> bool:
        """Return whether some blocks of the space have a lossy codec."""
        return self._known(space, spec).loss is not None

    def encodes(self, space: bytes, spec: KvSpec, nbytes: int) -> bool:
        """Return whether such blocks are probably encoded or tried before they are written."""
        if self._known(space, spec).loss is not None:
            return True
        chosen = self._known(space, spec).chosen
        return (chosen != RAW and _takes(chosen, nbytes)) or self.tries(space, spec, nbytes) > 0

    def tries(self, space: bytes, spec: KvSpec, nbytes: int) -> int:
        """Return how many of the next blocks of `nbytes` to try with all codecs; `wrote` counts them."""
        known = self._known(space, spec)
        if known.configured != AUTO or not self.candidates(spec, nbytes):
            return 0
        if known.tried < FIRST_TRIES:
            return FIRST_TRIES - known.tried
        return 1 if known.blocks >= TRY_EVERY else 0

    def candidates(self, spec: KvSpec, nbytes: int = 0) -> tuple[Codec, ...]:
        """Return the lossless codecs for the element type of this space and blocks of `nbytes`."""
        able = self._able.get(spec.dtype)
        if able is None:
            suited = [
                codec
                for codec in BY_NAME.values()
                if not codec.lossy and codec.number != RAW and suits(codec, spec.dtype)
            ]
            able = self._able[spec.dtype] = [codec for codec in suited if codec.native] or suited
        return tuple(codec for codec in able if _takes(codec.number, nbytes))

    def configure(self, configured: str, by_model: Sequence[tuple[str, str]]) -> None:
        """Use this configuration from now on. Measurements and the losses of spaces stay."""
        self._configured, self._by_model = configured, by_model
        for known in self._spaces.values():
            self._apply(known)

    # --- what was measured -------------------------------------------------------------------

    def wrote(self, space: bytes, spec: KvSpec, blocks: int, tried: int) -> None:
        """Count encoded and raw blocks of the space; `tried` of them were tried with all codecs."""
        known = self._known(space, spec)
        known.blocks = 0 if tried else known.blocks + blocks
        known.tried += tried

    def shrank(self, space: bytes, spec: KvSpec, codec: int, raw_bytes: int, nbytes: int) -> None:
        """Add the sizes of blocks of this space before and after encoding."""
        ratios = self._known(space, spec).ratios
        ratios.setdefault(codec, Average(LATELY_BYTES)).note(raw_bytes, nbytes)

    def slowness(self, space: bytes, spec: KvSpec, codec: int, link_bytes_s: float) -> float:
        """Return the time to decode a frame relative to the time to read it, at least 1: both overlap."""
        rate = self.rates.decode_bytes_s(codec, spec.dtype)
        if codec == RAW or not rate:
            return 1.0
        ratio = self._known(space, spec).ratios.get(codec)
        return max(1.0, (ratio.value if ratio is not None else 1.0) * link_bytes_s / rate)

    def report(self) -> list[dict[str, object]]:
        """Return for each space how its blocks are stored, and the measurements."""
        return [
            {
                "model": known.spec.model,
                "dtype": known.spec.dtype,
                "asked": self._losses.configured(known.spec) or known.configured,
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

    def _known(self, space: bytes, spec: KvSpec) -> CodecStats:
        known = self._spaces.get(space)
        if known is None:
            if len(self._spaces) >= LIMIT_SPACES:
                del self._spaces[next(iter(self._spaces))]
            known = self._spaces[space] = CodecStats(spec, AUTO)
            self._apply(known)
            # The identity decides, independent of the current configuration.
            known.loss = self._losses.of(space, spec, self._tenant)
            found = self._losses.find(spec)
            known.why = found if isinstance(found, str) else ""
        return known

    def _apply(self, known: CodecStats) -> None:
        by_model = (name for pattern, name in self._by_model if fits(known.spec.model, pattern))
        configured = next(by_model, self._configured)
        # Blocks of a lossy space that are not lossy are stored as blocks of other spaces are.
        known.configured = AUTO if configured in LOSSY else configured
        known.chosen = _first(known)

    def _best(self, known: CodecStats, links: Sequence[float]) -> int:
        """Return the codec with the shortest loads; the current one unless another is better by GAIN."""
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

    def _keeps_up(self, codec: int, known: CodecStats) -> bool:
        """Return whether the codec encodes as fast as blocks are saved; a slower one would lose blocks."""
        rate = self.rates.encode_bytes_s(codec, known.spec.dtype)
        return not rate or rate >= self.saved_bytes_s * (1 if codec == known.chosen else GAIN)

    def _rates(self, known: CodecStats, rate: Callable[[int, str], float]) -> dict[str, float]:
        return self._named(known, {one: rate(one, known.spec.dtype) for one in known.ratios}, 0)

    @staticmethod
    def _named(known: CodecStats, values: Mapping[int, float], digits: int) -> dict[str, float]:
        return {known.name_of(number): round(value, digits) for number, value in values.items()}


def _first(known: CodecStats) -> int:
    """Return the codec of a space's blocks before there are measurements."""
    if known.configured == AUTO:
        return known.chosen
    codec = BY_NAME[known.configured]
    return codec.number if suits(codec, known.spec.dtype) else RAW


def _takes(codec: int, nbytes: int) -> bool:
    return BY_NUMBER[codec].native or nbytes <= BLOCK_MOST


def _mean(values: Iterable[float]) -> float:
    some = list(values)
    return sum(some) / len(some)
