"""The identity of weights and adapters: by their content, without reading all of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

from kvtier_plugins import Unsupported

ADAPTER_CONFIG = "adapter_config.json"
COMMIT = re.compile(r"[0-9a-f]{40}")
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLES = 32  # of a file, at least
LIMIT_SAMPLES = 4096  # of a folder, but for those
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
        _add_file(digest, path, max(SAMPLES, LIMIT_SAMPLES // len(files)))
    config = folder / ADAPTER_CONFIG
    if config.is_file():
        digest.update(config.read_bytes())
    return f"files:{digest.hexdigest()[:32]}"


def _add_file(digest: hashlib._Hash, path: Path, samples: int) -> None:
    """Add a file: its name, size and header, bytes at even distances, and the bytes around the limits of up
    to this number of tensors. Training may change few tensors, but it changes all elements of each."""
    size = path.stat().st_size
    digest.update(f"{path.name}\0{size}\0".encode())
    with path.open("rb", buffering=0) as file:
        start, limits, count = 0, list[int](), SAMPLES
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            header = file.read(min(length, LIMIT_HEADER_BYTES))
            digest.update(header)
            start = min(8 + length, size)
            limits = [start + at for at in _tensor_limits(header)]
        else:
            count = samples  # of unknown places
        step = max(SAMPLE_BYTES, (size - start) // count)
        places = {*range(start, size, step), max(start, size - SAMPLE_BYTES)}
        places.update(
            max(start, at + side)
            for at in limits[:: -(-len(limits) // samples) or 1]
            for side in (-SAMPLE_BYTES, 0)
        )
        for offset in sorted(places):
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, offset))


def _tensor_limits(header: bytes) -> list[int]:
    """Where the tensors of a safetensors file begin and end, counted from its header's end."""
    try:
        tensors = json.loads(header)
        spans = (one["data_offsets"] for name, one in tensors.items() if name != "__metadata__")
        return sorted({int(at) for span in spans for at in span})
    except (ValueError, TypeError, KeyError, AttributeError):
        return []  # not a file that an engine can load


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
    return repo or Path(model).name or Path(model).resolve().name


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
