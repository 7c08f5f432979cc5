"""Every byte of an index and of a segment's description, flipped or forged: blocks may be lost, and neither a
tier, nor a forget, nor what a prefix needs."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from daemon.test_cold import SPACE, SPEC, files_of, key, run
from daemon.test_forget import Tenant
from kvtier.errors import FrameError
from kvtier_daemon.tiers.recovery import Recovered, recover
from kvtier_daemon.tiers.segment import LIMIT_SEQUENCE, Head, encode_footer
from kvtier_daemon.tiers.use import KEY, TABLE

LONG = bool(os.environ.get("KVTIER_FAULTS"))
FORGERIES = 200 if LONG else 8
FLIPS = None if LONG else 40
SAVED, FORGOTTEN = 10, (3, 5)


async def left_behind(folder: Path) -> None:
    """A sealed segment with ten blocks, two of them forgotten, and an index that describes their space."""
    tenant = Tenant(folder)
    await tenant.start()
    await tenant.sealed(SAVED)
    assert await tenant.forget(*FORGOTTEN) == ""
    volume = tenant.bench.tier._volumes[0]
    for number in range(64):
        volume.index.put(TABLE, KEY.pack(number, 0), bytes(4 * number))
    await tenant.bench.tier._flushed(volume, tenant.bench.tier.drives[0])
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
        assert tier.is_on and tier.takes and not tier.given_up, tier.failure
        plan = tenant.catalog.cold.plan_promotion(tenant.space, b"".join(map(key, known[:1])), 100)
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

    async def work() -> None:
        await left_behind(good)
        for _ in range(FORGERIES):
            cold = tmp_path / "forged"
            shutil.copytree(good, cold)
            (path,) = (path for path in files_of(cold) if path.name == "000000")
            one = recover(path, None, {})
            assert one.head is not None and one.sealed
            forge(path, one, chance)  # type: ignore[operator]
            await still_works(cold)
            shutil.rmtree(cold)

    run(work())


# Flips one byte after another of the index in a folder, from one place on; prints what became of each.
FLIPPED = """
import os, sys
from pathlib import Path
from kvtier.errors import TierError
from kvtier_daemon.index import Index
folder, places = Path(sys.argv[1]), [int(at) for at in sys.argv[2:]]
data = folder / "data.mdb"
good = data.read_bytes()
with Index(folder, 64 << 20) as index:
    known = {table: set(index.entries(table)) for table in (b"spaces", b"segments")}
assert all(known.values()), known
os.close(2)
for at in places:
    data.write_bytes(good[:at] + bytes([good[at] ^ 255]) + good[at + 1 :])
    (folder / "lock.mdb").unlink(missing_ok=True)
    print(at, end=" ", flush=True)
    try:
        with Index(folder, 64 << 20) as index:
            found = {table: set(index.entries(table)) for table in known}
            index.flush(1)
        print(all(found[table] <= known[table] for table in known), flush=True)
    except TierError as error:
        print(error, flush=True)
data.write_bytes(good)
"""


def test_no_byte_of_the_index_gives_a_wrong_record_or_ends_the_tier(tmp_path: Path) -> None:
    run(left_behind(tmp_path))
    index = tmp_path / "index"
    size = (index / "data.mdb").stat().st_size
    every = range(size)
    known = [
        10,
        16,
        20,
        23,
        40,
        4116,
    ]  # of LMDB's first pages: its magic, its format, the map's size
    places = every if FLIPS is None else known + random.Random(3).sample(every, FLIPS)
    for first in range(0, len(places), 5000):
        some = [str(at) for at in places[first : first + 5000]]
        command = [sys.executable, "-c", FLIPPED, str(index), *some]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        lines = done.stdout.splitlines()
        bad = [line for line in lines if not line.endswith(" True")]
        assert not bad and len(lines) == len(some), (bad, done.returncode, lines[-1:])


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
    for place in every if FLIPS is None else random.Random(4).sample(every, FLIPS):
        wrong = bytes([good[at + place] ^ 1 << place % 8])
        path.write_bytes(good[: at + place] + wrong + good[at + place + 1 :])
        found = recover(path, None, {SPACE: SPEC})
        assert found.spaces == [(SPACE, SPEC)] and found.rows == rows


def test_a_head_with_a_sequence_that_leaves_no_room_is_refused() -> None:
    head = Head(0, 1 << 20, 7, LIMIT_SEQUENCE, b"o" * 32)
    assert Head.decode(head.encode()) == head
    with pytest.raises(FrameError, match="a sequence of"):
        Head.decode(replace(head, sequence=LIMIT_SEQUENCE + 1).encode())
