"""Encrypted frames: the keys, and how a frame is encrypted and decrypted.

     key of the file   32 bytes, made by the operator
     root              HKDF-Extract(salt "kvtier frames 1", key of the file)
     key id            the first 8 bytes of HKDF-Expand(root, "key id")
     tenant's key      HKDF-Expand(root, "tenant " and the tenant's name)
     block's key       HKDF-Expand(tenant's key, "kvtier frame 1" and the block's identity)

HKDF is that of RFC 5869 with SHA-256. The kernels derive the key of a block, and encrypt with AES-256-GCM and
a random nonce. A frame is only decrypted as the block that was asked for: with another identity the key
differs. `frame.py` lists what the tag covers.
"""

from __future__ import annotations

import errno
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from secrets import token_bytes
from typing import TYPE_CHECKING

from kvtier.errors import FrameError
from kvtier.frame import KEY_ID_BYTES, NONCE_BYTES, Identity
from kvtier_kernels import FrameKeys

if TYPE_CHECKING:
    from typing_extensions import Buffer

SALT = b"kvtier frames 1"


class UnknownKeyError(FrameError):
    """The frame was encrypted with a key that the daemon does not have."""


def extract(salt: bytes, key: bytes) -> bytes:
    return hmac.digest(salt, key, "sha256")


def expand(root: bytes, info: bytes) -> bytes:
    """Return the first 32 bytes of HKDF-Expand."""
    return hmac.digest(root, info + b"\x01", "sha256")


def key_id(file_key: bytes) -> bytes:
    """Return the name of a key in frames. It does not reveal the key."""
    return expand(extract(SALT, file_key), b"key id")[:KEY_ID_BYTES]


def tenant_key(file_key: bytes, tenant: str) -> bytes:
    return expand(extract(SALT, file_key), b"tenant " + tenant.encode())


@dataclass(frozen=True, slots=True)
class FrameCipher:
    """Encrypts and decrypts the frames of one tenant. `encrypts`: new frames are encrypted."""

    keys: FrameKeys
    encrypts: bool = True
    random: Callable[[int], bytes] = token_bytes

    @classmethod
    def of(cls, file_keys: Sequence[bytes], tenant: str, encrypts: bool = True) -> FrameCipher:
        """Encrypt with the first key, decrypt with all. Raises RuntimeError if there is no libcrypto."""
        keys = [(key_id(one), tenant_key(one, tenant)) for one in file_keys]
        return cls(FrameKeys(keys), encrypts)

    def encrypt(self, header: bytearray, payload: Buffer, into: Buffer) -> None:
        """Encrypt a payload to `into`, which may be the payload, and describe that in its unsealed header,
        which must be stamped. Changes the header's codec."""
        self.keys.encrypt(header, payload, into, self.random(NONCE_BYTES))

    def decrypt(self, header: Buffer, payload: Buffer, name: Identity, into: Buffer) -> bytes:
        """Decrypt the payload of this block's frame to `into`; return the block's digest. Raises FrameError
        if the frame is damaged or another block's, and UnknownKeyError; `into` is then undefined."""
        code, digest = self.keys.decrypt(header, payload, name.encode(), into)
        if code == errno.ENOKEY:
            raise UnknownKeyError("the frame was encrypted with a key that is not in the key file")
        if code:
            raise FrameError("the encrypted frame is damaged, or of another block")
        return digest
