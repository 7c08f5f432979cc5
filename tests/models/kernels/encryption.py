"""Encrypted frames, with another library's AES-256-GCM and HKDF; `kvtier_daemon/codec/encryption.py` and
`frame.py` describe the format."""

from __future__ import annotations

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from kvtier.frame import ENTRY, HEADER
from kvtier_kernels import xxh3_128

SALT, INFO = b"kvtier frames 1", b"kvtier frame 1"
CODEC_AT, RAW_DIGEST_AT, NONCE_AT, TAG_AT, KEY_ID_AT = 6, 152, 184, 196, 216
AUTHENTICATED = ((0, 12), (16, 32), (48, 112), (144, 152), (212, 240))
ENTRIES, ENCRYPTED = 148, 0x80


def key_id(file_key: bytes) -> bytes:
    return HKDF(SHA256(), 8, SALT, b"key id").derive(file_key)


def tenant_key(file_key: bytes, tenant: str) -> bytes:
    return HKDF(SHA256(), 32, SALT, b"tenant " + tenant.encode()).derive(file_key)


def encrypt(file_key: bytes, tenant: str, header: bytearray, payload: bytes, nonce: bytes) -> bytes:
    """Return the encrypted payload, and describe it in the header."""
    codec = int.from_bytes(header[CODEC_AT : CODEC_AT + 2], "little")
    if not codec and not any(header[RAW_DIGEST_AT : RAW_DIGEST_AT + 16]):
        header[RAW_DIGEST_AT : RAW_DIGEST_AT + 16] = xxh3_128(payload)
    header[CODEC_AT] |= ENCRYPTED
    header[KEY_ID_AT : KEY_ID_AT + 8] = key_id(file_key)
    header[NONCE_AT : NONCE_AT + 12] = nonce
    fields = b"".join(header[begin:end] for begin, end in AUTHENTICATED)
    for number in range(int.from_bytes(header[ENTRIES : ENTRIES + 4], "little")):
        at = HEADER.size + number * ENTRY.size
        fields += header[at : at + 16]
    info = INFO + bytes(header[48:112]) + bytes(header[144:148])
    key = HKDFExpand(SHA256(), 32, info).derive(tenant_key(file_key, tenant))
    text = AESGCM(key).encrypt(
        nonce, payload + bytes(header[RAW_DIGEST_AT : RAW_DIGEST_AT + 16]), fields
    )
    header[RAW_DIGEST_AT : RAW_DIGEST_AT + 16] = text[len(payload) : len(payload) + 16]
    header[TAG_AT : TAG_AT + 16] = text[-16:]
    return text[: len(payload)]
