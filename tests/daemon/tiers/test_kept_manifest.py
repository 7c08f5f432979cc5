"""The manifest of the kept arena: damage, kills while it is written, and foreign descriptors."""

from __future__ import annotations

import fcntl
import os
import random
from pathlib import Path

import pytest

from kvtier_daemon.tiers.kept_arena import (
    HALF_BYTES,
    HEAD,
    MANIFEST,
    SEALS,
    ExtentFiles,
    KeptArena,
    KeptSession,
    head_of,
)
from support.effort import ALL
from support.kept import Held, held

__all__ = ["held"]  # a fixture

MIB = 1 << 20
OWNERS = {"t": b"owner"}
ONE = KeptSession("t", b"token", 17, 1, 2)


def sealed(nbytes: int) -> int:
    fd = os.memfd_create("part", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def kill(arena: KeptArena) -> None:
    """The kernel closes a killed daemon's descriptors."""
    arena.close()


def filled(held: Held) -> KeptArena:
    """The arena of a daemon that has one extent, and of which a session writes."""
    arena = KeptArena(held, OWNERS, False)
    arena.settle()
    files = [sealed(MIB), sealed(2048), sealed(32768)]
    arena.keep("t", ExtentFiles(MIB, *files))
    for fd in files:
        os.close(fd)
    arena.session_began(4, ONE)
    return arena


def next_daemon(held: Held) -> tuple[int, dict[int, KeptSession]]:
    """The number of extents and the sessions that the next daemon finds. Changes no manifest for good."""
    fd = held.fds[MANIFEST]
    size = {half: os.pread(fd, 4096, half) for half in (0, HALF_BYTES)}
    arena = KeptArena(held, OWNERS, False)
    taken = arena.take("t", MIB)
    for files in taken:
        for one in files[1:]:
            os.close(one)
    for one in arena._fds.values():
        os.close(one)
    sessions = arena.earlier_sessions
    kill(arena)
    for half, raw in size.items():
        os.pwrite(fd, raw, half)
    return len(taken), sessions


def test_any_byte_of_a_manifest_that_changed_makes_it_unusable_or_changes_nothing(
    held: Held,
) -> None:
    """Never does the next daemon find an older manifest, which lacks the session that writes."""
    kill(filled(held))
    assert next_daemon(held) == (1, {4: ONE})
    fd = held.fds[MANIFEST]
    places = []
    for half in (0, HALF_BYTES):
        _, nbytes, _, _ = HEAD.unpack(os.pread(fd, HEAD.size, half))
        places += range(half, half + HEAD.size + nbytes)
    chance = random.Random(1)
    found = set()
    for at in places if ALL else chance.sample(places, 200):
        (byte,) = os.pread(fd, 1, at)
        for flip in range(8) if ALL else (chance.randrange(8),):
            os.pwrite(fd, bytes([byte ^ (1 << flip)]), at)
            extents, sessions = next_daemon(held)
            assert (extents, sessions) in ((0, {}), (1, {4: ONE})), f"byte {at}, bit {flip}"
            found.add(extents)
        os.pwrite(fd, bytes([byte]), at)
    assert found == {0, 1}


def test_a_kill_while_a_manifest_is_written_leaves_the_one_before(held: Held) -> None:
    arena = filled(held)
    fd = held.fds[MANIFEST]
    before = os.pread(fd, 4096, 0), os.pread(fd, 4096, HALF_BYTES)
    arena.session_began(5, ONE)
    after = os.pread(fd, 4096, 0), os.pread(fd, 4096, HALF_BYTES)
    kill(arena)
    half = 0 if before[0] != after[0] else 1
    size = HEAD.size + HEAD.unpack_from(after[half])[1]
    # The text is written first, then the head.
    order = [*range(HEAD.size, size)]
    for written in range(0, len(order), 7):
        image = bytearray(before[half])
        for at in order[:written]:
            image[at] = after[half][at]
        os.pwrite(fd, bytes(image), half * HALF_BYTES)
        assert next_daemon(held) == (1, {4: ONE})
    os.pwrite(fd, after[half], half * HALF_BYTES)
    assert next_daemon(held) == (1, {4: ONE, 5: ONE})


@pytest.mark.parametrize(
    "foreign",
    [
        "unsealed",
        "small",
        "missing",
        "not memory",
        "a file",
        "another format",
        "no manifest",
        "a manifest that is not memory",
    ],
)
def test_foreign_descriptors_are_not_used_and_leave_the_store(
    held: Held, foreign: str, tmp_path: Path
) -> None:
    kill(filled(held))
    data = next(name for name in held.fds if name.endswith("-data"))
    if foreign == "another format":
        text = b"\x81\xa6format\x63"
        for half, sequence in ((0, 1001), (HALF_BYTES, 1000)):
            os.pwrite(held.fds[MANIFEST], head_of(sequence, text) + text, half)
    elif "manifest" in foreign:
        held.remove(MANIFEST)
        if foreign != "no manifest":
            held.fds[MANIFEST] = os.open(tmp_path, os.O_RDONLY)
    else:
        held.remove(data)
    if foreign == "unsealed":
        held.fds[data] = os.memfd_create("other")
        os.ftruncate(held.fds[data], MIB)
    elif foreign == "small":
        held.fds[data] = sealed(MIB // 2)
    elif foreign == "a file":
        held.fds[data] = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        os.ftruncate(held.fds[data], MIB)
    elif foreign == "not memory":
        held.fds[data], other = os.pipe()
        os.close(other)
    held.fds["kvtier-unknown"] = sealed(4096)
    arena = KeptArena(held, OWNERS, False)
    assert arena.take("t", MIB) == []
    arena.settle()
    assert set(held.fds) == {MANIFEST}
    kill(arena)
    assert next_daemon(held)[0] == 0
