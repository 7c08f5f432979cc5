"""Files of calibration profiles: finds, reads and checks them, and creates the configured losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtier.errors import ConfigError, ProfileError
from kvtier_daemon.codec import profile as files
from kvtier_daemon.codec.losses import CALIBRATED, Losses
from kvtier_daemon.codec.profile import Profile
from kvtier_daemon.config.schema import Config

ENDING = ".kvtp"
LIMIT_PROFILES = 256


def folder(config: Config) -> Path:
    """Return the directory of profiles if the configuration does not name one."""
    return config.state / "profiles"


def losses_of(config: Config) -> Losses:
    """Return the losses of the configured lossy codecs. Raises ConfigError if a profile is unreadable, or if
    a needed one is missing: a lossy codec is never ignored silently."""
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
        raise ConfigError(f"cold.profiles: {error} (in {where})") from error
    for pattern, codec in losses.without_profile():
        there = ", ".join(sorted(one.model for _, one in read)) or "none"
        raise ConfigError(
            f'cold.codecs: "{pattern}={codec}" needs a calibration profile of such a model, '
            f"profiles exist for: {there}; make one with `kvtier calibrate --model PATH --text "
            f"FILE --out {(said or (folder(config),))[0]}/NAME{ENDING}`, or use another codec"
        )
    return losses


def _paths(places: Sequence[Path], said: bool) -> Iterator[Path]:
    """Return the files in these places. The default directory need not exist."""
    for place in places:
        if place.is_dir():
            found = sorted(place.glob(f"*{ENDING}"))
            if len(found) > LIMIT_PROFILES:
                raise ConfigError(
                    f"cold.profiles: {place} has {len(found)} profiles, at most "
                    f"{LIMIT_PROFILES} are possible"
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
