"""Calibration profiles as files: found, read once, checked, and what a configuration makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtier.codec import profile as files
from kvtier.codec.losses import CALIBRATED, Losses
from kvtier.codec.profile import Profile
from kvtier.errors import ConfigError, ProfileError
from kvtier_daemon.config import Config

ENDING = ".kvtp"
LIMIT_PROFILES = 256


def folder(config: Config) -> Path:
    """Where profiles are looked for unless the configuration says."""
    return config.state / "profiles"


def losses_of(config: Config) -> Losses:
    """What this configuration's lossy codecs make of spaces. Raises ConfigError where a profile can't be
    read, and where one is needed that nobody has: a lossy codec is never left out in silence."""
    if config.cold is None:
        return Losses()
    if not any(codec in CALIBRATED for _, codec in config.cold.codecs):
        return Losses(config.cold.codecs)
    said = config.cold.profiles
    read = [(path, _read(path)) for path in _paths(said or (folder(config),), bool(said))]
    try:
        losses = Losses(config.cold.codecs, [one for _, one in read])
    except ProfileError as error:
        where = ", ".join(str(path) for path, _ in read)
        raise ConfigError(f"cold.profiles: {error} (of {where})") from error
    for pattern, codec in losses.wanting():
        there = ", ".join(sorted(one.model for _, one in read)) or "none"
        raise ConfigError(
            f'cold.codecs: "{pattern}={codec}" needs a calibration profile of such a model, and there are'
            f" those of: {there}; make one with `kvtier calibrate --model PATH --text FILE --out"
            f" {(said or (folder(config),))[0]}/NAME{ENDING}`, or ask for another codec"
        )
    return losses


def _paths(places: Sequence[Path], said: bool) -> Iterator[Path]:
    """The files of these places; the default folder need not be there."""
    for place in places:
        if place.is_dir():
            found = sorted(place.glob(f"*{ENDING}"))
            if len(found) > LIMIT_PROFILES:
                raise ConfigError(
                    f"cold.profiles: {place} has {len(found)} profiles, and {LIMIT_PROFILES} are possible"
                )
            yield from found
        elif said:
            yield place


def _read(path: Path) -> Profile:
    try:
        with path.open("rb") as file:
            text = file.read(files.LIMIT_FILE_BYTES + 1)
        return files.decode(text)
    except OSError as error:
        raise ConfigError(f"cold.profiles: {path}: {error.strerror}") from error
    except ProfileError as error:
        raise ConfigError(
            f"cold.profiles: {path}: {error}; make it again with `kvtier calibrate`, or remove it"
        ) from error
