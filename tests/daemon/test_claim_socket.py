import contextlib
import fcntl
import os
import socket
import stat
import subprocess
import sys
import threading

import pytest

from kvtier.errors import ConfigError
from kvtier_daemon.claim import claim_socket, inherited_fds, inherited_socket, release_socket


@pytest.fixture
def path(tmp_path):
    return tmp_path / "k.sock"


@pytest.fixture
def claim(path):
    """Claim the socket. Sockets that the test leaves open are closed at its end."""
    claimed = []

    def claim(mode=0o660, group=None, **owned):
        claimed.append(claim_socket(path, mode, group, **owned))
        return claimed[-1]

    yield claim
    for listener in claimed:
        listener.close()


@contextlib.contextmanager
def other_daemon(path):
    """Run a process that has claimed the socket until its standard input ends."""
    program = (
        "import pathlib, sys; from kvtier_daemon.claim import claim_socket;"
        "listener = claim_socket(pathlib.Path(sys.argv[1]), 0o600, None);"
        "print('ready', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        yield child
        child.stdin.close()


def answers(path):
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
        return True


def test_a_claimed_socket_listens_and_never_blocks(claim, path):
    listener = claim()
    assert answers(path)
    assert listener.getblocking() is False
    assert os.get_inheritable(listener.fileno()) is False
    assert listener.accept()[0].close() is None
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
@pytest.mark.parametrize("mode", [0o660, 0o600, 0o666])
def test_the_mode_is_exact_whatever_the_umask(claim, path, umask, mode):
    path.with_name("k.sock.lock").touch(mode=0o600)
    before = os.umask(umask)
    try:
        claim(mode)
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_the_socket_is_never_open_to_more_than_its_owner_before_its_mode_is_set(
    claim, path, monkeypatch
):
    seen = []
    real = os.chmod

    def spy(target, mode, **kind):
        seen.append((stat.S_IMODE(target.stat().st_mode), answers(target)))
        real(target, mode, **kind)

    monkeypatch.setattr(os, "chmod", spy)
    before = os.umask(0)
    try:
        claim(0o666)
    finally:
        os.umask(before)
    assert seen == [(0o600, False)]


def test_the_socket_gets_the_group(claim, path):
    group = max(os.getgroups() or [os.getgid()])
    claim(group=group)
    assert path.stat().st_gid == group


@pytest.mark.skipif(os.geteuid() == 0, reason="root may give to any group")
def test_a_forbidden_group_is_an_error_and_leaves_no_socket(claim, path):
    with pytest.raises(ConfigError, match="socket_group: uid"):
        claim(group=54321)
    assert not path.exists()


def test_a_live_daemon_is_refused_with_its_pid(claim, path):
    claim()
    with pytest.raises(ConfigError) as caught:
        claim()
    assert f"taken by process {os.getpid()} (" in str(caught.value)
    assert answers(path)


def test_a_live_daemon_that_hangs_is_refused_too(claim, path):
    with socket.socket(socket.AF_UNIX) as hung, socket.socket(socket.AF_UNIX) as waiting:
        hung.bind(str(path))
        hung.listen(0)
        waiting.connect(str(path))  # the backlog is full after this
        with pytest.raises(ConfigError, match="taken by a live process"):
            claim()
    assert path.exists()


def test_a_live_socket_of_another_kind_is_refused(claim, path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(ConfigError, match="taken by a live process"):
            claim()


def test_a_dead_daemons_socket_is_taken_over(claim, path):
    claim().close()
    assert path.exists()
    assert not answers(path)
    claim()
    assert answers(path)


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_a_file_that_is_not_a_socket_is_refused_and_kept(claim, path, tmp_path, kind):
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="a file that is not a socket exists there"):
        claim()
    assert path.is_symlink() or path.exists()


def test_a_missing_directory_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="No such file or directory"):
        claim_socket(tmp_path / "absent" / "k.sock", 0o660, None)


def test_a_path_that_is_too_long_is_an_error_and_leaves_nothing_open(tmp_path):
    with pytest.raises(ConfigError, match="too long"):
        claim_socket(tmp_path / ("x" * 120), 0o660, None)


