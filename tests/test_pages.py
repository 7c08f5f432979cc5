"""The fenced blocks of the documents as a reader runs them: as printed, in order, one new shell per page."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.daemons import Daemon
from support.pages import Block, blocks

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "plugins/README.md",
                *ROOT.glob("docs/**/*.md")])  # fmt: skip
RUNNABLE = frozenset({"sh", "python"})
DATA = frozenset({"text", "toml", "yaml", "ini", "console"})
PRINTED_VLLM = (
    "needs vLLM and a model; tests/engines/test_vllm_printed.py, tests/faults/test_package.py"
)
# Blocks by their page and first command: why they are not run here, and which test runs them
# instead.
ELSEWHERE = {
    ("README.md", "make demo"): "builds .venv; tests/e2e/test_demo.py",
    ("README.md", "make test"): "runs this test",
    ("README.md", "pip install ."): PRINTED_VLLM,
    ("docs/vllm.md", "until curl"): "needs vLLM; tests/engines/test_vllm_printed.py",
    ("docs/operations.md", "podman build"): "needs a registry and a cluster; tests/daemon/test_chart.py",
    ("docs/vllm.md", "pip install ."): PRINTED_VLLM,
    ("docs/vllm.md", "vllm serve"): "tests/engines/test_vllm_tier.py, tests/engines/test_vllm_printed.py",
    ("docs/lmcache.md", "python -m lmcache"): "needs LMCache; tests/engines/test_lmcache_l2.py",
    ("docs/sglang.md", "pip install ."): "needs SGLang and a model; tests/engines/test_sglang_wheel.py",
    ("docs/transformers.md", "pip install '.[transformers]'"): "tests/engines, tests/faults/test_package.py",
    ("docs/transformers.md", "from transformers"): "tests/engines/test_transformers_cache.py",
    ("docs/transformers.md", "from kvtier_transformers"): "tests/engines/test_transformers_cache.py",
    ("docs/transformers.md", "with Client.connect()"): "tests/engines/test_transformers_cache.py",
    ("CONTRIBUTING.md", "make venv"): "builds and runs everything; .ci/run",
    ("docs/attention.md", "attach(model"): "tests/engines/test_transformers_importance.py",
    ("docs/attention.md", "python benchmarks/bench_attention.py"): "needs torch and a model",
    ("docs/attention.md", "python benchmarks/bench_hints.py"): "takes minutes",
    ("docs/gpu.md", "tools/gpu_run.sh prepare"): "needs a GPU; tests/gpu/test_gpu_run.py",
    ("docs/gpu.md", "KVTIER_DEVICE=gpu compute-sanitizer"): "needs a GPU; make test-gpu",
    ("docs/tutorial.md", "make venv"): "builds .venv",
    ("docs/tutorial.md", "pip install ."): PRINTED_VLLM,
    ("docs/tutorial.md", "curl"): PRINTED_VLLM,
    ("docs/operations.md", "python3 -m venv /opt/kvtier"): "writes /opt; tests/faults/test_package.py",
    ("docs/operations.md", "/opt/kvtier/bin/kvtier install-service"): "tests/e2e/test_installed.py",
    ("docs/operations.md", "kvtier config check"): "tests/e2e/test_installed.py",
    ("docs/operations.md", "kvtier tier drain warm"): "tests/e2e/test_installed.py",
    ("docs/fleet.md", "make demo-fleet"): "builds .venv; tests/e2e/test_demo_fleet.py",
    ("docs/planning.md", "kvtier explain"): "names an example's key; tests/e2e/test_explain.py",
    ("docs/sizing.md", "$ kvtier size"): "needs a model's configuration; tests/daemon/tools/test_sizing.py",
    ("docs/sizing.md", "$ kvtier sim"): "needs a trace; tests/daemon/sim/test_sim.py",
}  # fmt: skip
# Findings about the machine are not failures of the command, nor is a daemon that answers after a second.
MAY_FAIL = {"kvtier doctor": ("1", "2", "3")}
PIP = re.compile(r"(?:[\w./]*/)?pip install ((?:'[^']+'|[^\s`;|&\"(')]+)(?: '[^']+')*)")
# tests/faults/test_package.py installs a checkout and a wheel; the others are on the package index.
INSTALLED = {".", "'.[transformers]'", "dist/kvtier-*.whl", "'textual>=8'",
             "'torch>=2.6' 'transformers>=5' 'numpy>=2'", "'obstore>=0.12'", "nvidia-cuda-nvrtc",
             "'mooncake-transfer-engine-non-cuda>=0.3.13'",
             "nvidia-cufile-cu12"}  # fmt: skip


def elsewhere(page: Path, block: Block) -> tuple[str, str] | None:
    """The entry of ELSEWHERE for this block."""
    name = str(page.relative_to(ROOT))
    fits = (key for key in ELSEWHERE if key[0] == name and block.text.startswith(key[1]))
    return next(fits, None)


def runnable(page: Path) -> list[Block]:
    return [
        one for one in blocks(page) if one.language in RUNNABLE and elsewhere(page, one) is None
    ]


def test_every_block_has_a_language_and_is_run_or_listed() -> None:
    used = set()
    for page in PAGES:
        for block in blocks(page):
            assert block.language in RUNNABLE | DATA, f"{page}: ```{block.language}: {block.text}"
            used.add(elsewhere(page, block))
    assert used - {None} == set(ELSEWHERE), "listed, and on no page"


def test_the_tests_that_run_the_other_blocks_exist() -> None:
    named = {name for why in ELSEWHERE.values() for name in re.findall(r"[\w.]+/[\w./]+", why)}
    assert len(named) >= 10
    assert [name for name in named if name != "/opt" and not (ROOT / name).exists()] == []


def test_every_printed_pip_install_is_a_tested_one() -> None:
    sources = [*PAGES, *(ROOT / "daemon").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]
    printed = {form: path for path in sources for form in PIP.findall(path.read_text())}
    assert len(printed) >= 5
    assert not {form: path for form, path in printed.items() if form not in INSTALLED}


def script(page: Path, folder: Path) -> str:
    """The page as one bash script, which continues after a failure and records each in `failed`."""
    lines = ["set -E", f"""trap 'echo "$? $BASH_COMMAND" >> {folder}/failed' ERR"""]
    for number, block in enumerate(runnable(page)):
        if block.language == "python":
            program = folder / f"block-{number}.py"
            program.write_text(block.text)
            lines.append(f"python {program}")
        else:
            lines.append(block.text)
            if re.search(r"^kvtier serve .*&$", block.text, re.MULTILINE):
                lines.append("python $LISTENS $! || exit 9")
    return "\n".join([*lines, "trap - ERR", "kill $(jobs -p) 2>/dev/null", "wait"])


# A reader sees the line "serves on ...", and continues.
LISTENS = """
import os, socket, sys, time
pid = int(sys.argv[1])
while True:
    try:
        socket.socket(socket.AF_UNIX).connect(os.environ["KVTIER_SOCKET"])
        break
    except OSError:
        os.kill(pid, 0)
        time.sleep(0.002)
