"""fsck finds all damage and reports nothing else. After a repair, a directory is clean."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from kvtier.frame import PAGE
from kvtier_daemon.cli import main
from kvtier_daemon.tiers.cold.recovery import recover
from kvtier_daemon.tiers.cold.segment import encode_footer, page_of, split_rows
from support.cold_bench import BLOCK, Bench, Landed


def filled(folder: Path, close: bool = True) -> dict[int, tuple[Path, Landed]]:
    """Forty blocks in a directory. Returns the place of each."""
    places: dict[int, tuple[Path, Landed]] = {}

    async def work() -> None:
        bench = Bench([folder])
        await bench.recover()
        await bench.write(range(40))
        for number, one in bench.on_disk.items():
            places[number] = (Path(bench.tier.table.segments[one.segment].path), one)
        await bench.tier.close()

    asyncio.run(work())
    return places


def fsck(
    folder: Path, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, dict[str, object]]:
    with pytest.raises(SystemExit) as ended:
        main(["fsck", str(folder), "--json", *flags])
    code = ended.value.code
    return int(code or 0), json.loads(capsys.readouterr().out)[str(folder)]


def write_over(path: Path, at: int, text: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(text)


def test_a_clean_directory_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path)
    code, found = fsck(tmp_path, capsys)
    assert code == 0 and found["frames"] == 40 and not found["wrong"]
    with pytest.raises(SystemExit):
        main(["fsck", str(tmp_path)])
    assert "40 frames" in (text := capsys.readouterr().out) and "  ok" in text


def test_damage_is_found_reported_by_kind_and_repaired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = filled(tmp_path)
    for number, offset in ((3, 0), (4, 240), (5, None), (20, None)):
        path, one = places[number]
        inside = one.header_pages * PAGE + 500 if offset is None else offset
        write_over(path, one.page * PAGE + inside, b"\x55" * 64)
    path, one = places[8]
    other_path, other = places[9]
    whole = one.header_pages * PAGE + BLOCK
    assert path == other_path
    text = path.read_bytes()
    write_over(path, other.page * PAGE, text[one.page * PAGE : one.page * PAGE + whole])
    code, found = fsck(tmp_path, capsys)
    assert code == 1
    assert found["wrong"] == {"header": 2, "payload": 2, "identity": 1}
    code, found = fsck(tmp_path, capsys, "--repair")
    assert code == 0 and found["repaired_segments"] == 2
    code, found = fsck(tmp_path, capsys)
    assert code == 0 and found["frames"] == 35 and not found["wrong"]

    async def work() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        assert set(bench.on_disk) == set(range(40)) - {3, 4, 5, 20, 9}
        await bench.all_read()
        await bench.tier.close()

    asyncio.run(work())


def test_an_entry_of_an_unknown_space_is_one_wrong_entry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, one = filled(tmp_path)[3]
    found = recover(path, None, {})
    assert found.sealed and found.head
    rows = split_rows(found.rows)
    bad = next(at for at, row in enumerate(rows) if page_of(row) == one.page)
    rows[bad] = rows[bad][:64] + (7).to_bytes(4, "little") + rows[bad][68:]
    write_over(path, *encode_footer(found.head, found.spaces, b"".join(rows), found.end))
    code, report = fsck(tmp_path, capsys)
    assert code == 1 and report["frames"] == 40 and report["wrong"] == {"entry": 1}
    fsck(tmp_path, capsys, "--repair")
    code, report = fsck(tmp_path, capsys)
    assert code == 0 and report["frames"] == 39


def test_a_missing_head_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = filled(tmp_path)
    write_over(places[0][0], 100, b"x")
    code, found = fsck(tmp_path, capsys)
    assert code == 1 and found["wrong"] == {"head": 1}


def test_a_directory_in_use_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        bench = Bench([tmp_path])
        with pytest.raises(SystemExit) as ended:
            main(["fsck", str(tmp_path)])
        assert ended.value.code == 2
        assert f"pid {os.getpid()}" in capsys.readouterr().err
        await bench.tier.close()

    asyncio.run(work())


def test_a_path_that_is_not_a_directory_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["fsck", str(tmp_path), str(tmp_path / "none")])
    assert left.value.code == 2
    assert f"{tmp_path / 'none'}: not a directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "nothing is begun before all are there"


@pytest.mark.parametrize("has", ["", "segments", "index", "kvtier.lock"])
def test_a_folder_that_other_users_own_is_refused_and_not_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], has: str
) -> None:
    (tmp_path / "notes.txt").write_text("not ours")
    if has == "kvtier.lock":
        (tmp_path / has).touch()
    elif has:
        (tmp_path / has).mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as ended:
        main(["fsck", str(tmp_path)])
    assert ended.value.code == 2
    assert "not a kvtier directory" in " ".join(capsys.readouterr().err.split())
    assert sorted(tmp_path.iterdir()) == before
