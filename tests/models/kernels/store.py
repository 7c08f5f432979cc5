"""The tree of keys in `kvtier_kernels.Store`, in plain Python: parents, ghosts, and which keys are cut.

It follows the store where the store has a choice: ids, slots, and the blocks that it evicts.
tests/kernels/test_store_machine.py compares the two, and has the invariants of states and places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

Place = tuple[int, int]  # group, shard
NAME_STEP = 0x9E3779B97F4A7C15


@dataclass(eq=False)
class Node:
    """A key. Without blocks it is a ghost, kept while it has children."""

    space: int
    key: bytes
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    blocks: dict[Place, int] = field(default_factory=dict)
    loose: bool = False  # its parent is gone; it is linked again when that is saved

    def above(self) -> Iterator[Node]:
        """This node, its parent, and so on to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


class Tree:
    def __init__(self, ghosts: int, is_restorable: Callable[[int], bool]) -> None:
        """Above `ghosts` ghosts, only those with several children are kept."""
        self._ghost_limit = ghosts
        self._is_restorable = is_restorable
        self.nodes: dict[tuple[int, bytes], Node] = {}
        self.full: dict[int, set[Place]] = {}  # of each space, the places of its full groups

    def ghosts(self) -> int:
        return sum(not node.blocks for node in self.nodes.values())

    def _node(self, space: int, key: bytes) -> Node:
        return self.nodes.setdefault((space, key), Node(space, key))

    def block(self, space: int, place: Place, key: bytes) -> int | None:
        node = self.nodes.get((space, key))
        return node.blocks.get(place) if node else None

    def reserve(
        self, space: int, place: Place, parent: bytes | None, keys: Sequence[bytes],
        statuses: Sequence[int], ids: Sequence[int],
    ) -> bool:  # fmt: skip
        """Add a block for each key with status 0, as far as there are ids; True if there are too few. Each
        key's parent is the one before it. Raise ValueError, and add none, if a block exists already."""
        made: list[Node] = []
        for key, above_key, status in zip(keys, [parent, *keys], statuses, strict=False):
            if status:
                loose = self.nodes.get((space, key))
                above = None if above_key is None else self.nodes.get((space, above_key))
                if loose and loose.loose and (above or above_key is None):
                    self._link(loose, above)
                continue
            if self.block(space, place, key) is not None:
                for node in made:
                    self.leave(node.space, place, node.key)
                raise ValueError("a key exists already")
            if len(made) == len(ids):
                return True
            self.add(space, place, key, above_key, ids[len(made)])
            made.append(self.nodes[space, key])
        return False

    def add(self, space: int, place: Place, key: bytes, parent: bytes | None, id_: int) -> None:
        above = None if parent is None else self._node(space, parent)
        node = self._node(space, key)
        self._link(node, above)
        node.blocks[place] = id_
        if above is not None:
            self._drop_idle(above)

    def leave(self, space: int, place: Place, key: bytes) -> None:
        node = self.nodes[space, key]
        del node.blocks[place]
        self._drop_idle(node)

    def _link(self, node: Node, parent: Node | None) -> None:
        """Link a parentless ghost, or a loose node, below its parent, unless that creates a cycle. None makes
        it a root."""
        if node.parent is not None or (node.blocks and not node.loose):
            return
        if parent is not None:
            if node in parent.above():
                return
            node.parent = parent
            parent.children.append(node)
        node.loose = False

    def _drop_idle(self, start: Node) -> None:
        """Remove a ghost without children, and then its parent if that became one. Above the limit of ghosts
        also remove those with one child, and that child is loose."""
        for node in list(start.above()):
            if node.blocks:
                return
            if node.children:
                if len(node.children) > 1 or self.ghosts() <= self._ghost_limit:
                    return
                node.children[0].parent = None
                node.children[0].loose = True
            if node.parent is not None:
                node.parent.children.remove(node)
            del self.nodes[node.space, node.key]

    def cut(self) -> set[Node]:
        """The nodes that no match can reach: one above lacks a block of a full group."""
        known: dict[Node, bool] = {}

        def is_cut(node: Node) -> bool:
            if node not in known:
                above = node.parent
                known[node] = (
                    bool(self.full[node.space]) and node.loose
                    if above is None
                    else is_cut(above) or not self._is_complete(above)
                )
            return known[node]

        return set(filter(is_cut, self.nodes.values()))

    def _is_complete(self, node: Node) -> bool:
        places = self.full[node.space]
        return all(at in node.blocks and self._is_restorable(node.blocks[at]) for at in places)


def name_of(key: bytes, at: int) -> bytes:
    """The name of a block in all tiers; `at` is its place among those of its space."""
    return ((int.from_bytes(key[:8], "little") + at * NAME_STEP) % 2**64).to_bytes(8, "little")
