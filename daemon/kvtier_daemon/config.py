"""The daemon's configuration: read from every source, checked, and settled into plain numbers.

defaults < file < conf.d/*.toml beside it < environment (KVTIER_WARM__SIZE) < flags (--warm-size)

A source is flattened into leaves, one per key, and a later leaf replaces an earlier one. Each leaf
remembers where it was written, so an error and `Loaded.origins` can say so. A struct's field names
its parser beside its type: what is not a field is an unknown key.
"""

import difflib
import grp
import json
import os
import pwd
import re
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import msgspec

from kvtier.errors import ConfigError
from kvtier.units import GIB, MIB, format_bytes, parse_bytes, parse_share

PAGE_BYTES: Final = 4096
HUGE_PAGE_BYTES: Final = 2 * MIB
SYSTEM_SOCKET: Final = Path("/run/kvtier/kvtier.sock")
SYSTEM_STATE: Final = Path("/var/lib/kvtier")
POLICIES: Final = ("lru",)
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
EVERYONE: Final = "*"

_SIZE_MIN = MIB
_CLIENTS_MAX = 65_536
_ID_MAX = (1 << 32) - 2  # the last one is (uid_t)-1, "no change"
_TENANT_NAME = re.compile(
    r"[a-z0-9][a-z0-9_-]{0,31}", re.ASCII
)  # names a file and a metric's label
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)

_PREFIX = "KVTIER_"
# Read by other parts of kvtier, and so no keys of the daemon's.
_ELSEWHERE = frozenset({"KVTIER_CPU", "KVTIER_FAULTS"})
# Kubernetes puts these into every pod beside a service called kvtier (KVTIER_PORT=tcp://...).
_SERVICE_LINK = re.compile(r"KVTIER_(SERVICE_|PORT$|PORT_)")


# --- parsers: what was written -> what it means; ValueError where it means nothing ---------------


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _one_of(names: Sequence[str]) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in names:
            raise ValueError
        return str(value)

    return parse


def _path(value: object) -> Path:
    if "\0" in _text(value):
        raise ValueError
    try:
        path = Path(_text(value)).expanduser()
    except RuntimeError:
        raise ValueError("whose home is that?") from None
    if not path.is_absolute():
        raise ValueError
    return path


def _mode(value: object) -> int:
    # An integer is refused: 660 and 0o660 look alike in a file and mean different things.
    if not re.fullmatch(r"0?[0-7]{3}", _text(value)):
        raise ValueError
    mode = int(_text(value), 8)
    if mode & 0o600 != 0o600:
        raise ValueError("the owner needs rw to connect")
    return mode


def _number(value: object, low: int, high: int) -> int:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,12}", value, re.ASCII):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError
    return value


def _clients(value: object) -> int:
    return _number(value, 1, _CLIENTS_MAX)


def _flag(value: object) -> bool:
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in known:
        return known[value.lower()]
    raise ValueError


def _group(value: object) -> int:
    if isinstance(value, str) and not value.isdecimal():
        try:
            return grp.getgrnam(_text(value)).gr_gid
        except KeyError:
            raise ValueError(f"there is no group {value!r}") from None
    return _number(value, 0, _ID_MAX)


def _amount(value: object) -> int:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ValueError
    return parse_bytes(value)


def _size(value: object) -> int:
    amount = _amount(value)
    if amount < _SIZE_MIN:
        raise ValueError(f"{format_bytes(amount)} is less than {format_bytes(_SIZE_MIN)}")
    return _pages(amount)


def _extent(value: object) -> int:
    if _amount(value) < PAGE_BYTES:
        raise ValueError(f"{format_bytes(_amount(value))} is less than a page")
    return _pages(_amount(value))


def _uids(value: object) -> tuple[int | str, ...]:
    if isinstance(value, str):  # from the environment or a flag
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, list | tuple) or not value:
        raise ValueError
    return tuple(_uid(item) for item in value)


def _uid(item: object) -> int | str:
    if item == EVERYONE:
        return EVERYONE
    if isinstance(item, str) and not item.isdecimal():
        try:
            return pwd.getpwnam(_text(item)).pw_uid
        except KeyError:
            raise ValueError(f"there is no user {item!r}") from None
    return _number(item, 0, _ID_MAX)


