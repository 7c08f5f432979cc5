"""The keys of blocks: each key hashes its parent's key and its own content."""

from collections.abc import Iterable, Sequence

from models.kernels.blake3 import blake3

TOKENS_TAG = 0


def chain(secret: bytes, parent: bytes, contents: Iterable[bytes], extras: bytes) -> bytes:
    keys = []
    for content in contents:
        parent = blake3(parent + content + extras, secret)
        keys.append(parent)
    return b"".join(keys)


def chain_keys(
    secret: bytes, parent: bytes, tokens: Sequence[int], block_tokens: int, extras: bytes = b""
) -> bytes:
    """The keys of the whole blocks among the tokens."""
    ends = range(block_tokens, len(tokens) + 1, block_tokens)
    packed = (
        b"".join(token.to_bytes(4, "little") for token in tokens[end - block_tokens : end])
        for end in ends
    )
    return chain(secret, parent, (bytes([TOKENS_TAG]) + block for block in packed), extras)


def chain_hashes(
    secret: bytes, parent: bytes, hashes: Sequence[bytes], extras: bytes = b""
) -> bytes:
    """Keys from an engine's own hashes; the tag is the length of a hash."""
    return chain(secret, parent, (bytes([len(own)]) + own for own in hashes), extras)
