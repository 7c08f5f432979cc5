"""The store in plain Python: the executable specification of `kvtier_kernels.Store`.

Same calls, same results, same ids and slots; it is slow and keeps nothing back. Keys are 32 bytes,
ids 4 and slots 24 ("<IIQQ": extent, 0, offset, generation), each batch as one bytes object.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier_kernels.reference.slabs import HELD, LAID, PAGE, TOO_SHORT, SizeClass, Slab, Slabs

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvtier_kernels._native import Counts

FULL, WINDOW, STATE = 0, 1, 2
ABSENT, WRITING, READY, DOOMED, QUARANTINED = "absent", "writing", "ready", "doomed", "quarantined"
ANSWERS = {ABSENT: 0, READY: 1, WRITING: 2, QUARANTINED: 2, DOOMED: 3}
MAX_LEASES = 65534
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

    def evictable(self) -> bool:
        return self.state == READY and self.leases == 0


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
    loose: bool = False  # its parent went; it is linked again when that is saved


class Store:
    """One tenant's blocks. It has no clock, no I/O and no policy; it evicts what it is told."""

    def __init__(self, ghosts: int = 65536) -> None:
        """Of the ghosts beyond `ghosts`, those stay that several others hang on."""
        self._slabs = Slabs()
        self._ghost_limit = ghosts
        self._late: list[int] = []  # ghosts that the next call looks at
        self._climbed = 0
        self._spaces: list[Space | None] = []
        self._spare_spaces: list[int] = []
        self._index: dict[tuple[int, bytes], Node] = {}
        self._blocks: dict[int, Block] = {}
        self._ids: set[int] = set()  # of nodes and blocks
        self._spare: list[int] = []
        self._limit = 0
        self._walked = 0

    # Geometry.

    def add_extent(self, nbytes: int, generations: Buffer) -> int:
        """Adds bytes to place blocks in, with 8 writable bytes for each page's generation."""
        if not PAGE <= nbytes < 1 << 44:
            raise ValueError("an extent has between 4096 bytes and 16 TiB")
        table = memoryview(generations)
        if table.readonly:
            raise BufferError("the generation table is not writable")
        if table.nbytes < nbytes // PAGE * 8:
            raise ValueError("the generation table needs 8 bytes a page")
        return self._slabs.add_extent(nbytes, table.cast("B")[: nbytes // PAGE * 8].cast("Q"))

    def add_space(self, groups: Sequence[tuple[int, int, int]], shards: Sequence[int]) -> int:
        """Adds a space of groups (kind, window_blocks, block_bytes), each with so many shards."""
        if not groups or len(groups) != len(shards):
            raise ValueError("a number of shards for each group")
        for (kind, window, size), count in zip(groups, shards, strict=True):
            if kind not in (FULL, WINDOW, STATE) or not 0 <= window < 1 << 32 or count < 1:
                raise ValueError("a group is (kind 0..2, window_blocks, block_bytes)")
            if not 0 < size <= 1 << 40 or (kind == WINDOW and window == 0):
                raise ValueError("a block has between 1 byte and 1 TiB, a window a length")
        if sum(len(space.places) for space in self._spaces if space) + sum(shards) > 1 << 24:
            raise ValueError("too many spaces, groups and shards")
        classes = [self._slabs.join_class(size) for _, _, size in groups]
        if sum(self._slabs.living()) > MAX_SIZES:
            for size_class in classes:
                size_class.users -= 1
            raise ValueError("too many sizes of blocks")
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
        """Forgets a space that holds nothing, so that its number may be another's; or False."""
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
        """What a block of this group takes of the arena."""
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

    # What is here.

    def match(self, space: int, keys: bytes) -> tuple[int, list[tuple[int, int, int, bytes]]]:
        """The longest prefix that every group can restore, all shards READY, and the blocks that it
        is restored from: (group, shard, place of the first one in the prefix, ids)."""
        found = self._space(space)
        named = split(keys, 32)
        best = 0
        runs = [0] * len(found.groups)
        for i, key in enumerate(named):
            restorable = True
            for group, (kind, window, _) in enumerate(found.groups):
                places = [found.places[group, shard] for shard in range(found.shards[group])]
                ready = all(self._ready(place, key) for place in places)
                runs[group] = runs[group] + 1 if ready else 0
                needed = min(window, i + 1) if kind == WINDOW else 1
                restorable = restorable and runs[group] >= needed
            if any(kind == FULL and not runs[g] for g, (kind, _, _) in enumerate(found.groups)):
                break
            if restorable:
                best = i + 1
        parts: list[tuple[int, int, int, bytes]] = []
        for (group, shard), place in found.places.items() if best else ():
            kind, window, _ = found.groups[group]
            first = {FULL: 0, WINDOW: max(0, best - window), STATE: best - 1}[kind]
            blocks = [self._ready(place, key) for key in named[first:best]]
            parts.append((group, shard, first, join(block.id for block in blocks if block)))
        return best, parts

    def _find(self, place: Place, key: bytes) -> Block | None:
        node = self._index.get((place.space, key))
        return next((b for b in node.blocks if b.place == place), None) if node else None

    def _ready(self, place: Place, key: bytes) -> Block | None:
        block = self._find(place, key)
        return block if block and block.state == READY else None

    def resident(self, space: int, keys: bytes) -> bytes:
        """The ids of these keys' READY blocks in every group and shard, each once, by key."""
        self._space(space)
        nodes = (self._index.get((space, key)) for key in dict.fromkeys(split(keys, 32)))
        return join(b.id for node in nodes if node for b in node.blocks if b.state == READY)

    def states(self, space: int, key: bytes) -> bytes:
        """What `probe` says of this key, for each shard of each group."""
        places = self._space(space).places.values()
        if len(key) != 32:
            raise ValueError("a key is 32 bytes")
        found = (self._find(place, key) for place in places)
        return bytes(ANSWERS[block.state if block else ABSENT] for block in found)

    def probe(self, space: int, group: int, shard: int, keys: bytes) -> bytes:
        """A byte a key: 0 new, 1 READY, 2 WRITING or QUARANTINED, 3 DOOMED. ValueError where a
        key is given twice."""
        place = self._place(space, group, shard)
        if len(set(split(keys, 32))) < len(split(keys, 32)):
            raise ValueError("a key is given twice")
        found = (self._find(place, key) for key in split(keys, 32))
        return bytes(ANSWERS[block.state if block else ABSENT] for block in found)

    def present(self, space: int, group: int, shard: int, keys: bytes) -> bytes:
        """The ids of those that are READY, in order."""
        place = self._place(space, group, shard)
        found = (self._find(place, key) for key in split(keys, 32))
        return join(block.id for block in found if block and block.state == READY)

    def ancestors(self, space: int, group: int, shard: int, key: bytes, limit: int) -> bytes:
        """The READY blocks among the first `limit` nodes from the key, included, to its root."""
        place = self._place(space, group, shard)
        if len(key) != 32:
            raise ValueError("a key is 32 bytes")
        ids: list[int] = []
        node = self._index.get((space, key))
        while node is not None and limit > 0:
            limit -= 1
            ids += [b.id for b in node.blocks if b.place == place and b.state == READY]
            node = node.parent
        return join(ids)

    # Plans.

    def room(self, space: int, group: int, n: int) -> int:
        """How many of n slots could be had without evicting."""
        return min(n, self._slabs.room(self._place(space, group, 0).size_class))

    def make_room(self, space: int, group: int, n: int, victims: bytes) -> tuple[bytes, bytes]:
        """Evicts until n slots could be had or the victims are used up: (evicted, orphans).

        A victim says which size class pays; where that isn't the wanted one, a slab of it is
        reshaped, and those leave that lie in the way of a new slot. Orphans are READY, unleased
        blocks of full groups that no match can reach any more since a block above them left.
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
            block.state = ABSENT
            self._leave(block, READY, orphans)
            evicted.append(block)

        slabs.round += 1
        slabs.loosen(wanted, n, thorough=False)
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
                    continue  # its bytes are on their way to another class
                in_the_way = slabs.clearable(wanted)
                laid = HELD
                if in_the_way is None and foreign:
                    laid = slabs.reshape(top, wanted)
                if laid == LAID:
                    if slabs.room(wanted) >= n:
                        break
                    in_the_way = slabs.clearable(wanted)
                if in_the_way is None and not patient:
                    in_the_way = slabs.seek(wanted)
                    more = in_the_way is not None
                    if more and laid == TOO_SHORT and slabs.room(wanted) < n:
                        in_the_way = [victim]  # brings nothing yet, but the coldest goes first
                for block in in_the_way or []:
                    assert isinstance(block, Block)
                    leave(block)
        if named:
            slabs.loosen(wanted, n, thorough=True)
        return join(block.id for block in evicted), evictable_ids(orphans)

    def reserve(
        self, space: int, group: int, shard: int, parent: bytes | None, keys: bytes, statuses: bytes
    ) -> tuple[bytes, bytes]:
        """Makes a WRITING block for every key of status 0: (ids, slots), fewer where room is short.

        Each key's parent is the one before it, the first one's is `parent` or the root. Evicts
        nothing. Raises ValueError, and keeps none, where a block is there already.
        """
        place = self._place(space, group, shard)
        if parent is not None and len(parent) != 32:
            raise ValueError("a key is 32 bytes")
        named = split(keys, 32)
        if len(statuses) != len(named):
            raise ValueError("a status for each key")
        self._begin()
        made: list[Block] = []
        above_keys = [parent, *named]
        for key, above_key, status in zip(named, above_keys, statuses, strict=False):
            if status:
                loose = self._index.get((space, key))
                above = self._index.get((space, above_key)) if above_key is not None else None
                if loose and loose.loose and (above or above_key is None):
                    self._hang(loose, above)
                continue
            if self._find(place, key) is not None:
                self.abort(join(block.id for block in made))
                raise ValueError("a key to reserve is there already, or is given twice")
            if self._slabs.room(place.size_class) == 0:
                break
            above = None
            if above_key is not None:
                above = self._index.get((space, above_key)) or self._make_node(space, above_key)
            node = self._index.get((space, key)) or self._make_node(space, key)
            self._hang(node, above)
            block = self._attach(node, place)
            if above is not None:
                self._tidy(above)
            block.slab, block.slot = self._slabs.take(place.size_class, block)
            made.append(block)
        ids = join(block.id for block in made)
        return ids, self.slots(ids)

    # Events; each takes the whole batch, or raises ValueError and changes nothing.

    def _claim(self, ids: bytes, before: str, after: str, unleased: bool = False) -> list[Block]:
        blocks: list[Block] = []
        for number in unpack(ids):
            block = self._blocks.get(number)
            if block is None or block.state != before or (unleased and block.leases):
                for claimed in blocks:
                    claimed.state = before
                raise ValueError("a block is not in the state for this, or no block has this id")
            block.state = after
            blocks.append(block)
        self._begin()
        return blocks

    def commit(self, ids: bytes, checksums: bytes) -> None:
        """WRITING blocks are READY from now on, with their checksums of 16 bytes, or with none."""
        if checksums and len(checksums) != len(unpack(ids)) * 16:
            raise ValueError("a checksum of 16 bytes for each id, or none")
        for i, block in enumerate(self._claim(ids, WRITING, READY)):
            block.checksum = checksums[16 * i : 16 * i + 16] if checksums else None
            if block.place.kind == FULL and not block.node.cut and self._complete(block.node):
                self._join_below(block.node)

    def abort(self, ids: bytes) -> None:
        """WRITING blocks go, and their slots are free."""
        for block in self._claim(ids, WRITING, ABSENT):
            self._leave(block, WRITING, [])

    def quarantine(self, ids: bytes) -> None:
        """WRITING blocks become QUARANTINED: their slots stay taken until `gone`."""
        self._claim(ids, WRITING, QUARANTINED)

    def gone(self, ids: bytes) -> None:
        """QUARANTINED blocks go, and their slots are free."""
        for block in self._claim(ids, QUARANTINED, ABSENT):
            self._leave(block, QUARANTINED, [])

    def evict(self, ids: bytes) -> bytes:
        """READY, unleased blocks go; returns the orphans."""
        orphans: list[Block] = []
        for block in self._claim(ids, READY, ABSENT, unleased=True):
            self._leave(block, READY, orphans)
        return evictable_ids(orphans)

    def forget(self, ids: bytes) -> tuple[bytes, bytes]:
        """READY blocks match no more, and go with their last lease: (gone now, orphans)."""
        freed: list[int] = []
        orphans: list[Block] = []
        for block in self._claim(ids, READY, DOOMED):
            if block.leases:
                if block.place.kind == FULL:
                    self._cut_below(block.node, orphans)
            else:
                block.state = ABSENT
                self._leave(block, READY, orphans)
                freed.append(block.id)
        return join(freed), evictable_ids(orphans)

    def lease(self, ids: bytes) -> None:
        """One more lease on each block; OverflowError where that makes more than 65534, ValueError
        where a block is named twice."""
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
        """One lease less on each block: (evictable now, DOOMED ones that are gone now)."""
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

    # About single blocks.

    def _known(self, ids: bytes) -> list[Block]:
        numbers = unpack(ids)
        if not all(number in self._blocks for number in numbers):
            raise ValueError("no block has this id")
        return [self._blocks[number] for number in numbers]

    def ready(self, ids: bytes) -> int:
        """How many of these blocks are READY."""
        return sum(block.state == READY for block in self._known(ids))

    def slots(self, ids: bytes) -> bytes:
        """Where the blocks lie, with the generations as they are now."""
        out = b""
        for block in self._known(ids):
            assert block.slab is not None
            extent, offset, generation = self._slabs.address(block.slab, block.slot)
            out += struct.pack("<IIQQ", extent, 0, offset, generation)
        return out

    def checksums(self, ids: bytes) -> tuple[bytes, bytes]:
        """The checksums, zeroes where there is none; and a byte each that says whether there is."""
        found = [block.checksum for block in self._known(ids)]
        return b"".join(c or bytes(16) for c in found), bytes(c is not None for c in found)

    def keys_of(self, ids: bytes) -> bytes:
        return b"".join(block.node.key for block in self._known(ids))

    def counts(self) -> Counts:
        """Blocks and bytes by state, nodes, ghosts, and the arena's bytes."""
        blocks = dict.fromkeys((WRITING, READY, DOOMED, QUARANTINED), 0)
        sizes = dict(blocks)
        capacity = sum(pages for pages, _ in self._slabs.extents) * PAGE
        free = capacity
        for block in self._blocks.values():
            blocks[block.state] += 1
            sizes[block.state] += block.place.block_bytes
            free -= block.place.size_class.pitch
        return {
            "blocks": blocks,
            "bytes": sizes,
            "nodes": len(self._index),
            "ghosts": self._ghosts(),
            "capacity_bytes": capacity,
            "free_bytes": free,
        }

    def _ghosts(self) -> int:
        return sum(not node.blocks for node in self._index.values())

    def memory_bytes(self) -> int:
        """A guess: this one is not made to be small."""
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
        """At the start of each call that may drop nodes."""
        self._walked = self._climbed = 0
        while self._late and self._climbed < WALK_LIMIT:
            number = self._late.pop()
            self._tidy(next((node for node in self._index.values() if node.id == number), None))

    def _tidy(self, node: Node | None) -> None:
        """Frees a ghost that nobody hangs on, and then its parent if that is now one.

        With too many ghosts one with a single child goes too, and the child is loose.
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
                self._late.append(node.id)
                return

    def _hang(self, node: Node, parent: Node | None) -> None:
        """Hangs a parentless ghost, or a loose node, under its parent, unless that closes a circle
        or the proof takes too long. None makes it a root."""
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

    def _attach(self, node: Node, place: Place) -> Block:
        vacant = all(block.id != node.id for block in node.blocks)
        block = Block(node.id if vacant else self._make_id(), node, place)
        node.blocks.insert(0 if vacant else 1, block)
        self._blocks[block.id] = block
        return block

    def _leave(self, block: Block, before: str, orphans: list[Block]) -> None:
        """A block, already ABSENT, gives back its slot, its id and an idle node."""
        node = block.node
        if before == READY and block.place.kind == FULL:
            self._cut_below(node, orphans)
        assert block.slab is not None
        self._slabs.give(block.slab, block.slot)
        node.blocks.remove(block)
        del self._blocks[block.id]
        if block.id != node.id:
            self._drop_id(block.id)
        self._tidy(node)

    def _complete(self, node: Node) -> bool:
        ready = sum(b.state == READY and b.place.kind == FULL for b in node.blocks)
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
        """Raises AssertionError where an invariant is broken."""
        self._slabs.check()
        placed = {
            id(block): (slab, slot)
            for slab in self._slabs.layouts()
            for slot, block in enumerate(slab.table)
            if block is not None
        }
        assert len(placed) == len(self._blocks), "a slot outlived its block"
        for block in self._blocks.values():
            assert placed[id(block)] == (block.slab, block.slot), "a block is not in its slot"
            assert block in block.node.blocks, "a block is lost"
        for node in self._index.values():
            late = node.id in self._late
            assert node.blocks or node.children or late, "a ghost without children is kept"
            assert not node.loose or node.parent is None, "a loose node has a parent"
            assert node.parent is None or node in node.parent.children, "a child is lost"
            for child in node.children:
                assert child.cut == (node.cut or not self._complete(node)), "a cut flag is wrong"


def split(items: bytes, size: int) -> list[bytes]:
    if len(items) % size:
        raise ValueError(f"items of {size} bytes each")
    return [items[at : at + size] for at in range(0, len(items), size)]


def unpack(ids: bytes) -> list[int]:
    return [int.from_bytes(one, "little") for one in split(ids, 4)]


def join(ids: Iterable[int]) -> bytes:
    return b"".join(struct.pack("<I", one) for one in ids)


def evictable_ids(blocks: Sequence[Block]) -> bytes:
    return join(block.id for block in blocks if block.evictable())
