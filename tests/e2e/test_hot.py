"""Copies of blocks in the memory of a GPU, through a real daemon: who gets slots, and what happens to them
when a holder, an engine or the daemon ends. The memory is the host's, because the daemon never looks into
it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier import Client, Refused, Space
from kvtier.errors import Unavailable
from kvtier.key import Keys
from kvtier.wire import LEAVING, SLOT, SLOT_BYTES
from kvtier_daemon.observing.metrics import SERIES, families
from kvtier_daemon.serving.writers import DEVICE_HOLD_S
from support.daemons import Daemon, kvtier, running
from support.host_holder import GPU, UNIT, HostMemory, held
from support.specs import pattern, spec_of

SPEC = spec_of("hot")
SIZE = SPEC.block_bytes
CONFIG = '[hot]\nsizes = ["default=1MiB"]\n'
HELD = 2 << 20
BLOCKS = 16  # of 64 KiB: fill the memory


@pytest.fixture
def daemon(daemon_of: Callable[..., Daemon]) -> Daemon:
    return daemon_of(config=CONFIG)


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Client]:
    with daemon.connect(engine="one") as client:
        yield client


def saved(space: Space, blocks: int, first: int = 0) -> tuple[Keys, bytes, list[bytes]]:
    """Save blocks; return their keys, their slots and their bytes."""
    keys = space.keys(list(range(first * 10_000, first * 10_000 + 16 * blocks)))
    content = [pattern(key, SIZE) for key in keys]
    with space.reserve(keys) as saving:
        for key, block in zip(keys, content, strict=True):
            saving[key][:] = block
    return keys, saving.slots, content


def copied(side: HostMemory, slots: bytes, content: list[bytes], again: bool = False) -> int:
    """Copy these blocks; return how many got a slot."""
    copies = side.hot.reserve(slots, again)
    side.follow()
    if copies is None:
        return 0
    side.write(copies.slots, [content[at] for at in copies.granted])
    copies.end(True)
    side.client.ping()
    return len(copies.granted)


def arena(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.stats()["hot"]["arena"]
    return found


def hot_slots(space: Space, keys: Keys) -> bytes:
    lease = space.lease(keys)
    try:
        return lease.part(0, 0).hot
    finally:
        lease.release()


def test_all_clients_of_an_engine_get_the_copies_and_those_of_others_none(
    daemon: Daemon, engine: Client
) -> None:
    space = engine.open(SPEC)
    keys, slots, content = saved(space, 4)
    with held(daemon.socket, HELD), daemon.connect(engine="one") as rank:
        side = HostMemory(rank)
        assert copied(side, slots, content) == 4
        found = hot_slots(space, keys)
        assert side.read(found, SIZE) == content and side.hot.fresh(found) == 4
        assert arena(daemon)["blocks"] == 4 and arena(daemon)["found"] == 4
        with daemon.connect(engine="another") as other:
            assert hot_slots(other.open(SPEC), keys) == b""
        with daemon.connect(engine="one", verify=True) as verifying:
            assert hot_slots(verifying.open(SPEC), keys) == b"", "copies cannot be verified"
            with pytest.raises(Refused, match="cannot be verified"):
                HostMemory(verifying)
        with daemon.connect(engine="one", read_only=True) as reading, pytest.raises(Refused):
            HostMemory(reading)


def test_saves_fill_free_memory_and_loads_replace_what_was_not_used(
    daemon: Daemon, engine: Client
) -> None:
    space = engine.open(SPEC)
    old, old_slots, content = saved(space, BLOCKS)
    new, new_slots, others = saved(space, 4, first=1)
    with held(daemon.socket, HELD):
        side = HostMemory(engine)
        assert copied(side, old_slots, content) == BLOCKS
        assert copied(side, old_slots, content) == 0, "they have copies"
        assert copied(side, new_slots, others) == 0, "saved once, and there is no room"
        used = hot_slots(space, old[:8])
        assert copied(side, new_slots, others, again=True) == 4
        assert side.read(hot_slots(space, new), SIZE) == others
        assert hot_slots(space, old[:8]) == used, "the copies that were used last stay"
        left = side.read(hot_slots(space, old), SIZE)
        assert left == [*content[:8], *[None] * 4, *content[12:]]
        assert arena(daemon)["evicted"] == 4


def test_a_lease_holds_copies(daemon: Daemon, engine: Client) -> None:
    space = engine.open(SPEC)
    old, old_slots, content = saved(space, BLOCKS)
    _, new_slots, others = saved(space, 4, first=1)
    with held(daemon.socket, HELD):
        side = HostMemory(engine)
        copied(side, old_slots, content)
        lease = space.lease(old, deadline_ms=60_000)
        assert copied(side, new_slots, others, again=True) == 0
        lease.release()
        assert copied(side, new_slots, others, again=True) == 4


def test_a_copy_ends_with_its_block_and_readers_detect_it(daemon: Daemon, engine: Client) -> None:
    space = engine.open(SPEC)
    keys, slots, content = saved(space, 4)
    with held(daemon.socket, HELD):
        side = HostMemory(engine)
        copied(side, slots, content)
        found = hot_slots(space, keys)
        assert side.hot.fresh(found) == 4
        assert space.forget(keys[2:]) == 2
        assert side.hot.fresh(found) == 2
        assert arena(daemon)["blocks"] == 2
        copies = side.hot.reserve(slots, False)
        assert copies is None, "blocks 0 and 1 have copies, and slots 2 and 3 have no blocks"


def test_a_slot_that_another_block_has_now_gets_no_copy(daemon: Daemon, engine: Client) -> None:
    space = engine.open(SPEC)
    _, slots, content = saved(space, 1)
    with held(daemon.socket, HELD):
        side = HostMemory(engine)
        extent, zero, offset, generation = SLOT.unpack(slots)
        for wrong in (
            SLOT.pack(extent, zero, offset, generation + 1), SLOT.pack(99, zero, offset, generation),
            SLOT.pack(extent, zero, offset + 4096, generation), SLOT.pack(extent, 1, offset, generation),
            SLOT.pack(extent, zero, 1 << 60, generation),
        ):  # fmt: skip
            assert side.hot.reserve(wrong, True) is None
        assert daemon.stats()["hot"]["arena"]["counts"]["refused"] == 5
        with pytest.raises(Refused, match="24"):
            side.hot.reserve(slots[:-1], True)
        with pytest.raises(Refused, match="twice"):
            side.hot.reserve(slots + slots, True)
        assert copied(side, slots, content) == 1
    assert LEAVING and SLOT_BYTES == 24


def test_a_killed_holder_loses_the_copies_and_nothing_else(daemon: Daemon, engine: Client) -> None:
    space = engine.open(SPEC)
    keys, slots, content = saved(space, 4)
    with held(daemon.socket, HELD):
        side = HostMemory(engine)
        copied(side, slots, content)
        writing = side.hot.reserve(saved(space, 2, first=1)[1], False)
        assert writing is not None
        before = hot_slots(space, keys)
    daemon.wait_for(lambda stats: not stats["hot"]["arena"]["gpus"])
    assert hot_slots(space, keys) == b"" and space.match(keys).ready == 4
    assert side.hot.fresh(before) == 4, "nobody reuses the memory of a holder that is gone"
    with pytest.raises(Refused, match="not a lease"):
        engine.link.ask(_end(engine, writing._lease), object)
    with pytest.raises(Refused, match="hold-gpu"):
        side.hot.reserve(slots, False)
    side.follow()
    assert side.gone == [0]
    with held(daemon.socket, HELD):
        engine.ping()
        side.follow()
        assert sorted(side.memory) == [0, 1], "another holder's memory has another number"
        assert copied(side, slots, content) == 4
        assert side.read(hot_slots(space, keys), SIZE) == content


def _end(client: Client, lease: int) -> Any:
    from kvtier import wire

    return wire.HotEnd(client.link.new_id(), lease, True)


def test_a_daemon_that_ends_forgets_the_copies(
    daemon_of: Callable[..., Daemon], tmp_path: Path
) -> None:
    folder = tmp_path / "again"
    daemon = daemon_of(folder=folder, config=CONFIG, keep_s=60)
    with held(daemon.socket, HELD) as holder:
        with daemon.connect(engine="one", reconnect_s=0) as client:
            space = client.open(SPEC)
            _, slots, content = saved(space, 4)
            copied(HostMemory(client), slots, content)
            daemon.process.kill()
            daemon.process.wait()
            with pytest.raises(Unavailable):
                client.ping()
        with pytest.raises(Unavailable):
            holder.connection.poll()
    daemon = daemon_of(folder=folder, config=CONFIG, keep_s=60)
    with daemon.connect(engine="one") as client, held(daemon.socket, HELD):
        space = client.open(SPEC)
        keys = space.keys(list(range(16 * 4)))
        assert space.match(keys).ready == 4
        side = HostMemory(client)
        assert hot_slots(space, keys) == b"" and arena(daemon)["blocks"] == 0
        assert copied(side, slots, content) == 4, "the blocks have the same slots as before"


# Reserves slots for copies and stops at the step that it is told.
WRITER = """
import sys, time
from kvtier import Client
from kvtier.wire import SLOT_BYTES
from support.host_holder import HostMemory
from support.specs import spec_of

