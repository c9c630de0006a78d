"""The parser of requests: what is read, what is refused, and that it does not matter how bytes are split."""

from __future__ import annotations

import pytest

from sagellm.server.http.errors import APIError
from sagellm.server.http.request_parser import MAX_CHUNKS, MAX_HEADER_BYTES, RequestParser

HOST = b"Host: here\r\n"
H2C = (
    b"POST /x HTTP/1.1\r\n" + HOST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\n"
)
CHUNKED = H2C + b"Transfer-Encoding: chunked\r\n\r\n"


class Requests:
    """Collects method, target, version, keep-alive, headers and body of each request."""

    def __init__(self):
        self.parser = RequestParser(self)
        self.whole = []

    def on_message_begin(self):
        self.url, self.headers, self.body = b"", [], b""

    def on_url(self, url):
        self.url += url

    def on_header(self, name, value):
        self.headers.append((name, value))

    def on_headers_complete(self):
        parser = self.parser
        self.head = (parser.get_method(), self.url, parser.get_http_version(), parser.should_keep_alive())

    def on_body(self, body):
        self.body += body

    def on_message_complete(self):
        self.whole.append((*self.head, dict(self.headers), self.body))


def read(data, size=None):
    requests = Requests()
    for start in range(0, len(data), size or max(len(data), 1)):
        piece = data[start : start + (size or len(data))]
        while piece:
            piece = piece[requests.parser.feed_data(piece) :]
    return requests


def refused(data):
    with pytest.raises(APIError) as caught:
        read(data)
    return caught.value.status


def host_and_path(line, headers=HOST):
    [(_, path, _, _, found, _)] = read(line + b" HTTP/1.1\r\n" + headers + b"\r\n").whole
    return found[b"host"], path


def test_a_request_is_the_same_however_its_bytes_are_split():
    data = (
        b"\r\n\r\n"
        + H2C
        + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n00a\r\n0123456789\r\n0\r\nA: b\r\n\r\n"
        b"POST http://there/y?z HTTP/1.1\r\n" + HOST + b"Content-Length:4  \r\n\r\nbody"
        b"GET / HTTP/1.1\r\n" + HOST + b"Connection: TE, close\r\nTE: trailers\r\n\r\nGET /never HTTP/1.1\r\n"
    )
    whole = read(data).whole
    assert [(one[0], one[1], one[3], one[5]) for one in whole] == [
        (b"POST", b"/x", True, b"abc0123456789"),
        (b"POST", b"/y?z", True, b"body"),
        (b"GET", b"/", False, b""),
    ]
    assert b"a" not in whole[0][4], "a trailer is not a header"
    assert whole[1][4] == {b"host": b"there", b"content-length": b"4"}
    for size in (1, 2, 3, 7, 64):
        assert read(data, size).whole == whole


@pytest.mark.parametrize("offer", [b"h2c", b"websocket", b"TLS/1.0, h2c", b"foo/2"])
@pytest.mark.parametrize("body", [b"Content-Length: 4\r\n\r\nbody", b"\r\n"])
def test_an_offered_upgrade_is_ignored(offer, body):
    data = H2C.replace(b"h2c", offer) + body
    whole = read(data + data).whole
    assert [one[5] for one in whole] == [body[-4:] if b"body" in body else b""] * 2
    assert [one[3] for one in whole] == [True, True]


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET / HTTP/2.0", 505),
        (b"PRI * HTTP/2.0", 505),
        (b"GET / HTTP/3.0", 505),
        (b"GET / HTTP/0.9", 505),
        (b"GET /", 400),
        (b"GET", 400),
        (b"GET  / HTTP/1.1", 400),
        (b"GET /  HTTP/1.1", 400),
        (b"GET\t/ HTTP/1.1", 400),
        (b"GET /\tHTTP/1.1", 400),
        (b"GET /\x0bHTTP/1.1", 400),
        (b"GET / HTTP/1.1 ", 400),
        (b"GET / HTTP/1.1\t", 400),
        (b" GET / HTTP/1.1", 400),
        (b"GET /a b HTTP/1.1", 400),
        (b"GET / http/1.1", 400),
        (b"GET / HTTP/1", 400),
        (b"GET / HTTP/11.1", 400),
        (b"GET / HTTP/+1.1", 400),
        (b"GET / HTTP/1.1\rX: y", 400),
        (b"GET / RTSP/1.0", 400),
        (b"GET /\xc3\xa4 HTTP/1.1", 400),
        (b"G\xc3\x84T / HTTP/1.1", 400),
        (b"GET /a#b HTTP/1.1", 400),
        (b"GET x HTTP/1.1", 400),
        (b"GET * HTTP/1.1", 400),
        (b"GET http:/x HTTP/1.1", 400),
        (b"GET http:///x HTTP/1.1", 400),
        (b"GET http://:80/x HTTP/1.1", 400),
        (b"GET http://user@here/x HTTP/1.1", 400),
        (b"GET http://user:word@here/x HTTP/1.1", 400),
        (b"GET http://here\\@there/x HTTP/1.1", 400),
        (b"GET http://here:port/ HTTP/1.1", 400),
        (b"GET http://[::1/ HTTP/1.1", 400),
        (b"GET http://here/#b HTTP/1.1", 400),
        (b"GET ftp://here/x HTTP/1.1", 400),
        (b"GET here:80 HTTP/1.1", 400),
        (b"CONNECT here:80 HTTP/1.1", 501),
        (b"CONNECT / HTTP/1.1", 501),
    ],
)
def test_an_odd_request_line_is_refused(line, status):
    assert refused(line + b"\r\n" + HOST + b"\r\n") == status


