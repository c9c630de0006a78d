"""Access control: every path needs a key unless it is listed as open, whatever the routes are."""

from __future__ import annotations

import hmac
from hashlib import sha256
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING, NamedTuple

from sagellm.core import DEFAULT, DEFAULT_TENANT, ConfigError, Namespace, Tenant
from sagellm.server.http.admission import NO_QUOTA, Quota
from sagellm.server.http.api_keys import parse_keys
from sagellm.server.http.errors import APIError
from sagellm.server.http.origins import Origins, preflight_headers
from sagellm.server.http.reply import send_bytes, send_error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from sagellm.engines.config.sections import ServerConfig

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/ready", "/version"})
METRICS_PATH = "/metrics"
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_MAX_HEADER_BYTES = 4096
_FORWARDING = frozenset(
    b"cf-connecting-ip cf-ray client-ip fastly-client-ip fly-client-ip forwarded true-client-ip via "
    b"x-amzn-trace-id x-azure-clientip x-client-ip x-cluster-client-ip x-envoy-external-address "
    b"x-envoy-original-path x-proxyuser-ip x-real-ip x_forwarded_for".split()
)
"""Headers by which proxies name a client; and all that begin with `x-forwarded` or `x-original`."""
_METRICS_NEED = (
    "send one (Authorization: Bearer KEY), or allow the client's address with --metrics-allow; that does not "
    "apply to requests forwarded by a proxy"
)


def is_loopback(host: str | None) -> bool:
    """Say whether an address or name is this machine's own."""
    if host == "localhost":
        return True
    try:
        return host is not None and ip_address(host).is_loopback
    except ValueError:
        return False


def check_access(settings: ServerConfig) -> None:
    """Raise ConfigError for an open address without a key, and for keys with invalid options."""
    parse_keys(settings.api_keys)
    if not settings.api_keys and settings.api_key_file is None and not is_loopback(settings.host):
        raise ConfigError(
            f"server.host is {settings.host!r}, which others can reach, and server.api_keys is empty; "
            f"set a key with SAGELLM_API_KEY or server.api_key_file, or listen on 127.0.0.1"
        )


def tenant_of(key: bytes) -> str:
    """Name the tenant of a key without revealing the key."""
    return sha256(b"sagellm tenant\0" + key).hexdigest()[:32]


class Caller(NamedTuple):
    """Who sends a request: what it shares in caches, and who is charged for it."""

    namespace: Namespace
    tenant: Tenant


ANONYMOUS = Caller(DEFAULT, DEFAULT_TENANT)


class Keys:
    """The API keys, hashed. Without any, everyone is the default tenant.

    A tenant has the name that its key's option gives it, else the one by which its namespace is called.
    """

    def __init__(self, keys: tuple[str, ...], quota: Quota = NO_QUOTA) -> None:
        """Take the entries of `server.api_keys`, and the quota of those that state none.

        Raises ConfigError for an invalid one.
        """
        self._callers: list[tuple[bytes, Caller]] = []
        self.quotas: dict[str, Quota] = {}  # by tenant
        for each in parse_keys(keys):
            key = each.key.encode()
            owner = tenant_of(key)
            tenant = Tenant(each.name or owner, each.weight, each.is_trusted)
            self._callers.append((sha256(key).digest(), Caller(Namespace(tenant=owner), tenant)))
            self.quotas[tenant.name] = Quota(
                each.max_requests or quota.max_requests, each.max_tokens or quota.max_tokens
            )

    def may_read_metrics(self, caller: Caller) -> bool:
        """Say whether a caller may see the figures of all tenants: if it is the only one, or trusted."""
        return len(self._callers) < 2 or caller.tenant.is_trusted

    def caller(self, headers: list[bytes]) -> Caller | None:
        """Return who sends these Authorization headers, None for an invalid key. Takes constant time."""
        if not self._callers:
            return ANONYMOUS
        value = headers[0] if len(headers) == 1 and len(headers[0]) <= _MAX_HEADER_BYTES else b""
        scheme, _, key = value.partition(b" ")
        given = sha256(key.strip()).digest()
        found: Caller | None = None
        for digest, caller in self._callers:
            if hmac.compare_digest(digest, given):
                found = caller
        return found if scheme.lower() == b"bearer" else None


