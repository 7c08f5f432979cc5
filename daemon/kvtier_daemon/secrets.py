"""The tenants' secrets: 32 random bytes each, made once; the names of blocks derive from them. And the key
files of the tiers, which the operator makes.

<state>/secrets/          0700
  <tenant>                0600, exactly 32 bytes
  <tenant>.accepted       0600, optional: 1 to 3 other secrets

A secret is written to a temporary file and linked to its name, so that a secret file is always complete and
the first of two daemons wins. A service manager may provide them instead. If a secret is lost, the cache is
lost: blocks that were saved with it are never found again.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError

SECRET_BYTES: Final = 32
DIRECTORY: Final = "secrets"
CREDENTIAL: Final = "kvtier."
ACCEPTED: Final = ".accepted"
ACCEPTED_MOST: Final = 3
KEYS_CREDENTIAL: Final = "kvtier-{tier}-keys"
KEYS_MOST: Final = 16
_KEYS_BYTES: Final = 16 << 10  # of a key file at most


def load_secrets(
    state: Path,
    tenants: Iterable[str],
    random: Callable[[int], bytes] = os.urandom,
    environ: Mapping[str, str] | None = None,
) -> dict[str, bytes]:
    """Return each tenant's secret, and create missing ones durably. A secret from the service manager has
    priority over a file.

    Never returns a secret that another user can read or could have written: ConfigError names the file and
    what to do.
    """
    directory = state / DIRECTORY
    given = _given(os.environ if environ is None else environ, tenants := list(tenants))
    if not (left := [tenant for tenant in tenants if tenant not in given]):
        return given
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_open_directory(directory)
        return given | {tenant: _load(directory / tenant, random) for tenant in left}
    except OSError as error:
        where = error.filename or directory
        raise ConfigError(
            f"{where}: {error.strerror}; let uid {os.geteuid()} read and write {directory},"
            " or set state to a directory of its own"
        ) from error


def load_accepted(
    state: Path, secrets: Mapping[str, bytes], environ: Mapping[str, str] | None = None
) -> dict[str, tuple[bytes, ...]]:
    """Return the other secrets under which a tenant's blocks may be read from a store that hosts share, while
    its secret is being replaced. Its own secret is left out. Raises ConfigError as `load_secrets` does."""
    folder = (os.environ if environ is None else environ).get("CREDENTIALS_DIRECTORY", "")
    accepted: dict[str, tuple[bytes, ...]] = {}
    for tenant, own in secrets.items():
        file, owned = state / DIRECTORY / f"{tenant}{ACCEPTED}", True
        credential = Path(folder) / f"{CREDENTIAL}{tenant}{ACCEPTED}"
        if folder and credential.exists():
            file, owned = credential, False
        try:
            found = _read_private(
                file, (ACCEPTED_MOST + 1) * SECRET_BYTES, "no other secret is accepted", owned
            )
        except OSError as error:
            raise ConfigError(f"{file}: cannot read the secrets: {error.strerror}") from error
        if found is None:
            continue
        text, nbytes = found
        if not 0 < nbytes <= ACCEPTED_MOST * SECRET_BYTES or nbytes % SECRET_BYTES:
            raise ConfigError(
                f"{file}: has {nbytes} bytes instead of {SECRET_BYTES} for each of 1 to {ACCEPTED_MOST} "
                "secrets; correct it, or remove it: no other secret is accepted"
            )
        each = (text[at : at + SECRET_BYTES] for at in range(0, nbytes, SECRET_BYTES))
        accepted[tenant] = tuple(one for one in dict.fromkeys(each) if one != own)
    return accepted


def wrong_secrets(state: Path, tenants: Iterable[str]) -> str:
    """Return why `load_secrets` would refuse the files that exist; empty if it would not. Creates nothing."""
    directory = state / DIRECTORY
    try:
        if directory.is_symlink() or directory.exists():
            _refuse_open_directory(directory)
            for tenant in tenants:
                _read(directory / tenant)
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename}: {error.strerror}; let uid {os.geteuid()} read {directory}"
    return ""


def _given(environ: Mapping[str, str], tenants: Iterable[str]) -> dict[str, bytes]:
    """Return what the service manager handed over (LoadCredential=kvtier.TENANT:...)."""
    folder = environ.get("CREDENTIALS_DIRECTORY", "")
    if not folder:
        return {}
    files = {tenant: Path(folder) / f"{CREDENTIAL}{tenant}" for tenant in tenants}
    try:
        found = {tenant: _read(file, owned=False) for tenant, file in files.items()}
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: cannot read the credential: {error.strerror}"
        ) from error
    return {tenant: secret for tenant, secret in found.items() if secret is not None}


def _refuse_open_directory(directory: Path) -> None:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(
            f"{directory}: is not a directory; remove it, or set state to another one"
        )
    _refuse_strangers(directory, found)
    if stat.S_IMODE(found.st_mode) & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"{directory}: has mode {mode:04o}, open to others; chmod 700 it")


def _refuse_strangers(path: Path, found: os.stat_result) -> None:
    """Root could read another user's as well, and must not: who owns it knows what is in it."""
    if found.st_uid != os.geteuid():
        whole = "-R " if stat.S_ISDIR(found.st_mode) else ""
        raise ConfigError(
            f"{path}: belongs to uid {found.st_uid}, not to the daemon's uid {os.geteuid()}; "
            f"if its contents are yours run `chown {whole}{os.geteuid()} {path}`, else remove it"
        )