def test_waiting_for_the_lock_has_a_time_limit(claim, path):
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    with path.with_name("k.sock.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"k\.sock\.lock is held by another process"):
            claim(clock=lambda: now[0], sleep=sleep)
    assert 3 < now[0] < 4


def test_the_lock_is_waited_for(claim, path):
    lock = path.with_name("k.sock.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    claim(sleep=lambda seconds: lock.close())
    assert answers(path)


def test_a_removed_lock_file_is_created_again(claim, path, monkeypatch):
    real = fcntl.flock
    removed = []

    def flock(descriptor, operation):
        real(descriptor, operation)
        if not removed:
            removed.append(path.with_name("k.sock.lock").unlink())

    monkeypatch.setattr(fcntl, "flock", flock)
    claim()
    assert removed
    assert path.with_name("k.sock.lock").exists()


def test_a_link_in_place_of_the_lock_is_refused(claim, path, tmp_path):
    path.with_name("k.sock.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match="cannot open"):
        claim()
    assert not (tmp_path / "victim").exists()


def test_a_released_socket_leaves_no_path(claim, path):
    release_socket(claim())
    assert not path.exists()
    claim()


def test_a_release_leaves_the_path_of_another_alone(claim, path):
    mine = claim()
    path.unlink()  # an administrator removed it, and another daemon started
    with other_daemon(path):
        release_socket(mine)
        assert answers(path)


def test_one_of_many_simultaneous_starts_wins(path):
    claim_socket(path, 0o600, None).close()  # the socket of a dead daemon is in the way
    together = threading.Barrier(8)
    won, lost = [], []

    def start():
        together.wait()
        try:
            won.append(claim_socket(path, 0o600, None))
        except ConfigError as error:
            lost.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    assert all("taken by process" in reason for reason in lost)
    assert answers(path)
    won[0].close()


def test_the_socket_of_a_killed_daemon_is_taken_over(claim, path):
    with other_daemon(path) as other:
        with pytest.raises(ConfigError, match=f"taken by process {other.pid} "):
            claim()
        other.kill()
        other.wait()
        claim()
        assert answers(path)


def handed_over(count=1, pid=None):
    return {"LISTEN_PID": str(pid or os.getpid()), "LISTEN_FDS": str(count), "LISTEN_FDNAMES": "x"}


def test_a_socket_of_the_service_manager_is_used_and_not_removed(path):
    with socket.socket(socket.AF_UNIX) as manager:
        manager.bind(str(path))
        manager.listen()
        environ = handed_over()
        first = os.dup(manager.fileno())
        os.set_inheritable(first, True)
        listener = inherited_socket(path, inherited_fds(environ, first)[0])
        assert environ == {}, "no child is to think that it is meant"
        assert listener.getblocking() is False
        assert os.get_inheritable(listener.fileno()) is False
        assert answers(path)
        listener.close()
        assert answers(path)


def test_a_release_does_not_connect_to_the_socket_of_the_service_manager(path):
    with socket.socket(socket.AF_UNIX) as manager:
        manager.bind(str(path))
        manager.listen()
        child = os.fork()
        if child == 0:
            release_socket(manager)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):  # a connection would start the service again
            manager.accept()
        assert path.exists()


@pytest.mark.parametrize("environ", [{}, handed_over(pid=1), handed_over(count=0)])
def test_descriptors_for_another_process_are_not_used(path, environ):
    assert inherited_fds(environ, 0) == ([], {})
    assert inherited_socket(path, []) is None


def test_a_socket_elsewhere_or_of_another_kind_is_refused(path, tmp_path):
    with socket.socket(socket.AF_UNIX) as elsewhere, socket.socket() as network:
        elsewhere.bind(str(tmp_path / "other"))
        elsewhere.listen()
        network.listen()
        for one, what in ((elsewhere, "listens at"), (network, "expected a listening")):
            with pytest.raises(ConfigError, match=what):
                inherited_socket(path, [os.dup(one.fileno())])
        with pytest.raises(ConfigError, match="2 sockets"):
            inherited_socket(path, [0, 1])


def test_stored_descriptors_are_told_from_sockets_by_their_names():
    first, *_ = fds = [fcntl.fcntl(0, fcntl.F_DUPFD, 200) for _ in range(3)]
    assert fds == list(range(first, first + 3))
    environ = handed_over(count=3) | {
        "LISTEN_FDNAMES": "kvtierd.socket:kvtier-manifest:kvtier-1-data"
    }
    sockets, stored = inherited_fds(environ, first)
    assert sockets == [first] and stored == {
        "kvtier-manifest": first + 1,
        "kvtier-1-data": first + 2,
    }
    assert not any(map(os.get_inheritable, stored.values())) and environ == {}
    for fd in fds:
        os.close(fd)
