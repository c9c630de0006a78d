"""Who gets in: every path is shut but those that are listed, keys are tenants, browsers stay out."""

from __future__ import annotations

import logging
import socket

import pytest

from sagellm.core import ConfigError, Namespace, Tenant
from sagellm.engines.config import EngineConfig, ServerConfig
from sagellm.server.http import create_app
from sagellm.server.http.access_control import OPEN_PATHS, Keys, is_loopback, tenant_of
from sagellm.testing.patience import PATIENCE_S

KEYS = ("first-key", "zweiter-Schlüssel")
PATHS = [
    "/v1/models",
    "/v1/models/small",
    "/v1/completions",
    "/v1/chat/completions",
    "/index.html",
    "/nothing",
    "//v1/models",
    "/v1//models",
    "/v1/models/",
    "/V1/Models",
    "/v1%2fmodels",
    "/v1/../v1/models",
    "//health",
    "/health/",
    "/Health",
    "/health%2f",
    "/health/../v1/models",
    "/health;/v1/models",
    "/metrics/",
    "//metrics",
    "/docs",
    "/openapi.json",
    "/redoc",
    "/invocations",
    "/v2/models",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/ping/",
    "//",
]


@pytest.fixture(scope="module")
def locked(serve):
    return serve(api_keys=KEYS)


