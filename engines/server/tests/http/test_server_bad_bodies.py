"""Wrong bodies: 4xx with the parameter's name, nothing of the inside, and the server as it was."""

from __future__ import annotations

import json
import re

import pytest

from sagellm.server.http.body import MAX_BODY_BYTES, MAX_CONTAINERS, MAX_DEPTH, nesting_fault

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
INSIDE = re.compile(r"Traceback|File \"|site-packages|\.py\b|0x[0-9a-f]{6}|<[\w.]+ object|\x1b|\\r\\n")
NOT_NUMBERS = ["x", [], {}, True, "1", [1]]
NUMBERS = {
    "n": [0, -1, 129, 10**9, 1.5],
    "max_tokens": [-1, 2**31, 10**30, 0.5],
    "min_tokens": [-1, 2**31, 10**30],
    "temperature": [-0.1, 101, 1e300],
    "top_p": [0, -1, 1.01, 1e300],
    "top_k": [-2, 2**31, 0.5],
    "min_p": [-0.1, 1.1],
    "seed": [2**63, -(2**63) - 1, 0.5, 10**40],
    "presence_penalty": [-2.1, 2.1, 1e300],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1, 1001],
    "prompt_logprobs": [-1, 21],
    "priority": [2**40, 0.5],
}
LISTS = {
    "stop": ["", [""], [1], ["a"] * 65, "a" * 1025, {}, 1, True],
    "stop_token_ids": [[-1], [2**31], ["a"], [0.5], [True], [1] * 1025, 1, "a", [515]],
    "allowed_token_ids": [[-1], [2**31], ["a"], [1] * 1025, 1, [515]],
    "bad_words": [[""], [1], ["a"] * 65, ["a" * 1025], 1],
    "logit_bias": [
        {"1": 101},
        {"1": -101},
        {"a": 1},
        {"-1": 1},
        {"1": "x"},
        {"99999999": 1},
        {"515": 1},
        1,
        [],
    ],
    "stream": [1, "true", []],
    "ignore_eos": [1, "true"],
    "return_hidden_states": [1, "last"],
    "skip_special_tokens": [0, "x"],
    "return_tokens_as_token_ids": [1, "yes", []],
    "include_stop_str_in_output": [1],
    "stream_options": [1, [], {"include_usage": 1}, {"continuous_usage_stats": "yes"}],
    "cache_salt": ["", 1, "a" * 257],
    "extra_args": [
        1,
        [],
        {"a": {}},
        {"a": [[1]]},
        {"a": "b" * 1025},
        {"a b": 1},
        {"a\n": 1},
        {"a" * 65: 1},
        {"a": 2**60},
        {"a": [1] * 1025},
        {f"a{number}": 1 for number in range(33)},
        {f"a{number}": ["b" * 1000] * 100 for number in range(2)},
    ],
    "vllm_xargs": [1, {"a": {}}],
    "model": [1, "a" * 1025],
}
COMMON = [(name, value) for name, values in NUMBERS.items() for value in values + NOT_NUMBERS]
COMMON += [(name, value) for name, values in LISTS.items() for value in values]
OF_COMPLETIONS = [("logprobs", value) for value in (-1, 21, 1.5, "x", True)]
OF_COMPLETIONS += [("echo", 1), ("max_tokens", 0)]
OF_COMPLETIONS += [("best_of", value) for value in (0, -1, 129, 1.5, "2", True)]
OF_COMPLETIONS += [
    ("prompt", value)
    for value in (
        1,
        True,
        None,
        {},
        [],
        "",
        [""],
        [[]],
        [-1],
        [2**31],
        [515],
        ["a", 1],
        [[1], "a"],
        [0.5],
        [["a"]],
    )
]
OF_CHATS = [("logprobs", 1), ("top_logprobs", 21), ("top_logprobs", 2), ("max_completion_tokens", 0)]
OF_CHATS += [("max_tokens", 0), ("add_generation_prompt", 1), ("best_of", 2)]
OF_CHATS += [
    ("chat_template_kwargs", value)
    for value in (
        1,
        [],
        {"a": {}},
        {"a": []},
        {"a": 10**7},
        {"a": "b" * 1025},
        {"a-b": 1},
        {"__class__": 1},
        {f"a{number}": 1 for number in range(17)},
        *({name: "x"} for name in ("chat_template", "template", "messages", "tools", "documents")),
        *({name: True} for name in ("add_generation_prompt", "continue_final_message", "tokenize", "range")),
        {"eos_token": "x"},
        {"raise_exception": 1},
    )
]
OF_CHATS += [
    ("messages", value)
    for value in (
        1,
        [],
        None,
        {},
        [1],
        [{}],
        [{"role": 1}],
        [{"role": "boss"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": [1]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"text": "a"}]}],
        [{"role": "user", "content": "a", "name": 1}],
        [{"role": "user", "content": "a", "more": 1}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}] * 257}],
        [{"role": "user", "content": "a"}] * 4097,
    )
]
BASES = {COMPLETIONS: {"prompt": "a"}, CHATS: {"messages": [{"role": "user", "content": "a"}]}}
CASES = [(path, *case) for path in BASES for case in COMMON]
CASES += [(COMPLETIONS, *case) for case in OF_COMPLETIONS] + [(CHATS, *case) for case in OF_CHATS]


