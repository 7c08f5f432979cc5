"""Codecs that a profile calibrates, each made for one profile and one of its levels."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.codec import base
from kvtier.codec.frame import Entry
from kvtier.codec.grid import HEADS_FIRST, TOKENS_FIRST, Grid
from kvtier.codec.profile import CACHEGEN_LEVELS, ECSQ_LEVELS, Name, Part, Profile
from kvtier.errors import ProfileError
from kvtier_kernels import Calibration, Recipe, decode_calibrated, encode_calibrated

if TYPE_CHECKING:
    from typing_extensions import Buffer

NUMBERS: dict[Name, int] = {"ecsq": base.ECSQ, "cachegen": base.CACHEGEN}
Said = tuple[int, int, int, int, bytes, bytes, bytes, bytes]  # a part, as the kernels want it
UNKNOWN = -1  # a part that the profile has not: it stays raw
NO_ELEMENT = 3  # of the types that the kernels leave raw


class Calibrated:
    """One level of one codec, for blocks whose parts lie so. `layers` are those of the profile that a block
    has, in its order; without them it has all. `share` is which of how many ranks, among which heads are
    divided. What layout, dtype or profile don't know stays raw. Raises ProfileError where a level or layer is
    none of the profile's, or heads can't be divided so."""

    lossy = True

    def __init__(
        self,
        codec: Name,
        profile: Profile,
        level: str,
        layout: str = TOKENS_FIRST,
        layers: Sequence[int] | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        names = ECSQ_LEVELS if codec == "ecsq" else CACHEGEN_LEVELS
        numbers = range(len(profile.layers)) if layers is None else layers
        self.name = f"{codec}-{level}"
        self.number = NUMBERS[codec]
        self.profile = profile.name
        self._heads_first = layout == HEADS_FIRST
        self._numbers: dict[tuple[int, int], int] = {}
        said: list[Said] = []
        for place, layer in enumerate(numbers):
            if not 0 <= layer < len(profile.layers):
                raise ProfileError(f"the profile of {profile.model} has no layer {layer}")
            for index, part in enumerate(profile.layers[layer]):
                one = profile.level(codec, layer, index, level)
                if knows(layout, part):
                    self._numbers[place, index] = len(said)
                said.append(_shared(part, one.exponents, one.table, *share))
        ropes = [(_native(rope.turns, "Q"), rope.interleaved) for rope in profile.ropes]
        self.calibration = Calibration(
            self.number, names.index(level), profile.group_tokens, ropes, said
        )
        known = [(layer, part, number) for (layer, part), number in self._numbers.items()]
        self.recipe = Recipe.by_calibration(
            self.calibration, profile.name, self._heads_first, known
        )

    def bound(self, nbytes: int) -> int:
        return nbytes

    def encode(
        self,
        block: Buffer,
        parts: Sequence[Entry],
        dtype: str,
        into: Buffer,
        grids: Sequence[Grid] = (),
        position: int = 0,
    ) -> tuple[Entry, ...]:
        sizes = [(self.number_of(part), part.raw_bytes) for part in parts]
        element = base.ELEMENTS.get(dtype, NO_ELEMENT)
        found = encode_calibrated(
            self.calibration, element, block, sizes, self._heads_first, position, into
        )
        return base.placed(parts, found)

    def decode(self, payload: Buffer, entries: Sequence[Entry], dtype: str, into: Buffer) -> None:
        base.expect(entries, self.number)
        places = [
            (self.number_of(one), one.codec, one.offset, one.nbytes, one.raw_bytes)
            for one in entries
        ]
        element = base.ELEMENTS.get(dtype, NO_ELEMENT)
        sound = decode_calibrated(
            self.calibration, element, payload, places, self._heads_first, into
        )
        if sound != len(entries):
            raise base.damaged(entries[sound], self.name)

    def number_of(self, entry: Entry) -> int:
        """The part's number in the calibration."""
        return self._numbers.get((entry.layer, entry.part), UNKNOWN)


def knows(layout: str, part: Part) -> bool:
    """Whether we know how a part lies: of a latent, whose layout says its dims, there is one head."""
    latent = layout == f"layer,token,latent={part.dim - part.exact_dims}+{part.exact_dims}"
    return layout in (TOKENS_FIRST, HEADS_FIRST) or (latent and part.heads == 1)


def _shared(part: Part, exponents: bytes, table: bytes, rank: int, ranks: int) -> Said:
    """A rank's share of a part: a latent is the same on each."""
    heads = part.heads
    if heads > 1:
        if heads % ranks or not 0 <= rank < ranks:
            raise ProfileError(
                f"{heads} heads can't be divided over {ranks} ranks, of which {rank}"
            )
        heads //= ranks
    else:
        rank = 0
    coded = heads * (part.dim - part.exact_dims)
    mine = slice(rank * coded, (rank + 1) * coded)
    means = part.means[4 * mine.start : 4 * mine.stop]
    return (
        heads, part.dim, part.exact_dims, part.rope, _native(means, "f"), part.anchors[mine],
        exponents[mine], table,
    )  # fmt: skip


def _native(numbers: bytes, kind: str) -> bytes:
    """Numbers in the processor's order of bytes."""
    found = array(kind, numbers)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()
