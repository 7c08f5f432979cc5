"""The parts of a configuration that a reload may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier_daemon.config.reload import changes, merged
from kvtier_daemon.config.schema import Config, load


def config(folder: Path, codecs: list[str]) -> Config:
    file = folder / "kvtier.toml"
    asked = ", ".join(f'"{one}"' for one in codecs)
    file.write_text(
        f'state = "{folder}"\n[warm]\nsize = "64MiB"\n'
        f'[cold]\ndirectories = ["{folder}"]\nsize = "1GiB"\ncodecs = [{asked}]\n'
    )
    return load(file, environ={}).config


def tenants(folder: Path, a: list[int | str], b: list[int | str]) -> Config:
    file = folder / "kvtier.toml"
    file.write_text(
        f'state = "{folder}"\n[warm]\nsize = "64MiB"\n'
        f'[tenants.a]\nuids = {a}\nquota = "50%"\n[tenants.b]\nuids = {b}\nquota = "50%"\n'
    )
    return load(file, environ={}).config


@pytest.mark.parametrize(
    ("before", "after", "live"),
    [
        (([1], [2]), ([1, 3], [2]), True),
        (([1], [2]), ([1], [2, "*"]), True),
        (([1, 3], [2]), ([1], [2, 3]), False),
        (([1, 3], [2]), ([1], [2]), False),
        (([1], ["*"]), ([1, 3], ["*"]), False),
        (([1], ["*"]), ([1], [2]), False),
        (([1, "*"], [2]), ([1], [2, "*"]), False),
    ],
)
def test_a_reload_adds_users_but_does_not_move_them_between_tenants(
    tmp_path: Path,
    before: tuple[list[Any], list[Any]],
    after: tuple[list[Any], list[Any]],
    live: bool,
) -> None:
    running, wanted = tenants(tmp_path, *before), tenants(tmp_path, *after)
    found = changes(running, wanted)
    assert {change.key for change in found} <= {"tenants.a.uids", "tenants.b.uids"}
    assert {change.live for change in found} == {live}
    assert merged(running, wanted).tenants == (wanted if live else running).tenants


@pytest.mark.parametrize(
    ("before", "after", "live"),
    [
        (["llama*=fix4"], ["llama*=r32"], True),
        (["llama*=fix4"], ["llama*=q8"], False),
        (["llama*=q8"], ["llama*=fix4"], False),
        (["llama*=q8"], ["llama*=q8", "gemma*=r32"], False),
    ],
)
def test_a_reload_does_not_change_a_lossy_codec_while_spaces_are_open(
    tmp_path: Path, before: list[str], after: list[str], live: bool
) -> None:
    running, wanted = config(tmp_path, before), config(tmp_path, after)
    (change,) = changes(running, wanted)
    assert (change.key, change.live) == ("cold.codecs", live)
    cold = merged(running, wanted).cold
    now = wanted.cold if live else running.cold
    assert cold is not None and now is not None
    assert cold.codecs == now.codecs
