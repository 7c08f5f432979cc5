"""`kvtier calibrate`: measures a model and writes its profile for the lossy codecs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier_daemon.cli.flags import Json, print_json, value
from kvtier_daemon.cli.progress import progress


def calibrate(
    model: Annotated[Path, value("PATH", "Directory of a Hugging Face causal model.")],
    text: Annotated[Path, value("FILE", "Text similar to the text that will be served, in UTF-8.")],
    out: Annotated[
        Path | None, value("FILE", "The profile to write; default: NAME.kvtp in this directory.")
    ] = None,
    tokens: Annotated[
        int, value("N", "Tokens to use, taken evenly from the text.", min=4096)
    ] = 65_536,
    device: Annotated[
        str, value("NAME", "cpu, cuda or cuda:1; auto: a GPU if there is one.")
    ] = "auto",
    weights: Annotated[
        str, value("NAME", "Name of the weights, as in spaces; default: all weights.")
    ] = "",
    json: Json = False,
) -> None:
    """Measure a model for the lossy codecs, and write its profile.

    Measures the distribution of K and V, the effect of errors in them, and the loss of each level.
    Needs torch and transformers: pip install 'torch>=2.6' 'transformers>=5' 'numpy>=2'.
    """
    from kvtier.errors import ConfigError
    from kvtier_daemon.codec import profile as files

    if not (model / "config.json").is_file():
        raise ConfigError(f"{model}: not a directory with a model's config.json")
    try:
        letters = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{text}: {error}") from error
    target = out or Path(f"{model.resolve().name}.kvtp")
    if not target.parent.is_dir():
        raise ConfigError(f"{target}: no such directory")
    _try(target)
    try:
        from kvtier_daemon.calibration.measuring import calibrate as measured
        from kvtier_daemon.calibration.model import Model
    except ImportError as error:
        raise ConfigError(
            "kvtier calibrate needs torch and transformers"
            f" ({error}): pip install 'torch>=2.6' 'transformers>=5' 'numpy>=2'"
        ) from error
    with progress() as bar:
        task = bar.add_task("model", total=None)

        def told(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        profile, outcomes = measured(
            Model(model, device), letters, name=model.resolve().name, weights=weights, tokens=tokens,
            progress=told,
        )  # fmt: skip
    body = files.encode(profile)
    _write(target, body)
    report: dict[str, Any] = {
        "path": str(target),
        "name": profile.name.hex(),
        "bytes": len(body),
        "model": profile.model,
        "layers": len(profile.layers),
        "tokens": profile.tokens,
        "levels": [
            {
                "codec": f"{one.codec}-{one.level}",
                "bits": one.bits,
                "divergence": one.divergence,
                "perplexity_change": one.perplexity_change,
            }
            for one in outcomes
        ],
    }
    if json:
        print_json(report)
    else:
        _show(report)


def _part(path: Path) -> Path:
    """Return the temporary file, which is renamed when it is complete."""
    import os

    return path.with_name(f".{path.name}.{os.getpid()}")


def _try(path: Path) -> None:
    """Fail now if the profile could not be written after an hour of measurements."""
    from kvtier.errors import ConfigError

    if path.is_dir():
        raise ConfigError(f"{path}: is a directory; --out must be a file")
    try:
        _part(path).touch()
        _part(path).unlink()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _write(path: Path, body: bytes) -> None:
    """Write the complete file or nothing."""
    import os

    from kvtier.errors import ConfigError

    part = _part(path)
    try:
        try:
            with part.open("wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _show(report: dict[str, Any]) -> None:
    typer.echo(
        f"{report['path']}: {report['bytes']:,} bytes, {report['layers']} layers,"
        f" measured on {report['tokens']:,} tokens"
    )
    typer.echo(f"{'codec':<16}{'bits/element':>12}{'divergence':>13}{'perplexity':>13}")
    for one in report["levels"]:
        typer.echo(
            f"{one['codec']:<16}{one['bits']:>12.2f}{one['divergence']:>13.2e}"
            f"{one['perplexity_change']:>+13.2%}"
        )
