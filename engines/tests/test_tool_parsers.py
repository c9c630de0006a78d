"""Tool calls as models write them, whole and cut anywhere, and what is not one."""

import json

import pytest

from sagellm.core import ConfigError, InvalidRequestError, PluginRegistry
from sagellm.core.protocols.parsers import Content, FunctionTool
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.parsers import parse_tool_calls
from sagellm.engines.parsers.answers import Answer
from sagellm.engines.parsers.hermes import HermesToolParser
from sagellm.engines.parsers.llama3 import Llama3ToolParser
from sagellm.engines.parsers.mistral import MistralToolParser
from sagellm.engines.parsers.qwen3 import Qwen3ToolParser
from sagellm.engines.parsers.reasoning import DeepSeekR1Parser, ThinkParser
from sagellm.testing import ReasoningParserContract, ToolParserContract
from sagellm.testing.cost import least_cpu_ns
from sagellm.testing.parsers import joined, read

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "note": {"type": "string"}},
}
TOOLS = [FunctionTool(name=name, parameters=SCHEMA) for name in ("weather", "get_time", "run")]
NESTED = {
    "text": 'a "quoted" }{ brace ][ and \\ back\\\\slash',
    "tag": "<tool_call>{}</tool_call> [TOOL_CALLS] <|python_tag|> </parameter",
    "deep": {"list": [1, [2.5, None, {"é": "日本語 \U0001f600"}]], "empty": {}},
    "flag": True,
}
JSON = json.dumps(NESTED)
PARSERS = {
    "hermes": HermesToolParser,
    "qwen3": Qwen3ToolParser,
    "llama3": Llama3ToolParser,
    "mistral": MistralToolParser,
}


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def calls_of(name, text, tools=TOOLS):
    answer = Answer.of(read(PARSERS[name]().start(tools), text))
    return answer.content, [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


class TestHermes(ToolParserContract):
    sample = f"Let me look.\n{hermes('weather', NESTED)}\n{hermes('get_time', {})}\nDone."

    def make(self):
        return HermesToolParser()


class TestQwen3(ToolParserContract):
    sample = (
        'Let me look.\n<tool_call>\n<function=weather>\n<parameter=city>\nNew\nYork <x> "é"\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n"
        "</function>\n</tool_call>"
    )

    def make(self):
        return Qwen3ToolParser()


class TestLlama3(ToolParserContract):
    sample = f'{{"name": "weather", "parameters": {JSON}}}; {{"name": "get_time", "parameters": {{}}}}'

    def make(self):
        return Llama3ToolParser()


class TestMistralList(ToolParserContract):
    sample = (
        f'I will. [TOOL_CALLS] [{{"name": "weather", "arguments": {json.dumps(NESTED)}}}, '
        '{"arguments": {"days": 1}, "name": "get_time", "id": "123456789"}]'
    )

    def make(self):
        return MistralToolParser()


class TestMistralNamed(ToolParserContract):
    sample = f"I will.[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{JSON}[TOOL_CALLS]get_time[ARGS]{{}}"

    def make(self):
        return MistralToolParser("[TOOL_CALLS] [ARGS]")


class TestThink(ReasoningParserContract):
    sample = "<think>\nFirst < second,\n\nso </ no.\n</think>\n\nThe <answer>.\n"

    def make(self):
        return ThinkParser()


class TestDeepSeek(ReasoningParserContract):
    sample = "First < second, so no.\n</think>\n\nThe <answer>.\n"

    def make(self):
        return DeepSeekR1Parser()


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        ("hermes", TestHermes.sample, "Let me look.\nDone.", [("weather", NESTED), ("get_time", {})]),
        (
            "hermes",
            hermes("run", {"a": 1}) + hermes("run", {"a": 2}),
            "",
            [("run", {"a": 1}), ("run", {"a": 2})],
        ),
        # as models also write it: arguments first, no spaces, a brace or the last tag forgotten
        ("hermes", '<tool_call>{"arguments":{"a":1},"name":"run"}</tool_call>', "", [("run", {"a": 1})]),
        ("hermes", '<tool_call>{"name":"run","arguments":{"a":1}}', "", [("run", {"a": 1})]),
        ("hermes", '<tool_call>{"name":"run","arguments":{"a":1}\n</tool_call>!', "!", [("run", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "run"}</tool_call>', "", [("run", {})]),
        (
            "qwen3",
            TestQwen3.sample,
            "Let me look.",
            [("weather", {"city": 'New\nYork <x> "é"', "days": 3}), ("get_time", {})],
        ),
        ("qwen3", hermes("run", NESTED), "", [("run", NESTED)]),
        (
            "qwen3",
            "<tool_call><function=run><parameter=a>[1, {}]</parameter><parameter=note>7</parameter>"
            "<parameter=b>no JSON</parameter></function></tool_call>",
            "",
            [("run", {"a": [1, {}], "note": "7", "b": "no JSON"})],
        ),
        ("llama3", TestLlama3.sample, "", [("weather", NESTED), ("get_time", {})]),
        ("llama3", '<|python_tag|>{"name": "run", "parameters": {"a": 1}}', "", [("run", {"a": 1})]),
        (
            "llama3",
            'Now:<|python_tag|>{"type": "function", "name": "run", "parameters": {"a": 1}} ok',
            "Now: ok",
            [("run", {"a": 1})],
        ),
        ("mistral", TestMistralList.sample, "I will.", [("weather", NESTED), ("get_time", {"days": 1})]),
        ("mistral", TestMistralNamed.sample, "I will.", [("weather", NESTED), ("get_time", {})]),
    ],
)
def test_calls_are_found_with_their_arguments(parser, text, content, calls):
    assert calls_of(parser, text) == (content, calls)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>\n"),
        ("hermes", "the <tool_call> tag begins a call"),
        ("hermes", '<tool_call>{"name": "run", "arguments": 3}</tool_call>'),
        ("hermes", '<tool_call>{"name": "run", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"city": "Paris"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "run", arguments: {}}</tool_call>'),
        ("hermes", '  <tool_call>[{"name": "run", "arguments": {}}]</tool_call>  '),
        ("hermes", "<tool_call>{" + "[" * 2000),
        ("qwen3", "<tool_call>\n<function=other>\n</function>\n</tool_call>"),
        ("qwen3", "<tool_call>\n<func"),
        ("qwen3", "<tool_call>\n<function=run"),
        ("llama3", '{"city": "Paris", "days": [1, 2]}'),
        ("llama3", '{"name": "other", "parameters": {}}'),
        ("llama3", '{"name": "run", "parameters": [1]}'),
        ("llama3", '<|python_tag|>print("hi")'),
        ("llama3", 'Sure: {"name": "run", "parameters": {}}'),
        ("llama3", "{"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] ["),
        ("mistral", "[TOOL_CALLS]run"),
        ("mistral", "[TOOL_CALLS]run it {}"),
        ("mistral", '[TOOL_CALLS] [{"name": "other", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS][1, 2]"),
    ],
)
def test_what_is_not_a_call_is_content_as_it_is(parser, text):
    for deltas in ([text], list(text)):
        assert joined(read(PARSERS[parser]().start(TOOLS), *deltas)) == [Content(text)]
    for place in range(min(len(text), 200)):
        parts = read(PARSERS[parser]().start(TOOLS), text[:place], text[place:])
        assert joined(parts) == [Content(text)]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "run", "arguments": {"a": [1, }}</tool_call>x',
        '<tool_call>{"name": "run", "arguments": {"a": "b</tool_call>',
        '<tool_call>{"name": "run", "arguments": {"a": 1</tool_call> and more',
        '<tool_call>{"name": "run", "arguments": {"a": "\\',
        "<tool_call><function=run><parameter=note>a\n<tool_call>",
        "<tool_call><function=run><parameter=no<parameter=note>a</parameter></tool_call>x",
        "<tool_call><function=run>nothing",
    ],
)
def test_a_call_that_breaks_off_is_the_same_however_it_is_cut(text):
    whole = joined(read(Qwen3ToolParser().start(TOOLS), text))
    assert Answer.of(whole).tool_calls[0].name == "run"
    assert joined(read(Qwen3ToolParser().start(TOOLS), *text)) == whole
    for place in range(len(text)):
        assert joined(read(Qwen3ToolParser().start(TOOLS), text[:place], text[place:])) == whole


