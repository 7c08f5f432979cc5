"""A cold tier is killed repeatedly at random moments: all blocks that it reported as written are on
disk and intact."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from support.cold_bench import BLOCK, SIZE, Bench, key, used
from support.daemons import running
from support.effort import effort
from support.specs import pattern

CYCLES = effort(10, 20, 500)

CHILD = """
import asyncio, sys
from pathlib import Path
from support.cold_bench import Bench, run

async def work():
    bench = Bench([Path(sys.argv[1])], codec="r32")
    await bench.recover()
    number = int(sys.argv[2])
    print("ready", flush=True)
    while True:
        failed = await bench.write(range(number, number + 16))
        assert not failed
        number += 16
        print(number, flush=True)

run(work())
"""


def test_blocks_reported_as_written_survive_any_kill(tmp_path: Path) -> None:
    chance = random.Random(11)
    number = 0
    for _cycle in range(CYCLES):
        with running(CHILD, str(tmp_path), str(number)) as (child, output):
            assert output.readline() == "ready\n"
            time.sleep(chance.random() * 0.15)
            child.kill()
            reported = [int(line) for line in output if line.strip().isdecimal()]
        before, number = number, max([number, *reported])
        assert used(tmp_path) <= SIZE
        asyncio.run(verify(tmp_path, range(before, number)))
        # Blocks that were not reported may exist; their numbers are not used again.
        number += 64


async def verify(folder: Path, announced: range) -> None:
    bench = Bench([folder])
    await bench.recover()
    room = SIZE // BLOCK // 3
    missing = set(announced[-room:]) - set(bench.on_disk)
    assert not missing, f"{len(missing)} blocks that were on disk are not: {sorted(missing)[:5]}"
    sample = random.Random(len(announced)).sample(
        sorted(bench.on_disk), min(40, len(bench.on_disk))
    )
    for number in [*sample, *announced[-40:]]:
        # The oldest may be evicted meanwhile.
        if number in bench.on_disk or number in announced[-40:]:
            assert await bench.read(number) == pattern(key(number), BLOCK)
    await bench.tier.close()
