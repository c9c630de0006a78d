"""Names that stand for tenants and conversations."""

from __future__ import annotations

from hashlib import blake2b

from sagellm.core import DEFAULT_TENANT


class Pseudonyms:
    """Salted hashes: equal for equal names within one file, and of no use beside another."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt

    def of(self, name: str) -> str:
        """Return what stands for a name; no name and the default tenant's stay nothing."""
        if name in ("", DEFAULT_TENANT.name):
            return ""
        return blake2b(name.encode(errors="surrogatepass"), key=self._salt, digest_size=6).hexdigest()
