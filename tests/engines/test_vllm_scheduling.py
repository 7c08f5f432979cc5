"""Features that do not start on a CPU: asynchronous scheduling, which is the default on GPUs, Jamba,
Bamba and Mamba. The engine core, scheduler and cache manager are vLLM's, and every page is compared;
nothing is computed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.daemons import Daemon
from support.prompts import prompt

pytest.importorskip("vllm.v1.engine.core", reason="needs vLLM: make test-engines")
pytestmark = pytest.mark.filterwarnings("ignore")

from kvtier.saving import Saving  # noqa: E402
from kvtier_plugins import Unsupported  # noqa: E402
from kvtier_vllm import connector  # noqa: E402
from kvtier_vllm.worker import RankLoads, RankSaves  # noqa: E402
from support.neighbour import Neighbour  # noqa: E402
from support.numbers_engine import BLOCK, MODELS, NumbersEngine, answer_to, in_stages  # noqa: E402

WITHOUT_STAGES = ("bamba", "qwen3_next")
WITH_STATES = ("jamba", "bamba", "qwen3_next", "mamba")
DENSE = {"prefix_cache_retention_interval": None}  # keep each state that the engine has
HOW: dict[str, dict[str, Any]] = {
    "sync": {}, "async": {"asynchronous": True}, "stages": {"tune": in_stages},
}  # fmt: skip
EngineOf = Callable[..., NumbersEngine]


@pytest.fixture
def numbers_of(tmp_path: Path, shared_daemon: Daemon) -> Iterator[EngineOf]:
    """Starts engines of numbers with this module's daemon; no other test uses the same weights."""
    running: list[NumbersEngine] = []
    shared_daemon.wait_for_arena()

    def start(model: str, **changes: Any) -> NumbersEngine:
        extra = {"weights": str(tmp_path)} | changes.pop("extra", {})
        engine = NumbersEngine(
            model, tmp_path / "model", shared_daemon.socket, extra=extra, **changes
        )
        running.append(engine)
        return engine

    yield start
    for engine in running:
        engine.close()


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[], float]) -> None:
    """Delay each piece of a save by `seconds`."""
    call = RankSaves._copy

    def slowly(side: RankSaves, *args: Any) -> Any:
        time.sleep(seconds())
        return call(side, *args)

    monkeypatch.setattr(RankSaves, "_copy", slowly)


