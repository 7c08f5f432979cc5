"""The index: records are stored, also across a kill; the map grows before it is full."""

from __future__ import annotations

import errno
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import TierError
from kvtier_daemon.tiers.cold import index as index_module
from kvtier_daemon.tiers.cold.index import FIRST_MAP_BYTES, Change, Index

MIB = 1 << 20


def map_bytes(index: Index) -> int:
    """The size of the file that the index may fill without growing."""
    return int(index._env.info()["map_size"])


def flushed(index: Index, token: int = 7) -> str:
    index.flush(token)
    assert select.select([index.event_fd], [], [], 20)[0]
    ((found, failure),) = list(index.done())
    assert found == token
    return failure


def test_stored_records_are_found_after_reopening(tmp_path: Path) -> None:
    with closing(Index(tmp_path / "index", 64 * MIB)) as index:
        assert list(index.done()) == []
        for number in range(10_000):
            index.put(b"segments", b"%06d" % number, b"")
        index.put(b"spaces", b"a", b"first")
        index.put(b"spaces", b"a", b"second")
        index.drop(b"segments", b"000003")
        assert flushed(index) == ""
    with closing(Index(tmp_path / "index", 64 * MIB)) as index:
        keys = [key for key, _ in index.entries(b"segments")]
        assert len(keys) == 9_999 and b"000003" not in keys and keys == sorted(keys)
        assert index.entries(b"spaces") == [(b"a", b"second")]


def test_closing_writes_pending_changes(tmp_path: Path) -> None:
    with closing(Index(tmp_path, 64 * MIB)) as index:
        index.put(b"segments", b"k", b"v")
    with closing(Index(tmp_path, 64 * MIB)) as index:
        assert index.entries(b"segments") == [(b"k", b"v")]


CHILD = """
import sys
from pathlib import Path
from contextlib import closing
from kvtier_daemon.tiers.cold.index import Index
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


def test_flushed_records_survive_a_kill(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) == 30:
            child.send_signal(signal.SIGKILL)
            break
    child.wait()
    child.stdout.close()
    with closing(Index(tmp_path, 64 * MIB)) as index:
        keys = {key for key, _ in index.entries(b"segments")}
        assert {b"%d.%d" % (token, part) for token in range(1, 31) for part in range(20)} <= keys


def test_the_map_grows_before_it_is_full(tmp_path: Path) -> None:
    with closing(Index(tmp_path, 256 * MIB)) as index:
        assert map_bytes(index) == FIRST_MAP_BYTES
        for number in range(3000):
            index.put(b"segments", b"%d" % number, bytes(20_000))
        assert flushed(index) == ""
        assert map_bytes(index) > 3000 * 20_000
        assert (tmp_path / "data.mdb").stat().st_size <= map_bytes(index) <= 256 * MIB


def test_a_full_index_says_so_and_serves_again_when_there_is_room(tmp_path: Path) -> None:
    with closing(Index(tmp_path, FIRST_MAP_BYTES)) as index:
        index.put(b"segments", b"large", bytes(4 * MIB))
        assert flushed(index) == ""
        for number in range(3000):
            index.put(b"segments", b"%d" % number, bytes(20_000))
        assert "cannot write the index" in flushed(index)
    with closing(Index(tmp_path, FIRST_MAP_BYTES)) as index:
        assert b"large" in dict(index.entries(b"segments")), "a full index is valid"
        for number in range(3000):
            index.put(b"segments", b"%d" % number, bytes(20_000))
        assert "cannot write the index" in flushed(index)
        index.drop(b"segments", b"large")
        assert "cannot write the index" in flushed(index)
        assert b"large" not in dict(index.entries(b"segments")), (
            "records can be dropped from a full index"
        )
        for number in range(3000):
            index.drop(b"segments", b"%d" % number)
        index.put(b"segments", b"small", b"v")
        assert flushed(index) == "" and not index.failure
        assert index.entries(b"segments") == [(b"small", b"v")]
        assert (tmp_path / "data.mdb").stat().st_size <= FIRST_MAP_BYTES
    with closing(Index(tmp_path, FIRST_MAP_BYTES)) as index:
        assert index.entries(b"segments") == [(b"small", b"v")]


def fail(index: Index, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Let the next `times` commits fail, or all commits if `times` is negative."""
    left, commit = [times], index._commit

    def failing(changes: Change) -> str:
        if left[0] == 0:
            return commit(changes)
        left[0] -= 1
        return "EIO"

    monkeypatch.setattr(index, "_commit", failing)


