"""The statements of the documents are correct."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest

from kvtier.units import GIB
from kvtier.wire import OUTCOMES
from kvtier_daemon.catalog import WHY_MISSED
from kvtier_daemon.catalog.blocks import WHY_EVICTED
from kvtier_daemon.catalog.miss_log import UNWRITTEN
from kvtier_daemon.cli import COMMANDS
from kvtier_daemon.config.schema import load
from kvtier_daemon.tiers.cold.directory import ColdDirectory
from kvtier_vllm import stats
from support.daemons import Daemon, kvtier
from support.specs import spec_of

ROOT = Path(__file__).parents[1]


def test_the_figures_equal_the_results() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "figures.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_api_reference_equals_the_docstrings() -> None:
    command = [sys.executable, str(ROOT / "tools" / "api_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/**/*.md")), ids=str
)
def test_links_have_existing_targets(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page: its headings as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


def test_the_readmes_program_runs(shared_daemon: Daemon) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    shown: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVTIER_SOCKET", shared_daemon.socket)
        exec(compile(program, "README.md", "exec"), shown)  # noqa: S102 - our own page
    assert (shown["ready"], shown["first"]) == (4, bytes(16))


def test_the_commands_for_operators_run(daemon_of: Callable[..., Daemon], tmp_path: Path) -> None:
    folder = tmp_path / "it"
    (folder / "disk").mkdir(parents=True)
    daemon = daemon_of(
        folder=folder,
        config=f'''[warm]\nsize = "16MiB"\n[cold]\ndirectories = ["{folder}/disk"]\nsize = "64MiB"''',
    )
    page = (ROOT / "docs" / "operations.md").read_text()
    ran = set()
    for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL):
        for line in block.splitlines():
            line = line.removeprefix("/opt/kvtier/bin/")
            if not line.startswith("kvtier "):
                continue
            arguments = shlex.split(line, comments=True)[1:]
            if arguments[0] == "install-service":
                arguments += ["--root", str(tmp_path), "--program", "/opt/kvtier/bin/kvtier"]
            arguments = [
                part.replace("/etc/kvtier/kvtier.toml", str(folder / "kvtier.toml"))
                for part in arguments
            ]
            done = kvtier(*arguments, KVTIER_SOCKET=daemon.socket)
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
            ran.add(arguments[0])
    assert ran == {"install-service", "config", "reload", "tier", "status"}


def test_the_architecture_page_names_only_what_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    roots = {
        "kvtier": ROOT / "kvtier",
        "kvtier_daemon": ROOT / "daemon",
        **{path.name: ROOT / "plugins" for path in (ROOT / "plugins").glob("kvtier_*")},
    }
    for row in re.findall(
        r"^\| (`kvtier(?:_\w+)?/[^|]+) \|",
        text,
        re.MULTILINE,
    ):
        names = re.findall(r"`([\w/]+?)/?`", row)
        package = names[0].split("/")[0]
        for name in names:
            place = roots[package] / (name if name.startswith(package) else f"{package}/{name}")
            assert place.is_dir() or place.with_suffix(".py").exists(), name
    walked = re.findall(r"^\| \d+ \| `([^`]+)` \|", text, re.MULTILINE)
    assert len(walked) > 15
    assert [path for path in walked if not (ROOT / path).is_file()] == []


def messages_in_the_source() -> str:
    sources = [
        path.read_text()
        for folder in ("kvtier", "daemon", "plugins")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    # The source may contain a message in two pieces, on two lines.
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))


def test_log_lines_and_answers_that_the_pages_show_have_the_words_of_the_source() -> None:
    source, shown, foreign = messages_in_the_source(), 0, []
    for page in sorted((ROOT / "docs").glob("*.md")):
        for block in re.findall(
            r"^```text\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
        ):
            told = re.findall(
                r"^(?:(?:INFO|WARNING|ERROR) kvtier_[\w.]+: |kvtier: |\d+: [\d.]+ s ago)"
                r"(.*(?:\n[(a-z].*)*)", block, re.MULTILINE,
            )  # fmt: skip
            shown += len(told)
            plain = "; ".join(told).replace("\n", " ").replace("default", "%s")  # the tenant
            words = re.findall(r"[a-z]{2,}(?: [a-z]{2,})+", plain)
            foreign += [f"{page.name}: {text}" for text in words if text not in source]
    assert foreign == [] and shown > 8


def test_messages_that_the_troubleshooting_page_explains_exist_in_the_source() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    text = messages_in_the_source()
    messages = re.findall(r"^\| (?:LOG |vLLM: )?`([^`]+)`", page, re.MULTILINE)
    assert len(messages) > 20
    assert [message for message in messages if message not in text] == []


def test_the_operations_page_lists_every_reason() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    listed = {
        title: re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
        for title, table in re.findall(r"\n\| ([\w ]+ reason) \|(.*?)\n\n", page, re.DOTALL)
    }
    assert {title: sorted(reasons) for title, reasons in listed.items()} == {
        "miss reason": sorted(WHY_MISSED),
        "eviction reason": sorted(WHY_EVICTED),
        "refusal reason": sorted(OUTCOMES[1:]),
        "vLLM miss reason": sorted(get_args(stats.Miss)),
    }
    for reason in (*UNWRITTEN, *get_args(stats.Failure), *get_args(stats.Drop)):
        assert f"`{reason}`" in page, reason


def test_the_worksheet_prints_a_configuration_that_loads(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "sizing.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (stanza,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == stanza
    disks = sorted({Path(path).parent for path in re.findall(r'"(/mnt/[^"]+)"', stanza)})
    for disk in disks:
        stanza = stanza.replace(str(disk), str(tmp_path / disk.name))
        (tmp_path / disk.name / "kvtier").mkdir(parents=True, mode=0o700)
    file = tmp_path / "kvtier.toml"
    file.write_text(stanza)
    # The one value that depends on this machine: the size of its memory.
    checked = kvtier("config", "check", str(file), KVTIER_WARM__SIZE="64MiB")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    config = load(file, uid=10001).config
    assert config.warm.size_bytes == 73 * GIB
    assert config.cold is not None and len(config.cold.directories) == len(disks) == 2


def test_every_command_of_the_commands_page_runs(
    daemon_of: Callable[..., Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the document; with a daemon that has blocks, at the socket where the command looks for it."""
    page = (ROOT / "docs" / "commands.md").read_text()
    shown = set(re.findall(r"`(kvtier [^`]+)`", page)) | {"kvtier status"}
    apart = {
        "kvtier COMMAND --help", "kvtier serve --warm-size 8GiB", "kvtier demo", "kvtier bench --quick",
        "kvtier bench compare A.json B.json", "kvtier sim", "kvtier size", "kvtier calibrate",
        "kvtier monitor", "kvtier tier drain warm", "kvtier install-service --dry-run",
    }  # fmt: skip
    daemon = daemon_of()
    (tmp_path / "cold").mkdir()
    ColdDirectory(tmp_path / "cold", None).close()  # the state that a daemon leaves
    environment = {"KVTIER_SOCKET": daemon.socket, "KVTIER_WARM__SIZE": "64MiB"}
    monkeypatch.chdir(tmp_path)
    with daemon.connect() as client, ThreadPoolExecutor() as pool:
        space = client.open(spec_of("documented"))
        keys = space.keys(list(range(64)))
        space.save(keys, [bytes(space.spec.block_bytes)] * 4)
        for line in sorted(shown - apart, key=lambda one: "purge" in one):
            words = line.replace("DIRECTORY", str(tmp_path / "cold")).split()[1:]
            if line.startswith("kvtier completion"):
                words = ["completion", "bash"]
            run = pool.submit(kvtier, *words, **environment)
            while not run.done():  # events for `monitor`
                space.match(space.keys([9] * 16))
                time.sleep(0.05)
            done = run.result()
            ok = (0, 1, 2) if "doctor" in line else (0, 1) if "diff" in line else (0,)
            assert done.returncode in ok, f"{line}: {done.stderr}"
            assert "Traceback" not in done.stderr
        assert space.match(keys).ready == 0, "the page's purge"
    assert {line.split()[1] for line in shown} - {"COMMAND"} == set(COMMANDS)
