"""Runs a vLLM engine: reads one order per line as JSON, and answers each with one line of JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from PIL import Image
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(**json.loads(sys.argv[1]))

    def reply(body: Any) -> None:
        replies.write(json.dumps(body) + "\n")
        replies.flush()

    def asked(prompt: list[int], image: int | None) -> Any:
        """A prompt, with an image of random pixels from this seed."""
        if image is None:
            return {"prompt_token_ids": prompt}
        import numpy as np

        pixels = np.random.default_rng(image).integers(0, 256, (56, 56, 3), dtype=np.uint8)
        return {"prompt_token_ids": prompt, "multi_modal_data": {"image": Image.fromarray(pixels)}}

    def generated(
        prompts: list[list[int]], tokens: int, parameters: Any, adapter: Any, images: Any
    ) -> list[dict[str, Any]]:
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False,
            extra_args={"kv_transfer_params": parameters} if parameters else None,
        )  # fmt: skip
        given = [asked(*one) for one in zip(prompts, images or [None] * len(prompts), strict=True)]
        answers = []
        lora = LoRARequest(*adapter) if adapter else None
        for output in llm.generate(given, sampling, use_tqdm=False, lora_request=lora):
            one = output.outputs[0]
            chosen = zip(one.token_ids, one.logprobs or (), strict=True)
            answers.append(
                {
                    "tokens": list(one.token_ids),
                    "logprobs": [probable[token].logprob for token, probable in chosen],
                    "cached": output.num_cached_tokens,
                    "reason": one.finish_reason,
                    "told": output.kv_transfer_params,
                }
            )
        return answers

    reply("ready")
    for line in sys.stdin:
        order = json.loads(line)
        if "prompts" in order:
            more = (order.get(name) for name in ("parameters", "adapter", "images"))
            reply(generated(order["prompts"], order["tokens"], *more))
        elif "embed" in order:
            given = [asked(one, None) for one in order["embed"]]
            reply([one.outputs.embedding for one in llm.embed(given, use_tqdm=False)])
        elif "metrics" in order:
            reply(
                [
                    [one.name, one.labels, getattr(one, "value", getattr(one, "count", None))]
                    for one in llm.get_metrics()
                    if one.name.startswith(order["metrics"])
                ]
            )
        elif "sleep" in order:
            llm.sleep(order["sleep"])
            reply(llm.wake_up())
        elif "rpc" in order:
            llm.collective_rpc(order["rpc"], kwargs=order["arguments"])
            reply("called")
        else:
            reply(llm.reset_prefix_cache(reset_connector=order["connector"]))


if __name__ == "__main__":
    main()
