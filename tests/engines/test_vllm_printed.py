"""The commands that the pages print for vLLM, with a real server over HTTP. Only the model, the port, and
what a small model on a CPU needs are added."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.engine.core", reason="needs vLLM: make test-engines")

from engines.conftest import ENVIRONMENT, START_S
from support.daemons import Daemon
from support.effort import ALL
from support.pages import blocks, command

ROOT = Path(__file__).parents[2]
TUTORIAL, VLLM = ROOT / "docs/tutorial.md", ROOT / "docs/vllm.md"
CHAT_S = 120.0
BLOCKS, BLOCK_TOKENS = 4, 128  # of the tutorial's prompt
MODULE = "python -m vllm.entrypoints.openai.api_server"


class Shell:
    """Runs printed commands in a folder in which `kvtier` and `python` are those of the tests."""

    def __init__(self, folder: Path, daemon: str) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        for name, words in (("python", ""), ("kvtier", "-m kvtier_daemon.cli ")):
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n')
            (programs / name).chmod(0o755)
        self.slept = folder / "slept"
        (programs / "sleep").write_text(
            f'#!/bin/sh\necho "$@" >> {self.slept}\nexec /bin/sleep "$@"\n'
        )
        (programs / "sleep").chmod(0o755)
        self.env = os.environ | ENVIRONMENT | {
            "PATH": f"{programs}:{os.environ['PATH']}", "KVTIER_SOCKET": daemon,
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        }  # fmt: skip

    def run(self, text: str, **more: str) -> str:
        done = subprocess.run(
            ["bash", "-c", text], cwd=self.folder, env=self.env | more, capture_output=True,
            text=True, timeout=CHAT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


class Server:
    def __init__(self, shell: Shell, text: str, model: Path, log: Path) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.log = log
        more = (
            f" --host 127.0.0.1 --port {self.port} --served-model-name MODEL --dtype float32"
            " --enforce-eager --max-model-len 1024 --max-num-seqs 4"
        )
        text = "exec " + text.replace("--model MODEL", f"--model {shlex.quote(str(model))}") + more
        with log.open("w") as sink:
            self.process = subprocess.Popen(
                ["bash", "-c", text], cwd=shell.folder, env=shell.env, stdin=subprocess.DEVNULL,
                stdout=sink, stderr=sink, start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).read()
                return
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.2)

    def forget(self) -> None:
        """Empty the engine's own cache."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/reset_prefix_cache", b"")
        urllib.request.urlopen(request, timeout=CHAT_S).read()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


@pytest.fixture
def serve(model_of: Callable[[str], Path], tmp_path: Path) -> Iterator[Callable[..., Server]]:
    running: list[Server] = []

    def start(shell: Shell, text: str) -> Server:
        log = tmp_path / f"server-{len(running)}.log"
        running.append(Server(shell, text, model_of("uneven"), log))
        running[-1].wait()
        return running[-1]

    yield start
    for one in running:
        one.stop()


def block_of(page: Path, has: str) -> str:
    (found,) = [one.text for one in blocks(page) if one.language == "sh" and has in one.text]
    return found


