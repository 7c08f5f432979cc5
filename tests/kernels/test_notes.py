"""Notes about removed blocks: like a dict, in memory of a fixed size."""

from __future__ import annotations

import random
from hashlib import sha256
from pathlib import Path

import pytest

from kvtier_kernels import Notes
from models.kernels import Notes as Twin


def key(number: int) -> bytes:
    return sha256(str(number).encode()).digest()


def test_notes_equal_those_of_the_model() -> None:
    dice, notes, twin = random.Random(1), Notes(1 << 20), Twin()
    for now in range(300):
        keys = b"".join(key(dice.randrange(500)) for _ in range(dice.randrange(40)))
        code, before = dice.randrange(1, 8), bytes(dice.sample(range(256), 20)) + b"\x01\x82"
        also = dice.choice([0, 0x80])
        for one in (notes, twin):
            one.note(keys, code, now, before, also)
        assert len(notes) == len(twin)
    everything = b"".join(map(key, range(500)))
    assert notes.codes(everything) == twin.codes(everything)
    assert [notes.of(key(at)) for at in range(600)] == [twin.of(key(at)) for at in range(600)]
    assert twin.of(key(599)) == (0, 0)


def test_the_newest_notes_stay_when_the_memory_is_full() -> None:
    notes = Notes(64 << 10)
    before = notes.memory_bytes()
    for now in range(16):
        notes.note(b"".join(key(now * 1024 + at) for at in range(1024)), 1 + now, now)
    assert len(notes) <= 4096 == notes.memory_bytes() // 16
    assert notes.memory_bytes() == before
    kept = [len(notes.codes(b"".join(key(now * 1024 + at) for at in range(1024))).replace(b"\0", b""))
            for now in range(16)]  # fmt: skip
    assert kept[15] > 900 > kept[12] > 200 > kept[9]
    assert sum(kept) == len(notes)


def test_notes_occupy_memory_once_they_are_made() -> None:
    def resident() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024

    before = resident()
    notes = Notes(64 << 20)
    assert resident() - before < 8 << 20
    notes.note(b"".join(map(key, range(20_000))), 1, 0)
    assert resident() - before > 32 << 20
    assert notes.memory_bytes() == 64 << 20


def test_invalid_arguments_are_refused() -> None:
    notes = Notes(0)
    for wrong in (lambda: notes.note(b"short", 1, 0), lambda: notes.note(key(1), 0, 0),
                  lambda: notes.codes(b"x" * 33), lambda: notes.of(b"")):  # fmt: skip
        with pytest.raises(ValueError):
            wrong()
    notes.note(key(1), 3, 9)
    assert notes.of(key(1)) == (3, 9)
