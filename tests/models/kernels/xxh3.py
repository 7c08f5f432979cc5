"""XXH3 with 128 bits as defined, in Python integers."""

import struct
from functools import lru_cache

MASK = (1 << 64) - 1
LOW = (1 << 32) - 1
P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
P64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
MIX_FIRST, MIX_SECOND = 0x165667919E3779F9, 0x9FB21C651E98DF25
STRIPE, STRIPES_PER_RUN = 64, 16
SHORT_MOST = 240
SECRET_LEAST = 136
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def read32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def read64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def swapped(value: int, size: int) -> int:
    return int.from_bytes(value.to_bytes(size, "little"), "big")


def folded(a: int, b: int) -> int:
    product = a * b
    return (product ^ product >> 64) & MASK


def avalanche(h: int) -> int:
    h = (h ^ h >> 37) * MIX_FIRST & MASK
    return h ^ h >> 32


def avalanche64(h: int) -> int:
    h = (h ^ h >> 33) * P64[1] & MASK
    h = (h ^ h >> 29) * P64[2] & MASK
    return h ^ h >> 32


def up_to_3(data: bytes, seed: int) -> tuple[int, int]:
    size = len(data)
    low = data[0] << 16 | data[size >> 1] << 24 | data[-1] | size << 8
    turned = swapped(low, 4)
    high = (turned << 13 | turned >> 19) & LOW
    flip_low = (read32(SECRET, 0) ^ read32(SECRET, 4)) + seed & MASK
    flip_high = (read32(SECRET, 8) ^ read32(SECRET, 12)) - seed & MASK
    return avalanche64(low ^ flip_low), avalanche64(high ^ flip_high)


def up_to_8(data: bytes, seed: int) -> tuple[int, int]:
    seed ^= swapped(seed & LOW, 4) << 32
    both = read32(data, 0) + (read32(data, len(data) - 4) << 32)
    flip = (read64(SECRET, 16) ^ read64(SECRET, 24)) + seed & MASK
    product = (both ^ flip) * (P64[0] + (len(data) << 2))
    low, high = product & MASK, product >> 64
    high = high + (low << 1) & MASK
    low ^= high >> 3
    low = (low ^ low >> 35) * MIX_SECOND & MASK
    return low ^ low >> 28, avalanche(high)


def up_to_16(data: bytes, seed: int) -> tuple[int, int]:
    flip_low = (read64(SECRET, 32) ^ read64(SECRET, 40)) - seed & MASK
    flip_high = (read64(SECRET, 48) ^ read64(SECRET, 56)) + seed & MASK
    first, last = read64(data, 0), read64(data, len(data) - 8)
    product = (first ^ last ^ flip_low) * P64[0]
    low = (product & MASK) + (len(data) - 1 << 54) & MASK
    last ^= flip_high
    high = (product >> 64) + last + (last & LOW) * (P32[1] - 1) & MASK
    product = (low ^ swapped(high, 8)) * P64[1]
    return avalanche(product & MASK), avalanche((product >> 64) + high * P64[1] & MASK)


def up_to_240(data: bytes, seed: int) -> tuple[int, int]:
    size = len(data)
    low, high = size * P64[0] & MASK, 0

    def mix16(at: int, secret: int, seed: int) -> int:
        return folded(
            read64(data, at) ^ (read64(SECRET, secret) + seed & MASK),
            read64(data, at + 8) ^ (read64(SECRET, secret + 8) - seed & MASK),
        )

    def mix32(first: int, second: int, secret: int, seed: int) -> None:
        nonlocal low, high
        low = low + mix16(first, secret, seed) & MASK
        low ^= read64(data, second) + read64(data, second + 8) & MASK
        high = high + mix16(second, secret + 16, seed) & MASK
        high ^= read64(data, first) + read64(data, first + 8) & MASK

    if size <= 128:
        for i in reversed(range((size - 1) // 32 + 1)):
            mix32(16 * i, size - 16 * (i + 1), 32 * i, seed)
    else:
        for at in range(0, 128, 32):
            mix32(at, at + 16, at, seed)
        low, high = avalanche(low), avalanche(high)
        for at in range(128, size - 31, 32):
            mix32(at, at + 16, 3 + at - 128, seed)
        mix32(size - 16, size - 32, SECRET_LEAST - 17 - 16, -seed & MASK)
    end = low * P64[0] + high * P64[3] + (size - seed) * P64[1] & MASK
    return avalanche(low + high & MASK), -avalanche(end) & MASK


def taken_in(lanes: list[int], stripe: bytes, secret: bytes) -> list[int]:
    values = struct.unpack("<8Q", stripe)
    keyed = [value ^ key for value, key in zip(values, struct.unpack("<8Q", secret), strict=True)]
    return [lanes[i] + values[i ^ 1] + (keyed[i] & LOW) * (keyed[i] >> 32) & MASK for i in range(8)]


def scrambled(lanes: list[int], secret: bytes) -> list[int]:
    keys = struct.unpack("<8Q", secret[-STRIPE:])
    return [(v ^ v >> 47 ^ key) * P32[0] & MASK for v, key in zip(lanes, keys, strict=True)]


def merged(lanes: list[int], secret: bytes, at: int, start: int) -> int:
    keys = struct.unpack("<8Q", secret[at : at + STRIPE])
    pairs = (folded(lanes[i] ^ keys[i], lanes[i + 1] ^ keys[i + 1]) for i in range(0, 8, 2))
    return avalanche(sum(pairs, start) & MASK)


@lru_cache(64)
def longer(data: bytes, seed: int) -> tuple[int, int]:
    secret = b"".join(
        struct.pack("<QQ", low + seed & MASK, high - seed & MASK)
        for low, high in struct.iter_unpack("<QQ", SECRET)
    )
    lanes = [P32[2], P64[0], P64[1], P64[2], P64[3], P32[1], P64[4], P32[0]]
    # The very last stripe is consumed at the end, so a scramble needs a byte beyond its run.
    for i in range((len(data) - 1) // STRIPE):
        position = i % STRIPES_PER_RUN
        stripe = data[STRIPE * i : STRIPE * (i + 1)]
        lanes = taken_in(lanes, stripe, secret[8 * position : 8 * position + STRIPE])
        if position == STRIPES_PER_RUN - 1:
            lanes = scrambled(lanes, secret)
    lanes = taken_in(lanes, data[-STRIPE:], secret[-STRIPE - 7 : -7])
    low = merged(lanes, secret, 11, len(data) * P64[0] & MASK)
    high = merged(lanes, secret, len(secret) - STRIPE - 11, ~(len(data) * P64[1]) & MASK)
    return low, high


def xxh3_128(data: bytes, seed: int = 0) -> bytes:
    """Returns the digest of 16 bytes in canonical (big-endian) order."""
    size = len(data)
    if size == 0:
        low = avalanche64(seed ^ read64(SECRET, 64) ^ read64(SECRET, 72))
        high = avalanche64(seed ^ read64(SECRET, 80) ^ read64(SECRET, 88))
    elif size <= 3:
        low, high = up_to_3(data, seed)
    elif size <= 8:
        low, high = up_to_8(data, seed)
    elif size <= 16:
        low, high = up_to_16(data, seed)
    elif size <= SHORT_MOST:
        low, high = up_to_240(data, seed)
    else:
        low, high = longer(data, seed)
    return struct.pack(">QQ", high, low)