def _share(value: object) -> str | int:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ValueError
    parse_share(value, GIB)  # it can be resolved only when the size is known
    return value


# --- the structs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Key:
    """How one key is read: the parser, and what it expects in words."""

    parse: Callable[[Any], object]
    expects: str


_Size = Key(_size, "a size such as 64GiB, at least 1 MiB")
_Extent = Key(_extent, "a size such as 1GiB")
_Share = Key(_share, 'a share such as "40%" or a size such as 16GiB')
_Uids = Key(_uids, 'a list of "*", numbers and user names')
_Path = Key(_path, "an absolute path")
_Mode = Key(_mode, 'octal digits in quotes, such as "0660"')
_Group = Key(_group, "the name or the number of a group")
_Level = Key(_one_of(LOG_LEVELS), f"one of {', '.join(LOG_LEVELS)}")
_Policy = Key(_one_of(POLICIES), f"a policy that is there: {', '.join(POLICIES)}")
_Flag = Key(_flag, "true or false")
_Clients = Key(_clients, f"a number from 1 to {_CLIENTS_MAX}")


class Warm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The warm tier: memory of the host that clients map. Amounts are whole pages."""

    size_bytes: Annotated[int, _Size] = msgspec.field(name="size")
    extent_bytes: Annotated[int, _Extent] = msgspec.field(name="extent")
    policy: Annotated[str, _Policy] = "lru"
    lock: Annotated[bool, _Flag] = False
    huge_pages: Annotated[bool, _Flag] = False


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who may see the same blocks, and what they own of the arena; `uids` holds "*" or numbers."""

    uids: Annotated[tuple[int | str, ...], _Uids]
    quota_bytes: Annotated[int, _Share] = msgspec.field(name="quota")


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything the daemon was told, settled: no value depends on the machine or on another."""

    socket: Annotated[Path, _Path]
    socket_mode: Annotated[int, _Mode] = 0o660
    socket_group: Annotated[int | None, _Group] = None
    state: Annotated[Path, _Path]
    log_level: Annotated[str, _Level] = "info"
    max_clients: Annotated[int, _Clients] = 256
    warm: Warm
    tenants: dict[str, Tenant]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and for each dotted key where its value was written."""

    config: Config
    origins: Mapping[str, str]


def tenant_of(config: Config, uid: int) -> str | None:
    """Return the tenant that `uid` belongs to: one that names it, else the one that takes everyone.

    None means that nobody wants this user; the connection is to be refused.
    """
    everyones = None
    for name, tenant in config.tenants.items():
        if uid in tenant.uids:
            return name
        if EVERYONE in tenant.uids:
            everyones = name
    return everyones


# --- where things lie by default -----------------------------------------------------------------


def default_socket(environ: Mapping[str, str] | None = None, uid: int | None = None) -> Path:
    """Return where a daemon of this user listens if nobody says otherwise."""
    environ = os.environ if environ is None else environ
    uid = os.geteuid() if uid is None else uid
    if uid == 0:
        return SYSTEM_SOCKET
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if Path(runtime).is_absolute():
        return Path(runtime) / "kvtier" / "kvtier.sock"
    return Path(tempfile.gettempdir()) / f"kvtier-{uid}" / "kvtier.sock"


def default_state(environ: Mapping[str, str] | None = None, uid: int | None = None) -> Path:
    """Return where a daemon of this user keeps what must outlive it."""
    environ = os.environ if environ is None else environ
    uid = os.geteuid() if uid is None else uid
    if uid == 0:
        return SYSTEM_STATE
    state = environ.get("XDG_STATE_HOME", "")
    if Path(state).is_absolute():
        return Path(state) / "kvtier"
    home = environ.get("HOME", "")
    if Path(home).is_absolute():
        return Path(home) / ".local" / "state" / "kvtier"
    return Path(tempfile.gettempdir()) / f"kvtier-{uid}" / "state"


