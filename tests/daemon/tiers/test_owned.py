"""Files in a cold directory that other users could have created are refused, and the message contains
the command that fixes them."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from daemon.tiers.test_cold_edges import filled
from kvtier.errors import ConfigError, TierError
from kvtier_daemon.secrets import load_secrets
from kvtier_daemon.tiers.cold.directory import ColdDirectory
from kvtier_daemon.tiers.cold.directory_lock import distrust
from kvtier_daemon.tools import config_check, doctor
from kvtier_daemon.tools.fsck import check
from support.cold_bench import SIZE, Bench, files_of, run

STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
OTHERS_MAY_WRITE = (0o1777, 0o775)
FOLDERS = ("", "segments", "segments/t", "index")


@pytest.mark.parametrize("mode", OTHERS_MAY_WRITE)
@pytest.mark.parametrize("where", FOLDERS)
def test_a_cold_directory_that_others_can_write_to_is_refused(
    tmp_path: Path, where: str, mode: int
) -> None:
    filled(tmp_path, 1)
    (tmp_path / where).chmod(mode)
    shared = not where and mode & stat.S_ISVTX  # as /tmp, which must stay open
    fix = "`mkdir -m 700 .*/kvtier` and use that" if shared else f"`chmod go-w .*{where}`, or use"
    with pytest.raises(TierError, match=rf"has mode {mode:04o}.*; run {fix}"):
        ColdDirectory(tmp_path, SIZE)
    (tmp_path / where).chmod(0o755)
    ColdDirectory(tmp_path, SIZE).close()


@as_root
@pytest.mark.parametrize("where", FOLDERS)
def test_a_cold_directory_of_another_user_is_refused(tmp_path: Path, where: str) -> None:
    filled(tmp_path, 1)
    os.chown(tmp_path / where, STRANGER, -1)
    with pytest.raises(TierError, match=rf"belongs to uid {STRANGER}.*`chown {os.geteuid()} "):
        ColdDirectory(tmp_path, SIZE)


@pytest.mark.parametrize("where", ["kvtier.id", "index/data.mdb"])
def test_a_file_of_the_directory_that_others_can_write_to_is_refused(
    tmp_path: Path, where: str
) -> None:
    filled(tmp_path, 1)
    (tmp_path / where).chmod(0o666)
    with pytest.raises(TierError, match=rf"{where}: has mode 0666"):
        ColdDirectory(tmp_path, SIZE)


def test_a_link_in_place_of_a_folder_of_a_cold_directory_is_refused(tmp_path: Path) -> None:
    cold = tmp_path / "cold"
    cold.mkdir()
    filled(cold, 1)
    (cold / "segments").rename(tmp_path / "elsewhere")
    (cold / "segments").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TierError, match="segments: is not a directory"):
        ColdDirectory(cold, SIZE)


def give_away(path: Path) -> None:
    os.chown(path, STRANGER, -1)


def open_to_others(path: Path) -> None:
    path.chmod(0o666)


def link_twice(path: Path) -> None:
    os.link(path, path.parents[3] / "another name")


def link_elsewhere(path: Path) -> None:
    path.symlink_to(path.rename(path.parents[3] / "another name"))


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("harm", [open_to_others, link_twice, link_elsewhere, make_fifo, give_away])
@pytest.mark.parametrize("free", [True, False], ids=["free", "sealed"])
def test_a_planted_segment_is_neither_read_nor_written_to(
    tmp_path: Path, harm: object, free: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A free segment that another user owns: blocks would be written into a file that this user can read."""
    if harm is give_away and os.geteuid():
        pytest.skip("needs root to give files away")
    cold = tmp_path / "cold"
    cold.mkdir()
    filled(cold)
    planted, lost = files_of(cold)[0], []
    if free:
        with planted.open("r+b") as file:
            file.write(bytes(4096))
    harm(planted)  # type: ignore[operator]
    before = planted.read_bytes() if planted.is_file() else b""

    async def work() -> None:
        bench = Bench([cold])
        await bench.recover()
        lost.extend(set(range(100)) - set(bench.on_disk))
        for first in range(1000, 1800, 64):
            assert not await bench.write(range(first, first + 64))
        assert all(one.path != str(planted) for one in bench.tier.table.segments)
        await bench.tier.close()

    run(work())
    assert lost and len(lost) < 20, "the other segments are used"
    assert not before or planted.read_bytes() == before
    told = next((line for line in caplog.text.splitlines() if str(planted) in line), "")
    assert harm is make_fifo or ": run `" in told


@as_root
def test_a_check_of_the_configuration_finds_secrets_that_the_start_refuses(tmp_path: Path) -> None:
    """Root has run a daemon before the service was installed."""
    file, state = tmp_path / "kvtier.toml", tmp_path / "state"
    file.write_text(f'socket = "{tmp_path / "sock"}"\nstate = "{state}"\n[warm]\nsize = "16MiB"\n')
    assert config_check.problems(file, None) == ()
    load_secrets(state, ["default"])
    assert config_check.problems(file, None) == ()
    for path, whole in ((state / "secrets", "-R "), (state / "secrets" / "default", "")):
        os.chown(path, STRANGER, -1)
        (found,) = config_check.problems(file, None)
        assert f"belongs to uid {STRANGER}" in found and f"`chown {whole}0 {path}`" in found
        os.chown(path, 0, -1)


@as_root
def test_a_secrets_folder_that_another_user_has_planted_is_refused_by_root(tmp_path: Path) -> None:
    load_secrets(tmp_path, ["a"])
    os.chown(tmp_path / "secrets", STRANGER, -1)
    with pytest.raises(ConfigError, match=rf"secrets: belongs to uid {STRANGER}.*chown"):
        load_secrets(tmp_path, ["a"])
    os.chown(tmp_path / "secrets", 0, -1)
    os.chown(tmp_path / "secrets" / "a", STRANGER, -1)
    with pytest.raises(ConfigError, match=rf"a: belongs to uid {STRANGER}.*chown"):
        load_secrets(tmp_path, ["a"])


def test_a_link_in_place_of_the_secrets_folder_is_refused(tmp_path: Path) -> None:
    load_secrets(tmp_path, ["a"])
    (tmp_path / "secrets").rename(tmp_path / "real")
    (tmp_path / "secrets").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="secrets: is not a directory"):
        load_secrets(tmp_path, ["a"])


def test_a_directory_that_root_owns_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.stat("/usr")
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    assert found.st_uid or distrust(Path("/usr"), found) == ("", "")


def test_the_doctor_reports_a_cold_directory_that_others_can_write_to(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    assert doctor.owned(tmp_path).level is doctor.Severity.ok
    (tmp_path / "segments").chmod(0o777)
    found = doctor.owned(tmp_path)
    assert found.level is doctor.Severity.fail and found.fix == f"chmod go-w {tmp_path}/segments"
    shutil.rmtree(tmp_path)
    assert doctor.owned(tmp_path).level is doctor.Severity.ok, (
        "another line says that it is missing"
    )


@as_root
def test_root_may_read_a_directory_of_the_daemons_user(tmp_path: Path) -> None:
    filled(tmp_path, 20)
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, STRANGER, -1)
    assert doctor.owned(tmp_path).level is doctor.Severity.ok
    volume = ColdDirectory(tmp_path, None)
    try:
        report = check(volume)
        assert report.is_clean and report.frames == 20
        os.chown(files_of(tmp_path)[0], STRANGER + 1, -1)
        assert check(volume).wrong == {"file": 1}
    finally:
        volume.close()
