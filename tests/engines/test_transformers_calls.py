"""Calls, models and changes of models that users make: each generates the same as without kvtier."""

from __future__ import annotations

import copy
import io
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engines.tiny import SIZES, prompt, tiny_model, tiny_vision_model  # noqa: E402
from kvtier import Client, InvalidArgument  # noqa: E402
from kvtier_transformers import KvtierCache, attach  # noqa: E402
from support.daemons import Daemon  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK = 16
ERROR = 1e-4
ERROR_SHORT = 0.25  # of logits up to 3, in bfloat16; other K and V make a difference of more than 1


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[Client]:
    with shared_daemon.connect() as connected:
        yield connected


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> bytes:
    """No test finds blocks of another one."""
    return str(request.node.name).encode()


def generated(model: Any, ids: Any, **more: Any) -> Any:
    settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    # By name, as PEFT needs it.
    return model.generate(input_ids=ids, **settings | {"output_logits": True} | more)


def alone(model: Any, ids: Any, **more: Any) -> Any:
    """Generate without kvtier."""
    attached = model.__dict__.pop("generate", None)
    try:
        return generated(model, ids, **more)
    finally:
        if attached is not None:
            model.generate = attached


def same(found: Any, wanted: Any) -> bool:
    return torch.equal(found.sequences, wanted.sequences) and all(
        bool((one - other).abs().max() <= ERROR)
        for one, other in zip(found.logits, wanted.logits, strict=True)
    )


class Attached:
    """A model with kvtier. `loaded` generates, compares with the model alone, and returns how many tokens
    were loaded."""

    def __init__(self, model: Any, client: Client, salt: bytes) -> None:
        self.model, self.attached = model, attach(model, client, block_tokens=BLOCK, salt=salt)
        self.counts = self.attached.counts

    def loaded(self, ids: Any, short: bool = False, **more: Any) -> int:
        """`short`: in a type whose rounding may change tokens."""
        before = self.counts["loaded_tokens"]
        wanted = alone(self.model, ids, **more)
        found = generated(self.model, ids, **more)
        if short:
            assert (found.logits[0] - wanted.logits[0]).abs().max() <= ERROR_SHORT
        else:
            assert same(found, wanted), self.counts
        assert not [name for name in self.counts if name.startswith("failed")]
        return self.counts["loaded_tokens"] - before

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.attached.detach()


# --- the model changes -------------------------------------------------------------------------


def test_a_model_that_moves_to_another_type_has_the_layout_of_that_type(
    client: Client, salt: bytes
) -> None:
    model, ids = tiny_model("llama"), prompt(40)
    with Attached(model, client, salt) as one:
        assert one.loaded(ids) == 0
        model.to(torch.bfloat16)
        assert [one.loaded(ids, short=True) for _ in range(2)] == [0, 32]
        model.to(torch.float32)  # with the weights that are left of bfloat16
        assert [one.loaded(ids) for _ in range(2)] == [0, 32]


def test_autocast_has_blocks_of_its_own_types(client: Client, salt: bytes) -> None:
    """K is float32 there, as RoPE is computed with it, and V bfloat16."""
    model, ids = tiny_model("llama"), prompt(40)
    with Attached(model, client, salt) as one:
        assert one.loaded(ids) == 0
        with torch.autocast(ids.device.type, torch.bfloat16):
            assert [one.loaded(ids, short=True) for _ in range(2)] == [0, 32]
        assert one.loaded(ids) == 32


def test_changes_that_pytorch_does_not_count_are_noticed(client: Client, salt: bytes) -> None:
    model, ids = tiny_model("llama"), prompt(40)
    with Attached(model, client, salt) as one:
        one.loaded(ids)
        model.model.layers[0].self_attn.v_proj.weight.data.mul_(1.5)
        assert one.loaded(ids) == 0
        model.model.rotary_emb.inv_freq.mul_(0.5)
        assert one.loaded(ids) == 0
        assert one.loaded(ids) == 32


