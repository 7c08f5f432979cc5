"""What the models of policies share: batches as lists."""

from array import array
from collections.abc import Sequence

from kvtier.policy.base import ID_BYTES


def unpack(ids: bytes) -> list[int]:
    """The ids of a batch. Raises ValueError where it isn't a whole number of them."""
    if len(ids) % ID_BYTES:
        raise ValueError("ids are 4 bytes each")
    return array("I", ids).tolist()


def pack(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()
