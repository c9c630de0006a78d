"""Which sites' pages may use the server from a browser (CORS): none, unless their origins are named."""

from __future__ import annotations

import re

Headers = list[tuple[bytes, bytes]]

ANY = "*"
_METHODS = b"GET, POST"
_EXPOSED = b"retry-after, x-request-id, x-sagellm-ignored, x-should-retry"
_REQUEST_HEADERS = re.compile(rb"[A-Za-z0-9, -]{0,2048}")
_PREFLIGHT_MAX_AGE_S = 600


class Origins:
    """The origins of `--allowed-origins`, compared in full. Browsers send no cookies for them."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allows_any = ANY in allowed
        self._allowed = frozenset(origin.lower().encode() for origin in allowed)

    def allow(self, origin: bytes) -> bool:
        """Say whether pages of an origin may use the server."""
        return self._allows_any or origin.lower() in self._allowed

    def headers(self, origin: bytes) -> Headers:
        """Return the headers that let a browser show an answer to a page of an allowed origin."""
        return [
            (b"access-control-allow-origin", ANY.encode() if self._allows_any else origin),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"Origin"),
        ]


def preflight_headers(wanted: list[bytes]) -> Headers:
    """Return the headers that answer a preflight; `wanted` is its Access-Control-Request-Headers."""
    names = wanted[0] if len(wanted) == 1 and _REQUEST_HEADERS.fullmatch(wanted[0]) else b""
    return [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-allow-headers", names or b"authorization, content-type"),
        (b"access-control-max-age", b"%d" % _PREFLIGHT_MAX_AGE_S),
    ]
