"""The parts of a configuration that a reload may change."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier_daemon.config.reload import changes, left_tenants, merged
from kvtier_daemon.config.schema import Config, load


def config(folder: Path, codecs: list[str]) -> Config:
    file = folder / "kvtier.toml"
    asked = ", ".join(f'"{one}"' for one in codecs)
    file.write_text(
        f'state = "{folder}"\n[warm]\nsize = "64MiB"\n'
        f'[cold]\ndirectories = ["{folder}"]\nsize = "1GiB"\ncodecs = [{asked}]\n'
    )
    return load(file, environ={}).config


def tenants(folder: Path, a: str, b: str) -> Config:
    file = folder / "kvtier.toml"
    file.write_text(
        f'state = "{folder}"\n[warm]\nsize = "64MiB"\n'
        f'[tenants.a]\n{a}\nquota = "50%"\n[tenants.b]\n{b}\nquota = "50%"\n'
    )
    return load(file, environ={}).config


ONE, TWO, EVERYONE = "uids = [1]", "uids = [2]", 'uids = ["*"]'


@pytest.mark.parametrize(
    ("before", "after", "left"),
    [
        ((ONE, TWO), ("uids = [1, 3]", TWO), ""),
        ((ONE, TWO), (ONE, 'uids = [2, "*"]'), ""),
        (("uids = [1, 3]", TWO), (ONE, "uids = [2, 3]"), "a"),
        (("uids = [1, 3]", TWO), (ONE, TWO), "a"),
        ((ONE, EVERYONE), ("uids = [1, 3]", EVERYONE), "b"),
        ((ONE, EVERYONE), (ONE, TWO), "b"),
        (('uids = [1, "*"]', TWO), (ONE, 'uids = [2, "*"]'), "a"),
        ((ONE + "\nwriters = [3]", TWO), (ONE + "\nreaders = [3]", TWO), "a"),
        ((ONE + "\nreaders = [3]", TWO), (ONE + "\nwriters = [3]", TWO), ""),
        (("uids = [1, 3]", TWO), (ONE + "\nwriters = [3]", TWO), ""),
        ((ONE + '\nwriters = ["@5"]', TWO), (ONE, TWO + '\nreaders = ["@5"]'), "a"),
    ],
)
def test_a_reload_knows_which_tenants_a_user_has_left_or_may_not_write_to_any_longer(
    tmp_path: Path, before: tuple[str, str], after: tuple[str, str], left: str
) -> None:
    running, wanted = tenants(tmp_path, *before), tenants(tmp_path, *after)
    found = changes(running, wanted)
    assert found and all(change.live for change in found)
    assert merged(running, wanted).tenants == wanted.tenants
    assert left_tenants(running, wanted) == set(left)


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


def test_a_reload_changes_limits_of_the_remote_tier_and_not_its_place(tmp_path: Path) -> None:
    def remote(text: str) -> Config:
        file = tmp_path / "kvtier.toml"
        file.write_text(f'state = "{tmp_path}"\n[warm]\nsize = "64MiB"\n[remote]\n{text}\n')
        return load(file, environ={}).config

    running = remote('bucket = "blocks"')
    wanted = remote(
        'bucket = "other"\nprefix = "p"\ndeadline_s = 9\nbuffer = "8MiB"\nstop_s = 1\nwrite = "all"\n'
        'codec = "raw"\narchive = "all"\nwarm_up_percent = 9\nkey_file = "/k"\ncredentials = "/c"'
    )
    found = {one.key: one.live for one in changes(running, wanted)}
    assert sorted(key for key, live in found.items() if not live) == [
        "remote.bucket", "remote.prefix",
    ]  # fmt: skip
    applied = merged(running, wanted)
    assert [one.key for one in changes(applied, wanted)] == ["remote.bucket", "remote.prefix"]
    assert changes(running, applied) != []
