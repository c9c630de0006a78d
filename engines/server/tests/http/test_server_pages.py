"""What is there beside generating: ids of requests, the tokenizer, the page for browsers."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import socket
import threading

import httpx
import pytest

from sagellm.engines import __version__
from sagellm.engines.loading.tokenizer import load_tokenizer
from sagellm.testing.patience import PATIENCE_S

HEX = re.compile(r"[0-9a-f]{32}")
CHAT = [{"role": "user", "content": "Is it far?"}]


@pytest.fixture(scope="module")
def tokenize(server):
    def post(path="/tokenize", status=200, **fields):
        answer = server.http.post(path, json=fields)
        assert answer.status_code == status, answer.text
        return answer.json() if status == 200 else answer.json()["error"]

    return post


class TestRequestIds:
    @pytest.mark.parametrize(
        "given", ["abc-123", "a" * 128, "0af7651916cd43dd8448eb211c80319c", "user:7/run=3"]
    )
    def test_a_clients_id_comes_back(self, server, given):
        answer = server.http.get("/version", headers={"x-request-id": given})
        assert answer.headers["x-request-id"] == given

    @pytest.mark.parametrize("given", ["", "a" * 129, "a b", "<script>", "a,b", b"\xff", '"'])
    def test_an_odd_id_is_replaced(self, server, given):
        raw = given if isinstance(given, bytes) else given.encode()
        answer = server.http.get("/version", headers={"x-request-id": raw})
        assert HEX.fullmatch(answer.headers["x-request-id"])

    def test_two_ids_are_none(self, server):
        answer = server.http.get("/version", headers=[("x-request-id", "a"), ("x-request-id", "b")])
        assert HEX.fullmatch(answer.headers["x-request-id"])

    def test_every_answer_has_one(self, scripted):
        server = scripted("a", "length", api_keys=("key",))
        key = {"authorization": "Bearer key"}
        json, bad = {"prompt": [1]}, {"prompt": [1], "n": 0}
        answers = [
            server.http.get("/nothing", headers=key),
            server.http.get("/v1/models"),
            server.http.get("/health", headers={"host": "evil.example"}),
            server.http.put("/v1/models", headers=key, json={}),
            server.http.post("/v1/completions", headers=key, content=b"x"),
            server.http.post("/v1/completions", headers=key, json=bad),
            server.http.post("/v1/completions", headers=key, json=json),
            server.http.post("/v1/completions", headers=key, json={**json, "stream": True}),
            server.http.get("/tokenizer_info", headers=key),
        ]
        assert [answer.status_code for answer in answers] == [404, 401, 403, 405, 415, 400, 200, 200, 404]
        ids = [answer.headers.get_list("x-request-id") for answer in answers]
        assert all(len(each) == 1 and HEX.fullmatch(each[0]) for each in ids)
        assert len({each[0] for each in ids}) == len(ids)

    def test_an_answer_made_by_no_endpoint_has_one(self, scripted, monkeypatch):
        server = scripted()

        def fail(*_):
            raise ValueError("secret")

        monkeypatch.setattr(server.app.state.service.metrics, "render", fail)
        answer = server.http.get("/metrics")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert HEX.fullmatch(answer.headers["x-request-id"])
        assert "secret" not in answer.text

    def test_without_a_clients_id_it_is_the_answers(self, server):
        answer = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"

    def test_two_requests_with_one_id_both_run_and_the_log_joins_the_ids(self, server, caplog, until):
        caplog.set_level(logging.INFO)
        body, headers = {"prompt": "a", "max_tokens": 1}, {"x-request-id": "mine"}
        answers = [server.http.post("/v1/completions", json=body, headers=headers) for _ in range(2)]
        assert [answer.headers["x-request-id"] for answer in answers] == ["mine"] * 2
        ids = [answer.json()["id"].removeprefix("cmpl-") for answer in answers]
        assert len(set(ids)) == 2
        for each in ids:  # a line may come just after the answer
            until(lambda each=each: any(each in line and "mine" in line for line in caplog.messages))


class TestTokenizer:
    def test_a_text_becomes_what_a_completion_reads(self, tokenize, server, complete):
        answer = tokenize(prompt="The river has three names", return_token_strs=True)
        ids = server.front.tokenizer("The river has three names")["input_ids"]
        assert answer["tokens"] == ids
        assert answer["count"] == len(ids) == complete("The river has three names")["usage"]["prompt_tokens"]
        assert answer["max_model_len"] == server.front.max_model_len
        assert answer["token_strs"] == server.front.tokenizer.convert_ids_to_tokens(ids)
        assert tokenize(prompt="a")["token_strs"] is None
        assert tokenize(prompt="")["tokens"] == []

    def test_messages_become_what_a_chat_reads(self, tokenize, chat):
        answer = tokenize(messages=CHAT, model="small")
        assert answer["count"] == chat("Is it far?", max_tokens=1)["usage"]["prompt_tokens"]
        assert tokenize(messages=CHAT, add_generation_prompt=False)["count"] < answer["count"]

    def test_control_tokens_of_a_message_are_text(self, tokenize, server):
        sly = [{"role": "user", "content": "<|im_end|>"}]
        plain = [{"role": "user", "content": "a"}]
        eos = server.front.tokenizer.eos_token_id
        assert tokenize(messages=sly)["tokens"].count(eos) == tokenize(messages=plain)["tokens"].count(eos)

    def test_there_and_back(self, tokenize):
        text = "Bread — naïve ⚓🌊, 3 < 4\n"
        assert tokenize("/detokenize", tokens=tokenize(prompt=text)["tokens"]) == {"prompt": text}
        assert tokenize("/detokenize", tokens=[]) == {"prompt": ""}

    def test_more_than_the_model_takes_can_be_counted(self, tokenize, server):
        text = "xy " * (server.front.max_model_len + 10)
        assert tokenize(prompt=text)["count"] > server.front.max_model_len

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({}, "prompt"),
            ({"prompt": "a", "messages": CHAT}, "prompt"),
            ({"prompt": ["a"]}, "prompt"),
            ({"prompt": "a" * 8_000_000}, "prompt"),
            ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
            ({"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
            ({"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
            ({"messages": CHAT, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
            ({"messages": CHAT, "chat_template": "x"}, "chat_template"),
            ({"messages": []}, "messages"),
            ({"prompt": "a", "promt": "b"}, "promt"),
        ],
        ids=str,
    )
    def test_a_wrong_value_is_named(self, tokenize, fields, param):
        assert tokenize(status=400, **fields)["param"].partition("[")[0] == param

    @pytest.mark.parametrize(
        "tokens", [None, "a", [-1], [2**31], ["a"], [515], [1] * 100_000 + [10**6], [[1]], [5] * 1_000_000]
    )
    def test_wrong_tokens_are_named(self, tokenize, tokens):
        assert tokenize("/detokenize", status=400, tokens=tokens)["param"].partition("[")[0] == "tokens"

    def test_another_model_is_not_found(self, tokenize):
        assert tokenize(status=404, prompt="a", model="other")["code"] == "model_not_found"
        assert tokenize("/detokenize", status=404, tokens=[1], model="other")["code"] == "model_not_found"

    def test_without_a_tokenizer_there_is_nothing(self, scripted):
        server = scripted()
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert server.http.post(path, json=body).status_code == 400
        assert server.http.get("/tokenizer_info").json()["error"]["code"] == "no_tokenizer"

    def test_a_draining_server_tokenizes_no_more(self, scripted):
        server = scripted()
        server.app.state.admission.start_draining()
        assert server.http.post("/tokenize", json={"prompt": "a"}).status_code == 503

    def test_a_long_text_does_not_stop_the_others(self, scripted):
        is_tokenizing, may_go_on = threading.Event(), threading.Event()

        def read(text, **_):
            is_tokenizing.set()
            assert may_go_on.wait(PATIENCE_S)
            return {"input_ids": [1]}

        server = scripted(tokenizer=read)
        answers = []
        slow = threading.Thread(
            target=lambda: answers.append(server.http.post("/tokenize", json={"prompt": "a" * 5000}))
        )
        slow.start()
        assert is_tokenizing.wait(PATIENCE_S)
        assert httpx.get(f"{server.url}/version", timeout=PATIENCE_S, verify=False).json() == {
            "version": __version__
        }
        may_go_on.set()
        slow.join(PATIENCE_S)
        assert [answer.json()["count"] for answer in answers] == [1]

    def test_its_settings_are_told_and_no_path_of_this_machine(self, server, checkpoint):
        info = server.http.get("/tokenizer_info").json()
        assert info["tokenizer_class"] == type(load_tokenizer(checkpoint)).__name__
        assert info["vocab_size"] == len(server.front.tokenizer)
        assert info["chat_template"] == server.front.tokenizer.chat_template
        assert info["eos_token"] == server.front.tokenizer.eos_token
        assert str(checkpoint) not in str(info)


class TestStartPage:
    def test_it_shows_the_model_the_address_and_a_request_that_works(self, server):
        answer = server.http.get("/")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "<code>small</code>" in answer.text
        assert f"<code>{server.url}/v1</code>" in answer.text
        assert f"curl {server.url}/v1/chat/completions" in answer.text
        assert "Authorization" not in answer.text

    def test_its_policy_allows_its_own_style_and_nothing_else(self, server):
        answer = server.http.get("/")
        policy = answer.headers["content-security-policy"]
        (style,) = re.findall(r"<style>(.*?)</style>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}';")
        assert not re.search(r"<script|<img|<link| style=| on[a-z]+=|javascript:", answer.text)

    def test_with_keys_it_names_no_model(self, serve):
        answer = serve(api_keys=("secret-key",), served_model_name=("secret-model",)).http.get("/")
        assert answer.status_code == 200
        assert "secret" not in answer.text
        assert "Authorization: Bearer $API_KEY" in answer.text

    def test_names_and_hosts_are_text(self, scripted):
        server = scripted(served_model_name=("<b>&'",))
        assert "&lt;b&gt;&amp;&#x27;" in server.http.get("/").text
        odd = "a';alert(1)&b"
        page = scripted(allowed_hosts=(odd,)).http.get("/", headers={"host": odd})
        assert page.status_code == 200
        assert "alert" not in page.text
        assert "<code>http://HOST/v1</code>" in page.text

    def test_head_gives_the_headers_alone(self, server):
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
            connection.sendall(b"HEAD / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"\r\n\r\n")

    def test_post_is_refused(self, server):
        assert server.http.post("/", json={}).status_code == 405


def test_ping_is_health(server, scripted):
    assert server.http.get("/ping").status_code == 200
    other = scripted()
    other.front.is_responsive = False
    assert other.http.get("/ping").status_code == 503
