"""A small model with random weights and a paged cache, as an engine has it: it saves its prompt's pages, is
killed, and another process loads them and continues with the same tokens.

Needs torch. Without a GPU, the pages are memory of the host that the driver without a device accepts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gpu_stages
from bench_gpu import Copier, wait_for
from harness import Row
from kvtier import Client, Group, KvSpec
from kvtier_kernels.cuda import Event

LAYERS, HEADS, DIM, WORDS = 4, 4, 32, 1_000
WIDTH, BLOCK, PAGES = HEADS * DIM, 16, 32
PROMPT, ANSWER = 8 * BLOCK, 24
PAGE_BYTES = 2 * BLOCK * WIDTH * 4  # K and V of a layer


class Model:
    """A decoder that computes a token at a time, so that equal pages give equal tokens."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(5)

        def made(*sizes: int) -> torch.Tensor:
            return (torch.randn(*sizes) / sizes[-1] ** 0.5).to(device)

        self.words = made(WORDS, WIDTH) * WIDTH**0.5
        self.layers = [
            (
                made(WIDTH, 3 * WIDTH),
                made(WIDTH, WIDTH),
                made(WIDTH, 4 * WIDTH),
                made(4 * WIDTH, WIDTH),
            )
            for _ in range(LAYERS)
        ]
        # By layer, page, K or V, place in the page.
        self.cache = torch.zeros(LAYERS, PAGES, 2, BLOCK, WIDTH, device=device)
        self.device = device

    def next(self, word: int, place: int, table: list[int]) -> int:
        """Compute one token; its K and V go to their page."""
        x = self.words[word]
        page, within = table[place // BLOCK], place % BLOCK
        pages = torch.tensor(table, device=self.device)
        for layer, (qkv, out, up, down) in enumerate(self.layers):
            q, k, v = (_normal(x) @ qkv).split(WIDTH)
            self.cache[layer, page, 0, within], self.cache[layer, page, 1, within] = k, v
            known = (
                self.cache[layer, pages].transpose(0, 1).reshape(2, -1, HEADS, DIM)[:, : place + 1]
            )
            weights = torch.einsum("hd,nhd->hn", q.view(HEADS, DIM), known[0]) / DIM**0.5
            seen = torch.einsum("hn,nhd->hd", weights.softmax(-1), known[1])
            x = x + seen.reshape(-1) @ out
            x = x + torch.nn.functional.gelu(_normal(x) @ up) @ down
        return int((self.words @ _normal(x)).argmax())

    def answer(self, prompt: list[int], first: int, table: list[int]) -> list[int]:
        """The greedy answer; the K and V of the tokens before `first` are in their pages."""
        for place in range(first, len(prompt)):
            word = self.next(prompt[place], place, table)
        words = [word]
        for place in range(len(prompt), len(prompt) + ANSWER):
            words.append(self.next(words[-1], place, table))
        return words


def _normal(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean() + 1e-6).sqrt()


def main() -> None:
    """`save`: answer, and save the prompt. `load`: load the prompt but its last token, and answer."""
    what, socket = sys.argv[1:]
    machine = gpu_stages.Machine()
    driver = machine.driver
    model = Model("cuda" if machine.real else "cpu")
    if not machine.real:
        driver.register(model.cache.data_ptr(), model.cache.nbytes)
    chance = np.random.default_rng(6)
    prompt = chance.integers(0, WORDS, PROMPT + 1).tolist()
    count = PROMPT // BLOCK
    # Other pages in each process, in another order.
    table = (
        np.random.default_rng(len(what) * 7 + ord(what[0])).permutation(PAGES)[: count + 2].tolist()
    )
    copier = Copier(driver)
    stream = torch.cuda.current_stream().cuda_stream if machine.real else driver.stream()
    address, nbytes = model.cache.data_ptr(), model.cache.nbytes
    pieces = copier.pieces(
        [address] * LAYERS, [nbytes] * LAYERS, [n * PAGES * PAGE_BYTES for n in range(LAYERS)],
        [PAGE_BYTES] * LAYERS, [PAGE_BYTES] * LAYERS, blocks=PAGES, after=Event(driver).record(stream),
    )  # fmt: skip
    lane = copier.lane()
    client = Client.connect(socket)
    group = Group(kind="full", layers=LAYERS, opaque_bytes=LAYERS * PAGE_BYTES)
    spec = KvSpec.groups(
        [group], model="model", dtype="float32", block_tokens=BLOCK, weights="seed:5"
    )
    space = client.open(spec)
    keys = space.keys(prompt[:PROMPT])
    if what == "save":
        words = model.answer(prompt, 0, table)
        with space.reserve(keys) as saving:
            assert len(saving) == count, saving.refused
            lane.start(pieces, table[:count], saving.mappings, saving.slots, True,
                       Event(driver).record(stream))  # fmt: skip
            lane.finish()
            saving.commit(count)
        print(json.dumps([0, words]), flush=True)
        sys.stdin.read()  # until it is killed
    reader, lease = client.reader(), space.lease(keys, 60_000)
    wait_for(lambda: len(copier.pins.of(reader.mappings).ready) == reader.extents)
    slots = lease.part(0, 0).slots
    lane.start(
        pieces, table[: lease.ready], reader.mappings, slots, False, Event(driver).record(stream)
    )
    lane.hold(stream)  # the model's stream waits; the host does not
    if not machine.real:
        driver.call("cuStreamSynchronize", stream)
    words = model.answer(prompt, lease.ready * BLOCK, table)
    lane.finish()
    assert reader.fresh(slots) == lease.ready
    print(json.dumps([lease.ready * BLOCK, words]), flush=True)


def rows(socket: str) -> Iterator[Row]:
    answers: dict[str, list[int]] = {}
    loaded = 0
    for what in ("save", "load"):
        command = [sys.executable, str(Path(__file__)), what, socket]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as running:
            try:
                assert running.stdout is not None
                loaded, answers[what] = json.loads(running.stdout.readline())
            finally:
                running.kill()
    different = sum(a != b for a, b in zip(answers["save"], answers["load"], strict=True))
    row = Row("different tokens of the answer", different, "", "= 0", different == 0)
    row.ok = row.ok and loaded == PROMPT
    row.more = {
        "loaded tokens": loaded,
        "tokens": len(answers["load"]),
        "words": len(set(answers["load"])),
    }
    yield row


if __name__ == "__main__":
    main()
