"""Calibration profiles that a start finds, and errors for missing ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvtier.errors import ConfigError
from kvtier_daemon.codec import profile as files
from kvtier_daemon.codec.losses import NO_PROFILE, Loss, Losses
from kvtier_daemon.config import preflight
from kvtier_daemon.config.profiles import losses_of
from kvtier_daemon.config.schema import load
from support.losses_by_twins import profile_of
from support.specs import spec_of

SPEC = spec_of("model")


@pytest.fixture
def losses(tmp_path: Path) -> Callable[..., Losses]:
    def read(codecs: list[str], places: list[Path] | None = None) -> Losses:
        said = "" if places is None else f"profiles = {[str(place) for place in places]}\n"
        file = tmp_path / "kvtier.toml"
        file.write_text(
            f'state = "{tmp_path / "state"}"\n[warm]\nsize = "1GiB"\n'
            f'[cold]\ndirectories = ["/d"]\nsize = "1TiB"\ncodecs = {codecs}\n{said}'
        )
        loaded = load(file, environ={}, uid=0)
        assert preflight.calibration(loaded.config).ok == _is_good(loaded.config)
        return losses_of(loaded.config)

    return read


def _is_good(config: object) -> bool:
    try:
        losses_of(config)  # type: ignore[arg-type]
    except ConfigError:
        return False
    return True


def put(folder: Path, name: str = "one.kvtp", model: str = "model", tokens: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    profile = msgspec.structs.replace(profile_of(SPEC), model=model, tokens=tokens)
    (folder / name).write_bytes(files.encode(profile))
    return folder / name


def test_a_profile_is_found_in_the_state_directory_and_in_configured_places(
    losses: Callable[..., Losses], tmp_path: Path
) -> None:
    put(tmp_path / "state" / "profiles")
    assert isinstance(losses(["model=ecsq-mid"]).find(SPEC), Loss)
    elsewhere = put(tmp_path / "other", "x.kvtp", "another")
    other = losses(["*=ecsq-mid"], [elsewhere])
    assert isinstance(other.find(spec_of("another")), Loss)
    assert other.find(SPEC) == NO_PROFILE, "where one says is instead"
    both = losses(["*=ecsq-mid"], [tmp_path / "state" / "profiles", tmp_path / "other"])
    assert all(isinstance(both.find(one), Loss) for one in (SPEC, spec_of("another")))


def test_a_model_without_a_profile_stops_a_start_with_the_line_to_add(
    losses: Callable[..., Losses], tmp_path: Path
) -> None:
    folder = tmp_path / "state" / "profiles"
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            losses(["m*=raw", "other=cachegen-lo"])
        text = str(caught.value)
        assert '"other=cachegen-lo" needs a calibration profile' in text
        assert f"kvtier calibrate --model PATH --text FILE --out {folder}/NAME.kvtp" in text
        put(folder)
    assert "profiles exist for: model" in text


def test_a_damaged_profile_stops_a_start_that_needs_one(
    losses: Callable[..., Losses], tmp_path: Path
) -> None:
    path = put(tmp_path / "state" / "profiles")
    whole = path.read_bytes()
    for text in (b"", whole[:-1], whole[:80] + bytes([whole[80] ^ 1]) + whole[81:], b"x" * 100):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match=r"one\.kvtp.*kvtier calibrate"):
            losses(["model=ecsq-mid"])
        assert isinstance(losses(["model=q8"]).find(SPEC), Loss), "nobody needs it"
    with pytest.raises(ConfigError, match=r"nowhere\.kvtp: No such file"):
        losses(["model=ecsq-mid"], [tmp_path / "nowhere.kvtp"])


def test_two_profiles_of_one_model_are_refused(
    losses: Callable[..., Losses], tmp_path: Path
) -> None:
    put(tmp_path / "state" / "profiles")
    put(tmp_path / "state" / "profiles", "two.kvtp", tokens=2)
    with pytest.raises(
        ConfigError, match=r"two profiles exist for model: remove one \(in .*two\.kvtp\)"
    ):
        losses(["model=ecsq-mid"])