def test_no_flush_succeeds_before_failed_changes_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "RETRY_S", 60)
    with closing(Index(tmp_path, 64 * MIB)) as index:
        fail(index, monkeypatch, 2)
        index.put(b"segments", b"a", b"")
        assert flushed(index) == "EIO"
        index.put(b"segments", b"b", b"")
        assert flushed(index) == "EIO", "this flush includes the changes of the one before it"
        assert index.entries(b"segments") == []
        assert flushed(index) == "" and not index.failure
        assert index.entries(b"segments") == [(b"a", b""), (b"b", b"")]


def test_failed_changes_are_retried_without_a_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "RETRY_S", 0.01)
    with closing(Index(tmp_path, 64 * MIB)) as index:
        fail(index, monkeypatch, 3)
        index.put(b"segments", b"a", b"")
        until = time.monotonic() + 60
        while not index.entries(b"segments"):
            assert time.monotonic() < until
            time.sleep(0.01)


def test_no_flush_succeeds_after_too_many_failed_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "KEPT", 10)
    with closing(Index(tmp_path, 64 * MIB)) as index:
        fail(index, monkeypatch, -1)
        for number in range(30):
            index.put(b"segments", b"%02d" % number, b"")
        assert "are lost" in flushed(index)
        monkeypatch.undo()
        assert "are lost" in flushed(index) and "are lost" in index.failure
        keys = [key for key, _ in index.entries(b"segments")]
        assert b"29" in keys and b"00" not in keys, "the oldest went"
    with closing(Index(tmp_path, 64 * MIB)) as index:
        assert flushed(index) == ""


@pytest.mark.parametrize(
    "noise", [os.urandom(8192), b"", bytes(1 << 16)], ids=["noise", "empty", "zeros"]
)
def test_a_damaged_index_is_replaced(tmp_path: Path, noise: bytes) -> None:
    (tmp_path / "data.mdb").write_bytes(noise)
    with closing(Index(tmp_path, 64 * MIB)) as index:
        index.put(b"spaces", b"a", b"b")
        assert flushed(index) == ""
    with closing(Index(tmp_path, 64 * MIB)) as index:
        assert index.entries(b"spaces") == [(b"a", b"b")]


def test_a_truncated_index_is_replaced(tmp_path: Path) -> None:
    with closing(Index(tmp_path, 64 * MIB)) as index:
        for number in range(1000):
            index.put(b"segments", b"%d" % number, bytes(1000))
    os.truncate(tmp_path / "data.mdb", 3 * 4096)
    with closing(Index(tmp_path, 64 * MIB)) as index:
        assert index.entries(b"segments") == []


def test_an_index_of_another_format_is_replaced(tmp_path: Path) -> None:
    with closing(Index(tmp_path, 64 * MIB)) as index:
        index.put(b"meta", b"format", b"77")
        index.put(b"spaces", b"a", b"b")
    with closing(Index(tmp_path, 64 * MIB)) as index:
        assert index.entries(b"spaces") == []


def test_an_unusable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match="cannot open the index"):
        Index(tmp_path / "file", 64 * MIB)


# Begins an index on a full disk, and again after space was freed.
FULL = """
import sys
from pathlib import Path
from kvtier.errors import TierError
from contextlib import closing
from kvtier_daemon.tiers.cold.index import Index
folder = Path(sys.argv[1])
(folder / "index").mkdir()
junk = folder / "junk"
with junk.open("wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)):
            pass
    except OSError:
        pass
try:
    Index(folder / "index", 64 << 20)
except TierError as error:
    print(error)
junk.unlink()
with closing(Index(folder / "index", 64 << 20)) as index:
    index.put(b"spaces", b"a", b"b")
with closing(Index(folder / "index", 64 << 20)) as index:
    print(index.entries(b"spaces"))
"""


def test_beginning_an_index_on_a_full_disk_is_an_error(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*alone, mount], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    run = f'{mount} && exec "$0" -c "$1" {tmp_path}'
    done = subprocess.run(
        [*alone, run, sys.executable, FULL],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr)
    said, found = done.stdout.splitlines()
    assert "cannot open the index" in said and "No space left" in said
    assert found == "[(b'a', b'b')]"


