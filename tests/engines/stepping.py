"""Runs a vLLM engine with two data-parallel ranks, each request on the named rank: reads one order per
line as JSON, and answers each with one line of JSON."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from typing import Any


async def generated(engine: Any, name: str, one: list[int], tokens: int, rank: int) -> Any:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False
    )
    asked: Any = {"prompt_token_ids": one}
    async for output in engine.generate(asked, sampling, name, data_parallel_rank=rank):
        told = output
    said = told.outputs[0]
    chosen = zip(said.token_ids, said.logprobs or (), strict=True)
    return {
        "tokens": list(said.token_ids),
        "logprobs": [probable[token].logprob for token, probable in chosen],
        "cached": told.num_cached_tokens,
        "reason": said.finish_reason,
    }


async def serve(replies: Any) -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = json.loads(sys.argv[1])
    transfer = KVTransferConfig(**arguments.pop("kv_transfer_config"))
    made = AsyncEngineArgs(**arguments, kv_transfer_config=transfer, data_parallel_size=2)
    engine = AsyncLLM.from_engine_args(made)

    def reply(body: Any) -> None:
        replies.write(json.dumps(body) + "\n")
        replies.flush()

    numbers = itertools.count()
    reply("ready")
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        reply(
            await asyncio.gather(
                *(
                    generated(engine, str(next(numbers)), one, order["tokens"], rank)
                    for one, rank in zip(order["prompts"], order["ranks"], strict=True)
                )
            )
        )
    engine.shutdown()


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(serve(replies))


if __name__ == "__main__":
    main()
