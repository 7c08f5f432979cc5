import os
import threading
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier_daemon.secrets import SECRET_BYTES, key_file, load_accepted, load_keys, load_secrets


def load(state, tenant="a"):
    return load_secrets(state, [tenant])[tenant]


def names(state):
    return sorted(file.name for file in (state / "secrets").iterdir())


def test_a_secret_is_created_once_and_kept(tmp_path):
    first = load_secrets(tmp_path / "state", ["a", "b"])
    assert len(first["a"]) == len(first["b"]) == SECRET_BYTES
    assert first["a"] != first["b"]
    assert load_secrets(tmp_path / "state", ["a", "b"]) == first
    assert (tmp_path / "state" / "secrets" / "a").read_bytes() == first["a"]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o277])
def test_only_the_owner_can_read_a_secret_with_any_umask(tmp_path, umask):
    state = tmp_path / "state"
    (state / "secrets").mkdir(parents=True, mode=0o700)
    before = os.umask(umask)
    try:
        load(state)
    finally:
        os.umask(before)
    assert (state / "secrets" / "a").stat().st_mode & 0o7777 == 0o600


def test_only_the_owner_can_enter_the_directory_of_secrets(tmp_path):
    before = os.umask(0)
    try:
        load(tmp_path / "state")
    finally:
        os.umask(before)
    assert (tmp_path / "state" / "secrets").stat().st_mode & 0o7777 == 0o700


def test_no_temporary_files_remain_in_the_directory_of_secrets(tmp_path):
    load_secrets(tmp_path, ["a", "b"])
    assert names(tmp_path) == ["a", "b"]


def test_the_temporary_file_of_a_killed_daemon_does_not_prevent_a_new_secret(tmp_path):
    (tmp_path / "secrets").mkdir(mode=0o700)
    (tmp_path / "secrets" / f".a.{os.getpid()}").write_bytes(b"half")
    load(tmp_path)
    assert names(tmp_path) == ["a"]


def test_the_first_of_two_daemons_wins(tmp_path):
    winner = b"w" * SECRET_BYTES

    def random(count):  # the other daemon creates it between the check and the creation
        (tmp_path / "secrets" / "a").touch(mode=0o600)
        (tmp_path / "secrets" / "a").write_bytes(winner)
        return b"l" * count

    assert load_secrets(tmp_path, ["a"], random) == {"a": winner}
    assert names(tmp_path) == ["a"]


def test_a_crash_while_creating_a_secret_leaves_none(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match="No space left"):
        load(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33])
def test_a_secret_of_the_wrong_length_is_refused_with_the_remedy(tmp_path, content):
    load(tmp_path)
    (tmp_path / "secrets" / "a").write_bytes(content)
    with pytest.raises(
        ConfigError, match=rf"a: has {len(content)} bytes instead of 32; restore the"
    ):
        load(tmp_path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610])
def test_a_secret_that_others_can_touch_is_refused_with_the_remedy(tmp_path, mode):
    load(tmp_path)
    (tmp_path / "secrets" / "a").chmod(mode)
    with pytest.raises(ConfigError, match=rf"has mode 0{mode:o}.*chmod 600 it") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_directory_that_others_can_enter_is_refused(tmp_path):
    load(tmp_path)
    (tmp_path / "secrets").chmod(0o750)
    with pytest.raises(ConfigError, match=r"secrets: has mode 0750.*chmod 700 it"):
        load(tmp_path)


def test_a_secret_that_is_not_a_regular_file_is_refused(tmp_path):
    load(tmp_path)
    (tmp_path / "secrets" / "a").rename(tmp_path / "real")
    (tmp_path / "secrets" / "a").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="secrets/a: "):
        load(tmp_path)
    os.mkfifo(tmp_path / "secrets" / "b", 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        load(tmp_path, "b")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_state_directory_that_cannot_be_written_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"Permission denied.*or set state"):
        load(tmp_path)


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    load(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 54321)
    with pytest.raises(ConfigError, match=r"belongs to uid \d+, not to the daemon's"):
        load(tmp_path)


def test_simultaneous_creators_agree_on_one_secret(tmp_path):
    (tmp_path / "secrets").mkdir(mode=0o700)
    together = threading.Barrier(8)
    found = []

    def make():
        together.wait()
        found.append(load(tmp_path))

    pids = iter(range(10_000, 10_008))
    threads = [threading.Thread(target=make) for _ in range(8)]
    with pytest.MonkeyPatch.context() as patch:  # threads share a pid, daemons do not
        patch.setattr(os, "getpid", lambda: next(pids))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_secret_from_the_service_manager_has_priority(tmp_path):
    given = tmp_path / "credentials"
    given.mkdir()
    (given / "kvtier.a").write_bytes(b"g" * SECRET_BYTES)
    (given / "kvtier.a").chmod(0o400)
    environ = {"CREDENTIALS_DIRECTORY": str(given)}
    found = load_secrets(tmp_path / "state", ["a", "b"], environ=environ)
    assert found["a"] == b"g" * SECRET_BYTES
    assert names(tmp_path / "state") == ["b"], "what was handed over is not kept"
    (given / "kvtier.a").chmod(0o600)
    (given / "kvtier.a").write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"kvtier\.a: has 5 bytes"):
        load_secrets(tmp_path / "state", ["a"], environ=environ)


