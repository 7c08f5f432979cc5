"""Blocks that come from disk are copied while later ones are read: what happens in between."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engines.tiny import prompt, tiny_model  # noqa: E402
from kvtier import Client, wire  # noqa: E402
from kvtier.loading import Lease  # noqa: E402
from kvtier_kernels import release_views, views  # noqa: E402
from kvtier_transformers import attach  # noqa: E402
from kvtier_transformers.loads import PrefixLoad, Row  # noqa: E402
from support.daemons import Daemon  # noqa: E402
from support.disks import HANGS, Shim  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK, BLOCKS = 16, 40
ERROR = 1e-4
READ_MS = 700  # of each block: 16 are read side by side, so a load takes three of these times
PATIENCE_MS = 60_000
CONFIG = """
[cold]
directories = ["{}"]
size = "256MiB"
segment = "1MiB"
engine = "threads"
codec = "raw"
scrub = 0
"""


@dataclass
class Cold:
    """A daemon that has prompts on a slow disk alone, and what the model generates for them."""

    daemon: Daemon
    shim: Shim
    model: Any
    ids: Any
    mask: Any
    wanted: Any

    def check(self, client: Client, **options: Any) -> Any:
        """Generate from the disk: the tokens and logits are those without kvtier. Return the counts."""
        given = {"block_tokens": BLOCK, "patience_ms": PATIENCE_MS} | options
        with attach(self.model, client, **given) as attached:
            found = generated(self.model, self.ids, self.mask)
            counts = attached.counts.copy()
        assert torch.equal(found.sequences, self.wanted.sequences), counts
        for one, other in zip(found.logits, self.wanted.logits, strict=True):
            assert (one - other).abs().max() <= ERROR, counts
        return counts


def generated(model: Any, ids: Any, mask: Any = None) -> Any:
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=8, do_sample=False, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip


ColdOf = Callable[..., Cold]


@pytest.fixture
def cold_of(tmp_path: Path, shim: Shim, daemon_of: Callable[..., Daemon]) -> Iterator[ColdOf]:
    """Save prompts of a model, and start the daemon again with a slow disk."""
    config = CONFIG.format(shim.path)

    def start() -> Daemon:
        daemon = daemon_of(
            folder=tmp_path / "daemon", config=config, warm="8MiB", env=shim.env,
            own_children=True, forks=shim.server,
        )  # fmt: skip
        daemon.wait_for_disks()
        return daemon

    def make(kind: str = "llama", pads: tuple[int, ...] = (0,)) -> Cold:
        model, tokens = tiny_model(kind), BLOCK * BLOCKS + 1
        ids = prompt(tokens + max(pads), rows=len(pads))
        mask = torch.ones_like(ids)
        for row, pad in enumerate(pads):
            mask[row, :pad] = ids[row, :pad] = 0
        wanted = generated(model, ids, mask)
        daemon = start()
        with daemon.connect() as client, attach(model, client, block_tokens=BLOCK) as attached:
            generated(model, ids, mask)
            assert not attached.reason
        daemon.stop()
        one = Cold(start(), shim, model, ids, mask, wanted)
        slow.append(shim.failing(HANGS - READ_MS, "read"))
        slow[0].__enter__()
        return one

    slow: list[Any] = []
    yield make
    for one in slow:
        one.__exit__(None, None, None)


Act = Callable[[PrefixLoad, Row, Lease], object]
Partway = Callable[[Act | None], list[int]]


@pytest.fixture
def partway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Partway]:
    """Do something once in a load, when some of its blocks are copied, others are ready, and others are being
    read. Returns the list to which all numbers of copied blocks are added."""
    copy_ahead, acted = PrefixLoad._copy_ahead, list[int]()

    def begin(act: Act | None) -> list[int]:
        copied: list[int] = []

        def copy(load: PrefixLoad, index: int, row: Row, blocks: int, lease: Lease) -> None:
            if 0 < row.copied < lease.ready < blocks and act is not None and not acted:
                acted.append(row.copied)
                act(load, row, lease)
            copy_ahead(load, index, row, blocks, lease)
            copied.append(row.copied)

        monkeypatch.setattr(PrefixLoad, "_copy_ahead", copy)
        if act is None:
            acted.append(0)
        return copied

    yield begin
    assert acted, "the load ended before anything happened"


@pytest.mark.parametrize(
    ("kind", "pads", "is_ahead"),
    [
        ("llama", (0,), True),
        ("deepseek3", (0,), True),
        ("llama", (37, 0), True),
        # A prefix that ends in the middle needs other blocks of the window, or another state.
        ("gemma3", (0,), False),
        ("lfm2", (0,), False),
    ],
)
def test_blocks_are_copied_while_later_ones_are_read(
    cold_of: ColdOf,
    partway: Partway,
    kind: str,
    pads: tuple[int, ...],
    is_ahead: bool,
) -> None:
    cold = cold_of(kind, pads)
    copied = partway(None)
    with cold.daemon.connect() as client:
        counts = cold.check(client)
    whole = [(cold.ids.shape[1] - pad) // BLOCK for pad in pads]
    assert counts["disk_tokens"] == sum(whole) * BLOCK, counts
    assert len({*copied} - {0, *whole}) >= 2 if is_ahead else not any(copied)


def test_a_block_that_is_damaged_on_disk_ends_the_prefix(cold_of: ColdOf) -> None:
    cold, at = cold_of(), 25
    cache = generated(cold.model, cold.ids).past_key_values
    text = cache.layers[0].keys[0, 0, at * BLOCK : (at + 1) * BLOCK].numpy().tobytes()
    files = [path for path in cold.shim.path.rglob("*") if path.is_file()]
    (file, place) = next(
        (path, found) for path in files if (found := path.read_bytes().find(text)) >= 0
    )
    with file.open("r+b") as segment:
        segment.seek(place + 7)
        segment.write(bytes([text[7] ^ 1]))
    with cold.daemon.connect() as client:
        counts = cold.check(client)
        assert counts["loaded_tokens"] == at * BLOCK
        assert cold.daemon.stats()["tiers"]["cold"]["states"]["spoilt"] == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_daemon_that_ends_or_hangs_during_the_load_is_a_miss(
    cold_of: ColdOf, partway: Partway, how: signal.Signals
) -> None:
    cold = cold_of()
    copied = partway(lambda *_: cold.daemon.process.send_signal(how))
    with cold.daemon.connect(timeout_s=0.5, reconnect_s=0.1) as client:
        counts = cold.check(client)
    assert counts["failed:load"] == 1 and not counts["loaded_tokens"], counts
    assert 0 < max(copied) < BLOCKS


def test_of_a_disk_that_hangs_during_the_load_the_first_blocks_are_used(
    cold_of: ColdOf, partway: Partway
) -> None:
    cold = cold_of()
    partway(lambda *_: cold.shim._set(HANGS, ["read"]))
    with cold.daemon.connect() as client:
        counts = cold.check(client, patience_ms=4000)
        assert counts["late"] == 1
        assert 0 < counts["loaded_tokens"] < BLOCKS * BLOCK
        assert counts["disk_tokens"] == counts["loaded_tokens"]


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_block_that_is_forgotten_during_the_load_ends_the_prefix(
    cold_of: ColdOf, partway: Partway, is_copied: bool
) -> None:
    cold, at = cold_of(), 1 if is_copied else BLOCKS - 1
    with cold.daemon.connect() as client, cold.daemon.connect() as other:

        def forget(load: PrefixLoad, row: Row, lease: Lease) -> None:
            assert other.open(load._space.spec).forget(row.keys[at : at + 1])

        partway(forget)
        counts = cold.check(client)
        assert counts["loaded_tokens"] == at * BLOCK, counts


def test_a_block_that_is_overwritten_in_memory_during_the_load_is_a_miss(
    cold_of: ColdOf, partway: Partway
) -> None:
    cold = cold_of()
    with cold.daemon.connect(verify=True) as client, cold.daemon.connect() as other:

        def overwrite(load: PrefixLoad, row: Row, lease: Lease) -> None:
            other.ping()
            slots = lease.part(0, 0).slots[-wire.SLOT_BYTES :]
            (slot,) = views(other.link.mappings[0], slots, load._space.block_bytes, True)
            slot[5] ^= 1
            release_views([slot])

        partway(overwrite)
        counts = cold.check(client)
        assert counts["spoilt"] == 1 and not counts["loaded_tokens"], counts
        cold.daemon.wait_for(
            lambda stats: any(one["spoilt_blocks"] for one in stats["tenants"].values())
        )


def test_slots_that_are_reused_during_the_load_are_a_miss(
    cold_of: ColdOf, partway: Partway
) -> None:
    cold = cold_of()
    with cold.daemon.connect() as client, cold.daemon.connect() as other:

        def reuse(load: PrefixLoad, row: Row, lease: Lease) -> None:
            space, part = other.open(load._space.spec), lease.part(0, 0)
            lease.release()
            client.ping()
            assert space.forget(row.keys)
            number = 0
            while lease.fresh(part) * wire.SLOT_BYTES == len(part.slots):
                number += 1
                keys = space.keys([number] * BLOCK * BLOCKS)
                assert space.save(keys, bytes(len(keys) * space.block_bytes)).stored

        partway(reuse)
        counts = cold.check(client)
        assert counts["stale"] == 1 and not counts["loaded_tokens"], counts
