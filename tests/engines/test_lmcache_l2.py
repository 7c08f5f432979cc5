"""kvtier as an L2 adapter of LMCache: LMCache's own storage manager with its memory, its store and prefetch
controllers and its factory of adapters, and a real daemon. A GPU fills that memory in an engine; here the
test does."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip(
    "lmcache.v1.distributed.storage_manager", reason="needs LMCache: make test-lmcache"
)

import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
    add_storage_manager_args,
    parse_args_to_config,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager

from support.daemons import Daemon

pytestmark = pytest.mark.filterwarnings("ignore")

WAIT_S = 30.0
CHUNK = torch.Size([2, 4, 256, 64])
LAYOUT = MemoryLayoutDesc([CHUNK], [torch.bfloat16])
CHUNK_BYTES = CHUNK.numel() * 2
NUMBERS = itertools.count()


def adapter_config(socket: str, **params: Any) -> dict[str, Any]:
    return {
        "type": "plugin",
        "module_path": "kvtier_lmcache",
        "class_name": "KvtierL2Adapter",
        "adapter_params": {"weights": "tiny-1", "socket": socket} | params,
    }


class Server:
    """What LMCache's daemon does with its storage manager."""

    def __init__(self, socket: str, chunks: int = 16, **params: Any) -> None:
        memory = L1MemoryManagerConfig(
            size_in_bytes=chunks * CHUNK_BYTES,
            use_lazy=False,
            shm_name=f"kvtier_test_{next(NUMBERS)}",
        )
        adapters = [PluginL2AdapterConfig.from_dict(adapter_config(socket, **params))]
        self.manager = StorageManager(
            StorageManagerConfig(
                L1ManagerConfig(memory), EvictionConfig("LRU"), L2AdaptersConfig(adapters)
            )
        )
        self.adapter = self.manager.l2_adapters()[0][1]

    def store(self, keys: Sequence[ObjectKey]) -> None:
        """Fill chunks in L1; the store controller stores them in L2."""
        for key in keys:
            got = self.manager.reserve_write([key], LAYOUT)
            memoryview(got[key].byte_array).cast("B")[:CHUNK_BYTES] = content(key)
            self.manager.finish_write([key])

    def wait_stored(self, count: int) -> None:
        self.until(lambda: self.adapter.report_status().get("store", 0) >= count)

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, self.adapter.report_status()
            time.sleep(0.005)

    def drop(self, keys: Sequence[ObjectKey]) -> None:
        """Remove chunks from L1."""
        self.until(lambda: not self.manager.delete_l1_keys(list(keys))[1])

    def load(self, keys: Sequence[ObjectKey]) -> int:
        """How many leading chunks LMCache loads. Each has its content."""
        row = GroupedObjectKeys(list(keys), keys[0].object_group_id, LAYOUT)
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec([row]))
        assert self.manager.wait_prefetch_status(handle, WAIT_S)
        result = self.manager.query_prefetch_status(handle)
        assert result is not None
        found = 0
        for key in keys:
            with self.manager.read_prefetched_results([key]) as read:
                if read is None:
                    break
                assert bytes(memoryview(read[0].byte_array).cast("B")[:CHUNK_BYTES]) == content(key)
            self.manager.finish_read_prefetched([key])
            found += 1
        return found

    def finds(self, keys: Sequence[ObjectKey]) -> Any:
        """The adapter's own answer for these chunks."""
        task = self.adapter.submit_lookup_and_lock_task(list(keys), {0: LAYOUT})
        answers: list[Any] = []

        def answered() -> bool:
            answers.append(self.adapter.query_lookup_and_lock_result(task))
            return answers[-1] is not None

        self.until(answered)
        return answers[-1]

    def close(self) -> None:
        self.manager.close()


def prompt(
    number: int, chunks: int, salt: str = "", rank: int = 0, group: int = 0
) -> list[ObjectKey]:
    return [
        ObjectKey(sha256(f"{number} {at}".encode()).digest(), "tiny/model", rank, group, salt)
        for at in range(chunks)
    ]


