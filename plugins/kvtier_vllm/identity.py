"""Which weights, and which adapters: named by content, and never by reading all of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier_vllm.options import Unsupported

COMMIT = re.compile(r"[0-9a-f]{40}")
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLES = 32
SAMPLE_BYTES = 4096
LIMIT_HEADER_BYTES = 64 << 20
CHANGED = b""  # what no adapter is named
VOLATILE = ("_name_or_path", "transformers_version")


def folder_digest(folder: Path) -> str:
    """A digest of the weight files in a folder: their names, sizes, headers and some of their bytes."""
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    if not files:
        raise Unsupported(f"{folder} has no weight files: name the weights by the option 'weights'")
    digest = hashlib.sha256()
    for path in files:
        _add_file(digest, path)
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


def weights_identity(model_config: Any, load_format: str) -> str:
    """Names the weights that this engine loads: a commit of a hub, or a digest of the files."""
    if load_format == "dummy":
        return f"dummy:{model_config.seed}"
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder_digest(folder)
    revision = getattr(model_config, "revision", None) or "main"
    if COMMIT.fullmatch(revision):
        return f"rev:{revision}"
    return _cached_commit(model_config.model, revision)


def _cached_commit(repo: str, revision: str) -> str:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError as error:
        text = f"the commit of {repo} is not known: name the weights by the option 'weights'"
        raise Unsupported(text) from error
    found = try_to_load_from_cache(repo, "config.json", revision=revision)
    commit = Path(found).parent.name if isinstance(found, str) else ""
    if not COMMIT.fullmatch(commit):
        text = f"the commit of {repo} is not known: give --revision, or the option 'weights'"
        raise Unsupported(text)
    return f"rev:{commit}"


def config_digest(model_config: Any, vllm_config: Any) -> str:
    """A digest of what else decides on the values in a cache: the model's configuration, RoPE and scaling
    included, quantization, and the type it computes in."""
    config = {
        name: value
        for name, value in model_config.hf_config.to_dict().items()
        if name not in VOLATILE
    }
    more = [str(model_config.dtype), str(model_config.quantization)]
    text = json.dumps([config, more], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Adapters:
    """Digests of LoRA adapters by content; looked up again when the file has changed.

    An engine reads an adapter's files when it pleases, and its own hashes know it by name and path. So it is
    named by what these were at first: where they change, nobody can say what the engine computes, or has, and
    least of all when they are what they were again.
    """

    def __init__(self, digest: Callable[[Path], str] = folder_digest) -> None:
        self._digest = digest
        self._known: dict[tuple[str, tuple[tuple[str, int, int], ...]], bytes] = {}
        self._first: dict[Path, bytes] = {}

    def extras(self, request: Any) -> bytes | None:
        """What goes into the keys of this request; None where its adapter can't be named."""
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return b""
        folder = Path(lora.lora_path)
        try:
            # For every request, on the scheduler's thread: by Paths it takes nearly twice as long.
            with os.scandir(folder) as entries:
                stats = [(entry.name, entry.stat()) for entry in entries]
            seen = tuple(sorted((name, s.st_mtime_ns, s.st_size) for name, s in stats))
            known = self._known.get((str(folder), seen))
            if known is None:
                known = self._known[str(folder), seen] = b"lora:" + self._digest(folder).encode()
        except (OSError, Unsupported):
            return None
        if self._first.setdefault(folder, known) != known:
            self._first[folder] = CHANGED
            return None
        return known
