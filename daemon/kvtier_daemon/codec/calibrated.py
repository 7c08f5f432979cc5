"""Codecs that need a calibration profile; each object is for one profile and one level."""

from __future__ import annotations

import sys
from array import array

from kvtier.errors import ProfileError
from kvtier.frame import CACHEGEN, ECSQ, Entry
from kvtier_daemon.codec.base import Codec
from kvtier_daemon.codec.grid import HEADS_FIRST, TOKENS_FIRST
from kvtier_daemon.codec.profile import CACHEGEN_LEVELS, ECSQ_LEVELS, Name, Profile, ProfilePart
from kvtier_kernels import Calibration, Recipe

NUMBERS: dict[Name, int] = {"ecsq": ECSQ, "cachegen": CACHEGEN}
# a part, in the form that the kernels expect
Said = tuple[int, int, int, int, bytes, bytes, bytes, bytes]
UNKNOWN = -1  # the profile does not contain this part: it stays raw


class Calibrated(Codec):
    """One level of one codec, for blocks of one layout. `share` is (rank, number of ranks) if heads are
    divided among ranks. Parts that the layout, the dtype or the profile does not describe stay raw. Raises
    ProfileError if the profile lacks the level, or if the heads cannot be divided."""

    lossy = True

    def __init__(
        self,
        codec: Name,
        profile: Profile,
        level: str,
        layout: str = TOKENS_FIRST,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        names = ECSQ_LEVELS if codec == "ecsq" else CACHEGEN_LEVELS
        self.name = f"{codec}-{level}"
        self.number = NUMBERS[codec]
        self.profile = profile.name
        self.heads_first = layout == HEADS_FIRST
        self._numbers: dict[tuple[int, int], int] = {}
        said: list[Said] = []
        for number, layer in enumerate(profile.layers):
            for index, part in enumerate(layer):
                one = profile.level(codec, number, index, level)
                if knows(layout, part):
                    self._numbers[number, index] = len(said)
                said.append(_shared(part, one.exponents, one.table, *share))
        self.level = names.index(level)
        self.group_tokens = profile.group_tokens
        self.parts = said
        self.ropes = [(_native(rope.turns, "Q"), rope.interleaved) for rope in profile.ropes]
        self.calibration = Calibration(
            self.number, self.level, profile.group_tokens, self.ropes, said
        )
        self.known = known = [(*place, number) for place, number in self._numbers.items()]
        self.recipe = Recipe.by_calibration(self.calibration, profile.name, self.heads_first, known)

    def number_of(self, entry: Entry) -> int:
        """Return the part's number in the calibration."""
        return self._numbers.get((entry.layer, entry.part), UNKNOWN)


def knows(layout: str, part: ProfilePart) -> bool:
    """Return whether the layout of a part is known. A latent counts as one head if its dims are stated."""
    latent = layout == f"layer,token,latent={part.dim - part.exact_dims}+{part.exact_dims}"
    return layout in (TOKENS_FIRST, HEADS_FIRST) or (latent and part.heads == 1)


def _shared(part: ProfilePart, exponents: bytes, table: bytes, rank: int, ranks: int) -> Said:
    """Return a rank's share of a part. A latent is the same on each rank."""
    heads = part.heads
    if heads > 1:
        if heads % ranks or not 0 <= rank < ranks:
            raise ProfileError(f"{heads} heads cannot be divided over {ranks} ranks (rank {rank})")
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
    """Return numbers in the byte order of the processor."""
    found = array(kind, numbers)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()