def slow_pieces(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Delay each save between its reservation and its copy, for this long in all."""
    call = Saving.gather

    def slowly(saving: Saving, *args: Any, turn: Any, **more: Any) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not turn._cancelled:
            time.sleep(0.005)
        call(saving, *args, turn=turn, **more)

    monkeypatch.setattr(Saving, "gather", slowly)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_is_loaded_as_it_was_saved(numbers_of: EngineOf, model: str, how: str) -> None:
    """In chunks, after the engine has dropped it, in another engine, and two at once."""
    if how == "stages" and model in WITHOUT_STAGES:
        pytest.skip("a stage without attention is declined")
    one = numbers_of(model, **HOW[how])
    first, other = prompt(1, 150), prompt(2, 203)
    assert one.run(first, other) == [0, 0]
    assert one.core.reset_prefix_cache()
    assert one.run(first) == [144]
    again = numbers_of(model, **HOW[how])
    assert again.run(first, other) == [144, 192]
    assert again.rank.compared
    assert (again.core.batch_queue is not None) == (how != "sync")


def spoil(rank: Any, how: str, name: str, page: int, other: int) -> None:
    """Write wrong content into one page of a layer."""
    page, foreign = rank.page(name, page), rank.page(name, other)
    held = page.clone()
    page.copy_(foreign) if how != "zeroed" else page.zero_()
    if how == "exchanged":
        foreign.copy_(held)


@pytest.mark.parametrize("how", ["zeroed", "foreign", "exchanged"])
@pytest.mark.parametrize(
    ("model", "layer"),
    [("full and window", 0), ("full and window", 1), ("jamba", 0), ("jamba", 3)],
    ids=["full", "window", "state", "full beside states"],
)
def test_a_wrong_page_is_detected(
    numbers_of: EngineOf, monkeypatch: pytest.MonkeyPatch, model: str, layer: int, how: str
) -> None:
    """The controls: one page of one layer is wrong, in one of two requests that are loaded."""
    one = numbers_of(model)
    asked = prompt(1, 150), prompt(2, 150)
    one.run(*asked)
    again = numbers_of(model)
    name, call, before = f"model.layers.{layer}.attn", RankLoads._load, []

    def spoilt(side: RankLoads, load: Any) -> bool:
        good = call(side, load)
        group = again.rank.group_of[name]
        pages = next(read for read in load.shards[0] if read.group == group).block_ids
        before.append(pages[-1])
        if len(before) == 2:
            # The first request may already have continued; the second request's page is not read
            # yet.
            spoil(again.rank, how, name, before[1], before[0])
        return good

    monkeypatch.setattr(RankLoads, "_load", spoilt)
    names = [again.add(one) for one in asked]
    again.until(lambda: all(name in again.reasons for name in names))
    assert len(before) == 2 and {(what, at) for _, what, at in again.rank.wrong} == {(name, 8)}
    again.settle()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("model", WITH_STATES)
def test_a_state_is_found_where_it_was_saved(
    numbers_of: EngineOf, model: str, asynchronous: bool
) -> None:
    """Not between two states, although all attention blocks are stored; not beyond the last one."""
    one = numbers_of(model, asynchronous=asynchronous)
    text = prompt(1, 300)
    one.run(text[:150])
    again = numbers_of(model, asynchronous=asynchronous)
    assert again.run(text[:140]) == [0]
    assert again.core.reset_prefix_cache()
    assert again.run(text) == [144]
    # This prompt saved states too: one where its common head ends, and one at its own end.
    assert again.core.reset_prefix_cache()
    assert again.run(text[:145]) == [144]
    assert again.core.reset_prefix_cache()
    assert again.run(text) == [288]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("model", WITH_STATES)
def test_each_state_that_the_engine_keeps_is_saved(
    numbers_of: EngineOf, model: str, asynchronous: bool
) -> None:
    """The states at the ends of the prompt's chunks, and of generated tokens: a second turn continues
    from them."""
    one = numbers_of(model, asynchronous=asynchronous, budget=64, **DENSE)
    text = prompt(1, 150)
    name = one.add(text, 40)
    one.until(lambda: name in one.reasons)
    one.settle()
    again = numbers_of(model, asynchronous=asynchronous, **DENSE)
    turn = text + one.answers[name]
    for tokens, loaded in ((65, 64), (129, 128), (145, 144), (161, 160), (177, 176), (190, 176)):
        assert again.run(turn[:tokens]) == [loaded], tokens
        assert again.core.reset_prefix_cache()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("model", "blocks"), [("full", 24), ("full and window", 44), ("jamba", 48), ("mamba", 12)]
)
def test_all_pages_are_correct_under_pressure(
    numbers_of: EngineOf, monkeypatch: pytest.MonkeyPatch, model: str, blocks: int, how: str
) -> None:
    """Pages for half of the requests: requests are preempted and aborted, and the engine's cache is
    reset, while saves are so slow that their pages are reused before. Then all prompts are loaded."""
    chance = random.Random(f"{model} {how}")
    slow, call = random.Random(1), RankSaves._copy
    slow_down(monkeypatch, lambda: slow.choice((0, 0, 0, 0.003, 0.02)))
    heads = [prompt(seed, 120) for seed in range(3)]
    asked = [
        (chance.choice(heads)[: chance.choice((60, 96, 120))] + prompt(10 + at, chance.randrange(4, 60)))
        for at in range(24)
    ]  # fmt: skip
    small = {"blocks": blocks, "max_model_len": 256, "hasty": True}
    one = numbers_of(model, **HOW[how], **small, **DENSE)
    preempted, call_off = [], one.core.scheduler._preempt_request
    monkeypatch.setattr(
        one.core.scheduler, "_preempt_request",
        lambda request, *args, **kwargs: (preempted.append(1), call_off(request, *args, **kwargs))[1],
    )  # fmt: skip
    waiting, names, given_up = list(asked), {}, set()
    for at in range(4000):
        if waiting and at % 3 == 0:
            text = waiting.pop()
            names[one.add(text, 30)] = text
        if chance.random() < 0.02 and (running := names.keys() - one.reasons.keys() - given_up):
            given_up.add(chance.choice(sorted(running)))
            one.core.abort_requests([*given_up])
        if chance.random() < 0.02:
            one.core.reset_prefix_cache()
        one.step()
        if not waiting and names.keys() <= one.reasons.keys() | given_up:
            if preempted:
                break
            # With late answers few requests run concurrently, and their pages may suffice.
            waiting = list(asked)
    one.settle()
    assert preempted and given_up and not one.rank.wrong, one.rank.wrong
    assert all(one.answers[name] == answer_to(names[name], 30) for name in names.keys() - given_up)
    monkeypatch.setattr(RankSaves, "_copy", call)
    assert one.core.reset_prefix_cache()
    one.run(*asked)
    again = numbers_of(model, **HOW[how])
    assert sum(again.run(*asked)) > 12 * BLOCK


def test_a_moving_window_does_not_prevent_a_hit_at_the_end(
    numbers_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are reused immediately, long before they are saved."""
    slow_down(monkeypatch, lambda: 0.002)
    one = numbers_of("full and window", hasty=True)
    asked = [prompt(seed, 500) for seed in range(4)]
    for text in asked:
        one.run(text, tokens=100)
    again = numbers_of("full and window")
    assert again.run(*asked) == [496] * 4


def test_a_producer_loads_nothing_and_a_consumer_saves_nothing(numbers_of: EngineOf) -> None:
    text, other = prompt(1, 150), prompt(2, 150)
    producer = numbers_of("full", role="kv_producer")
    assert producer.run(text) == [0]
    assert producer.core.reset_prefix_cache()
    assert producer.run(text) == [0]
    consumer = numbers_of("full", role="kv_consumer")
    assert consumer.run(text, other) == [144, 0]
    assert numbers_of("full").run(text, other) == [144, 0]
    counts = producer.connector._scheduler.counts
    assert counts["saved_tokens"] == 144 and not counts["loaded_tokens"]
    assert not consumer.connector._scheduler.counts["saved_tokens"]


def test_blocks_from_before_a_reset_are_not_found(numbers_of: EngineOf) -> None:
    engine = numbers_of("jamba", asynchronous=True)
    text = prompt(1, 150)
    engine.run(text)
    assert engine.core.reset_prefix_cache(reset_connector=True)
    assert engine.run(text) == [0]
    assert engine.core.reset_prefix_cache()
    assert engine.run(text) == [144]


@pytest.fixture
def flagged(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The groups of an engine, the last of which vLLM regards as one that contains a draft model's layers: it
    computes their last block again, because it depends on the token after it."""
    from vllm.v1.core import kv_cache_utils

    call, found = kv_cache_utils.get_kv_cache_groups, []

    def groups(*args: Any) -> Any:
        found[:] = call(*args)
        found[-1].is_eagle_group = True
        return list(found)

    monkeypatch.setattr(kv_cache_utils, "get_kv_cache_groups", groups)
    return found


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("model", ["full", "window", "full and window"])
def test_groups_with_draft_layers_are_served(
    numbers_of: EngineOf, flagged: list[Any], model: str, asynchronous: bool
) -> None:
    """The engine's own hit ends a block earlier, and the daemon has the block after it."""
    one = numbers_of(model, asynchronous=asynchronous)
    assert flagged[-1].is_eagle_group
    first, other = prompt(1, 150), prompt(2, 203)
    assert one.run(first, other) == [0, 0]
    assert one.run(first) == [BLOCK]
    assert one.core.reset_prefix_cache()
    assert one.run(first) == [144]
    again = numbers_of(model, asynchronous=asynchronous)
    assert again.run(first, other) == [144, 192]
    for common in (48, 96, 144):
        assert again.core.reset_prefix_cache()
        assert again.run(other[: common + 4] + prompt(3, 199 - common)) == [common]


def discard_pages(engine: NumbersEngine, how: str) -> None:
    if how == "sleep":
        engine.core.sleep(1)
        return
    while engine.core.scheduler.has_requests():
        engine.step()
    engine.core.pause_scheduler()
    engine.core.release_kv_cache_memory()


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "is cancelled"])
@pytest.mark.parametrize("how", ["sleep", "release"])
def test_no_save_reads_pages_that_sleep_mode_has_discarded(
    numbers_of: EngineOf, monkeypatch: pytest.MonkeyPatch, how: str, ends: bool
) -> None:
    """A save in progress has a moment to end. What another engine finds then is right."""
    one = numbers_of("full", sleeps=True, hasty=True)
    text = prompt(1, 150)
    slow_pieces(monkeypatch, 0.05 if ends else 5.0)
    monkeypatch.setattr("kvtier_vllm.worker.DRAIN_S", 30.0 if ends else 0.05)
    name = one.add(text, 1)
    one.until(lambda: name in one.reasons)
    assert one.held["saves"]
    discard_pages(one, how)
    one.core.wake_up()
    one.settle()
    monkeypatch.undo()
    assert numbers_of("full").run(text) == [144 if ends else 0]


