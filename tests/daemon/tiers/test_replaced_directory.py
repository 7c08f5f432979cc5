"""A directory that is replaced by another one while it is opened, as by a mount: neither loses a segment, and
the identity, the index and the segments of a tier are always those of one directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.tiers.test_cold_edges import filled
from kvtier.errors import TierError
from kvtier_daemon.tiers.cold.directory import ColdDirectory
from kvtier_daemon.tiers.cold.index_child import IndexDone, LockIndex, OpenIndex, Request
from kvtier_daemon.tiers.cold.index_process import Child
from support.cold_bench import SIZE, Bench, files_of, run


class Place:
    """The path `at` is an empty directory, like a mount point; `mount` puts a used directory there."""

    def __init__(self, folder: Path) -> None:
        self.at, self.below, self.disk = folder / "at", folder / "below", folder / "disk"
        self.at.mkdir()
        self.disk.mkdir()
        filled(self.disk)
        self.files = [path.name for path in files_of(self.disk)]
        assert len(self.files) > 2

    def mount(self) -> None:
        self.at.rename(self.below)
        self.disk.rename(self.at)


class MountsAfter(Child):
    """The process that opens a directory. Another one is mounted there after the answer to `request`."""

    def __init__(self, place: Place, request: type[Request]) -> None:
        super().__init__()
        self._place = place
        self._request = request

    def ask(self, request: Request, fds: tuple[int, ...] = ()) -> tuple[IndexDone, list[int]]:
        answer = super().ask(request, fds)
        if isinstance(request, self._request):
            self._place.mount()
        return answer


@pytest.mark.parametrize("request_", [LockIndex, OpenIndex])
def test_a_directory_that_is_mounted_while_it_is_opened_is_refused_and_kept(
    tmp_path: Path, request_: type[Request]
) -> None:
    place = Place(tmp_path)
    with pytest.raises(TierError, match=f"{place.at} was replaced by another directory"):
        ColdDirectory(place.at, SIZE, MountsAfter(place, request_))
    assert (place.below / "index" / "data.mdb").exists(), "the index of the other one was opened"

    async def work() -> None:
        bench = Bench([place.at])
        await bench.recover()
        assert sorted(bench.on_disk) == list(range(100))
        await bench.tier.close()

    run(work())


def test_a_directory_that_is_mounted_before_the_scan_keeps_its_segments(tmp_path: Path) -> None:
    place = Place(tmp_path)

    async def work() -> None:
        bench = Bench([place.at])
        place.mount()
        await bench.recover()
        assert not bench.on_disk, "blocks of another directory"
        assert not await bench.write(range(8))
        assert [path.name for path in files_of(place.at)] == place.files
        assert files_of(place.below), "the segments are where the identity is"
        await bench.tier.close()

    run(work())


def test_segments_that_do_not_fit_are_removed_in_the_opened_directory_only(tmp_path: Path) -> None:
    place = Place(tmp_path)
    filled(place.at)

    async def work() -> None:
        bench = Bench([place.at], share=0.13)
        place.mount()
        await bench.recover()
        assert [path.name for path in files_of(place.at)] == place.files
        assert len(files_of(place.below)) < len(place.files)
        await bench.tier.close()

    run(work())


def test_the_folders_of_a_directory_that_was_replaced_are_not_listed(tmp_path: Path) -> None:
    place = Place(tmp_path)
    opened = ColdDirectory(place.at, SIZE)
    place.mount()
    assert opened.tenants() == [] and opened.files("t") == []
    opened.close()
