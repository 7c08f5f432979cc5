"""Count phrases that a reader understands only at the second reading, per 1,000 words of prose.

Prose is Markdown without its code, and the comments and docstrings of Python, C++ and CUDA files. PHRASES
contains the phrases, and excludes ordinary English that looks like them: the standard library, numpy, mypy
and pytest have 0.1 to 0.2 per 1,000 words. `--check` fails if a folder exceeds its budget. `--show`
prints each phrase with its file and line. Changes no file.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A folder's name, its files (a leading "!" excludes), and the most phrases per 1,000 words that it may have.
FOLDERS = {
    "documents": ("*.md", "docs/**/*.md", "plugins/*.md", "!docs/decisions/*", "!CHANGELOG.md"),
    "decisions": ("docs/decisions/*.md", "CHANGELOG.md"),
    "kvtier": ("kvtier/**/*.py",),
    "daemon": ("daemon/**/*.py",),
    "plugins": ("plugins/**/*.py",),
    "kernels": ("kernels/**/*.py", "kernels/**/*.h", "kernels/**/*.cpp", "kernels/**/*.cu"),
    "tests": ("tests/**/*.py", "tests/**/*.cpp", "tests/**/*.h"),
    "benchmarks": ("benchmarks/*.py", "tools/*.py"),
}
BUDGETS = {
    "documents": 1.0,
    "kvtier": 1.0,
    "plugins": 1.0,
    "kernels": 1.0,
    "daemon": 1.0,
    "tests": 1.0,
    "benchmarks": 1.0,
}

VERB = (
    "is|are|was|were|has|have|had|can|may|must|does|did|asks?|runs?|looks?|comes?|came|goes|waits?|holds?|reads?|writes|"
    "wants?|uses?|saves?|saved|sends?|needs?|knows?|says?|gets?|found|finds?|could|lies|fails|wrote|lacks|stays"
)
# Each is a regular expression; what a lookahead or lookbehind excludes is ordinary English.
PHRASES = (
    r"beside",
    r"who(?:m|so)?ever",
    r"nobody|somebody|anybody|everybody",  # write which one: "no client", "a user"
    r"so (?:many|much|few)(?! (?:that|as|more|so)|\.)",
    r"no more(?! than)(?=[.,;:)]| (?:is|are|do|does)\b)",
    r"any more(?=[.,;:)]| (?:is|are|and|by)\b)",
    r"(?:is|are|has|have|had|and|or) none(?! of)",
    r"none (?:is|are|that|does|has|until)",
    r"(?:what|who) is there|there is of it|has to do for",
    # A clause in place of a noun: "to who asks", "Who waits is told", "What was saved is here".
    rf"(?:by|for|from|to|of|with|than|and|but|or) who (?:{VERB})",
    rf"(?<!# )Who (?:{VERB})(?![^.|]*\?)(?! what)",
    rf"(?<!# )What (?:{VERB}|it|of|they)(?![^.|]*[?|:])",
    r"what of (?:it|them|that|this|a|the)|of what (?:it|is|was|they|else|came)",
    r"all that (?:is|are|was|there)",
    r"[Nn]or (?:is|are|was|does|do|did|has|have|can)",
    r"(?:[,;] (?:and )?|and |but )so (?:is|are|was|were|does|do|did|has|have|goes)",
    r"says? otherwise|says so|by now|for good|all the same|of a kind|of its own accord",
    r"mends?|mended|mending|anew|likewise|nevertheless|had better|would rather|for the sake of|some day",
    r"(?:is|are|was|were|be) (?:told|asked|said|heard|looked|waited) (?:of|for|at|by|through|first|twice)",
    r"(?:hears?|heard|knows?|known|told) of(?! (?:a|the|any) bug)|sees? to|saw to|looks? after",
    r"hung up on|hangs? up on|brings? away|brought away|lets? go|goes? before|goes? without",
    r"as (?:it|they) (?:is|are|was|were|lies|comes)(?=[.,;:)]| (?:and|or|by)\b)",
    r"(?:is|are|was|were) of (?:one|no|some|any|its|the|a)(?! kind)",
    r"what becomes of|what became of|comes? again|came again|be had|there (?:is|are) to",
    r"out of (?:its|their|a) (?:turn|reach)|one after the other|its like|and its kin|and kin",
)
COUNTED = re.compile("|".join(rf"(?<![\w`-])(?:{phrase})(?![\w`-])" for phrase in PHRASES))
WORD = re.compile(r"[A-Za-z][\w'-]*")
COMMENT = re.compile(r"//([^\n]*)|/\*(.*?)\*/", re.DOTALL)
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")


@dataclass(frozen=True)
class Hit:
    line: int
    phrase: str


@dataclass(frozen=True)
class Count:
    words: int
    hits: tuple[Hit, ...]

    @property
    def rate(self) -> float:
        """Phrases per 1,000 words."""
        return 1000 * len(self.hits) / max(1, self.words)


def pieces(text: str, suffix: str) -> Iterator[tuple[int, str]]:
    """The prose of a file: each piece with the line that it begins in."""
    if suffix == ".md":
        blank = FENCED.sub(lambda fenced: "\n" * fenced.group().count("\n"), text)
        yield 1, CODE.sub("`code`", blank)
    elif suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("#! ")
        for node in ast.walk(ast.parse(text)):
            if isinstance(
                node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            ) and (docstring := ast.get_docstring(node, clean=False)):
                yield node.body[0].lineno, CODE.sub("`code`", docstring)
    else:
        for comment in COMMENT.finditer(text):
            yield (
                1 + text.count("\n", 0, comment.start()),
                comment.group(1) or comment.group(2) or "",
            )


def count(text: str, suffix: str) -> Count:
    """The words and the phrases of a file of this kind."""
    words, hits = 0, []
    for line, prose in pieces(text, suffix):
        words += len(WORD.findall(prose))
        hits += [
            Hit(line + prose.count("\n", 0, found.start()), " ".join(found.group().split()))
            for found in COUNTED.finditer(prose)
        ]
    return Count(words, tuple(sorted(hits, key=lambda hit: hit.line)))


def files(patterns: tuple[str, ...], root: Path = ROOT) -> list[Path]:
    """The files that match a pattern and none of those after "!"."""
    left_out = {path for one in patterns if one[0] == "!" for path in root.glob(one[1:])}
    found = {path for one in patterns if one[0] != "!" for path in root.glob(one)}
    return sorted(found - left_out)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "folders", nargs="*", choices=[[], *FOLDERS], help="by default all, or those with a budget"
    )
    parser.add_argument(
        "--check", action="store_true", help="fail where a folder is above its budget"
    )
    parser.add_argument(
        "--show", action="store_true", help="print each phrase with its file and line"
    )
    asked = parser.parse_args()
    failed = False
    for folder in asked.folders or (BUDGETS if asked.check else FOLDERS):
        counts = {path: count(path.read_text(), path.suffix) for path in files(FOLDERS[folder])}
        words = sum(one.words for one in counts.values())
        total = Count(words, tuple(hit for one in counts.values() for hit in one.hits))
        above = asked.check and total.rate > BUDGETS[folder]
        failed |= above
        for path, one in counts.items():
            if asked.show or above:
                for hit in one.hits:
                    print(f"{path.relative_to(ROOT)}:{hit.line}: {hit.phrase}")
            elif not asked.check:
                print(
                    f"{one.rate:6.2f}  {len(one.hits):4} of {one.words:6,}  {path.relative_to(ROOT)}"
                )
        budget = f", at most {BUDGETS[folder]:g}" if folder in BUDGETS else ""
        print(
            f"{folder}: {total.rate:.2f} phrases per 1,000 words ({len(total.hits)} in {words:,}){budget}"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
