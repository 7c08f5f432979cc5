"""Every byte of an index and of a segment's description, flipped or forged: blocks may be lost, and neither a
tier, nor a forget, nor what a prefix needs."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from daemon.tiers.test_cold import SPACE, SPEC, files_of, key, run
from daemon.tiers.test_forget import Tenant
from kvtier.errors import FrameError
from kvtier_daemon.tiers.cold.access_log import KEY, TABLE
from kvtier_daemon.tiers.cold.recovery import Recovered, recover
from kvtier_daemon.tiers.cold.segment import LIMIT_SEQUENCE, Head, encode_footer

LONG = bool(os.environ.get("KVTIER_FAULTS"))
FORGERIES = 200 if LONG else 8
FLIPS = 40
SAVED, FORGOTTEN = 10, (3, 5)


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system whose flushes cost nothing, where there is one: each flip has several."""
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


async def left_behind(folder: Path) -> None:
    """A sealed segment with ten blocks, two of them forgotten, and an index that describes their space."""
    tenant = Tenant(folder)
    await tenant.start()
    await tenant.sealed(SAVED)
    assert await tenant.forget(*FORGOTTEN) == ""
    volume = tenant.bench.first.directory
    for number in range(64):
        volume.index.put(TABLE, KEY.pack(number, 0), bytes(4 * number))
    await tenant.bench.first.descriptions.flush()
    await tenant.kill()


def forged_rows(path: Path, one: Recovered, chance: random.Random) -> None:
    assert one.head is not None
    rows = bytearray(one.table)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(rows) // 128) * 128 + chance.randrange(64, 128)
        rows[at] = chance.randrange(256)
    at, text = encode_footer(one.head, one.spaces, bytes(rows), one.end)
    write_over(path, at, text)


def forged_space(path: Path, one: Recovered, chance: random.Random) -> None:
    """Text that is not UTF-8, and a description that means nothing."""
    assert one.head is not None
    good = msgspec.msgpack.encode(SPEC)
    dtype = SPEC.dtype.encode()
    bad = chance.choice([good.replace(dtype, b"\xff" * len(dtype)), b"\xc1" * len(good)])
    at, text = encode_footer(one.head, [(SPACE, msgspec.Raw(bad))], one.table, one.end)  # type: ignore[list-item]
    write_over(path, at, text)


def forged_head(path: Path, one: Recovered, chance: random.Random) -> None:
    assert one.head is not None
    high = (1 << 64) - chance.randrange(1, 4)
    sequence = chance.choice([high, LIMIT_SEQUENCE, LIMIT_SEQUENCE + 1])
    write_over(path, 0, replace(one.head, sequence=sequence).encode())


