"""Notes about blocks as a dict, without the size limit of the native class."""

from __future__ import annotations

from collections.abc import Iterator

KEY_BYTES = 32
NAME_BYTES = 8


class Notes:
    def __init__(self) -> None:
        self._of: dict[bytes, tuple[int, int]] = {}

    def note(self, keys: bytes, code: int, now: int, before: bytes = b"", also: int = 0) -> None:
        for name in _names(keys):
            last = self._of.get(name, (0, 0))[0]
            self._of[name] = (last | also if last and last in before else code, now)

    def codes(self, keys: bytes) -> bytes:
        return bytes(self._of.get(name, (0, 0))[0] for name in _names(keys))

    def of(self, key: bytes) -> tuple[int, int]:
        return self._of.get(key[:NAME_BYTES], (0, 0))

    def __len__(self) -> int:
        return len(self._of)


def _names(keys: bytes) -> Iterator[bytes]:
    return (keys[at : at + NAME_BYTES] for at in range(0, len(keys), KEY_BYTES))
