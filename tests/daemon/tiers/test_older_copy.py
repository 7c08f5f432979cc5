"""A cold directory that is replaced by an older copy of itself brings back no forgotten block."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.tiers.test_forget import Tenant
from kvtier.errors import TierError
from kvtier_daemon.tiers.cold.attached import open_directory
from kvtier_daemon.tiers.cold.forget_count import ForgetCount, lost_rounds
from support.cold_bench import SIZE, Bench, files_of, run

ALL = list(range(8))
LEFT = [0, 1, 2, 4, 6, 7]


class Place:
    """A cold directory, the daemon's state folder, and a copy of the directory."""

    def __init__(self, folder: Path) -> None:
        self.cold, self.state, self.copy = folder / "cold", folder / "state", folder / "copy"
        self.cold.mkdir()

    def tenant(self) -> Tenant:
        return Tenant(self.cold, bench=Bench([self.cold], state=self.state))

    def take_copy(self) -> None:
        shutil.copytree(self.cold, self.copy)

    def restore(self) -> None:
        shutil.rmtree(self.cold)
        shutil.copytree(self.copy, self.cold)

    async def forget_after_copy(self) -> None:
        """Write eight blocks, copy the directory, then forget 3 and 5."""
        tenant = self.tenant()
        await tenant.start()
        await tenant.sealed(8)
        self.take_copy()
        assert await tenant.forget(3, 5) == ""
        await tenant.kill()

    async def known(self) -> list[int]:
        """Start, and return the blocks that are found."""
        tenant = self.tenant()
        await tenant.start()
        known = [number for number in ALL if tenant.knows(number)]
        self.older = tenant.bench.first.directory.older
        await tenant.kill()
        return known


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_an_older_copy_of_a_directory_is_emptied_with_one_line(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        await place.forget_after_copy()
        assert await place.known() == LEFT
        place.restore()
        assert lost_rounds(place.cold, place.state) == 1
        segments = len(files_of(place.cold))
        caplog.clear()
        assert await place.known() == []
        assert place.older in caplog.text and f"removed its {segments} segments" in place.older
        assert caplog.text.count("older copy") == 1
        assert "another secret" not in caplog.text and "removing" not in caplog.text

        # The directory is usable, and not suspected again.
        tenant = place.tenant()
        await tenant.start()
        await tenant.sealed(2)
        await tenant.kill()
        assert await place.known() == [0, 1] and not place.older

        # The same copy once more: the state folder still knows its ID.
        place.restore()
        assert await place.known() == [] and place.older

    with caplog.at_level(logging.INFO):
        run(work())


def test_a_copy_that_lacks_no_forget_is_used(place: Place) -> None:
    async def work() -> None:
        tenant = place.tenant()
        await tenant.start()
        await tenant.sealed(8)
        assert await tenant.forget(3, 5) == ""
        place.take_copy()
        await tenant.kill()
        place.restore()
        assert await place.known() == LEFT and not place.older

    run(work())


def test_a_purge_is_counted_after_the_erase(place: Place) -> None:
    """A copy between the forget and the erase has bytes that the purge has erased since."""

    async def work() -> None:
        tenant = place.tenant()
        await tenant.start()
        await tenant.sealed(8)
        assert await tenant.forget(*ALL) == ""
        place.take_copy()
        first = 1
        while first:
            erased: asyncio.Future[tuple[str, int, int]] = (
                asyncio.get_running_loop().create_future()
            )
            tenant.mover.forgets.erase(first - 1, lambda *said, to=erased: to.set_result(said))
            failure, first, _ = await erased
            assert failure == ""
        await tenant.kill()
        place.restore()
        assert await place.known() == [] and place.older
        assert not any(any(path.read_bytes()) for path in files_of(place.cold))

    run(work())


def test_a_kill_before_the_state_folder_has_counted_removes_nothing(place: Place) -> None:
    async def work() -> None:
        await place.forget_after_copy()
        before = shutil.copytree(place.state, place.state.with_name("before"))
        tenant = place.tenant()
        await tenant.start()
        assert await tenant.forget(7) == ""
        await tenant.kill()
        shutil.rmtree(place.state)
        before.rename(place.state)
        assert await place.known() == [0, 1, 2, 4, 6] and not place.older
        assert lost_rounds(place.cold, place.state) == 0

    run(work())


def test_without_the_state_folder_a_directory_is_used_and_counted_again(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        await place.forget_after_copy()
        shutil.rmtree(place.state)
        assert await place.known() == LEFT
        assert "does not know" in caplog.text
        place.restore()
        assert await place.known() == [], "the count of the directory was taken over"

    with caplog.at_level(logging.WARNING):
        run(work())


def test_a_forget_that_cannot_be_counted_is_durable_and_reported(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        tenant = place.tenant()
        await tenant.start()
        await tenant.sealed(8)
        shutil.rmtree(place.state / "cold")
        (place.state / "cold").touch()
        assert await tenant.forget(3) == ""
        directory = tenant.bench.first.directory
        assert str(place.state) in directory.not_counted
        assert await tenant.forget(5) == ""
        assert caplog.text.count("cannot count forgets") == 1
        place.take_copy()
        (place.state / "cold").unlink()
        assert await tenant.forget(6) == ""
        assert directory.not_counted == ""
        await tenant.kill()
        assert await place.known() == [0, 1, 2, 4, 7]
        place.restore()
        assert await place.known() == [], "no two rounds have the same count"

    with caplog.at_level(logging.ERROR):
        run(work())


def without_count(place: Place) -> None:
    (place.cold / "kvtier.forgets").unlink()


def count_of_another(place: Place) -> None:
    other = place.cold.with_name("other")
    other.mkdir()
    directory = open_directory(other, SIZE, state=place.state)
    assert directory.forgets is not None
    directory.forgets.advance(9)
    directory.close()
    shutil.copyfile(other / "kvtier.forgets", place.cold / "kvtier.forgets")


def damaged_count(place: Place) -> None:
    file = place.cold / "kvtier.forgets"
    file.write_bytes(b"\xff" + file.read_bytes()[1:])


@pytest.mark.parametrize("harm", [without_count, count_of_another, damaged_count])
def test_a_directory_without_its_count_is_an_older_copy(
    place: Place, harm: Callable[[Place], None]
) -> None:
    async def work() -> None:
        await place.forget_after_copy()
        place.restore()
        harm(place)
        assert await place.known() == [] and place.older

    run(work())


def test_a_kill_after_the_new_id_leaves_no_segment_that_is_used(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        await place.forget_after_copy()
        place.restore()
        with monkeypatch.context() as patch:
            patch.setattr("pathlib.Path.unlink", killed)
            with pytest.raises(KilledError):
                open_directory(place.cold, SIZE, state=place.state)
        assert len(files_of(place.cold)) == len(files_of(place.copy))
        assert await place.known() == []

    run(work())


class KilledError(Exception):
    pass


def killed(*_: object, **__: object) -> None:
    raise KilledError


def test_a_state_folder_that_cannot_be_read_refuses_the_directory(place: Place) -> None:
    place.state.mkdir()
    (place.state / "cold").touch()
    with pytest.raises(TierError, match="state/cold"):
        open_directory(place.cold, SIZE, state=place.state)
    (place.state / "cold").unlink()
    directory = open_directory(place.cold, SIZE, state=place.state)
    assert isinstance(directory.forgets, ForgetCount)
    directory.close()


def test_forgets_of_blocks_that_are_not_on_disk_are_counted(place: Place) -> None:
    """A copy may have a frame of a block that has left the disk since."""

    async def work() -> None:
        tenant = place.tenant()
        await tenant.start()
        await tenant.sealed(2)
        place.take_copy()
        assert await tenant.forget(99) == ""
        await tenant.kill()
        place.restore()
        assert await place.known() == []

    run(work())
