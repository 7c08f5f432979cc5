"""A reload that removes, moves or demotes a user: its sessions end, and what is saved afterwards lies in
memory that it has not mapped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier import Client
from support.daemons import Daemon, kvtier
from support.specs import pattern, spec_of

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root to be several users")

LEAVER, OTHER = 20_001, 20_002
CONFIG = """
socket_mode = "0666"
[warm]
keep_s = {keep_s}
size = "48MiB"
extent = "8MiB"
[tenants.a]
uids = [0]
{a}
quota = "32MiB"
[tenants.b]
uids = [{b}]
quota = "16MiB"
"""
COLD = """
[cold]
directories = ["{folder}"]
size = "256MiB"
segment = "1MiB"
scrub = "0"
"""
# Runs as the user that leaves: maps the memory, and looks at it or overwrites it when it is told to.
MAPS = """
import os, sys
sys.path[:0] = sys.argv[2].split(":")
import kvtier_kernels
from kvtier import Client, KvtierError
os.setgroups([]); os.setgid(65534); os.setuid(int(sys.argv[3]))
client = Client.connect(sys.argv[1], populate=True)
client.wait_ready()
tenant = client.tenant
kept = [extent for extent in client.link.arena.extents if extent is not None]
print("mapped", len(kept), flush=True)
for line in sys.stdin:
    order, _, rest = line.strip().partition(" ")
    if order == "look":
        print(sum(bytes.fromhex(rest) in bytes(memoryview(one)) for one in kept), flush=True)
    elif order == "overwrite":
        for one in kept:
            view = memoryview(one)
            for at in range(0, len(view), 4096):
                view[at : at + 4096] = b"\\xee" * 4096
        print("done", flush=True)
    elif order == "ping":
        try:
            client.ping()
            print("alive", flush=True)
        except KvtierError as error:
            print(error, flush=True)
    elif order == "connect":
        try:
            print(Client.connect(sys.argv[1], populate=False).tenant, flush=True)
        except KvtierError as error:
            print(error, flush=True)