"""


@pytest.mark.parametrize(
    "page", [page for page in PAGES if runnable(page)], ids=lambda page: page.name
)
def test_the_blocks_of_a_page_run_as_printed(
    page: Path, tmp_path: Path, daemon_of: Callable[..., Daemon]
) -> None:
    programs, home = tmp_path / "bin", tmp_path / "home"
    programs.mkdir()
    home.mkdir()
    for name, body in (
        ("python", f'exec {sys.executable} "$@"'),
        ("kvtier", f'exec {sys.executable} -m kvtier_daemon.cli "$@"'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "listens.py").write_text(LISTENS)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "TMPDIR": str(tmp_path),
        "KVTIER_SOCKET": str(tmp_path / "kvtier.sock"), "KVTIER_STATE": str(home / "state"),
        "LISTENS": str(tmp_path / "listens.py"),
    }  # fmt: skip
    text = script(page, tmp_path)
    if "kvtier serve" not in text:
        environment["KVTIER_SOCKET"] = daemon_of().socket
    with (tmp_path / "said").open("w+") as log:
        shell = subprocess.Popen(
            ["bash", "-c", text], cwd=home, env=environment, stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            code = shell.wait(120)
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()
        log.seek(0)
        output = log.read()
    assert code == 0, output
    failed = tmp_path / "failed"
    lines = failed.read_text().splitlines() if failed.exists() else []
    assert [line for line in lines if not _may(line)] == [], output
    assert "Traceback" not in output
    missing = [line for line in shown(page) if line not in output.splitlines()]
    assert missing == [], output


def shown(page: Path) -> list[str]:
    """The lines that the page shows as the output of its programs, each directly below its program."""
    pairs = re.findall(
        r"^```python\n[^`]*```\n```text\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
    )
    return [line for output in pairs for line in output.splitlines()]


def _may(line: str) -> bool:
    code, _, command = line.partition(" ")
    return code in MAY_FAIL.get(command, ())
