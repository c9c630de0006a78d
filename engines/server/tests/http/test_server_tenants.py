"""Keys as tenants of a server: who is charged, who gets 429, and what is late."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import httpx
import pytest

from sagellm.core import Runtime, Tenant, VirtualClock
from sagellm.server.http.access_control import tenant_of
from sagellm.testing.patience import PATIENCE_S

KEYS = ("sk-red name=red weight=2 trusted", "sk-blue max_requests=3 max_tokens=60")
BODY = {"prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": True}
LOCAL = {"metrics_allow": ("127.0.0.1",)}


def post(server, key, **fields):
    headers = {"authorization": f"Bearer {key}"}
    return server.http.post("/v1/completions", json={**BODY, **fields}, headers=headers)


@pytest.fixture
def pass_deadline(monkeypatch):
    """Let the time of the requests that run be over."""
    limits = []

    def timeout(delay_s):
        limits.append(
            (asyncio.get_running_loop(), asyncio.Timeout(asyncio.get_running_loop().time() + delay_s))
        )
        return limits[-1][1]

    def end():
        for loop, limit in limits:
            loop.call_soon_threadsafe(limit.reschedule, 0.0)

    monkeypatch.setattr(
        "sagellm.server.http.job_streams.asyncio", SimpleNamespace(**vars(asyncio) | {"timeout": timeout})
    )
    return end


class Asking:
    """A request that is sent from a thread of its own."""

    def __init__(self, server, body):
        self._answers = []
        self._thread = threading.Thread(target=self._ask, args=(server, body))
        self._thread.start()

    def _ask(self, server, body):
        self._answers.append(server.http.post("/v1/completions", json=body))

    def answer(self):
        self._thread.join(PATIENCE_S)
        (answer,) = self._answers
        return answer


def code_of(answer):
    return answer.status_code, (answer.json().get("error") or {}).get("code")


def test_a_key_is_charged_as_its_options_say(scripted):
    server = scripted("a", "length", api_keys=KEYS)
    post(server, "sk-red", priority=-5).raise_for_status()
    post(server, "sk-blue", user="red").raise_for_status()
    red, blue = server.front.requests
    assert (red["tenant"], red["priority"]) == (Tenant("red", 2.0, True), 5)
    assert red["namespace"].tenant == tenant_of(b"sk-red"), "the name is only for people"
    assert blue["tenant"] == Tenant(blue["namespace"].tenant)


def test_without_keys_everybody_is_the_default_tenant(scripted):
    server = scripted("a", "length")
    post(server, "sk-red").raise_for_status()
    assert server.front.requests[0]["tenant"] == Tenant()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"n": 4}, "tenant_queue_full"),
        ({"best_of": 4}, "tenant_queue_full"),
        ({"n": 1, "best_of": 4}, "tenant_queue_full"),
        ({"prompt": [[5], [6], [7], [8]]}, "tenant_queue_full"),
        ({"prompt": [[5], [6]], "n": 2}, "tenant_queue_full"),
        ({"max_tokens": 58}, "tenant_tokens_full"),
        ({"max_tokens": 20, "n": 3}, "tenant_tokens_full"),
        ({"prompt": [5] * 56}, "tenant_tokens_full"),
    ],
)
def test_a_key_over_its_quota_gets_429_and_another_does_not(scripted, fields, code):
    server = scripted("a", "length", api_keys=KEYS)
    answer = post(server, "sk-blue", **fields)
    assert (code_of(answer), answer.headers["x-should-retry"]) == ((429, code), "false")
    assert post(server, "sk-blue").status_code == 200
    server.front.requests.clear()
    assert code_of(post(server, "sk-red", **fields))[0] != 429
    assert server.front.requests


def test_a_quota_may_be_the_same_for_all_keys(scripted):
    server = scripted("a", "length", api_keys=KEYS, max_requests_per_key=2, max_tokens_per_key=500)
    assert code_of(post(server, "sk-red", n=3)) == (429, "tenant_queue_full")
    assert code_of(post(server, "sk-red", max_tokens=498)) == (429, "tenant_tokens_full")
    assert code_of(post(server, "sk-blue", n=4)) == (429, "tenant_queue_full"), "its own goes first"


def test_a_key_that_floods_is_refused_and_another_is_not(scripted, until):
    server = scripted(None, api_keys=("sk-a", "sk-b", "sk-c"), max_num_seqs=4, max_queued_requests=8, **LOCAL)
    admission = server.app.state.admission
    codes = []

    def send():
        codes.append(code_of(post_alone(server, "sk-a")))

    threads = [threading.Thread(target=send, daemon=True) for _ in range(20)]
    for thread in threads:
        thread.start()
    until(lambda: len(codes) == 14)
    assert set(codes) == {(429, "tenant_queue_full")}
    assert admission.num_live == 6
    server.front.script = ("a", "length")
    for key in ("sk-b", "sk-c"):
        assert post_alone(server, key).status_code == 200
    page = server.http.get("/metrics").text
    [line] = [
        line
        for line in page.splitlines()
        if line.startswith("sagellm:requests_refused_total")
        and f'tenant="{tenant_of(b"sk-a")}"' in line
        and 'code="tenant_queue_full"' in line
    ]
    assert float(line.split()[-1]) == 14


def post_alone(server, key):
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(
        f"{server.url}/v1/completions", json=BODY, headers=headers, timeout=PATIENCE_S, verify=False
    )


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_texts_of_one_key_do_not_wait_for_those_of_another(scripted, until, path):
    """Of each key one text is tokenized at a time, so that the others do not fill the workers' queue."""
    begun, may_go_on = [], threading.Event()

    def tokenize(text, **_):
        begun.append(text[0])
        assert text[0] != "a" or may_go_on.wait(PATIENCE_S)
        return {"input_ids": [1]}

    server = scripted("word", "length", tokenizer=tokenize, api_keys=("sk-a", "sk-b"))

    def send(key, text):
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": text * 5000}
        answer = httpx.post(
            f"{server.url}{path}", json=body, headers=headers, timeout=PATIENCE_S, verify=False
        )
        answers.append(answer.status_code)

    answers = []
    threads = [threading.Thread(target=send, args=("sk-a", "a"), daemon=True) for _ in range(5)]
    for thread in threads:
        thread.start()
    until(lambda: server.app.state.admission.num_live == 5)
    until(lambda: begun)
    send("sk-b", "b")
    assert begun.count("a") == 1
    assert answers == [200]
    may_go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert answers == [200] * 6