def write_over(path: Path, at: int, text: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(text)


async def still_works(folder: Path) -> None:
    """A start serves what is sound, has forgotten what it had, and takes new blocks."""
    tenant = Tenant(folder)
    tier = tenant.bench.tier
    try:
        await tenant.start()
        known = [number for number in range(SAVED) if tenant.knows(number)]
        assert not set(known) & set(FORGOTTEN)
        tenant.save(100)
        await tenant.on_disk(1)
        assert tier.reader.is_on and tier.writer.is_on and not tier.directories.given_up, (
            tier.failure
        )
        plan = tenant.catalog.promotions.plan(tenant.space, b"".join(map(key, known[:1])), 100)
        assert len(plan.ids) <= 4
        for number in known:
            found = tenant.catalog.match(tenant.space, key(number), False, True)
            assert found.ready + found.coming <= 1
        assert tenant.running is not None
        tenant.running.cancel()
        await asyncio.gather(tenant.running, return_exceptions=True)
    finally:
        await tier.close()


@pytest.mark.parametrize("forge", [forged_rows, forged_space, forged_head])
def test_a_forged_segment_costs_blocks_and_no_tier(tmp_path: Path, forge: object) -> None:
    good = tmp_path / "good"
    good.mkdir()
    chance = random.Random(7)

    run(left_behind(good))
    for _ in range(FORGERIES):
        cold = tmp_path / "forged"
        shutil.copytree(good, cold)
        (path,) = (path for path in files_of(cold) if path.name == "000000")
        one = recover(path, None, {})
        assert one.head is not None and one.sealed
        forge(path, one, chance)  # type: ignore[operator]
        run(still_works(cold))
        shutil.rmtree(cold)


# Reads a list of places from each line, flips these bytes of the index in a folder, opens it and writes to
# it. Prints what the index had: the same records as before the flip, fewer of them, or others.
FLIPPED = """
import json, os, select, sys
from pathlib import Path
from kvtier.errors import TierError
from contextlib import closing
from kvtier_daemon.tiers.cold.index import Index
folder = Path(sys.argv[1])
data = folder / "data.mdb"
good = data.read_bytes()
tables = (b"spaces", b"segments")
with closing(Index(folder, 64 << 20)) as index:
    known = {table: set(index.entries(table)) for table in tables}
assert all(known.values()), known
os.close(2)
for line in sys.stdin:
    flipped = bytearray(good)
    for at in json.loads(line):
        flipped[at] ^= 255
    data.write_bytes(flipped)
    (folder / "lock.mdb").unlink(missing_ok=True)
    try:
        with closing(Index(folder, 64 << 20)) as index:
            found = {table: set(index.entries(table)) for table in tables}
            index.put(b"segments", b"new", b"record")
            index.flush(1)
            select.select([index.event_fd], [], [])
            failure = [why for _, why in index.done()]
            later = {table: set(index.entries(table)) for table in tables}
        found[b"segments"].add((b"new", b"record"))
        wrong = any(one[t] - known[t] - {(b"new", b"record")} for one in (found, later) for t in tables)
        # A record may fail its digest only after the write, where that gave its page away.
        fewer = found != later or any(known[t] - found[t] for t in tables)
        print("OTHERS" if wrong else failure[0] or ("fewer" if fewer else "same"), flush=True)
    except TierError as error:
        print(error, flush=True)
data.write_bytes(good)
"""


def flipped(index: Path, flips: Sequence[Sequence[int]]) -> list[str]:
    """What became of the index with each of these sets of bytes flipped."""
    outcomes: list[str] = []
    for first in range(0, len(flips), 5000):  # so that the end of a process is noticed soon
        some = flips[first : first + 5000]
        done = subprocess.run(
            [sys.executable, "-c", FLIPPED, str(index)],
            input="".join(f"{list(places)}\n" for places in some),
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        found = done.stdout.splitlines()
        outcomes += found
        bad = [one for one in zip(some, found, strict=False) if one[1] not in ("same", "fewer")]
        assert not bad and len(found) == len(some), (bad, done.returncode, some[len(found)][:1])
    return outcomes


def test_no_byte_of_the_index_gives_a_wrong_record_or_ends_the_tier(in_memory: Path) -> None:
    """With KVTIER_FAULTS=1 every byte is flipped. 64 bytes are flipped together first: where that changes
    nothing, nothing reads them, and one of them alone stands for all. All others are flipped one by one."""
    run(left_behind(in_memory))
    index = in_memory / "index"
    data = (index / "data.mdb").read_bytes()
    every = range(len(data))
    if not LONG:
        known = [10, 16, 20, 23, 40, 4116]  # of LMDB's first pages: magic, format, the map's size
        flipped(index, [[at] for at in known + random.Random(3).sample(every, FLIPS)])
        return
    groups = [list(every[at : at + 64]) for at in range(0, len(every), 64)]
    outcomes = flipped(index, groups)
    read = [group for group, outcome in zip(groups, outcomes, strict=True) if outcome != "same"]
    unread = [group for group, outcome in zip(groups, outcomes, strict=True) if outcome == "same"]
    chance = random.Random(3)
    alone = flipped(index, [[chance.choice(group)] for group in unread])
    assert set(alone) == {"same"} and read
    flipped(index, [[at] for group in read for at in group])


def test_no_byte_of_a_table_of_spaces_gives_another_space(tmp_path: Path) -> None:
    """Those in a segment's footer."""
    run(left_behind(tmp_path))
    (path,) = (path for path in files_of(tmp_path) if path.name == "000000")
    one = recover(path, None, {})
    assert one.head is not None
    at, text = encode_footer(one.head, one.spaces, one.table, one.end)
    spaces = len(text) - 4096 - len(one.table) % 4096
    every = range(min(spaces, 4096))
    good, rows = path.read_bytes(), one.rows
    for place in every if LONG else random.Random(4).sample(every, FLIPS):
        wrong = bytes([good[at + place] ^ 1 << place % 8])
        path.write_bytes(good[: at + place] + wrong + good[at + place + 1 :])
        found = recover(path, None, {SPACE: SPEC})
        assert found.spaces == [(SPACE, SPEC)] and found.rows == rows


def test_a_head_with_a_sequence_that_leaves_no_room_is_refused() -> None:
    head = Head(0, 1 << 20, 7, LIMIT_SEQUENCE, b"o" * 32)
    assert Head.decode(head.encode()) == head
    with pytest.raises(FrameError, match="sequence is"):
        Head.decode(replace(head, sequence=LIMIT_SEQUENCE + 1).encode())