def test_an_engine_saves_and_loads_again_after_sleep(numbers_of: EngineOf) -> None:
    """vLLM resets its connectors when it sleeps: this engine does not find what was saved before, and the
    others do."""
    one = numbers_of("full and window", sleeps=True)
    text = prompt(1, 150)
    assert one.run(text) == [0]
    for _ in range(2):
        one.core.sleep(1)
        one.core.wake_up()
        assert one.run(text) == [0]
        assert one.core.reset_prefix_cache()
        assert one.run(text) == [144]
    assert numbers_of("full and window").run(text) == [144]


def test_sleep_waits_for_a_load(numbers_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that has begun cannot be cancelled, and would write into memory that is gone."""
    one = numbers_of("full", sleeps=True, extra={"load": "async"})
    text = prompt(1, 150)
    one.run(text)
    assert one.core.reset_prefix_cache()
    call, ended = RankLoads._load, []

    def slowly(side: RankLoads, load: Any) -> bool:
        time.sleep(0.3)
        good = call(side, load)
        ended.append(time.monotonic())
        return good

    monkeypatch.setattr(RankLoads, "_load", slowly)
    worker = one.rank.connector._worker
    one.add(text, 1)
    one.until(lambda: worker.state.pending_loads)
    connector.end_copies(None)
    assert len(ended) == 1 and not worker.state.pending_loads
    worker.state.pending_loads[b"a load that does not end"] += 1
    monkeypatch.setattr("kvtier_vllm.worker.LOADS_S", 0.05)
    with pytest.raises(TimeoutError, match="still fill pages"):
        connector.end_copies(None)
    worker.state.pending_loads.clear()
    one.settle()


def test_sleep_during_a_load_succeeds_or_fails_in_vllm(
    numbers_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM resets its own cache first, which it refuses while a load fills pages, also with other connectors.
    Then nothing is discarded, and it can sleep when the load has ended."""
    one = numbers_of("full", sleeps=True, extra={"load": "async"})
    text = prompt(1, 150)
    one.run(text)
    assert one.core.reset_prefix_cache()
    call = RankLoads._load

    def slowly(side: RankLoads, load: Any) -> bool:
        time.sleep(0.5)
        return call(side, load)

    monkeypatch.setattr(RankLoads, "_load", slowly)
    loads = one.rank.connector._worker.state.pending_loads
    one.add(text, 1)
    one.until(lambda: bool(loads))
    try:
        one.core.sleep(1)
    except RuntimeError as error:
        assert "requests waiting for remote KV transfer" in str(error)
        assert not one.core.model_executor.is_sleeping
        one.until(lambda: not one.busy, one.step_idly)
        one.core.sleep(1)
    assert not loads and one.core.model_executor.is_sleeping
    one.core.wake_up()
    assert one.run(text) == [0]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_blocks_of_other_weights_are_not_found(numbers_of: EngineOf, asynchronous: bool) -> None:
    """Weights that change in place, with no notice to connectors, and with the engine's own cache reset as
    vLLM demands. A request that is being served continues, and saves no blocks of both weights."""
    one = numbers_of("full", asynchronous=asynchronous)
    text, other = prompt(1, 150), prompt(2, 150)
    assert one.run(text) == [0]
    one.core.collective_rpc("compute_weight_checksums")
    assert one.core.reset_prefix_cache()
    assert one.run(text) == [144]
    one.core.collective_rpc("reload_weights", args=(7,))
    assert one.core.reset_prefix_cache()
    assert one.run(text, other) == [0, 0]
    assert one.core.reset_prefix_cache()
    assert one.run(text, other) == [144, 144]
    again = numbers_of("full")
    assert again.run(text, other) == [144, 0]


@pytest.mark.parametrize("how", ["reset", "reset with connectors", "pause"])
def test_blocks_between_a_change_of_weights_and_the_reset_are_not_found_after_it(
    numbers_of: EngineOf, how: str
) -> None:
    """A request between them gets a prefix of the old weights from the engine's own cache."""
    one = numbers_of("full")
    text, longer = prompt(1, 150), prompt(1, 150) + prompt(3, 150)
    assert one.run(text) == [0]
    one.core.collective_rpc("reload_weights", args=(7,))
    name = one.add(longer, 60)
    one.until(lambda: bool(one.answers[name]))
    assert not one.core.reset_prefix_cache()  # the request has pages
    one.until(lambda: name in one.reasons)
    one.settle()
    assert one.rank.wrong, "no page of the old weights was read"
    one.rank.wrong.clear()
    if how == "pause":
        one.core.pause_scheduler()
        one.core.resume_scheduler()
    else:
        assert one.core.reset_prefix_cache(reset_connector="connectors" in how)
    assert one.run(longer) == [0]
    # Later resets remove nothing from the daemon.
    assert one.core.reset_prefix_cache()
    assert one.run(longer) == [288]


def test_a_request_that_is_served_while_weights_change_saves_nothing_more(
    numbers_of: EngineOf,
) -> None:
    one = numbers_of("full")
    side = one.connector._scheduler
    name = one.add(prompt(1, 150), 60)
    one.until(lambda: len(one.answers[name]) > 20)
    one.until(lambda: not side.in_flight["saves"])
    saved = side.counts["saved_tokens"]
    assert saved >= 144
    one.core.collective_rpc("reload_weights", args=(7,))
    one.until(lambda: name in one.reasons)
    one.settle()
    assert side.counts["saved_tokens"] == saved


@pytest.fixture
def neighbour(monkeypatch: pytest.MonkeyPatch) -> type[Neighbour]:
    """The other connector of the next engine, which has no blocks yet."""
    monkeypatch.setattr(Neighbour, "offers", {})
    return Neighbour


@pytest.mark.parametrize("several", [False, True], ids=["one connector", "several connectors"])
def test_a_change_of_weights_concerns_one_engine_of_a_process(
    numbers_of: EngineOf, neighbour: type[Neighbour], several: bool
) -> None:
    one = numbers_of("full", other_connector="Neighbour" if several else "")
    other = numbers_of("full")
    text = prompt(1, 150)
    assert one.run(text) == [0]
    assert other.run(text) == [144]
    one.core.collective_rpc("reload_weights", args=(7,))
    for engine, found in ((one, 0), (other, 144)):
        assert engine.core.reset_prefix_cache()
        assert engine.run(text) == [found]
    # Only the first reset after a change begins another generation.
    assert one.core.reset_prefix_cache()
    assert one.run(text) == [144]


def test_an_adapter_whose_files_change_between_its_load_and_its_first_request_is_not_identified(
    numbers_of: EngineOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.lora.request import LoRARequest

    engine = numbers_of("full")
    loaded: list[Any] = []
    monkeypatch.setattr(engine.core.model_executor, "add_lora", loaded.append, raising=False)
    adapters = engine.connector._scheduler.adapters
    for at, changes in enumerate((False, True), 1):
        folder = tmp_path / str(at)
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(bytes(100))
        lora = LoRARequest("sql", at, str(folder))
        engine.core.add_lora(lora)
        assert loaded[-1] is lora
        if changes:
            (folder / "adapter_model.safetensors").write_bytes(bytes(101))
        assert (adapters.extras(lora) is None) == changes


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("good", [True, False], ids=["good", "failed"])
def test_blocks_that_another_connector_loaded_are_saved_only_after_success(
    numbers_of: EngineOf, neighbour: type[Neighbour], good: bool, asynchronous: bool
) -> None:
    """Pages that it left unfilled are not saved, and neither are blocks computed from them: of the
    request that it loads for, and of one that shares its pages in the same step."""
    one = numbers_of(
        "full", asynchronous=asynchronous, other_connector="Neighbour", budget=128,
        long_prefill_token_threshold=64,
    )  # fmt: skip
    one.rank.spreads, neighbour.rank, neighbour.good = True, one.rank, good
    neighbour.offers["r1"] = 96
    asked = prompt(1, 300), prompt(1, 96) + prompt(2, 204)
    names, side = [one.add(text, 1) for text in asked], one.connector._scheduler
    one.until(lambda: not side.in_flight["tickets"], side._receive)  # the first step schedules both
    one.until(lambda: all(name in one.reasons for name in names))
    one.settle()
    assert {name for name, _, _ in one.rank.wrong} == (set() if good else set(names))
    again = numbers_of("full")
    for text, loaded in zip(asked, (288, 288 if good else 96), strict=True):
        assert again.run(text) == [loaded]
        assert again.core.reset_prefix_cache()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("model", ["window", "mamba"])
@pytest.mark.parametrize("good", [True, False], ids=["good", "failed"])
def test_blocks_without_valid_predecessors_are_not_saved(
    numbers_of: EngineOf, neighbour: type[Neighbour], model: str, good: bool, asynchronous: bool
) -> None:
    """If another connector's load of a window or a state fails, the engine continues at the first of
    its pages."""
    one = numbers_of(model, asynchronous=asynchronous, other_connector="Neighbour")
    one.rank.spreads, neighbour.rank, neighbour.good = True, one.rank, good
    neighbour.offers["r1"] = 96
    text = prompt(1, 300)
    name = one.add(text, 1)
    one.until(lambda: name in one.reasons)
    one.settle()
    assert bool(one.rank.wrong) != good
    again = numbers_of(model)
    assert again.run(text) == [288 if good else 0]


def test_a_window_is_loaded_between_steps(
    numbers_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a load fails, its request is computed from the beginning."""
    text = prompt(1, 300)
    numbers_of("window").run(text[:161])
    one = numbers_of("window", extra={"load": "sync"})
    one.rank.spreads, failed = True, []

    def fail(side: RankLoads, load: Any) -> bool:
        failed.append(load)
        one.rank.spoil(load.shards[0][0].block_ids)
        return side._count(load, "stale", 0, 0.0)

    with monkeypatch.context() as patch:
        patch.setattr(RankLoads, "_load", fail)
        one.run(text)
    assert failed
    again = numbers_of("window")
    assert again.run(text) == [288]


def test_a_declined_rank_leaves_no_page_unverified(
    numbers_of: EngineOf, neighbour: type[Neighbour], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank still reports which step ended."""

    def refuse(*args: Any) -> None:
        raise Unsupported("not here")

    monkeypatch.setattr(connector, "open_device", refuse)
    monkeypatch.setattr(NumbersEngine, "connect", lambda engine: None)
    one = numbers_of("full", other_connector="Neighbour")
    neighbour.rank, neighbour.good = one.rank, True
    neighbour.offers["r1"] = 96
    assert one.run(prompt(1, 200)) == [96]
    assert not len(one.connector._scheduler._saves.unverified)


@pytest.mark.parametrize(("chunk", "shared"), [(32, 192), (24, 32)])
def test_cached_blocks_of_a_failed_load_are_not_saved(
    numbers_of: EngineOf, monkeypatch: pytest.MonkeyPatch, chunk: int, shared: int
) -> None:
    """It recomputes those pages in several steps, and another request uses them meanwhile: some that
    were not computed yet, or half of one. The other one does not load: it would wait for an answer."""
    text, other = prompt(1, 400), prompt(1, shared) + prompt(2, 100)
    numbers_of("full").run(text[:161])
    one = numbers_of("full", extra={"load": "sync"}, budget=64, long_prefill_token_threshold=chunk)
    one.rank.spreads, call, failed = True, RankLoads._load, []

    def fail(side: RankLoads, load: Any) -> bool:
        failed.append(load)
        one.rank.spoil(load.shards[0][0].block_ids)
        return side._count(load, "stale", 0, 0.0)

    monkeypatch.setattr(RankLoads, "_load", fail)
    names = [one.add(text, 1)]
    one.until(lambda: bool(failed))
    monkeypatch.setattr(RankLoads, "_load", call)
    names.append(one.add(other, 1, load=False))
    one.until(lambda: all(name in one.reasons for name in names))
    one.settle()
    assert {name for name, _, _ in one.rank.wrong} == set(names)
    again = numbers_of("full")
    assert again.run(text, other)[0] == 384
