"""A transformers model of the size of Llama 3 8B with random weights, on a GPU: it saves a long prompt and is
killed, and another process loads it.

Needs torch and transformers. Without a GPU, the model is tiny, and times have no verdict.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

import gpu_stages
from harness import Row, at_most
from kvtier_transformers import attach

LARGE: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
BLOCK, TAIL = 32, 16  # tokens of a block; tokens after the last whole one
ROUNDS = 5
TTFT_BAR = 0.5  # of the time to compute the prompt
# Of the logits in bfloat16, relative to the largest one; those of another prompt differ several times more.
ERROR, MARGIN = 0.1, 3.0


def main() -> None:
    """`save`: compute the prompt, and save it. `load`: load it. Prints what was found as JSON."""
    what, socket, folder = sys.argv[1:]
    machine = gpu_stages.Machine()
    device = "cuda" if machine.real else "cpu"
    tokens = machine.many(8192, 256)
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        **(LARGE if machine.real else SMALL), max_position_embeddings=2 * tokens,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    chance = torch.Generator().manual_seed(6)
    ids = torch.randint(0, config.vocab_size, (1, tokens + TAIL), generator=chance).to(device)

    def first_token(ids: torch.Tensor = ids) -> tuple[float, torch.Tensor]:
        began = time.perf_counter()
        output = model.generate(
            ids, max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        logits = output.logits[0].float().cpu()
        return time.perf_counter() - began, logits

    def difference(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).abs().max() / other.abs().max())

    changed = torch.cat([ids[:, :tokens].flip(1), ids[:, tokens:]], 1)
    computed, other = [], 0.0
    if what == "save":
        first_token()
        found = [first_token() for _ in range(ROUNDS)]
        computed = [took for took, _ in found]
        other = difference(first_token(changed)[1], found[0][1])
    place = Path(folder) / "logits.pt"
    with attach(model, socket, block_tokens=BLOCK) as attached:
        if what == "save":
            first_token(changed)  # compiles the kernel, and begins to register the daemon's memory
            took, logits = first_token()
            torch.save(logits, place)
            error, times = 0.0, [took]
        else:
            wanted, times, error = torch.load(place), [], 0.0
            for _ in range(ROUNDS + 1):
                took, logits = first_token()
                times.append(took)
                error = max(error, difference(logits, wanted))
        told = {"computed": computed, "times": times, "error": error, "other": other, "tokens": tokens,
                "counts": dict(attached.counts), "reason": attached.reason}  # fmt: skip
        print(json.dumps(told), flush=True)
        sys.stdin.read()  # until it is killed


def rows(machine: gpu_stages.Machine, socket: str, folder: Path) -> Iterator[Row]:
    found: dict[str, Any] = {}
    for what in ("save", "load"):
        command = [sys.executable, str(Path(__file__)), what, socket, str(folder)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as running:
            try:
                assert running.stdout is not None
                found[what] = json.loads(running.stdout.readline())
            finally:
                running.kill()
    saved, loaded = found["save"], found["load"]
    print(json.dumps(found))
    tokens = saved["tokens"]
    row = at_most("logits after a load, the largest difference", loaded["error"], "", ERROR)
    row.more = {"loaded tokens": loaded["counts"].get("loaded_tokens", 0), "rounds": ROUNDS + 1,
                "of another prompt": saved["other"]}  # fmt: skip
    row.ok = row.ok and row.more["loaded tokens"] == tokens * (ROUNDS + 1)
    row.ok = row.ok and saved["other"] >= MARGIN * loaded["error"]
    yield row
    computed, again = median(saved["computed"]), median(loaded["times"][1:])
    row = at_most(
        "time to the first token, loaded relative to computed", again / computed, "x", TTFT_BAR
    )
    row.more = {"tokens": tokens, "computed ms": computed * 1e3, "loaded ms": again * 1e3,
                "first load ms": loaded["times"][0] * 1e3,
                "computed and saved ms": saved["times"][0] * 1e3}  # fmt: skip
    yield machine.judged(row)


if __name__ == "__main__":
    main()
