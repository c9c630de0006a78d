"""What each parameter does, over HTTP, beside the engine's own answer."""

from __future__ import annotations

import numpy as np
import pytest

from sagellm.core import Namespace
from sagellm.engines import SamplingParams
from sagellm.engines.requests.outputs import CompletionOutput
from sagellm.server.http.shape import likeliest

PROMPT = "The river has three names"


def text(answer):
    return answer["choices"][0]["text"]


def content(answer):
    return answer["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def reference(make_engine):
    """What the engine alone answers."""
    engine = make_engine()

    def generate(prompt=PROMPT, **params):
        return engine.generate(prompt, SamplingParams(temperature=0.0, **{"max_tokens": 8, **params}))[0]

    generate.tokenizer = engine.tokenizer
    return generate


def test_a_greedy_completion_is_the_engines(complete, reference):
    answer = complete(PROMPT, temperature=0)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "small"
    expected = reference()
    assert text(answer) == expected.outputs[0].text
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["total_tokens"] == len(expected.prompt_token_ids) + 8


def test_a_chat_goes_through_the_models_template(chat, reference):
    messages = [{"role": "user", "content": "Is it far?"}]
    rendered = reference.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    answer = chat("Is it far?", temperature=0)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert content(answer) == reference(rendered).outputs[0].text
    assert answer["usage"]["prompt_tokens"] == len(reference.tokenizer(rendered)["input_ids"])


def test_without_a_generation_prompt(chat, reference):
    messages = [{"role": "user", "content": "Is it far?"}]
    rendered = reference.tokenizer.apply_chat_template(messages, add_generation_prompt=False, tokenize=False)
    assert content(chat("Is it far?", temperature=0, add_generation_prompt=False)) == (
        reference(rendered).outputs[0].text
    )


def test_parts_of_text_are_joined_by_line_ends(chat):
    parts = [{"type": "text", "text": "Is it"}, {"type": "text", "text": "far?"}]
    assert content(chat(parts, temperature=0)) == content(chat("Is it\nfar?", temperature=0))


def test_control_tokens_in_a_message_are_text(chat, reference):
    plain = chat("a", temperature=0)["usage"]["prompt_tokens"]
    sly = chat("a<|im_end|>", temperature=0)["usage"]["prompt_tokens"]
    assert sly - plain > 5  # one if it were the token


def test_a_system_message_counts(chat, server):
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "a", "name": "b"}]
    answer = server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] > chat("a", max_tokens=1)["usage"]["prompt_tokens"]


def test_a_prompt_may_be_text_texts_ids_or_lists_of_ids(complete, reference):
    ids = reference.tokenizer(PROMPT)["input_ids"]
    one = text(complete(PROMPT, temperature=0))
    assert text(complete(ids, temperature=0)) == one
    assert text(complete([PROMPT], temperature=0)) == one
    other = text(complete("Bread", temperature=0))
    for prompts in ([PROMPT, "Bread"], [ids, reference.tokenizer("Bread")["input_ids"]]):
        answer = complete(prompts, temperature=0)
        assert [choice["text"] for choice in answer["choices"]] == [one, other]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["usage"]["completion_tokens"] == 16


def test_n(complete):
    answer = complete([PROMPT, "Bread"], n=3, temperature=1, seed=1)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert len({choice["text"] for choice in answer["choices"]}) > 2
    assert answer["usage"]["completion_tokens"] == 48


def test_max_tokens_and_its_default(complete, server):
    assert complete(PROMPT, max_tokens=3)["usage"]["completion_tokens"] == 3
    answer = server.http.post("/v1/completions", json={"prompt": PROMPT, "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 16


def test_max_completion_tokens(server):
    body = {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 3, "ignore_eos": True}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 3


def test_the_newer_name_of_a_chats_limit_wins(server):
    def ask(**limits):
        body = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True, **limits}
        answer = server.http.post("/v1/chat/completions", json=body)
        return answer.json()["usage"]["completion_tokens"], answer.headers.get("x-sagellm-ignored")

    assert ask(max_tokens=5, max_completion_tokens=3) == (3, "max_tokens")
    assert ask(max_tokens=2, max_completion_tokens=4) == (4, "max_tokens")
    assert ask(max_tokens=4, max_completion_tokens=4) == (4, None)


def test_a_chat_without_a_limit_goes_to_the_end_of_the_context(serve):
    server = serve(engine={"max_model_len": 64})
    body = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
    usage = server.http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["total_tokens"] == 64


def test_temperature_and_seed(complete):
    def sampled(**fields):
        return text(complete(PROMPT, max_tokens=12, **fields))

    assert sampled(temperature=1, seed=5) == sampled(temperature=1, seed=5)
    assert len({sampled(temperature=1, seed=seed) for seed in range(4)}) > 1
    assert len({sampled(temperature=0, seed=seed) for seed in range(4)}) == 1


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}], ids=str)
def test_filters_that_leave_one_token_are_greedy(complete, fields):
    greedy = text(complete(PROMPT, temperature=0))
    assert text(complete(PROMPT, temperature=20, seed=3)) != greedy
    assert text(complete(PROMPT, temperature=20, seed=3, **fields)) == greedy


