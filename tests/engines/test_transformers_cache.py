"""Caches of transformers models: prompts, batches, failures of the daemon, and identity."""

from __future__ import annotations

import copy
import logging
import re
import runpy
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engines.tiny import WINDOW, prompt, tiny_model  # noqa: E402
from kvtier import Client, InvalidArgument, wire  # noqa: E402
from kvtier_kernels import release_views, views  # noqa: E402
from kvtier_transformers import KvtierCache, attach  # noqa: E402
from kvtier_transformers.layers import ROOM_TOKENS  # noqa: E402
from support.daemons import Daemon  # noqa: E402
from support.tiny_models import save_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK = 16
ERROR = 1e-4


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[Client]:
    with shared_daemon.connect() as connected:
        yield connected


def greedy(model: Any, ids: Any, **more: Any) -> Any:
    return model.generate(ids, **{"max_new_tokens": 12, "do_sample": False} | more)


def saved(model: Any, ids: Any, client: Client, **options: Any) -> Any:
    """Generate and save with a cache of its own; return the tokens."""
    cache = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK, **options)
    out = greedy(model, ids, past_key_values=cache)
    cache.save(out)
    return out


def loaded(model: Any, ids: Any, client: Client, **options: Any) -> int:
    cache = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK, **options)
    assert torch.equal(greedy(model, ids, past_key_values=cache), greedy(model, ids))
    return cache.loaded_tokens


@pytest.mark.parametrize("options", [{}, {"memory": "1MiB"}], ids=str)
def test_torch_s_default_device_is_not_used(client: Client, options: dict[str, str]) -> None:
    """Tensors without content, which nothing can be computed with, instead of a GPU's."""
    model, ids = tiny_model("llama"), prompt(100, seed=77 + len(options))
    mask = torch.ones_like(ids)
    with attach(model, client, block_tokens=BLOCK, **options) as attached:
        with torch.device("meta"):
            found = [greedy(model, ids, attention_mask=mask) for _ in range(2)]
        assert attached.counts["loaded_tokens"] == 96, attached.counts
    assert all(torch.equal(one, greedy(model, ids)) for one in found)


# --- prompts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "expected"), [(15, 0), (16, 0), (17, 16), (31, 16), (32, 31), (40, 32)]
)
def test_the_longest_prefix_is_loaded_and_a_token_is_left(
    client: Client, tokens: int, expected: int
) -> None:
    model, ids = tiny_model("llama"), prompt(tokens, seed=tokens)
    cache = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK)
    assert cache.loaded_tokens == 0
    greedy(model, ids, past_key_values=cache)
    assert cache.save() == tokens // BLOCK * BLOCK
    assert loaded(model, ids, client) == (expected if tokens != 16 else 15)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_another_prompt_loads_what_both_begin_with(client: Client, kind: str) -> None:
    model, ids = tiny_model(kind), prompt(90, seed=5)
    saved(model, ids, client)
    other = torch.cat([ids[:, :56], prompt(30, seed=6)], 1)
    assert loaded(model, other, client) == 48


def test_a_list_of_tokens_is_a_prompt(client: Client) -> None:
    model, ids = tiny_model("llama"), prompt(40, seed=7)
    saved(model, ids, client)
    cache = KvtierCache.from_prompt(model, ids[0].tolist(), client, block_tokens=BLOCK)
    assert cache.loaded_tokens == 32


def test_wrong_arguments_are_refused(client: Client) -> None:
    model, ids = tiny_model("llama"), prompt(40)
    with pytest.raises(InvalidArgument, match="block_tokens"):
        KvtierCache.from_prompt(model, ids, client, block_tokens=0)
    with pytest.raises(InvalidArgument, match="blocks"):
        attach(model, client, blocks=16)
    with pytest.raises(InvalidArgument, match="padding on the left"):
        mask = torch.ones_like(ids)
        mask[0, -1] = 0
        KvtierCache.from_prompt(model, ids, client, attention_mask=mask)
    cache = KvtierCache.from_prompt(model, ids, client)
    with pytest.raises(InvalidArgument, match="followed by new tokens"):
        cache.save(prompt(50, seed=8))


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_blocks_that_are_absent_end_the_prefix(client: Client, kind: str) -> None:
    model, ids = tiny_model(kind), prompt(100, seed=9)
    cache = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK)
    greedy(model, ids, past_key_values=cache)
    cache.save()
    space = cache.source.place.space
    keys = space.keys(ids[0].tolist())
    assert space.forget(keys[4:5])
    assert loaded(model, ids, client) == 64


