"""The kinds of values: one `Key` for each kind.

A parser accepts a value of TOML, of the environment or of a flag, so numbers and lists may be text. It
raises ValueError for an invalid value, with a message if `expects` is not specific enough.
"""

import grp
import pwd
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from kvtier.units import GIB, MIB, format_bytes, parse_bytes, parse_share
from kvtier_daemon.catalog.policy import NAMED
from kvtier_daemon.codec.choice import CHOICES
from kvtier_daemon.codec.losses import NAMES as LOSSY

PAGE_BYTES: Final = 4096
POLICIES: Final = tuple(NAMED)
CODECS: Final = CHOICES
MODELS_CODECS: Final = (*CHOICES, *LOSSY)
WRITES: Final = ("back", "through")
ADMISSIONS: Final = ("auto", "all", "second-touch")
ENCRYPTIONS: Final = ("off", "aes-256-gcm")
SHARED: Final = ("used", "all", "none")
ENGINES: Final = ("auto", "io_uring", "threads")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
EVERYONE: Final = "*"

_CLIENTS_MAX = 65_536
_WEIGHT_MAX = 1000
_PORT_MAX = 65_535
_ID_MAX = (1 << 32) - 2  # the last one is (uid_t)-1, which means "no change"
_SWITCH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True, slots=True)
class Key:
    """How one key is read: the parser, and a description of valid values."""

    parse: Callable[[Any], object]
    expects: str


def whole_pages(amount: int, page: int = PAGE_BYTES) -> int:
    """Return `amount`, rounded down to whole pages."""
    return amount - amount % page


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
        raise ValueError("unknown user") from None
    if not path.is_absolute():
        raise ValueError
    return path


def _mode(value: object) -> int:
    # An integer is refused: 660 and 0o660 look alike in a file and are different.
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


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _SWITCH:
        return _SWITCH[value.lower()]
    raise ValueError


def _id(value: object, what: str, number_of: Callable[[str], int]) -> int:
    """Return the number of a user or a group, which may be given by name."""
    if isinstance(value, str) and not value.isdecimal():
        try:
            return number_of(_text(value))
        except KeyError:
            raise ValueError(f"{what} {value!r} does not exist") from None
    return _number(value, 0, _ID_MAX)


def _group(value: object) -> int:
    return _id(value, "group", lambda name: grp.getgrnam(name).gr_gid)


def group_entry(number: int) -> str:
    """Return how a list of users names the members of a group."""
    return f"@{number}"


def _uid(value: object) -> int | str:
    if value == EVERYONE:
        return EVERYONE
    if isinstance(value, str) and value.startswith("@"):
        return group_entry(_group(value[1:]))
    return _id(value, "user", lambda name: pwd.getpwnam(name).pw_uid)


def _items(value: object, empty: bool = False) -> list[object]:
    """Return the items of a list, or of a text with commas; `empty`: allow nothing between two commas."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        return [part for part in parts if part or not empty]
    if not isinstance(value, list | tuple):
        raise ValueError
    return list(value)


def _some(items: list[object]) -> list[object]:
    if not items:
        raise ValueError
    return items


def _amount(value: object) -> str | int:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ValueError
    return value


def _bytes_from(low: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        amount = parse_bytes(_amount(value))
        # A number without its unit would be rounded down to 0, which has a meaning of its own.
        least = low or (PAGE_BYTES if amount else 0)
        if amount < least:
            raise ValueError(f"{format_bytes(amount)} is less than {format_bytes(least)}")
        return whole_pages(amount)

    return parse


def _rate(value: object) -> int:
    amount = parse_bytes(_amount(value))
    if 0 < amount < PAGE_BYTES:
        raise ValueError(f"{format_bytes(amount)} is less than a page")
    return amount


def _paths(value: object) -> tuple[Path, ...]:
    paths = tuple(_path(item) for item in _some(_items(value)))
    if len(set(paths)) < len(paths):
        raise ValueError("a directory is listed twice")
    return paths


def _address(value: object) -> tuple[str, int]:
    """Return an address and a port. Names are refused, because their addresses may change."""
    found = re.fullmatch(r"\[([0-9a-fA-F:.]+)\]:([0-9]{1,5})|([0-9.]+):([0-9]{1,5})", _text(value))
    if found is None:
        raise ValueError
    host, port = (part for part in found.groups() if part)
    return str(ip_address(host)), _number(port, 0, _PORT_MAX)


def address_text(host: str, port: int) -> str:
    """Return the text that `_address` parses as this address and port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _hosts(value: object) -> tuple[str, ...]:
    hosts = tuple(_text(item) for item in _items(value, empty=True))
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", host):
            raise ValueError(f"{host!r} is not a host name")
    return hosts


def _share(value: object) -> str | int:
    parse_share(_amount(value), GIB)  # resolved later, when the size is known
    return _amount(value)


SIZE: Final = Key(_bytes_from(MIB), "a size such as 64GiB, at least 1 MiB")
EXTENT: Final = Key(_bytes_from(PAGE_BYTES), "a size such as 1GiB")
SHARE: Final = Key(_share, 'a share such as "40%" or a size such as 16GiB')
UIDS: Final = Key(
    lambda value: tuple(map(_uid, _some(_items(value)))), 'a list of "*", numbers, user names and "@GROUP"'
)  # fmt: skip
PATH: Final = Key(_path, "an absolute path")