def test_a_training_step_between_two_calls(client: Client, salt: bytes) -> None:
    model, ids = tiny_model("llama"), prompt(40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Attached(model, client, salt) as one:
        assert [one.loaded(ids) for _ in range(2)] == [0, 32]
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        assert [one.loaded(ids) for _ in range(2)] == [0, 32]


@pytest.mark.parametrize("option", [{}, {"memory": "1MiB"}], ids=str)
def test_a_model_with_dropout_or_hooks_is_declined(
    client: Client, salt: bytes, option: dict[str, Any]
) -> None:
    model, ids = tiny_model("gpt2"), prompt(40)
    with attach(model, client, block_tokens=BLOCK, salt=salt, **option) as attached:

        def run(why: str) -> None:
            if option:
                with pytest.raises(InvalidArgument, match=why):
                    generated(model, ids)
            else:
                generated(model, ids)
                assert attached.counts[next(n for n in attached.counts if why in n)] == 1

        model.train()
        run("training mode")
        model.eval()
        block = model.transformer.h[0]
        hook = block.register_forward_hook(lambda _, __, output: output + 0.5)
        run("forward hooks")
        hook.remove()
        assert attached.counts["loaded_tokens"] == 0
        assert same(generated(model, ids), alone(model, ids))
        assert attached.counts["loaded_tokens"] == 0
        assert same(generated(model, ids), alone(model, ids))
        assert attached.counts["loaded_tokens"] == 32


def test_adapters_of_each_row_and_merged_ones(client: Client, salt: bytes) -> None:
    peft = pytest.importorskip("peft")
    ids, base = prompt(40), tiny_model("llama")
    config = peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    with Attached(base, client, salt) as one:
        one.loaded(ids)
        torch.manual_seed(1)
        model = peft.get_peft_model(base, config, "one").eval()
        assert [one.loaded(ids) for _ in range(2)] == [0, 32]
        with attach(model, client, block_tokens=BLOCK, salt=salt) as attached:
            for name in ("__base__", "one"):
                found = generated(model, ids, adapter_names=[name])
                assert same(found, alone(base, ids)) == (name == "one")
            assert attached.counts["declined:adapter_names"] == 2
        # Hooks select the adapters.
        for name in ("__base__", "one"):
            found = generated(model, ids, adapter_names=[name])
            assert same(found, alone(base, ids)) == (name == "one")
        assert one.counts["declined:forward hooks"] == 4
        assert model.merge_and_unload() is base
        assert [one.loaded(ids) for _ in range(2)] == [0, 32]


# --- calls ---------------------------------------------------------------------------------------


def test_the_settings_of_the_model_and_of_the_call_are_merged(client: Client, salt: bytes) -> None:
    model, ids = tiny_model("llama"), prompt(40)
    model.generation_config.num_beams = 3
    given = transformers.GenerationConfig(max_new_tokens=8, do_sample=False)
    wanted = model.generate(ids, given)
    with Attached(model, client, salt) as one:
        for _ in range(2):
            assert torch.equal(model.generate(ids, given), wanted)
        assert one.counts["loaded_tokens"] == 32


def test_the_old_default_of_models_with_windows_is_served(client: Client, salt: bytes) -> None:
    model, ids = tiny_model("gemma3"), prompt(40)
    model.generation_config.cache_implementation = "hybrid"
    with Attached(model, client, salt) as one:
        assert [one.loaded(ids) for _ in range(2)] == [0, 32]


@pytest.mark.parametrize(
    ("why", "more"),
    [
        ("output_hidden_states", {"output_hidden_states": True}),
        ("token_type_ids", {"token_type_ids": [0]}),
        ("cache_implementation", {"cache_implementation": "static", "disable_compile": True}),
    ],
)
def test_a_declined_call_is_logged_once(
    client: Client, salt: bytes, caplog: pytest.LogCaptureFixture, why: str, more: dict[str, Any]
) -> None:
    model, ids = tiny_model("gpt2"), prompt(40)
    if why == "token_type_ids":
        more = {why: torch.zeros_like(ids)}
    with Attached(model, client, salt) as one, caplog.at_level(logging.WARNING, "kvtier"):
        for _ in range(2):
            assert one.loaded(ids, **more) == 0
        assert one.counts[f"declined:{why}"] == 2
    text = f"kvtier: calls with {why} are declined: they run without kvtier"
    assert [record.message for record in caplog.records] == [text]


@pytest.mark.parametrize("kind", ["llama", "mistral", "lfm2"])
def test_assisted_decoding_computes_what_a_cache_had(
    client: Client, salt: bytes, kind: str
) -> None:
    model, ids = tiny_model(kind), torch.cat([prompt(20)] * 3, 1)
    wanted = generated(model, ids)
    for _ in range(2):
        cache = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK, salt=salt)
        found = generated(model, ids, past_key_values=cache, prompt_lookup_num_tokens=3)
        assert same(found, wanted) and cache.loaded_tokens == 0
        cache.save(found.sequences)
    longer = torch.cat([wanted.sequences, prompt(9, seed=3)], 1)
    cache = KvtierCache.from_prompt(model, longer, client, block_tokens=BLOCK, salt=salt)
    assert same(generated(model, longer, past_key_values=cache), generated(model, longer))
    assert kind != "llama" or cache.loaded_tokens == 64


def test_a_cache_with_more_tokens_than_ids_is_not_saved(client: Client, salt: bytes) -> None:
    model, ids = tiny_model("llama"), prompt(40)
    cache = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK, salt=salt)
    out = generated(model, ids, past_key_values=cache).sequences
    with pytest.raises(InvalidArgument, match="more tokens"):
        cache.save(out[:, :-2])
    assert cache.save(out) == 32


# --- models --------------------------------------------------------------------------------------