@pytest.mark.parametrize(
    ("target", "host", "path"),
    [
        (b"http://there/v1/models?a=b", b"there", b"/v1/models?a=b"),
        (b"HTTP://There:80", b"There:80", b"/"),
        (b"https://there?a=/b", b"there", b"/?a=/b"),
        (b"http://[::1]:8000/x", b"[::1]:8000", b"/x"),
        (b"http://there//x", b"there", b"//x"),
        (b"/http://there/x", b"here", b"/http://there/x"),
        (b"//there/x", b"here", b"//there/x"),
        (b"/x?http://there", b"here", b"/x?http://there"),
    ],
)
def test_the_host_of_an_absolute_target_is_the_requests(target, host, path):
    assert host_and_path(b"GET " + target) == (host, path)


def test_options_may_ask_about_the_server_as_a_whole():
    assert host_and_path(b"OPTIONS *") == (b"here", b"*")
    assert host_and_path(b"OPTIONS http://there") == (b"there", b"*")
    assert host_and_path(b"OPTIONS http://there/") == (b"there", b"/")


@pytest.mark.parametrize(
    "headers",
    [
        b"",
        HOST + HOST,
        b"Host: here\r\nhost: there\r\n",
        b"Host: a b\r\n",
        b"Host: a,b\r\nHost: a\r\n",
        b"Host: user@here\r\n",
        b"Host: http://here\r\n",
        b"Host: here:80:80\r\n",
        b"Host: h\xc3\xa4r\r\n",
        HOST + b"No colon\r\n",
        HOST + b": no name\r\n",
        HOST + b"A : b\r\n",
        HOST + b"A: b\r\n folded\r\n",
        HOST + b"A: b\nB: c\r\n",
        HOST + b"A: b\rB: c\r\n",
        HOST + b"A: \x00\r\n",
        HOST + b"\xc3\xa4: b\r\n",
    ],
)
def test_odd_headers_are_refused(headers):
    for target in (b"/", b"http://here/"):
        assert refused(b"GET " + target + b" HTTP/1.1\r\n" + headers + b"\r\n") == 400


def test_http_1_0_needs_no_host_and_ends_its_connection():
    first, *rest = read(b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET /y HTTP/1.0\r\n\r\n").whole
    assert first == (b"GET", b"/x", "1.0", False, {b"connection": b"keep-alive"}, b"")
    assert rest == []
    [named] = read(b"GET http://here/x HTTP/1.0\r\n\r\n").whole
    assert named[4] == {b"host": b"here"}


def test_a_higher_minor_version_is_read_as_the_highest_known():
    [one] = read(b"GET /x HTTP/1.2\r\n" + HOST + b"\r\n").whole
    assert one[2:4] == ("1.1", True)


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00\x01\x00", b"\x80\x04\x95\x10c", b"GET /\x1b["])
def test_what_is_not_http_is_refused_before_a_line_ends(data):
    assert refused(data) == 400


@pytest.mark.parametrize("piece", [b"a", b"a:b\r\n", b"\r\n"])
@pytest.mark.parametrize("start", [b"", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nA: ", CHUNKED])
def test_what_does_not_end_is_refused(start, piece):
    with pytest.raises(APIError):
        read(start + piece * (MAX_HEADER_BYTES + 1))


def test_a_request_is_read_alone_and_a_few_lines_at_a_time():
    two = b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n" * 2
    parser = Requests().parser
    assert parser.feed_data(two) == len(two) / 2
    body = CHUNKED + b"1\r\nx\r\n" * 1000 + b"0\r\n\r\n"
    requests, num_turns = Requests(), 0
    while body:
        body = body[requests.parser.feed_data(body) :]
        num_turns += 1
    assert num_turns == 8
    assert requests.whole[0][-1] == b"x" * 1000


def test_a_body_has_no_more_chunks_than_are_allowed():
    assert len(read(CHUNKED + b"1\r\nx\r\n" * (MAX_CHUNKS - 1) + b"0\r\n\r\n").whole) == 1
    assert refused(CHUNKED + b"1\r\nx\r\n" * MAX_CHUNKS + b"0\r\n\r\n") == 400


@pytest.mark.parametrize(
    "body", [b"3\r\nabcd\r\n0\r\n\r\n", b"3\r\nabc0\r\n\r\n", b"3\nabc\r\n", b"-1\r\n", b"3\r\nabc\r\nx"]
)
def test_a_chunk_that_is_not_as_long_as_it_says_is_refused(body):
    assert refused(CHUNKED + body + b"\r\n") == 400