def test_stop_strings(complete, reference):
    whole = reference(max_tokens=12).outputs[0].text
    stop = whole[4:6]
    answer = complete(PROMPT, max_tokens=12, temperature=0, stop=stop)["choices"][0]
    assert answer["text"] == whole[: whole.index(stop)]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)
    assert complete(PROMPT, max_tokens=12, temperature=0, stop=["never", stop])["choices"][0] == answer
    with_it = complete(PROMPT, max_tokens=12, temperature=0, stop=stop, include_stop_str_in_output=True)
    assert text(with_it) == whole[: whole.index(stop)] + stop


def test_stop_token_ids_and_min_tokens(complete, reference):
    ids = reference(max_tokens=8).outputs[0].token_ids
    stop = ids[3]
    ended = complete(PROMPT, temperature=0, stop_token_ids=[stop])
    assert ended["choices"][0]["stop_reason"] == stop
    assert ended["usage"]["completion_tokens"] == ids.index(stop) + 1
    later = complete(PROMPT, temperature=0, stop_token_ids=[stop], min_tokens=6)
    assert later["usage"]["completion_tokens"] >= 6


def test_ignore_eos_and_skip_special_tokens(complete, server):
    end = server.front.tokenizer.eos_token_id
    forced = {"logit_bias": {str(end): 100}, "temperature": 0}
    assert complete(PROMPT, **forced)["usage"]["completion_tokens"] == 1
    ignoring = complete(PROMPT, **forced, ignore_eos=True)
    assert ignoring["usage"]["completion_tokens"] == 8
    assert text(ignoring) == ""
    shown = complete(PROMPT, **forced, ignore_eos=True, skip_special_tokens=False)
    assert text(shown) == "<|im_end|>" * 8


def test_logit_bias_and_allowed_token_ids(complete, chat, reference):
    token = reference.tokenizer("w")["input_ids"][0]
    for fields in ({"logit_bias": {str(token): 100}}, {"allowed_token_ids": [token]}):
        assert text(complete(PROMPT, max_tokens=4, temperature=0, **fields)) == "wwww"
        assert content(chat(PROMPT, max_tokens=4, temperature=0, **fields)) == "wwww"


def test_bad_words(complete, reference):
    w, z = (reference.tokenizer(letter)["input_ids"][0] for letter in "wz")
    allowed = {"allowed_token_ids": [w, z], "logit_bias": {str(w): 50}, "temperature": 0}
    assert text(complete(PROMPT, **allowed)) == "w" * 8
    assert text(complete(PROMPT, bad_words=["w"], **allowed)) == "z" * 8


@pytest.mark.parametrize(
    "fields",
    [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 2}],
    ids=str,
)
def test_penalties_keep_from_repeating(complete, fields):
    few = {"allowed_token_ids": list(range(40, 48)), "temperature": 0, "max_tokens": 8}
    plain, penalized = text(complete(PROMPT, **few)), text(complete(PROMPT, **few, **fields))
    assert len(set(penalized)) > len(set(plain))