socket, step = sys.argv[1:]
client = Client.connect(socket, populate=False, engine="writer", device=True)
space = client.open(spec_of("hot"))
side = HostMemory(client)
with space.load(space.keys(list(range(16 * 4))), deadline_ms=100) as blocks:
    content = [bytes(one) for one in blocks]
lease = space.lease(space.keys(list(range(16 * 4))), deadline_ms=100)
slots = lease.part(0, 0).slots
lease.release()
copies = side.hot.reserve(slots, False) if step != "joined" else None
if step in ("half", "written", "ended"):
    side.write(copies.slots[: 2 * SLOT_BYTES], content[:2])
if step in ("written", "ended"):
    side.write(copies.slots, content)
if step == "ended":
    copies.end(True)
    client.ping()
print("here", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("step", ["joined", "reserved", "half", "written", "ended"])
def test_an_engine_that_is_killed_at_any_step_leaks_no_slot_and_shows_no_half_copy(
    daemon: Daemon, engine: Client, step: str
) -> None:
    space = engine.open(SPEC)
    keys, slots, content = saved(space, 4)
    with held(daemon.socket, HELD):
        side = HostMemory(engine)
        with running(WRITER, daemon.socket, step) as (process, output):
            assert output.readline() == "here\n"
            killed_at = time.monotonic()
            process.kill()
            process.wait()
            before = arena(daemon)
            writing = 4 * (step in ("reserved", "half", "written"))
            assert before["writing"] == writing
            if writing:
                assert hot_slots(space, keys) == b""
                assert space.forget(keys[:1]) == 1, "it is leased until the device is done"
                assert arena(daemon)["writing"] == writing
                daemon.wait_for(lambda stats: not stats["hot"]["arena"]["writing"])
                assert time.monotonic() - killed_at >= DEVICE_HOLD_S
        ready = 4 * (step == "ended")
        assert arena(daemon)["blocks"] == ready
        assert arena(daemon)["used_bytes"] == ready * SIZE
        if writing:
            space.save(keys, b"".join(content))
            lease = space.lease(keys)
            slots = lease.part(0, 0).slots
            lease.release()
        assert copied(side, slots, content) == 4 - ready
        assert side.read(hot_slots(space, keys), SIZE) == content
    leases = daemon.stats()["tenants"]["default"]["leases"]
    assert leases == 0


def test_a_lost_connection_holds_the_slots_until_its_process_declares_that_it_stopped(
    daemon: Daemon,
) -> None:
    with held(daemon.socket, HELD):
        client = daemon.connect(engine="one", reconnect_s=0, device=True)
        space = client.open(SPEC)
        _, slots, content = saved(space, 4)
        side = HostMemory(client)
        copies = side.hot.reserve(slots, False)
        assert copies is not None
        client.close()  # without a farewell: a copy is running
        daemon.wait_for(lambda stats: stats["hot"]["arena"]["quarantined"] == 4)
        daemon.connect().close()
        assert arena(daemon)["quarantined"] == 4, "the copy still runs"
        side.write(copies.slots, content)
        with pytest.raises(Unavailable):
            copies.end(True)
        daemon.connect().close()  # its Hello says that nothing is copied any longer
        daemon.wait_for(lambda stats: not stats["hot"]["arena"]["writing"])


@pytest.mark.parametrize(
    ("config", "nbytes", "why"),
    [
        ("", HELD, r"no \[hot\]"),
        (CONFIG, 1 << 19, "larger --size"),
        (CONFIG, 0, "not a GPU's memory"),
    ],
    ids=["off", "too small", "nothing"],
)
def test_a_holder_is_refused_with_the_reason(
    daemon_of: Callable[..., Daemon], config: str, nbytes: int, why: str
) -> None:
    daemon = daemon_of(config=config)
    with pytest.raises(Refused, match=why), held(daemon.socket, nbytes):
        raise AssertionError
    if config:
        with held(daemon.socket, HELD), pytest.raises(Refused, match="has a holder already"):
            held(daemon.socket, HELD).__enter__()


def test_a_holder_that_errs_is_refused_and_no_descriptor_leaks(daemon: Daemon) -> None:
    with daemon.connect() as client:
        client.ping()
        files = daemon.open_files()
        for _ in range(20):
            with held(daemon.socket, HELD) as holder:
                assert holder.shares == {"default": 1 << 20}
                for tenant, gpu, nbytes in (
                    ("default", GPU, 1 << 20), ("nobody", GPU, 1 << 20), ("default", "other", 1 << 20),
                    ("default", GPU, UNIT),
                ):  # fmt: skip
                    with pytest.raises(Refused):
                        holder.grant(9, gpu, tenant, nbytes)
        daemon.wait_for_open_files(files)


def test_memory_of_a_tenant_without_a_size_is_not_offered(
    daemon_of: Callable[..., Daemon],
) -> None:
    mine = f'[tenants.a]\nuids = [{os.getuid()}]\nquota = "50%"\n'
    other = '[tenants.b]\nuids = [54321]\nquota = "50%"\n'
    daemon = daemon_of(config=f'[hot]\nsizes = ["b=1MiB"]\n{mine}{other}')
    with held(daemon.socket, HELD), daemon.connect() as client:
        assert not client.link.welcome.hot
        side = HostMemory(client)
        assert not side.memory
        with pytest.raises(Refused, match="no memory on GPU"):
            side.hot.reserve(b"", False)


# --- who may take part ---------------------------------------------------------------------------

NOBODY = 65534
TENANTS = """
socket_mode = "0666"
[hot]
sizes = ["a=1MiB"]
[tenants.a]
uids = [0]
writers = [{writer}]
"""
# As another user: tries to offer memory, then to take part as an engine.
STRANGER = f"""
import os, sys
from kvtier import Client, Refused
from support.host_holder import HostHolder, HostMemory
os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})
try:
    HostHolder(sys.argv[1], 2 << 20, "another")
except Refused as error:
    print(error.code, flush=True)
client = Client.connect(sys.argv[1], populate=False, reconnect_s=0)
print(len(HostMemory(client).memory), flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run as another user")
def test_only_the_daemons_user_offers_memory_and_a_user_that_leaves_loses_it(
    open_folder: Path, daemon_of: Callable[..., Daemon]
) -> None:
    daemon = daemon_of(folder=open_folder, config=TENANTS.format(writer=NOBODY))
    with (
        held(daemon.socket, HELD) as holder,
        daemon.connect(engine="one") as engine,
        running(STRANGER, daemon.socket) as (_, output),
    ):
        space = engine.open(SPEC)
        _, slots, content = saved(space, 4)
        side = HostMemory(engine)
        assert copied(side, slots, content) == 4
        assert output.readline() == "not_admin\n"
        assert output.readline() == "1\n", "a writer gets the memory"
        file = open_folder / "kvtier.toml"
        file.write_text(file.read_text().replace(f"writers = [{NOBODY}]\n", ""))
        assert kvtier("reload", "--socket", daemon.socket).returncode == 0
        daemon.wait_for(lambda stats: not stats["hot"]["arena"]["gpus"])
        with pytest.raises(Unavailable):
            holder.connection.poll()
    with held(daemon.socket, HELD), daemon.connect(engine="one") as engine:
        side = HostMemory(engine)
        assert list(side.memory) == [1], "other memory, which the other user does not have"


def test_status_metrics_and_explain_show_copies(
    daemon: Daemon, engine: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    space = engine.open(SPEC)
    keys, slots, content = saved(space, 4)
    with held(daemon.socket, HELD):
        side = HostMemory(engine)
        copied(side, slots[: 3 * SLOT_BYTES], content)
        hot_slots(space, keys)
        stats = daemon.stats()
        gpu = stats["hot"]["arena"]["gpus"][GPU]
        assert gpu["blocks"] == 3 and gpu["capacity_bytes"] == 1 << 20
        assert gpu == {name: stats["hot"]["arena"][name] for name in gpu}, "of one GPU, so equal"
        text = "".join(str(family) for family in families(stats))
        for line in ("kvtier_hot_copies_blocks", "kvtier_hot_copies_loads"):
            assert line in text
        values = {one.name: one.read(stats) for one in SERIES}
        assert values["kvtier_hot_copies_blocks"] == {"ready": 3, "writing": 0, "quarantined": 0}
        assert values["kvtier_hot_copies_loads"] == {"found": 3, "absent": 1}
        assert values["kvtier_hot_copies_bytes"] == 3 * SIZE
        shown = kvtier("status", "--socket", daemon.socket, COLUMNS="80")
        (row,) = [line for line in shown.stdout.splitlines() if line.startswith(" GPU 000000 ")]
        assert row.split()[-7:] == ["192", "KiB", "of", "1", "MiB", "3", "blocks"]
        found = engine.explain(keys=Keys.of(keys).packed)["keys"]
        assert [one.get("gpus", []) for one in found] == [[GPU]] * 3 + [[]]
        told = kvtier("explain", "--socket", daemon.socket, keys[0].hex(), keys[3].hex())
        assert told.stdout.count(f"a copy is on GPU {GPU}") == 1
    assert all(
        not one.read({"tiers": {}}) for one in SERIES if one.name == "kvtier_hot_copies_bytes"
    )
