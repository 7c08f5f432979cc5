"""The linker with SGLang's own factory, device pools, allocator and radix cache. No model runs."""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import sglang_wheel as wheel
from kvtier.units import MIB
from support.daemons import Daemon
from support.gated import gated_daemon
from support.pages import blocks, command

pytestmark = [
    pytest.mark.skipif(bool(wheel.MISSING), reason=wheel.WHY),
    pytest.mark.filterwarnings("ignore"),  # SGLang's own
]
PAGES = 5


@pytest.fixture
def trees(tmp_path: Path) -> Iterator[Callable[..., wheel.Tree]]:
    """Makes radix caches of servers with one model; closes them at the end."""
    made: list[wheel.Tree] = []

    def make(socket: str, kind: str = "mha", pages: int = 32, **changes: Any) -> wheel.Tree:
        given = {"socket": socket, **changes.pop("options", {})}
        made.append(wheel.Tree(kind, given, pages, **changes))
        return made[-1]

    with wheel.served(tmp_path / "model"):
        yield make
        for tree in made:
            tree.close()


def prompt(number: int, pages: int = PAGES) -> list[int]:
    """The last token is computed in any case, so it does not end a page."""
    return [number * 100_000 + at for at in range(pages * wheel.PAGE + 1)]


def save(tree: wheel.Tree, tokens: list[int], **key: str) -> list[bool]:
    """Compute a prompt on this server; return whether it was saved."""
    request = wheel.Request(f"saves {tokens[0]} {key}", tokens, **key)
    tree.match(request)
    tree.finish(request)
    return tree.settle(1)


def loaded(tree: wheel.Tree, request: wheel.Request) -> int:
    """Load what is stored of a request; return how many pages were loaded, all of which are right."""
    found = tree.match(request)
    before = len(tree.pages_of(request))
    if found:
        tree.queue_load(request)
        assert tree.forward(request) == []
    check(tree, request)
    assert len(tree.pages_of(request)) == before + found
    return found


def check(tree: wheel.Tree, request: wheel.Request) -> None:
    """Each page of its prefix on the device has the values that the model computes."""
    for name, number in zip(tree.names(request), tree.pages_of(request), strict=False):
        was = tree.content(number)
        tree.compute(name, number)
        assert tree.content(number) == was


def test_every_method_of_the_interface_has_the_arguments_that_sglang_passes() -> None:
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

    from kvtier_sglang.linker import KvtierLinker

    assert not inspect.isabstract(KvtierLinker)
    for name in UnifiedCacheLinker.__abstractmethods__:
        ours = inspect.signature(getattr(KvtierLinker, name)).parameters
        theirs = inspect.signature(getattr(UnifiedCacheLinker, name)).parameters
        assert list(ours) == list(theirs), name