# Zeroes 64 bytes at one position after another until a process that does the requested operation is
# killed by a signal, and a process that does the other one is not. Leaves the file with this
# damage.
ZEROED = """
import os, sys, lmdb
folder, asked = sys.argv[1:]
tables = (b"meta", b"spaces", b"segments")

def dies(work):
    child = os.fork()
    if child == 0:
        os.close(2)
        try:
            env = lmdb.open(folder, max_dbs=4, map_size=64 << 20, lock=False)
            if work == "read":
                for name in tables:
                    with env.begin() as reading:
                        list(reading.cursor(env.open_db(name, reading, create=False)))
            else:
                with env.begin(write=True) as writing:
                    meta = env.open_db(b"meta", writing)
                    writing.put(b"format", b"2", db=meta)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])

with open(folder + "/data.mdb", "rb") as file:
    good = file.read()
for at in range(len(good) - 64, 2 * 4096, -64):
    with open(folder + "/data.mdb", "r+b") as file:
        file.write(good[:at] + bytes(64) + good[at + 64:])
    if dies(asked) and (asked == "read" or not dies("read")):
        with open(folder + "/data.mdb", "r+b") as file:
            file.write(good[:at] + bytes(64) + good[at + 64:])
        break
else:
    sys.exit("no such place")
"""
OPENED = """
import sys
from pathlib import Path
from contextlib import closing
from kvtier_daemon.tiers.cold.index import Index
with closing(Index(Path(sys.argv[1]), 64 << 20)) as index:
    index.put(b"spaces", b"a", b"b")
    print(len(index.entries(b"segments")))
"""


def filled(folder: Path) -> None:
    with closing(Index(folder, 64 * MIB)) as index:
        for part in range(4):
            for number in range(part, 6000, 4):
                index.put(b"segments", struct.pack(">QI", number % 8, number), b"")
            assert flushed(index) == ""


@pytest.mark.parametrize("asked", ["read", "write"])
def test_an_index_whose_damage_kills_a_process_is_replaced(tmp_path: Path, asked: str) -> None:
    filled(tmp_path)
    zeroed = [sys.executable, "-c", ZEROED, str(tmp_path), asked]
    subprocess.run(zeroed, check=True, timeout=600)  # on a busy machine
    opened = subprocess.run(
        [sys.executable, "-c", OPENED, str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert opened.returncode == 0, opened.stderr[-300:]
    assert opened.stdout == "0\n"
    assert {path.name for path in tmp_path.iterdir()} == {"data.mdb", "lock.mdb"}, "nothing is left"
    with closing(Index(tmp_path, 64 * MIB)) as index:
        assert index.entries(b"spaces") == [(b"a", b"b")]


def test_keys_that_are_not_in_order_are_damage(tmp_path: Path) -> None:
    filled(tmp_path)
    data = tmp_path / "data.mdb"
    key = struct.pack(">QI", 3, 3003)
    assert key in data.read_bytes()
    data.write_bytes(data.read_bytes().replace(key, bytes(len(key))))
    with closing(Index(tmp_path, 64 * MIB)) as index:
        assert index.entries(b"segments") == []


def unreadable(_fd: int, _nbytes: int) -> bytes:
    raise OSError(errno.EIO, "EIO")


def killed(_folder: Path, _map_bytes: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def hanging(_folder: Path, _map_bytes: int) -> int:
    time.sleep(600)
    return 0


@pytest.mark.parametrize(
    "where, what, says",
    [
        ("os.read", unreadable, "Input/output error"),
        ("_check_result", killed, "was ended"),
        ("_check_result", hanging, "is too slow"),
    ],
)
def test_a_check_without_a_result_does_not_count_as_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, what: Callable[..., Any], says: str
) -> None:
    filled(tmp_path)
    children: list[int] = []
    fork = os.fork

    def forked() -> int:
        children.append(fork())
        return children[-1]

    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", forked)
        patch.setattr(index_module, "CHECK_S", 0.2 if what is hanging else 60)
        patch.setattr(f"kvtier_daemon.tiers.cold.index.{where}", what)
        with pytest.raises(TierError, match=says):
            Index(tmp_path, 64 * MIB)
    (child,) = children
    until = time.monotonic() + 60
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < until, "the process remains"
        time.sleep(0.01)
    with closing(Index(tmp_path, 64 * MIB)) as index:
        assert len(index.entries(b"segments")) == 6000
