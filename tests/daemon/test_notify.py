import logging
import os
import socket
import time

import pytest

from kvtier_daemon.notify import LogFormatter, Notifier, to_journal, watchdog_s


@pytest.fixture(params=["file", "abstract"])
def manager(request, tmp_path):
    """The service manager's socket: a path, or a name in the abstract namespace."""
    address = str(tmp_path / "notify")
    if request.param == "abstract":
        address = f"@kvtier-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(address.replace("@", "\0"))
        receiver.settimeout(60)
        yield receiver, {"NOTIFY_SOCKET": address}


def test_each_message_is_one_datagram(manager):
    receiver, environ = manager
    notifier = Notifier.from_environment(environ)
    for said, heard in [
        (lambda: notifier.ready("serving 64 GiB"), b"READY=1\nSTATUS=serving 64 GiB"),
        (lambda: notifier.ready(), b"READY=1"),
        (lambda: notifier.status("3 of 64 extents"), b"STATUS=3 of 64 extents"),
        (lambda: notifier.stopping(), b"STOPPING=1"),
        (lambda: notifier.alive(), b"WATCHDOG=1"),
        (lambda: notifier.extend_timeout(1.5), b"EXTEND_TIMEOUT_USEC=1500000"),
    ]:
        assert said() is True
        assert receiver.recv(4096) == heard


def test_a_status_cannot_smuggle_in_another_message(manager):
    receiver, environ = manager
    Notifier.from_environment(environ).status("a\nREADY=1\n")
    assert receiver.recv(4096) == b"STATUS=a READY=1"


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}])
def test_without_a_manager_no_message_is_sent(environ):
    assert Notifier.from_environment(environ).ready() is False


@pytest.mark.parametrize("address", ["/nonexistent/notify", "@kvtier-nobody", "/" + "x" * 200])
def test_a_manager_that_ended_is_not_an_error(address):
    assert Notifier(address).ready("x") is False


def test_a_manager_that_does_not_read_does_not_block_the_daemon(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier_daemon.notify.PATIENCE_S", 0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "n"))
        notifier = Notifier(str(tmp_path / "n"))
        assert notifier.ready() is True
        assert any(not notifier.status("busy") for _ in range(10_000))
        assert not notifier.stopping()
        monkeypatch.setattr("kvtier_daemon.notify.PATIENCE_S", 30.0)
        began = time.monotonic()
        assert not notifier.status("busy") and not notifier.alive()
        assert time.monotonic() < began + 30, "clients waited for it"


def test_the_default_environment_is_that_of_the_process(monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert Notifier.from_environment().ready() is False


def test_a_reload_message_contains_its_time(manager):
    receiver, environ = manager
    before = time.monotonic_ns() // 1000
    assert Notifier.from_environment(environ).reloading() is True
    said = dict(line.split(b"=") for line in receiver.recv(4096).splitlines())
    assert said[b"RELOADING"] == b"1"
    assert before <= int(said[b"MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000


def test_the_watchdog_interval_applies_only_to_the_named_process():
    assert watchdog_s({}) == watchdog_s({"WATCHDOG_USEC": "soon"}) == 0
    assert watchdog_s({"WATCHDOG_USEC": "2500000"}) == 2.5
    assert watchdog_s({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": str(os.getpid())}) == 2.5
    assert watchdog_s({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "1"}) == 0


def test_a_line_for_the_journal_has_a_priority_and_no_time_of_its_own(tmp_path):
    def line(level, journal, text="it is so"):
        record = logging.LogRecord("kvtier_daemon.app", level, "", 0, text, None, None)
        return LogFormatter(journal).format(record)

    for level, priority in (
        (logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6),
        (logging.DEBUG, 7),
    ):  # fmt: skip
        assert line(level, True) == f"<{priority}>kvtier_daemon.app: it is so"
    assert line(logging.ERROR, True, "one\ntwo") == "<3>kvtier_daemon.app: one\n<3>two"
    assert line(logging.ERROR, False).endswith(" ERROR kvtier_daemon.app: it is so")


def test_only_the_stream_of_the_journal_is_recognized(tmp_path):
    with open(tmp_path / "log", "w") as file, open(tmp_path / "other", "w") as other:
        found = os.fstat(file.fileno())
        environ = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        assert to_journal(file.fileno(), environ)
        assert not to_journal(other.fileno(), environ), "stderr was redirected to a file"
        assert not to_journal(file.fileno(), {})
