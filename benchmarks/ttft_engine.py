"""A vLLM engine that does what it is told, a line of JSON for a line of JSON, and says when tokens came."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

FIRST, VOCABULARY = 3, 4096
# 16 layers of 4 KV heads: 16 KiB a token, 189 million parameters. 8 layers of 16: 32 KiB and 12 million.
MODELS: dict[str, dict[str, int]] = {
    "189M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16,
             "num_attention_heads": 16, "num_key_value_heads": 4},
    "KV-heavy": {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 8,
                 "num_attention_heads": 16, "num_key_value_heads": 16},
}  # fmt: skip


def make_model(kind: str, folder: Path) -> None:
    """Write a random model of this kind there. The same every time."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, head_dim=64, max_position_embeddings=8192, initializer_range=0.05,
        torch_dtype="bfloat16", **MODELS[kind],
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)


@cache
def drawn(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(FIRST, VOCABULARY), k=tokens)


class Host:
    """The engine. A request: `parts` of its prompt as (seed, tokens), how many `tokens` it generates, its
    `transfer` parameters, and `after`, the number of another request and of that one's tokens that it waits
    for."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments)
        self.numbers = 0

    def run(self, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Let these run together; when each token came."""
        engine = self.llm.llm_engine
        told: dict[str, dict[str, Any]] = {}
        waiting = list(enumerate(asked))
        ids: list[str] = [""] * len(asked)
        while waiting or engine.has_unfinished_requests():
            for number, request in list(waiting):
                of, tokens = request.get("after") or (None, 0)
                if of is None or (ids[of] and len(told[ids[of]]["times"]) >= tokens):
                    waiting.remove((number, request))
                    ids[number] = self._add(request, told)
            for output in engine.step():
                now = time.perf_counter()
                one, first = told[output.request_id], output.outputs[0]
                one["times"] += [now] * (len(first.token_ids) - len(one["times"]))
                one["cached"] = output.num_cached_tokens
                if output.finished:
                    chosen = zip(first.token_ids, first.logprobs or (), strict=False)
                    one["tokens"] = list(first.token_ids)
                    one["logprobs"] = [probable[token].logprob for token, probable in chosen]
        return [told[request_id] for request_id in ids]

    def _add(self, request: dict[str, Any], told: dict[str, dict[str, Any]]) -> str:
        from vllm import SamplingParams

        transfer = request.get("transfer")
        sampling = SamplingParams(
            temperature=0, max_tokens=request["tokens"], ignore_eos=True, detokenize=False,
            logprobs=0 if request.get("logprobs") else None,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )  # fmt: skip
        prompt: Any = {
            "prompt_token_ids": [
                t for seed, tokens in request["parts"] for t in drawn(seed, tokens)
            ]
        }
        self.numbers += 1
        request_id = str(self.numbers)
        told[request_id] = {"began": time.perf_counter(), "times": [], "cached": 0}
        self.llm.llm_engine.add_request(request_id, prompt, sampling)
        return request_id

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request by `LLM.generate`: how long until all its tokens were there."""
        from vllm import SamplingParams

        transfer = request.get("transfer")
        sampling = SamplingParams(
            temperature=0, max_tokens=request["tokens"], ignore_eos=True, detokenize=False, logprobs=0,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )  # fmt: skip
        tokens = [t for seed, count in request["parts"] for t in drawn(seed, count)]
        prompt: Any = {"prompt_token_ids": tokens}
        began = time.perf_counter()
        [output] = self.llm.generate([prompt], sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        first = output.outputs[0]
        chosen = zip(first.token_ids, first.logprobs or (), strict=True)
        return {
            "began": began, "seconds": seconds, "cached": output.num_cached_tokens,
            "tokens": list(first.token_ids),
            "logprobs": [probable[token].logprob for token, probable in chosen],
        }  # fmt: skip


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if sys.argv[1] == "make":
        make_model(sys.argv[2], Path(sys.argv[3]))
        return
    host = Host(json.loads(sys.argv[1]))

    def reply(body: Any) -> None:
        replies.write(json.dumps(body) + "\n")
        replies.flush()

    reply("ready")
    for line in sys.stdin:
        order = json.loads(line)
        if "run" in order:
            reply(host.run(order["run"]))
        elif "generate" in order:
            reply(host.generate(order["generate"]))
        else:
            reply(host.llm.reset_prefix_cache())


if __name__ == "__main__":
    main()
