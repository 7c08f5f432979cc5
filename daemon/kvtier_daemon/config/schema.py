"""The schema of the configuration: reads all sources, checks them, and computes plain numbers.

defaults < file < conf.d/*.toml in its directory < environment (KVTIER_WARM__SIZE) < flags (--warm-size)

A later source replaces an earlier one key by key. The annotation of a struct's field contains its parser;
any other key is unknown.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from kvtier.errors import ConfigError
from kvtier.units import GIB, MIB, format_bytes, parse_share
from kvtier_daemon.config import sources, values
from kvtier_daemon.config.problems import Problems
from kvtier_daemon.config.sources import KeyPath, Leaf, Section, dotted, unfit
from kvtier_daemon.config.values import EVERYONE, PAGE_BYTES, whole_pages

HUGE_PAGE_BYTES: Final = 2 * MIB
LEAST_SEGMENTS: Final = 4
KEEP_S: Final = 60
SYSTEM_SOCKET: Final = Path("/run/kvtier/kvtier.sock")
SYSTEM_STATE: Final = Path("/var/lib/kvtier")
SYSTEM_FILE: Final = Path("/etc/kvtier/kvtier.toml")
SYSTEM_UNITS: Final = Path("/etc/systemd/system")


class WarmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The warm tier: memory of the host that clients map. Sizes are whole pages."""

    size_bytes: Annotated[int, values.SIZE] = msgspec.field(name="size")
    extent_bytes: Annotated[int, values.EXTENT] = msgspec.field(name="extent")
    policy: Annotated[str, values.POLICY] = "auto"
    lock: Annotated[bool, values.SWITCH] = False
    huge_pages: Annotated[bool, values.SWITCH] = False
    keep_s: Annotated[int, values.SECONDS] = 0
    compressed_bytes: Annotated[int, values.COMPRESSED] = msgspec.field(
        name="compressed", default=0
    )


class ColdConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The cold tier: files in directories, one directory per disk. `size` limits all files together."""

    directories: Annotated[tuple[Path, ...], values.PATHS]
    size_bytes: Annotated[int, values.SIZE] = msgspec.field(name="size")
    segment_bytes: Annotated[int, values.SIZE] = msgspec.field(name="segment")
    codec: Annotated[str, values.CODEC] = "auto"
    codecs: Annotated[tuple[tuple[str, str], ...], values.MODEL_CODECS] = ()
    profiles: Annotated[tuple[Path, ...], values.PATHS] = ()
    write: Annotated[str, values.WRITE] = "back"
    engine: Annotated[str, values.ENGINE] = "auto"
    admission: Annotated[str, values.ADMISSION] = "auto"
    daily_bytes: Annotated[int, values.BUDGET] = msgspec.field(name="daily_writes", default=0)
    scrub_bytes: Annotated[int, values.RATE] = msgspec.field(name="scrub", default=16 * MIB)
    stop_s: Annotated[int, values.SECONDS] = 60
    encryption: Annotated[str, values.ENCRYPTION] = "off"
    key_file: Annotated[Path | None, values.PATH] = None


class RemoteConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The remote tier that hosts share: an S3 bucket (`bucket`) or a Mooncake Store (`url`)."""

    bucket: Annotated[str, values.BUCKET] = ""
    url: Annotated[str, values.POOL] = ""
    protocol: Annotated[str, values.TRANSPORT] = "tcp"
    devices: Annotated[str, values.DEVICES] = ""
    metadata: Annotated[str, values.METADATA] = "P2PHANDSHAKE"
    host: Annotated[str, values.HOST] = ""
    segment_bytes: Annotated[int, values.SEGMENT] = msgspec.field(name="segment", default=0)
    prefix: Annotated[str, values.PREFIX] = ""
    endpoint: Annotated[str, values.ENDPOINT] = ""
    region: Annotated[str, values.REGION] = "us-east-1"
    credentials: Annotated[Path | None, values.PATH] = None
    write: Annotated[str, values.SHARE_WRITES] = "used"
    archive: Annotated[str, values.SHARE_WRITES] = "none"
    warm_up_percent: Annotated[int, values.PERCENT] = 0
    reshard: Annotated[bool, values.SWITCH] = False
    stop_s: Annotated[int, values.SECONDS] = 5
    codec: Annotated[str, values.SHARE_CODEC] = "r32"
    deadline_s: Annotated[int, values.SOME_SECONDS] = 5
    buffer_bytes: Annotated[int, values.BUFFER] = msgspec.field(name="buffer", default=128 * MIB)
    known_bytes: Annotated[int, values.SIZE] = msgspec.field(name="known", default=64 * MIB)
    encryption: Annotated[str, values.ENCRYPTION] = "off"
    key_file: Annotated[Path | None, values.PATH] = None


class HotConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Copies of blocks in the memory of GPUs: how much of each GPU's memory the tenants get from its holder.
    A tenant that is not listed gets none."""

    sizes: Annotated[tuple[tuple[str, int], ...], values.TENANT_SIZES] = ()


class HttpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The read-only HTTP server. It has no passwords: every client that can connect can read everything."""

    listen: Annotated[tuple[str, int], values.ADDRESS]
    allow_remote: Annotated[bool, values.SWITCH] = False
    hosts: Annotated[tuple[str, ...], values.HOSTS] = ()


class AuditConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the audit log goes in addition to the daemon's log."""

    path: Annotated[Path | None, values.PATH] = None


class TenantConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The users that share blocks, by role (see `members`), and their part of the arena. A list contains "*",
    numbers, and groups as "@NUMBER"."""

    uids: Annotated[tuple[int | str, ...], values.UIDS] = ()
    writers: Annotated[tuple[int | str, ...], values.UIDS] = ()
    readers: Annotated[tuple[int | str, ...], values.UIDS] = ()
    max_clients: Annotated[int | None, values.CLIENTS] = None
    weight: Annotated[int, values.WEIGHT] = 1
    direct_reads: Annotated[bool, values.SWITCH] = False
    direct_group: Annotated[int | None, values.GROUP] = None
    quota_bytes: Annotated[int, values.SHARE] = msgspec.field(name="quota")


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The complete configuration: no value depends on the machine or on another value."""

    socket: Annotated[Path, values.PATH]
    socket_mode: Annotated[int, values.MODE] = 0o660
    socket_group: Annotated[int | None, values.GROUP] = None
    state: Annotated[Path, values.PATH]
    log_level: Annotated[str, values.LEVEL] = "info"
    max_clients: Annotated[int, values.CLIENTS] = 256
    history_bytes: Annotated[int, values.SIZE] = msgspec.field(name="history", default=MIB)
    warm: WarmConfig
    cold: ColdConfig | None
    remote: RemoteConfig | None = None
    hot: HotConfig = HotConfig()
    http: HttpConfig | None = None
    audit: AuditConfig = AuditConfig()
    tenants: dict[str, TenantConfig]


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, and the source of the value of each dotted key."""

    config: Config
    origins: Mapping[str, str]
    file: Path | None = None
    flags: Mapping[str, object] = field(default_factory=dict)

    def again(self) -> "LoadedConfig":
        """Read the same sources again."""
        return load(self.file, self.flags)


def settled(config: Config) -> dict[str, object]:
    """Return every value by its dotted key, as plain data; amounts are bytes."""
    tree = msgspec.to_builtins(config, enc_hook=str)
    tree["socket_mode"] = f"{config.socket_mode:04o}"
    return {
        dotted(path): value
        for path, value in sources.flatten(tree)
        if path not in {("cold",), ("remote",), ("http",)}  # the section is absent
    }


# --- where things lie by default -----------------------------------------------------------------


def system_file() -> Path | None:
    """Return the file of the installed service if it exists: the default of commands."""
    return SYSTEM_FILE if SYSTEM_FILE.exists() else None


def default_socket(environ: Mapping[str, str], uid: int) -> Path:
    """Return the default socket of a daemon of this user."""
    if uid == 0:
        return SYSTEM_SOCKET
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if Path(runtime).is_absolute():
        return Path(runtime) / "kvtier" / "kvtier.sock"
    return Path(tempfile.gettempdir()) / f"kvtier-{uid}" / "kvtier.sock"


def default_state(environ: Mapping[str, str], uid: int) -> Path:
    """Return the default state directory of a daemon of this user."""
    if uid == 0:
        return SYSTEM_STATE
    state = environ.get("XDG_STATE_HOME", "")
    if Path(state).is_absolute():
        return Path(state) / "kvtier"
    home = environ.get("HOME", "")
    if Path(home).is_absolute():
        return Path(home) / ".local" / "state" / "kvtier"
    return Path(tempfile.gettempdir()) / f"kvtier-{uid}" / "state"


def default_keep_s(environ: Mapping[str, str]) -> int:
    """Return how long memory is kept by default: the installed service has a store for it."""
    return KEEP_S if environ.get("FDSTORE", "0") != "0" else 0


def default_extent(size_bytes: int) -> int:
    """Return the extent for a warm tier of `size_bytes`: at most 64 extents from 64 GiB on.

    A smaller tier has 16, so that it can be used while it grows, but none below 64 MiB: each costs two
    descriptors and a mapping in every client.
    """
    if size_bytes < 16 * GIB:
        return whole_pages(min(size_bytes, max(size_bytes // 16, 64 * MIB)))
    return whole_pages(max(GIB, size_bytes // 64))


# --- reading -------------------------------------------------------------------------------------

_SCHEMA = sources.section_of(Config)
_SECTIONS = frozenset(key for key, below in _SCHEMA.keys.items() if isinstance(below, Section))


def dotted_keys() -> Iterator[str]:
    return _SCHEMA.dotted_keys()


def load(
    file: Path | None,
    flags: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    uid: int | None = None,
) -> LoadedConfig:
    """Return the configuration of all sources; `flags` has dotted keys, None is unset.

    Never returns one with an unknown key or an invalid value. The ConfigError contains all problems in one
    line: each key, where it was written, and what was expected.
    """
    environ = os.environ if environ is None else environ
    uid = os.geteuid() if uid is None else uid
    leaves: sources.Leaves = {
        ("socket",): Leaf(str(default_socket(environ, uid)), "default"),
        ("state",): Leaf(str(default_state(environ, uid)), "default"),
        ("warm", "keep_s"): Leaf(default_keep_s(environ), "default"),
    }
    problems = Problems("errors in the configuration")
    files = [] if file is None else [file, *sorted((file.parent / "conf.d").glob("*.toml"))]
    for each in files:
        with problems.noted():
            leaves |= sources.of_file(each)
    leaves |= sources.of_environment(environ)
    leaves |= sources.of_flags(flags or {})
    parsed = {}
    for path, leaf in leaves.items():
        with problems.noted():
            parsed[path] = (sources.parse(_SCHEMA, path, leaf), leaf)
    # Values that depend on others are checked only if those are valid: an invalid size is not a missing one.
    problems.refuse()
    loaded = _settle(parsed, f"{file}: " if file is not None else "", problems)
    return replace(loaded, file=file, flags=dict(flags or {}))


# --- settling: what depends on other values ------------------------------------------------------

_Parsed = Mapping[KeyPath, tuple[Any, Leaf]]


def _settle(parsed: _Parsed, place: str, problems: Problems) -> LoadedConfig:
    origins = {dotted(path): leaf.origin for path, (_, leaf) in parsed.items()}
    if ("warm", "size") not in parsed:
        problems.note(
            f'{place}warm.size: is not set, but required; write size = "64GiB" under [warm], '
            "or pass --warm-size 64GiB"
        )
    shares = _shares(parsed, problems)
    problems.refuse()
    size_bytes = parsed[("warm", "size")][0]
    quotas = _quotas(shares, size_bytes, place)
    extent_bytes = _settled_extent(parsed, size_bytes, quotas)
    tenants = {name: TenantConfig(**said, quota_bytes=quotas[name]) for name, said, _ in shares}
    least = sum(tenant.max_clients or 1 for tenant in tenants.values())
    most = parsed[("max_clients",)][0] if ("max_clients",) in parsed else 256
    if any(tenant.max_clients for tenant in tenants.values()) and least > most:
        raise ConfigError(
            f"{place}max_clients: {most} is less than {least}, the sum of tenants.NAME.max_clients and "
            "one for each tenant without it"
        )
    cold = _settled_cold(parsed, min(quotas.values()) / size_bytes, place)
    remote = _settled_remote(parsed, place)
    http = _settled_http(parsed, place)

    hot = HotConfig(**_given(parsed, HotConfig, "hot"))
    for name, _ in hot.sizes:
        if name not in tenants:
            what = f"{name!r} is not a tenant; the tenants are {', '.join(tenants)}"
            raise unfit(("hot", "sizes"), parsed[("hot", "sizes")][1].place, what)
    warm = _given(parsed, WarmConfig, "warm") | {"extent_bytes": extent_bytes}
    if warm.get("compressed_bytes") and cold is None:
        what = "needs [cold]: blocks that leave compressed memory must be on a disk"
        raise unfit(("warm", "compressed"), parsed["warm", "compressed"][1].place, what)
    config = Config(
        **{name: one for name, one in _given(parsed, Config).items() if name not in _SECTIONS},
        warm=WarmConfig(**warm),
        cold=cold,
        remote=remote,
        hot=hot,
        http=http,
        audit=AuditConfig(**_given(parsed, AuditConfig, "audit")),
        tenants=tenants,
    )
    named = {name: f"tenants.{name}." for name in tenants}
    every = [key for key in dotted_keys() if "NAME" not in key]
    for section, there in (("cold.", cold), ("remote.", remote), ("http.", http)):
        if there is None:
            every = [key for key in every if not key.startswith(section)]
    every += [
        prefix + key for prefix in named.values() for key in (*USERS, *BUDGETS, *PERMITS, "quota")
    ]
    return LoadedConfig(config, {key: origins.get(key, "default") for key in every})


def _given(parsed: _Parsed, struct: type[msgspec.Struct], *section: str) -> dict[str, Any]:
    """Return the values of this section that were given, by the names of the struct's fields."""
    names = {field.encode_name: field.name for field in sources.fields_of(struct)}
    return {names[path[-1]]: value for path, (value, _) in parsed.items() if path[:-1] == section}