def default_extent(size_bytes: int) -> int:
    """Return the extent for a warm tier of `size_bytes`: never more than 64 extents from 64 GiB up.

    A small tier gets 16 of them, so that it too is served as it grows, but none below 64 MiB:
    each costs two descriptors and a mapping in every client.
    """
    if size_bytes < 16 * GIB:
        return _pages(min(size_bytes, max(size_bytes // 16, 64 * MIB)))
    return _pages(max(GIB, size_bytes // 64))


def _pages(amount: int, page: int = PAGE_BYTES) -> int:
    return amount - amount % page


# --- reading -------------------------------------------------------------------------------------

_KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Leaf:
    value: object
    origin: str


@dataclass(frozen=True, slots=True)
class _Section:
    """The keys of a struct; `each` is what lies under any name where users choose the names."""

    keys: Mapping[str, "Key | _Section"]
    each: "_Section | None" = None

    def get(self, name: str) -> "Key | _Section | None":
        return self.keys.get(name, self.each)


def _section(struct: type[msgspec.Struct]) -> _Section:
    keys: dict[str, Key | _Section] = {}
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            keys[field.encode_name] = _section(field.type)
        else:
            last = get_args(field.type)[-1]  # Annotated[type, Key] or dict[str, Struct]
            keys[field.encode_name] = (
                last if isinstance(last, Key) else _Section({}, each=_section(last))
            )
    return _Section(keys)


_SCHEMA = _section(Config)


def dotted_keys(section: _Section = _SCHEMA, above: str = "") -> Iterator[str]:
    """Yield every dotted key there is; NAME stands for a name that users choose."""
    inner = dict(section.keys) if section.each is None else {"NAME": section.each}
    for name, below in inner.items():
        if isinstance(below, _Section):
            yield from dotted_keys(below, f"{above}{name}.")
        else:
            yield above + name


def load(
    file: Path | None,
    flags: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    uid: int | None = None,
) -> Loaded:
    """Return the configuration that the sources add up to; `flags` has dotted keys, None is unset.

    Never returns one with a key or a value it does not understand: ConfigError says which, where
    it was written and what was expected, in one line.
    """
    environ = os.environ if environ is None else environ
    leaves: dict[_KeyPath, _Leaf] = {
        ("socket",): _Leaf(str(default_socket(environ, uid)), "default"),
        ("state",): _Leaf(str(default_state(environ, uid)), "default"),
    }
    if file is not None:
        leaves |= _from_file(file)
        for piece in sorted((file.parent / "conf.d").glob("*.toml")):
            leaves |= _from_file(piece)
    leaves |= _from_environment(environ)
    leaves |= _from_flags(flags or {})
    parsed = {path: (_parse(path, leaf), leaf) for path, leaf in leaves.items()}
    return _settle(parsed, f"{file}: " if file is not None else "")


def _from_file(file: Path) -> dict[_KeyPath, _Leaf]:
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # bad TOML, or bytes that are no UTF-8
        raise ConfigError(f"{file}: is no TOML: {' '.join(str(error).split())}") from error
    return {path: _Leaf(value, str(file)) for path, value in _flatten(tree)}


def _flatten(tree: Mapping[str, Any], above: _KeyPath = ()) -> Iterator[tuple[_KeyPath, object]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, (*above, name))
        else:  # an empty section stays, so that a tenant without a key is not lost
            yield (*above, name), value


def _from_environment(environ: Mapping[str, str]) -> dict[_KeyPath, _Leaf]:
    leaves = {}
    for name, value in sorted(environ.items()):
        if not name.startswith(_PREFIX) or name in _ELSEWHERE or _SERVICE_LINK.match(name):
            continue
        path = tuple(name.removeprefix(_PREFIX).lower().split("__"))
        leaves[path] = _Leaf(value, f"environment {name}")
    return leaves


def _from_flags(flags: Mapping[str, object]) -> dict[_KeyPath, _Leaf]:
    return {
        tuple(key.split(".")): _Leaf(value, f"--{key.replace('.', '-').replace('_', '-')}")
        for key, value in flags.items()
        if value is not None
    }


def _parse(path: _KeyPath, leaf: _Leaf) -> object:
    """Return what the leaf means; the value of an empty section is None."""
    at: Key | _Section = _SCHEMA
    for depth, name in enumerate(path):
        if isinstance(at, Key):
            raise _unfit(path[:depth], leaf.origin, f"expected {at.expects}, got a section")
        below = at.get(name)
        if below is None:
            raise _unknown(path, depth, at, leaf)
        if at.each is not None and not _TENANT_NAME.fullmatch(name):
            expects = "a name of up to 32 lowercase letters, digits, - and _"
            raise _unfit(path[: depth + 1], leaf.origin, f"expected {expects}")
        at = below
    if isinstance(at, _Section):
        if leaf.value == {}:
            return None
        raise _unfit(path, leaf.origin, f"expected a section, got {_shown(leaf.value)}")
    try:
        if isinstance(leaf.value, dict):
            raise ValueError
        return at.parse(leaf.value)
    except ValueError as error:
        if str(error):
            raise _unfit(path, leaf.origin, f"{error}; expected {at.expects}") from None
        got = f"expected {at.expects}, got {_shown(leaf.value)}"
        raise _unfit(path, leaf.origin, got) from None


def _unknown(path: _KeyPath, depth: int, at: _Section, leaf: _Leaf) -> ConfigError:
    above, name = path[:depth], path[depth]
    is_value = depth == len(path) - 1 and leaf.value != {}
    here = {key: _dotted((*above, key)) for key in at.keys}
    anywhere = {key.rpartition(".")[2]: key for key in dotted_keys()} if is_value else {}
    what = "unknown key" if is_value else "unknown section"
    # The right key in the wrong section comes first: `lock` is nearer to warm.lock than to socket.
    for known, cutoff in ((anywhere, 1.0), (here, 0.6), (anywhere, 0.6)):
        for match in difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff):
            return _unfit(path[: depth + 1], leaf.origin, f"{what}; did you mean {known[match]}?")
    inner = [key for key, below in at.keys.items() if is_value or isinstance(below, _Section)]
    there = f"known here: {', '.join(sorted(inner))}" if inner else "there are none here"
    return _unfit(path[: depth + 1], leaf.origin, f"{what}; {there}")


def _unfit(path: _KeyPath, origin: str, what: str) -> ConfigError:
    return ConfigError(f"{origin}: {_dotted(path)}: {what}")


def _dotted(path: _KeyPath) -> str:
    return ".".join(part if _BARE_KEY.fullmatch(part) else json.dumps(part) for part in path)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value == {}:
        return "a section"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- settling: what depends on other values ------------------------------------------------------

_Parsed = Mapping[_KeyPath, tuple[Any, _Leaf]]


def _settle(parsed: _Parsed, place: str) -> Loaded:
    origins = {_dotted(path): leaf.origin for path, (_, leaf) in parsed.items()}
    if ("warm", "size") not in parsed:
        raise ConfigError(
            f"{place}warm.size: is not set, and without it there is nothing to serve from;"
            ' write size = "64GiB" under [warm], or pass --warm-size 64GiB'
        )
    size_bytes = parsed[("warm", "size")][0]
    shares = _shares(parsed)
    quotas = _quotas(shares, size_bytes, place)
    extent_bytes = _settled_extent(parsed, size_bytes, quotas)
    tenants = {name: Tenant(uids=uids, quota_bytes=quotas[name]) for name, uids, _ in shares}
    origin_of = {name: origins.get(f"tenants.{name}.uids", "default") for name in tenants}
    _refuse_double_claims(tenants, origin_of)

    warm = {path[1]: value for path, (value, _) in parsed.items() if path[:-1] == ("warm",)}
    top = {path[0]: value for path, (value, _) in parsed.items() if path[0] not in _SECTIONS}
    warm.pop("size")
    warm.pop("extent", None)
    config = Config(
        **top,
        warm=Warm(size_bytes=size_bytes, extent_bytes=extent_bytes, **warm),
        tenants=tenants,
    )
    named = {name: f"tenants.{name}." for name in tenants}
    every = [key for key in dotted_keys() if "NAME" not in key]
    every += [prefix + key for prefix in named.values() for key in ("uids", "quota")]
    return Loaded(config, {key: origins.get(key, "default") for key in every})


_SECTIONS = frozenset(key for key, below in _SCHEMA.keys.items() if isinstance(below, _Section))
_TenantShare = tuple[str, tuple[int | str, ...], str | int]


def _shares(parsed: _Parsed) -> list[_TenantShare]:
    """Return each tenant's name, users and share; without any there is `default`, for everyone."""
    names = dict.fromkeys(path[1] for path in parsed if path[0] == "tenants" and len(path) > 1)
    if not names:
        return [("default", (EVERYONE,), "100%")]
    shares = []
    for name in names:
        if ("tenants", name, "uids") not in parsed:
            origin = next(leaf.origin for path, (_, leaf) in parsed.items() if name in path[1:2])
            got = f'is not set; expected {_Uids.expects}, such as ["*"]'
            raise _unfit(("tenants", name, "uids"), origin, got)
        quota, _ = parsed.get(("tenants", name, "quota"), ("100%", None))
        shares.append((name, parsed[("tenants", name, "uids")][0], quota))
    return shares


def _quotas(shares: list[_TenantShare], size_bytes: int, place: str) -> dict[str, int]:
    """Return each tenant's part of the arena in whole pages. They divide it: nothing is lent."""
    exact = {name: parse_share(quota, size_bytes) for name, _, quota in shares}
    total = sum(exact.values())
    if total > size_bytes:
        parts = ", ".join(f"{name} {_of(amount, size_bytes)}" for name, amount in exact.items())
        raise ConfigError(
            f"{place}tenants: the quotas give out {_of(total, size_bytes)} of warm.size"
            f" {format_bytes(size_bytes)} ({parts}); they divide it, so at most 100% in sum"
        )
    quotas = {name: _pages(amount) for name, amount in exact.items()}
    for name, amount in quotas.items():
        if amount == 0:
            raise ConfigError(f"{place}tenants.{name}.quota: is less than a page, {PAGE_BYTES} B")
    return quotas


def _of(amount: int, whole: int) -> str:
    return f"{amount * 100 / whole:.6g}%"


def _settled_extent(parsed: _Parsed, size_bytes: int, quotas: Mapping[str, int]) -> int:
    """Return the extent: one belongs to one tenant, so it is never more than the smallest quota."""
    page = HUGE_PAGE_BYTES if parsed.get(("warm", "huge_pages"), (False,))[0] else PAGE_BYTES
    name, least = min(quotas.items(), key=lambda item: item[1])
    if least < page:
        raise ConfigError(f"tenants.{name}.quota: {format_bytes(least)} is less than a huge page")
    if ("warm", "extent") not in parsed:
        return _pages(max(page, min(default_extent(size_bytes), least)), page)
    extent_bytes, leaf = parsed[("warm", "extent")]
    path = ("warm", "extent")
    if extent_bytes > size_bytes:
        what = f"{format_bytes(extent_bytes)} is more than warm.size {format_bytes(size_bytes)}"
        raise _unfit(path, leaf.origin, what)
    if extent_bytes > least:
        what = (
            f"{format_bytes(extent_bytes)} is more than tenants.{name}.quota,"
            f" {format_bytes(least)}; an extent belongs to one tenant, so make it smaller"
        )
        raise _unfit(path, leaf.origin, what)
    if extent_bytes < page:
        what = f"{format_bytes(extent_bytes)} is less than a huge page"
        raise _unfit(path, leaf.origin, what)
    return _pages(extent_bytes, page)


def _refuse_double_claims(tenants: Mapping[str, Tenant], origins: Mapping[str, str]) -> None:
    claimed: dict[int | str, str] = {}
    for name, tenant in tenants.items():
        for uid in tenant.uids:
            other = claimed.setdefault(uid, name)
            if other != name:
                who = 'everyone ("*")' if uid == EVERYONE else f"uid {uid}"
                what = f"{who} is of tenant {other} already; a user has one tenant"
                raise _unfit(("tenants", name, "uids"), origins[name], what)
