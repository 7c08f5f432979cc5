"""The index in a process of its own: where that process ends, nothing that was put is lost, and no flush
succeeds."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.errors import TierError
from kvtier_daemon.claim import InUseError
from kvtier_daemon.tiers.cold import index_process
from kvtier_daemon.tiers.cold.directory import ColdDirectory
from kvtier_daemon.tiers.cold.index_child import WriteIndex
from kvtier_daemon.tiers.cold.index_process import Child, IndexProcess

SIZE = 64 << 20


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[ColdDirectory]:
    one = ColdDirectory(tmp_path, SIZE, Child())
    yield one
    one.close(0)


def index_of(volume: ColdDirectory) -> IndexProcess:
    assert isinstance(volume.index, IndexProcess)
    return volume.index


def flushed(index: IndexProcess, token: int = 7) -> str:
    index.flush(token)
    assert select.select([index.event_fd], [], [], 20)[0]
    ((found, failure),) = list(index.done())
    assert found == token
    return failure


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def pid_of(index: IndexProcess) -> int:
    assert index._child is not None
    return index._child.pid


def test_what_was_put_is_there_again(tmp_path: Path) -> None:
    volume = ColdDirectory(tmp_path, SIZE, Child())
    index = index_of(volume)
    for number in range(10_000):
        index.put(b"segments", b"%06d" % number, b"")
    index.put(b"spaces", b"a", b"first")
    index.drop(b"segments", b"000003")
    assert flushed(index) == ""
    index.put(b"spaces", b"a", b"second")
    process = pid_of(index)
    assert volume.close()
    assert not Path(f"/proc/{process}").exists(), "its process is left behind"
    with pytest.raises(InUseError) as told, closing(ColdDirectory(tmp_path, SIZE).index) as kept:
        keys = [key for key, _ in kept.entries(b"segments")]
        assert len(keys) == 9_999 and b"000003" not in keys and keys == sorted(keys)
        assert kept.entries(b"spaces") == [(b"a", b"second")]
        ColdDirectory(tmp_path, SIZE, Child())
    assert told.value.holder == os.getpid()


def test_the_end_of_its_process_fails_a_flush_and_loses_nothing(volume: ColdDirectory) -> None:
    """As a read or a write of a mapped page ends it, where the disk fails."""
    index = index_of(volume)
    index.put(b"segments", b"a", b"")
    assert flushed(index) == ""
    os.kill(pid_of(index), signal.SIGBUS)
    index.put(b"segments", b"b", b"")
    assert "SIGBUS" in flushed(index)
    until(lambda: not flushed(index))
    assert index.entries(b"segments") == [(b"a", b""), (b"b", b"")]


def test_a_process_that_hangs_holds_up_no_end(tmp_path: Path) -> None:
    volume = ColdDirectory(tmp_path, SIZE, Child())
    index = index_of(volume)
    os.kill(pid_of(index), signal.SIGSTOP)
    index.put(b"segments", b"a", b"")
    # The process is stopped until it is killed, so a close that waited for it would not return.
    assert not volume.close(0.05), "it did not write what was left"
    assert volume.unwritten == {(b"segments", b"a"): b""}
    again = ColdDirectory(tmp_path, SIZE, Child(), unwritten=volume.unwritten)
    assert flushed(index_of(again)) == ""
    assert again.index.entries(b"segments") == [(b"a", b"")]
    assert again.close()


def test_a_directory_that_hangs_can_be_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_process, "COMMAND", ("sh", "-c", "exec sleep 600"))
    child = Child()
    ended: list[str] = []

    def opens() -> None:
        with pytest.raises(TierError) as told:
            ColdDirectory(tmp_path, SIZE, child)
        ended.append(str(told.value))

    thread = threading.Thread(target=opens)
    thread.start()
    child.kill()
    thread.join(60)
    assert ended and str(tmp_path) in ended[0]
    assert not (tmp_path / "index").exists()


def test_a_place_whose_disk_is_not_mounted_is_not_written_to(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    assert ColdDirectory(tmp_path, SIZE, Child(), device).close()
    (tmp_path / "kvtier.lock").unlink()
    with pytest.raises(TierError, match="mount the disk"):
        ColdDirectory(tmp_path, SIZE, Child(), device + 1)
    assert not (tmp_path / "kvtier.lock").exists()


def test_a_process_that_hangs_when_it_is_begun_again_is_ended_with_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that is left would write to the number of a descriptor that is another file's by then."""
    volume = ColdDirectory(tmp_path, SIZE, Child())
    index = index_of(volume)
    monkeypatch.setattr(index_process, "COMMAND", ("sh", "-c", "exec sleep 600"))
    begun: list[Child] = []
    make = Child.__init__

    def note(self: Child) -> None:
        make(self)
        begun.append(self)

    monkeypatch.setattr(Child, "__init__", note)
    os.kill(pid_of(index), signal.SIGKILL)
    index.put(b"spaces", b"a", b"")
    until(lambda: bool(begun))
    assert not volume.close(0.05)
    index._thread.join(60)
    assert not index._thread.is_alive()
    assert begun[0]._process.wait(60) == -signal.SIGKILL


def test_no_process_for_an_index_fails_a_flush_and_is_tried_again(
    volume: ColdDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = index_of(volume)
    with monkeypatch.context() as patch:
        patch.setattr(index_process, "COMMAND", ("/no/such/program",))
        os.kill(pid_of(index), signal.SIGKILL)
        index.put(b"spaces", b"a", b"1")
        until(lambda: "cannot start its process" in flushed(index))
    until(lambda: not flushed(index))
    assert index.entries(b"spaces") == [(b"a", b"1")]


def test_its_process_takes_no_module_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk").mkdir()
    assert ColdDirectory(tmp_path / "disk", SIZE, Child()).close()


def test_its_process_ends_with_the_daemon_though_a_write_never_does(tmp_path: Path) -> None:
    """Else it keeps the lock of the directory, and no other daemon can use that."""
    volume = ColdDirectory(tmp_path, SIZE, Child())
    child = index_of(volume)._child
    assert child is not None

    def asks() -> None:
        with contextlib.suppress(EOFError):
            child.ask(WriteIndex([(b"no such table", b"a", b"")]))  # ends the thread that writes

    asking = threading.Thread(target=asks)
    asking.start()
    until(lambda: len(os.listdir(f"/proc/{child.pid}/task")) == 1)
    child._channel.shut()
    asking.join(60)
    assert child._process.wait(60) == 0
    volume.close(0)