def test_arguments_arrive_as_they_are_written():
    text = hermes("run", {"text": "a long text that takes some time"})
    parser = HermesToolParser().start(TOOLS)
    sizes = [len(Answer.of(joined(parser.feed(c))).content) for c in text[: text.index("{")]]
    assert sum(sizes) == 0
    seen = [part for c in text[text.index("{") :] for part in parser.feed(c)]
    assert len(seen) > 30


def test_a_text_of_xml_arrives_as_it_is_written():
    parser = Qwen3ToolParser().start(TOOLS)
    parts = list(parser.feed("<tool_call><function=weather><parameter=note>a long te"))
    assert parts[-1].text.endswith('"a long te')


def test_a_long_call_takes_linear_time():
    def cost_ns(size):
        text = hermes("run", {"text": "x" * size})
        return least_cpu_ns(lambda: read(HermesToolParser().start(TOOLS), *text), 3)

    assert cost_ns(40_000) < 30 * cost_ns(4_000)


@pytest.mark.parametrize(
    ("parser", "opening"),
    [
        (HermesToolParser(), "<tool_call>"),
        (Llama3ToolParser(), "<|python_tag|>"),
        (MistralToolParser(), "[TOOL_CALLS]["),
    ],
)
def test_objects_in_the_texts_of_others_take_linear_time(parser, opening):
    """Each might be a call until the answer ends."""

    def cost_ns(size):
        text = opening + f'{{"id":\\"{opening}' * (size // 20)
        return least_cpu_ns(lambda: read(parser.start(TOOLS), text), 3)

    text = f'{opening}{{"id":\\"' * 2_000
    assert Answer.of(joined(read(parser.start(TOOLS), text))).content == text
    assert cost_ns(80_000) < 30 * cost_ns(8_000)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (HermesToolParser(), '<tool_call>{"arguments": {"text": "\\ud800 é"}, "name": "run"}</tool_call>'),
        (
            Qwen3ToolParser(),
            '<tool_call><function=run><parameter=text>"\\ud800 é"</parameter></function></tool_call>',
        ),
    ],
)
def test_half_a_surrogate_pair_stays_escaped(parser, text):
    tools = [FunctionTool(name="run")]
    (call,) = Answer.of(joined(read(parser.start(tools), text))).tool_calls
    assert json.loads(call.arguments.encode()) == {"text": "\ud800 é"}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("<tool_call>\n<function=example_function_name>", "qwen3"),
        ('<|start_header_id|>{"name": function name, "parameters": dictionary', "llama3"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("{{ messages }}", None),
    ],
)
def test_one_parser_at_most_fits_a_template(template, name):
    registry = PluginRegistry.load()
    fitting = [each for each in PARSERS if registry.resolve("tool_parser", each)().fits(template)]
    assert fitting == ([name] if name else [])


