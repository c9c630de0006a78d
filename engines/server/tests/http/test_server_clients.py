"""OpenAI's own client, as it is, sees what its documentation says."""

from __future__ import annotations

import asyncio

import openai
import pytest

MESSAGES = [{"role": "user", "content": "Is it far?"}]


def test_models(client):
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").owned_by == "sagellm"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_a_completion(client):
    answer = client.completions.create(
        model="small", prompt="The river", max_tokens=5, logprobs=2, temperature=0
    )
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].logprobs.tokens) == 5
    assert answer.usage.completion_tokens == 5
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_streamed_completion_is_the_whole_one(client):
    options = {"model": "small", "prompt": ["The river", "Bread"], "n": 2, "max_tokens": 20, "seed": 3}
    whole = client.completions.create(**options)
    texts, reasons = [""] * 4, [None] * 4
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_a_streamed_completion_has_the_same_logprobs_and_usage(client):
    options = {"model": "small", "prompt": "The river", "max_tokens": 12, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        joined = [value for part in parts for value in getattr(part, name)]
        assert joined == getattr(whole.choices[0].logprobs, name)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_usage_may_stand_in_every_chunk(client, kind):
    options = {"model": "small", "max_tokens": 9, "temperature": 0, "n": 2, "stream": True}
    options["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if kind == "chat":
        chunks = list(client.chat.completions.create(messages=MESSAGES, **options))
    else:
        chunks = list(client.completions.create(prompt="The river", **options))
    whole = chunks.pop()
    assert whole.choices == []
    counts = [[], []]
    for chunk in chunks:
        usage = chunk.usage
        assert usage.prompt_tokens == whole.usage.prompt_tokens
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        counts[chunk.choices[0].index].append(usage.completion_tokens)
    for each in counts:
        assert each == sorted(each)
        assert (each[0] == 0) == (kind == "chat")  # its first chunk has the role alone
        assert each[-1] == 9
    assert whole.usage.completion_tokens == 18


def test_usage_in_every_chunk_needs_usage_at_all(client):
    """As in vLLM."""
    options = {"model": "small", "prompt": "a", "max_tokens": 2, "stream": True}
    options["stream_options"] = {"continuous_usage_stats": True}
    assert all(chunk.usage is None for chunk in client.completions.create(**options))


def test_a_streamed_echo_begins_with_the_prompt(client):
    options = {"model": "small", "prompt": "The river", "max_tokens": 4, "temperature": 0, "echo": True}
    whole = client.completions.create(**options).choices[0].text
    assert whole.startswith("The river")
    assert (
        "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)) == whole
    )
    alone = list(client.completions.create(**{**options, "max_tokens": 0}, stream=True))
    assert [chunk.choices[0].text for chunk in alone] == ["The river"]
    assert alone[-1].choices[0].finish_reason == "length"


def test_a_streamed_chat_is_the_whole_one(client):
    options = {"model": "small", "messages": MESSAGES, "max_tokens": 20, "temperature": 0, "n": 2}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=1)
    texts, tokens, roles = ["", ""], [[], []], [[], []]
    stream = client.chat.completions.create(
        **options, logprobs=True, top_logprobs=1, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += [choice.delta.role] if choice.delta.role else []
            tokens[choice.index] += (
                [entry.token for entry in choice.logprobs.content] if choice.logprobs else []
            )
    assert roles == [["assistant"], ["assistant"]]
    assert texts == [choice.message.content for choice in whole.choices]
    assert tokens == [[entry.token for entry in choice.logprobs.content] for choice in whole.choices]
    assert chunk.usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunk.usage.prompt_tokens_details}
    )


def test_a_stream_held_back_by_a_stop_string_ends_before_it(client):
    options = {"model": "small", "prompt": "The river", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**options).choices[0].text
    stop = whole[5:9]
    chunks = list(client.completions.create(**options, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_whole_characters_only(server, client):
    """Tokens that are parts of a character come together."""
    ids = server.front.tokenizer("⚓🌊Й")["input_ids"]
    stream = client.completions.create(
        model="small",
        prompt=ids,
        max_tokens=60,
        stream=True,
        extra_body={"allowed_token_ids": ids, "seed": 2},
    )
    texts = [chunk.choices[0].text for chunk in stream]
    whole = client.completions.create(
        model="small", prompt=ids, max_tokens=60, extra_body={"allowed_token_ids": ids, "seed": 2}
    )
    assert "".join(texts) == whole.choices[0].text


def test_errors_are_the_clients_own(client, server):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="small", prompt="a", temperature=-1)
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="small", messages=MESSAGES, tools=[{"type": "function"}])
    assert caught.value.param == "tools[0]"
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found"


def test_a_wrong_key_is_an_authentication_error(scripted):
    server = scripted("a", "length", api_keys=("right",))
    with pytest.raises(openai.AuthenticationError):
        server.openai("wrong").completions.create(model="small", prompt=[1])
    assert server.openai("right").completions.create(model="small", prompt=[1]).choices[0].text == "a"


def test_the_asynchronous_client(server):
    async def one(client, index):
        if index % 2:
            stream = await client.chat.completions.create(
                model="small", messages=MESSAGES, max_tokens=10, stream=True, temperature=0
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        answer = await client.chat.completions.create(
            model="small", messages=MESSAGES, max_tokens=10, temperature=0
        )
        return answer.choices[0].message.content

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, index) for index in range(24)))

    assert len(set(asyncio.run(main()))) == 1


def test_several_names_serve_one_model(scripted):
    server = scripted("a", "length", served_model_name=("first", "second"))
    client = server.openai()
    assert [model.id for model in client.models.list()] == ["first", "second"]
    assert client.completions.create(model="second", prompt=[1]).model == "second"
    assert server.http.post("/v1/completions", json={"prompt": [1]}).json()["model"] == "first"
    assert scripted("a", served_model_name=()).openai().models.list().data[0].id == "scripted"