"""


class Leaver:
    """The process of a user that has mapped the memory of a tenant."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, order: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    @property
    def said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def leaver(daemon: Daemon, extents: int = 4) -> Iterator[Leaver]:
    command = [sys.executable, "-c", MAPS, daemon.socket, ":".join(sys.path), str(LEAVER)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            who = Leaver(process)
            assert who.said == f"mapped {extents}"
            yield who
        finally:
            process.kill()


def rewrite(daemon: Daemon, cold: str = "", keep_s: int = 0, **values: Any) -> None:
    """Change the configuration, and reload it."""
    folder = daemon.log.parent
    head = f'socket = "{folder}/kvtier.sock"\nstate = "{folder}/state"\n'
    (folder / "kvtier.toml").write_text(head + CONFIG.format(keep_s=keep_s, **values) + cold)
    done = kvtier("reload", "--socket", daemon.socket)
    assert done.returncode == 0 and "restart" not in done.stdout, done.stdout + done.stderr


def save(client: Client, first: int, blocks: int = 8) -> tuple[Any, Any, list[bytes]]:
    space = client.open(spec_of("leaving"))
    keys = space.keys(list(range(first, first + 16 * blocks)))
    contents = [pattern(key, space.spec.block_bytes) for key in keys]
    assert space.save(keys, contents).stored == blocks
    return space, keys, contents


def check(space: Any, keys: Any, contents: list[bytes]) -> int:
    """How many blocks are loaded; all of them must be right."""
    with space.load(keys) as loaded:
        blocks = [bytes(block) for block in loaded]
    assert blocks == contents[: len(blocks)]
    return len(blocks)


def arena_bytes(daemon: Daemon) -> int:
    """The allocated memory of the daemon's extents, without their tables and notes."""
    folder, sizes = Path(f"/proc/{daemon.process.pid}/fd"), {}
    for name in os.listdir(folder):
        try:
            target, found = os.readlink(folder / name), (folder / name).stat()
        except FileNotFoundError:
            continue
        if re.search(r"memfd:kvtier-[ab]-\d+ ", target):
            sizes[found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


def renewed(daemon: Daemon) -> None:
    """Wait until the memory is complete again, and is not more than before."""
    daemon.wait_for(lambda stats: "freed" in daemon.log.read_text())
    daemon.wait_for(lambda stats: daemon.log.read_text().count("warm: freed") == 4)
    daemon.wait_for_arena()
    assert arena_bytes(daemon) == 48 << 20


@pytest.mark.parametrize(
    ("a", "b", "connects"),
    [
        ("", OTHER, f"no tenant is configured for uid {LEAVER}"),
        ("", f"{OTHER}, {LEAVER}", "b"),
        (f"readers = [{LEAVER}]", OTHER, "a"),
    ],
    ids=["removed", "moved", "may only read"],
)
def test_a_user_that_leaves_neither_sees_nor_changes_what_is_saved_afterwards(
    open_folder: Path, daemon_of: Callable[..., Daemon], a: str, b: object, connects: str
) -> None:
    config = CONFIG.format(keep_s=0, a=f"writers = [{LEAVER}]", b=OTHER)
    daemon = daemon_of(folder=open_folder, config=config)
    with daemon.connect() as client, leaver(daemon) as who:
        *_, contents = save(client, 0)
        assert int(who.ask(f"look {contents[0][:64].hex()}")) == 1, "the test can see what it maps"
        assert who.ask("ping") == "alive"
        rewrite(daemon, a=a, b=b)
        assert "the configuration has changed the tenant or the role" in who.ask("ping")
        assert connects in who.ask("connect")
        renewed(daemon)
        space, keys, contents = save(client, 10_000)
        assert client.ping() is None, "the session of the other user goes on"
        assert int(who.ask(f"look {contents[0][:64].hex()}")) == 0
        assert who.ask("overwrite") == "done"
        assert check(space, keys, contents) == 8
        # A client that connects later does not get the old extents.
        with daemon.connect() as later:
            later.wait_ready()
            assert later.link.arena.nbytes == 32 << 20
            assert check(later.open(spec_of("leaving")), keys, contents) == 8
        # All of the memory can be used.
        many = space.keys(list(range(50_000, 50_000 + 16 * 500)))
        space.save(many, bytes(500 * space.spec.block_bytes))
        assert check(space, many, [bytes(space.spec.block_bytes)] * 500) > 0


def test_blocks_from_before_are_on_disk_and_leases_hold_theirs_until_they_end(
    open_folder: Path, daemon_of: Callable[..., Daemon]
) -> None:
    disk = open_folder / "disk"
    disk.mkdir()
    cold = COLD.format(folder=disk)
    config = CONFIG.format(keep_s=0, a=f"writers = [{LEAVER}]", b=OTHER)
    daemon = daemon_of(folder=open_folder, config=config + cold)
    daemon.wait_for_disks()
    with daemon.connect() as client, leaver(daemon) as who:
        earlier = save(client, 0)
        space, keys, contents = save(client, 5_000)
        with space.load(keys, deadline_ms=600_000) as held:
            rewrite(daemon, cold, a="", b=OTHER)
            daemon.wait_for(lambda stats: daemon.log.read_text().count("warm: freed") == 3)
            while space.match(keys).ready:  # until the blocks that are only in memory are written
                time.sleep(0.01)
            assert [bytes(block) for block in held] == contents
            del held
            assert daemon.log.read_text().count("warm: freed") == 3, "the lease keeps its extent"
        renewed(daemon)
        assert who.ask("overwrite") == "done"
        loaded = 0
        while loaded < 8:  # from the disk
            loaded = check(*earlier)
        assert check(*save(client, 10_000)) == 8
        cold_tier = daemon.stats()["tiers"]["cold"]
        assert cold_tier["states"]["read"] >= 8 and not cold_tier["states"]["spoilt"]


def test_a_reload_that_lets_users_join_or_gain_rights_keeps_the_memory(
    open_folder: Path, daemon_of: Callable[..., Daemon]
) -> None:
    daemon = daemon_of(
        folder=open_folder, config=CONFIG.format(keep_s=0, a=f"readers = [{LEAVER}]", b=OTHER)
    )
    with daemon.connect() as client, leaver(daemon) as who:
        space, keys, contents = save(client, 0)
        rewrite(daemon, a=f'writers = [{LEAVER}]\nreaders = ["@30000"]', b=OTHER)
        assert "connect again" in who.ask("ping"), (
            "it gets writable memory with its next connection"
        )
        assert who.ask("connect") == "a"
        assert check(space, keys, contents) == 8
        assert "are replaced" not in daemon.log.read_text()


def test_a_restart_takes_over_only_the_memory_that_the_user_has_not_mapped(
    open_folder: Path, daemon_of: Callable[..., Daemon]
) -> None:
    before = CONFIG.format(keep_s=60, a=f"writers = [{LEAVER}]", b=OTHER)
    daemon = daemon_of(folder=open_folder, config=before)
    with leaver(daemon) as who:
        with daemon.connect() as client:
            save(client, 0)
            rewrite(daemon, keep_s=60, a="", b=OTHER)
            renewed(daemon)
            _, keys, contents = save(client, 10_000)
        daemon.stop()
        after = CONFIG.format(keep_s=60, a="", b=OTHER)
        daemon = daemon_of(folder=open_folder, config=after)
        assert who.ask("overwrite") == "done"
        with daemon.connect() as client:
            assert client.link.arena.nbytes == 32 << 20
            assert check(client.open(spec_of("leaving")), keys, contents) == 8
        daemon.process.send_signal(signal.SIGINT)  # its memory ends with it
        daemon.process.wait(60)
