"""The index in its own process: if that process ends, no change is lost, and no pending flush succeeds."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import TierError
from kvtier_daemon.claim import InUseError
from kvtier_daemon.config.current import CurrentConfig
from kvtier_daemon.config.schema import load
from kvtier_daemon.notify import Notifier
from kvtier_daemon.tiers import child_process
from kvtier_daemon.tiers.cold import index_process, lifecycle
from kvtier_daemon.tiers.cold.directory import ColdDirectory
from kvtier_daemon.tiers.cold.index_child import ROWS, WriteIndex
from kvtier_daemon.tiers.cold.index_process import Child, IndexProcess
from kvtier_daemon.tiers.cold.lifecycle import DirectoryOpener
from kvtier_daemon.tiers.tier_keys import TierKeys

SIZE = 64 << 20


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a daemon starts it, not forked."""
    monkeypatch.setattr(index_process, "start_child", child_process.start_child)


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


def test_stored_records_are_found_after_reopening(tmp_path: Path) -> None:
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
    assert not Path(f"/proc/{process}").exists(), "its process remains"
    with pytest.raises(InUseError) as told, closing(ColdDirectory(tmp_path, SIZE).index) as kept:
        keys = [key for key, _ in kept.entries(b"segments")]
        assert len(keys) == 9_999 and b"000003" not in keys and keys == sorted(keys)
        assert kept.entries(b"spaces") == [(b"a", b"second")]
        ColdDirectory(tmp_path, SIZE, Child())
    assert told.value.holder == os.getpid()


@pytest.mark.parametrize("count", [0, ROWS - 1, ROWS, 2 * ROWS])
def test_a_table_of_any_size_is_read_to_its_end(volume: ColdDirectory, count: int) -> None:
    """It arrives in messages of so many entries; the last message has fewer."""
    index, found = index_of(volume), []
    for number in range(count):
        index.put(b"segments", b"%06d" % number, b"")
    assert flushed(index) == ""
    reading = threading.Thread(target=lambda: found.append(index.entries(b"segments")), daemon=True)
    reading.start()
    reading.join(20)
    assert [len(entries) for entries in found] == [count], "the end did not arrive"


def test_the_end_of_its_process_fails_the_flush_and_loses_no_change(volume: ColdDirectory) -> None:
    """A SIGBUS kills it in this way if the disk fails under a mapped page."""
    index = index_of(volume)
    index.put(b"segments", b"a", b"")
    assert flushed(index) == ""
    os.kill(pid_of(index), signal.SIGBUS)
    index.put(b"segments", b"b", b"")
    assert "SIGBUS" in flushed(index)
    until(lambda: not flushed(index))
    assert index.entries(b"segments") == [(b"a", b""), (b"b", b"")]


def test_a_process_that_hangs_does_not_delay_the_close(tmp_path: Path) -> None:
    volume = ColdDirectory(tmp_path, SIZE, Child())
    index = index_of(volume)
    os.kill(pid_of(index), signal.SIGSTOP)
    index.put(b"segments", b"a", b"")
    # The process is stopped until it is killed, so a close that waits for it would not return.
    assert not volume.close(0.05), "it did not write the pending changes"
    assert volume.unwritten == {(b"segments", b"a"): b""}
    again = ColdDirectory(tmp_path, SIZE, Child(), unwritten=volume.unwritten)
    assert flushed(index_of(again)) == ""
    assert again.index.entries(b"segments") == [(b"a", b"")]
    assert again.close()


def test_opening_an_index_in_a_directory_that_hangs_can_be_abandoned(
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


def test_a_directory_whose_disk_is_not_mounted_is_not_written_to(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    assert ColdDirectory(tmp_path, SIZE, Child(), device).close()
    (tmp_path / "kvtier.lock").unlink()
    with pytest.raises(TierError, match="mount the disk"):
        ColdDirectory(tmp_path, SIZE, Child(), device + 1)
    assert not (tmp_path / "kvtier.lock").exists()


def test_a_restarted_process_that_hangs_is_killed_and_its_thread_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remaining thread would write to a descriptor number that meanwhile belongs to another file."""
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


def test_a_failed_restart_of_the_process_fails_the_flush_and_is_retried(
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
    """Otherwise it keeps the lock of the directory, and no other daemon can use that directory."""
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


def test_a_start_says_which_directory_is_still_being_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lifecycle, "OPEN_S", 0.0)
    flags = {"warm.size": "8MiB", "cold.directories": str(tmp_path), "cold.size": "1GiB"}
    loaded = load(None, flags, environ={})
    settings = CurrentConfig(loaded, Notifier(None), lambda _: None, lambda: None)
    opener = DirectoryOpener(settings, TierKeys("cold", settings, ()))
    tmp_path.chmod(0o700)

    async def work() -> None:
        directories, missing = await opener.open_all([tmp_path], is_start=True)
        assert not directories and "is still being opened" in missing[tmp_path]
        directory = await opener.open(tmp_path)
        assert directory is not None
        directory.close()

    asyncio.run(work())
    assert f"cold: {tmp_path}: is still being opened" in caplog.text
    assert "serving without it until then" in caplog.text


def test_a_stop_while_a_directory_opens_logs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that opens it ends in the last iteration of the event loop."""
    asked, over = threading.Event(), threading.Event()
    ask, end = Child.ask, Child.end

    def hangs(child: Child, *request: Any) -> Any:
        os.kill(child.pid, signal.SIGSTOP)
        asked.set()
        return ask(child, *request)

    def ends_late(child: Child) -> str:
        assert over.wait(60)
        return end(child)

    monkeypatch.setattr(Child, "ask", hangs)
    monkeypatch.setattr(Child, "end", ends_late)
    flags = {"warm.size": "8MiB", "cold.directories": str(tmp_path), "cold.size": "1GiB"}
    loaded = load(None, flags, environ={})
    settings = CurrentConfig(loaded, Notifier(None), lambda _: None, lambda: None)
    opener = DirectoryOpener(settings, TierKeys("cold", settings, ()))

    async def stopped() -> None:
        opening = asyncio.create_task(opener.open_all([tmp_path], is_start=True))
        assert await asyncio.to_thread(asked.wait, 60)
        opener.cancel()
        opening.cancel()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})

    with closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(stopped())
        over.set()
        opener._threads.shutdown()
        loop.call_soon(loop.stop)
        loop.run_forever()
    gc.collect()
    assert caplog.text == ""
