"""Models of transformers generate the same with a restored cache as without kvtier: float32, greedy."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engines.tiny import KINDS, prompt, tiny_model  # noqa: E402
from kvtier_transformers import attach  # noqa: E402
from support.daemons import Daemon, start_daemon  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK = 16
ERROR = 1e-4
DECLINED = {
    "mamba2": "has states only",
    "jamba": "does not continue the states",
    "bamba": "does not continue the states",
}
FAST = (
    "llama",
    "qwen3",
    "mistral",
    "gemma3",
    "gpt2",
    "falcon",
    "mixtral",
    "llama4",
    "deepseek3",
    "lfm2",
)
SERVED = [kind for kind in KINDS if kind not in DECLINED]
STATES = ("qwen3_next", "falcon_h1", "lfm2", "granite_hybrid")
kinds = [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in SERVED]


def generated(model: Any, ids: Any, tokens: int = 20) -> Any:
    return model.generate(
        ids,
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )


def assert_same(found: Any, wanted: Any) -> None:
    assert torch.equal(found.sequences, wanted.sequences)
    for one, other in zip(found.logits, wanted.logits, strict=True):
        assert (one - other).abs().max() <= ERROR


class Chat:
    """A prompt, a second turn after its answer, and a shorter prompt, generated without kvtier."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.model = tiny_model(kind)
        first = prompt(100)
        answer = generated(self.model, first)
        second = torch.cat([answer.sequences, prompt(13, seed=2)], 1)
        self.first = first, answer
        self.second = second, generated(self.model, second)
        self.shorter = first[:, :70], generated(self.model, first[:, :70])

    def check(self, attached: Any, turn: tuple[Any, Any], loaded: int) -> None:
        """Generate with kvtier; the tokens and logits are the same, and this many tokens are loaded."""
        before = attached.counts["loaded_tokens"]
        assert_same(generated(self.model, turn[0]), turn[1])
        assert attached.counts["loaded_tokens"] - before == loaded, attached.counts
        assert not [name for name in attached.counts if name.startswith("failed")]

    @property
    def shorter_tokens(self) -> int:
        """A state is kept at the end of a prompt alone, not within it."""
        return 0 if self.kind in STATES else 64


@pytest.mark.parametrize("kind", kinds)
def test_a_restore_from_memory_generates_the_same(shared_daemon: Daemon, kind: str) -> None:
    chat = Chat(kind)
    with (
        shared_daemon.connect() as client,
        attach(chat.model, client, block_tokens=BLOCK) as attached,
    ):
        chat.check(attached, chat.first, 0)
        chat.check(attached, chat.first, 96)
        # With the answer: the states at its last block end were kept while it was generated.
        chat.check(attached, chat.second, 112)
        chat.check(attached, chat.shorter, chat.shorter_tokens)


def test_a_restore_from_disk_generates_the_same(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    cold = f'[cold]\ndirectories = ["{disk}"]\nsize = "256MiB"\nwrite = "through"\n'
    chats = [Chat(kind) for kind in FAST]

    def serve() -> Daemon:
        daemon = start_daemon(tmp_path, config=cold)
        daemon.wait_for_disks()
        return daemon

    daemon = serve()
    try:
        with daemon.connect() as client:
            for chat in chats:
                with attach(chat.model, client, block_tokens=BLOCK) as attached:
                    chat.check(attached, chat.first, 0)
        daemon.stop()
        daemon = serve()
        with daemon.connect() as client:
            for chat in chats:
                with attach(chat.model, client, block_tokens=BLOCK, patience_ms=60_000) as attached:
                    chat.check(attached, chat.second, 112)
                    assert attached.counts["disk_tokens"] == 112, attached.counts
    finally:
        daemon.stop()


@pytest.mark.parametrize("kind", ["mamba2", "bamba", pytest.param("jamba", marks=pytest.mark.slow)])
def test_a_declined_model_generates_without_kvtier(
    shared_daemon: Daemon, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    model, ids = tiny_model(kind), prompt(40)
    wanted = generated(model, ids)
    with (
        shared_daemon.connect() as client,
        caplog.at_level(logging.INFO),
        attach(model, client) as attached,
    ):
        for _ in range(2):
            assert_same(generated(model, ids), wanted)
        assert DECLINED[kind] in attached.reason
    assert [one.message for one in caplog.records].count(
        f"kvtier: generating without kvtier: {attached.reason}"
    ) == 1


@pytest.mark.parametrize(("rope", "why"), [("dynamic", "length of the prompt"), ("yarn", "")])
def test_a_rope_that_depends_on_the_length_is_declined(
    shared_daemon: Daemon, rope: str, why: str
) -> None:
    parameters = {"rope_type": rope, "rope_theta": 10_000.0, "factor": 2.0}
    model, ids = tiny_model("llama", rope_parameters=parameters), prompt(40)
    wanted = generated(model, ids)
    with shared_daemon.connect() as client, attach(model, client) as attached:
        assert_same(generated(model, ids), wanted)
        assert why in attached.reason and bool(why) == bool(attached.reason)
