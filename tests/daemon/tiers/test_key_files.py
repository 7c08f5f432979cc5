"""Checks of key files and of the store's address, before a start and by `kvtier doctor`."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvtier_daemon.config.preflight import store_answers
from kvtier_daemon.config.schema import Config, load
from kvtier_daemon.tiers.tier_keys import key_files
from support.daemons import kvtier

KEY = "ab" * 32


def config(folder: Path, text: str) -> Config:
    file = folder / "kvtier.toml"
    file.write_text(f'state = "{folder}"\nsocket = "{folder}/s"\n[warm]\nsize = "64MiB"\n{text}')
    return load(file, environ={}).config


def remote(folder: Path, endpoint: str = "http://127.0.0.1:9", more: str = "") -> Config:
    return config(folder, f'[remote]\nbucket = "blocks"\nendpoint = "{endpoint}"\n{more}')


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (KEY, 0o600, ""),
        (None, 0o600, "does not exist"),
        (KEY, 0o644, "chmod 600"),
        (KEY[:-2], 0o600, "line 1 is not a key of 64 hexadecimal digits"),
        (f"{KEY}\n{KEY}", 0o600, "line 2 repeats an earlier key"),
        ("# none yet", 0o600, "must contain 1 to"),
    ],
)
@pytest.mark.parametrize("tier", ["cold", "remote"])
def test_a_key_file_exists_is_private_and_contains_keys(
    tmp_path: Path, tier: str, content: str | None, mode: int, said: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.touch(mode)
        file.write_text(content)
        file.chmod(mode)
    more = f'encryption = "aes-256-gcm"\nkey_file = "{file}"\n'
    section = f'[cold]\ndirectories = ["{tmp_path}"]\nsize = "1GiB"\n{more}'
    settings = config(tmp_path, section) if tier == "cold" else remote(tmp_path, more=more)
    (found,) = key_files(settings)
    assert found.what == f"keys of the {tier} tier"
    assert found.ok is (not said)
    assert said in f"{found.value}; {found.fix}"
    assert KEY not in str(found)


def test_a_tier_without_keys_has_no_finding_unless_it_encrypts(tmp_path: Path) -> None:
    assert key_files(remote(tmp_path)) == []
    (found,) = key_files(remote(tmp_path, more='encryption = "aes-256-gcm"\n'))
    assert (found.ok, "remote.key_file" in found.fix) == (False, True)


def test_an_address_is_checked_with_a_connection(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (found,) = store_answers(remote(tmp_path, f"http://127.0.0.1:{port}"))
        assert found.ok
        (found,) = store_answers(
            config(tmp_path, f'[remote]\nurl = "mooncake://127.0.0.1:{port}"\n')
        )
        assert found.ok
    (found,) = store_answers(remote(tmp_path, f"http://127.0.0.1:{port}"))
    assert not found.ok
    assert "Connection refused" in found.value and "remote.endpoint" in found.fix


def test_config_check_reports_the_key_file_and_the_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    keys = tmp_path / "keys"
    remote(
        tmp_path,
        f"http://127.0.0.1:{port}",
        f'encryption = "aes-256-gcm"\nkey_file = "{keys}"\n',
    )
    done = kvtier("config", "check", str(tmp_path / "kvtier.toml"))
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "keys of the remote tier" in said and "does not exist" in said
    assert f"http://127.0.0.1:{port} does not answer: Connection refused" in said