@pytest.fixture(scope="module")
def post(server):
    def send(path, content, status=400, **headers):
        answer = server.http.post(
            path, content=content, headers={"content-type": "application/json", **headers}
        )
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert not INSIDE.search(answer.text), answer.text
        assert len(answer.text) < 1000
        return error

    return send


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left(server, complete, all_blocks_are_back):
    before = complete(temperature=0)["choices"][0]["text"]
    yield
    assert complete(temperature=0)["choices"][0]["text"] == before
    assert all_blocks_are_back(server.front.engine)
    assert server.app.state.admission.num_live == 0


@pytest.mark.parametrize(("path", "name", "value"), CASES)
def test_a_wrong_value_is_refused_by_the_parameters_name(server, path, name, value):
    answer = server.http.post(path, json={**BASES[path], name: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"] or "").partition("[")[0].partition(".")[0] == name, error
    assert not INSIDE.search(answer.text), answer.text
    assert len(answer.text) < 1000


@pytest.mark.parametrize(
    "number",
    ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 400, "1" * 5000],
    ids=lambda text: text[:9],
)
@pytest.mark.parametrize("name", ["temperature", "top_p", "n", "max_tokens", "seed"])
def test_numbers_that_are_none(post, name, number):
    assert post(COMPLETIONS, f'{{"prompt": "a", "{name}": {number}}}')["param"] == name


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b"null",
        b'"a"',
        b'{"prompt": "\xff"}',
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b"{}{}",
    ],
)
def test_what_is_no_json_object_is_refused(post, body):
    assert post(COMPLETIONS, body)["code"] == "invalid_json"


