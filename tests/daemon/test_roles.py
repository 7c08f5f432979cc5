"""What each role allows, with real users: a reader finds and loads blocks, and cannot change anything, not
even by reopening the memory that it was given."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvtier import wire
from support.daemons import Daemon, server
from support.raw import Raw
from support.specs import pattern, spec_of

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root to be several users")

READER, WRITER, OWNER, STRANGER, GROUP = 20_001, 20_002, 20_003, 20_004, 30_001
CONFIG = f"""
socket_mode = "0666"
[warm]
size = "32MiB"
extent = "8MiB"
[tenants.team]
uids = [{OWNER}, 0]
writers = [{WRITER}]
readers = [{READER}, "@{GROUP}"]
"""
# Runs as another user: executes the code it gets, which prints the result.
OTHER = """
import ctypes, fcntl, mmap, os, socket, sys
path, packages, uid, groups, code = sys.argv[1:6]
sys.path[:0] = packages.split(":")
import kvtier_kernels, kvtier
from kvtier import Client, KvtierError, wire
from support.raw import Raw
from support.specs import pattern, spec_of
os.setgroups([int(one) for one in groups.split()]); os.setgid(65534); os.setuid(int(uid))
spec = spec_of("roles")

def outcome(act):
    try:
        return act()
    except KvtierError as error:
        return error.code
    except OSError as error:
        return "refused"

exec(code)
"""


def as_user(daemon: Daemon, uid: int, code: str, groups: str = "") -> str:
    words = [daemon.socket, ":".join(sys.path), str(uid), groups, code]
    done = server().run(words, program=OTHER)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def daemon(open_folder: Path, daemon_of: Callable[..., Daemon]) -> Daemon:
    """A daemon with eight blocks of the tenant."""
    daemon = daemon_of(folder=open_folder, config=CONFIG)
    with daemon.connect() as client:
        space = client.open(spec_of("roles"))
        keys = space.keys(list(range(16 * 8)))
        assert space.save(keys, [pattern(key, space.spec.block_bytes) for key in keys]).stored == 8
    return daemon


EACH = """
client = Client.connect(path, populate=False)
space = client.open(spec)
keys, new = space.keys(list(range(16 * 8))), space.keys(list(range(5000, 5016)))
with space.load(keys) as loaded:
    pairs = zip(keys, loaded, strict=True)
    right = all(bytes(block) == pattern(key, spec.block_bytes) for key, block in pairs)
class Daemon:
    socket = path
raw = Raw(Daemon)
number = raw.ask(wire.Open(2, spec)).space
def ask(message):
    reply = raw.ask(message)
    return getattr(reply, "code", "") or type(reply).__name__
print(
    right, len(loaded), client.stats()["tenants"]["team"]["blocks"], len(client.explain()["lookups"]) > 0,
    ask(wire.Spaces(3)), ask(wire.List(4, "", number)), ask(wire.Prefetch(5, number, keys.packed)),
)
print(
    outcome(lambda: space.save(new, bytes(spec.block_bytes)).stored), outcome(lambda: space.pin(keys)),
    outcome(lambda: space.unpin(keys)), outcome(lambda: space.hint(keys, 0.5)),
    outcome(lambda: space.forget(new)),
)
print(
    ask(wire.Purge(6, "", -1)), ask(wire.Purge(7, "", number)), ask(wire.Settings(8)),
    ask(wire.Tier(9, "warm")),
)
print(space.match(keys).ready)
"""
FINDS = "True 8 8 True Report Listed Matched"
OPERATES = "no_tenant no_tenant"


@pytest.mark.parametrize(
    ("uid", "groups", "changes", "purges"),
    [
        (READER, "", "read_only " * 4 + "read_only", "read_only read_only"),
        (STRANGER, f"7 {GROUP} 8", "read_only " * 4 + "read_only", "read_only read_only"),
        (WRITER, "", "1 8 8 8 1", "not_admin not_admin"),
        (WRITER, str(GROUP), "1 8 8 8 1", "not_admin not_admin"),
        (OWNER, "", "1 8 8 8 1", "Purged Purged"),
    ],
)
def test_each_role_may_do_what_the_table_in_the_documents_says(
    daemon: Daemon, uid: int, groups: str, changes: str, purges: str
) -> None:
    left = 0 if uid == OWNER else 8
    expected = [FINDS, changes, f"{purges} {OPERATES}", str(left)]
    assert as_user(daemon, uid, EACH, groups).splitlines() == expected


def test_a_reader_cannot_make_the_memory_that_it_was_given_writable(daemon: Daemon) -> None:
    code = """