def content(key: ObjectKey) -> bytes:
    seed = sha256(repr(key).encode()).digest()
    return seed * (CHUNK_BYTES // len(seed))


ServerOf = Callable[..., Server]


@pytest.fixture
def daemon(daemon_of: Callable[..., Daemon]) -> Daemon:
    return daemon_of()


@pytest.fixture
def server_of() -> Iterator[ServerOf]:
    made: list[Server] = []

    def make(socket: str, **params: Any) -> Server:
        made.append(Server(socket, **params))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_what_one_server_stores_another_one_loads(daemon: Daemon, server_of: ServerOf) -> None:
    keys = prompt(1, 6)
    first = server_of(daemon.socket)
    first.store(keys)
    first.wait_stored(6)
    second = server_of(daemon.socket)
    assert second.load([*keys, *prompt(2, 1)]) == 6
    assert daemon.stats()["tenants"]["default"]["used_tokens"] == 6 * 256


def test_what_l1_has_dropped_is_loaded_again(daemon: Daemon, server_of: ServerOf) -> None:
    server, keys = server_of(daemon.socket, chunks=8), prompt(3, 4)
    server.store(keys)
    server.wait_stored(4)
    server.drop(keys)
    assert server.load(keys) == 4


def test_salts_ranks_groups_and_weights_are_apart(daemon: Daemon, server_of: ServerOf) -> None:
    server, keys = server_of(daemon.socket), prompt(4, 2, "alice")
    server.store(keys)
    server.wait_stored(2)
    server.drop(keys)
    assert server.load(prompt(4, 2, "bob")) == 0
    assert server.load(prompt(4, 2)) == 0
    assert server.load(prompt(4, 2, "alice", rank=1)) == 0
    assert server.load(prompt(4, 2, "alice", group=1)) == 0
    assert server_of(daemon.socket, weights="tiny-2").load(keys) == 0
    assert server.load(keys) == 2


def test_chunks_come_back_from_disk_after_a_restart(
    daemon_of: Callable[..., Daemon], server_of: ServerOf, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    config = (
        '[warm]\nsize = "16MiB"\n'
        f'[cold]\ndirectories = ["{tmp_path}/disk"]\nsize = "128MiB"\nsegment = "2MiB"\n'
    )
    daemon, keys = daemon_of(config=config, folder=tmp_path), prompt(5, 4)
    server = server_of(daemon.socket)
    server.store(keys)
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == 4)
    daemon.stop()
    daemon_of(config=config, folder=tmp_path).wait_for_disks()
    server.drop(keys)
    server.until(lambda: server.adapter.report_status()["is_healthy"])
    assert server.load(keys) == 4


def test_deleted_chunks_are_forgotten(daemon: Daemon, server_of: ServerOf) -> None:
    server, keys = server_of(daemon.socket), prompt(6, 3)
    server.store(keys)
    server.wait_stored(3)
    assert server.adapter.get_usage().total_bytes_used == 3 * CHUNK_BYTES
    server.adapter.delete(keys[1:2])
    assert server.adapter.get_usage().total_bytes_used == 2 * CHUNK_BYTES
    server.drop(keys)
    assert server.load(keys) == 1


def test_a_chunk_that_is_missing_in_between_costs_only_itself(
    daemon: Daemon, server_of: ServerOf
) -> None:
    server, keys = server_of(daemon.socket), prompt(7, 4)
    server.store([keys[0], *keys[2:]])
    server.wait_stored(3)
    found = server.finds(keys)
    assert [found.test(at) for at in range(4)] == [True, False, True, True]


def test_a_daemon_that_ends_costs_misses_and_is_used_again(
    daemon_of: Callable[..., Daemon], server_of: ServerOf, tmp_path: Path
) -> None:
    daemon, keys = daemon_of(folder=tmp_path), prompt(8, 2)
    server = server_of(daemon.socket)
    server.store(keys)
    server.wait_stored(2)
    server.drop(keys)
    daemon.process.send_signal(signal.SIGKILL)
    daemon.process.wait()
    assert server.load(keys) == 0
    assert not server.adapter.report_status()["is_healthy"]
    daemon_of(folder=tmp_path)
    server.until(lambda: server.adapter.report_status()["is_healthy"])
    server.store(prompt(9, 2))
    server.wait_stored(4)


def test_lmcache_parses_the_command_of_the_page(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "lmcache.md").read_text()
    command = re.search(r"```sh\n(python -m lmcache.*?)```", page, re.DOTALL)
    assert command is not None
    _, _, server, *arguments = shlex.split(command[1])
    assert importlib.util.find_spec(server)
    parser = add_storage_manager_args(argparse.ArgumentParser())
    config = parse_args_to_config(parser.parse_args(arguments))
    config.l1_manager_config.memory_config.size_in_bytes = 16 * CHUNK_BYTES
    config.l1_manager_config.memory_config.use_lazy = False
    monkeypatch.setenv("KVTIER_SOCKET", daemon.socket)
    manager = StorageManager(config)
    assert type(manager.l2_adapters()[0][1]).__name__ == "KvtierL2Adapter"
    manager.close()


def test_weak_hashes_and_wrong_parameters_are_refused(daemon: Daemon, server_of: ServerOf) -> None:
    server = server_of(daemon.socket)
    weak = [ObjectKey(b"12345678", "tiny/model", 0)]
    server.store(weak)
    server.until(lambda: "store:weak_hash" in server.adapter.report_status())
    for params, why in (
        ({"weights": ""}, "weights"),
        ({"sokcet": "x"}, "sokcet"),
        ({"patience_ms": 0}, "patience_ms"),
    ):
        with pytest.raises(ValueError, match=why):
            server_of(daemon.socket, **params)