USERS: Final = ("uids", "writers", "readers")  # the keys of a tenant that list users
BUDGETS: Final = ("max_clients", "weight")
PERMITS: Final = ("direct_reads", "direct_group")
_TenantShare = tuple[str, dict[str, Any], str | int]


def _shares(parsed: _Parsed, problems: Problems) -> list[_TenantShare]:
    """Return each tenant's name, other values and share; without tenants, `default` for every user."""
    names = dict.fromkeys(path[1] for path in parsed if path[0] == "tenants" and len(path) > 1)
    if not names:
        return [("default", {"uids": (EVERYONE,)}, "100%")]
    shares = []
    claimed: dict[int | str, tuple[str, str]] = {}
    for name in names:
        users = {key: parsed[path] for key in USERS if (path := ("tenants", name, key)) in parsed}
        if not users:
            place_of = next(leaf.place for path, (_, leaf) in parsed.items() if name in path[1:2])
            got = f'is not set; expected {values.UIDS.expects}, such as ["*"]'
            problems.note(unfit(("tenants", name, "uids"), place_of, got))
            continue
        for key, (listed, leaf) in users.items():
            for user in listed:
                other, list_ = claimed.setdefault(user, (name, key))
                if (other, list_) == (name, key):
                    continue
                who = 'everyone ("*")' if user == EVERYONE else f"uid {user}"
                if isinstance(user, str) and user != EVERYONE:
                    who = f"group {user}"
                what = f"{who} already belongs to tenant {other}; a user has one tenant"
                if other == name:
                    what = f"{who} is already in {dotted(('tenants', name, list_))}; a user has one role"
                problems.note(unfit(("tenants", name, key), leaf.place, what))
        quota, _ = parsed.get(("tenants", name, "quota"), ("100%", None))
        keys = (*USERS, *BUDGETS, *PERMITS)
        said = {key: parsed[path][0] for key in keys if (path := ("tenants", name, key)) in parsed}
        shares.append((name, said, quota))
    return shares


