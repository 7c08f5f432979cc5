"""Plant bugs in a copy of this tree, one at a time, and verify that the tests named for each of them
fail.

`edits.toml` lists the bugs. The copy and its environments are in build/sabotage; native code is rebuilt
only for bugs in it. Tests of engines need .venv-engines (`make engines`), and are skipped without it. Prints
a line for each bug; exits with 1 if one was not detected."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "sabotage"
EDITS = Path(__file__).with_name("edits.toml")
ENGINES = ROOT / ".venv-engines"
NATIVE = ("kernels/cpu/", "kernels/include/", "kernels/cuda/")
LONGEST_S = 1800.0
FAILED = 1  # pytest's exit status if a test failed
SAID = {"failed": "noticed", "skipped": "not tried: its tests are skipped on this machine"}


class NotPlanted(Exception):  # noqa: N818
    """The text of an edit does not occur exactly once, or a named test cannot be run."""


@dataclass(frozen=True)
class Edit:
    file: str
    before: str
    after: str

    def planted(self, text: str) -> str:
        """The file's text with the bug."""
        if self.before == self.after:
            raise NotPlanted(f"{self.file}: an edit changes nothing")
        if (count := text.count(self.before)) != 1:
            raise NotPlanted(
                f"{self.file}: the text before an edit occurs {count} times, not once: {self.before!r};"
                " change it in tests/sabotage/edits.toml to what the code says now"
            )
        return text.replace(self.before, self.after)


@dataclass(frozen=True)
class Bug:
    """`builds`: its tests use the native module, and a file of it is edited."""

    name: str
    tests: tuple[str, ...]
    edits: tuple[Edit, ...]
    builds: bool

    @property
    def needs_engines(self) -> bool:
        return any(test.startswith("tests/engines/") for test in self.tests)

    def planted(self, root: Path) -> dict[Path, str]:
        """The texts of the edited files with the bug."""
        texts: dict[Path, str] = {}
        for edit in self.edits:
            path = root / edit.file
            text = texts[path] if path in texts else path.read_text()
            texts[path] = edit.planted(text)
        return texts


def bugs() -> list[Bug]:
    """All bugs; those that need a build are last."""
    found = []
    for bug in tomllib.loads(EDITS.read_text())["bug"]:
        edits = tuple(Edit(**edit) for edit in bug["edit"])
        native = any(edit.file.startswith(NATIVE) for edit in edits)
        builds = native and bug.get("builds", True)
        found.append(Bug(bug["name"], tuple(bug["tests"]), edits, builds))
    return sorted(found, key=lambda bug: bug.builds)


def copy_tree() -> Path:
    """Update the copy to the state of this tree; built files in it are kept."""
    tree = PLACE / "tree"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
    wanted = {name for name in names.decode().split("\0") if name and (ROOT / name).is_file()}
    for name in sorted(wanted):
        source, target = ROOT / name, tree / name
        if target.is_file() and target.read_bytes() == source.read_bytes():
            continue  # a new modification time would cause a rebuild
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    for path in tree.rglob("*.py"):
        name = path.relative_to(tree).as_posix()
        if name not in wanted and not name.startswith(("build/", ".venv/")):
            path.unlink()
    return tree


@dataclass(frozen=True)
class Environments:
    """Two Pythons with the copy in place of this tree: one has the packages of this one, the other those of
    the engines. The other is None if the engines are not installed."""

    plain: Path
    engines: Path | None

    def of(self, bug: Bug) -> Path | None:
        return self.engines if bug.needs_engines else self.plain


def environments(tree: Path) -> Environments:
    plain, packages = environment("venv", Path(sys.prefix))
    build(tree, plain)
    if not ENGINES.exists():
        return Environments(plain, None)
    engines, others = environment("venv-engines", ENGINES)
    for path in (*packages.glob("_editable_*"), packages / "kvtier_kernels"):
        link = others / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    return Environments(plain, engines)


def environment(name: str, base: Path) -> tuple[Path, Path]:
    """A Python with the packages of the environment `base`, and the folder of its own packages."""
    python = PLACE / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", PLACE / name], check=True)
    (packages,) = (PLACE / name / "lib").glob("python*/site-packages")
    (theirs,) = (base / "lib").glob("python*/site-packages")
    # Its .pth files are not read, so it does not find this tree.
    (packages / "base.pth").write_text(f"{theirs}\n")
    return python, packages


def build(tree: Path, python: Path) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps"]
    done = subprocess.run(
        [*command, "--editable", "."], cwd=tree, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NotPlanted(f"the copy can't be built: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def run_tests(tree: Path, python: Path, tests: Sequence[str], log: Path) -> str:
    """The result in a word or two; the output goes to the log."""
    options = ["-q", "--maxfail=3", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    with log.open("w") as output:
        running = subprocess.Popen(
            [python, "-m", "pytest", *options, f"--basetemp={PLACE / 'tmp'}", *tests],
            cwd=tree, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )  # fmt: skip
        try:
            code = running.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            # With all processes that the tests started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    if code == 0:
        # Libraries of engines may write more after pytest's last line.
        return "passed" if re.search(r"^\d+ passed", log.read_text(), re.MULTILINE) else "skipped"
    # A signal means a crash.
    return "failed" if code == FAILED or code < 0 else f"ended with {code}"


def tried(bug: Bug, tree: Path, python: Path, log: Path) -> str:
    """Plant the bug, run its tests, and remove it. Returns the result of the tests."""
    planted = bug.planted(tree)
    sound = {path: path.read_text() for path in planted}
    try:
        for path, text in planted.items():
            path.write_text(text)
        if bug.builds:
            build(tree, python)
        return run_tests(tree, python, bug.tests, log)
    finally:
        for path, text in sound.items():
            path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of bugs; all, if none is named")
    names = parser.parse_args().names
    known = bugs()
    if unknown := set(names) - {bug.name for bug in known}:
        parser.error(f"no bug is named {', '.join(sorted(unknown))} in {EDITS}")
    chosen = [bug for bug in known if not names or bug.name in names]
    logs = PLACE / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    tree = copy_tree()
    pythons = environments(tree)
    for bug in chosen:
        bug.planted(tree)
    for number, python in enumerate(dict.fromkeys(map(pythons.of, chosen))):
        tests = sorted({test for bug in chosen if pythons.of(bug) == python for test in bug.tests})
        if python is None:
            print(f"{len(tests)} tests are skipped: the engines are not installed", flush=True)
            continue
        print(f"{len(chosen)} bugs; {len(tests)} tests without any of them", flush=True)
        log = logs / f"sound-{number}.log"
        if (became := run_tests(tree, python, tests, log)) not in ("passed", "skipped"):
            raise NotPlanted(f"the tests without a bug: {became}; see {log}")
    all_became: Counter[str] = Counter()
    for bug in chosen:
        began = time.monotonic()
        python = pythons.of(bug)
        became = tried(bug, tree, python, logs / f"{bug.name}.log") if python else "skipped"
        all_became[became] += 1
        verdict = SAID.get(became, f"NOT NOTICED: its tests {became}")
        print(f"{bug.name:50} {time.monotonic() - began:6.1f} s  {verdict}", flush=True)
    if any(bug.builds for bug in chosen):
        build(tree, pythons.plain)
    print(f"{all_became['failed']} of {len(chosen)} bugs noticed; logs in {logs}")
    return 1 if all_became.keys() - SAID.keys() else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NotPlanted as error:
        sys.exit(f"sabotage: {error}")