class AccessControl:
    """ASGI middleware around the application: host, origin and key, in this order.

    It leaves the caller's Namespace and Tenant in `scope["state"]`, as "namespace" and "tenant", and adds to
    `scope["state"]["headers"]` the headers that a browser needs in an answer to an allowed origin.
    """

    def __init__(self, app: ASGIApp, *, keys: Keys, settings: ServerConfig) -> None:
        self._app = app
        self._keys = keys
        self._origins = Origins(settings.allowed_origins)
        self._metrics_allow = [ip_network(one) for one in settings.metrics_allow]
        host = settings.host
        names = (*settings.allowed_hosts, *(_LOCAL_NAMES if is_loopback(host) else ()))
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
            caller = self._identify(scope)
            scope["state"]["namespace"], scope["state"]["tenant"] = caller
        except APIError as error:
            scope["state"].setdefault("failure", error.code)  # for the access log
            await send_error(send, error)
            return
        await self._app(scope, receive, send)

    def _check_origin(self, scope: Scope) -> bool:
        """Say whether the request comes from a page of another site; refuse it unless its origin is allowed.

        A Host that is not this server's (DNS rebinding) is refused, too.
        """
        hosts = _values(scope, b"host")
        if self._hosts is not None and (len(hosts) != 1 or _without_port(hosts[0]) not in self._hosts):
            if len(hosts) != 1:
                told = f"the request has {len(hosts)} Host headers; send one, with a name of this server"
                raise APIError(403, told, code="bad_host")
            raise APIError(
                403,
                f"the request is for the host {_shown(hosts[0])}, which is not a host of this server; if it "
                f"should be one, start the server with --allowed-hosts",
                code="bad_host",
            )
        foreign = [
            origin
            for origin in _values(scope, b"origin")
            if not hosts or origin.partition(b"://")[2] != hosts[0]
        ]
        for origin in foreign:
            if scope["path"] == METRICS_PATH:
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

    def _identify(self, scope: Scope) -> Caller:
        path = scope["path"]
        if path in OPEN_PATHS:
            return ANONYMOUS
        is_metrics = path == METRICS_PATH
        if is_metrics and _comes_from(scope, self._metrics_allow):
            return ANONYMOUS
        caller = self._keys.caller(_values(scope, b"authorization"))
        if caller is None:
            advice = f"; {_METRICS_NEED}" if is_metrics else ""
            raise APIError(401, f"the API key is missing or wrong{advice}", code="invalid_api_key")
        if is_metrics and not self._keys.may_read_metrics(caller):
            raise APIError(
                403,
                f"{METRICS_PATH} shows all tenants, so only a key with the option trusted reads it; "
                f"{_METRICS_NEED}",
                code="metrics_forbidden",
            )
        return caller


def _check_connection(scope: Scope) -> None:
    """Refuse everything but a probe on a connection above the limits."""
    refusal: APIError | None = scope["state"].get("refusal")
    if refusal is not None and scope["path"] not in OPEN_PATHS:
        raise refusal


def _comes_from(scope: Scope, networks: list[IPv4Network | IPv6Network]) -> bool:
    """Say whether a client itself, no proxy, sends from one of these networks.

    A proxy on this machine or in the network has an address of its own, so who asks is unknown.
    """
    if scope["client"] is None or any(_is_forwarding(name) for name, _ in scope["headers"]):
        return False
    try:
        address = ip_address(scope["client"][0])
    except ValueError:  # not an IP socket
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return any(address in network for network in networks)


def _is_forwarding(name: bytes) -> bool:
    return name in _FORWARDING or name.startswith((b"x-forwarded", b"x-original"))


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _without_port(host: bytes) -> bytes:
    name, colon, port = host.rpartition(b":")
    return (name if colon and (port.isdigit() or not port) else host).lower()


def _is_preflight(scope: Scope) -> bool:
    return scope["method"] == "OPTIONS" and bool(_values(scope, b"access-control-request-method"))


def _shown(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))
