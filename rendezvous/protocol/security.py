"""
One 32-byte secret per user, and what is derived from it: CURVE keys, and the token text to copy.

HKDF-SHA256 makes key pairs from the secret: the scheduler's, and one per role of its clients
(agent, view, relay). So the scheduler's public key is secret, too: without the secret a client
cannot start a handshake.

The secret is read from the first of these: a token file, PDRUN_TOKEN_FILE, PDRUN_TOKEN
(`pdrun.process_setup` has removed it from the environment and keeps it), the user's cookie, which
is created on first use. The cookie is per user and not per job: two jobs of a user that meet at one
address can authenticate, and each is refused by the name of the other.

Limits: root, and code that runs as the same user, can read the secret. It never appears on a
command line.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import hmac
import os
import secrets
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from pdrun import process_setup
from pdrun.disk import make_private_folder
from pdrun.errors import ConfigError
from pdrun.rendezvous.protocol.mounted_secret import open_mounted_secret
from pdrun.text import quote_command
from pdrun.topology import is_in_kubernetes

SECRET_BYTES = 32
"""Bytes of a secret."""
_KEY_SALT = b"pdrun-v1"
_TOKEN_PREFIX = "pdrun1"
_MAX_FILE_BYTES = 4096


class Secret:
    """32 bytes that repr, str, pickle and copy never show. Only `reveal` returns them."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        if len(value) != SECRET_BYTES:
            raise ConfigError(f"a secret has {SECRET_BYTES} bytes, not {len(value)}")
        self._value = bytes(value)

    @classmethod
    def random(cls) -> Secret:
        """Return a new random secret."""
        return cls(secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def from_hex(cls, text: str) -> Secret:
        """Inverse of ``reveal().hex()``, the form on a child's stdin."""
        try:
            return cls(bytes.fromhex(text))
        except ValueError:
            raise ConfigError("the secret is not hexadecimal") from None

    def reveal(self) -> bytes:
        """Return the bytes. Never log, format or pass them on a command line."""
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret is not pickled")


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair in ZeroMQ's Z85 spelling."""

    public: bytes
    private: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def derive_key(secret: bytes, info: bytes, salt: bytes = _KEY_SALT) -> bytes:
    """Return 32 bytes by HKDF-SHA256 (RFC 5869), one block of output."""
    key = hmac.new(salt, secret, hashlib.sha256).digest()
    return hmac.new(key, info + b"\x01", hashlib.sha256).digest()


def derive_server_key(secret: Secret | None, run: str) -> bytes:
    """Return the key of a run's parameter servers; that of an insecure job is no secret."""
    own = bytes(SECRET_BYTES) if secret is None else secret.reveal()
    return derive_key(own, f"parameter servers of {run}".encode())


def derive_key_pair(secret: Secret, who: Literal["server", "agent", "view", "relay"]) -> KeyPair:
    """Return the CURVE keys of the scheduler or of a role of its clients."""
    import zmq
    from zmq.utils import z85

    private = z85.encode(derive_key(secret.reveal(), who.encode()))
    return KeyPair(public=zmq.curve_public(private), private=private)


# Token text
# ----------


def format_token(secret: Secret) -> str:
    """
    Return the secret as text to copy: ``pdrun1-SECRET-SERVERKEYHASH-CRC``. It *is* the secret:
    never log it.
    """
    body = f"{_TOKEN_PREFIX}-{_encode_base32(secret.reveal())}-{_key_fingerprint(secret)}"
    return f"{body}-{_token_checksum(body)}"


def parse_token(text: str, *, where: str) -> Secret:
    """
    Return the secret in a token text; white space around it is allowed.

    Raises:
        ConfigError: it is truncated, mistyped or of another version. The message never contains the
            token.
    """
    parts = text.strip().split("-")
    if parts[0].lower() != _TOKEN_PREFIX:
        version = parts[0][:12] if parts[0].lower().startswith("pdrun") and len(parts) > 1 else ""
        what = f"a token of another version ({version!r})" if version else "not a token"
        raise ConfigError(
            what,
            where=where,
            hint=f"a token starts with {_TOKEN_PREFIX}-; `pdrun token create` makes one",
        )
    if len(parts) != 4 or len(parts[3]) < 8:
        raise ConfigError("the token is cut off", where=where, hint="copy all of it, in one line")
    body = f"{_TOKEN_PREFIX}-{parts[1].upper()}-{parts[2].upper()}"
    if parts[3].lower() != _token_checksum(body):
        raise ConfigError(
            "the token is mistyped (wrong checksum)", where=where, hint="copy it again"
        )
    try:
        secret = Secret(base64.b32decode(parts[1].upper() + "=" * (-len(parts[1]) % 8)))
    except (ValueError, ConfigError):
        raise ConfigError(f"the token does not have {SECRET_BYTES} bytes", where=where) from None
    if parts[2].upper() != _key_fingerprint(secret):
        raise ConfigError("the token's scheduler key does not belong to its secret", where=where)
    return secret


def _encode_base32(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=")


def _key_fingerprint(secret: Secret) -> str:
    return _encode_base32(hashlib.sha256(derive_key_pair(secret, "server").public).digest()[:10])


def _token_checksum(body: str) -> str:
    return f"{zlib.crc32(body.encode()):08x}"


# Where it comes from
# -------------------


def find_secret(
    token_file: str = "", *, environ: Mapping[str, str] | None = None
) -> tuple[Secret, str]:
    """
    Return the secret and its source, for `--explain`. Repeated calls return the same.

    Args:
        token_file: from ``--token-file``; empty: not given.
        environ: replaces the process's environment, and what was removed from it.

    Raises:
        ConfigError: the first source that is set cannot be used. No weaker source is tried.
    """
    environ = _read_environment() if environ is None else environ
    token = environ.get(process_setup.TOKEN_VARIABLE)
    if token_file:
        return read_token_file(token_file, where="--token-file"), f"--token-file {token_file}"
    if path := environ.get("PDRUN_TOKEN_FILE"):
        return read_token_file(path, where="PDRUN_TOKEN_FILE"), f"PDRUN_TOKEN_FILE={path}"
    if token is not None:
        return parse_token(token, where=process_setup.TOKEN_VARIABLE), process_setup.TOKEN_VARIABLE
    path_of_cookie = cookie_path(environ)
    return load_cookie(path_of_cookie), f"cookie {path_of_cookie}"


def is_secret_named(token_file: str = "") -> bool:
    """Whether the user has named a secret, so that `find_secret` does not use the cookie."""
    return (
        bool(token_file)
        or process_setup.TOKEN_VARIABLE in (around := _read_environment())
        or bool(around.get("PDRUN_TOKEN_FILE"))
    )


def _read_environment() -> dict[str, str]:
    return process_setup.env_with_token(os.environ)


def read_token_file(name: str, *, where: str) -> Secret:
    """Return the secret of a token file, which must belong to the user (or root) and be private."""
    data = _read_private(Path(name), where=where)
    try:
        return parse_token(data.decode("ascii"), where=f"{where} {name}")
    except UnicodeDecodeError:
        raise ConfigError("not a token", where=f"{where} {name}") from None


def cookie_path(environ: Mapping[str, str]) -> Path:
    """Return ``$XDG_CONFIG_HOME/pdrun/cookie``, by default below ``~/.config``."""
    base = environ.get("XDG_CONFIG_HOME") or ""
    if not base.startswith("/"):
        home = environ.get("HOME") or ""
        if not home.startswith("/"):
            raise ConfigError(
                "HOME is not set",
                where="cookie",
                hint="set HOME, or give --token-file or PDRUN_TOKEN",
            )
        base = f"{home}/.config"
    return Path(base) / "pdrun" / "cookie"


def load_cookie(path: Path) -> Secret:
    """
    Return the user's own secret; it is created on first use.

    Processes that create it at the same time get the same secret. Each writes a separate file,
    and only the first can link it to ``path``. So the file is complete from its creation.
    """
    if not os.path.lexists(path):
        _make_cookie(path)
    data = _read_private(path, where="cookie", allow_root=False)
    if len(data) != SECRET_BYTES:
        raise ConfigError(
            f"must have {SECRET_BYTES} bytes, has {len(data)}",
            where=f"cookie {path}",
            hint=f"remove it: {quote_command('rm', path)}",
        )
    return Secret(data)


def _make_cookie(path: Path) -> None:
    draft = path.with_name(f".cookie-{os.getpid()}-{secrets.token_hex(8)}")
    try:
        make_private_folder(path.parent)
        fd = os.open(
            draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            with open(fd, "wb", buffering=0) as file:
                os.fchmod(fd, 0o600)
                if file.write(secrets.token_bytes(SECRET_BYTES)) != SECRET_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(fd)
            try:
                os.link(draft, path, follow_symlinks=False)
            except FileExistsError:
                pass  # another process was first: its cookie is used
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot be made: {error.strerror}",
            where=f"cookie {path}",
            hint="give --token-file or PDRUN_TOKEN",
        ) from None


def _read_private(path: Path, *, where: str, allow_root: bool = True) -> bytes:
    """
    Return the bytes of a small regular file that no other user can read or change. Never follows a
    last symlink, except in a Secret volume of Kubernetes.
    """
    place = f"{where} {path}"
    mounted = open_mounted_secret(path) if allow_root else None
    if mounted is not None:
        try:
            return os.read(mounted, _MAX_FILE_BYTES)
        finally:
            os.close(mounted)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(
                "is a symbolic link",
                where=place,
                hint="mount the Secret read-only" if is_in_kubernetes() else "name the file itself",
            ) from None
        raise ConfigError(f"cannot be read: {error.strerror}", where=place) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError("is not a regular file", where=place)
        if status.st_uid != os.geteuid() and not (allow_root and status.st_uid == 0):
            raise ConfigError(
                f"belongs to user {status.st_uid}, not to you", where=place, hint="make your own"
            )
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise ConfigError(
                f"other users can access it (mode {mode:04o})",
                where=place,
                hint=quote_command("chmod", "600", path),
            )
        return os.read(fd, _MAX_FILE_BYTES)
    finally:
        os.close(fd)
