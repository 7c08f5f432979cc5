"""Which blocks a host wants most, and the list of them that it leaves in the store for hosts that start.

     magic 8 │ time u64 │ blocks u32 │ bytes of the description u32 │ description │ row… │ code 32
     row     key 32 │ weight f32 │ row of the parent u32, its own for a root

A list is the content of a frame, as a block is, so it is checked and encrypted like one. The code at its end
depends on the tenant's secret, which those who can write to the store do not have: without encryption they
could make a frame with correct digests. A row's parent comes before it. No clock.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import math
import os
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from struct import error as struct_error
from typing import Final

import msgspec

from kvtier.errors import FrameError
from kvtier.frame import RAW, Entry, Identity
from kvtier.key import KEY_BYTES
from kvtier.layout import KvSpec
from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.tiers.remote.known import each_of
from kvtier_daemon.tiers.remote.objects import Headers

FOLDER: Final = "wanted/v1"
HOST_BYTES: Final = 32
PLACE: Final = 255  # group and shard of the frame, which no block has
MOST_BLOCKS: Final = 16_384  # of a list
MOST_BYTES: Final = 1 << 20
MOST_MERGED: Final = 65_536  # blocks of all lists
MOST_PREFIXES: Final = 512  # that are remembered
MOST_KEYS: Final = 16_384  # of these
HALF_LIFE_S: Final = 3600.0  # of the weight of one request
OLD_S: Final = 3600.0  # a list that is older is ignored
AHEAD_S: Final = 600.0  # so far may the clock of another host be ahead
MAGIC: Final = b"kvwants1"
HEAD, ROW = Struct("<8sQII"), Struct("<32sfI")
CODE_BYTES: Final = 32


def load_host(state: Path) -> bytes:
    """Return the name of this host's lists. Another one at each start if the directory cannot be written."""
    file, name = state / "fleet-host", os.urandom(HOST_BYTES)
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError), file.open("xb") as made:
            made.write(name)
        name = file.read_bytes()
    return name if len(name) == HOST_BYTES else os.urandom(HOST_BYTES)


def keyed(secret: bytes, use: bytes, text: bytes, nbytes: int) -> bytes:
    """Return a hash that only hosts with this secret can compute."""
    return blake2b(text, key=secret, person=use, digest_size=nbytes).digest()


def folder_of(secret: bytes) -> str:
    """Return the folder of the lists of one tenant of a fleet."""
    return f"{FOLDER}/{keyed(secret, b'kvtier-lists', b'', 16).hex()}/"


def list_name(secret: bytes, of: Identity) -> str:
    """Return the name of the object with this host's list of a space."""
    return f"{folder_of(secret)}{of.space.hex()}-{of.key.hex()}"


def list_of(secret: bytes, name: str) -> Identity | None:
    """Return the space and the host of a list with this name; None if no list has this name."""
    space, _, host = name.rpartition("/")[2].partition("-")
    try:
        of = list_identity(bytes.fromhex(space), bytes.fromhex(host))
    except ValueError:
        return None
    # Digits can be written in several ways: a copy of a list must not count again.
    is_one = len(of.space) == len(of.key) == HOST_BYTES and list_name(secret, of) == name
    return of if is_one else None


def in_turn(lists: Iterable[tuple[str, Identity]], most: int) -> list[tuple[str, Identity]]:
    """Return some of these lists: one of each space, then another one of each."""
    spaces: dict[bytes, list[tuple[str, Identity]]] = {}
    for one in lists:
        spaces.setdefault(one[1].space, []).append(one)
    turns = itertools.zip_longest(*spaces.values())
    return list(itertools.islice((one for turn in turns for one in turn if one), most))


def list_identity(space: bytes, host: bytes) -> Identity:
    """Return the identity of the frame of a list."""
    return Identity(space, PLACE, PLACE, host)


def list_headers(spec: KvSpec, space: bytes, nbytes: int) -> Headers:
    return Headers(spec, space, PLACE, PLACE, (Entry(0, 0, RAW, 0, nbytes, nbytes),))


