"""What a refused body costs: memory in proportion to itself, and for a moment."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import threading
import tracemalloc
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from struct import pack
from types import SimpleNamespace

import httpx
import pytest
from msgspec import Struct

from sagellm.core import EngineDeadError, EngineError
from sagellm.server import memory
from sagellm.server.http.body import HeldBody, nesting_fault
from sagellm.server.http.body_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from sagellm.server.http.errors import APIError
from sagellm.server.http.json_values import PromptLimits, items
from sagellm.server.http.parsing import parse_now
from sagellm.testing.patience import PATIENCE_S, wait_until

SIZE = 1_000_000  # of bodies that are parsed here
SERVED_SIZE = 7_600_000
LIMITS = PromptLimits(num_characters=1 << 17, num_tokens=4096)


def filled(head: bytes, item: bytes, tail: bytes, *, size: int) -> bytes:
    """Repeat an item until the body has a size."""
    return head + item * ((size - len(head) - len(tail)) // len(item)) + tail


def emoji(head: bytes, tail: bytes, *, size: int) -> bytes:
    return filled(head, b"a", "😀".encode() + tail, size=size)


HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)
MESSAGE = b'{"role": "user", "content": '


def bodies(size: int) -> dict[str, tuple[type[Struct], bytes]]:
    """Return bodies of about a size that are refused."""
    f, e = partial(filled, size=size), partial(emoji, size=size)
    return {
        "texts": (CompletionBody, f(b'{"prompt": [', b'"a",', b'"a"]}')),
        "ids": (CompletionBody, f(b'{"prompt": [', b"999,", b"1]}")),
        "small ids": (CompletionBody, f(b'{"prompt": [', b"1,", b"1]}")),
        "lists of ids": (CompletionBody, f(b'{"prompt": [', b"[9999],", b"[1]]}")),
        "a long list of ids": (CompletionBody, f(b'{"prompt": [[1],[', b"1,", b"1]]}")),
        "nulls": (CompletionBody, f(b'{"prompt": [', b"null,", b"null]}")),
        "a wide text": (CompletionBody, e(b'{"prompt": "', b'"}')),
        "wide texts": (CompletionBody, e(b'{"prompt": ["a", "', b'"]}')),
        "a text that is not UTF-8": (CompletionBody, f(b'{"prompt": "', b"a", b'\xff"}')),
        "stop": (CompletionBody, f(b'{"prompt": "a", "stop": [', b'"a",', b'"a"]}')),
        "stop ids": (CompletionBody, f(b'{"prompt": "a", "stop_token_ids": [', b"1,", b"1]}")),
        "bias": (CompletionBody, f(b'{"prompt": "a", "logit_bias": {', b'"1":1,', b'"2":1}}')),
        "extra": (CompletionBody, f(b'{"prompt": "a", "extra_args": {"a": [', b"1,", b"1]}}")),
        "options": (CompletionBody, f(b'{"prompt": "a", "stream_options": {', b'"a":1,', b'"b":1}}')),
        "a model": (CompletionBody, e(b'{"prompt": "a", "model": "', b'"}')),
        "parameters": (CompletionBody, f(b"{", b'"a":1,', b'"prompt": "a"}')),
        "an unknown parameter": (CompletionBody, f(b'{"prompt": "a", "x": [', b'"a",', b'"a"]}')),
        "tools": (ChatBody, f(b'{"messages": [], "tools": [', b'{"a":1},', b"1]}")),
        "messages": (ChatBody, f(b'{"messages": [', MESSAGE + b'"a"},', MESSAGE + b'"a"}]}')),
        "texts as messages": (ChatBody, f(b'{"messages": [', b'"a",', b'"a"]}')),
        "lists as messages": (ChatBody, f(b'{"messages": [', b"[],", b"[]]}")),
        "a wide message": (ChatBody, e(b'{"messages": [' + MESSAGE + b'"', b'"}]}')),
        "parts": (
            ChatBody,
            f(b'{"messages": [' + MESSAGE + b"[", b'{"type":"text","text":"a"},', b"1]}]}"),
        ),
        "texts as parts": (ChatBody, f(b'{"messages": [' + MESSAGE + b"[", b'"a",', b"1]}]}")),
        "a wide part": (ChatBody, e(b'{"messages": [' + MESSAGE + b'[{"type":"text","text":"', b'"}]}]}')),
        "fields of a message": (ChatBody, f(b'{"messages": [{', b'"a":1,', b'"role": "user"}]}')),
        "fields of a part": (ChatBody, f(b'{"messages": [' + MESSAGE + b"[{", b'"a":1,', b'"b":1}]}]}')),
        "the same field": (
            ChatBody,
            e(b'{"messages": [{"content": "', b'", "content": 1, "role": "user"}]}'),
        ),
        "nesting": (CompletionBody, f(b'{"prompt": ', b"[", b"")),
        "objects": (CompletionBody, f(b'{"prompt": [', b"{},", b"{}]}")),
        "wide tokenize": (TokenizeBody, e(b'{"prompt": "', b'"}')),
        "detokenize": (DetokenizeBody, f(b'{"tokens": [', b"999,", b"1]}")),
    }


BODIES = bodies(SIZE)
PATHS = {
    CompletionBody: "/v1/completions",
    ChatBody: "/v1/chat/completions",
    TokenizeBody: "/tokenize",
    DetokenizeBody: "/detokenize",
}


@pytest.mark.parametrize("name", BODIES)
def test_a_refused_body_is_not_decoded(name):
    kind, body = BODIES[name]
    data = bytearray(body)
    if nesting_fault(data) is not None:
        return
    tracemalloc.start()
    try:
        with pytest.raises(APIError) as caught:
            parse_now(data, kind, LIMITS)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.status == 400
    assert peak < len(body), f"{peak / len(body):.1f} times the body beside itself"


UNKNOWN = b",".join(b'"field%d%%07d":1' % number for number in range(62))


@pytest.mark.parametrize("name", [*BODIES, "unknown fields of messages"])
def test_a_lenient_server_decodes_no_more(name):
    if name in BODIES:
        kind, data = BODIES[name][0], bytearray(BODIES[name][1])
    else:  # all of them different
        part = b'{"role": "user", "content": "a", ' + UNKNOWN + b"}"
        messages = [part % ((number,) * 62) for number in range(SIZE // len(part))]
        kind, data = ChatBody, bytearray(b'{"messages": [%b]}' % b",".join(messages))
    if nesting_fault(data) is not None:
        return
    tracemalloc.start()
    try:
        with suppress(APIError):
            parse_now(data, kind, LIMITS, is_lenient=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < len(data), f"{peak / len(data):.1f} times the body beside itself"


def test_prompts_of_ids_take_four_bytes_a_token():
    body = bytearray(filled(b'{"prompt": [', b"[%b1]," % (b"99999," * 1000), b"[1]]}", size=3_000_000))
    tracemalloc.start()
    parsed = parse_now(body, CompletionBody, LIMITS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(parsed.body.prompt, list)
    assert list(parsed.body.prompt[0][-2:]) == [99999, 1]
    assert peak < 1.2 * len(body)


@pytest.mark.parametrize(
    "values",
    [[], [1], ["a"], [[]], ["a,b", "]", '\\"', "\\"], [[1, 2], [3]], [{"a": [1, "]}"]}, None, -1.5e3, ""]],
)
@pytest.mark.parametrize("separators", [(",", ":"), (" ,\n ", " : ")])
def test_items_are_those_of_the_list(values, separators):
    text = json.dumps(values, separators=separators)
    assert [json.loads(bytes(item)) for item in items(memoryview(text.encode()))] == values
    text = "[ " + text[1:-1] + "\n]"
    assert [json.loads(bytes(item)) for item in items(memoryview(text.encode()))] == values


def test_a_refused_body_is_freed_without_a_garbage_collection(scripted):
    server = scripted("a", "length")
    _, body = BODIES["stop"]
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(3):
            answer = server.http.post(
                "/v1/completions", content=body, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 400
        # The server may free it just after the answer.
        wait_until(lambda: tracemalloc.get_traced_memory()[0] < len(body) / 2, "it stays in memory")
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.mark.parametrize(
    ("end", "fields"),
    [
        ("length", {}),
        (EngineError("broken"), {}),
        (EngineDeadError("it is gone"), {}),
        (None, {"deadline_ms": 100}),
        (None, {}),
    ],
    ids=["it ends", "it fails", "the engine dies", "it is late", "its client leaves"],
)
@pytest.mark.parametrize("prompt", [[1], [[1], [2]]], ids=["one prompt", "two prompts"])
def test_what_was_generated_is_freed_without_a_garbage_collection(
    scripted, until, monkeypatch, end, fields, prompt
):
    """200 streams that nobody read left half a gigabyte in the server, for as long as it was idle."""
    server = scripted("a", "b", end)
    add_job, streams = server.front.add_job, []

    async def add(*args, **options):
        added = await add_job(*args, **options)
        streams.extend(map(weakref.ref, added))
        return added

    server.front.add_job = add
    monkeypatch.setattr("sagellm.server.http.errors.logger.disabled", True)  # pytest keeps what is logged
    body = json.dumps({"prompt": prompt, "stream": True, **fields}).encode()
    gc.collect()
    gc.disable()
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, pack("ii", 1, 0))  # reset at its end
            connection.sendall(HEAD % len(body) + body)
            told = b""
            while b"[DONE]" not in told and b'"error"' not in told and (end or fields or b"data" not in told):
                told += connection.recv(1 << 16)
        until(lambda: streams and not any(stream() for stream in streams))
    finally:
        gc.enable()


def test_freed_memory_is_given_back_on_a_thread_of_its_own(monkeypatch, until):
    threads: list[int] = []

    def trim(_):
        threads.append(threading.get_ident())
        if len(threads) > 2:
            threading.Event().wait()

    monkeypatch.setattr(memory, "_RETURN_S", 0.0)
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: SimpleNamespace(malloc_trim=trim))
    memory.keep_returning_memory()
    until(lambda: len(threads) == 3)
    assert threading.get_ident() not in threads
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: SimpleNamespace())
    memory.keep_returning_memory()  # without glibc


def test_a_body_counts_until_it_is_parsed(scripted):
    server = scripted("a", "length")
    held = []
    original = HeldBody.release

    def release(self):
        held.append(len(self.data))
        original(self)

    HeldBody.release = release
    try:
        assert server.http.post("/v1/completions", json={"prompt": [1]}).status_code == 200
    finally:
        HeldBody.release = original
    assert held == [len(b'{"prompt":[1]}'), 0]


def memory_mib(pid: int, field: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(field)


def started(environment: dict[str, str]) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "sagellm.engines.cli", "llm", "serve", "--port", "0"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if " serves " in line:
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, line.partition(" at ")[2].partition("/v1")[0]
    raise AssertionError("the server ended")


@pytest.mark.full
def test_a_server_stays_small_and_gives_memory_back(tmp_path):
    """Six bodies at once, three rounds of each kind; the peak is the kernel's own count."""
    process, url = started({**os.environ, "SAGELLM_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"})
    statuses: set[int] = set()

    def post(path: str, body: bytes) -> None:
        answer = httpx.post(
            url + path,
            content=body,
            headers={"content-type": "application/json"},
            timeout=PATIENCE_S,
            verify=False,
        )
        statuses.add(answer.status_code)

    def post_six(path: str, body: bytes) -> None:
        threads = [threading.Thread(target=post, args=(path, body)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    try:
        post("/v1/completions", b'{"prompt": "a", "max_tokens": 1}')
        assert statuses == {200}
        before = memory_mib(process.pid, "VmRSS")
        all_bodies = bodies(SERVED_SIZE)
        for name in ("texts", "ids", "messages", "parts", "stop", "a wide text", "an unknown parameter"):
            kind, body = all_bodies[name]
            statuses.clear()
            base = memory_mib(process.pid, "VmRSS")
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")
            for _ in range(3):
                post_six(PATHS[kind], body)
            peak = memory_mib(process.pid, "VmHWM") - base
            assert (statuses, peak < 4 * 6 * len(body) / 2**20) == ({400}, True), (name, statuses, peak)
        wait_until(lambda: memory_mib(process.pid, "VmRSS") <= before + 16, "memory is not given back")
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