def test_text_after_images_and_other_batches(client: Client, salt: bytes) -> None:
    """A vision model keeps positions of its last call, and would use them for a prompt with a cache."""
    model, ids = tiny_vision_model(), prompt(40)
    image = torch.cat([prompt(20), torch.full((1, 4), 250, device=ids.device), prompt(9)], 1)
    kinds = (image == 250).long()
    pixels = torch.arange(16 * 48, device=ids.device).view(16, 48) / 500
    grid = torch.tensor([[1, 4, 4]], device=ids.device)
    more = {"image_grid_thw": grid, "mm_token_type_ids": kinds}
    with Attached(model, client, salt) as one:
        assert [one.loaded(ids) for _ in range(2)] == [0, 32]
        for scale in (1, -2):
            assert one.loaded(image, pixel_values=pixels * scale, **more) == 0
            generated(model, image, pixel_values=pixels * scale, **more)
            wanted = alone(model, ids)
            generated(model, image, pixel_values=pixels * scale, **more)
            before = one.counts["loaded_tokens"]
            assert same(generated(model, ids), wanted)
            assert one.counts["loaded_tokens"] - before == 32
        generated(model, ids.repeat(3, 1))
        assert same(generated(model, ids), wanted)
        cache = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK, salt=salt)
        assert same(alone(model, ids, past_key_values=cache), wanted) and cache.loaded_tokens == 32
    with attach(model, client, block_tokens=BLOCK, salt=salt, memory="1MiB") as attached:
        generated(model, ids)
        assert attached.counts["loaded_tokens"] == 32


def test_a_model_whose_prefix_depends_on_what_follows_is_declined(
    client: Client, salt: bytes
) -> None:
    config = transformers.BertConfig(**SIZES | {"pad_token_id": 0})
    torch.manual_seed(0)
    model, ids = transformers.BertLMHeadModel(config).eval(), prompt(40)
    with Attached(model, client, salt) as one:
        wanted = alone(model, ids)
        for _ in range(2):
            assert same(generated(model, ids), wanted)
        assert "depend on the tokens after it" in one.attached.reason


def test_padding_that_changes_k_and_v_is_declined(client: Client, salt: bytes) -> None:
    sizes = {
        "d_model": 48,
        "decoder_layers": 3,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
    }
    torch.manual_seed(0)
    config = transformers.BartConfig(
        **SIZES | sizes | {"init_std": 0.15, "forced_eos_token_id": None}
    )
    model = transformers.BartForCausalLM(config).eval()
    ids = torch.cat([prompt(40), prompt(40, seed=2)])
    mask = torch.ones_like(ids)
    mask[1, :10] = 0
    with Attached(model, client, salt) as one:
        assert [one.loaded(ids[:1]) for _ in range(2)] == [0, 32]
        assert one.loaded(ids, attention_mask=mask) == 0
        assert one.counts["declined:padding"] == 1


# --- attachments -----------------------------------------------------------------------------------


def test_a_copy_of_a_model_generates_without_kvtier(client: Client, salt: bytes) -> None:
    model, ids = tiny_model("llama"), prompt(40)
    wanted = generated(model, ids)
    with Attached(model, client, salt) as one:
        one.loaded(ids)
        written = io.BytesIO()
        torch.save(model, written)
        written.seek(0)
        for other in (copy.deepcopy(model), torch.load(written, weights_only=False)):
            before = one.counts.copy()
            assert same(generated(other, ids), wanted)
            assert one.counts == before
        assert one.loaded(ids) == 32


def test_detach_restores_what_was_there(client: Client, salt: bytes) -> None:
    model, ids = tiny_model("llama"), prompt(40)
    calls: list[int] = []

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return type(model).generate(model, *args, **kwargs)

    model.generate = own
    outer = [attach(model, client, block_tokens=BLOCK, salt=salt) for _ in range(2)][1]
    generated(model, ids)
    outer.detach()
    generated(model, ids)
    assert len(calls) == 2
    assert model.generate is not own
    generated(model, ids)
    assert len(calls) == 3


@pytest.mark.parametrize(("own", "loaded", "lines"), [(True, 0, 1), (False, 64, 0)])
def test_a_child_process_connects_or_says_once_that_it_cannot(
    shared_daemon: Daemon,
    salt: bytes,
    monkeypatch: pytest.MonkeyPatch,
    own: bool,
    loaded: int,
    lines: int,
) -> None:
    """A client of the caller cannot be used in a child; `attach` connects another one of its own."""
    monkeypatch.setattr("kvtier_transformers.store.PAUSE_S", 0.0)
    model, ids = tiny_model("llama"), prompt(40)
    wanted = generated(model, ids)
    with (
        shared_daemon.connect() as client,
        attach(
            model, client if own else shared_daemon.socket, block_tokens=BLOCK, salt=salt
        ) as one,
    ):
        generated(model, ids)

        def run() -> str:
            said: list[str] = []
            record = logging.Handler()
            record.emit = lambda each: said.append(each.getMessage())  # type: ignore[method-assign]
            logging.getLogger("kvtier.transformers").addHandler(record)
            is_same = all(same(generated(model, ids), wanted) for _ in range(2))
            return f"{is_same} {one.counts['loaded_tokens']} {len(said)}"

        assert in_child(run) == f"True {loaded} {lines}"
        assert same(generated(model, ids), wanted)


def in_child(call: Callable[[], str]) -> str:
    """What this returns in a fork of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, call().encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text
