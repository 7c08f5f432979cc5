"""The identity of weights and adapters: by their content, without reading all of it."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from kvtier_plugins import Unsupported

ADAPTER_CONFIG = "adapter_config.json"
COMMIT = re.compile(r"[0-9a-f]{40}")
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLES = 32
SAMPLE_BYTES = 4096
LIMIT_HEADER_BYTES = 64 << 20


def folder_digest(folder: Path) -> str:
    """A digest of the weight files in a folder: names, sizes, headers and samples of their bytes; and of an
    adapter's configuration, which scales its weights."""
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    if not files:
        raise Unsupported(
            f"{folder} has no weight files: set the option 'weights' to a name of the weights"
        )
    digest = hashlib.sha256()
    for path in files:
        _add_file(digest, path)
    config = folder / ADAPTER_CONFIG
    if config.is_file():
        digest.update(config.read_bytes())
    return f"files:{digest.hexdigest()[:32]}"


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}\0{size}\0".encode())
    with path.open("rb") as file:
        start = 0
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(length, LIMIT_HEADER_BYTES)))
            start = min(8 + length, size)
        step = max(SAMPLE_BYTES, (size - start) // SAMPLES)
        for offset in (*range(start, size, step), max(start, size - SAMPLE_BYTES)):
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))


def model_weights(model: str, revision: str | None, config: str = "config.json") -> str:
    """The name of the weights of a model or an adapter, a folder or a repository of a hub: a digest or a
    commit. `config` is a file of every such repository."""
    folder = Path(model)
    if folder.is_dir():
        _, commit = _snapshot(folder)
        return f"rev:{commit}" if commit else folder_digest(folder)
    revision = revision or "main"
    if COMMIT.fullmatch(revision):
        return f"rev:{revision}"
    found = cached_file(model, revision, config)
    commit = found.parent.name if found is not None else ""
    if not COMMIT.fullmatch(commit):
        text = f"the commit of {model} is unknown: set --revision, or the option 'weights'"
        raise Unsupported(text)
    return f"rev:{commit}"


def model_name(model: str) -> str:
    """The last part of the name of a model, a folder or a repository of a hub. An engine without access to
    the hub replaces the repository by a folder of its cache, whose name is a commit."""
    repo, _ = _snapshot(Path(model))
    return repo or Path(os.path.abspath(model)).name


def _snapshot(folder: Path) -> tuple[str, str]:
    """The repository's last part and the commit, if this is a folder of the hub's cache; otherwise ""."""
    parts = folder.parent.parent.name.split("--")
    if folder.parent.name == "snapshots" and parts[0] == "models" and COMMIT.fullmatch(folder.name):
        return parts[-1], folder.name
    return "", ""


def cached_file(repo: str, revision: str, name: str) -> Path | None:
    """The path of a file of a repository of a hub, if it is on this machine."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(repo, name, revision=revision)
    return Path(found) if isinstance(found, str) else None
