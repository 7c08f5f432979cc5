"""The store in plain Python: the executable specification of `kvtier_kernels.Store`.

Same calls, same results, same ids and slots; it is slow, and hides no state. Keys have 32 bytes,
ids 4, slots 24 ("<IIQQ": extent, 0, offset, generation) and frames 16 ("<IIIBBBB": segment, page,
payload bytes, codec, header pages, flags, 0). Each batch is one bytes object.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from models.kernels.slabs import HELD, LAID, PAGE, TOO_SHORT, SizeClass, Slab, Slabs

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvtier_kernels._native import Counts

FULL, WINDOW, STATE = 0, 1, 2
ABSENT, WRITING, READY, DOOMED, QUARANTINED = "absent", "writing", "ready", "doomed", "quarantined"
COLD, PROMOTING = "cold", "promoting"
LIFE = (ABSENT, WRITING, READY, DOOMED, QUARANTINED, COLD, PROMOTING)
RESTORABLE = READY, COLD, PROMOTING
ANSWERS = {ABSENT: 0, READY: 1, WRITING: 2, QUARANTINED: 2, DOOMED: 3, COLD: 1, PROMOTING: 1}
DETAILED = ANSWERS | {COLD: 5, PROMOTING: 6}
FRAME = struct.Struct("<IIIBBBB")
ROW = struct.Struct("<32s32sIHHIIHHQQQ16sI")  # of a segment's footer
HAS_PARENT = 1
LOSSY = 2  # a flag of a frame: it was encoded with loss
MAX_LEASES = 65534
MAX_PLACES = 1 << 21
RESTORED_AT_ONCE = 256
MAX_SIZES = 1024
WALK_LIMIT = 65536


@dataclass(frozen=True)
class Place:
    """One shard of one group of one space."""

    space: int
    group: int
    shard: int
    kind: int
    block_bytes: int
    size_class: SizeClass = field(compare=False)


@dataclass(frozen=True)
class Space:
    groups: list[tuple[int, int, int]]
    shards: list[int]
    places: dict[tuple[int, int], Place]
    full_places: int


@dataclass(frozen=True)
class Frame:
    """The position of a block on disk, and its encoding."""

    segment: int
    page: int
    payload_bytes: int
    codec: int
    header_pages: int
    flags: int
    spare: int = 0

    @property
    def nbytes(self) -> int:
        """The size on disk."""
        return (self.header_pages + -(-self.payload_bytes // PAGE)) * PAGE

    def pack(self) -> bytes:
        return FRAME.pack(
            self.segment, self.page, self.payload_bytes,
            self.codec, self.header_pages, self.flags, self.spare,
        )  # fmt: skip

    def place(self) -> bytes:
        return self.pack()[:8]


@dataclass(eq=False)
class Block:
    id: int
    node: Node
    place: Place
    state: str = WRITING
    leases: int = 0
    checksum: bytes | None = None
    slab: Slab | None = None
    slot: int = 0
    frame: Frame | None = None
    used: bool = False  # used again since its frame was written
    rounds: int = 0  # rounds of its segments in which it was used, at most three
    spared: bool = False  # not used in the last one
    filling: bool = False  # a read from the disk fills its slot
    lossy: bool = False  # the bytes in its slot were decoded with loss

    def evictable(self) -> bool:
        return self.state == READY and self.leases == 0

    def restorable(self) -> bool:
        return self.state in RESTORABLE

    @property
    def awaits_frame(self) -> bool:
        """True if it is only in memory, and may be written to disk."""
        return self.state == READY and self.frame is None

    def own_checksum(self) -> bytes | None:
        """The checksum of its bytes; with a codec other than raw, only that of the payload is
        known."""
        return None if self.frame and self.frame.codec else self.checksum

    def drop_frame(self) -> bytes:
        """Remove the frame; return its position."""
        self.checksum = self.own_checksum()
        died, self.frame, self.used = self.frame, None, False
        self.rounds, self.spared = 0, False
        return died.place() if died else b""

    def earns_second_chance(self) -> bool:
        """True if the block is copied at the end of its segment's round: it was used in this
        round, or, once more, it was used in three rounds."""
        if self.used:
            self.used, self.spared = False, False
            self.rounds = min(3, self.rounds + 1)
            return True
        if self.rounds < 3 or self.spared:
            return False
        self.spared = True
        return True


@dataclass(eq=False)
class Node:
    """A key. Without blocks it is a ghost, kept while it has children."""

    id: int  # also of its first block
    space: int
    key: bytes
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)  # the latest first
    blocks: list[Block] = field(default_factory=list)
    cut: bool = False  # a node above lacks a block of a full group
    loose: bool = False  # its parent is gone; it is linked again when that is saved


class Store:
    """One tenant's blocks. It has no clock, no I/O and no policy, so it evicts only on request."""

    def __init__(self, ghosts: int = 65536) -> None:
        """Above `ghosts` ghosts, only those with several children are kept."""
        self._slabs = Slabs()
        self._ghost_limit = ghosts
        self._recording_evicted = False
        self._evicted = b""  # their identities
        self._pending_ghosts: list[int] = []  # ghosts that the next call checks
        self._climbed = 0
        self._spaces: list[Space | None] = []
        self._spare_spaces: list[int] = []
        self._index: dict[tuple[int, bytes], Node] = {}
        self._blocks: dict[int, Block] = {}
        # The blocks of each, in the order in which they got their frames.
        self._segments: dict[int, list[int]] = {}
        self._newly_used: list[int] = []  # blocks used since the last `take_used`
        self._ids: set[int] = set()  # of nodes and blocks
        self._spare: list[int] = []
        self._limit = 0
        self._walked = 0

    # Geometry.

    def add_extent(self, nbytes: int, generations: Buffer) -> int:
        """Add bytes for blocks, with 8 writable bytes for each page's generation."""
        if not PAGE <= nbytes < 1 << 44:
            raise ValueError("an extent has between 4096 bytes and 16 TiB")
        table = memoryview(generations)
        if table.readonly:
            raise BufferError("the generation table is not writable")
        if table.nbytes < nbytes // PAGE * 8:
            raise ValueError("the generation table needs 8 bytes a page")
        return self._slabs.add_extent(nbytes, table.cast("B")[: nbytes // PAGE * 8].cast("Q"))

    def add_space(self, groups: Sequence[tuple[int, int, int]], shards: Sequence[int]) -> int:
        """Add a space of groups (kind, window_blocks, block_bytes), with a number of shards for
        each."""
        if not groups or len(groups) != len(shards):
            raise ValueError("need one number of shards per group")
        for (kind, window, size), count in zip(groups, shards, strict=True):
            if kind not in (FULL, WINDOW, STATE) or not 0 <= window < 1 << 32 or count < 1:
                raise ValueError("a group is (kind 0..2, window_blocks, block_bytes)")
            if not 0 < size <= 1 << 40 or (kind == WINDOW and window == 0):
                raise ValueError("a block has between 1 byte and 1 TiB, a window a length")
        if sum(len(space.places) for space in self._spaces if space) + sum(shards) > MAX_PLACES:
            raise ValueError("too many spaces, groups and shards")
        classes = [self._slabs.join_class(size) for _, _, size in groups]
        if sum(self._slabs.living()) > MAX_SIZES:
            for size_class in classes:
                size_class.users -= 1
            raise ValueError("too many block sizes")
        if not self._spare_spaces:
            self._spare_spaces.append(len(self._spaces))
            self._spaces.append(None)
        number = self._spare_spaces.pop()
        places = {
            (group, shard): Place(number, group, shard, kind, size, classes[group])
            for group, (kind, _, size) in enumerate(groups)
            for shard in range(shards[group])
        }
        full = sum(place.kind == FULL for place in places.values())
        self._spaces[number] = Space(list(groups), list(shards), places, full)
        return number

    def drop_space(self, space: int) -> bool:
        """Remove an empty space, so that its number can be reused; otherwise return False."""
        self._begin()
        found = self._space(space)
        if any(node.space == space for node in self._index.values()):
            return False
        for group in range(len(found.groups)):
            found.places[group, 0].size_class.users -= 1
        self._spaces[space] = None
        self._spare_spaces.append(space)
        return True

    def slot_bytes(self, space: int, group: int) -> int:
        """The bytes of the arena that a block of this group occupies."""
        return self._place(space, group, 0).size_class.pitch

    def _space(self, space: int) -> Space:
        found = self._spaces[space] if 0 <= space < len(self._spaces) else None
        if found is None:
            raise IndexError("no such space")
        return found

    def _place(self, space: int, group: int, shard: int) -> Place:
        places = self._space(space).places
        if (group, shard) not in places:
            raise IndexError("no such group or shard")
        return places[group, shard]

    # Queries.

    def match(self, space: int, keys: bytes) -> tuple[int, int, list[tuple[int, int, int, bytes]]]:
        """The longest prefix that every group can restore, all shards READY; the longest one
        including blocks on disk or being read; and the blocks that restore the first: (group,
        shard, index of the first one in the prefix, ids). The blocks of both count as used."""
        found = self._space(space)
        named = split(keys, 32)
        ready, whole = (self._prefix(found, named, states) for states in ((READY,), RESTORABLE))
        parts: list[tuple[int, int, int, bytes]] = []
        for (group, shard), place in found.places.items():
            first, later = (self._first_needed(found, group, best) for best in (ready, whole))
            here = [self._find(place, key) for key in named[first:ready]]
            for block in [*here, *(self._find(place, key) for key in named[later:whole])]:
                assert block is not None
                self._use(block)
            if ready:
                parts.append((group, shard, first, join(block.id for block in here if block)))
        return ready, whole, parts

    def _use(self, block: Block) -> None:
        if block.frame is not None and not block.used:
            block.used = True
            self._newly_used.append(block.id)

    def _prefix(self, found: Space, named: list[bytes], states: Sequence[str]) -> int:
        """The longest prefix that every group can restore from blocks in these states."""
        best = 0
        runs = [0] * len(found.groups)
        for i, key in enumerate(named):
            restorable = True
            for group, (kind, window, _) in enumerate(found.groups):
                places = [found.places[group, shard] for shard in range(found.shards[group])]
                blocks = [self._find(place, key) for place in places]
                here = all(block and block.state in states for block in blocks)
                runs[group] = runs[group] + 1 if here else 0
                needed = min(window, i + 1) if kind == WINDOW else 1
                restorable = restorable and runs[group] >= needed
            if any(kind == FULL and not runs[g] for g, (kind, _, _) in enumerate(found.groups)):
                break
            if restorable:
                best = i + 1
        return best

    def _first_needed(self, found: Space, group: int, prefix: int) -> int:
        kind, window, _ = found.groups[group]
        return {FULL: 0, WINDOW: max(0, prefix - window), STATE: max(0, prefix - 1)}[kind]

    def cold(self, space: int, keys: bytes, prefix: int) -> list[tuple[int, int, bytes, bytes]]:
        """The blocks that a prefix needs and that are not in memory, in the order of the chain:
        (group, shard, COLD ids, PROMOTING ids), if there are any."""
        found = self._space(space)
        named = split(keys, 32)
        if not 0 <= prefix <= len(named):
            raise ValueError("the prefix is longer than the keys")
        parts: list[tuple[int, int, bytes, bytes]] = []
        for (group, shard), place in found.places.items():
            first = self._first_needed(found, group, prefix)
            blocks = [self._find(place, key) for key in dict.fromkeys(named[first:prefix])]
            cold, promoting = (
                join(block.id for block in blocks if block and block.state == state)
                for state in (COLD, PROMOTING)
            )
            if cold or promoting:
                parts.append((group, shard, cold, promoting))
        return parts

    def _find(self, place: Place, key: bytes) -> Block | None:
        node = self._index.get((place.space, key))
        return next((b for b in node.blocks if b.place == place), None) if node else None

    def _ready(self, place: Place, key: bytes) -> Block | None:
        block = self._find(place, key)
        return block if block and block.state == READY else None

    def resident(self, space: int, keys: bytes) -> bytes:
        """The ids of these keys' blocks in every group and shard that are READY, on disk or being
        read, each once, by key."""
        self._space(space)
        nodes = (self._index.get((space, key)) for key in dict.fromkeys(split(keys, 32)))
        return join(b.id for node in nodes if node for b in node.blocks if b.restorable())

    def states(self, space: int, key: bytes) -> bytes:
        """Like `probe`, for each shard of each group, with 5 for COLD and 6 for PROMOTING."""
        places = self._space(space).places.values()
        if len(key) != 32:
            raise ValueError("a key has 32 bytes")
        found = (self._find(place, key) for place in places)
        return bytes(DETAILED[block.state if block else ABSENT] for block in found)

    def probe(self, space: int, group: int, shard: int, keys: bytes) -> bytes:
        """A byte per key: 0 new, 1 READY, COLD or PROMOTING, 2 WRITING or QUARANTINED, 3 DOOMED.
        ValueError if a key is given twice."""
        place = self._place(space, group, shard)
        if len(set(split(keys, 32))) < len(split(keys, 32)):
            raise ValueError("a key is given twice")
        found = (self._find(place, key) for key in split(keys, 32))
        return bytes(ANSWERS[block.state if block else ABSENT] for block in found)

    def present(self, space: int, group: int, shard: int, keys: bytes) -> bytes:
        """The ids of the READY blocks, in order."""
        place = self._place(space, group, shard)
        found = (self._find(place, key) for key in split(keys, 32))
        return join(block.id for block in found if block and block.state == READY)

    def ancestors(self, space: int, group: int, shard: int, key: bytes, limit: int) -> bytes:
        """The READY blocks among the first `limit` nodes from the key, included, to its root."""
        place = self._place(space, group, shard)
        if len(key) != 32:
            raise ValueError("a key has 32 bytes")
        ids: list[int] = []
        node = self._index.get((space, key))
        while node is not None and limit > 0:
            limit -= 1
            ids += [b.id for b in node.blocks if b.place == place and b.state == READY]
            node = node.parent
        return join(ids)

    def names(self, ids: bytes) -> bytes:
        """The names by which a policy identifies blocks in all tiers, 8 bytes each."""
        found = []
        for block in self._known(ids):
            at = list(self._space(block.place.space).places.values()).index(block.place)
            found.append(self.names_of_keys(block.node.key, at))
        return b"".join(found)

    @staticmethod
    def names_of_keys(keys: bytes, at: int) -> bytes:
        """The same names, from keys and a place among those of their space."""
        words = (int.from_bytes(key[:8], "little") for key in split(keys, 32))
        return b"".join(
            ((w + at * 0x9E3779B97F4A7C15) % 2**64).to_bytes(8, "little") for w in words
        )

    def parents(self, ids: bytes) -> bytes:
        """The ids of the blocks before these in the same group and shard, or 0xFFFFFFFF."""
        found = []
        for block in self._known(ids):
            node = block.node.parent
            above = self._find(block.place, node.key) if node else None
            found.append(0xFFFFFFFF if above is None else above.id)
        return join(found)

    # Plans.

    def room(self, space: int, group: int, n: int) -> int:
        """How many of n slots are available without evicting."""
        return min(n, self._slabs.room(self._place(space, group, 0).size_class))

    def make_room(
        self, space: int, group: int, n: int, victims: bytes
    ) -> tuple[bytes, bytes, bytes]:
        """Evict until n slots are available or the victims are used up: (evicted, orphans, those
        of the evicted that have a frame and are COLD now).

        A victim selects the size class that gives up memory; if it is another one, a slab of it is
        reshaped, and the blocks that overlap a new slot are evicted. Orphans are READY, unleased
        blocks of full groups that no match can reach since a block above them left.
        """
        wanted = self._place(space, group, 0).size_class
        slabs = self._slabs
        named = unpack(victims)
        if not self._ids.issuperset(named):
            raise ValueError("no block has this id")
        evicted: list[Block] = []
        orphans: list[Block] = []
        self._begin()

        def leave(block: Block) -> None:
            evicted.append(block)
            if self._recording_evicted:
                place = block.place
                names = place.space, place.group, place.shard, False, block.node.key, b""
                self._evicted += struct.pack("<IIIB3x32s32s", *names)
            self._evict(block, orphans)

        slabs.round += 1
        slabs.reshape_vacant(wanted, n, thorough=False)
        more = True
        for patient in (True, False):
            for number in named:
                if not more or slabs.room(wanted) >= n:
                    break
                victim = self._blocks.get(number)
                if victim is None or not victim.evictable():
                    continue
                assert victim.slab is not None
                top = victim.slab.over or victim.slab
                if top is victim.slab and top.size_class is wanted:
                    leave(victim)
                    continue
                foreign = top.size_class is not wanted
                if patient and foreign and victim.slab.size_class is wanted:
                    continue  # its bytes already belong to another class
                in_the_way = slabs.clearable(wanted)
                laid = HELD
                if in_the_way is None and foreign:
                    laid = slabs.reshape(top, wanted)
                if laid == LAID:
                    if slabs.room(wanted) >= n:
                        break
                    in_the_way = slabs.clearable(wanted)
                if in_the_way is None and not patient:
                    in_the_way = slabs.find_clearable(wanted)
                    more = in_the_way is not None
                    if more and laid == TOO_SHORT and slabs.room(wanted) < n:
                        in_the_way = [victim]  # no gain yet, but the coldest is evicted first
                for block in in_the_way or []:
                    assert isinstance(block, Block)
                    leave(block)
        if named:
            slabs.reshape_vacant(wanted, n, thorough=True)
        cold = join(block.id for block in evicted if block.state == COLD)
        return join(block.id for block in evicted), evictable_ids(orphans), cold

    def note_evicted(self, on: bool) -> None:
        """Start or stop recording what `make_room` evicts."""
        self._recording_evicted = on
        self._evicted = b""

    def take_evicted(self) -> bytes:
        """The blocks evicted since the last call, in the format of `identities`, without parents."""
        evicted, self._evicted = self._evicted, b""
        return evicted

    def reserve(
        self, space: int, group: int, shard: int, parent: bytes | None, keys: bytes, statuses: bytes
    ) -> tuple[bytes, bytes]:
        """Create a WRITING block for each key with status 0: (ids, slots), fewer if room is short.

        Each key's parent is the one before it; the first one's is `parent` or the root. Evicts
        nothing. Raise ValueError, and create none, if a block exists already.
        """
        place = self._place(space, group, shard)
        if parent is not None and len(parent) != 32:
            raise ValueError("a key has 32 bytes")
        named = split(keys, 32)
        if len(statuses) != len(named):
            raise ValueError("need one status per key")
        self._begin()
        made: list[Block] = []
        above_keys = [parent, *named]
        for key, above_key, status in zip(named, above_keys, statuses, strict=False):
            if status:
                loose = self._index.get((space, key))
                above = self._index.get((space, above_key)) if above_key is not None else None
                if loose and loose.loose and (above or above_key is None):
                    self._set_parent(loose, above)
                continue
            if self._find(place, key) is not None:
                self.abort(join(block.id for block in made))
                raise ValueError("a key to reserve exists already, or is given twice")
            if self._slabs.room(place.size_class) == 0:
                break
            above = None
            if above_key is not None:
                above = self._index.get((space, above_key)) or self._make_node(space, above_key)
            node = self._index.get((space, key)) or self._make_node(space, key)
            self._set_parent(node, above)
            block = self._attach(node, place)
            if above is not None:
                self._drop_idle(above)
            block.slab, block.slot = self._slabs.take(place.size_class, block)
            made.append(block)
        ids = join(block.id for block in made)
        return ids, self.slots(ids)

    # Events; each takes the whole batch, or raises ValueError and changes nothing.

    def _transition(self, ids: bytes, before: str, after: str) -> list[Block]:
        return self._change(ids, lambda block: after if block.state == before else None)

    def _change(self, ids: bytes, change: Callable[[Block], str | None]) -> list[Block]:
        """Move each block to the state that `change` returns for it, or none of them."""
        changed: list[tuple[Block, str]] = []
        for number in unpack(ids):
            block = self._blocks.get(number)
            after = change(block) if block else None
            if block is None or after is None:
                for claimed, before in changed:
                    claimed.state = before
                raise ValueError("a block is in the wrong state, or no block has this id")
            changed.append((block, block.state))
            block.state = after
        self._begin()
        return [block for block, _ in changed]

    def commit(self, ids: bytes, checksums: bytes) -> None:
        """Make WRITING blocks READY, with their checksums of 16 bytes, or with none."""
        if checksums and len(checksums) != len(unpack(ids)) * 16:
            raise ValueError("need 16 bytes of checksum per id, or no checksums")
        for i, block in enumerate(self._transition(ids, WRITING, READY)):
            block.checksum = checksums[16 * i : 16 * i + 16] if checksums else None
            self._arrived(block)

    def _arrived(self, block: Block) -> None:
        if block.place.kind == FULL and not block.node.cut and self._complete(block.node):
            self._join_below(block.node)

    def abort(self, ids: bytes) -> None:
        """Remove WRITING blocks, and free their slots."""
        for block in self._transition(ids, WRITING, ABSENT):
            self._leave(block, WRITING, [])

    def quarantine(self, ids: bytes) -> None:
        """Make WRITING blocks QUARANTINED: their slots stay occupied until `gone`."""
        self._transition(ids, WRITING, QUARANTINED)

    def gone(self, ids: bytes) -> None:
        """Remove QUARANTINED blocks, and free their slots."""

        def gone(block: Block) -> str | None:
            return ABSENT if block.state == QUARANTINED and not block.filling else None

        for block in self._change(ids, gone):
            self._leave(block, QUARANTINED, [])

    def evict(self, ids: bytes) -> bytes:
        """Evict READY, unleased blocks; remove those without a frame; return the orphans."""

        def evict(block: Block) -> str | None:
            return (COLD if block.frame else ABSENT) if block.evictable() else None

        orphans: list[Block] = []
        for block in self._change(ids, evict):
            self._evict(block, orphans)
        return evictable_ids(orphans)

    def _evict(self, block: Block, orphans: list[Block]) -> None:
        if block.frame:
            block.state = COLD
            self._free_slot(block)
        else:
            block.state = ABSENT
            self._leave(block, READY, orphans)

    def forget(self, ids: bytes) -> tuple[bytes, bytes, bytes]:
        """Hide READY, COLD and PROMOTING blocks from matches. They are removed with their last
        lease, or at the end of the read that fills them: (removed now, orphans, segment and page
        of each frame that died)."""

        def forget(block: Block) -> str | None:
            after = {
                READY: DOOMED if block.leases else ABSENT,
                COLD: ABSENT,
                PROMOTING: QUARANTINED,
            }
            return after.get(block.state)

        freed: list[int] = []
        orphans: list[Block] = []
        died = b""
        for block in self._change(ids, forget):
            died += block.drop_frame()
            if block.state == ABSENT:
                self._leave(block, READY, orphans)
                freed.append(block.id)
            elif block.place.kind == FULL:
                self._cut_below(block.node, orphans)
        return join(freed), evictable_ids(orphans), died

    def lease(self, ids: bytes) -> None:
        """Add a lease to each block. OverflowError above 65534 leases, ValueError if a block
        occurs twice."""
        blocks = [self._blocks.get(number) for number in unpack(ids)]
        if len(set(unpack(ids))) < len(blocks):
            raise ValueError("an id is given twice")
        for i, block in enumerate(blocks):
            there = block is not None and block.state in (READY, DOOMED)
            if block is not None and there and block.leases < MAX_LEASES:
                block.leases += 1
                continue
            for leased in blocks[:i]:
                assert leased is not None
                leased.leases -= 1
            if there:
                raise OverflowError("a block has 65534 leases already")
            raise ValueError("only READY and DOOMED blocks can be leased")

    def unlease(self, ids: bytes) -> tuple[bytes, bytes]:
        """Remove a lease from each block: (evictable now, DOOMED ones that are removed now)."""
        blocks = [self._blocks.get(number) for number in unpack(ids)]
        ended: list[Block] = []
        for i, block in enumerate(blocks):
            if block is None or block.leases == 0:
                for unleased in blocks[:i]:
                    assert unleased is not None
                    unleased.leases += 1
                raise ValueError("a block has no lease to end, or no block has this id")
            block.leases -= 1
            if block.leases == 0:
                ended.append(block)
        evictable = join(block.id for block in ended if block.state == READY)
        doomed = [block for block in ended if block.state == DOOMED]
        self._begin()
        for block in doomed:
            block.state = ABSENT
            self._leave(block, DOOMED, [])
        return evictable, join(block.id for block in doomed)

    # The disk.

    def framed(self, ids: bytes, frames: bytes, checksums: bytes) -> bytes:
        """Give READY blocks these frames, with the digests of their payloads; without digests a
        block must have its own checksum and a raw frame. Return the blocks that are no longer
        READY or already have a frame: their new frames are not used."""
        blocks = self._known(ids)
        packed = split_for(blocks, frames, FRAME.size)
        digests = split_for(blocks, checksums, 16) if checksums else [None] * len(blocks)
        made = [Frame(*FRAME.unpack(one)) for one in packed]
        for block, frame, digest in zip(blocks, made, digests, strict=True):
            own = block.own_checksum() is not None and frame.codec == 0
            if block.awaits_frame and digest is None and not own:
                raise ValueError("a frame needs the digest of its payload")
        late: list[int] = []
        for block, frame, digest in zip(blocks, made, digests, strict=True):
            if block.awaits_frame:
                self._note_frame(block, frame, digest)
            else:
                late.append(block.id)
        return join(late)

    def moved(self, ids: bytes, before: bytes, frames: bytes) -> bytes:
        """Replace the frames `before` of blocks by these ones, with the same payloads. Return the
        blocks that no longer have those frames."""
        numbers = unpack(ids)
        late: list[int] = []
        pairs = zip(split_for(numbers, before, 16), split_for(numbers, frames, 16), strict=True)
        for number, (old, new) in zip(numbers, pairs, strict=True):
            block = self._blocks.get(number)
            frame = Frame(*FRAME.unpack(new))
            same = block and block.frame and block.frame.place() == old[:8]
            if block and block.frame and same and block.frame.codec == frame.codec:
                self._note_frame(block, frame, None)
            else:
                late.append(number)
        return join(late)

    def _note_frame(self, block: Block, frame: Frame, digest: bytes | None) -> None:
        block.frame, block.used = frame, False
        block.checksum = digest or block.checksum
        self._segments.setdefault(frame.segment, []).append(block.id)

    def promote(self, ids: bytes) -> tuple[bytes, bytes]:
        """Give COLD blocks slots to be read into, in order as far as there is room, and make them
        PROMOTING: (ids, slots). Evicts nothing."""
        blocks = self._transition(ids, COLD, PROMOTING)
        taken: list[Block] = []
        for block in blocks:
            if self._slabs.room(block.place.size_class) == 0:
                break
            block.slab, block.slot = self._slabs.take(block.place.size_class, block)
            block.filling = True
            assert block.frame is not None
            # Copied now, because the frame may be dropped during the read.
            block.lossy = bool(block.frame.flags & LOSSY)
            taken.append(block)
        for block in blocks[len(taken) :]:
            block.state = COLD
        there = join(block.id for block in taken)
        return there, self.slots(there)

    def _end_reads(self, ids: bytes, framed: str, unframed: str) -> list[Block]:
        """End reads; blocks that were forgotten during their read become ABSENT."""

        def end(block: Block) -> str | None:
            if not block.filling or block.state not in (PROMOTING, QUARANTINED):
                return None
            if block.state == QUARANTINED:
                return ABSENT
            return framed if block.frame else unframed

        blocks = self._change(ids, end)
        for block in blocks:
            block.filling = False
        return blocks

    def promoted(self, ids: bytes) -> tuple[bytes, bytes]:
        """The slots of these blocks have their bytes: (READY now, removed because they were
        forgotten during the read)."""
        blocks = self._end_reads(ids, READY, READY)
        there = join(block.id for block in blocks if block.state == READY)
        gone = [block for block in blocks if block.state == ABSENT]
        for block in gone:
            self._leave(block, QUARANTINED, [])
        return there, join(block.id for block in gone)

    def unpromoted(self, ids: bytes) -> tuple[bytes, bytes]:
        """These reads failed, and the frames may be valid: COLD again; removed if they have no
        frame or were forgotten: (removed, orphans)."""
        return self._not_promoted(self._end_reads(ids, COLD, ABSENT))[:2]

    def spoilt(self, ids: bytes) -> tuple[bytes, bytes, bytes]:
        """The frames of these blocks are bad: (removed, orphans, segment and page of the frames)."""
        return self._not_promoted(self._end_reads(ids, ABSENT, ABSENT))

    def _not_promoted(self, blocks: list[Block]) -> tuple[bytes, bytes, bytes]:
        orphans: list[Block] = []
        freed: list[int] = []
        died = b""
        for block in blocks:
            if block.state == COLD:
                self._free_slot(block)
            else:
                died += block.drop_frame()
                self._leave(block, READY, orphans)
                freed.append(block.id)
        return join(freed), evictable_ids(orphans), died

    def damaged(self, ids: bytes, frames: bytes) -> tuple[bytes, bytes, bytes]:
        """Drop these frames of blocks that still have them: READY blocks are then only in memory,
        and COLD ones are removed. Skips blocks whose frame is being read: (removed, orphans,
        segment and page of the frames)."""
        numbers = unpack(ids)
        packed = split_for(numbers, frames, FRAME.size)
        orphans: list[Block] = []
        freed: list[int] = []
        died = b""
        self._begin()
        for number, frame in zip(numbers, packed, strict=True):
            block = self._blocks.get(number)
            same = block and block.frame and block.frame.place() == frame[:8]
            if block is None or not same or block.state == PROMOTING:
                continue
            died += block.drop_frame()
            if block.state == COLD:
                block.state = ABSENT
                self._leave(block, COLD, orphans)
                freed.append(number)
        return join(freed), evictable_ids(orphans), died

    def frames(self, ids: bytes) -> tuple[bytes, bytes]:
        """The frames of these blocks, and the digests of their payloads. ValueError without a
        frame."""
        packed, digests = b"", b""
        for block in self._known(ids):
            if block.frame is None:
                raise ValueError("a block without a frame cannot be moved")
            assert block.checksum is not None
            packed += block.frame.pack()
            digests += block.checksum
        return packed, digests

    def dirty(self, ids: bytes) -> bytes:
        """The READY blocks without a frame, in order; unknown ids are skipped."""
        blocks = filter(None, map(self._blocks.get, unpack(ids)))
        return join(b.id for b in blocks if b.state == READY and not b.frame)

    def lossy(self, ids: bytes) -> bytes:
        """The blocks whose bytes in memory were decoded with loss, in order."""
        return join(block.id for block in self._known(ids) if block.lossy)

    def depths(self, ids: bytes) -> bytes:
        """The number of known keys before each block; 4 bytes each."""
        found = []
        for block in self._known(ids):
            above, depth = block.node.parent, 0
            while above is not None:
                above, depth = above.parent, depth + 1
            found.append(depth)
        return join(found)

    def coldest(self, ids: bytes, within_bytes: int, limit_bytes: int) -> tuple[bytes, bool]:
        """The dirty, unleased blocks among the first ids that together have `within_bytes`, up to
        the limit; and whether more ids could not have changed the result."""
        numbers = unpack(ids)
        found: list[int] = []
        seen = taken = 0
        for number in numbers:
            if seen >= within_bytes:
                break
            block = self._blocks.get(number)
            if block is None:
                raise ValueError("no block has this id")
            seen += block.place.block_bytes
            if block.evictable() and not block.frame:
                if not limit_bytes or (taken and taken + block.place.block_bytes > limit_bytes):
                    return join(found), True
                taken += block.place.block_bytes
                found.append(number)
        return join(found), seen >= within_bytes

    def in_segment(self, segment: int, look: bool = False) -> tuple[bytes, bytes]:
        """The blocks whose frames are in this segment, by page, and a byte each: 1 if it was used,
        plus 2 if it is COLD. With `look` the segment's round ends: 1 if it is to be copied, and
        none counts as used afterwards."""
        blocks = self._in_segment(segment)
        flags = bytes(
            (block.earns_second_chance() if look else block.used) + 2 * (block.state == COLD)
            for block in blocks
        )
        return join(block.id for block in blocks), flags

    def _in_segment(self, segment: int) -> list[Block]:
        found: dict[tuple[int, int], Block] = {}
        for number in self._segments.get(segment, []):
            block = self._blocks.get(number)
            if block and block.frame and block.frame.segment == segment:
                found[block.frame.page, number] = block
        return [block for _, block in sorted(found.items(), key=lambda item: item[0])]

    def still(self, ids: bytes, segment: int) -> bytes:
        """The blocks with a frame in this segment, in order."""
        blocks = filter(None, map(self._blocks.get, unpack(ids)))
        return join(b.id for b in blocks if b.frame and b.frame.segment == segment)

    def take_used(self, limit: int) -> bytes:
        """Segment and page of the frames whose blocks were used since the last call, the latest
        first; of at most `limit` used blocks."""
        places = b""
        for _ in range(min(limit, len(self._newly_used))):
            block = self._blocks.get(self._newly_used.pop())
            if block and block.frame and block.used:
                places += block.frame.place()
        return places

    def drop_segment(self, segment: int) -> tuple[bytes, bytes]:
        """Drop all frames in this segment; remove the blocks that were only there: (removed,
        orphans)."""
        orphans: list[Block] = []
        freed: list[int] = []
        self._begin()
        for block in self._in_segment(segment):
            block.drop_frame()
            if block.state == COLD:
                block.state = ABSENT
                self._leave(block, COLD, orphans)
                freed.append(block.id)
        self._segments.pop(segment, None)
        return join(freed), evictable_ids(orphans)

    def restore(
        self, space: int, rows: bytes, segment: int, used: bytes = b""
    ) -> tuple[int, int, bytes]:
        """Create COLD blocks from the rows of a segment's footer, each of this space: (the number
        of blocks that are now on disk and were not, the number of rows that fit no block of the
        space, segment and page of each frame that died). A COLD block gets this newer frame. A
        block in memory gets it if it has no frame, unless the frame is raw and its digest differs from
        the block's checksum. Blocks whose frames are at the pages in `used`, 4 bytes each in
        ascending order, count as used."""
        found = self._space(space)
        wanted = unpack(used)
        if wanted != sorted(wanted):
            raise ValueError("used pages must ascend")
        made, unfit, died = 0, 0, b""
        for at, row in enumerate(split(rows, ROW.size)):
            if at % RESTORED_AT_ONCE == 0:
                self._begin()
            (
                key, parent, _, group, shard, page, _, header_pages, codec, payload_bytes, _, _, digest,
                flags,
            ) = ROW.unpack(row)  # fmt: skip
            place = found.places.get((group, shard))
            fits = codec < 256 and header_pages < 256 and payload_bytes < 1 << 32
            if not place or not fits or (codec == 0 and payload_bytes != place.block_bytes):
                unfit += 1
                continue
            frame = Frame(segment, page, payload_bytes, codec, header_pages, flags & 255)
            block = self._find(place, key)
            if block is not None and block.awaits_frame:
                if codec or block.checksum == digest:
                    self._note_frame(block, frame, digest)
                    block.used = page in wanted
                    made += 1
                else:
                    died += frame.place()
                continue
            if block is not None:
                died += (block.frame if block.state == COLD and block.frame else frame).place()
                if block.state == COLD:
                    self._note_frame(block, frame, digest)
                    block.used = page in wanted
                continue
            above = None
            if flags & HAS_PARENT:
                above = self._index.get((space, parent)) or self._make_node(space, parent)
            node = self._index.get((space, key)) or self._make_node(space, key)
            self._set_parent(node, above)
            block = self._attach(node, place, COLD)
            self._note_frame(block, frame, digest)
            block.used = page in wanted
            self._arrived(block)
            if above is not None:
                self._drop_idle(above)
            made += 1
        return made, unfit, died

    def identities(self, ids: bytes) -> bytes:
        """80 bytes per block: "<IIIB3x32s32s" of space, group, shard, whether there is a parent,
        key, and the parent's key."""
        out = b""
        for block in self._known(ids):
            place, parent = block.place, block.node.parent
            above = parent.key if parent else b""
            names = place.space, place.group, place.shard, parent is not None, block.node.key, above
            out += struct.pack("<IIIB3x32s32s", *names)
        return out

    # Single blocks.

    def _known(self, ids: bytes) -> list[Block]:
        numbers = unpack(ids)
        if not all(number in self._blocks for number in numbers):
            raise ValueError("no block has this id")
        return [self._blocks[number] for number in numbers]

    def ready(self, ids: bytes) -> int:
        """The number of READY blocks among these."""
        return sum(block.state == READY for block in self._known(ids))

    def slots(self, ids: bytes) -> bytes:
        """The positions of the blocks, with the current generations."""
        out = b""
        for block in self._known(ids):
            if block.slab is None:
                raise ValueError("a block on disk has no slot")
            extent, offset, generation = self._slabs.address(block.slab, block.slot)
            out += struct.pack("<IIQQ", extent, 0, offset, generation)
        return out

    def checksums(self, ids: bytes) -> tuple[bytes, bytes]:
        """The checksums of the blocks' own bytes, zeros if unknown; and a byte each that is 1 if
        known."""
        found = [block.own_checksum() for block in self._known(ids)]
        return b"".join(c or bytes(16) for c in found), bytes(c is not None for c in found)

    def keys_of(self, ids: bytes) -> bytes:
        return b"".join(block.node.key for block in self._known(ids))

    # Lists for operators, a range of records per call.

    def tally(self, first: int, look: int) -> tuple[int, bytes]:
        """Per space with records in [first, first + look): "<IIIIQQ" of its number, the blocks in
        memory, on disk, and neither, and the bytes of the first two; and where to continue, 0 at
        the end."""
        found: dict[int, list[int]] = {}
        end = min(first + look, self._limit)
        for block in self._from(first, end):
            counts = found.setdefault(block.place.space, [0] * 5)
            if block.state == READY:
                counts[0] += 1
                counts[3] += block.place.block_bytes
            elif block.frame is None:
                counts[2] += 1
            if block.frame is not None:
                counts[1] += 1
                counts[4] += block.frame.nbytes
        rows = b"".join(struct.pack("<IIIIQQ", space, *counts) for space, counts in found.items())
        return (end if end < self._limit else 0), rows

    def listed(self, space: int, first: int, look: int, limit: int) -> tuple[int, bytes]:
        """The blocks of this space among the records [first, first + look), at most `limit`. Per
        block "<IIIIHBBBB2x32s": id, group, shard, payload bytes of its frame, leases, state, 1 if
        it has a frame plus 2 if it was used, the frame's codec, the rounds in which it was used,
        key. Before them, where to continue, 0 at the end."""
        self._space(space)
        rows = b""
        end = min(first + look, self._limit)
        for block in self._from(first, end):
            if block.place.space != space:
                continue
            frame = block.frame or Frame(0, 0, 0, 0, 0, 0)
            rows += struct.pack(
                "<IIIIHBBBB2x32s", block.id, block.place.group, block.place.shard, frame.payload_bytes,
                block.leases, LIFE.index(block.state), (block.frame is not None) + 2 * block.used,
                frame.codec, block.rounds, block.node.key,
            )  # fmt: skip
            if len(rows) == limit * 56:
                end = block.id + 1
                break
        return (end if end < self._limit else 0), rows

    def _from(self, first: int, end: int) -> list[Block]:
        return [self._blocks[number] for number in range(first, end) if number in self._blocks]

    def counts(self) -> Counts:
        """Blocks and bytes by state, nodes, ghosts, and the arena's bytes."""
        states = (WRITING, READY, DOOMED, QUARANTINED, COLD, PROMOTING)
        framed = [block.frame for block in self._blocks.values() if block.frame]
        blocks = dict.fromkeys(states, 0)
        sizes = dict(blocks)
        capacity = sum(pages for pages, _ in self._slabs.extents) * PAGE
        free = capacity
        for block in self._blocks.values():
            blocks[block.state] += 1
            sizes[block.state] += block.place.block_bytes
            free -= block.place.size_class.pitch if block.slab else 0
        return {
            "blocks": blocks,
            "bytes": sizes,
            "framed_blocks": len(framed),
            "framed_bytes": sum(frame.nbytes for frame in framed),
            "nodes": len(self._index),
            "ghosts": self._ghosts(),
            "capacity_bytes": capacity,
            "free_bytes": free,
        }

    def _ghosts(self) -> int:
        return sum(not node.blocks for node in self._index.values())

    def memory_bytes(self) -> int:
        """A guess: this class is not made to be small."""
        return 1000 * len(self._ids)

    # The tree.

    def _make_id(self) -> int:
        if not self._spare:
            self._spare.append(self._limit)
            self._limit += 1
        self._ids.add(self._spare[-1])
        return self._spare.pop()

    def _drop_id(self, number: int) -> None:
        self._ids.remove(number)
        self._spare.append(number)

    def _make_node(self, space: int, key: bytes) -> Node:
        node = self._index[space, key] = Node(self._make_id(), space, key)
        return node

    def _begin(self) -> None:
        """Runs at the start of each call that may remove nodes."""
        self._walked = self._climbed = 0
        while self._pending_ghosts and self._climbed < WALK_LIMIT:
            number = self._pending_ghosts.pop()
            self._drop_idle(
                next((node for node in self._index.values() if node.id == number), None)
            )

    def _drop_idle(self, node: Node | None) -> None:
        """Remove a ghost without children, and then its parent if that became one.

        Above the limit of ghosts it also removes those with one child, and that child is loose.
        """
        while node is not None and not node.blocks:
            if node.children:
                if len(node.children) > 1 or self._ghosts() <= self._ghost_limit:
                    return
                node.children[0].parent = None
                node.children[0].loose = True
            if node.parent is not None:
                node.parent.children.remove(node)
            self._index.pop((node.space, node.key), None)
            if node.id in self._ids:
                self._drop_id(node.id)
            node = node.parent
            self._climbed += node is not None
            if node is not None and self._climbed > WALK_LIMIT:
                self._pending_ghosts.append(node.id)
                return

    def _set_parent(self, node: Node, parent: Node | None) -> None:
        """Link a parentless ghost, or a loose node, below its parent, unless that creates a cycle
        or the check takes too long. None makes it a root."""
        if node.parent is not None or (node.blocks and not node.loose):
            return
        if parent is not None:
            if node is parent:
                return
            above = parent if node.children else None
            while above is not None:
                if above is node:
                    return
                self._climbed += 1
                if self._climbed > WALK_LIMIT:
                    return
                above = above.parent
            node.parent = parent
            parent.children.insert(0, node)
        was_cut, node.loose = node.cut, False
        node.cut = parent is not None and (parent.cut or not self._complete(parent))
        if was_cut and not node.cut and self._complete(node):
            self._join_below(node)

    def _attach(self, node: Node, place: Place, state: str = WRITING) -> Block:
        vacant = all(block.id != node.id for block in node.blocks)
        block = Block(node.id if vacant else self._make_id(), node, place, state)
        node.blocks.insert(0 if vacant else 1, block)
        self._blocks[block.id] = block
        return block

    def _leave(self, block: Block, before: str, orphans: list[Block]) -> None:
        """A block that is already ABSENT returns its slot, its id and an unused node."""
        node = block.node
        if before in RESTORABLE and block.place.kind == FULL:
            self._cut_below(node, orphans)
        if block.slab is not None:
            self._slabs.release(block.slab, block.slot)
        node.blocks.remove(block)
        del self._blocks[block.id]
        if block.id != node.id:
            self._drop_id(block.id)
        self._drop_idle(node)

    def _free_slot(self, block: Block) -> None:
        """A block that is already COLD returns only its slot."""
        assert block.slab is not None
        self._slabs.release(block.slab, block.slot)
        block.slab, block.slot, block.lossy = None, 0, False

    def _complete(self, node: Node) -> bool:
        ready = sum(b.restorable() and b.place.kind == FULL for b in node.blocks)
        return ready == self._space(node.space).full_places

    def _cut_below(self, node: Node, orphans: list[Block]) -> None:
        stack = [node]
        while stack:
            for child in stack.pop().children:
                if child.cut:
                    continue
                self._walked += 1
                if self._walked > WALK_LIMIT:
                    return
                child.cut = True
                orphans += [b for b in child.blocks if b.evictable() and b.place.kind == FULL]
                stack.append(child)

    def _join_below(self, node: Node) -> None:
        stack = [node]
        while stack:
            for child in stack.pop().children:
                if not child.cut:
                    continue
                self._walked += 1
                if self._walked > WALK_LIMIT:
                    return
                child.cut = False
                if self._complete(child):
                    stack.append(child)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self._slabs.check()
        placed = {
            id(block): (slab, slot)
            for slab in self._slabs.layouts()
            for slot, block in enumerate(slab.table)
            if block is not None
        }
        in_slots = [block for block in self._blocks.values() if block.slab]
        assert len(placed) == len(in_slots), "a slot outlived its block"
        for block in in_slots:
            assert placed[id(block)] == (block.slab, block.slot), "a block is not in its slot"
        for block in self._blocks.values():
            assert (block.state == COLD) == (block.slab is None), "a block on disk has a slot"
            assert block.frame or (block.state != COLD and not block.used), "a frame is missing"
            assert not block.frame or block.restorable(), (
                "a block with a frame is in the wrong state"
            )
            assert block in block.node.blocks, "a block is lost"
        for node in self._index.values():
            late = node.id in self._pending_ghosts
            assert node.blocks or node.children or late, "a ghost without children is kept"
            assert not node.loose or node.parent is None, "a loose node has a parent"
            assert node.parent is None or node in node.parent.children, "a child is lost"
            for child in node.children:
                assert child.cut == (node.cut or not self._complete(node)), "a cut flag is wrong"


def split(items: bytes, size: int) -> list[bytes]:
    if len(items) % size:
        raise ValueError(f"items of {size} bytes each")
    return [items[at : at + size] for at in range(0, len(items), size)]


def split_for(owners: Sequence[object], items: bytes, size: int) -> list[bytes]:
    if len(items) != len(owners) * size:
        raise ValueError(f"an item of {size} bytes for each id")
    return split(items, size)


def unpack(ids: bytes) -> list[int]:
    return [int.from_bytes(one, "little") for one in split(ids, 4)]


def join(ids: Iterable[int]) -> bytes:
    return b"".join(struct.pack("<I", one) for one in ids)


def evictable_ids(blocks: Sequence[Block]) -> bytes:
    return join(block.id for block in blocks if block.evictable())
