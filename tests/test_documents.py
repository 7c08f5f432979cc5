"""What the documents say is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from daemons import Daemon

ROOT = Path(__file__).parents[1]


def test_the_figures_are_those_of_the_results() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "figures.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/**/*.md")), ids=str
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readmes_program_runs(shared_daemon: Daemon) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    shown: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVTIER_SOCKET", shared_daemon.socket)
        exec(compile(program, "README.md", "exec"), shown)  # noqa: S102 - our own page
    assert (shown["ready"], shown["first"]) == (4, bytes(16))


def test_the_architecture_page_names_only_what_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    roots = {
        "kvtier": ROOT / "kvtier",
        "kvtier_daemon": ROOT / "daemon",
        "kvtier_vllm": ROOT / "plugins",
    }
    for row in re.findall(
        r"^\| (`(?:kvtier|kvtier_daemon|kvtier_vllm)/[^|]+) \|", text, re.MULTILINE
    ):
        names = re.findall(r"`([\w/]+?)/?`", row)
        package = names[0].split("/")[0]
        for name in names:
            place = roots[package] / (name if name.startswith(package) else f"{package}/{name}")
            assert place.is_dir() or place.with_suffix(".py").exists(), name


def test_messages_that_the_troubleshooting_page_explains_are_said_by_somebody() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    sources = [
        path.read_text()
        for folder in ("kvtier", "daemon", "plugins")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    # A message may be written in two pieces, over two lines.
    text = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))
    said = re.findall(r"^\| (?:LOG |vLLM: )?`([^`]+)`", page, re.MULTILINE)
    assert len(said) > 20
    assert [message for message in said if message not in text] == []