def test_sglang_accepts_the_printed_command(
    shared_daemon: Daemon, trees: Callable[..., wheel.Tree], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own parser and checks; and a prompt is saved with the options as the page prints them."""
    from sglang.srt.mem_cache.unified_cache.linker_config import UnifiedCacheLinkerConfig
    from sglang.srt.server_args import ServerArgs

    printed = Path(__file__).parents[2] / "docs/sglang.md"
    begins = "python -m sglang.launch_server --model-path MODEL --page-size 64 --enable-unified"
    (text,) = [one.text for one in blocks(printed) if begins in one.text]
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    told = parser.parse_args(shlex.split(command(text, begins).replace("\\\n", " "))[3:])
    assert told.enable_unified_cache_external_linker and told.page_size == wheel.PAGE
    assert told.unified_cache_external_linker_backend == "dynamic"
    given = told.unified_cache_external_linker_config
    given = json.loads(given) if isinstance(given, str) else given
    config = UnifiedCacheLinkerConfig.from_dict(given)
    assert wheel.linker_config(config.linker_extra_config) == given
    monkeypatch.setenv("KVTIER_SOCKET", shared_daemon.socket)
    tree = trees(shared_daemon.socket, options=config.linker_extra_config)
    assert save(tree, prompt(1)) == [True]


@pytest.mark.parametrize("kind", ["mha", "mla", "dsa"])
def test_pages_of_every_pool_come_back_on_another_server(
    shared_daemon: Daemon, trees: Callable[..., wheel.Tree], kind: str
) -> None:
    first, second = trees(shared_daemon.socket, kind), trees(shared_daemon.socket, kind)
    assert save(second, prompt(98, 3)) == [True]  # its pages get other numbers
    assert save(first, prompt(2)) == [True]
    request = wheel.Request("r", prompt(2, PAGES + 2))
    assert loaded(second, request) == PAGES
    second.finish(request)  # goes on, and only what is new is saved
    assert second.settle(1) == [True]
    third = trees(shared_daemon.socket, kind)
    assert loaded(third, wheel.Request("s", prompt(2, PAGES + 2))) == PAGES + 2
    assert loaded(third, wheel.Request("t", prompt(3))) == 0


def test_a_prompt_is_saved_once_and_its_pages_may_then_be_evicted(
    shared_daemon: Daemon, trees: Callable[..., wheel.Tree]
) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tree = trees(shared_daemon.socket, pages=12)
    assert save(tree, prompt(4)) == [True]
    again = wheel.Request("again", prompt(4))
    assert tree.match(again) == 0  # all on the device
    tree.finish(again)
    assert not tree.cache.linker.pending_offloads
    tree.cache.evict(EvictParams(num_tokens=PAGES * wheel.PAGE))
    assert tree.allocator.available_size() == 12 * wheel.PAGE
    assert loaded(tree, wheel.Request("back", prompt(4))) == PAGES


def test_other_salts_adapters_and_weights_share_nothing(
    shared_daemon: Daemon, trees: Callable[..., wheel.Tree], tmp_path: Path
) -> None:
    """SGLang's names contain salts and adapters, and kvtier's spaces the weights and the layout."""
    tree = trees(shared_daemon.socket)
    assert save(tree, prompt(5), cache_salt="a", extra_key="lora") == [True]
    other = trees(shared_daemon.socket)
    for key in (
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b", "extra_key": "lora"},
        {"extra_key": "lora"},
    ):
        assert other.match(wheel.Request(str(key), prompt(5), **key)) == 0, key
    same = wheel.Request("same", prompt(5), cache_salt="a", extra_key="lora")
    assert loaded(other, same) == PAGES
    mla = trees(shared_daemon.socket, "mla")
    assert mla.match(wheel.Request("mla", prompt(5), cache_salt="a", extra_key="lora")) == 0
    weights = trees(shared_daemon.socket, options={"weights": "other"})
    assert weights.match(wheel.Request("w", prompt(5), cache_salt="a", extra_key="lora")) == 0


@pytest.mark.parametrize("end", ["kill", "hang"])
def test_a_daemon_that_ends_between_lookup_and_load_does_not_fail_the_load(
    daemon_of: Callable[..., Daemon], trees: Callable[..., wheel.Tree], tmp_path: Path, end: str
) -> None:
    """The pages are still mapped. What follows is not found and not saved, after at most one deadline."""
    (tmp_path / "d").mkdir()
    daemon = daemon_of(folder=tmp_path / "d")
    tree = trees(daemon.socket)
    assert save(tree, prompt(6)) == [True]
    other, request = trees(daemon.socket), wheel.Request("r", prompt(6))
    assert other.match(request) == PAGES
    if end == "kill":
        daemon.process.kill()
        daemon.process.wait()
    else:
        daemon.process.send_signal(signal.SIGSTOP)
    try:
        other.queue_load(request)
        began = time.monotonic()
        assert other.forward(request) == [] and time.monotonic() - began < 0.9
        check(other, request)
        began = time.monotonic()
        assert other.match(wheel.Request("s", prompt(7))) == 0
        assert save(other, prompt(8)) == [False]
        assert time.monotonic() - began < 5
        began = time.monotonic()
        assert other.match(wheel.Request("t", prompt(7))) == 0
        assert time.monotonic() - began < 0.5  # no call waits again
    finally:
        if end == "hang":
            daemon.process.send_signal(signal.SIGCONT)
    if end == "kill":
        daemon_of(folder=tmp_path / "d")
    deadline, number = time.monotonic() + 30, itertools.count(1000)
    while save(other, prompt(next(number))) != [True]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_without_a_daemon_nothing_is_found_and_no_page_stays_locked(
    trees: Callable[..., wheel.Tree], tmp_path: Path
) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tree = trees(str(tmp_path / "none.sock"), pages=8)
    assert tree.match(wheel.Request("r", prompt(9))) == 0
    assert save(tree, prompt(9)) == [False]
    tree.cache.evict(EvictParams(num_tokens=PAGES * wheel.PAGE))
    assert tree.allocator.available_size() == 8 * wheel.PAGE


def test_pages_that_are_gone_at_the_load_abort_their_requests_and_no_other(
    shared_daemon: Daemon, trees: Callable[..., wheel.Tree]
) -> None:
    tree = trees(shared_daemon.socket)
    assert save(tree, prompt(10)) == [True]
    other = trees(shared_daemon.socket)
    request = wheel.Request("r", prompt(10))
    assert other.match(request) == PAGES
    other.queue_load(request)
    (load,) = other.linker._queued["r"]
    load.held.release()  # as its deadline does
    store = other.linker._served.opened
    space = store.keeper.space
    assert space.forget(store._keys(space, load.keys[2:3])) == 1
    assert other.forward(request) == [request]
    assert request.skip_radix_cache_insert and request.discard_output_reason is not None
    assert other.forward() == []  # the next batch has no load
    later = wheel.Request("s", prompt(10))
    assert loaded(other, later) == 2


def test_a_cancelled_request_loads_nothing_and_holds_nothing(
    shared_daemon: Daemon, trees: Callable[..., wheel.Tree]
) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

    tree = trees(shared_daemon.socket)
    assert save(tree, prompt(11)) == [True]
    other = trees(shared_daemon.socket)
    gone, stays = wheel.Request("gone", prompt(11)), wheel.Request("stays", prompt(11))
    assert other.match(gone) == PAGES
    other.queue_load(gone)
    pages = [
        int(one) // wheel.PAGE
        for one in other.cache.linker.private_load_indices["gone"][:: wheel.PAGE]
    ]
    before = [other.content(page) for page in pages]
    other.cache.release_aborted_request(CacheRequestHandle("gone", 0))
    assert not other.linker._queued and "gone" not in other.linker._held
    assert other.forward(gone) == []
    assert [other.content(page) for page in pages] == before
    assert loaded(other, stays) == PAGES
    other.match(wheel.Request("never loaded", prompt(11, PAGES + 3)))
    other.cache.reset()
    assert not other.linker._held
    shared_daemon.wait_for(
        lambda stats: not sum(tenant["leases"] for tenant in stats["tenants"].values())
    )


def test_ranks_load_the_same_pages_or_none(
    shared_daemon: Daemon, trees: Callable[..., wheel.Tree]
) -> None:
    """Two ranks that hold parts of each page, and SGLang's reductions between them by gloo."""
    import torch.distributed as dist

    meeting = [dist.HashStore()]

    def rank(number: int) -> wheel.Tree:
        return trees(shared_daemon.socket, attn_cp_rank=number, attn_cp_size=2)

    ranks = [rank(0), rank(1)]

    def both(run: Callable[[int, wheel.Tree], Any]) -> list[Any]:
        results: list[Any] = [None, None]

        def one(number: int) -> None:
            results[number] = run(number, ranks[number])

        threads = [threading.Thread(target=one, args=(at,), daemon=True) for at in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return results

    def join(number: int, tree: wheel.Tree) -> None:
        group = dist.ProcessGroupGloo(meeting[-1], number, 2)

        def reduce(tensor: Any, op: Any) -> None:
            options = dist.AllreduceOptions()
            options.reduceOp = op
            group.allreduce([tensor], options).wait()

        tree.cache._all_reduce_attn_groups = reduce

    both(join)
    request = [wheel.Request("r", prompt(12)) for _ in ranks]
    assert both(lambda at, tree: (tree.match(request[at]), tree.finish(request[at]))[0]) == [0, 0]
    for tree in ranks:
        while not tree.linker.num_completed_offloads():
            time.sleep(0.005)
    assert both(lambda at, tree: tree.settle(1)) == [[True], [True]]

    ranks = [rank(0), rank(1)]
    meeting.append(dist.HashStore())
    both(join)
    store = ranks[1].linker._served.opened
    real, store.hold = store.hold, lambda keys, waits: real(keys[:3], waits)  # it finds less
    request = [wheel.Request("s", prompt(12)) for _ in ranks]
    assert both(lambda at, tree: tree.match(request[at])) == [3, 3]
    store.hold = real

    def load(number: int, tree: wheel.Tree) -> list[Any]:
        tree.queue_load(request[number])
        if number == 1 and fails:
            one = tree.linker._queued[request[1].rid][0]
            one.indices["kv"] = one.indices["kv"][:-1]  # fails on this rank only
        return tree.forward(request[number])

    fails = True
    assert both(load) == [[request[0]], [request[1]]]
    fails, request = False, [wheel.Request("t", prompt(12)) for _ in ranks]
    assert both(lambda at, tree: tree.match(request[at])) == [PAGES, PAGES]
    assert both(load) == [[], []]
    assert [len(tree.pages_of(one)) for tree, one in zip(ranks, request, strict=True)] == [
        PAGES
    ] * 2


def test_the_scheduler_waits_for_the_disk_for_at_most_a_fifth_of_its_time(
    shared_daemon: Daemon, trees: Callable[..., wheel.Tree], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many requests whose pages are on a slow disk."""
    from kvtier_plugins.page_store import HeldPages

    tree, waited = trees(shared_daemon.socket), []
    store = tree.linker._served.opened

    asked = 0

    def hold(keys: list[str], waits: bool) -> HeldPages:
        nonlocal asked
        began, asked = time.monotonic(), asked + 1
        if waits:
            time.sleep(0.05)
            waited.append(time.monotonic() - began)
        waited_s = time.monotonic() - began if waits else 0.0
        return HeldPages(keys, None, began + 10, coming=1, waited_s=waited_s)

    monkeypatch.setattr(store, "hold", hold)
    request, began = wheel.Request("r", prompt(16)), time.monotonic()
    while time.monotonic() < began + 1:
        assert tree.match(request) == 0
    last = waited[-1]  # may have begun at the end
    assert asked <= 22  # the daemon is not asked before each batch
    assert len(waited) >= 2 and sum(waited) - last <= 0.2 * (time.monotonic() - began)


def test_of_ranks_with_equal_pages_one_saves_them_and_all_load_them(
    shared_daemon: Daemon, trees: Callable[..., wheel.Tree], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier_sglang import linker
    from kvtier_sglang.identity import RankPlace

    def rank(writes: bool) -> wheel.Tree:
        place = RankPlace(0, 1, "stage 0 of 1", 2, writes)
        monkeypatch.setattr(linker, "rank_place", lambda params, replicated: place)
        return trees(shared_daemon.socket, "mla")

    reader, other = rank(False), rank(False)
    assert save(reader, prompt(15)) == [True]  # SGLang takes the least of all ranks
    assert other.match(wheel.Request("r", prompt(15))) == 0
    assert save(rank(True), prompt(15)) == [True]
    assert loaded(other, wheel.Request("s", prompt(15))) == PAGES


def test_what_cannot_be_kept_is_declined_and_the_server_goes_on(
    shared_daemon: Daemon, trees: Callable[..., wheel.Tree], caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.runtime_context import get_context, get_parallel

    def declines(tree: wheel.Tree, line: str) -> None:
        assert tree.match(wheel.Request("r", prompt(13))) == 0
        assert save(tree, prompt(13)) == [False]
        told = [one.getMessage() for one in caplog.records if "works without" in one.getMessage()]
        assert told == [f"kvtier: this server works without kvtier: {line}"]
        caplog.clear()

    several = "the server has ranks on several hosts, and each host has its own daemon"
    with get_parallel().override(nnodes=2):
        declines(trees(shared_daemon.socket), several)
    with get_parallel().override(attn_dcp_size=2):
        line = "decode context parallelism: ranks hold different tokens of a page"
        declines(trees(shared_daemon.socket), line)
    draft = "draft models with a cache of their own are not supported yet"
    declines(trees(shared_daemon.socket, sidecar_draft_device_pools=(object(),)), draft)
    stages = "pipeline stages do not agree on what they have found"
    declines(trees(shared_daemon.socket, pp_size=2), stages)
    updated = trees(shared_daemon.socket)
    assert save(updated, prompt(14)) == [True]
    get_context().override("test", weight_version="step 2")
    declines(updated, "its weights were updated in place; it uses kvtier again after a restart")


def test_pages_with_scales_in_other_buffers_are_declined(
    shared_daemon: Daemon, trees: Callable[..., wheel.Tree], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """SGLang's own NVFP4 with scales in the layout of its kernels."""
    import torch
    from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import NVFP4KVCacheMethod
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    def pool(kind: str, pages: int) -> Any:
        method = NVFP4KVCacheMethod(3, "cpu", wheel.PAGE, native_scale_layout=True)
        method.configure_attention_backends("trtllm_mha", "trtllm_mha")
        return MHATokenToKVPool(
            pages * wheel.PAGE, wheel.PAGE, torch.bfloat16, 2, 64, 3, "cpu", False,
            quant_method=method,
        )  # fmt: skip

    monkeypatch.setattr(wheel, "device_pool", pool)
    tree = trees(shared_daemon.socket)
    assert tree.pool.k_scale_buffer is None and tree.pool.native_k_scale_buffer is not None
    assert save(tree, prompt(20)) == [False]
    assert "pages of a MHATokenToKVPool of this layout are not supported" in caplog.text


def test_models_of_a_kind_that_is_not_known_do_not_stop_the_server(
    trees: Callable[..., wheel.Tree], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import torch
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    from kvtier_sglang.linker import KvtierLinker

    pool = HybridLinearKVPool(2048, torch.bfloat16, wheel.PAGE, 2, 16, [1, 3], "cpu", None)

    class Allocator:
        def get_kvcache(self) -> Any:
            return pool

    params = CacheInitParams(
        disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=Allocator(),
        page_size=wheel.PAGE,
    )  # fmt: skip
    for parts, line in (
        ({ComponentType.FULL, ComponentType.MAMBA}, "models with states or sliding windows"),
        ({ComponentType.FULL}, "AttributeError: 'HybridLinearKVPool'"),
    ):
        linker = KvtierLinker(
            None, params, components=parts, extra_config={"socket": str(tmp_path / "none.sock")}
        )
        assert linker.lookup("r", []) == [] and not linker.load("r", [])
        linker.close()
        assert f"works without kvtier: {line}" in caplog.text


def test_saves_give_up_a_slow_disk_while_others_wait_and_at_a_reset(
    daemon_of: Callable[..., Daemon], trees: Callable[..., wheel.Tree], tmp_path: Path
) -> None:
    """Until its save has ended, SGLang cannot evict a page."""
    (tmp_path / "d").mkdir()
    daemon, gate = gated_daemon(daemon_of, tmp_path / "d", MIB)
    tree = trees(daemon.socket, pages=256)
    began = time.monotonic()
    for number in range(40, 60):
        request = wheel.Request(f"r{number}", prompt(number, 10))
        tree.match(request)
        tree.finish(request)
    saved = tree.settle(20)
    assert saved[0] and saved.count(False) > 10
    assert time.monotonic() - began < 6  # each waited for a second
    later = wheel.Request("later", prompt(61, 10))
    tree.match(later)
    tree.finish(later)
    time.sleep(0.1)
    assert not tree.linker.num_completed_offloads()
    began = time.monotonic()
    tree.linker.reset()
    assert time.monotonic() - began < 0.5
    gate.touch()


def test_pages_that_another_server_is_storing_do_not_count_as_stored(
    shared_daemon: Daemon, trees: Callable[..., wheel.Tree]
) -> None:
    """It may end before they are stored. SGLang saves them again later."""
    tree, other = trees(shared_daemon.socket), trees(shared_daemon.socket)
    store = other.linker._served.opened
    space, names = store.keeper.space, tree.names(wheel.Request("n", prompt(21)))
    with space.reserve(store._keys(space, names)) as saving:
        assert len(saving) == PAGES
        assert save(tree, prompt(21)) == [False]
    assert save(tree, prompt(21)) == [True]


def test_a_thread_that_cannot_use_the_device_stops_nothing(
    shared_daemon: Daemon, trees: Callable[..., wheel.Tree], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    from kvtier_sglang import linker
    from kvtier_sglang.pages import find_pages

    class LostDevice:
        driver = property(lambda self: self)

        def own_thread(self) -> None:
            raise OSError("the device is lost")

        def close(self) -> None:
            pass

    device = LostDevice()
    device.pages = find_pages
    monkeypatch.setattr(linker.DeviceCopies, "of", lambda place: device)
    tree = trees(shared_daemon.socket)
    assert save(tree, prompt(22)) == [False]
    assert "works without kvtier: OSError: the device is lost" in caplog.text
    assert tree.match(wheel.Request("r", prompt(22, PAGES + 1))) == 0


def test_wrong_options_stop_the_server_with_a_line(trees: Callable[..., wheel.Tree]) -> None:
    for change, line in (
        ({"sockets": "x"}, "linker_extra_config: .*known options: socket"),
        ({"patience_ms": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=line):
            trees("x", options=change)