def test_ids_of_mistral_are_those_that_its_templates_accept():
    (call,) = Answer.of(read(MistralToolParser().start(None), "[TOOL_CALLS]run{}")).tool_calls
    assert len(call.id) == 9
    assert call.id.isalnum()


def test_the_prompt_says_whether_reasoning_has_begun():
    think, deepseek = ThinkParser(), DeepSeekR1Parser()
    assert Answer.of(read(think.start("<|im_start|>assistant\n<think>\n"), "Hm.</think>Yes.")) == Answer(
        "Yes.", "Hm."
    )
    assert Answer.of(read(think.start("assistant\n"), "Yes.</think>")) == Answer("Yes.</think>", "")
    assert Answer.of(read(deepseek.start("<｜Assistant｜>"), "Hm.\n</think>\n\nYes.")) == Answer(
        "Yes.", "Hm."
    )
    assert Answer.of(read(deepseek.start("<think>\n\n</think>\n\n"), "Yes.")) == Answer("Yes.", "")
    assert Answer.of(read(think.start("<think>\n"), "Hm")) == Answer("", "Hm")


def test_python_parses_by_name():
    answer = parse_tool_calls(hermes("run", {"a": 1}), parser="hermes")
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("run", '{"a": 1}')]
    tools = [{"type": "function", "function": {"name": "other"}}]
    assert parse_tool_calls(hermes("run", {}), parser="hermes", tools=tools).tool_calls == []


def test_python_reads_reasoning_before_calls():
    text = "<think>\nI add <tool_call>.\n</think>\n\n" + hermes("run", {"a": 1})
    answer = parse_tool_calls(text, parser="hermes", reasoning_parser="qwen3")
    assert (answer.content, answer.reasoning) == ("", "I add <tool_call>.")
    assert [call.name for call in answer.tool_calls] == ["run"]
    opened = parse_tool_calls("Hm.</think>4", parser="null", reasoning_parser="qwen3", prompt_end="<think>\n")
    assert (opened.reasoning, opened.content) == ("Hm.", "4")
    with pytest.raises(ConfigError, match=r"hermes.*colour"):
        parse_tool_calls(text, parser="hermes{colour=red}")


def test_the_embedded_model_calls_a_tool_in_python():
    city = {"type": "object", "properties": {"city": {"type": "string", "description": "The city"}}}
    described = {"name": "time_in", "description": "Get the local time in a city.", "parameters": city}
    tools = [{"type": "function", "function": described}]
    params = SamplingParams(temperature=0, max_tokens=64, skip_special_tokens=False)
    messages = [{"role": "user", "content": "What time is it in Tokyo?"}]
    with LLMEngine(num_blocks=128, device="cpu") as engine:
        text = engine.chat(messages, params, tools=tools)[0].outputs[0].text
        answer = parse_tool_calls(text, parser="hermes", tools=tools)
        (call,) = answer.tool_calls
        assert (answer.content, call.name, json.loads(call.arguments)) == ("", "time_in", {"city": "Tokyo"})
        calls = [{"id": call.id, "function": {"name": call.name, "arguments": {"city": "Tokyo"}}}]
        messages += [
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": call.id, "content": '{"time": "09:40"}'},
        ]
        assert "09:40" in engine.chat(messages, params, tools=tools)[0].outputs[0].text
        with pytest.raises(InvalidRequestError, match=r"tools: 'time_in' is the name of two functions"):
            engine.chat(messages, params, tools=[*tools, *tools])
        with pytest.raises(InvalidRequestError, match=r"a tool is .*; it must be"):
            engine.chat(messages, params, tools=[{"name": "f"}])
