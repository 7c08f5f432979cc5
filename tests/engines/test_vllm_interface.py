"""A canary: the connector interface of the installed vLLM is the one that the plugin was written for."""

from __future__ import annotations

import inspect
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier_vllm.messages import Step
from kvtier_vllm.options import RequestOptions, read_request_options

WRITTEN_FOR = Path(__file__).with_name("vllm_interface.json")


def interface() -> dict[str, str]:
    """The methods that a connector may define, with their arguments."""
    base = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base")
    found = {}
    for kind in (base.KVConnectorBase_V1, base.SupportsHMA):
        for name, member in inspect.getmembers_static(kind):
            function = getattr(member, "__func__", member)
            if name.startswith("_") and name != "__init__":
                continue
            if inspect.isfunction(function):
                found[f"{kind.__name__}.{name}"] = ", ".join(inspect.signature(function).parameters)
            elif isinstance(member, property):
                found[f"{kind.__name__}.{name}"] = "(property)"
    return found


def test_the_interface_is_the_recorded_one() -> None:
    now, then = interface(), json.loads(WRITTEN_FOR.read_text())
    moved = {
        name: f"{then.get(name, 'not there')} -> {now.get(name, 'gone')}"
        for name in now.keys() | then.keys()
        if now.get(name) != then.get(name)
    }
    assert not moved, "look at what moved, then write it down: " + json.dumps(moved, indent=1)


def test_the_engine_calls_every_method_that_the_plugin_defines() -> None:
    """A method that the engine no longer calls would silently have no effect."""
    connector = pytest.importorskip("kvtier_vllm.connector").KvtierConnector
    known = {name.partition(".")[2] for name in interface()}
    own = {name for name in vars(connector) if not name.startswith("_")}
    assert own <= known, own - known


def test_an_invalid_option_stops_a_gpu_engine_before_it_loads_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM calls the connector when its configuration is created, and the plugin checks the options there."""
    config = pytest.importorskip("vllm.config")
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "support_static_graph_mode", lambda: True)

    def made(**extra: int) -> Any:
        transfer = config.KVTransferConfig(
            kv_connector="KvtierConnector", kv_connector_module_path="kvtier_vllm.connector",
            kv_role="kv_both", kv_connector_extra_config=extra,
        )  # fmt: skip
        graphs = config.CompilationConfig(cudagraph_mode="FULL_AND_PIECEWISE")
        return config.VllmConfig(kv_transfer_config=transfer, compilation_config=graphs)

    with pytest.raises(ValueError, match="did you mean 'patience_ms'"):
        made(pacience_ms=5)
    assert made(patience_ms=5)


def test_the_contiguous_block_layout_is_requested_if_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By vLLM's own choice among the layouts of its attention backend. On CPUs there is only one, so
    vLLM does not choose."""
    connector = pytest.importorskip("kvtier_vllm.connector")
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

    def resolved(*offered: str) -> str:
        transfer = SimpleNamespace(
            kv_connector="KvtierConnector", kv_connector_module_path="kvtier_vllm.connector",
            engine_id="1",
        )  # fmt: skip
        config = SimpleNamespace(
            cache_config=SimpleNamespace(kv_cache_layout=None), kv_transfer_config=transfer
        )
        return str(resolve_kv_cache_layout(config, [list(offered)]).name)

    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    asked = connector.KvtierConnector.get_required_kvcache_layout
    assert connector.current_platform.is_cpu() and asked(None) is None
    monkeypatch.setattr(connector, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert resolved("LBNHC", "LBHNC", "BLNHC", "BLHNC") == "BLHNC"
    assert resolved("LBNHC", "LBHNC") == "LBNHC"


def test_loads_are_divided_only_in_steps_that_call_each_layer() -> None:
    """A step that replays a graph of the whole model calls no layer. The second model runner starts its loads
    with an empty context then."""
    context = pytest.importorskip("vllm.forward_context")
    from vllm.config import CUDAGraphMode, VllmConfig

    connector = pytest.importorskip("kvtier_vllm.connector")
    config = VllmConfig()
    for mode, layers, divided in (
        (CUDAGraphMode.NONE, {"layer": object()}, True),
        (CUDAGraphMode.PIECEWISE, {"layer": object()}, True),
        (CUDAGraphMode.FULL, {"layer": object()}, False),
        (CUDAGraphMode.NONE, None, False),
    ):
        with context.set_forward_context(layers, config, cudagraph_runtime_mode=mode):
            assert connector.calls_layers(context.get_forward_context()) is divided


@pytest.mark.parametrize("several", [False, True], ids=["one connector", "several"])
def test_the_second_model_runner_announces_a_step_before_it_zeroes_pages(
    monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    """The runner's own code up to the zeroing, and the connector's wrapper of it."""
    runner = pytest.importorskip("vllm.v1.worker.gpu.model_runner").GPUModelRunner
    connector = pytest.importorskip("kvtier_vllm.connector")
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
        MultiKVConnectorMetadata,
    )

    order: list[str] = []
    fake: Any = SimpleNamespace(
        kv_block_zeroer=SimpleNamespace(zero_block_ids=lambda ids: order.append(f"zeroes {ids}")),
        block_tables=SimpleNamespace(apply_staged_writes=lambda: None), aux_output_connector=None,
        req_states=SimpleNamespace(
            num_computed_tokens_np=np.zeros(1, np.int32),
            prefill_len=SimpleNamespace(np=np.zeros(1, np.int32)),
            num_computed_prefill_tokens=np.zeros(1, np.int32),
        ),
        kv_connector=SimpleNamespace(no_forward=lambda _: order.append("tells")),
        _merge_ec_connector_no_forward=lambda *_: None,
        **{name: lambda *_: None for name in ("update_pp_decode_requests", "finish_requests", "free_states",
                                              "add_requests")},
    )  # fmt: skip
    fake.update_requests = partial(runner.update_requests, fake)
    step = Step(1, b"", b"", 0, [], [], [], False)
    metadata = connector.StepMetadata(step)
    scheduled = SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[]),
        new_block_ids_to_zero=[7], kv_cache_block_copies=None, total_num_scheduled_tokens=0,
        kv_connector_metadata=MultiKVConnectorMetadata((object(), metadata)) if several else metadata,
    )  # fmt: skip
    runner.execute_model(fake, scheduled)
    assert order == ["zeroes [7]", "tells"], "the wrapper is no longer needed"
    order.clear()
    monkeypatch.setattr(runner, "execute_model", runner.execute_model)

    class Worker:
        def begin(self, step: Step) -> None:
            order.append(f"begins {step.number}")

    worker = Worker()
    monkeypatch.setattr(connector, "ANNOUNCED", {worker})
    for _ in range(2):
        connector.wrap_model_runner()
    runner.execute_model(fake, scheduled)
    assert order == ["begins 1", "zeroes [7]", "tells"]


