"""Serves requests with a vLLM engine as they arrive: one line of JSON per order, and one when it is
done.

The engine's core runs in this process, so that its state can be inspected, and a request can be aborted
in a chosen state. Its workers are separate processes, as in production."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import Any

IDLE_S = 0.05


class Serving:
    """The engine, and its pending orders."""

    def __init__(self, arguments: dict[str, Any], replies: Any) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments["distributed_executor_backend"] = "mp"
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._core = self._engine.engine_core.engine_core
        self._replies = replies
        self._names: dict[str, int] = {}
        self._inner: dict[int, str] = {}
        self._aborts: dict[int, str] = {}
        self.orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def reply(self, number: int, **body: Any) -> None:
        self._replies.write(json.dumps({"id": number} | body) + "\n")
        self._replies.flush()

    def run(self) -> None:
        """Run until there are no more orders."""
        while True:
            idle = not self._core.scheduler.has_requests()
            try:
                order = self.orders.get(timeout=IDLE_S) if idle else self.orders.get_nowait()
                if order is None:
                    return
                getattr(self, f"_{order.pop('do')}")(**order)
                continue
            except queue.Empty:
                pass
            if not idle:
                self._step()

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                self._over(output)
        for number, state in list(self._aborts.items()):
            if self._is(self._inner[number], state):
                self._abort_now(number, state)

    def _over(self, output: Any) -> None:
        number = self._names.pop(output.request_id)
        self._inner.pop(number)
        self._aborts.pop(number, None)
        one = output.outputs[0]
        chosen = zip(one.token_ids, one.logprobs or (), strict=True)
        self.reply(
            number,
            tokens=list(one.token_ids),
            logprobs=[probable[token].logprob for token, probable in chosen],
            cached=output.num_cached_tokens,
            reason=one.finish_reason,
            parameters=output.kv_transfer_params,
        )

    # --- orders ------------------------------------------------------------------------------

    def _serve(
        self, id: int, prompt: list[int], tokens: int, parameters: Any = None, abort: str = ""
    ) -> None:
        """Answered at the end of the request. `abort`: the state in which the request is aborted."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False,
            extra_args={"kv_transfer_params": parameters} if parameters else None,
        )  # fmt: skip
        name = f"serve-{id}"
        self._inner[id] = self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        self._names[name] = id
        if abort == "queued":
            self._abort_now(id, abort)
        elif abort:
            self._aborts[id] = abort

    def _is(self, name: str, state: str) -> bool:
        request = self._core.scheduler.requests[name]
        side = self._core.scheduler.connector._scheduler
        if state == "loading":
            return bool(request.status.name == "WAITING_FOR_REMOTE_KVS")
        if state == "saving":
            mine = {block for group in self._pages_of(name) for block in group}
            return bool(mine & side._saves._saves_of.keys())
        assert state == "running"
        return bool(request.status.name == "RUNNING")

    def _pages_of(self, name: str) -> Any:
        return self._core.scheduler.kv_cache_manager.get_block_ids(name)

    def _abort_now(self, number: int, state: str) -> None:
        name = self._inner.pop(number)
        self._names = {outer: one for outer, one in self._names.items() if one != number}
        self._aborts.pop(number, None)
        self._engine.abort_request([name], internal=True)
        self.reply(number, aborted=state)

    def _reset(self, id: int, running: bool = False, connector: bool = False) -> None:
        self.reply(id, done=self._engine.reset_prefix_cache(running, connector))

    def _state(self, id: int) -> None:
        """The held resources, according to the engine and to the plugin."""
        scheduler = self._core.scheduler
        side, pool = scheduler.connector._scheduler, scheduler.kv_cache_manager.block_pool
        preempted = [
            one for one in self._engine.get_metrics() if one.name == "vllm:num_preemptions"
        ]
        self.reply(
            id,
            pages=pool.num_gpu_blocks - 1,
            free=pool.get_num_free_blocks(),
            requests=len(scheduler.requests),
            preemptions=sum(one.value for one in preempted),
            held=side.in_flight,
            counts=dict(side.counts),
            connected=side._daemon.session is not None,
        )


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serving = Serving(json.loads(sys.argv[1]), replies)

    def read() -> None:
        for line in sys.stdin:
            serving.orders.put(json.loads(line))
        serving.orders.put(None)

    threading.Thread(target=read, daemon=True).start()
    replies.write('"ready"\n')
    replies.flush()
    serving.run()


if __name__ == "__main__":
    main()