def rows_below(page: Path, heading: str) -> list[list[str]]:
    """The rows of `kvtier status` that the page shows in the last output below this heading."""
    section = page.read_text().partition(f"### {heading}\n")[2].partition("\n### ")[0]
    shown = re.findall(r"^```text\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)[-1]
    rows = [line.split() for line in shown.splitlines()]
    return [row for row in rows if row and row[0] in ("tokens", "hit", "used", "miss", "saved")]


def connected(server: Server) -> int:
    """The number of blocks in memory, from the line that the page tells its reader to wait for."""
    text = " ".join(server.log.read_text().split())
    found = re.search(r"kvtier: connected to kvtier \S+ at .*? has (\d+) blocks in memory", text)
    assert found, text[-4000:]
    return int(found[1])


def test_the_tutorial_and_the_warm_up_work_as_printed(
    daemon_of: Callable[..., Daemon], serve: Callable[..., Server], tmp_path: Path
) -> None:
    (tmp_path / "cold").mkdir(mode=0o700)
    config = (
        f'[warm]\nsize = "64MiB"\n[cold]\ndirectories = ["{tmp_path / "cold"}"]\n'
        'size = "256MiB"\nwrite = "through"\n'
    )
    daemon = daemon_of(folder=tmp_path, config=config)
    shell = Shell(tmp_path, daemon.socket)
    starts = command(block_of(TUTORIAL, MODULE), MODULE)

    def sends(server: Server) -> dict[str, Any]:
        """Run the printed request. Returns `usage`."""
        text = block_of(TUTORIAL, "curl -s localhost:8000")
        output = shell.run(text.replace("localhost:8000", f"localhost:{server.port}"))
        answer, _ = json.JSONDecoder().raw_decode(output)
        assert "tokens looked up" in output, "the block ends with `kvtier status`"
        return dict(answer["usage"])

    def shows(heading: str) -> None:
        daemon.wait_for(lambda stats: stats["tiers"]["warm"]["blocks"] >= BLOCKS, 60.0)
        lines = [line.split() for line in shell.run("kvtier status").splitlines()]
        assert [row for row in rows_below(TUTORIAL, heading) if row not in lines] == [], lines

    first = serve(shell, starts)
    assert connected(first) == 0
    usage = sends(first)
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (540, 0)
    shows("2. Send a prompt")
    if ALL:
        first.stop()
        second = serve(shell, starts)
        assert connected(second) == BLOCKS
    else:  # a start takes half a minute
        second = first
        second.forget()
    assert sends(second)["prompt_tokens_details"]["cached_tokens"] == BLOCKS * BLOCK_TOKENS
    shows("3. Restart the engine, and send the prompt again")

    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= BLOCKS, 60.0)
    daemon.stop()
    daemon = daemon_of(folder=tmp_path, config=config)
    daemon.wait_for(lambda stats: stats["sessions"] == 2, 60.0)
    second.forget()
    warm = re.search(r"`warm\.json` such as `(\{.*?\}\})`", VLLM.read_text().replace("\n", " "))
    assert warm
    body = json.loads(warm[1])
    # Otherwise the first request waits for these few blocks, and the loop has nothing to repeat.
    body["kv_transfer_params"]["kvtier"]["load"] = False
    body["prompt"] = "The quick brown fox jumps over the lazy dog. " * 12
    (tmp_path / "warm.json").write_text(json.dumps(body))
    assert daemon.stats()["tiers"]["warm"]["blocks"] == 0
    shell.run(block_of(VLLM, "until curl"), VLLM=f"http://127.0.0.1:{second.port}")
    assert shell.slept.exists(), "the first answer has blocks that are coming"
    told = json.loads((tmp_path / "warm.answer").read_text())["kv_transfer_params"]["kvtier"]
    assert (told["memory_blocks"], told["coming_blocks"]) == (BLOCKS, 0), told
    assert daemon.stats()["tiers"]["warm"]["blocks"] == BLOCKS
    second.forget()
    assert sends(second)["prompt_tokens_details"]["cached_tokens"] == BLOCKS * BLOCK_TOKENS


SERVED = [
    (ROOT / "README.md", "vllm serve MODEL", "KvtierConnector"),
    (VLLM, "vllm serve MODEL \\\n", "KvtierConnector"),
    (VLLM, "vllm serve MODEL --prefix", "OffloadingConnector"),
    (TUTORIAL, MODULE, "KvtierConnector"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "page, begins, connector", SERVED, ids=lambda value: getattr(value, "name", "")
)
def test_vllm_accepts_every_printed_command(
    page: Path, begins: str, connector: str, model_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """vLLM's own parser, up to the configuration that an engine starts with."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = str(model_of("uneven"))
    words = shlex.split(command(block_of(page, begins), begins).replace("\\\n", " "))
    words = words[2:] if words[0] == "vllm" else words[3:]
    words = [model if word == "MODEL" else word for word in words]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(parsed)
    if getattr(parsed, "model_tag", None):
        parsed.model = parsed.model_tag
    args = AsyncEngineArgs.from_cli_args(parsed)
    assert args.model == model and args.prefix_caching_hash_algo == "sha256_cbor"
    config = args.create_engine_config()
    assert config.kv_transfer_config is not None
    assert config.kv_transfer_config.kv_connector == connector
    assert config.kv_transfer_config.kv_role == "kv_both"


def test_every_printed_vllm_command_is_tested() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    printed = {
        (page, one.text)
        for page in pages
        for one in blocks(page)
        if one.language == "sh" and ("vllm serve" in one.text or MODULE in one.text)
    }
    assert printed == {(page, block_of(page, begins)) for page, begins, _ in SERVED}
