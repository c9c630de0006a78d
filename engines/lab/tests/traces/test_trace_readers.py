"""Every format of traces: the contract, what is refused, and that what we write is what we read."""

from __future__ import annotations

import json
from io import StringIO

import pytest

from sagellm.core import ConfigError, InvalidInputError, TraceReaderProtocol, TraceRequest, pack
from sagellm.lab.traces import read_trace, write_trace
from sagellm.lab.traces.azure import AzureTraceReader
from sagellm.lab.traces.chat import ChatLogReader
from sagellm.lab.traces.mooncake import MooncakeTraceReader
from sagellm.lab.traces.sagellm import SageLLMTraceReader
from sagellm.testing import TraceReaderContract

SAYS = [{"role": "user", "content": "Is it far?"}]
ANSWERED = [*SAYS, {"role": "assistant", "content": "No."}]
CHAT = [
    {"timestamp": "2026-01-05T10:00:00Z", "messages": SAYS, "response": "No.", "user": "ann"},
    {"timestamp": "2026-01-05T10:00:30+00:00", "messages": ANSWERED, "conversation_id": 7},
    {"timestamp": 1767607260.5, "messages": [*ANSWERED, {"role": "user", "content": [{"text": "So?"}]}]},
    {"timestamp": 1767607261500, "messages": SAYS, "response": None},
]


def json_lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def read(reader: TraceReaderProtocol, text: str) -> list[TraceRequest]:
    return list(reader.read(StringIO(text)))


class TestMooncake(TraceReaderContract):
    def make(self):
        return MooncakeTraceReader()

    def sample(self):
        row = {"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [1, 2, 9]}
        return json_lines(
            [row, row | {"hash_ids": [1, 2, 8]}, row | {"timestamp": 27, "hash_ids": [4, 5, 6]}]
        )


class TestAzure(TraceReaderContract):
    file_name = "trace.csv"

    def make(self):
        return AzureTraceReader()

    def sample(self):
        rows = "".join(f"2023-11-16 18:15:4{second}.68,37{second},44\n" for second in range(3))
        return f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}"


class TestSageLLM(TraceReaderContract):
    def make(self):
        return SageLLMTraceReader()

    def sample(self):
        return json_lines(
            [
                {"format": "sagellm-trace", "version": 1, "block_tokens": 16},
                {"arrival_s": 0.5, "token_ids": [5, 6, 7], "num_output_tokens": 2, "tenant": "a"},
                {"arrival_s": 1, "num_prompt_tokens": 20, "block_ids": [3, 4], "num_output_tokens": 0},
                {"arrival_s": 2, "num_prompt_tokens": 9, "num_output_tokens": 1, "conversation": "c"},
            ]
        )


class TestChatLog(TraceReaderContract):
    def make(self):
        return ChatLogReader()

    def sample(self):
        return json_lines(CHAT)


def test_a_conversation_that_goes_on_begins_with_the_tokens_that_it_had():
    first, second, third, alone = read(ChatLogReader(lambda text: list(text.encode())), json_lines(CHAT))
    begun = b"<|im_start|>user\nIs it far?<|im_start|>assistant\n"
    assert bytes(first.token_ids.tolist()) == begun
    assert second.token_ids == first.token_ids
    assert bytes(third.token_ids.tolist()) == begun + b"No.<|im_start|>user\nSo?<|im_start|>assistant\n"
    assert [one.num_output_tokens for one in (first, second, third, alone)] == [3, 3, 0, 0]
    assert (first.tenant, second.conversation) == ("ann", "7")
    assert [one.arrival_s - first.arrival_s for one in (second, third, alone)] == [30, 60.5, 61.5]


@pytest.mark.parametrize("content", ["token_ids", "block_ids", "lengths"])
def test_what_is_written_is_read(tmp_path, content):
    options = {
        "token_ids": {"token_ids": pack([8, 9, 10])},
        "block_ids": {"block_ids": (4, 2), "block_tokens": 2},
        "lengths": {},
    }[content]
    requests = [TraceRequest(0.0, 3, 5, **options), TraceRequest(1.25, 3, 1, **options, tenant="t")]
    path = tmp_path / "trace.jsonl"
    write_trace(path, requests, {"about": "a test"})
    assert read_trace(path) == requests
    assert json.loads(path.read_text().splitlines()[0])["about"] == "a test"


def test_blocks_of_two_sizes_are_not_written(tmp_path):
    requests = [TraceRequest(0.0, 3, 5, (1,), size) for size in (4, 8)]
    with pytest.raises(InvalidInputError, match="of one size"):
        write_trace(tmp_path / "trace.jsonl", requests)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_trace(tmp_path / "nowhere" / "trace.jsonl", requests[:1])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"arrival_s": "soon", "num_prompt_tokens": 1, "num_output_tokens": 1},
            "arrival_s is 'soon'",
        ),
        ({"arrival_s": 0, "num_output_tokens": 1}, "num_prompt_tokens is None"),
        (
            {"arrival_s": 0, "token_ids": [-1], "num_output_tokens": 1},
            "token ids must not be negative",
        ),
        ({"arrival_s": 0, "token_ids": "abc", "num_output_tokens": 1}, "token_ids is 'abc'"),
        (
            {"arrival_s": 0, "num_prompt_tokens": 3, "block_ids": [1], "num_output_tokens": 1},
            "there are block_ids",
        ),
    ],
)
def test_wrong_rows_are_named(row, message):
    text = json_lines([{"format": "sagellm-trace", "version": 1}, row])
    with pytest.raises(InvalidInputError, match=f"line 2: {message}"):
        read(SageLLMTraceReader(), text)