@pytest.mark.parametrize(("path", "name"), [(COMPLETIONS, "prompt"), (CHATS, "messages")])
def test_a_missing_parameter_is_named(post, path, name):
    assert post(path, "{}")["param"] == name


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"prompt": ["a"] * 9, "n": 128}, "n"),
        ({"prompt": "a", "n": 128, "max_tokens": 4000, "logprobs": 20}, "logprobs"),
        ({"prompt": "a", "n": 2, "max_tokens": 513, "return_hidden_states": True}, "return_hidden_states"),
        ({"prompt": ["a"] * 10, "n": 100, "max_tokens": 4000}, "max_tokens"),
        ({"prompt": [[1] * 200] * 500, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": [[1] * 200] * 500, "logprobs": 20, "echo": True, "max_tokens": 1}, "logprobs"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 1_000_000, "max_tokens": 1}, "prompt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_budgets_of_products(post, body, name):
    assert post(COMPLETIONS, json.dumps(body))["param"] == name


def test_min_tokens_above_max_tokens(post):
    assert post(COMPLETIONS, '{"prompt": "a", "max_tokens": 4, "min_tokens": 5}')["param"] == "min_tokens"


def test_nothing_a_caller_wrote_reaches_a_terminal(post):
    error = post(COMPLETIONS, json.dumps({"prompt": "a", "\x1b[31m\r\nx": 1}))
    assert error["param"] == "?[31m??x"
    assert error["message"].isprintable()
    error = post(CHATS, json.dumps({"messages": [{"role": "\x1b[31m\n", "content": "a"}]}))
    assert error["message"].isprintable()


def test_more_than_the_memory_for_kv_takes(post):
    assert post(COMPLETIONS, '{"prompt": "a", "max_tokens": 4000}')["param"] == "max_tokens"


def test_a_limit_that_has_no_effect_must_be_valid(post):
    body = '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 0, "max_completion_tokens": 1}'
    assert post(CHATS, body)["param"] == "max_tokens"


@pytest.mark.parametrize("message", ['{"role": "user"}', '{"role": "system", "content": null}'])
def test_a_message_of_a_caller_has_content(post, message):
    error = post(CHATS, f'{{"messages": [{{"role": "user", "content": "a"}}, {message}]}}')
    assert error["param"] == "messages[1].content"


def test_options_of_a_stream_need_one(post):
    assert post(COMPLETIONS, '{"prompt": "a", "stream_options": {}}')["param"] == "stream_options"


@pytest.mark.parametrize("length", [5000, 200_000, 2_000_000])
def test_a_text_that_is_too_long(post, length):
    text = "xyz " * (length // 4)
    for path, body in (
        (COMPLETIONS, {"prompt": text}),
        (CHATS, {"messages": [{"role": "user", "content": text}]}),
    ):
        assert post(path, json.dumps(body))["code"] == "context_length_exceeded"


def test_a_prompt_of_ids_that_is_too_long(post):
    body = json.dumps({"prompt": [5] * 4096})
    assert post(COMPLETIONS, body)["code"] == "context_length_exceeded"


def test_another_model_is_not_found(post):
    assert post(COMPLETIONS, '{"prompt": "a", "model": "other"}', 404)["code"] == "model_not_found"


def test_a_body_of_too_many_bytes(post):
    body = json.dumps({"prompt": "a" * MAX_BODY_BYTES}).encode()
    assert post(COMPLETIONS, body, 413)["code"] == "body_too_large"
    assert post(COMPLETIONS, iter([body]), 413)["code"] == "body_too_large"  # in chunks, of no known length


@pytest.mark.parametrize("depth", [65, 100_000, 4_000_000])
def test_a_body_that_is_nested_too_deep(post, depth):
    assert post(COMPLETIONS, b'{"prompt": ' + b"[" * depth)["code"] == "too_deep"
    assert post(COMPLETIONS, b'{"a":' * (depth // 5 + 65))["code"] == "too_deep"


def test_a_body_of_too_many_small_objects(post):
    told = post(COMPLETIONS, b'{"prompt": [' + b"[]," * MAX_CONTAINERS + b"[]]}")
    assert (told["code"], "lists and objects" in told["message"]) == ("too_deep", True)


def test_depth_counts_brackets_outside_strings():
    assert not nesting_fault(b'{"prompt": "' + b"[" * 1000 + b'"}')
    assert not nesting_fault(b'{"prompt": "' + b'\\"[' * 1000 + b'"}')
    assert not nesting_fault(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    assert nesting_fault(b'["\\\\",' * (MAX_DEPTH + 1))
    assert not nesting_fault(b"[[],[]," * 2 + b"[]," * 1000)
    assert not nesting_fault(b'"' + b'\\"[' * 1_000_000)  # linear, though the string never ends


@pytest.mark.parametrize(
    "kind", ["text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_other_kinds_of_bodies_are_not_read(server, kind):
    answer = server.http.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": kind})
    assert answer.status_code == 415
    answer = server.http.post(COMPLETIONS, json={"prompt": "a"}, headers={"content-encoding": "gzip"})
    assert answer.status_code == 415


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_only_post_generates(server, path, method):
    answer = server.http.request(method, path, json={})
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == f"{path} takes POST, not {method}"