KEYS = ("1" * 64, "ab" * 32)


def key_file_of(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "keys"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_a_key_file_has_keys_and_comments(tmp_path: Path) -> None:
    file = key_file_of(tmp_path, f"# the newest first\n{KEYS[0]}\n\n  {KEYS[1].upper()}\r\n")
    assert load_keys(file) == [bytes.fromhex(key) for key in KEYS]


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        (KEYS[0], 0o640, "mode 0640"),
        ("", 0o600, "1 to 16 keys"),
        ("\n".join(f"{number:064x}" for number in range(17)), 0o600, "1 to 16 keys"),
        (f"{KEYS[0]}\n{KEYS[0][:-2]}", 0o600, "line 2 is not a key"),
        (KEYS[0][:-1] + "g", 0o600, "line 1 is not a key"),
        ("11 " * 32, 0o600, "line 1 is not a key"),
        ("\xe9" * 32, 0o600, "line 1 is not a key"),
        (f"{KEYS[1]}\n{KEYS[1].upper()}", 0o600, "line 2 repeats"),
        (KEYS[0] + "\n" + "#" * (16 << 10), 0o600, "1 to 16 keys"),
    ],
)
def test_a_wrong_key_file_is_refused_without_showing_a_key(
    tmp_path: Path, text: str, mode: int, why: str
) -> None:
    file = key_file_of(tmp_path, text, mode)
    with pytest.raises(ConfigError, match=why) as error:
        load_keys(file)
    assert str(file) in str(error.value) and KEYS[0][:60] not in str(error.value)


def test_a_missing_key_file_a_link_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="openssl rand"):
        load_keys(tmp_path / "keys")
    (tmp_path / "link").symlink_to(key_file_of(tmp_path, KEYS[0]))
    for wrong in (tmp_path / "link", tmp_path):
        with pytest.raises(ConfigError):
            load_keys(wrong)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
def test_a_key_file_of_another_user_is_refused_unless_it_is_a_credential(tmp_path: Path) -> None:
    file = key_file_of(tmp_path, KEYS[0])
    os.chown(file, 65_534, -1)
    with pytest.raises(ConfigError, match="belongs to uid 65534"):
        load_keys(file)
    assert load_keys(file, owned=False)


def test_the_key_file_is_the_configured_one_or_the_credential(tmp_path: Path) -> None:
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert key_file(None, "cold", {}) is None and key_file(None, "cold", environ) is None
    credential = tmp_path / "kvtier-cold-keys"
    credential.touch()
    assert key_file(None, "cold", environ) == (credential, False)
    assert key_file(None, "remote", environ) is None
    assert key_file(credential, "cold", environ) == (credential, False)
    assert key_file(Path("/etc/keys"), "cold", environ) == (Path("/etc/keys"), True)
    assert key_file(Path("/etc/keys"), "cold", {}) == (Path("/etc/keys"), True)


def test_other_secrets_are_accepted_from_a_file_or_the_service_manager(tmp_path: Path) -> None:
    own, other, third = (bytes([number]) * 32 for number in range(1, 4))
    secrets = load_secrets(tmp_path, ["t", "u"], lambda count: own)
    assert load_accepted(tmp_path, secrets, {}) == {}
    file = tmp_path / "secrets" / "t.accepted"
    file.write_bytes(own + other + other)
    file.chmod(0o600)
    assert load_accepted(tmp_path, secrets, {}) == {"t": (other,)}, "its own is left out"
    given = tmp_path / "given"
    given.mkdir()
    (given / "kvtier.t.accepted").write_bytes(third)
    (given / "kvtier.t.accepted").chmod(0o400)
    assert load_accepted(tmp_path, secrets, {"CREDENTIALS_DIRECTORY": str(given)}) == {
        "t": (third,)
    }


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33, b"x" * 128])
def test_accepted_secrets_of_the_wrong_length_are_refused(tmp_path: Path, content: bytes) -> None:
    secrets = load_secrets(tmp_path, ["t"])
    file = tmp_path / "secrets" / "t.accepted"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="instead of 32 for each of 1 to 3"):
        load_accepted(tmp_path, secrets, {})
    file.write_bytes(b"x" * 32)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_accepted(tmp_path, secrets, {})
