"""A record outside of the cache of which versions of each block were saved and which were forgotten."""

from __future__ import annotations

import struct
import threading
import time
from dataclasses import dataclass
from hashlib import sha256

from kvtier.frame import PAGE

VERSION = struct.Struct("<Q")
STAMP = struct.Struct("<QI")
HIGH = bytes(byte & 0x83 | 0x3C for byte in range(256))  # sign, and few exponents


def content(key: bytes, version: int, nbytes: int) -> bytes:
    """Return the bytes of a version of a block: all pages of all blocks differ, and the first bytes are the
    version. As bf16 they are small numbers, which codecs can compress."""
    stamps = (STAMP.pack(version, at) for at in range(-(-nbytes // PAGE)))
    low = b"".join(sha256(key + stamp).digest() * (PAGE // 64) for stamp in stamps)
    words = bytearray(2 * len(low))
    words[::2], words[1::2] = low, low.translate(HIGH)
    words[: VERSION.size] = VERSION.pack(version)
    return bytes(words[:nbytes])


@dataclass(slots=True)
class Told:
    """The versions of one block: those above `dead` and up to `newest` may be served."""

    newest: int = 0
    dead: int = 0
    forgotten_at: float = 0.0
    life: int = 0  # number of the daemon's life that answered so


class Oracle:
    """One thread saves and forgets the versions of a key; all threads may read them."""

    def __init__(self) -> None:
        self._told: dict[bytes, Told] = {}
        self._lock = threading.Lock()
        self.served = 0
        self.returned: list[float] = []  # seconds from a forget's answer to the kill
        self._kills: list[float] = []

    def _of(self, key: bytes) -> Told:
        with self._lock:
            return self._told.setdefault(key, Told())

    def saving(self, key: bytes, nbytes: int) -> bytes:
        """Return the bytes of a new version, before its save begins."""
        state = self._of(key)
        state.newest += 1
        return content(key, state.newest, nbytes)

    def forgotten(self, key: bytes) -> None:
        """Record that a forget was answered."""
        state = self._of(key)
        state.dead, state.forgotten_at, state.life = (
            state.newest,
            time.monotonic(),
            len(self._kills),
        )

    def killed(self, at: float) -> None:
        """Record when a daemon was killed, after all its answers were recorded."""
        self._kills.append(at)

    def newest(self, key: bytes) -> int:
        """Return the version that was saved last, or 0."""
        return self._of(key).newest

    def dead(self, key: bytes) -> int:
        """Return the state before a load, which `judge` needs after it."""
        return self._of(key).dead

    def judge(self, key: bytes, block: bytes, dead: int) -> None:
        """Raise AssertionError if a cache may not serve this block. Records a forgotten block that came back
        after a kill."""
        state = self._of(key)
        (version,) = VERSION.unpack_from(block)
        assert block == content(key, version, len(block)), f"wrong bytes for {key.hex()[:8]}"
        assert version <= state.newest, f"version {version} of {key.hex()[:8]} was never saved"
        assert version > dead or state.life < len(self._kills), f"{key.hex()[:8]} was forgotten"
        with self._lock:
            self.served += 1
            if version <= dead:  # a forget since the read began is no return
                self.returned.append(self._kills[state.life] - state.forgotten_at)
                state.dead = version - 1