def test_the_calls_that_change_weights_are_known() -> None:
    """By words in their names, in vLLM's own workers and in those of trainers; and functions."""
    worker = pytest.importorskip("vllm.v1.worker.gpu_worker").Worker
    connector = pytest.importorskip("kvtier_vllm.connector")
    names = {name for name in dir(worker) if not name.startswith("_")}
    names = {name for name in names if any(word in name for word in connector.WEIGHTS)}
    assert {"reload_weights", "update_weights", "finish_weight_update", "reset_weights"} <= names
    reading = {name for name in names if not connector.changes_weights(name)}
    assert reading == set(connector.READ_WEIGHTS)
    for other in (print, "apply_model", "update_named_param", "update_weights_from_ipc"):
        assert connector.changes_weights(other)
    for other in ("sleep", "profile", "list_loras", "determine_available_memory"):
        assert not connector.changes_weights(other)


def test_the_first_model_runner_tells_a_connector_before_it_zeroes_pages() -> None:
    """In the source, because the CPU's engine zeroes in the same place."""
    runner = pytest.importorskip("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    execute = inspect.getsource(runner.execute_model)
    told, updated = execute.index(".handle_preemptions("), execute.index("._update_states(")
    assert told < updated
    assert "_zero_block_ids(" in inspect.getsource(runner._update_states)
    assert "_zero_block_ids(" not in execute


@pytest.mark.filterwarnings("ignore")
def test_vllms_own_hints_are_read() -> None:
    hints = pytest.importorskip("vllm.v1.kv_hints")
    action = hints.KvHintAction("a", "kvtier", "1", {"pin": 600, "priority": 0.9})
    other = hints.KvHintAction("b", "retain", "1", {"seconds": 600})
    envelope = hints.KvHintsEnvelope("1", "m", [other, action])
    assert read_request_options(None, envelope) == RequestOptions(pin_s=600, priority=0.9)