@dataclass(slots=True, frozen=True)
class WantedList:
    """The blocks of one space that hosts want: keys, weights, and the row of each one's parent."""

    space: bytes
    spec: KvSpec
    keys: tuple[bytes, ...]
    weights: array[float]
    parents: array[int]

    def chain(self, row: int) -> bytes:
        """The keys from the root to this block."""
        keys = [self.keys[row]]
        while (parent := self.parents[row]) != row and len(keys) < len(self.keys):
            row = parent
            keys.append(self.keys[row])
        return b"".join(reversed(keys))


def encode_list(one: WantedList, host: bytes, secret: bytes, now_s: float) -> bytes:
    described = msgspec.msgpack.encode(one.spec)
    text = b"".join(
        (
            HEAD.pack(MAGIC, int(now_s), len(one.keys), len(described)),
            described,
            *map(ROW.pack, one.keys, one.weights, one.parents),
        )
    )
    return text + _code(one.space, host, secret, text)


def _code(space: bytes, host: bytes, secret: bytes, text: bytes) -> bytes:
    return keyed(secret, b"kvtier-wanted", space + host + text, CODE_BYTES)


def decode_list(of: Identity, secret: bytes, text: bytes, now_s: float) -> WantedList:
    """Return the list of this space and host. Raises FrameError if it is old or not the fleet's."""
    body, code = text[:-CODE_BYTES], text[-CODE_BYTES:]
    if not hmac.compare_digest(code, _code(of.space, of.key, secret, body)):
        raise FrameError("no host of this fleet wrote the list")
    try:
        magic, at_s, count, size = HEAD.unpack_from(body)
        spec = msgspec.msgpack.decode(body[HEAD.size : HEAD.size + size], type=KvSpec)
    except (msgspec.MsgspecError, struct_error, ValueError) as error:
        raise FrameError("is not a list") from error
    rows = body[HEAD.size + size :]
    if magic != MAGIC or not 0 < count <= MOST_BLOCKS or len(rows) != count * ROW.size:
        raise FrameError("is not a list")
    if not -AHEAD_S <= now_s - at_s <= OLD_S:
        raise FrameError(f"the list is {now_s - at_s:.0f} s old")
    keys, weights, parents = zip(*ROW.iter_unpack(rows), strict=True)
    has_order = all(parent <= row for row, parent in enumerate(parents))
    has_weights = all(math.isfinite(weight) and weight >= 0 for weight in weights)
    if not (has_order and has_weights) or len(set(keys)) < count:
        raise FrameError("is not a list")
    return WantedList(of.space, spec, keys, array("d", weights), array("I", parents))


@dataclass(slots=True)
class WantedPrefix:
    """A prefix that requests found. The weight was true at a time."""

    space: KnownSpace
    keys: bytes
    weight: float
    at_s: float

    def weight_at(self, now_s: float) -> float:
        return self.weight * math.exp2(min(0.0, self.at_s - now_s) / HALF_LIFE_S)


class WantedBlocks:
    """What requests of one tenant found lately: bounded, and cheap to note. The prefixes that were found
    least recently are dropped."""

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[int, bytes], WantedPrefix] = OrderedDict()
        self._keys = 0

    def note(self, space: KnownSpace, keys: bytes, now_s: float) -> None:
        name = space.number, keys[-KEY_BYTES:]
        before = self._of.pop(name, None)
        weight = 1.0
        if before is not None:
            self._keys -= len(before.keys) // KEY_BYTES
            weight += before.weight_at(now_s)
        self._of[name] = WantedPrefix(space, keys, weight, now_s)
        self._keys += len(keys) // KEY_BYTES
        while len(self._of) > MOST_PREFIXES or self._keys > MOST_KEYS:
            _, dropped = self._of.popitem(last=False)
            self._keys -= len(dropped.keys) // KEY_BYTES

    def prefixes(self) -> list[WantedPrefix]:
        return list(self._of.values())

    def forget(self, space: KnownSpace, keys: bytes | None = None) -> bytes:
        """Drop the prefixes of this space that contain one of these keys, or all; return their keys."""
        some = None if keys is None else set(each_of(keys))
        gone = [
            name
            for name, one in self._of.items()
            if one.space.identity == space.identity
            and (some is None or not some.isdisjoint(each_of(one.keys)))
        ]
        found = b"".join(self._of.pop(name).keys for name in gone)
        self._keys -= len(found) // KEY_BYTES
        return found


