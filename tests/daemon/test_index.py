"""The index: what was put is there again, also after a kill; it grows before it is full."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.errors import TierError
from kvtier_daemon.index import FIRST_MAP_BYTES, Index

MIB = 1 << 20


def flushed(index: Index, token: int = 7) -> str:
    index.flush(token)
    assert select.select([index.event_fd], [], [], 20)[0]
    ((found, failure),) = list(index.done())
    assert found == token
    return failure


def test_what_was_put_is_there_again(tmp_path: Path) -> None:
    with Index(tmp_path / "index", 64 * MIB) as index:
        assert list(index.done()) == []
        for number in range(10_000):
            index.put(b"forgotten", b"%06d" % number, b"")
        index.put(b"spaces", b"a", b"first")
        index.put(b"spaces", b"a", b"second")
        index.drop(b"forgotten", b"000003")
        assert flushed(index) == ""
    with Index(tmp_path / "index", 64 * MIB) as index:
        keys = [key for key, _ in index.entries(b"forgotten")]
        assert len(keys) == 9_999 and b"000003" not in keys and keys == sorted(keys)
        assert index.entries(b"spaces") == [(b"a", b"second")]


def test_closing_writes_what_is_left(tmp_path: Path) -> None:
    with Index(tmp_path, 64 * MIB) as index:
        index.put(b"segments", b"k", b"v")
    with Index(tmp_path, 64 * MIB) as index:
        assert index.entries(b"segments") == [(b"k", b"v")]


CHILD = """
import sys
from pathlib import Path
from kvtier_daemon.index import Index
index = Index(Path(sys.argv[1]), 64 << 20)
token = 0
while True:
    token += 1
    for part in range(20):
        index.put(b"segments", b"%d.%d" % (token, part), bytes(200))
    index.flush(token)
    while True:
        import select
        select.select([index.event_fd], [], [])
        if list(index.done()):
            break
    print(token, flush=True)
"""


def test_what_was_flushed_outlives_a_kill(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) == 30:
            child.send_signal(signal.SIGKILL)
            break
    child.wait()
    child.stdout.close()
    with Index(tmp_path, 64 * MIB) as index:
        keys = {key for key, _ in index.entries(b"segments")}
        assert {b"%d.%d" % (token, part) for token in range(1, 31) for part in range(20)} <= keys


def test_the_map_grows_before_it_is_full(tmp_path: Path) -> None:
    with Index(tmp_path, 256 * MIB) as index:
        assert index.reserved_bytes == FIRST_MAP_BYTES
        for number in range(3000):
            index.put(b"segments", b"%d" % number, bytes(20_000))
        assert flushed(index) == ""
        assert index.reserved_bytes > 3000 * 20_000
        assert (tmp_path / "data.mdb").stat().st_size <= index.reserved_bytes <= 256 * MIB


def test_a_full_index_says_so_and_serves_again_when_there_is_room(tmp_path: Path) -> None:
    with Index(tmp_path, FIRST_MAP_BYTES) as index:
        index.put(b"segments", b"large", bytes(4 * MIB))
        assert flushed(index) == ""
        for number in range(3000):
            index.put(b"segments", b"%d" % number, bytes(20_000))
        assert "can't be written" in flushed(index)
        index.drop(b"segments", b"large")
        assert flushed(index) == "", "dropping something is possible even then"
        index.put(b"segments", b"small", b"v")
        assert flushed(index) == "" and not index.failure
        assert (tmp_path / "data.mdb").stat().st_size <= FIRST_MAP_BYTES
        assert b"large" not in dict(index.entries(b"segments"))
    with Index(tmp_path, FIRST_MAP_BYTES) as index:
        assert dict(index.entries(b"segments"))[b"small"] == b"v"


@pytest.mark.parametrize(
    "noise", [os.urandom(8192), b"", bytes(1 << 16)], ids=["noise", "empty", "zeros"]
)
def test_a_damaged_index_is_begun_anew(tmp_path: Path, noise: bytes) -> None:
    (tmp_path / "data.mdb").write_bytes(noise)
    with Index(tmp_path, 64 * MIB) as index:
        index.put(b"spaces", b"a", b"b")
        assert flushed(index) == ""
    with Index(tmp_path, 64 * MIB) as index:
        assert index.entries(b"spaces") == [(b"a", b"b")]


def test_an_index_that_is_cut_short_is_begun_anew(tmp_path: Path) -> None:
    with Index(tmp_path, 64 * MIB) as index:
        for number in range(1000):
            index.put(b"segments", b"%d" % number, bytes(1000))
    os.truncate(tmp_path / "data.mdb", 3 * 4096)
    with Index(tmp_path, 64 * MIB) as index:
        assert index.entries(b"segments") == []


def test_an_index_of_another_format_is_begun_anew(tmp_path: Path) -> None:
    with Index(tmp_path, 64 * MIB) as index:
        index.put(b"meta", b"format", b"77")
        index.put(b"spaces", b"a", b"b")
    with Index(tmp_path, 64 * MIB) as index:
        assert index.entries(b"spaces") == []


def test_a_folder_that_can_not_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match="can't be opened"):
        Index(tmp_path / "file", 64 * MIB)
