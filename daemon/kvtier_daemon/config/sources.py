"""The sources of values: files, the environment and flags; and their meaning by the schema.

A source is flattened into leaves, one per key. Each leaf contains where it was written, for errors. A key
that the schema lacks is unknown; the error suggests the nearest key.
"""

import difflib
import errno
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import msgspec

from kvtier.errors import ConfigError
from kvtier_daemon.config.values import Key

KeyPath = tuple[str, ...]

# the name of a file and of a label
_TENANT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}", re.ASCII)
_HEADING = re.compile(r"\s*\[\s*([^\[\]#]+?)\s*\]\s*(?:#|$)")
_ASSIGNMENT = re.compile(r"\s*([\w.\-\"' ]+?)\s*=")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)

# A device such as /dev/zero has no end.
LARGEST_BYTES = 1 << 20

_PREFIX = "KVTIER_"
# Variables of other parts of kvtier, and therefore not keys of the daemon.
_ELSEWHERE = frozenset(
    {"KVTIER_ALL", "KVTIER_CPU", "KVTIER_DEVICE", "KVTIER_FAULTS", "KVTIER_TEST_CACHE"}
)
# Kubernetes sets these in every pod if there is a service called kvtier (KVTIER_PORT=tcp://...).
_SERVICE_LINK = re.compile(r"KVTIER_(SERVICE_|PORT$|PORT_)")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value and where it was written: its name in the environment, or its line, if known."""

    value: object
    origin: str
    variable: str = ""
    line: int = 0

    @property
    def place(self) -> str:
        """The place of the value, for errors."""
        return f"{self.origin}:{self.line}" if self.line else self.origin

    def spelled(self, key: str) -> str:
        """Return a dotted key in the spelling of this source."""
        return _variable(key) if self.variable else key


Leaves = dict[KeyPath, Leaf]


# --- reading them --------------------------------------------------------------------------------


def text_of(file: Path) -> str:
    """Return the text of a file, which may be a pipe. Refuses more than LARGEST_BYTES."""
    with file.open("rb") as opened:
        text = opened.read(LARGEST_BYTES + 1)
    if len(text) > LARGEST_BYTES:
        raise OSError(errno.EFBIG, "it has more than 1 MiB; is it the right file?")
    return text.decode("utf-8-sig")  # with a byte order mark or without


def of_file(file: Path) -> Leaves:
    """Return the leaves of a TOML file. Raises ConfigError if it is unreadable or invalid."""
    try:
        text = text_of(file)
        tree = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # invalid TOML, or bytes that are not UTF-8
        raise ConfigError(f"{file}: invalid TOML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: invalid TOML: nested too deeply") from error
    lines = _lines(text)
    return {path: Leaf(value, str(file), line=lines.get(path, 0)) for path, value in flatten(tree)}


def _lines(text: str) -> dict[KeyPath, int]:
    """Return the lines of plainly written keys and of the beginnings of sections."""
    lines: dict[KeyPath, int] = {}
    above: KeyPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        if found := _HEADING.match(line):
            above = _parts(found[1])
            lines.setdefault(above, number)
        elif found := _ASSIGNMENT.match(line):
            lines.setdefault((*above, *_parts(found[1])), number)
    return lines


def _parts(name: str) -> KeyPath:
    return tuple(part.strip(" \t\"'") for part in name.split("."))


def flatten(tree: Mapping[str, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Yield the leaves of a tree, with their paths."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, (*above, name))
        else:  # keep an empty section: a tenant without a key must not be lost
            yield (*above, name), value


def of_environment(environ: Mapping[str, str]) -> Leaves:
    """Return the values of the variables that begin with KVTIER_ and are for the daemon."""
    leaves = {}
    for name, value in sorted(environ.items()):
        if not name.startswith(_PREFIX) or name in _ELSEWHERE or _SERVICE_LINK.match(name):
            continue
        path = tuple(name.removeprefix(_PREFIX).lower().split("__"))
        leaves[path] = Leaf(value, f"environment {name}", variable=name)
    return leaves


def _variable(key: str) -> str:
    return _PREFIX + key.replace(".", "__").upper()


def of_flags(flags: Mapping[str, object]) -> Leaves:
    """Return the values of flags. Their names are dotted keys; None means that a flag was not given."""
    return {
        tuple(key.split(".")): Leaf(value, f"--{key.replace('.', '-').replace('_', '-')}")
        for key, value in flags.items()
        if value is not None
    }


# --- the schema ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Section:
    """The keys of a struct; `each` is the section under any name if users choose the names."""

    keys: Mapping[str, "Key | Section"]
    each: "Section | None" = None

    def get(self, name: str) -> "Key | Section | None":
        return self.keys.get(name, self.each)

    def dotted_keys(self, above: str = "") -> Iterator[str]:
        """Yield all dotted keys; NAME stands for a name that users choose."""
        inner = dict(self.keys) if self.each is None else {"NAME": self.each}
        for name, below in inner.items():
            if isinstance(below, Section):
                yield from below.dotted_keys(f"{above}{name}.")
            else:
                yield above + name


@cache
def fields_of(struct: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the fields; their types are evaluated once, which takes 0.3 ms."""
    return msgspec.structs.fields(struct)