def _quotas(shares: list[_TenantShare], size_bytes: int, place: str) -> dict[str, int]:
    """Return each tenant's part of the arena in whole pages. The parts divide it: nothing is shared."""
    exact = {name: parse_share(quota, size_bytes) for name, _, quota in shares}
    total = sum(exact.values())
    if total > size_bytes:
        parts = ", ".join(f"{name} {_of(amount, size_bytes)}" for name, amount in exact.items())
        raise ConfigError(
            f"{place}tenants: the quotas sum to {_of(total, size_bytes)} of warm.size "
            f"{format_bytes(size_bytes)} ({parts}); they divide it, so at most 100% in sum"
        )
    quotas = {name: whole_pages(amount) for name, amount in exact.items()}
    for name, amount in quotas.items():
        if amount == 0:
            raise ConfigError(f"{place}tenants.{name}.quota: is less than a page, {PAGE_BYTES} B")
    return quotas


def _of(amount: int, whole: int) -> str:
    return f"{amount * 100 / whole:.6g}%"


def _settled_cold(parsed: _Parsed, least_share: float, place: str) -> ColdConfig | None:
    """Return the cold tier, or None. Every tenant has its own segments in each directory."""
    given = _given(parsed, ColdConfig, "cold")
    if not given:
        return None
    for key, example in (("directories", '["/var/lib/kvtier/cold"]'), ("size", '"2TiB"')):
        if ("cold", key) not in parsed:
            raise ConfigError(
                f"{place}cold.{key}: is not set; write {key} = {example} under [cold]"
            )
    size = given["size_bytes"]
    smallest = int(size / len(given["directories"]) * least_share)
    usual = max(MIB, whole_pages(min(GIB, size // 64, smallest // 8)))
    segment = given.setdefault("segment_bytes", usual)
    if segment > size // 64 and ("cold", "segment") in parsed:
        what = (
            f"{format_bytes(segment)} is more than 1/64 of cold.size {format_bytes(size)}; use a "
            "smaller segment, or a larger cold.size"
        )
        raise unfit(("cold", "segment"), parsed["cold", "segment"][1].place, what)
    if smallest < LEAST_SEGMENTS * segment:
        what = (
            f"{format_bytes(size)} is too little: the smallest tenant would have "
            f"{format_bytes(smallest)} in a directory, but needs {LEAST_SEGMENTS} segments of "
            f"{format_bytes(segment)}"
        )
        raise unfit(("cold", "size"), parsed["cold", "size"][1].place, what)
    return ColdConfig(**given)


_BUCKET: Final = frozenset({"bucket", "endpoint", "region", "credentials", "reshard"})
_POOL: Final = frozenset({"protocol", "devices", "metadata", "host", "segment"})


def _settled_remote(parsed: _Parsed, place: str) -> RemoteConfig | None:
    """Return the remote tier, or None."""
    given = _given(parsed, RemoteConfig, "remote")
    if not given:
        return None
    if "bucket" not in given and "url" not in given:
        raise ConfigError(
            f'{place}remote.bucket: is not set; write bucket = "kvtier-blocks" under [remote], or '
            'url = "mooncake://HOST:50051"'
        )
    other, why = (_BUCKET, "remote.url") if "url" in given else (_POOL, "remote.bucket")
    for key in other:
        if ("remote", key) in parsed:
            what = f"cannot be used with {why}; remove one of them"
            raise unfit(("remote", key), parsed["remote", key][1].place, what)
    return RemoteConfig(**given)


def _settled_http(parsed: _Parsed, place: str) -> HttpConfig | None:
    """Return the HTTP server, or None. It listens beyond this machine only if that is configured."""
    given = _given(parsed, HttpConfig, "http")
    if not given:
        return None
    if "listen" not in given:
        example = 'write listen = "127.0.0.1:9410" under [http]'
        raise ConfigError(f"{place}http.listen: is not set; {example}")
    http = HttpConfig(**given)
    if not ip_address(http.listen[0]).is_loopback and not http.allow_remote:
        what = (
            f"{http.listen[0]} can be reached from other machines, and any client that reaches "
            f"it can read the figures of all tenants; write 127.0.0.1:{http.listen[1]}, or add "
            "allow_remote = true if that is intended"
        )
        raise unfit(("http", "listen"), parsed["http", "listen"][1].place, what)
    return http


def _settled_extent(parsed: _Parsed, size_bytes: int, quotas: Mapping[str, int]) -> int:
    """Return the size of an extent. An extent belongs to one tenant, so it is at most the smallest quota."""
    page = HUGE_PAGE_BYTES if parsed.get(("warm", "huge_pages"), (False,))[0] else PAGE_BYTES
    name, least = min(quotas.items(), key=lambda item: item[1])
    if least < page:
        raise ConfigError(f"tenants.{name}.quota: {format_bytes(least)} is less than a huge page")
    if ("warm", "extent") not in parsed:
        return whole_pages(max(page, min(default_extent(size_bytes), least)), page)
    extent_bytes, leaf = parsed[("warm", "extent")]
    path = ("warm", "extent")
    if extent_bytes > size_bytes:
        what = f"{format_bytes(extent_bytes)} is more than warm.size {format_bytes(size_bytes)}"
        raise unfit(path, leaf.place, what)
    if extent_bytes > least:
        what = (
            f"{format_bytes(extent_bytes)} is more than tenants.{name}.quota,"
            f" {format_bytes(least)}; an extent belongs to one tenant, so make it smaller"
        )
        raise unfit(path, leaf.place, what)
    if extent_bytes < page:
        what = f"{format_bytes(extent_bytes)} is less than a huge page"
        raise unfit(path, leaf.place, what)
    return whole_pages(extent_bytes, page)