def test_metrics_count_tokens_by_tenant_and_show_no_key(scripted):
    server = scripted("a", "b", "length", api_keys=KEYS, **LOCAL)
    for _ in range(3):
        post(server, "sk-red").raise_for_status()
    page = server.http.get("/metrics").text
    assert 'sagellm:tenant_generation_tokens_total{engine="0",model_name="small",tenant="red"} 6.0' in page
    assert 'sagellm:tenant_prompt_tokens_total{engine="0",model_name="small",tenant="red"} 9.0' in page
    assert 'sagellm:tenant_sequences{engine="0",model_name="small",tenant="red"} 0.0' in page
    assert "sk-" not in page


def test_there_are_at_most_a_hundred_labels_and_one_for_the_rest(scripted):
    keys = tuple(f"sk-{number} name=t{number}" for number in range(150))
    server = scripted("a", "length", api_keys=keys, **LOCAL)
    for number in (0, 120, 149):
        post(server, f"sk-{number}").raise_for_status()
    page = server.http.get("/metrics").text
    lines = [line for line in page.splitlines() if line.startswith("sagellm:tenant_generation_tokens_total{")]
    assert len(lines) == 101
    assert [line.split()[-1] for line in lines if 'tenant="other"' in line] == ["2.0"]


@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, 86_400_001, 10**30])
def test_a_deadline_is_milliseconds_up_to_a_day(scripted, value):
    answer = scripted("a", "length").http.post("/v1/completions", json={**BODY, "deadline_ms": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "deadline_ms")


def test_the_engine_hears_how_much_time_is_left(scripted, monkeypatch):
    seconds = count()  # one passes between two looks at the clock
    clock = SimpleNamespace(perf_counter=lambda: float(next(seconds)))
    monkeypatch.setattr("sagellm.server.http.generation.time", clock)
    server = scripted("a", "length", deadline_ms=60_000)
    post(server, "any")
    post(server, "any", deadline_ms=30_000)
    assert [request["deadline_ms"] for request in server.front.requests] == [59_000, 29_000]
    for given, allowed in (({}, 3_599_000), ({"deadline_ms": None}, None)):
        server = scripted("a", "length", **given)
        post(server, "any")
        assert server.front.requests[0]["deadline_ms"] == allowed


@pytest.mark.parametrize("script", [(None,), ("deadline",), ("a", None), ("a", "deadline")])
def test_a_late_answer_is_504(scripted, until, pass_deadline, script):
    server = scripted(*script)
    asking = Asking(server, {**BODY, "deadline_ms": 3_600_000})
    until(lambda: server.front.requests)
    if None in script:  # the engine says nothing
        pass_deadline()
    answer = asking.answer()
    assert code_of(answer) == (504, "deadline_exceeded")
    assert answer.json()["error"]["type"] == "timeout_error"
    assert server.front.closed == 1
    assert server.app.state.admission.num_live == 0
    assert 'finished_reason="deadline",model_name="small"} 1.0' in server.http.get("/metrics").text


@pytest.mark.parametrize("script", [("a", None), ("a", "deadline")])
def test_a_late_stream_ends_with_an_error_event(scripted, pass_deadline, script):
    server = scripted(*script)
    body = {**BODY, "deadline_ms": 3_600_000, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        events = [next(lines)]
        if None in script:  # the engine says no more
            pass_deadline()
        events += [line for line in lines if line]
    assert '"text":"a"' in events[0]
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert (error["code"], error["param"]) == ("deadline_exceeded", "deadline_ms")
    assert "data: [DONE]" not in events


def test_all_prompts_of_a_late_stream_count_as_late(scripted):
    server = scripted("a", "deadline")
    body = {**BODY, "prompt": [[5], [6], [7]], "deadline_ms": 60_000, "stream": True}
    assert "deadline_exceeded" in server.http.post("/v1/completions", json=body).text
    assert 'finished_reason="deadline",model_name="small"} 3.0' in server.http.get("/metrics").text


def test_a_deadline_ends_work_in_the_engine_too(serve, hold, until):
    clock = VirtualClock()
    server = serve(engine={"max_num_seqs": 1, "runtime": replace(Runtime.system(seed=0), clock=clock)})
    engine = server.front.engine
    go_on = hold(engine, 5)
    asking = Asking(server, {**BODY, "max_tokens": 120, "n": 4, "deadline_ms": 3_600_000})
    until(lambda: engine.metrics().num_running)
    clock.advance_ns(3_600_000_000_001)
    go_on.set()
    assert code_of(asking.answer()) == (504, "deadline_exceeded")
    until(lambda: not engine.has_unfinished_requests())
    pool, cache = engine.metrics().modules["kv_pool"], engine.metrics().modules["prefix_cache"]
    assert pool.total_blocks - pool.num_free_blocks == cache.num_blocks
    assert server.http.post("/v1/completions", json=BODY).status_code == 200