def test_prompts_that_do_not_fit_into_memory_at_once_are_loaded_from_disk_one_after_the_other(
    tmp_path: Path, daemon_of: Callable[..., Daemon]
) -> None:
    """Memory has room for one and a half prompts. What one load has read makes room for the next one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    cold = f'[cold]\ndirectories = ["{disk}"]\nsize = "64MiB"\nwrite = "through"\nscrub = 0\n'
    daemon = daemon_of(config=cold, warm="4MiB")
    daemon.wait_for_disks()
    model, blocks = tiny_model("llama", head_dim=64), 60
    prompts = [prompt(blocks * BLOCK + 1, seed) for seed in (1, 2, 3)]
    with daemon.connect() as client:
        for number, ids in enumerate(prompts, 1):
            saved(model, ids, client)
            daemon.wait_for(
                lambda stats, least=number * blocks: stats["tiers"]["cold"]["blocks"] >= least
            )
        with attach(model, client, block_tokens=BLOCK, patience_ms=60_000) as attached:
            for ids in prompts * 2:
                before = attached.counts.copy()
                greedy(model, ids, max_new_tokens=1)
                loads = attached.counts - before
                assert loads["loaded_tokens"] == blocks * BLOCK, loads
                assert loads["disk_tokens"], loads


def test_a_damaged_block_is_a_miss(shared_daemon: Daemon, client: Client) -> None:
    model, ids = tiny_model("llama"), prompt(100, seed=10)
    saved(model, ids, client)
    with shared_daemon.connect() as other, shared_daemon.connect(verify=True) as verifying:
        space = KvtierCache.from_prompt(model, ids, other, block_tokens=BLOCK).source.place.space
        lease = space.lease(space.keys(ids[0].tolist()))
        slots = lease.part(0, 0).slots[2 * wire.SLOT_BYTES : 3 * wire.SLOT_BYTES]
        (slot,) = views(other.link.mappings[0], slots, space.block_bytes, True)
        slot[5] ^= 1
        release_views([slot])
        lease.release()
        assert loaded(model, ids, verifying) == 0
        # The daemon forgets the block.
        shared_daemon.wait_for(
            lambda stats: any(one["spoilt_blocks"] for one in stats["tenants"].values())
        )
        assert loaded(model, ids, verifying) == 32


# --- batches -----------------------------------------------------------------------------------


def padded(rows: list[Any]) -> tuple[Any, Any]:
    longest = max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, longest - row.shape[1] :] = row[0]
        mask[at, longest - row.shape[1] :] = 1
    return ids, mask


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3", "gpt2", "opt"])
def test_each_row_of_a_batch_has_its_own_prefix(client: Client, kind: str) -> None:
    model = tiny_model(kind)
    rows = [prompt(100, seed=11), prompt(75, seed=12), prompt(90, seed=13)]
    ids, mask = padded(rows)
    told = {"attention_mask": mask, "return_dict_in_generate": True, "output_logits": True}
    wanted = greedy(model, ids, **told)
    for row in rows[:2]:
        saved(model, row, client)
    with attach(model, client, block_tokens=BLOCK) as attached:
        assert torch.equal(greedy(model, ids, attention_mask=mask), wanted.sequences)
        # The third row has nothing: only its padding can be in the cache.
        assert attached.counts["loaded_tokens"] == 10 + 0 + 0
        found = greedy(model, ids, **told)
        assert torch.equal(found.sequences, wanted.sequences)
        for one, other in zip(found.logits, wanted.logits, strict=True):
            assert (one - other).abs().max() <= ERROR
        # The second row has 64 tokens behind 25 of padding, so every row ends at place 89.
        assert attached.counts["loaded_tokens"] == 10 + (89 - 0) + (89 - 25) + (89 - 10)
        assert not [name for name in attached.counts if name.startswith("failed")]


def test_each_answer_to_a_prompt_is_saved(client: Client) -> None:
    model, ids = tiny_model("llama"), prompt(60, seed=14)
    with attach(model, client, block_tokens=BLOCK) as attached:
        torch.manual_seed(3)
        answers = greedy(model, ids, do_sample=True, num_return_sequences=3, max_new_tokens=30)
        for answer in answers:
            greedy(model, torch.cat([answer[None], prompt(5)], 1))
        assert attached.counts["loaded_tokens"] == 3 * 80
        attached.detach()
        wanted = greedy(model, ids, num_beams=3)
    with attach(model, client, block_tokens=BLOCK) as attached:
        assert torch.equal(greedy(model, ids, num_beams=3), wanted)
        assert attached.counts["loaded_tokens"] == 48


def test_a_batch_with_states_is_served_without_padding(client: Client) -> None:
    model, rows = tiny_model("lfm2"), [prompt(60, seed=40), prompt(60, seed=41)]
    ids, mask = padded([*rows, prompt(50, seed=42)])
    wanted = greedy(model, ids, attention_mask=mask)
    with attach(model, client, block_tokens=BLOCK) as attached:
        assert torch.equal(greedy(model, ids, attention_mask=mask), wanted)
        greedy(model, rows[0], do_sample=True, num_return_sequences=2)
        assert attached.counts["declined:states"] == 2
        for _ in range(2):
            greedy(model, torch.cat(rows))
        assert attached.counts["loaded_tokens"] == 2 * 48


@pytest.mark.parametrize(
    ("why", "more"),
    [
        ("use_cache", {"use_cache": False}),
        ("prefill_chunk_size", {"prefill_chunk_size": 8}),
        ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 3}),
        ("position_ids", {"position_ids": list(range(40))}),
    ],
)
def test_a_call_with_a_cache_of_its_own_runs_without_kvtier(
    client: Client, why: str, more: dict[str, Any]
) -> None:
    model, ids = tiny_model("llama"), prompt(40, seed=15)
    if why == "position_ids":
        more = {why: torch.tensor([more[why]], device=ids.device)}
    wanted = greedy(model, ids, **more)
    with attach(model, client, block_tokens=BLOCK) as attached:
        assert torch.equal(greedy(model, ids, **more), wanted)
        assert attached.counts[f"declined:{why}"] == 1


# --- layers ------------------------------------------------------------------------------------


def test_copies_of_a_cache_continue_apart(client: Client) -> None:
    model, ids = tiny_model("llama"), prompt(40, seed=16)
    saved(model, ids, client)
    first = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK)
    second = copy.deepcopy(first)
    third = copy.copy(first)
    third.layers = [copy.copy(layer) for layer in first.layers]
    wanted = greedy(model, ids, max_new_tokens=20)
    other = torch.cat([ids, prompt(9, seed=17)], 1)
    wanted_other = greedy(model, other)
    for cache, tokens, expected in (
        (first, ids, wanted[:, :52]), (second, other, wanted_other), (third, other, wanted_other),
        (first, wanted[:, :52], wanted),
    ):  # fmt: skip
        found = greedy(
            model, tokens, past_key_values=cache, max_new_tokens=expected.shape[1] - tokens.shape[1]
        )
        assert torch.equal(found, expected)


def test_a_window_keeps_a_limited_history(client: Client) -> None:
    model, ids = tiny_model("mistral"), prompt(600, seed=18)
    cache = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK, window_history=64)
    out = greedy(model, ids, past_key_values=cache)
    most = WINDOW - 1 + 64 + ROOM_TOKENS
    assert all(layer.keys.shape[-2] <= most for layer in cache.layers)
    cache.save(out)
    assert loaded(model, out, client) == 608
    # The window before this place was not kept.
    assert loaded(model, ids[:, :300], client) == 0


def test_the_programs_of_the_page_run(
    shared_daemon: Daemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).parents[2] / "docs/transformers.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    model = save_model(tmp_path / "model")
    monkeypatch.setenv("KVTIER_SOCKET", shared_daemon.socket)
    assert len(programs) == 3
    program = tmp_path / "program.py"
    program.write_text("".join(programs).replace("MODEL", str(model)))
    names = runpy.run_path(str(program))
    assert int(capsys.readouterr().out.splitlines()[-1].split()[0]) > 500
    assert names["cache"].loaded_tokens > 500


# --- identity ----------------------------------------------------------------------------------


def test_other_weights_salts_and_types_share_nothing(client: Client) -> None:
    ids = prompt(40, seed=19)
    model = tiny_model("llama")
    saved(model, ids, client)
    assert loaded(model, ids, client) == 32
    assert loaded(model, ids, client, salt=b"another user") == 0
    assert loaded(tiny_model("llama"), ids, client) == 32
    assert (
        loaded(
            tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e4}),
            ids,
            client,
        )
        == 0
    )
    assert loaded(tiny_model("llama").to(torch.bfloat16), ids, client) == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK).loaded_tokens == 0
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.01)
    assert loaded(model, ids, client) == 0


def test_adapters_share_nothing_with_the_model(client: Client) -> None:
    peft = pytest.importorskip("peft")
    ids = prompt(40, seed=20)
    plain = tiny_model("llama")
    saved(plain, ids, client)
    config = peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(tiny_model("llama"), config, "one").eval()
    model.add_adapter("two", config)
    for name in ("one", "two"):
        model.set_adapter(name)
        assert loaded(model, ids, client) == 0
        saved(model, ids, client)
        assert loaded(model, ids, client) == 32
    with model.disable_adapter():
        assert loaded(model, ids, client) == 32
    merged = model.merge_and_unload()
    assert loaded(merged, ids, client) == 0


# --- the daemon ----------------------------------------------------------------------------------


def test_generation_goes_on_without_a_daemon(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = tiny_model("llama"), prompt(40, seed=21)
    wanted = greedy(model, ids)
    with caplog.at_level(logging.INFO), attach(model, tmp_path / "none") as attached:
        for _ in range(3):
            assert torch.equal(greedy(model, ids), wanted)
        assert attached.counts["away"] == 2
    assert len([one for one in caplog.records if "without the daemon" in one.message]) == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_generation_goes_on_if_the_daemon_ends_or_hangs(
    daemon_of: Callable[..., Daemon], caplog: pytest.LogCaptureFixture, how: signal.Signals
) -> None:
    model, ids = tiny_model("llama"), prompt(40, seed=22)
    wanted = greedy(model, ids)
    daemon = daemon_of()
    with (
        daemon.connect(timeout_s=0.3, reconnect_s=0.1) as client,
        attach(model, client) as attached,
    ):
        assert torch.equal(greedy(model, ids), wanted)
        daemon.process.send_signal(how)
        with caplog.at_level(logging.INFO):
            for _ in range(3):
                assert torch.equal(greedy(model, ids), wanted)
        assert attached.counts["failed:load"] == 1
    assert len([one for one in caplog.records if "without the daemon" in one.message]) == 1


def test_the_daemon_is_used_again_after_it_came_back(
    daemon_of: Callable[..., Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_transformers.store.PAUSE_S", 0.0)
    model, ids = tiny_model("llama"), prompt(40, seed=23)
    folder = tmp_path / "daemon"
    daemon = daemon_of(folder=folder)
    with attach(model, daemon.socket, block_tokens=BLOCK) as attached:
        greedy(model, ids)
        daemon.stop()
        greedy(model, ids)
        assert (
            sum(count for name, count in attached.counts.items() if name.startswith("failed")) >= 1
        )
        daemon_of(folder=folder)
        greedy(model, ids)
        greedy(model, ids)
        assert attached.counts["loaded_tokens"] == 32


def test_threads_share_a_model(client: Client) -> None:
    model = tiny_model("llama")
    prompts = [torch.cat([prompt(40, seed=24), prompt(20, seed=30 + at)], 1) for at in range(6)]
    wanted = [greedy(model, ids) for ids in prompts]
    wrong: list[int] = []
    with attach(model, client, block_tokens=BLOCK) as attached:

        def run() -> None:
            for ids, expected in zip(prompts, wanted, strict=True):
                if not torch.equal(greedy(model, ids), expected):
                    wrong.append(1)

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert attached.counts["loaded_tokens"] > 0
        assert not [name for name in attached.counts if name.startswith("failed")]


def test_detach_lets_the_model_generate_alone(client: Client) -> None:
    model, ids = tiny_model("llama"), prompt(40, seed=25)
    plain = model.generate
    attached = attach(model, client, block_tokens=BLOCK)
    greedy(model, ids)
    attached.detach()
    attached.detach()
    assert model.generate == plain
    before = attached.counts.copy()
    greedy(model, ids)
    assert attached.counts == before
