"""The arena's memory: allocated, sealed, and each extent assigned to one tenant."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.test_unforeseen import served
from kvtier_daemon.app import App
from kvtier_daemon.tiers.warm import HUGE_PAGE, PAGE, Extent, WarmTier, plan_extents, table_bytes
from kvtier_kernels import Mapping
from support.huge import huge_pages

MIB = 1 << 20


@contextlib.contextmanager
def warm_tier(*arguments: object, **options: bool) -> Iterator[tuple[WarmTier, list[Extent]]]:
    """A tier, and its extents after the allocation has ended or failed."""
    tier = WarmTier(*arguments, **options)  # type: ignore[arg-type]
    try:
        event_fd = tier.start()
        extents: list[Extent] = []
        while not tier.complete:
            assert select.select([event_fd], [], [], 10)[0], "nothing happens"
            extents += tier.ready()
        yield tier, extents
    finally:
        tier.close()


@given(
    st.dictionaries(st.text(min_size=1), st.integers(0, 100 * MIB), min_size=1, max_size=5),
    st.integers(1, 30).map(lambda n: n * MIB),
)
def test_every_tenant_gets_its_quota_in_whole_pages(quotas: dict[str, int], extent: int) -> None:
    plan = plan_extents(quotas, extent)
    for tenant, quota in quotas.items():
        assert sum(n for t, n in plan if t == tenant) == quota - quota % PAGE
    assert all(0 < nbytes <= extent and nbytes % PAGE == 0 for _, nbytes in plan)


def test_tenants_get_their_first_extents_in_turn() -> None:
    plan = plan_extents({"a": 3 * MIB, "b": 2 * MIB}, MIB)
    assert [tenant for tenant, _ in plan] == ["a", "b", "a", "b", "a"]


def test_extents_are_allocated_sealed_and_private() -> None:
    with warm_tier({"t": 5 * MIB}, 2 * MIB) as (tier, extents):
        assert [extent.nbytes for extent in extents] == [2 * MIB, 2 * MIB, MIB]
        assert tier.allocated_bytes == tier.capacity_bytes == 5 * MIB
        for extent in extents:
            status = os.fstat(extent.fd)
            assert status.st_blocks * 512 == extent.nbytes, "allocated, not promised"
            assert status.st_mode & 0o777 == 0o600
            with pytest.raises(OSError):
                os.ftruncate(extent.fd, 0)
            with pytest.raises(OSError):
                os.ftruncate(extent.fd, 2 * extent.nbytes)
            seals = fcntl.fcntl(extent.fd, fcntl.F_GET_SEALS)
            assert not seals & 0x10, "F_SEAL_FUTURE_WRITE would lock a restarted daemon out"
            assert extent.table.size == table_bytes(extent.nbytes)


def test_read_only_descriptors_can_not_be_mapped_for_writing() -> None:
    import mmap

    with warm_tier({"t": MIB}, MIB) as (_, extents):
        handles = extents[0].handles(read_only=True)
        try:
            for each in handles:
                mmap.mmap(each, 0, prot=mmap.PROT_READ).close()
                with pytest.raises(PermissionError):
                    mmap.mmap(each, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            for each in handles:
                os.close(each)


def test_a_failed_allocation_is_logged_and_existing_extents_are_used() -> None:
    with huge_pages(1), warm_tier({"t": 6 * MIB}, 2 * MIB, huge_pages=True) as (tier, extents):
        assert [extent.nbytes for extent in extents] == [2 * MIB]
        assert "stays at 2 MiB of 6 MiB" in tier.failure
        assert "ENO" in tier.failure, "the reason is named"


def test_locked_memory_is_counted_as_locked() -> None:
    def locked_kib() -> int:
        status = Path("/proc/self/status").read_text()
        return int(next(li for li in status.splitlines() if li.startswith("VmLck")).split()[1])

    before = locked_kib()
    with warm_tier({"t": 2 * MIB}, MIB, lock=True) as (tier, extents):
        assert len(extents) == 2 and not tier.failure
        assert locked_kib() - before == 2048


def test_reserved_huge_pages_are_used() -> None:
    with huge_pages(4), warm_tier({"t": 5 * MIB}, 3 * MIB, huge_pages=True) as (tier, extents):
        assert not tier.failure
        assert [extent.nbytes for extent in extents] == [HUGE_PAGE, HUGE_PAGE]
        assert os.fstatvfs(extents[0].fd).f_bsize == HUGE_PAGE


def test_closing_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with warm_tier({"t": 3 * MIB}, MIB):
        assert len(os.listdir("/proc/self/fd")) > before
    tier = WarmTier({"t": 64 * MIB}, MIB)
    tier.start()
    tier.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_clients_map_extents_where_huge_pages_fit_whole() -> None:
    with warm_tier({"t": 9 * MIB}, 3 * MIB) as (tier, extents):
        for extent in extents:
            mapping = Mapping(extent.fd, extent.nbytes, True)
            assert mapping.address % HUGE_PAGE == 0
            view = memoryview(mapping)
            view[0] = view[-1] = 7
        assert 0 <= tier.huge_bytes <= 6 * MIB, "a megabyte at each one's end is no huge page"


def test_a_catalog_is_growing_until_its_memory_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    plain = App._extents_ready

    def ready(app: App) -> None:
        grows = app.tenants["default"].catalog
        seen.append(grows.growing)
        plain(app)
        seen.append(grows.growing)

    monkeypatch.setattr(App, "_extents_ready", ready)

    async def until_it_is_there(app: App) -> None:
        while not app.warm.complete:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    served(tmp_path, until_it_is_there)
    assert seen[0] and not seen[-1]