def section_of(struct: type[msgspec.Struct]) -> Section:
    """Return the keys of `struct`: the type of each field is a struct or is annotated with its Key."""
    keys: dict[str, Key | Section] = {}
    for field in fields_of(struct):
        # An optional section is a struct or None.
        optional = isinstance(field.type, UnionType)
        below = next(iter(get_args(field.type)), None) if optional else field.type
        if isinstance(below, type) and issubclass(below, msgspec.Struct):
            keys[field.encode_name] = section_of(below)
        else:
            last = get_args(field.type)[-1]  # Annotated[type, Key] or dict[str, Struct]
            keys[field.encode_name] = (
                last if isinstance(last, Key) else Section({}, each=section_of(last))
            )
    return Section(keys)


# --- understanding them --------------------------------------------------------------------------


def parse(schema: Section, path: KeyPath, leaf: Leaf) -> object:
    """Return the value of the leaf; that of an empty section is None."""
    at: Key | Section = schema
    for depth, name in enumerate(path):
        if isinstance(at, Key):
            hint = _nearest_variable(schema, leaf)
            what = f"expected {at.expects}, got a section{hint}"
            raise unfit(path[:depth], leaf.place, what)
        below = at.get(name)
        if below is None:
            raise _unknown(schema, path, depth, at, leaf)
        if at.each is not None and not _TENANT_NAME.fullmatch(name):
            expects = "a name of up to 32 lowercase letters, digits, - and _"
            raise unfit(path[: depth + 1], leaf.place, f"expected {expects}")
        at = below
    if isinstance(at, Section):
        if leaf.value == {}:
            return None
        hint = _nearest_variable(schema, leaf)
        raise unfit(path, leaf.place, f"expected a section, got {_shown(leaf.value)}{hint}")
    try:
        if isinstance(leaf.value, dict):
            raise ValueError
        return at.parse(leaf.value)
    except ValueError as error:
        if str(error):
            raise unfit(path, leaf.place, f"{error}; expected {at.expects}") from None
        got = f"expected {at.expects}, got {_shown(leaf.value)}"
        raise unfit(path, leaf.place, got) from None


def _unknown(schema: Section, path: KeyPath, depth: int, at: Section, leaf: Leaf) -> ConfigError:
    above, name = path[:depth], path[depth]
    is_value = depth == len(path) - 1 and leaf.value != {}
    here = {key: dotted((*above, key)) for key in at.keys}
    # If two sections have the key, the first one is suggested.
    keys = reversed(list(schema.dotted_keys())) if is_value else ()
    anywhere = {key.rpartition(".")[2]: key for key in keys}
    what = "unknown key" if is_value else "unknown section"
    # report an unknown section once, whatever it contains
    place = leaf.place if is_value else leaf.origin
    if hint := _nearest_variable(schema, leaf):
        return unfit(path[: depth + 1], place, what + hint)
    # Prefer the right key in the wrong section: `lock` is nearer to warm.lock than to socket.
    for known, cutoff in ((anywhere, 1.0), (here, 0.6), (anywhere, 0.6)):
        for match in difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff):
            meant = leaf.spelled(known[match])
            return unfit(path[: depth + 1], place, f"{what}; did you mean {meant}?")
    inner = [key for key, below in at.keys.items() if is_value or isinstance(below, Section)]
    there = f"known: {', '.join(sorted(inner))}" if inner else "none are known here"
    return unfit(path[: depth + 1], place, f"{what}; {there}")


def _nearest_variable(schema: Section, leaf: Leaf) -> str:
    """Return a suggestion for a misspelt variable: usually an underscore is missing."""
    if not leaf.variable:
        return ""
    known = {_variable(key).removeprefix(_PREFIX) for key in schema.dotted_keys()}
    near = difflib.get_close_matches(leaf.variable.removeprefix(_PREFIX), known, n=1, cutoff=0.75)
    return f"; did you mean {_PREFIX}{near[0]}?" if near else ""


def unfit(path: KeyPath, origin: str, what: str) -> ConfigError:
    """Return the error for one key: where it was written, its name, and what is wrong."""
    return ConfigError(f"{origin}: {dotted(path)}: {what}")


def dotted(path: KeyPath) -> str:
    """Return the path in the notation of TOML."""
    return ".".join(part if _BARE_KEY.fullmatch(part) else json.dumps(part) for part in path)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value == {}:
        return "a section"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
