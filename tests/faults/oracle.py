"""What a cache may say, kept outside of it: which versions of each block were saved, and which forgotten."""

from __future__ import annotations

import struct
import threading
import time
from dataclasses import dataclass
from hashlib import sha256

from kvtier.codec.frame import PAGE

VERSION = struct.Struct("<Q")
STAMP = struct.Struct("<QI")
HIGH = bytes(byte & 0x83 | 0x3C for byte in range(256))  # sign, and one of a few exponents


def content(key: bytes, version: int, nbytes: int) -> bytes:
    """What a version of a block holds: no page is like another of any block, the first bytes say which
    version it is. As bf16 they are small numbers, which codecs make less of."""
    stamps = (STAMP.pack(version, at) for at in range(-(-nbytes // PAGE)))
    low = b"".join(sha256(key + stamp).digest() * (PAGE // 64) for stamp in stamps)
    words = bytearray(2 * len(low))
    words[::2], words[1::2] = low, low.translate(HIGH)
    words[: VERSION.size] = VERSION.pack(version)
    return bytes(words[:nbytes])


@dataclass(slots=True)
class Told:
    """Of one block: versions above `dead` and up to `newest` may be served."""

    newest: int = 0
    dead: int = 0
    forgotten_at: float = 0.0
    life: int = 0  # of the daemon that said so


class Oracle:
    """Versions of a key are begun and forgotten by one thread, and may be read by all."""

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
        """The bytes of a new version, whose save is about to begin."""
        told = self._of(key)
        told.newest += 1
        return content(key, told.newest, nbytes)

    def forgotten(self, key: bytes) -> None:
        """A forget was answered."""
        told = self._of(key)
        told.dead, told.forgotten_at, told.life = told.newest, time.monotonic(), len(self._kills)

    def killed(self, at: float) -> None:
        """A daemon was killed then, and all that it has answered was noted."""
        self._kills.append(at)

    def dead(self, key: bytes) -> int:
        """To be asked before a load, and given to `judge` after it."""
        return self._of(key).dead

    def judge(self, key: bytes, block: bytes, dead: int) -> None:
        """Raises AssertionError if a cache may not serve this block. A forgotten one that a kill has brought
        back is noted."""
        told = self._of(key)
        (version,) = VERSION.unpack_from(block)
        assert block == content(key, version, len(block)), f"wrong bytes for {key.hex()[:8]}"
        assert version <= told.newest, f"version {version} of {key.hex()[:8]} was never saved"
        assert version > dead or told.life < len(self._kills), f"{key.hex()[:8]} was forgotten"
        with self._lock:
            self.served += 1
            if version <= told.dead:
                self.returned.append(self._kills[told.life] - told.forgotten_at)
                told.dead = version - 1