def _load(file: Path, random: Callable[[int], bytes]) -> bytes:
    secret = _read(file)
    if secret is None:
        _make(file, random(SECRET_BYTES))
        secret = _read(file)  # of the daemon that was first
        assert secret is not None, file
    return secret


def _read(file: Path, *, owned: bool = True) -> bytes | None:
    found = _read_private(
        file, SECRET_BYTES + 1, "a new one is made, and this tenant's cache is lost", owned
    )
    if found is None:
        return None
    secret, nbytes = found
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"{file}: has {nbytes} bytes instead of {SECRET_BYTES}; restore the right "
            "file, or remove it: a new one is made, and this tenant's cache is lost"
        )
    return secret


def _read_private(file: Path, most: int, removed: str, owned: bool) -> tuple[bytes, int] | None:
    """Return up to `most` bytes of a file that only its owner can read, and its size; None if there is no
    such file. `removed` says what happens if the user removes it; `owned`: it must be the daemon's."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as opened:
        found = os.fstat(descriptor)
        mode = stat.S_IMODE(found.st_mode)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{file}: is not a regular file; remove it")
        if mode & 0o077:
            raise ConfigError(
                f"{file}: has mode {mode:04o}, but only its owner may read a secret; chmod 600 "
                f"it, or, if others may have read it, remove it: {removed}"
            )
        if owned:
            _refuse_strangers(file, found)
        return opened.read(most), found.st_size


def key_file(
    configured: Path | None, tier: str, environ: Mapping[str, str] | None = None
) -> tuple[Path, bool] | None:
    """Return the file with the keys of a tier, and whether it must belong to the daemon: the configured one,
    or the service manager's (such as LoadCredential=kvtier-cold-keys:...). None without both."""
    folder = (os.environ if environ is None else environ).get("CREDENTIALS_DIRECTORY", "")
    if configured is not None:
        return configured, not folder or configured.parent != Path(folder)
    credential = Path(folder) / KEYS_CREDENTIAL.format(tier=tier)
    return (credential, False) if folder and credential.exists() else None


def load_keys(file: Path, *, owned: bool = True) -> list[bytes]:
    """Return the keys of a key file: a line of 64 hexadecimal digits for each; lines that begin with # are
    comments. Raises ConfigError with what to do, and never shows a key."""
    make = f"to make a new one: (umask 077; openssl rand -hex {SECRET_BYTES} > {file})"
    try:
        found = _read_private(
            file, _KEYS_BYTES, "write new keys; blocks under the old ones are lost", owned
        )
    except OSError as error:
        raise ConfigError(f"{file}: cannot read the keys: {error.strerror}") from error
    if found is None:
        raise ConfigError(f"{file}: the key file does not exist; restore it, or {make}")
    keys: list[bytes] = []
    for number, line in enumerate(found[0].splitlines(), 1):
        text = line.strip()
        if not text or text.startswith(b"#"):
            continue
        try:
            key = bytes.fromhex(text.decode("ascii"))
        except ValueError:
            key = b""
        if len(key) != SECRET_BYTES or len(text) != 2 * SECRET_BYTES:
            raise ConfigError(
                f"{file}: line {number} is not a key of {2 * SECRET_BYTES} hexadecimal digits"
            )
        if key in keys:
            raise ConfigError(f"{file}: line {number} repeats an earlier key")
        keys.append(key)
    if not 1 <= len(keys) <= KEYS_MOST or found[1] > _KEYS_BYTES:
        raise ConfigError(f"{file}: must contain 1 to {KEYS_MOST} keys, one a line; {make}")
    return keys


def _make(file: Path, secret: bytes) -> None:
    assert len(secret) == SECRET_BYTES
    temporary = file.with_name(f".{file.name}.{os.getpid()}")  # no tenant's name starts with a dot
    temporary.unlink(missing_ok=True)  # of a daemon that had this pid and died here
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            os.fchmod(descriptor, 0o600)  # independent of the umask
            opened.write(secret)
            opened.flush()
            os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):  # another daemon was first; its secret counts
            file.hardlink_to(temporary)
    finally:
        temporary.unlink()
    # The file and its directories must be as durable as the blocks.
    sync_folder(file.parent)
    sync_folder(file.parent.parent)
    with contextlib.suppress(PermissionError):  # not ours; then the state directory is not new
        sync_folder(file.parent.parent.parent)


def sync_folder(directory: Path) -> None:
    """Make the names in this folder durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