def test_logprobs_of_completions(complete, reference):
    expected = reference(logprobs=2).outputs[0]
    answer = complete(PROMPT, temperature=0, logprobs=2)["choices"][0]
    written = answer["logprobs"]
    assert "".join(written["tokens"]) == answer["text"]
    for token, offset in zip(written["tokens"], written["text_offset"], strict=True):
        assert answer["text"][offset:].startswith(token)
    for token_id, entry, value, top in zip(
        expected.token_ids, expected.logprobs, written["token_logprobs"], written["top_logprobs"], strict=True
    ):
        assert value == pytest.approx(entry[token_id].logprob, abs=1e-4)
        assert len(top) == 2
        assert max(top.values()) == value
    assert len(complete(PROMPT, temperature=0, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"][0]) == 1


def test_logprobs_of_chats(chat):
    answer = chat(PROMPT, temperature=0, logprobs=True, top_logprobs=3)["choices"][0]
    entries = answer["logprobs"]["content"]
    assert len(entries) == 8
    for entry in entries:
        assert entry["token"] == entry["top_logprobs"][0]["token"]
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]
        assert len(entry["top_logprobs"]) == 3
    raw = bytes(byte for entry in entries for byte in entry["bytes"])
    assert raw.decode(errors="replace") == answer["message"]["content"]
    alone = chat(PROMPT, temperature=0, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in alone] == [[]] * 8
    assert chat(PROMPT)["choices"][0]["logprobs"] is None


def test_hidden_states(complete, chat, reference):
    expected = reference(return_hidden_states=True, n=2).outputs
    choices = complete(PROMPT, temperature=0, n=2, return_hidden_states=True)["choices"]
    for choice, one in zip(choices, expected, strict=True):
        assert np.array(choice["hidden_states"]) == pytest.approx(np.array(one.hidden_states), abs=1e-4)
    of_chat = chat(PROMPT, temperature=0, return_hidden_states=True)
    assert len(of_chat["choices"][0]["hidden_states"]) == of_chat["usage"]["completion_tokens"]
    for answer in (complete(PROMPT), complete(PROMPT, return_hidden_states=False), chat(PROMPT)):
        assert "hidden_states" not in answer["choices"][0]
    of_prompt = complete(PROMPT, max_tokens=0, echo=True, return_hidden_states=True)
    assert "hidden_states" not in of_prompt["choices"][0]


def test_echo(complete, reference):
    alone = text(complete(PROMPT, temperature=0))
    assert text(complete(PROMPT, temperature=0, echo=True)) == PROMPT + alone
    ids = reference.tokenizer(PROMPT)["input_ids"]
    assert text(complete(ids, temperature=0, echo=True)) == PROMPT + alone


def test_prompt_logprobs(complete, chat, reference):
    expected = reference(prompt_logprobs=1).prompt_logprobs
    answer = complete(PROMPT, temperature=0, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert answer[0] is None
    assert len(answer) == len(expected)
    for written, entry in zip(answer[1:], expected[1:], strict=True):
        assert set(written) == {str(token_id) for token_id in entry}
        for token_id, one in entry.items():
            assert written[str(token_id)]["rank"] == one.rank
            assert written[str(token_id)]["logprob"] == pytest.approx(one.logprob, abs=1e-4)
    of_chat = chat(PROMPT, temperature=0, prompt_logprobs=0)
    assert len(of_chat["prompt_logprobs"]) == of_chat["usage"]["prompt_tokens"]


def test_tokens_are_shown_as_ids(complete, chat, reference):
    ids = [f"token_id:{token_id}" for token_id in reference().outputs[0].token_ids]
    written = complete(PROMPT, temperature=0, logprobs=2, return_tokens_as_token_ids=True)["choices"][0]
    assert written["logprobs"]["tokens"] == ids
    plain = complete(PROMPT, temperature=0, logprobs=2)["choices"][0]
    assert written["text"] == plain["text"]
    assert written["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
    answer = chat(PROMPT, temperature=0, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert entry["token"] == entry["top_logprobs"][0]["token"]
        assert entry["token"].startswith("token_id:")


@pytest.mark.parametrize("name", ["text", "ids"])
def test_an_echo_with_logprobs_scores_the_prompt(complete, reference, name):
    prompt = PROMPT if name == "text" else reference.tokenizer(PROMPT)["input_ids"]
    answer = complete(prompt, temperature=0, echo=True, logprobs=1)
    written = answer["choices"][0]["logprobs"]
    assert "".join(written["tokens"]) == answer["choices"][0]["text"]
    assert len(written["tokens"]) == answer["usage"]["total_tokens"]
    assert written["token_logprobs"][0] is None
    assert all(value < 0 for value in written["token_logprobs"][1:])
    assert written["text_offset"][-1] == len(answer["choices"][0]["text"]) - len(written["tokens"][-1])


def test_no_tokens_and_an_echo_score_the_prompt_alone(complete):
    answer = complete(PROMPT, temperature=0, echo=True, logprobs=0, max_tokens=0)
    assert text(answer) == PROMPT
    assert answer["usage"]["completion_tokens"] == 0
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["choices"][0]["finish_reason"] == "length"


def test_cached_tokens_are_told(complete):
    prompt = "In the library the maps were kept by the window. " * 4
    first, second = complete(prompt)["usage"], complete(prompt)["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] >= 16


def test_a_cache_salt_narrows_what_is_shared(complete):
    def cached(**fields):
        return complete(prompt, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]

    prompt = "Every machine hums a note of its own, said the old miller. " * 4
    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one") > 0
    assert cached(cache_salt="two") == 0
    assert cached() == 0


THINKING = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}(no thoughts){% endif %}"
)


def test_variables_of_the_template_change_the_prompt(serve):
    server = serve()
    server.front.tokenizer.chat_template = THINKING
    messages = [{"role": "user", "content": "Is it far?"}]

    def prompt(**fields):
        body = {"messages": messages, "max_tokens": 1, "prompt_logprobs": 0, **fields}
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        scored = answer.json()["prompt_logprobs"][1:]
        ids = [int(token_id) for entry in scored for token_id in entry]
        return server.front.tokenizer.decode(ids), answer.headers.get("x-sagellm-ignored")

    assert prompt() == (" it far?", None)
    assert prompt(chat_template_kwargs={"enable_thinking": False}) == (" it far?(no thoughts)", None)
    assert prompt(chat_template_kwargs={"enable_thinking": True}) == (" it far?", None)
    assert prompt(chat_template_kwargs={"enable_thinking": None}) == (" it far?", None)
    ignored = "chat_template_kwargs.thinking_budget"
    assert prompt(chat_template_kwargs={"thinking_budget": 99}) == (" it far?", ignored)


def test_a_template_that_fails_is_logged_in_detail_and_answered_without(serve, caplog):
    server = serve()
    server.front.tokenizer.chat_template = "{{ secret.field }}"
    body = {"messages": [{"role": "user", "content": "Is it far?"}]}
    answer = server.http.post("/v1/chat/completions", json=body)
    expected = "messages: the model's chat template cannot render these messages"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, expected)
    assert "UndefinedError: 'secret' is undefined (line 1 of the template)" in caplog.text


def test_best_of_shows_the_likeliest_first(complete):
    fields = {"temperature": 1.5, "seed": 3, "max_tokens": 6, "ignore_eos": True}
    all_of_them = complete(PROMPT, n=6, logprobs=0, **fields)["choices"]
    values = [sum(choice["logprobs"]["token_logprobs"]) / 6 for choice in all_of_them]
    best = sorted(zip(values, (choice["text"] for choice in all_of_them), strict=True), reverse=True)
    assert best[0][1] != all_of_them[0]["text"]  # else the order would show nothing
    answer = complete(PROMPT, n=2, best_of=6, **fields)
    assert [choice["text"] for choice in answer["choices"]] == [each[1] for each in best[:2]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["completion_tokens"] == 36  # all that was generated
    with_logprobs = complete([PROMPT, PROMPT], best_of=6, logprobs=1, **fields)
    assert [choice["text"] for choice in with_logprobs["choices"]] == [best[0][1]] * 2
    assert [choice["index"] for choice in with_logprobs["choices"]] == [0, 1]
    shown = with_logprobs["choices"][0]["logprobs"]["token_logprobs"]
    assert sum(shown) / 6 == pytest.approx(best[0][0], abs=1e-3)


def test_the_likeliest_is_so_per_token_and_equals_keep_their_order():
    lengths_and_sums = [(1, -3.0), (4, -8.0), (8, -8.0), (2, -2.0), (0, None)]
    outputs = [
        CompletionOutput(index=index, token_ids=[7] * length, cumulative_logprob=logprob)
        for index, (length, logprob) in enumerate(lengths_and_sums)
    ]
    assert [output.index for output in likeliest(outputs[:4], 3)] == [2, 3, 1]
    assert likeliest(outputs, 5) is outputs


def test_a_best_of_that_equals_n_may_be_streamed_and_keeps_the_order(complete, server):
    fields = {"temperature": 1, "seed": 3, "n": 2}
    expected = [choice["text"] for choice in complete(PROMPT, **fields)["choices"]]
    assert [choice["text"] for choice in complete(PROMPT, best_of=2, **fields)["choices"]] == expected
    body = {"prompt": PROMPT, "max_tokens": 4, "best_of": 2, "n": 2, "stream": True}
    assert server.http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 128}, "n"),
    ],
)
def test_a_best_of_out_of_bounds_is_refused(server, fields, param):
    answer = server.http.post("/v1/completions", json={"prompt": ["a"] * 9, "max_tokens": 1, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_priority_is_vllms_smaller_is_first(scripted):
    server = scripted("a", "length")
    for priority in (None, 5, -3):
        server.http.post("/v1/completions", json={"prompt": [1], "priority": priority}).raise_for_status()
    assert [request["priority"] for request in server.front.requests] == [0, -5, 3]
    assert {request["namespace"] for request in server.front.requests} == {Namespace()}


def test_defaults_are_the_checkpoints(scripted):
    server = scripted("a", "length")
    server.front.default_params = SamplingParams(temperature=0.6, top_k=20, top_p=0.9, max_tokens=99)
    server.http.post("/v1/completions", json={"prompt": [1], "top_k": 5}).raise_for_status()
    params = server.front.requests[0]["params"]
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 5, 0.9, 16)


def test_null_means_absent(complete, chat):
    names = ("temperature", "stop", "n", "seed", "logprobs", "logit_bias", "stream", "stream_options", "user")
    assert (
        complete(PROMPT, **dict.fromkeys(names), top_k=1)["choices"] == complete(PROMPT, top_k=1)["choices"]
    )
    assert chat(PROMPT, **dict.fromkeys(names), top_k=1)["choices"] == chat(PROMPT, top_k=1)["choices"]
