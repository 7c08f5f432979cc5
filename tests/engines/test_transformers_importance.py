"""The importance of blocks: measured in the model's own attention, and sent as hints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engines.tiny import prompt, tiny_model  # noqa: E402
from kvtier import Client, InvalidArgument  # noqa: E402
from kvtier_daemon.cli import main  # noqa: E402
from kvtier_transformers import KvtierCache, attach  # noqa: E402
from kvtier_transformers.importance import Importance  # noqa: E402
from support.daemons import Daemon  # noqa: E402

BLOCK = 16


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[Client]:
    with shared_daemon.connect() as connected:
        yield connected


@pytest.fixture
def record(shared_daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> Callable[[str], Any]:
    def run(order: str) -> Any:
        with pytest.raises(SystemExit):
            main(["record", order, "--json", "--socket", shared_daemon.socket])
        return json.loads(capsys.readouterr().out)

    return run


def exact(model: Any, ids: Any, layers: list[int], places: list[int]) -> list[list[float]]:
    """The importance of whole blocks by the library's own attention probabilities."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(ids, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    every = torch.stack([found[at] for at in layers]).mean((0, 2))[:, places].sum(1)
    equal = torch.zeros(ids.shape[1])
    for place in places:
        equal[: place + 1] += 1 / (place + 1)
    blocks = ids.shape[1] // BLOCK
    result = []
    for row in every:
        mass = row[: blocks * BLOCK].view(blocks, BLOCK).sum(1)
        same = equal[: blocks * BLOCK].view(blocks, BLOCK).sum(1)
        mass, same = mass / mass.sum(), same / same.sum()
        result.append((mass / (mass + same)).tolist())
    return result


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("how", ["last", "accumulated"])
def test_importance_is_the_attention_that_the_library_computes(
    client: Client, kind: str, how: str
) -> None:
    model, ids = tiny_model(kind), prompt(200, seed=3)
    cache = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK, importance=how)
    output = model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert torch.equal(output, model.generate(ids, max_new_tokens=3, do_sample=False))
    places = list(range(184, 200))
    if how == "accumulated":
        places = torch.linspace(0, 199, 32).long().tolist()
    assert cache.source is not None and cache.source.importance is not None
    found = cache.source.importance.blocks(0, 0, BLOCK)
    layers = [at for at, layer in enumerate(cache.layers) if layer.meter is not None]
    assert len(layers) == (3 if how == "last" else 2)
    assert found == pytest.approx(exact(model, ids, layers, places)[0], abs=1e-4)
    assert len(set(found)) == 12


def test_the_tail_of_a_loaded_prefix_is_measured_over_all_blocks(client: Client) -> None:
    model, ids = tiny_model("llama"), prompt(200, seed=4)
    for loaded in (0, 192):
        cache = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK, importance="last")
        assert cache.loaded_tokens == loaded
        cache.save(model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False))
        assert cache.source is not None and cache.source.importance is not None
        layers = [at for at, layer in enumerate(cache.layers) if layer.meter is not None]
        places = list(range(max(184, loaded), 200))
        found = cache.source.importance.blocks(0, 0, BLOCK)
        assert found == pytest.approx(exact(model, ids, layers, places)[0], abs=1e-4)


def test_padding_has_no_importance() -> None:
    keys, queries = torch.randn(2, 2, 64, 8), torch.randn(2, 4, 64, 8)
    both = Importance("last", [0, 16])
    both.note(queries, keys, 0.3)
    alone = Importance("last", [0])
    alone.note(queries[1:, :, 16:], keys[1:, :, 16:], 0.3)
    assert len(both.blocks(0, 0, BLOCK)) == 4
    assert both.blocks(1, 16, BLOCK) == pytest.approx(alone.blocks(0, 0, BLOCK), abs=1e-6)


def test_every_generate_sends_a_hint_for_each_block_of_its_prompt(
    client: Client, record: Callable[[str], Any]
) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(
                20
            )  # random weights give all tokens the same attention
    ids = torch.tensor([[5] * 96 + [9] * 104])
    record("start")
    with attach(model, client, block_tokens=BLOCK, importance="last") as attached:
        model.generate(ids, max_new_tokens=3, do_sample=False)
        client.stats()  # an answer: the daemon has the hints before it
        assert attached.counts["hinted_blocks"] == attached.counts["saved_blocks"] == 12
    with Path(record("stop")["path"]).open() as file:
        lines = [json.loads(line) for line in file]
    hints = [line for line in lines if "importance" in line]
    assert 2 <= len(hints) <= 3
    assert len({line["importance"] for line in hints}) == len(hints)
    named = [name for line in hints for name in line["hash_ids"]]
    assert len(named) == 12 and set(named) == set(lines[0]["hash_ids"])


def test_models_without_a_registered_attention_generate_without_hints(client: Client) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    with attach(model, client, block_tokens=BLOCK, importance="last") as attached:
        model.generate(prompt(100, seed=6), max_new_tokens=3, do_sample=False)
        assert attached.counts["hinted_blocks"] == 0 and attached.counts["saved_blocks"] == 6


def test_an_unknown_way_to_measure_is_refused(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="importance"):
        attach(tiny_model("llama"), client, importance="most")
