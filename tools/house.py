"""Count what makes the product hard to enter, and fail where a count exceeds its limit.

    python tools/house.py            the counts, their limits, and where a limit is not met yet
    python tools/house.py --check    status 1 where a count is worse than its limit and than REACHED

Counted are the product's packages, from their source alone: no tests, no benchmarks. Imports that only type
checkers follow count as imports.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "kvtier": "kvtier", "kvtier_daemon": "daemon", "kvtier_kernels": "kernels",
    "kvtier_plugins": "plugins", "kvtier_sglang": "plugins", "kvtier_transformers": "plugins",
    "kvtier_vllm": "plugins", "kvtier_vllm_tier": "plugins", "kvtier_lmcache": "plugins",
}  # fmt: skip
NATIVE = (".cpp", ".h", ".cu")
MOST_METHODS = 20
# What has been reached of limits that are not met yet: lower these with each improvement, never raise them.
REACHED = {"classes": 5, "plugin": 18, "lines": 87_296}

Graph = Mapping[str, set[str]]


@dataclass(frozen=True, slots=True)
class Module:
    """A Python module of the product."""

    name: str
    tree: ast.Module
    lines: int
    is_package: bool


def modules() -> dict[str, Module]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted((ROOT / folder / package).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            text = path.read_text()
            found[name] = Module(name, ast.parse(text), text.count("\n"), is_package)
    return found


def imports(module: Module, known: Mapping[str, Module]) -> set[str]:
    """The product's modules that this one imports anywhere in its text."""

    def nearest(name: str) -> str:
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name

    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {nearest(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {nearest(f"{node.module}.{alias.name}") for alias in node.names}
    return found - {"", module.name}


def cycles(graph: Graph) -> list[list[str]]:
    """The strongly connected components of more than one node (Tarjan)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in graph[node]:
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            part = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(part) > 1:
                found.append(sorted(part))

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return found


def rooms(graph: Graph, package: str) -> dict[str, set[str]]:
    """The top-level modules and folders of a package, and which of them each one imports."""

    def room(name: str) -> str:
        return ".".join(name.split(".")[:2])

    inside: dict[str, set[str]] = defaultdict(set)
    for name, others in graph.items():
        if name.startswith(f"{package}."):
            theirs = {room(other) for other in others if other.startswith(f"{package}.")}
            inside[room(name)] |= theirs - {room(name)}
    return inside


def floors(graph: Graph) -> int:
    """How many nodes the longest path has; nodes of one cycle count as one."""
    cycle_of = {node: min(part) for part in cycles(graph) for node in part}
    merged: dict[str, set[str]] = defaultdict(set)
    for node, others in graph.items():
        own = cycle_of.get(node, node)
        merged[own] |= {cycle_of.get(other, other) for other in others} - {own}
    heights: dict[str, int] = {}

    def height(node: str) -> int:
        if node not in heights:
            heights[node] = 1 + max((height(other) for other in merged[node]), default=0)
        return heights[node]

    return max(height(node) for node in list(merged))


def classes(known: Mapping[str, Module]) -> Iterator[tuple[str, str, int]]:
    """Every class at the top of a module: the module, its name, how many methods it has."""
    for module in known.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
                methods = {each.name for each in node.body if isinstance(each, kinds)}
                yield module.name, node.name, len(methods)


def product_lines(known: Mapping[str, Module]) -> int:
    native = (
        path for path in (ROOT / "kernels").rglob("*") if path.suffix in NATIVE and path.is_file()
    )
    return sum(module.lines for module in known.values()) + sum(
        path.read_text().count("\n") for path in native
    )


@dataclass(frozen=True, slots=True)
class Count:
    """One line of the result."""

    what: str
    value: int
    limit: int
    examples: tuple[str, ...] = ()
    reached: int = 0

    @property
    def is_worse(self) -> bool:
        return self.value > max(self.limit, self.reached)


def counted() -> list[Count]:
    known = modules()
    graph = {name: imports(module, known) for name, module in known.items()}
    circles = cycles(graph)
    top = rooms(graph, "kvtier_daemon")
    places: dict[str, list[str]] = defaultdict(list)
    large = []
    for module, name, methods in classes(known):
        places[name].append(module)
        if methods > MOST_METHODS:
            large.append(f"{module}.{name} {methods}")
    doubles = tuple(
        f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1
    )
    plugin = [name for name in known if name.startswith("kvtier_vllm.")]
    return [
        Count("import cycles", len(circles), 0, tuple(" ".join(circle) for circle in circles)),
        Count("rooms of the daemon", len(top), 20),
        Count("floors of the daemon", floors(top), 8),
        Count("arrows of the daemon", sum(map(len, top.values())), 70),
        Count("class names with two meanings", len(doubles), 0, doubles),
        Count(
            f"classes with more than {MOST_METHODS} methods",
            len(large),
            5,
            tuple(large),
            REACHED["classes"],
        ),
        Count("files of the vLLM plugin", len(plugin), 18, (), REACHED["plugin"]),
        Count("product lines", product_lines(known), 51_000, (), REACHED["lines"]),
    ]


def main(arguments: list[str]) -> int:
    counts = counted()
    for count in counts:
        mark = (
            "" if count.value <= count.limit else "  NOT MET" if not count.is_worse else "  WORSE"
        )
        print(f"{count.what:<40}{count.value:>7,}  (limit {count.limit:,}){mark}")
        if count.value > count.limit:
            for example in count.examples:
                print(f"    {example}")
    return int("--check" in arguments and any(count.is_worse for count in counts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