class RankedBlocks:
    """The blocks of one space with their weights, and the list of them."""

    def __init__(self, spec: KvSpec) -> None:
        self._spec = spec
        self._weights: dict[bytes, float] = {}
        self._parents: dict[bytes, bytes] = {}
        self._depths: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._weights)

    def add(self, key: bytes, parent: bytes, weight: float) -> None:
        """Add this to the block's weight. `parent` is empty for a root."""
        self._weights[key] = self._weights.get(key, 0.0) + weight
        if not self._parents.get(key):
            self._parents[key] = parent
            self._depths[key] = self._depths.get(parent, -1) + 1 if parent else 0

    def weights(self) -> Iterable[float]:
        return self._weights.values()

    def drop(self, least: float, most: int) -> int:
        """Keep at most this many, none of them with less weight; return how many are left."""
        kept = (one for one in self._weights.items() if one[1] >= least)
        self._weights = dict(itertools.islice(kept, most))
        self._parents = {key: self._parents[key] for key in self._weights}
        self._depths = {key: self._depths[key] for key in self._weights}
        return len(self)

    def listed(self, space: bytes, most: int) -> WantedList:
        """Return the most wanted first, and of equal ones those that are less deep. A lookup may begin inside
        a chain, so a block may come before its parent: then it is a root."""
        # Two sorts by plain numbers are short: a sort holds all threads.
        order = sorted(self._weights, key=self._depths.__getitem__)
        order.sort(key=self._weights.__getitem__, reverse=True)
        del order[most:]
        rows = {key: row for row, key in enumerate(order)}
        parents = (min(row, rows.get(self._parents[key], row)) for row, key in enumerate(order))
        weights = array("d", map(self._weights.__getitem__, order))
        return WantedList(space, self._spec, tuple(order), weights, array("I", parents))


def lists_of(prefixes: Iterable[WantedPrefix], now_s: float) -> list[WantedList]:
    """Return a list for each space of these prefixes: a block has the weights of all that contain it."""
    spaces: dict[bytes, RankedBlocks] = {}
    for one in prefixes:
        blocks = spaces.setdefault(one.space.identity, RankedBlocks(one.space.spec))
        weight, parent = one.weight_at(now_s), b""
        for at in range(0, len(one.keys), KEY_BYTES):
            key = one.keys[at : at + KEY_BYTES]
            blocks.add(key, parent, weight)
            parent = key
    return [blocks.listed(identity, MOST_BLOCKS) for identity, blocks in spaces.items()]


class MergedLists:
    """The lists of several hosts as one for each space: a block has the weights of all hosts. Bounded: of all
    blocks, those with the largest weights are kept."""

    def __init__(self) -> None:
        self._spaces: dict[bytes, RankedBlocks] = {}

    def __len__(self) -> int:
        return sum(map(len, self._spaces.values()))

    def add(self, one: WantedList) -> None:
        blocks = self._spaces.setdefault(one.space, RankedBlocks(one.spec))
        for row, key in enumerate(one.keys):
            above = one.parents[row]
            blocks.add(key, one.keys[above] if above != row else b"", one.weights[row])
        if len(self) > 2 * MOST_MERGED:
            self._drop()

    def _drop(self) -> None:
        weights = sorted(itertools.chain(*(one.weights() for one in self._spaces.values())))
        least, left = weights[-MOST_MERGED] if len(weights) > MOST_MERGED else 0.0, MOST_MERGED
        for blocks in self._spaces.values():
            left -= blocks.drop(least, left)

    def lists(self) -> list[WantedList]:
        self._drop()
        found = (blocks.listed(space, MOST_MERGED) for space, blocks in self._spaces.items())
        return [one for one in found if one.keys]
