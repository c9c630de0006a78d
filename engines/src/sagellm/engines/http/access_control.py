"""Access control: every path needs a key unless it is listed as open, whatever the routes are."""

from __future__ import annotations

import hmac
from hashlib import sha256
from ipaddress import ip_address
from typing import TYPE_CHECKING

from sagellm.core import DEFAULT, Namespace
from sagellm.engines.http.errors import APIError
from sagellm.engines.http.origins import Origins, preflight_headers
from sagellm.engines.http.reply import send_bytes, send_error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/ready", "/version"})
LOOPBACK_PATHS = frozenset({"/metrics"})
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_MAX_HEADER_BYTES = 4096


def is_loopback(host: str | None) -> bool:
    """Say whether an address or name is this machine's own."""
    if host == "localhost":
        return True
    try:
        return host is not None and ip_address(host).is_loopback
    except ValueError:
        return False


def tenant_of(key: bytes) -> str:
    """Name the tenant of a key without revealing the key."""
    return sha256(b"sagellm tenant\0" + key).hexdigest()[:32]


class Keys:
    """The API keys, hashed. Without any, everyone is the default tenant."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        encoded = [key.encode() for key in keys]
        self._tenants = [(sha256(key).digest(), tenant_of(key)) for key in encoded]

    def namespace(self, headers: list[bytes]) -> Namespace | None:
        """Return the namespace of the Authorization headers, None for an invalid key. Takes constant time."""
        if not self._tenants:
            return DEFAULT
        value = headers[0] if len(headers) == 1 and len(headers[0]) <= _MAX_HEADER_BYTES else b""
        scheme, _, key = value.partition(b" ")
        given = sha256(key.strip()).digest()
        found: str | None = None
        for digest, tenant in self._tenants:
            if hmac.compare_digest(digest, given):
                found = tenant
        return Namespace(tenant=found) if found is not None and scheme.lower() == b"bearer" else None


class AccessControl:
    """ASGI middleware around the application: host, origin and key, in this order.

    It leaves the caller's Namespace in `scope["state"]["namespace"]`, and adds to `scope["state"]["headers"]`
    the headers that a browser needs in an answer to an allowed origin.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Keys, host: str, allowed_hosts: tuple[str, ...], origins: Origins
    ) -> None:
        self._app = app
        self._keys = keys
        self._origins = origins
        names = (*allowed_hosts, *(_LOCAL_NAMES if is_loopback(host) else ()))
        own = f"[{host}]" if ":" in host else host
        self._hosts = frozenset(name.lower().encode() for name in (*names, own)) if names else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in or answer it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            _check_connection(scope)
            is_foreign = self._check_origin(scope)
            if is_foreign and _is_preflight(scope):
                wanted = _values(scope, b"access-control-request-headers")
                await send_bytes(send, b"", headers=preflight_headers(wanted))
                return
            scope["state"]["namespace"] = self._identify(scope)
        except APIError as error:
            await send_error(send, error)
            return
        await self._app(scope, receive, send)

    def _check_origin(self, scope: Scope) -> bool:
        """Say whether the request comes from a page of another site; refuse it unless its origin is allowed.

        A Host that is not this server's (DNS rebinding) is refused, too.
        """
        hosts = _values(scope, b"host")
        if self._hosts is not None and (len(hosts) != 1 or _without_port(hosts[0]) not in self._hosts):
            named = _shown(hosts[0]) if len(hosts) == 1 else f"{len(hosts)} names"
            raise APIError(
                403,
                f"the Host header has {named}, which is not a host of this server; if it should be one, "
                f"start the server with --allowed-hosts",
                code="bad_host",
            )
        foreign = [
            origin
            for origin in _values(scope, b"origin")
            if not hosts or origin.partition(b"://")[2] != hosts[0]
        ]
        for origin in foreign:
            if scope["path"] in LOOPBACK_PATHS:  # only for this machine, so not for pages of other sites
                raise APIError(
                    403, f"{scope['path']} is not answered for pages of other sites", code="bad_origin"
                )
            if len(foreign) > 1 or not self._origins.allow(origin):
                raise APIError(
                    403,
                    f"requests from the origin {_shown(origin)} are not answered; if they should be, start "
                    f"the server with --allowed-origins",
                    code="bad_origin",
                )
            scope["state"]["headers"] += self._origins.headers(origin)
        return bool(foreign)

    def _identify(self, scope: Scope) -> Namespace:
        path = scope["path"]
        if path in OPEN_PATHS:
            return DEFAULT
        if path in LOOPBACK_PATHS and scope["client"] is not None and is_loopback(scope["client"][0]):
            return DEFAULT
        namespace = self._keys.namespace(_values(scope, b"authorization"))
        if namespace is None:
            raise APIError(401, "the API key is missing or wrong", code="invalid_api_key")
        if path in LOOPBACK_PATHS:
            raise APIError(403, "this page is shown on the server's own machine only", code="loopback_only")
        return namespace


def _check_connection(scope: Scope) -> None:
    """Refuse everything but a probe on a connection above the limits."""
    refusal: APIError | None = scope["state"].get("refusal")
    if refusal is not None and scope["path"] not in OPEN_PATHS:
        raise refusal


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _without_port(host: bytes) -> bytes:
    name, colon, port = host.rpartition(b":")
    return (name if colon and port.isdigit() else host).lower()


def _is_preflight(scope: Scope) -> bool:
    return scope["method"] == "OPTIONS" and bool(_values(scope, b"access-control-request-method"))


def _shown(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))
