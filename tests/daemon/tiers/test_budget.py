"""Limits of disk writes: bytes per day, and the part of them that second chances may take."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.tier_tests import BLOCK_BYTES, PART_BYTES, Identity, ServedTenant, name
from daemon.tiers.test_mover import SLOTS, keys
from daemon.tiers.test_tier_cold import CONFIG, SEGMENT, ColdTierTests
from e2e.test_cold_tier import settled
from kvtier.frame import PAGE
from kvtier_daemon.catalog import Catalog, SessionId
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.tiers.cold.lifecycle import ColdLifecycle
from kvtier_daemon.tiers.cold.mover import Mover
from kvtier_daemon.tiers.cold.write_budget import DAY_S, WriteBudget
from kvtier_kernels import Store
from support.cold_bench import BLOCK, SPACE, SPEC, Bench, run
from support.daemons import Daemon
from support.specs import pattern, spec_of

ME = SessionId(1)
HOUR_S = DAY_S / 24


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_spending_the_whole_budget_for_a_day_writes_one_days_share() -> None:
    clock, chance = Clock(), random.Random(8)
    daily = 24_000_000
    budget = WriteBudget(daily, clock)
    spent = 0
    while clock.now < 50 + DAY_S:
        while budget.left() > 0 and spent < 2 * daily:
            nbytes = chance.randrange(1, 50_000)
            budget.spend(nbytes)
            spent += nbytes
        clock.now += chance.random() * 300
    assert 0.99 * daily < spent < daily + daily / 24 + 50_000, (
        "the first hour's share is available at once"
    )


def test_unused_budget_lasts_an_hour_and_an_excess_is_subtracted_later() -> None:
    clock = Clock()
    budget = WriteBudget(24_000, clock)
    clock.now += 10 * HOUR_S
    assert budget.left() == 1000
    budget.spend(3000)
    clock.now += 1.9 * HOUR_S
    assert budget.left() < 0
    clock.now += 0.2 * HOUR_S
    assert 0 < budget.left() < 200
    assert WriteBudget(0, clock).left() == float("inf")


@pytest.mark.parametrize("through", [False, True])
def test_a_mover_writes_no_more_than_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through: bool
) -> None:
    """A commit is written as a whole, so each writer may exceed the budget by one commit until the next
    hour."""
    spend, spent = WriteBudget.spend, []

    def spending(budget: WriteBudget, nbytes: int) -> None:
        spent.append(nbytes)
        spend(budget, nbytes)

    monkeypatch.setattr(WriteBudget, "spend", spending)
    clock = Clock()
    hour, commit = 4, 2

    async def work() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        catalog = Catalog(Store(), make("lru"))
        catalog.add_extent(SLOTS * BLOCK, bytearray(8 * SLOTS * BLOCK // 4096))
        daily = 24 * hour * (BLOCK + PAGE)
        mover = Mover(
            "t",
            catalog,
            bench.tier,
            4 * SLOTS * BLOCK,
            through=through,
            daily_bytes=daily,
            clock=clock,
        )
        mover.extents.append(bench.extent)
        space = catalog.spaces.open(SPACE, SPEC, ME)
        for first in range(0, 48, commit):
            granted = catalog.reserve(ME, space, 0, 0, b"", keys(first, commit))
            mover.writes.saved(catalog.commit(ME, granted.lease, 0, commit))
        moving = asyncio.create_task(mover.run())
        for hours in range(1, 8):
            least = hours * hour
            most = least + 2 * (commit if through else hour)
            until = time.monotonic() + 60
            while mover.counts["written"] < least and time.monotonic() < until:
                mover.tend()
                await asyncio.sleep(0.01)
            for _ in range(100):
                await asyncio.sleep(0)
            while catalog.demotions.writing:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert least <= mover.counts["written"] <= most, hours
            clock.now += HOUR_S
        assert sum(spent) == mover.counts["written"] * (BLOCK + PAGE), "headers are written too"
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        await bench.tier.close()

    run(work())


@pytest.mark.parametrize("admission, share", [("all", 1.0), ("auto", 0.5), ("second-touch", 0.0)])
def test_a_daemon_writes_no_more_than_its_daily_writes(
    daemon_of: Callable[..., Daemon], tmp_path: Path, admission: str, share: float
) -> None:
    """The budget limits blocks that were requested once. With `auto`, blocks that were requested twice
    may use the rest."""
    disk = tmp_path / "disk"
    disk.mkdir()
    spec = spec_of("budget")
    hour = 16  # blocks
    daemon = daemon_of(
        config=f'[warm]\nsize = "16MiB"\n[cold]\ndirectories = ["{disk}"]\nsize = "64MiB"\n'
        f'write = "through"\ndaily_writes = {24 * hour * spec.block_bytes}\n'
        f'admission = "{admission}"\n'
    )
    with daemon.connect() as client:
        space = client.open(spec)
        all_keys = space.keys(list(range(16 * 128)))
        for at in range(0, 128, 2):
            some = all_keys[at : at + 2]
            space.save(some, [pattern(key, spec.block_bytes) for key in some])
        once = int(share * hour)
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["states"]["written"] >= once - 2)
        settled(daemon)
        assert daemon.stats()["tiers"]["cold"]["states"]["written"] <= once + 4
        if admission == "all":
            return
        space.match(all_keys)

        def wrote_all_it_may(stats: dict[str, Any]) -> bool:
            # Blocks whose write is in progress are held, so their slots are not free for the next
            # save.
            cold = stats["tiers"]["cold"]
            return cold["states"]["written"] >= hour - 2 and not cold["writing"]

        daemon.wait_for(wrote_all_it_may)
        again = space.keys(list(range(5000, 5000 + 16 * 250)))
        space.save(again, bytes(250 * spec.block_bytes))
        cold = daemon.stats()["tiers"]["cold"]
        # Two writers may each start within the budget.
        assert cold["states"]["written"] <= 2 * hour + 4
        assert sum(cold["unwritten"].values()) >= 128 - 6 - cold["states"]["written"]


def test_second_chances_are_at_most_a_quarter_of_all_writes(tmp_path: Path) -> None:
    """All blocks were requested, so all of them qualify for a second chance."""
    capacity = ColdTierTests.capacity_bytes
    config = CONFIG.format(engine="threads", codec="raw")
    tier = ServedTenant(tmp_path, ColdLifecycle, config, capacity, True)
    data = bytes(BLOCK_BYTES)
    for number in range(5 * capacity // BLOCK_BYTES // 4):
        assert tier.put(Identity(key=name(number)), data)
        assert tier.get(Identity(key=name(number))) == data
    counts = tier.tenant.tier.stats().counts
    assert 0 < counts["written_again"] <= counts["written"] / 4 + SEGMENT / PART_BYTES
    tier.close()
