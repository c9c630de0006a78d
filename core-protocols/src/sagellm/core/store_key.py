"""The secret that seals KV stored outside the process, and where it comes from."""

from __future__ import annotations

import os
import re
import secrets
import stat
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from sagellm.core.errors import ConfigError
from sagellm.core.runtime_folder import runtime_folder

KEY_BYTES = 32
KEY_FILE = "kv.key"
_STREAM_BYTES = 64  # of one BLAKE2b digest
_DIGITS = re.compile(rf"[0-9a-fA-F]{{{2 * KEY_BYTES}}}")
_FROM_ENVIRONMENT = "env:"
_HOW_TO_MAKE = "make one with: (umask 077; openssl rand -hex 32 > FILE)"


class StoreKey:
    """32 secret bytes and the digests and cipher keyed with them. Neither `repr` nor any message shows them.

    Digests are keyed BLAKE2b; each purpose is a separate `person`, so digests are not interchangeable.
    """

    __slots__ = ("_secret", "id")

    def __init__(self, secret: bytes) -> None:
        if len(secret) != KEY_BYTES:
            raise ConfigError(f"a key for stored KV is {len(secret)} bytes; it must be {KEY_BYTES}")
        self._secret = secret
        self.id = self.digest(b"id", size=8)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id.hex()}>"

    def digest(self, purpose: bytes, *parts: bytes | memoryview, size: int) -> bytes:
        """Return a digest of `size` bytes (at most 64) of the joined parts; `purpose` is at most 16 bytes."""
        state = blake2b(key=self._secret, person=purpose, digest_size=size)
        for part in parts:
            state.update(part)
        return state.digest()

    def cipher(self, nonce: bytes, data: bytes) -> bytes:
        """Encrypt or decrypt: XOR with BLAKE2b of the nonce and a counter.

        Use each nonce for one text only, such as a digest of that text (SIV; Rogaway and Shrimpton, 2006).
        """
        num_digests = -(-len(data) // _STREAM_BYTES)
        stream = b"".join(
            self.digest(b"cipher", nonce, number.to_bytes(4, "little"), size=_STREAM_BYTES)
            for number in range(num_digests)
        )
        mixed = int.from_bytes(data, "little") ^ int.from_bytes(stream[: len(data)], "little")
        return mixed.to_bytes(len(data), "little")

    @classmethod
    def fresh(cls) -> StoreKey:
        """Return a random key, for data that does not outlive this process."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def of_user(cls) -> StoreKey:
        """Return the key in the user's runtime folder, created if missing.

        Raises ConfigError if it cannot be read or created, or if others may read it.
        """
        path = runtime_folder() / KEY_FILE
        try:
            try:
                return cls._read(path, is_named=False)
            except FileNotFoundError:
                _make(path)
            return cls._read(path, is_named=False)
        except OSError as error:
            raise ConfigError(
                f"the key for stored KV, {path}, cannot be read or created: {error.strerror}; "
                "delete it, or name another one in kv.store_key"
            ) from error

    @classmethod
    def named(cls, source: str) -> StoreKey:
        """Return the key in a file or, for `env:NAME`, in an environment variable: 64 hexadecimal digits.

        Raises ConfigError if there is none or if others may read the file; no message shows its value.
        """
        if source.startswith(_FROM_ENVIRONMENT):
            name = source.removeprefix(_FROM_ENVIRONMENT)
            text = os.environ.get(name, "")
            if not text:
                raise ConfigError(f"kv.store_key is {source!r}, and {name} is not set; set it or name a file")
            return cls._parsed(text, f"the environment variable {name}")
        try:
            return cls._read(Path(source).expanduser(), is_named=True)
        except ConfigError as error:  # which says how to make a key
            raise ConfigError(f"kv.store_key is {source!r}: {error}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"kv.store_key is {source!r}, which cannot be read: {reason}; {_HOW_TO_MAKE}"
            ) from None

    @classmethod
    def _read(cls, path: Path, *, is_named: bool) -> StoreKey:
        """Read a key file. A configured one may be a link, readable by its group and owned by root."""
        careful = os.O_NONBLOCK | (0 if is_named else os.O_NOFOLLOW)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | careful)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            owners = {os.geteuid(), 0} if is_named else {os.geteuid()}
            forbidden = 0o037 if is_named else 0o077
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in owners or found.st_mode & forbidden:
                raise ConfigError(
                    f"the key for stored KV, {path}, has mode {stat.S_IMODE(found.st_mode):04o} and owner "
                    f"{found.st_uid}; it must be a file of yours that others can neither read nor write: "
                    "chmod 600 it, or make another one"
                )
            text = file.read(4 * KEY_BYTES).decode("ascii", "replace")
        return cls._parsed(text, str(path))

    @classmethod
    def _parsed(cls, text: str, where: str) -> StoreKey:
        if not _DIGITS.fullmatch(text.strip()):
            raise ConfigError(
                f"{where} has no key for stored KV; it must be {2 * KEY_BYTES} hexadecimal digits: "
                f"{_HOW_TO_MAKE}"
            )
        return cls(bytes.fromhex(text.strip()))


def _make(path: Path) -> None:
    """Write a new key file atomically; if several processes try, the first wins. Raises OSError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_hex(KEY_BYTES).encode() + b"\n")
        with suppress(FileExistsError):  # another process was faster
            os.link(partial, path)
    finally:
        partial.unlink()