sock = socket.socket(socket.AF_UNIX); sock.connect(path)
sock.sendall(wire.encode(wire.Hello(1, wire.SCHEMA, "raw")))
fds = []
while len(fds) < 2:
    data, more, _, _ = socket.recv_fds(sock, 1 << 16, 16); fds += more
extent = fds[0]
pid = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], "little")
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
number = ctypes.c_int
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
at = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, extent, 0)
assert at != ctypes.c_void_p(-1).value, "it can be read"
assert any(ctypes.string_at(at, 4096))

def checked(result):
    if result:
        raise OSError(ctypes.get_errno(), "")

attempts = {
    "mmap": lambda: mmap.mmap(extent, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE),
    "mprotect": lambda: checked(libc.mprotect(at, 4096, mmap.PROT_READ | mmap.PROT_WRITE)),
    "remove": lambda: checked(libc.madvise(at, 4096, 9)),
    "punch": lambda: checked(libc.fallocate(extent, 3, 0, 4096)),
    "write": lambda: os.pwrite(extent, b"x", 0),
    "truncate": lambda: os.ftruncate(extent, 0),
    "reopen": lambda: os.open(f"/proc/self/fd/{extent}", os.O_RDWR),
    "reopen to write": lambda: os.open(f"/dev/fd/{extent}", os.O_WRONLY),
    "of the thread": lambda: os.open(f"/proc/thread-self/fd/{extent}", os.O_RDWR),
    "of the daemon": lambda: os.listdir(f"/proc/{pid}/fd"),
    "mode": lambda: os.fchmod(extent, 0o777),
    "mode by path": lambda: os.chmod(f"/proc/self/fd/{extent}", 0o777),
    "owner": lambda: os.fchown(extent, os.getuid(), -1),
    "seal": lambda: fcntl.fcntl(extent, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    "lease": lambda: fcntl.fcntl(extent, fcntl.F_SETLEASE, fcntl.F_WRLCK),
    "flags": lambda: (
        fcntl.fcntl(extent, fcntl.F_SETFL, os.O_RDWR), os.pwrite(extent, b"x", 0),
    ),
}
print(sorted(name for name, attempt in attempts.items() if outcome(attempt) != "refused"))
"""
    assert as_user(daemon, READER, code) == "[]"
    with daemon.connect() as client:
        space = client.open(spec_of("roles"))
        keys = space.keys(list(range(16 * 8)))
        with space.load(keys) as loaded:
            for key, block in zip(keys, loaded, strict=True):
                assert bytes(block) == pattern(key, space.spec.block_bytes)
    # The same attempts by a writer, so that the test could fail.
    assert "'mmap'" in as_user(daemon, WRITER, code)


def test_a_reader_that_does_not_know_its_role_still_maps_the_memory(daemon: Daemon) -> None:
    """A client that asks for writable memory gets read-only memory, and the shared library maps that."""
    code = """
client = Client.connect(path, populate=True)
client.wait_ready()
print(client.link.arena.nbytes, client.tenant)
"""
    assert as_user(daemon, READER, code) == f"{32 << 20} team"
    raw = Raw(daemon)
    report = raw.ask(wire.Spaces(2, "", -1))
    assert isinstance(report, wire.Report)
    (own,) = msgspec.msgpack.decode(report.stats["clients"])
    assert (own["uid"], own["role"]) == (0, "admin")
    raw.sock.close()