HEAD = {"format": "sagellm-trace", "version": 1}
OWN = {"arrival_s": 0, "num_prompt_tokens": 1, "num_output_tokens": 1}
MOONCAKE = {"timestamp": 0, "input_length": 1, "output_length": 1}
HUGE = int("9" * 400)
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("reader", "row", "name"),
    [
        (SageLLMTraceReader, OWN, "arrival_s"),
        (SageLLMTraceReader, OWN, "num_output_tokens"),
        (MooncakeTraceReader, MOONCAKE, "timestamp"),
        (MooncakeTraceReader, MOONCAKE, "hash_ids"),
        (ChatLogReader, CHAT[0], "timestamp"),
        (ChatLogReader, CHAT[0], "messages"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_huge_numbers_and_deep_lines_are_named(tmp_path, reader, row, name, nested):
    text = json_lines([HEAD] if reader is SageLLMTraceReader else [row])
    if nested:
        text, message = text + f'{{"{name}": {DEEP}}}\n', "nested more than 32 deep"
    else:
        text, message = text + json_lines([row | {name: HUGE}]), "a number of 400 digits; the limit is 40"
    with pytest.raises(InvalidInputError, match=f"line 2: .*{message}"):
        read(reader(), text)
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"line 2: .*{message}"):
        read_trace(path)


@pytest.mark.parametrize("first", [DEEP, f'{{"format": {HUGE}}}', '{"format": '])
def test_a_first_line_that_is_not_to_be_read_has_no_format(tmp_path, first):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{first}\n")
    with pytest.raises(ConfigError, match="no trace reader knows the format"):
        read_trace(path)


@pytest.mark.parametrize("given", [HUGE, "warm", None, [1], float("inf"), float("nan")])
def test_each_parameter_must_be_a_number(given):
    rows = [HEAD, OWN | {"params": {"top_k": 3, "ignore_eos": True}}, OWN | {"params": {"top_p": given}}]
    message = "a number of 400 digits" if given == HUGE else r"params\.top_p is .*; it must be a number"
    with pytest.raises(InvalidInputError, match=f"line 3: .*{message}"):
        read(SageLLMTraceReader(), json_lines(rows))
    (found,) = read(SageLLMTraceReader(), json_lines(rows[:2]))
    assert found.params == {"top_k": 3.0, "ignore_eos": 1.0}


@pytest.mark.parametrize("given", ["9" * 400, "1e3"])
def test_counts_of_tokens_are_whole_and_bounded(given):
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,{given},1\n"
    with pytest.raises(InvalidInputError, match=r"line 2: ContextTokens is .*a whole number of tokens"):
        read(AzureTraceReader(), text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_cached_tokens": 2}, "num_cached_tokens is 2, and the prompt has 1 tokens"),
        ({"ttft_s": -0.5}, r"ttft_s is -0\.5; it must be a number from 0"),
        ({"total_s": -1}, "total_s is -1; it must be a number from 0"),
    ],
)
def test_what_a_server_cannot_have_measured_is_refused(given, message):
    with pytest.raises(InvalidInputError, match=f"line 2: {message}"):
        read(SageLLMTraceReader(), json_lines([HEAD, OWN | given]))


def test_arrivals_too_far_apart_for_a_clock_are_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(json_lines([HEAD, OWN, OWN | {"arrival_s": 1e300}]))
    with pytest.raises(ConfigError, match=r"its arrivals span 1e\+300 s; at most 1e\+09"):
        read_trace(path)


def test_another_version_of_our_format_is_refused():
    with pytest.raises(InvalidInputError, match="line 1: the head"):
        read(SageLLMTraceReader(), json_lines([{"format": "sagellm-trace", "version": 2}]))


def test_blocks_too_large_to_be_made_are_refused():
    head = HEAD | {"block_tokens": 1 << 53, "recording": "one"}
    with pytest.raises(InvalidInputError, match="line 1: block_tokens is 9007199254740992; it must be"):
        read(SageLLMTraceReader(), json_lines([head, OWN | {"block_ids": [3]}]))


@pytest.mark.parametrize("num_tokens", [1025, 3_000_000_000])
def test_ids_that_do_not_cover_the_prompt_are_refused(num_tokens):
    row = {"timestamp": 0, "input_length": num_tokens, "output_length": 1, "hash_ids": [0, 1]}
    wanted = -(-num_tokens // 512)
    with pytest.raises(
        InvalidInputError,
        match=f"line 1: hash_ids are 2 blocks of 512 tokens.* {num_tokens} .*give {wanted} ids",
    ):
        read(MooncakeTraceReader(), json_lines([row]))
    head = {"format": "sagellm-trace", "version": 1, "block_tokens": 512}
    own = {"arrival_s": 0, "num_prompt_tokens": num_tokens, "block_ids": [0, 1], "num_output_tokens": 1}
    with pytest.raises(InvalidInputError, match="line 2: block_ids are 2 blocks of 512 tokens"):
        read(SageLLMTraceReader(), json_lines([head, own]))
