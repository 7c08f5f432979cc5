"""Names of blocks: a chain of keyed hashes, one key per whole block of a prefix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, NewType, overload

from kvtier.arguments import Checking
from kvtier.errors import InvalidArgument
from kvtier_kernels import blake3, chain_hashes, chain_keys

if TYPE_CHECKING:
    from typing_extensions import Buffer

    TokenIds = Sequence[int] | Buffer

Key = NewType("Key", bytes)

KEY_BYTES = 32
SALT_DOMAIN = b"kvtier.salt.1\0"
SPACE_DOMAIN = b"kvtier.space-key.1\0"


class Keys(Sequence[Key]):
    """The keys of consecutive blocks, and the key of the block before them.

    A slice keeps its place in the chain: the parent of `keys[10:]` is `keys[9]`, so the end of a prefix
    can be saved alone. `packed` contains the keys as bytes; `parent` is the previous key, or empty. `others`
    are the keys of the same blocks under other secrets, while the tenant's secret is being replaced.
    """

    __slots__ = ("others", "packed", "parent")

    def __init__(self, packed: bytes, parent: bytes = b"", others: tuple[bytes, ...] = ()) -> None:
        if not (isinstance(packed, bytes) and isinstance(parent, bytes)):
            raise InvalidArgument(
                f"keys must be bytes: got {type(packed).__name__}, {type(parent).__name__}"
            )
        if len(packed) % KEY_BYTES or len(parent) not in (0, KEY_BYTES):
            text = f"keys are {KEY_BYTES} bytes each: got {len(packed)}, {len(parent)}"
            raise InvalidArgument(text)
        self.packed = packed
        self.parent = parent
        self.others = others

    @classmethod
    def of(cls, keys: Keys | Sequence[bytes]) -> Keys:
        """Return these keys as Keys. Raises InvalidArgument unless each is 32 bytes."""
        if isinstance(keys, Keys):
            return keys
        if not isinstance(keys, Iterable) or not all(
            isinstance(key, bytes) and len(key) == KEY_BYTES for key in keys
        ):
            raise InvalidArgument(
                f"expected keys of {KEY_BYTES} bytes each: make them with space.keys(token_ids)"
            )
        return cls(b"".join(keys))

    def __len__(self) -> int:
        return len(self.packed) // KEY_BYTES

    @overload
    def __getitem__(self, index: int) -> Key: ...
    @overload
    def __getitem__(self, index: slice) -> Keys: ...
    def __getitem__(self, index: int | slice) -> Key | Keys:
        if isinstance(index, slice):
            packed = self.packed
            start, stop, step = index.indices(len(packed) // KEY_BYTES)
            if step != 1:
                raise InvalidArgument("keys form a chain: only slices of step 1 are possible")
            first = start * KEY_BYTES
            parent = packed[first - KEY_BYTES : first] if start else self.parent
            last = stop * KEY_BYTES
            others = tuple(other[first:last] for other in self.others) if self.others else ()
            return Keys(packed[first:last], parent, others)
        place = range(len(self))[index] * KEY_BYTES
        return Key(self.packed[place : place + KEY_BYTES])

    def __iter__(self) -> Iterator[Key]:
        packed = self.packed
        return (Key(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES))

    def then(self, more: Keys) -> Keys:
        """Return these keys and those that follow them."""
        if not isinstance(more, Keys):
            raise InvalidArgument(f"more: expected Keys, got {type(more).__name__}")
        both = zip(self.others, more.others, strict=False)
        others = tuple(one + other for one, other in both)
        return Keys(self.packed + more.packed, self.parent, others)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Keys):
            return self.packed == other.packed and self.parent == other.parent
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self.packed, self.parent))

    def __repr__(self) -> str:
        return f"<{len(self)} keys>"


def space_secret(tenant_secret: bytes, space: bytes) -> bytes:
    """Return the hashing key of a space or a family of spaces, which names the blocks of these only."""
    return blake3(SPACE_DOMAIN + space, key=tenant_secret)


def chain_root(secret: bytes, salt: bytes) -> bytes:
    """Return the start of a chain. Chains with different salts have no key in common."""
    if not isinstance(salt, (bytes, bytearray, memoryview)):
        raise InvalidArgument(f"salt: expected bytes, got {type(salt).__name__}")
    return blake3(SALT_DOMAIN + salt, key=secret)


def token_keys(
    secret: bytes, token_ids: TokenIds, block_tokens: int, salt: bytes = b"", extras: bytes = b"",
    accepted: Sequence[bytes] = (),
) -> Keys:  # fmt: skip
    """Return one key per whole block of the tokens: a list, or a buffer of 32- or 64-bit integers. A buffer
    with several axes is the tokens of one prompt only if all axes but one have the size 1. `accepted` are the
    secrets of `Keys.others`."""
    with Checking("keys of tokens"):
        shape = getattr(token_ids, "shape", ())
        if len(shape) > 1 and prod(shape) != max(shape):
            text = (
                f"the shape {tuple(shape)} is not that of one prompt; make the keys of each prompt"
            )
            raise InvalidArgument(f"keys of tokens: {text}")
        packed, *others = (
            chain_keys(one, chain_root(one, salt), token_ids, block_tokens, extras)
            for one in (secret, *accepted)
        )
        return Keys(packed, b"", tuple(others))


def hash_keys(
    secret: bytes,
    hashes: Sequence[bytes],
    salt: bytes = b"",
    extras: bytes = b"",
    after: Keys | None = None,
    accepted: Sequence[bytes] = (),
    alone: bool = False,
) -> Keys:
    """Return one key per block hash of an engine, in place of tokens: after the keys `after`, or as a new
    chain; with `alone`, each as if it was the only one. `accepted` are the secrets of `Keys.others`."""
    if not (after is None or isinstance(after, Keys)):
        raise InvalidArgument(f"after: expected Keys, got {type(after).__name__}")

    parent = after[-1] if after else b""
    if after and len(after.others) != len(accepted):
        accepted = ()  # the daemon was started again meanwhile
    with Checking("keys of hashes"):
        each, others = list(hashes), list[bytes]()
        for number, one in enumerate(accepted):
            begin = after.others[number][-KEY_BYTES:] if after else chain_root(one, salt)
            others.append(chain_hashes(one, begin, each, extras, alone))
        root = parent or chain_root(secret, salt)
        return Keys(chain_hashes(secret, root, each, extras, alone), parent, tuple(others))