def _codec(value: object) -> str:
    if value in LOSSY:
        raise ValueError(
            f"{value} is lossy and must be configured by model: under [cold] write codecs = "
            f'["MODEL={value}"]'
        )
    return _one_of(CODECS)(value)


def _codecs(value: object) -> tuple[tuple[str, str], ...]:
    pairs = []
    for item in _items(value, empty=True):
        pattern, _, codec = _text(item).rpartition("=")
        if not pattern.strip() or codec.strip() not in MODELS_CODECS:
            raise ValueError(f"{item!r} is not MODEL=CODEC")
        pairs.append((pattern.strip(), codec.strip()))
    return tuple(pairs)


def _tenant_sizes(value: object) -> tuple[tuple[str, int], ...]:
    sizes: dict[str, int] = {}
    for item in _items(value, empty=True):
        name, _, size = _text(item).rpartition("=")
        if not name.strip() or not size.strip():
            raise ValueError(f"{item!r} is not TENANT=SIZE")
        if name.strip() in sizes:
            raise ValueError(f"{name.strip()} is listed twice")
        sizes[name.strip()] = _bytes_from(MIB)(size.strip())
    return tuple(sizes.items())


TENANT_SIZES: Final = Key(_tenant_sizes, 'a list such as ["default=8GiB"]')


def _matching(pattern: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not re.fullmatch(pattern, _text(value), re.ASCII):
            raise ValueError
        return str(value)

    return parse


BUCKET: Final = Key(
    _matching(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}"),
    "the name of a bucket, 2 to 255 letters, digits, '.', '_' and '-'",
)
PREFIX: Final = Key(
    _matching(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+){0,15}"), "a prefix such as fleet/a"
)
ENDPOINT: Final = Key(
    _matching(r"https?://[^/?#@\s]+"), "an address such as https://s3.example:9000, without a path"
)
POOL: Final = Key(
    _matching(r"mooncake://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}"),
    "the address of a master such as mooncake://store.example:50051",
)
TRANSPORT: Final = Key(_one_of(("tcp", "rdma")), "one of tcp, rdma")
DEVICES: Final = Key(_matching(r"[A-Za-z0-9_.:,-]+"), "names of RDMA devices such as mlx5_0,mlx5_1")
METADATA: Final = Key(
    _matching(r"P2PHANDSHAKE|[a-z]+://[^\s]+"),
    "P2PHANDSHAKE, or an address such as http://m:8080/metadata",
)
HOST: Final = Key(_matching(r"[A-Za-z0-9._:-]+"), "the name or the address of this host")
SEGMENT: Final = Key(_bytes_from(0), "a size such as 64GiB, or 0 to lend none")
REGION: Final = Key(_matching(r"[A-Za-z0-9-]+"), "a region such as us-east-1")
PERCENT: Final = Key(lambda value: _number(value, 0, 100), "a whole number of percent, 0 to 100")
SHARE_WRITES: Final = Key(_one_of(SHARED), f"one of {', '.join(SHARED)}")
SHARE_CODEC: Final = Key(
    _one_of(CODECS[1:]), f"a known codec other than auto: {', '.join(CODECS[1:])}"
)
SOME_SECONDS: Final = Key(lambda value: _number(value, 1, 3600), "whole seconds from 1 to 3600")
BUFFER: Final = Key(_bytes_from(8 * MIB), "a size such as 128MiB, at least 8 MiB")
PATHS: Final = Key(_paths, "a list of absolute paths, each once")
CODEC: Final = Key(_codec, f"a known codec: {', '.join(CODECS)}")
MODEL_CODECS: Final = Key(
    _codecs, f'a list such as ["org/model-*=r32"], with {", ".join(MODELS_CODECS)}'
)
WRITE: Final = Key(_one_of(WRITES), f"one of {', '.join(WRITES)}")
ENGINE: Final = Key(_one_of(ENGINES), f"one of {', '.join(ENGINES)}")
ADMISSION: Final = Key(_one_of(ADMISSIONS), f"one of {', '.join(ADMISSIONS)}")
ENCRYPTION: Final = Key(_one_of(ENCRYPTIONS), f"one of {', '.join(ENCRYPTIONS)}")
BUDGET: Final = Key(_bytes_from(0), "a size such as 5TiB, or 0 for no limit")
COMPRESSED: Final = Key(_bytes_from(0), "a size such as 64GiB, or 0 for none")
RATE: Final = Key(_rate, "bytes a second such as 16MiB, or 0 for none")
MODE: Final = Key(_mode, 'octal digits in quotes, such as "0660"')
GROUP: Final = Key(_group, "the name or the number of a group")
LEVEL: Final = Key(_one_of(LOG_LEVELS), f"one of {', '.join(LOG_LEVELS)}")
POLICY: Final = Key(_one_of(POLICIES), f"a known policy: {', '.join(POLICIES)}")
SWITCH: Final = Key(_switch, "true or false")
WEIGHT: Final = Key(
    lambda value: _number(value, 1, _WEIGHT_MAX), f"a number from 1 to {_WEIGHT_MAX}"
)
CLIENTS: Final = Key(_clients, f"a number from 1 to {_CLIENTS_MAX}")
SECONDS: Final = Key(lambda value: _number(value, 0, 86_400), "whole seconds from 0 to 86400")
ADDRESS: Final = Key(_address, "an address and a port such as 127.0.0.1:9410 or [::1]:9410")
HOSTS: Final = Key(_hosts, 'a list of names such as ["gpu7.example"]')
