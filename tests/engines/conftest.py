"""Real vLLM engines, each in its own process, and records of their pages."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engines.forking import Forked, Forks
from support.prompts import BLOCK

HERE = Path(__file__).parent
MODULES = {
    "RecordingConnector": "recording", "PatientConnector": "recording", "SlowConnector": "slowing",
    "ExpertsConnector": "experts", "StagesConnector": "stages",
}  # fmt: skip
START_S = 240.0
ENGINE = ("model_name", "engine")  # labels of every metric
ANSWER_S = 240.0
PATIENCE_MS = 20_000  # a daemon on a busy machine may need more than the default
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(HERE),
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for engine in ("vllm", "transformers"):
        if find_spec(engine) is None:
            skip = pytest.mark.skip(reason=f"needs {engine}: make test-engines")
            begin = str(HERE / f"test_{engine}")
            for item in items:
                if str(item.path).startswith(begin):
                    item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def sockets() -> Iterator[Path]:
    """Provide the folder of the engines' sockets: one that is killed leaves them, by default in /tmp."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-"))
    ENVIRONMENT["VLLM_RPC_BASE_PATH"] = str(folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session", autouse=True)
def device() -> None:
    """With KVTIER_DEVICE=gpu, models and prompts are on the first GPU."""
    if os.environ.get("KVTIER_DEVICE") == "gpu":
        import torch

        torch.set_default_device("cuda")


@dataclass(eq=False)
class Engine:
    """A running engine with `host.py`."""

    process: subprocess.Popen[str] | Forked
    records: Path
    log: Path

    def answer(self, seconds: float = ANSWER_S) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if ready else ""
        assert line, f"no answer:\n{self.log.read_text()[-4000:]}"
        return json.loads(line)

    def order(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def begin(self, prompts: list[list[int]], tokens: int = 8, **more: Any) -> None:
        """Start these prompts; `answer` returns the results."""
        self.order(prompts=prompts, tokens=tokens, **more)

    def generate(self, prompts: list[list[int]], tokens: int = 8, **more: Any) -> list[Any]:
        self.begin(prompts, tokens, **more)
        return list(self.answer())

    def metrics(self, prefix: str = "vllm:kvtier_") -> dict[str, float]:
        """The engine's Prometheus metrics, as `name` or `name:label`; for a histogram its count."""
        self.order(metrics=prefix)
        return {
            ":".join(
                [name, *(text for label, text in labels.items() if label not in ENGINE)]
            ): value
            for name, labels, value in self.answer()
        }

    def call(self, method: str, **arguments: Any) -> None:
        """Call a method of the engine's workers."""
        self.order(rpc=method, arguments=arguments)
        assert self.answer() == "called"

    def sleep(self, level: int = 1) -> None:
        """Let the engine sleep, and wake it."""
        self.order(sleep=level)
        self.answer()

    def reset(self, connector: bool = False) -> None:
        """Clear the engine's own cache."""
        self.order(connector=connector)
        assert self.answer() is True

    def recorded(self, what: str) -> list[dict[str, Any]]:
        """All records of this kind from all processes."""
        found = []
        for path in sorted(self.records.glob("*.jsonl")):
            for line in path.read_text().splitlines():
                one = json.loads(line)
                if one["what"] == what:
                    found.append(one)
        return found

    def forget_records(self) -> None:
        """Keep only the records of saves: the next comparison covers only later loads."""
        saved = self.recorded("saved")
        for path in self.records.glob("*.jsonl"):
            path.unlink()
        with (self.records / "before.jsonl").open("w") as file:
            file.writelines(json.dumps(one) + "\n" for one in saved)

    def compare(self) -> tuple[int, list[tuple[Any, ...]]]:
        """The number of loaded pages, and the (shard, group, block's key, layer) of those that differ
        from the page that was saved under that identity."""
        saved = {
            (one["shard"], one["group"], one["key"]): one["layers"]
            for one in self.recorded("saved")
        }
        keys = {
            (one["load"], one["group"], page): key
            for one in self.recorded("wanted")
            for page, key in zip(one["pages"], one["keys"], strict=True)
        }
        count, wrong = 0, []
        for one in self.recorded("loaded"):
            key = keys[one["load"], one["group"], one["page"]]
            meant = saved[one["shard"], one["group"], key]
            for layer, (have, want) in enumerate(zip(one["layers"], meant, strict=True)):
                count += 1
                if have != want:
                    wrong.append((one["shard"], one["group"], key, layer))
        return count, wrong

    def break_loads(self, how: str) -> None:
        path = self.records / "break"
        if how:
            path.write_text(how)
        else:
            path.unlink(missing_ok=True)

    def wait_for_saves(self, daemon: Any, blocks: int) -> None:
        """Wait until the daemon has `blocks` blocks."""
        daemon.wait_for(lambda stats: stats["tiers"]["warm"]["blocks"] >= blocks, 30.0)

    def stop(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """PyTorch computes in one thread, and transformers logs errors alone."""
    import torch
    import transformers

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    made = Forks(os.environ | ENVIRONMENT)
    yield made
    made.stop()


@pytest.fixture(scope="session")
def made_of(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Creates a model in a folder, or an adapter from a seed, in another process."""
    logs = tmp_path_factory.mktemp("made")

    def make(*what: str | Path | int) -> None:
        log = logs / f"{what[0]}.log"
        output = forks.run(HERE / "models.py", *map(str, what), log=log, seconds=START_S)
        assert output == "made\n", output

    return make


@pytest.fixture(scope="session")
def model_of(
    made_of: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("models") / kind
            made_of(kind, made[kind])
        return made[kind]

    return make


@pytest.fixture
def make_adapter(made_of: Callable[..., None]) -> Callable[[Path, int], Path]:
    def make(folder: Path, seed: int) -> Path:
        made_of("adapter", folder, seed)
        return folder

    return make


@pytest.fixture(scope="module")
def engine_of(
    model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory,
    forks: Forks,
) -> Iterator[Callable[..., Engine]]:  # fmt: skip
    """Starts engines with the generated models, `spawned` as vLLM does or forked; stops them at the end."""
    running: list[Engine] = []

    def start(kind: str, socket: str, records: Path | None = None, **changes: Any) -> Engine:
        folder = tmp_path_factory.mktemp("engine")
        script = HERE / changes.pop("script", "host.py")
        spawned = changes.pop("spawned", False)
        kept = records or folder
        other_connector = changes.pop("beside", None)
        extra = {"socket": socket, "patience_ms": PATIENCE_MS} | changes.pop("extra", {})
        transfer = {
            "kv_connector": changes.pop("connector", "RecordingConnector"),
            "kv_role": changes.pop("role", "kv_both"),
            "kv_connector_extra_config": extra, "kv_load_failure_policy": "recompute",
        }  # fmt: skip
        if transfer["kv_connector"] in MODULES:
            transfer["kv_connector_module_path"] = MODULES[transfer["kv_connector"]]
        arguments = {
            "model": str(model_of(kind)), "dtype": "float32", "enforce_eager": True,
            "block_size": BLOCK, "max_model_len": 1024, "skip_tokenizer_init": True,
            "prefix_caching_hash_algo": "sha256_cbor", "kv_transfer_config": transfer,
        } | changes  # fmt: skip
        if other_connector:
            # Behind others, in the connector that contains several.
            connectors = [*other_connector["connectors"], transfer]
            arguments["kv_transfer_config"] = transfer | {
                "kv_connector": "MultiConnector", "kv_connector_module_path": None,
                "kv_connector_extra_config": {"connectors": connectors},
            }  # fmt: skip
        log = folder / "engine.log"
        environment = {"KVTIER_TEST_RECORDS": str(kept)}
        told = json.dumps(arguments)
        process: subprocess.Popen[str] | Forked
        with log.open("w") as sink:
            if spawned:
                process = subprocess.Popen(
                    [sys.executable, str(script), told], env=os.environ | ENVIRONMENT | environment,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True,
                )  # fmt: skip
            else:
                process = forks.start(script, told, log=sink, **environment)
        engine = Engine(process, kept, log)
        running.append(engine)
        started = time.monotonic()
        assert engine.answer(START_S) == "ready"
        print(f"engine {kind}: started in {time.monotonic() - started:.1f} s")
        return engine

    yield start
    for engine in running:
        engine.stop()