def raw(server, head: bytes) -> bytes:
    """Send bytes as they are; httpx would tidy the path and the headers."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    return answer


def status(server, path, *headers, method="GET"):
    lines = [f"{method} {path} HTTP/1.1", "Connection: close", *headers]
    if not any(line.lower().startswith("host:") for line in headers):
        lines.append("Host: 127.0.0.1")
    return int(raw(server, "\r\n".join([*lines, "", ""]).encode()).split()[1])


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD", "PUT"])
@pytest.mark.parametrize("path", PATHS)
def test_without_a_key_everything_is_shut(locked, path, method):
    assert status(locked, path, "Content-Length: 0", method=method) == 401


def test_every_route_is_shut_unless_it_is_listed(locked):
    paths = {route.path.replace("{name:path}", "small") for route in locked.app.routes}
    assert paths >= OPEN_PATHS | {"/v1/models", "/metrics"}
    shut = {path for path in paths if status(locked, path) == 401}
    assert shut == paths - OPEN_PATHS


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_the_listed_paths_are_open(locked, path):
    assert status(locked, path) == 200


@pytest.mark.parametrize("key", KEYS)
def test_a_key_opens(locked, key):
    headers = {"authorization": f"Bearer {key}".encode()}
    assert locked.http.get("/v1/models", headers=headers).status_code == 200
    assert locked.http.get("/nothing", headers=headers).status_code == 404
    assert locked.http.get("/v1/models/", headers=headers).status_code == 404
    assert locked.http.get("//v1/models", headers=headers).status_code == 404


@pytest.mark.parametrize(
    "header",
    [
        b"Bearer wrong",
        b"Bearer",
        b"Bearer ",
        b"",
        b"first-key",
        b"Basic first-key",
        b"Bearer first-key,zweiter",
        b"Bearer first-ke",
        b"Bearer first-keyy",
        b"Bearer FIRST-KEY",
        b"Bearer \xff\xfe",
        "Bearer ключ".encode(),
        b"Bearer " + b"a" * 5000,
        b"Bearer first-key" + b" " * 5000 + b"y",
    ],
)
def test_odd_keys_do_not_open(locked, header):
    answer = raw(
        locked,
        b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nAuthorization: %b\r\n\r\n"
        % header,
    )
    assert answer.split()[1] == b"401"
    assert b'"code":"invalid_api_key"' in answer


def test_two_keys_at_once_do_not_open(locked):
    header = f"Authorization: Bearer {KEYS[0]}"
    assert status(locked, "/v1/models", header) == 200
    assert status(locked, "/v1/models", header, header) == 401


def test_a_key_is_in_no_log_and_no_answer(locked, caplog):
    caplog.set_level(logging.DEBUG)
    secret = "very-secret-wrong-key"
    answer = locked.http.post(
        "/v1/completions",
        json={"prompt": "my private prompt", "max_tokens": 1, "bad": 1},
        headers={"authorization": f"Bearer {secret}"},
    )
    good = locked.http.post(
        "/v1/completions",
        json={"prompt": "my private prompt", "max_tokens": 1},
        headers={"authorization": f"Bearer {KEYS[0]}"},
    )
    assert (answer.status_code, good.status_code) == (401, 200)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("sagellm")]
    for text in (answer.text, good.text, str(answer.headers), *ours):
        assert secret not in text
        assert KEYS[0] not in text
        assert "private" not in text


def test_each_key_is_a_tenant_and_nothing_in_the_body_changes_it(locked):
    def cached(key, **fields):
        answer = locked.http.post(
            "/v1/completions",
            json={"prompt": "Bread needs flour, water, salt and time. " * 6, "max_tokens": 1, **fields},
            headers={"authorization": f"Bearer {key}".encode()},
        )
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(KEYS[0]) == 0
    assert cached(KEYS[0]) > 0
    assert cached(KEYS[1]) == 0
    assert cached(KEYS[1], user="first", cache_salt=tenant_of(KEYS[0].encode())) == 0


def test_a_tenant_does_not_tell_its_key():
    keys = Keys(("a", "b name=blue weight=2 trusted"))
    namespace = Namespace(tenant=tenant_of(b"a"))
    assert keys.caller([b"Bearer a"]) == (namespace, Tenant(tenant_of(b"a")))
    namespace = Namespace(tenant=tenant_of(b"b"))
    assert keys.caller([b"bearer b"]) == (namespace, Tenant("blue", 2.0, True))
    assert keys.caller([]) is None
    assert tenant_of(b"a") != tenant_of(b"b")
    assert len(tenant_of(b"a")) == 32
    assert Keys(()).caller([b"Bearer whatever"]) == (Namespace(), Tenant("default"))


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "localhost.", "10.0.0.1", "[::2]"]
)
def test_other_hosts_are_refused_on_loopback(server, host):
    assert status(server, "/health", f"Host: {host}") == 403
    assert status(server, "/v1/models", f"Host: {host}:80") == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "[::1]"])
def test_this_machines_names_are_answered(server, host):
    assert status(server, "/health", f"Host: {host}") == 200


def test_a_refused_host_is_told_how_it_can_be_allowed(server):
    error = server.http.get("/health", headers={"host": "llm.example"}).json()["error"]
    assert error["code"] == "bad_host"
    assert "'llm.example'" in error["message"]
    assert "--allowed-hosts" in error["message"]


def test_two_hosts_are_refused(server):
    assert status(server, "/health", "Host: localhost", "Host: evil.example") == 400
    assert status(server, "/health", "Host: localhost", "Host: localhost") == 400


def test_the_host_of_an_absolute_target_decides_and_not_the_header(server):
    evil = "http://evil.example:8000"
    assert status(server, f"{evil}/health", "Host: localhost") == 403
    assert status(server, "http://localhost/health", "Host: evil.example") == 200
    assert status(server, f"{evil}/v1/models", "Host: localhost", f"Origin: {evil}") == 403
    assert status(server, "http://localhost/v1/models", f"Host: {evil[7:]}", f"Origin: {evil}") == 403


def test_a_host_can_be_allowed(scripted):
    server = scripted(allowed_hosts=("llm.example",))
    assert status(server, "/health", "Host: llm.example:443") == 200
    assert status(server, "/health", "Host: evil.example") == 403


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost", ""]
)
def test_other_origins_are_refused(server, origin):
    assert status(server, "/v1/models", "Host: 127.0.0.1:8000", f"Origin: {origin}") == 403


def test_the_own_origin_is_answered_and_no_answer_opens_to_others(server):
    answer = server.http.get("/v1/models", headers={"origin": server.url})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


UI = "https://ui.example"


@pytest.fixture(scope="module")
def with_ui(serve):
    return serve(api_keys=("key",), allowed_origins=(UI, "http://other.example:3000"))


def test_a_page_of_an_allowed_origin_may_read_answers_and_errors(with_ui):
    for headers, code in (({"authorization": "Bearer key"}, 200), ({}, 401)):
        answer = with_ui.http.get("/v1/models", headers={"origin": UI, **headers})
        assert answer.status_code == code
        assert answer.headers["access-control-allow-origin"] == UI
        assert answer.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in answer.headers
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"retry-after", "x-request-id", "x-should-retry"} <= set(exposed)


def test_a_browser_that_asks_ahead_needs_no_key(with_ui):
    asks = {
        "origin": UI,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    answer = with_ui.http.options("/v1/chat/completions", headers=asks)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == UI
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
    assert answer.headers["access-control-allow-methods"] == "GET, POST"
    odd = with_ui.http.options("/v1/models", headers={**asks, "access-control-request-headers": "a;b"})
    assert odd.headers["access-control-allow-headers"] == "authorization, content-type"
    assert with_ui.http.options("/v1/models", headers={"origin": UI}).status_code == 401


@pytest.mark.parametrize(
    "origin",
    [f"{UI}.evil.example", f"{UI}:8443", "http://ui.example", "null", f"{UI}/", "https://evil.example"],
)
def test_an_origin_is_compared_whole(with_ui, origin):
    for method in ("GET", "OPTIONS"):
        headers = {"origin": origin, "access-control-request-method": "POST"}
        answer = with_ui.http.request(method, "/v1/models", headers=headers)
        assert answer.status_code == 403
        assert "--allowed-origins" in answer.json()["error"]["message"]
        assert "access-control-allow-origin" not in answer.headers


def test_what_this_machine_alone_may_see_is_shown_to_no_page(serve, with_ui):
    key = {"authorization": "Bearer key"}
    assert with_ui.http.get("/metrics", headers=key).status_code == 200
    assert with_ui.http.get("/metrics", headers={"origin": UI, **key}).status_code == 403
    everybody = serve(allowed_origins=("*",))
    assert everybody.http.get("/metrics", headers={"origin": UI}).status_code == 403


def test_a_star_allows_every_origin_and_sends_nobody_s_cookies(serve):
    answer = serve(allowed_origins=("*",)).http.get("/v1/models", headers={"origin": "null"})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in answer.headers


def test_an_allowed_origin_opens_no_other_host(with_ui):
    headers = {"origin": UI, "host": "evil.example"}
    assert with_ui.http.get("/health", headers=headers).json()["error"]["code"] == "bad_host"


@pytest.mark.parametrize(
    "origin", ["ui.example", "https://ui.example/", "https://*.example", '["*"]', "*.com"]
)
def test_what_is_not_an_origin_is_refused_when_the_server_is_configured(origin):
    with pytest.raises(ConfigError, match=r"server\.allowed_origins .* scheme://host"):
        ServerConfig(allowed_origins=(origin,))


FORWARDED = [
    "Forwarded: for=8.8.8.8",
    "X-Forwarded-For: 127.0.0.1",
    "X-Forwarded-Proto: https",
    "x-forwarded-host: a",
    "X-Real-IP: 127.0.0.1",
    "Via: 1.1 proxy",
    "True-Client-IP: 8.8.8.8",
    "CF-Connecting-IP: 8.8.8.8",
    "X-Client-IP: 8.8.8.8",
    "X-Original-For: 8.8.8.8",
    "X-Forwarded-For:",
]


def test_with_keys_metrics_need_one_also_on_this_machine(locked):
    """A proxy that says nothing of its clients, as nginx by default, looks like a local client."""
    assert status(locked, "/metrics") == 401
    error = locked.http.get("/metrics").json()["error"]
    assert "--metrics-allow" in error["message"]
    assert "Authorization: Bearer" in error["message"]
    assert status(locked, "/metrics", "Authorization: Bearer wrong") == 401


def test_without_keys_metrics_are_open_as_all_else(server):
    for headers in ([], FORWARDED[:1]):
        assert status(server, "/metrics", *headers) == 200


def test_metrics_of_all_tenants_are_shown_to_the_only_key_and_to_trusted_ones(locked, scripted):
    assert status(locked, "/metrics", f"Authorization: Bearer {KEYS[0]}") == 403
    sole = scripted(api_keys=("a", "a"))
    assert status(sole, "/metrics", "Authorization: Bearer a") == 200
    several = scripted(api_keys=("a", "b name=ops trusted"))
    assert status(several, "/metrics", "Authorization: Bearer b", *FORWARDED) == 200
    answer = several.http.get("/metrics", headers={"authorization": "Bearer a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "metrics_forbidden")
    assert "option trusted" in answer.json()["error"]["message"]


@pytest.mark.parametrize("allowed", ["127.0.0.1", "127.0.0.0/8", "0.0.0.0/0"])
def test_an_allowed_address_reads_metrics_without_a_key_unless_a_proxy_forwards(scripted, allowed):
    server = scripted(api_keys=KEYS, metrics_allow=("10.1.2.3", "::1", allowed))
    assert status(server, "/metrics") == 200
    assert status(server, "/v1/models") == 401
    for header in FORWARDED:
        assert status(server, "/metrics", header) == 401, header


def test_another_address_does_not_read_metrics(scripted):
    server = scripted(api_keys=KEYS, metrics_allow=("10.1.2.3", "127.0.0.2", "::/0"))
    assert status(server, "/metrics") == 401


@pytest.mark.parametrize("address", ["localhost", "10.0.0.1/8", "10.0.0", "*", "10.0.0.1:80"])
def test_what_is_not_an_address_is_refused_when_the_server_is_configured(address):
    with pytest.raises(ConfigError, match=r"server\.metrics_allow is .* such as 127\.0\.0\.1"):
        ServerConfig(metrics_allow=(address,))


def test_an_address_is_this_machines_or_not():
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("10.0.0.1", "0.0.0.0", "::", "evil.example", None)] == [False] * 5


def test_an_open_address_needs_a_key(scripted):
    front = scripted().front
    for host in ("0.0.0.0", "::", "192.168.1.1", "llm.example"):
        with pytest.raises(ConfigError, match=r"server\.host is .*server\.api_keys is empty"):
            create_app(front, ServerConfig(host=host))
        create_app(front, ServerConfig(host=host, api_keys=("key",)))


def test_keys_are_not_repeated_by_the_configuration():
    config = EngineConfig.from_flat(api_key="secret-key")
    assert config.server.api_keys == ("secret-key",)
    assert "secret-key" not in repr(config)
    with pytest.raises(ConfigError) as caught:
        ServerConfig(api_keys=("secret-key", 1))
    assert "secret-key" not in str(caught.value)


def test_websockets_are_not_answered(server):
    headers = (
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: YQ==",
    )
    assert status(server, "/v1/models", *headers) == 200  # as the GET that it is
    assert status(server, "/nothing", *headers) == 404


def test_tenants_share_in_a_public_namespace_that_both_name_and_nowhere_else(serve):
    server = serve(api_keys=("one", "two"), public_namespaces=("docs",))
    prompt = list(range(10, 60))

    def cached(key, **fields):
        body = {"prompt": prompt, "max_tokens": 1, **fields}
        answer = server.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("one"), cached("two")] == [0, 0]
    assert [cached("one", cache_namespace="docs"), cached("two", cache_namespace="docs")] == [0, 49]
    assert [cached("one"), cached("two", cache_salt="docs")] == [49, 0]


def test_a_salt_divides_what_a_key_shares_and_joins_no_two_keys(scripted):
    server = scripted("a", "length", api_keys=("one", "two"))
    for key in ("one", "two"):
        for fields in ({"cache_salt": "s"}, {"cache_salt": "t"}, {}):
            headers = {"authorization": f"Bearer {key}"}
            server.http.post("/v1/completions", json={"prompt": [5], **fields}, headers=headers)
    assert [request["namespace"] for request in server.front.requests] == [
        Namespace(tenant_of(key), salt) for key in (b"one", b"two") for salt in ("s", "t", "")
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cache_namespace": "unknown"}, "cache_namespace"),
        ({"cache_namespace": "docs", "cache_salt": "s"}, "cache_salt"),
    ],
)
def test_a_namespace_that_nobody_opened_is_refused(serve, fields, param):
    server = serve(public_namespaces=("docs",))
    answer = server.http.post("/v1/completions", json={"prompt": [5, 6], **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_keys_of_a_file_are_keys(scripted, tmp_path):
    (tmp_path / "keys").write_text("of-a-file\n")
    server = scripted("a", "length", api_key_file=tmp_path / "keys")
    assert server.http.get("/v1/models").status_code == 401
    answer = server.http.get("/v1/models", headers={"authorization": "Bearer of-a-file"})
    assert answer.status_code == 200
