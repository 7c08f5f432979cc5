"""Write docs/api.md from the docstrings of the public classes of `kvtier`.

`--check` writes nothing, and fails if the page is out of date.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import kvtier
from kvtier import client, key, layout, top_k

WIDTH = 100
PAGE = Path(__file__).parents[1] / "docs" / "api.md"
INTRODUCTION = """\
# API reference

`tools/api_reference.py` writes this page from the docstrings. The [tutorial](tutorial.md) shows the calls in
use; the [glossary](../CONTRIBUTING.md#glossary) defines the terms. Import the names from `kvtier`, unless
their description names another module.
"""
SECTIONS: dict[str, tuple[Any, ...]] = {
    "Connect": (client.Client, client.default_socket),
    "Describe a cache": (layout.KvSpec, layout.Group),
    "Name blocks": (key.Keys,),
    "Look up, load and save": (
        client.Space, client.Match, client.Blocks, client.Lease, client.Saving, client.Saved,
        top_k.load_tokens,
    ),
    "Other results": (client.Pinned, client.Changes, client.Change, client.Reader),
    "Exceptions": (
        kvtier.KvtierError, kvtier.Unavailable, kvtier.Refused, kvtier.NotReady, kvtier.InvalidArgument,
        kvtier.StaleLease, kvtier.ViewsInUse, kvtier.SpecError, kvtier.ConfigError, kvtier.TierError,
        kvtier.FrameError, kvtier.ProtocolError,
    ),
}  # fmt: skip


def page() -> str:
    """The text of docs/api.md."""
    lines = [INTRODUCTION]
    for title, things in SECTIONS.items():
        lines.append(f"## {title}\n")
        for thing in things:
            lines += function(thing, "###") if inspect.isfunction(thing) else described(thing)
    return "\n".join(lines)


def described(kind: type) -> Iterator[str]:
    """A class: its text, its fields, its methods and properties in the order of the source."""
    bases = [base.__name__ for base in kind.__bases__ if issubclass(base, Exception)]
    yield f"### {kind.__name__}\n"
    if not hasattr(kvtier, kind.__name__):
        yield f"Import it from `{kind.__module__}`.\n"
    if bases and kind is not kvtier.KvtierError:
        yield f"Subclass of {', '.join(f'`{base}`' for base in bases)}.\n"
    yield text(kind)
    if issubclass(kind, msgspec.Struct):
        yield from fields(kind)
    for name, member in vars(kind).items():
        if name.startswith("_") or name in getattr(kind, "__struct_fields__", ()):
            continue
        if isinstance(member, (property, functools.cached_property)):
            yield f"#### `{name}` (property)\n"
            yield text(member)
        elif isinstance(member, classmethod):
            yield from function(member.__func__, "####", f"{kind.__name__}.")
        elif inspect.isfunction(member):
            yield from function(member, "####")


def fields(kind: type[msgspec.Struct]) -> Iterator[str]:
    """A table of a struct's fields."""
    annotations = inspect.get_annotations(kind)
    yield "| field | type | default |\n| --- | --- | --- |"
    for field in msgspec.structs.fields(kind):
        default = "required" if field.default is msgspec.NODEFAULT else f"`{field.default!r}`"
        annotation = str(annotations[field.name]).replace("|", "\\|")
        yield f"| `{field.name}` | `{annotation}` | {default} |"
    yield ""


def function(call: Any, heading: str, owner: str = "") -> Iterator[str]:
    """A function or method: its signature and its text."""
    yield f"{heading} `{owner}{call.__name__}`\n"
    if not owner and call.__qualname__ == call.__name__:
        yield f"Import it from `{call.__module__}`.\n"
    yield f"```text\n{signature(call, owner)}\n```\n"
    yield text(call)


def signature(call: Any, owner: str) -> str:
    """In one line, or with a line for each parameter."""
    found = inspect.signature(call)
    shown = list(parameters(found))
    name, result = f"{owner}{call.__name__}", f" -> {found.return_annotation}"
    line = f"{name}({', '.join(shown)}){result}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {one}," for one in shown), f"){result}"])


def parameters(found: inspect.Signature) -> Iterator[str]:
    """Each parameter but the object itself, with its type and default."""
    starred = False
    for one in found.parameters.values():
        if one.name in ("self", "cls"):
            continue
        if one.kind is one.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        stars = "**" if one.kind is one.VAR_KEYWORD else ""
        default = one.default
        shown = f"{default.__module__}.{default.__name__}" if callable(default) else repr(default)
        yield f"{stars}{one.name}: {one.annotation}" + (
            "" if default is one.empty else f" = {shown}"
        )


def text(documented: Any) -> str:
    """The docstring, which everything public has."""
    docstring = inspect.getdoc(documented)
    assert docstring, documented
    return f"{docstring}\n"


def main() -> int:
    written = page()
    if "--check" in sys.argv:
        if PAGE.exists() and PAGE.read_text() == written:
            return 0
        print("docs/api.md is out of date: run `python tools/api_reference.py`")
        return 1
    PAGE.write_text(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
