"""`generate`: prompts in, text and timings out; a fake engine here, a real one at the end of the file."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
from typing import ClassVar

import pytest

import sagellm.engines
from sagellm.engines import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from sagellm.engines.cli.generated import TextPrinter
from sagellm.engines.loading.tokenizer import load_tokenizer
from sagellm.engines.metrics.limits import Rate
from sagellm.engines.metrics.profile import ProfileLimits
from sagellm.engines.progress import _PlainLines
from sagellm.engines.text import ChatTemplate
from sagellm.testing.patience import PATIENCE_S

SMALL = ("--num-blocks", "64", "--device", "cpu")
REAL = (*SMALL, "--max-tokens", "8", "--temperature", "0", "--dtype", "float32")


class FakeEngine:
    """Answers each prompt with its words in capitals, one a step, the last prompt first."""

    made: ClassVar[list] = []
    pause = staticmethod(lambda: None)  # before each step
    chat_template = ChatTemplate(None)
    default_params = SamplingParams(temperature=0.6, top_k=11)
    profile = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __init__(self, config):
        self.config = config
        self.requests = {}
        self.params = []
        FakeEngine.made.append(self)

    def add_request(self, prompt, params):
        request_id = f"request-{len(self.requests)}"
        self.params.append(params)
        self.requests[request_id] = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=list(range(len(prompt))),
            outputs=[CompletionOutput(index=index) for index in range(params.n)],
            metrics=RequestMetrics(arrival_ns=0),
            num_cached_tokens=3,
        )
        return request_id

    def has_unfinished_requests(self):
        return any(not output.finished for output in self.requests.values())

    def step(self):
        self.pause()
        output = [output for output in self.requests.values() if not output.finished][-1]
        words = output.prompt.split()
        for one in output.outputs:
            one.text += words[len(one.token_ids)].upper() + " "
            one.token_ids.append(len(one.token_ids))
            if len(one.token_ids) == len(words):
                output.finished = True
                one.finish_reason = "error" if "fail" in words else "stop"
                one.error = "it burst" if "fail" in words else None
        output.metrics.first_token_ns = 5_000_000
        output.metrics.last_token_ns = output.metrics.finished_ns = 25_000_000
        lengths = [len(one.token_ids) for one in output.outputs]
        output.metrics.num_output_tokens = sum(lengths)
        output.metrics.num_longest_output_tokens = max(lengths)
        if "draft" in words:
            output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens = 4, 3
        return [output]

    def generate(self, prompts, params, *, progress):
        for prompt in prompts:
            self.add_request(prompt, params)
        while self.has_unfinished_requests():
            self.step()
        return list(self.requests.values())


@pytest.fixture
def engine(monkeypatch):
    FakeEngine.made = []
    monkeypatch.setitem(vars(sagellm.engines), "LLMEngine", FakeEngine)  # setattr would import the real one
    return FakeEngine.made


def test_text_goes_to_stdout_and_timings_to_stderr(sage, engine):
    result = sage("llm", "generate", "one two three", "--model", "m")
    assert (result.code, result.out) == (0, "ONE TWO THREE \n")
    head, row = result.err.strip().splitlines()
    assert head.split() == ["PROMPT", "CACHED", "OUTPUT", "TTFT", "TPOT", "TOKENS/S", "END"]
    assert row.split() == ["13", "tokens", "3", "3", "tokens", "5.0", "ms", "10.0", "ms", "120.0", "stop"]


def test_drafts_have_a_column_if_there_were_any(sage, engine):
    result = sage("llm", "generate", "draft one", "two", "--model", "m", "--no-stream")
    head, *rows = result.err[result.err.index("PROMPT") :].strip().splitlines()
    assert "DRAFTED" in head
    place = head.index("DRAFTED")
    assert [row[place:].split("  ")[0] for row in rows] == ["3 of 4 accepted", "0 of 0 accepted"]


@pytest.mark.parametrize("mode", ["--stream", "--no-stream"])
def test_several_prompts_come_in_order_and_their_headings_are_no_output(sage, engine, mode):
    result = sage("llm", "generate", "one two", "three", "--model", "m", mode)
    assert result.out == "ONE TWO \nTHREE \n"
    assert result.err.startswith("[1/2] one two\n\n[2/2] three\n\nPROMPT")
    assert len(result.err.strip().splitlines()) == 7


def test_continuations_come_one_after_another(sage, engine):
    result = sage("llm", "generate", "one", "--model", "m", "-n", "2")
    assert (result.out, result.err.startswith("[1/2] one\n\n[2/2] one\n")) == ("ONE \nONE \n", True)


def test_a_terminal_that_does_not_show_the_text_gets_no_headings(sage, engine, monkeypatch, tmp_path):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    result = sage("llm", "generate", "one", "two", "--model", tmp_path)
    assert (result.out, "[1/2]" in result.err) == ("ONE \nTWO \n", False)


def test_many_prompts_in_a_pipe_show_how_far_they_are(sage, engine, monkeypatch):
    write, is_written = _PlainLines._write, threading.Event()

    def note(lines, line):
        write(lines, line)
        if "generating: " in line:
            is_written.set()

    monkeypatch.setattr("sagellm.engines.progress.PLAIN_INTERVAL_S", 0.01)
    monkeypatch.setattr(_PlainLines, "_write", note)
    monkeypatch.setattr(FakeEngine, "pause", staticmethod(lambda: is_written.wait(PATIENCE_S)))
    result = sage("llm", "generate", "one two three", "one two", "--model", "m", "--max-tokens", "10")
    assert re.search(r"generating: \d+% \([\d.,]+ of [\d,]+ tokens\), \d+ s", result.err)
    assert "generating: done" in result.err
    assert result.out == "ONE TWO THREE \nONE TWO \n"
    assert "generating" not in sage("llm", "generate", "one two", "--model", "m").err


def test_prompts_are_read_from_stdin_one_a_line(sage, engine, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin\n\nsecond\n"))
    sage("llm", "generate", "first", "-", "--model", "m")
    assert [output.prompt for output in engine[0].requests.values()] == ["first", "from stdin", "second"]


def test_an_empty_stdin_is_told(sage, engine, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    result = sage("llm", "generate", "-", "--model", "m")
    assert (result.code, result.err) == (2, "Error: standard input holds no prompt; write one per line\n")


def test_json_holds_everything_and_nothing_else_is_printed(sage, engine):
    result = sage("llm", "generate", "one two", "--model", "m", "--json")
    [entry] = result.json_lines
    assert entry["prompt"] == "one two"
    assert entry["outputs"][0]["text"] == "ONE TWO "
    assert entry["outputs"][0]["finish_reason"] == "stop"
    assert (entry["num_prompt_tokens"], entry["num_cached_tokens"]) == (7, 3)
    assert entry["metrics"] == {
        "ttft_s": 0.005,
        "tpot_s": 0.02,
        "total_time_s": 0.025,
        "throughput_tokens_per_s": 80.0,
        "num_draft_tokens": 0,
        "num_accepted_tokens": 0,
    }
    assert result.err == ""


def test_arguments_of_logits_processors_are_a_mapping(sage, engine):
    flags = ("--logits-processors", "bad_words", "--extra-args", "{size: 3, words: [a, b], strict: true}")
    result = sage("llm", "generate", "x", "--model", "m", *flags)
    assert result.code == 0, result.err
    [params] = engine[0].params
    assert params.extra_args == {"size": 3, "words": ["a", "b"], "strict": True}


def test_a_mapping_that_cannot_be_read_is_told_with_the_place(sage, engine):
    for text, what in [("{", "character 2"), ("{a=1, a=2}", "'a' is given twice; keep one")]:
        result = sage("llm", "generate", "x", "--model", "m", "--extra-args", text)
        assert (result.code, what in result.err, engine) == (2, True, []), result.err


@pytest.mark.parametrize("text", ["3", "[a]", "size=3", ""])
def test_arguments_that_are_not_a_mapping_are_told(sage, engine, text):
    result = sage("llm", "generate", "x", "--model", "m", "--extra-args", text)
    expected = f"Error: --extra-args is {text!r}; it must be a mapping, as in '{{name: 3}}'\n"
    assert (result.code, result.err) == (2, expected)
    assert engine == []


def test_flags_reach_sampling_and_engine(sage, engine):
    result = sage(
        *("llm", "generate", "x", "--model", "m", "--block-size", "8", "--no-enable-prefix-caching"),
        *("--max-tokens", "5", "--temperature", "0", "--top-p", "0.5", "--top-k", "7", "--min-p", "0.1"),
        *("--seed", "3", "--stop", "a", "--stop", "b", "--stop-token-ids", "9", "--ignore-eos"),
        *("--presence-penalty", "1", "--frequency-penalty", "-1", "--repetition-penalty", "1.5"),
    )
    assert result.code == 0, result.err
    [params] = engine[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (5, 0.0, 0.5, 7)
    assert (params.min_p, params.seed, params.ignore_eos) == (0.1, 3, True)
    assert (tuple(params.stop), tuple(params.stop_token_ids)) == (("a", "b"), (9,))
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1.0, -1.0, 1.5)
    config = engine[0].config
    assert (config.model.name, config.kv.block_size, config.prefix_cache.enabled) == ("m", 8, False)
    assert config.model.seed is None


def test_what_no_flag_names_is_as_the_checkpoint_wants_it(sage, engine):
    assert sage("llm", "generate", "x", "--model", "m", "--top-k", "7").code == 0
    [params] = engine[0].params
    assert (params.temperature, params.top_k) == (0.6, 7)


def test_the_model_may_come_from_a_file(sage, engine, tmp_path):
    (tmp_path / "sagellm.yaml").write_text("model: {name: from-file}")
    assert sage("llm", "generate", "x").code == 0
    assert engine[0].config.model.name == "from-file"
    assert engine[0].params[0].max_tokens == 256


def test_without_a_model_the_embedded_one_answers_and_says_so(sage):
    result = sage("llm", "generate", "What is a KV cache?", "--temperature", "0", *SMALL)
    assert (result.code, "keys" in result.out) == (0, True), result.err
    assert result.err.startswith("using the small embedded model")
    assert "--model" in result.err.splitlines()[0]


def test_a_prompt_is_what_a_user_says_unless_it_is_raw(sage, checkpoint):
    prompt = "the quick brown fox"
    run = ("llm", "generate", prompt, "--model", checkpoint, *REAL, "--json")
    [asked], [raw] = sage(*run).json_lines, sage(*run, "--raw").json_lines
    tokenizer = load_tokenizer(checkpoint)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    assert asked["num_prompt_tokens"] == len(chat["input_ids"])
    assert raw["num_prompt_tokens"] == len(tokenizer(prompt)["input_ids"])
    assert asked["prompt"] == raw["prompt"] == prompt


def test_without_a_prompt_it_is_told_what_is_missing(sage):
    result = sage("llm", "generate", "--model", "m")
    assert (result.code, "Missing argument 'PROMPT'" in result.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "2"], "--top-p is 2"),
        (["--max-tokens", "many"], "--max-tokens"),
        (["--dtype", "fp16"], "model.dtype is 'fp16'"),
    ],
)
def test_a_wrong_value_is_told_before_anything_is_loaded(sage, engine, arguments, told):
    result = sage("llm", "generate", "x", "--model", "m", *arguments)
    assert (result.code, told in result.err, engine) == (2, True, [])


def test_a_prompt_that_fails_ends_with_one_after_the_others(sage, engine):
    result = sage("llm", "generate", "good", "to fail", "--model", "m")
    assert result.code == 1
    assert result.out.startswith("GOOD")
    assert result.err.endswith("Error: 1 of 2 prompts failed: it burst\n")


def test_a_printer_prints_only_what_is_new(capfd):
    printer = TextPrinter(["a", "b"], 1)
    first = RequestOutput(
        request_id="1",
        prompt="a",
        prompt_token_ids=[],
        outputs=[CompletionOutput(index=0, text="Hel")],
        metrics=RequestMetrics(arrival_ns=0),
    )
    second = RequestOutput(
        request_id="2",
        prompt="b",
        prompt_token_ids=[],
        outputs=[CompletionOutput(index=0, text="", finish_reason="stop")],
        metrics=RequestMetrics(arrival_ns=0),
    )
    printer.update(0, first)
    assert capfd.readouterr() == ("Hel", "[1/2] a\n")
    printer.update(1, second)
    assert capfd.readouterr().out == ""
    first.outputs[0].text = "Hello"
    printer.update(0, first)
    assert capfd.readouterr().out == "lo"
    first.outputs[0].finish_reason = "length"
    printer.update(0, first)
    assert capfd.readouterr() == ("\n\n", "\n[2/2] b\n")


def test_a_long_prompt_is_shortened_in_its_heading(capfd):
    printer = TextPrinter(["word " * 40, "b"], 1)
    output = RequestOutput(
        request_id="1",
        prompt="",
        prompt_token_ids=[],
        outputs=[CompletionOutput(index=0, text="x")],
        metrics=RequestMetrics(arrival_ns=0),
    )
    printer.update(0, output)
    heading = capfd.readouterr().err.splitlines()[0]
    assert (len(heading), heading[-1]) == (len("[1/2] ") + 60, "…")


def test_a_terminal_is_told_that_the_engine_starts(sage, engine, monkeypatch, tmp_path):
    assert "starting" not in sage("llm", "generate", "x", "--model", tmp_path).err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    result = sage("llm", "generate", "x", "--model", tmp_path)
    assert (result.code, "starting" in result.err) == (0, True)


def test_a_real_engine_streams_what_it_returns_whole(sage, checkpoint):
    prompts = ("the quick brown fox", "jumps over the lazy dog")
    streamed = sage("llm", "generate", *prompts, "--model", checkpoint, *REAL)
    whole = sage("llm", "generate", *prompts, "--model", checkpoint, *REAL, "--no-stream")
    assert (streamed.code, whole.code) == (0, 0), streamed.err + whole.err
    assert streamed.out == whole.out
    shown = sage("llm", "generate", *prompts, "--model", checkpoint, *REAL, "--json").json_lines
    assert [entry["prompt"] for entry in shown] == list(prompts)
    for entry in shown:
        assert 1 <= len(entry["outputs"][0]["token_ids"]) <= 8
        assert entry["outputs"][0]["text"] in streamed.out
        assert entry["metrics"]["ttft_s"] > 0


def test_log_probabilities_are_shown_by_token(sage, checkpoint):
    run = ("llm", "generate", "a 🌊", "--model", checkpoint, *REAL, "--json", "--raw", "--temperature", "0")
    [entry] = sage(*run, "--logprobs", "2", "--prompt-logprobs", "0").json_lines
    output = entry["outputs"][0]
    for token_id, scored in zip(output["token_ids"], output["logprobs"], strict=True):
        assert len(scored) == 2
        assert scored[str(token_id)]["rank"] == 1
    first, *scored = (next(iter(each.values())) if each else None for each in entry["prompt_logprobs"])
    assert first is None
    assert bytes(byte for each in scored for byte in each["token_bytes"]).decode() == " 🌊"
    assert scored[-1]["decoded_token"] == "🌊"


def test_hidden_states_are_shown_by_token(sage, checkpoint):
    run = ("llm", "generate", "one two", "--model", checkpoint, *REAL, "--json", "--return-hidden-states")
    [entry] = sage(*run).json_lines
    output = entry["outputs"][0]
    sizes = {len(state) for state in output["hidden_states"]}
    assert len(output["hidden_states"]) == len(output["token_ids"])
    assert sizes == {json.loads((checkpoint / "config.json").read_text())["hidden_size"]}


def test_a_repeated_prompt_is_cached_between_requests_of_one_run(sage, checkpoint):
    prompt = "the quick brown fox jumps over the lazy dog " * 4
    limits = ("--block-size", "8", "--max-num-seqs", "1")
    shown = sage("llm", "generate", prompt, prompt, "--model", checkpoint, *REAL, *limits, "--json")
    first, second = shown.json_lines
    assert first["num_cached_tokens"] == 0
    assert second["num_cached_tokens"] >= 8


@pytest.mark.parametrize("model", ["absent/directory/of/a/model", "./absent"])
def test_a_model_that_is_not_there_is_told(sage, model):
    result = sage("llm", "generate", "x", "--model", model)
    assert (result.code, model in result.err, "Traceback" in result.err) == (1, True, False)


def test_a_plugin_that_is_broken_is_named_and_stops_only_what_needs_it(sage, checkpoint, install):
    install("broken-plugin", "raise RuntimeError('no moon tonight')")
    result = sage("llm", "generate", "x", "--model", checkpoint, *REAL)
    assert (result.code, "broken-plugin" in result.err) == (0, True)
    result = sage("llm", "generate", "x", "--model", checkpoint, *REAL, "--eviction-policy", "moon")
    assert (result.code, "broken-plugin could not be loaded" in result.err) == (2, True)


_FAILING = """
from sagellm.core import Provider, hookimpl
from sagellm.core.protocols.logits_processor import NullLogitsProcessor

class Failing(NullLogitsProcessor):
    def start(self, request):
        return 1

    def apply(self, logits, rows):
        raise ValueError("no moon tonight")

@hookimpl
def sagellm_providers():
    return [Provider("logits_processor", "failing", f"{__name__}:Failing", "fails")]
"""


def test_a_logits_processor_that_fails_is_named_and_its_traceback_shown_with_debug(sage, checkpoint, install):
    install("failing-plugin", _FAILING)
    run = ("llm", "generate", "x", "--model", checkpoint, *REAL, "--logits-processors", "failing")
    result = sage(*run)
    told = (
        "logits_processor 'failing' of failing-plugin 1.5: apply() failed; ValueError: no moon tonight "
        "(failing_plugin.py, line 10, in apply)"
    )
    assert (result.code, told in result.err.splitlines()[-1]) == (1, True), result.err
    assert "Traceback" not in result.err
    debugged = sage("--debug", *run)
    assert (debugged.code, debugged.err.count("no moon tonight") > 1) == (1, True)
    assert 'raise ValueError("no moon tonight")' in debugged.err


def test_an_unknown_policy_is_told_with_the_nearest(sage, checkpoint):
    result = sage("llm", "generate", "x", "--model", checkpoint, *REAL, "--eviction-policy", "lruu")
    assert (result.code, "Did you mean 'lru'?" in result.err) == (2, True)


_DOT_LINES = "|".join(
    (
        r"digraph steps \{",
        r"( *)subgraph cluster_\w+ \{",
        r'( *)(label="[^"]*"|style=\w+|rankdir=LR|node \[[^]]*\]|graph \[[^]]*\]|; )*;?',
        r'( *)\w+ \[label="[^"]*"\];',
        r"( *)\w+ -> \w+;",
        r"( *)\}",
    )
)


def test_emit_dot_draws_each_shape_of_step_once(sage, checkpoint, tmp_path):
    path = tmp_path / "steps.dot"
    path.write_text("an older drawing")
    prompt = "the quick brown fox jumps over the lazy dog"
    run = ("llm", "generate", prompt, prompt, "--model", checkpoint, *REAL, "--ignore-eos")
    drawn = sage(*run, "--emit-dot", path)
    assert (drawn.code, drawn.out) == (0, sage(*run).out), drawn.err
    text = path.read_text()
    for line in text.splitlines():
        assert re.fullmatch(_DOT_LINES, line), line
    assert text.count("{") == text.count("}")
    names = re.findall(r"(\w+) \[label=", text)
    assert len(names) == len(set(names))
    edges = re.findall(r"(\w+) -> (\w+);", text)
    assert {name for edge in edges for name in edge} <= set(names)
    shapes = [
        {re.sub(r"\d+$", "", name.partition("_")[2]) for name in names if name.startswith(f"{cluster}_")}
        for cluster in re.findall(r"subgraph cluster_(step\d+) ", text)
    ]
    assert len(shapes) == len({frozenset(shape) for shape in shapes})
    assert {"prefill", "sample"} in shapes
    assert {"decode", "sample"} in shapes


def test_emit_dot_draws_the_steps_of_a_run_that_fails(sage, checkpoint, install, tmp_path):
    path = tmp_path / "steps.dot"
    install("failing-plugin", _FAILING)
    failing = ("--logits-processors", "failing", "--emit-dot", path)
    assert sage("llm", "generate", "x", "--model", checkpoint, *REAL, *failing).code == 1
    assert "prefill" in path.read_text()


def test_a_drawing_that_cannot_be_written_is_told_before_the_model_is_loaded(sage, tmp_path):
    result = sage(
        "llm", "generate", "x", "--model", "/no/such/model", "--emit-dot", tmp_path / "absent" / "x"
    )
    assert (result.code, "the folder" in result.err, "absent does not exist" in result.err) == (2, True, True)


@pytest.mark.parametrize("command", [("generate", "hi"), ("chat",)])
@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--temperature", "5000", "--temperature is 5000; it must be a number from 0 to 100"),
        ("--temperature", "nan", "--temperature is nan; it must be a number from 0 to 100"),
        ("--top-p", "0", "--top-p is 0; it must be a number above 0 and at most 1"),
        ("--top-k", "-2", "--top-k is -2; it must be an integer from -1 to 2147483647"),
        (
            "--repetition-penalty",
            "1e4",
            "--repetition-penalty is 10000; it must be a number from 1e-09 to 1000",
        ),
    ],
)
def test_a_number_out_of_the_range_of_requests_is_told_before_loading(
    sage, engine, command, flag, value, told
):
    result = sage("llm", *command, flag, value)
    assert (result.code, result.err) == (2, f"Error: {told}\n")
    assert engine == []


def test_a_profile_is_printed_and_is_the_last_line_of_the_json(sage, checkpoint, monkeypatch):
    limits = ProfileLimits(read=Rate(1e10, "stated"), peaks={"float32": Rate(1e12, "stated too")})
    monkeypatch.setattr("sagellm.engines.profiling.measured_limits", lambda model, device: limits)
    run = ("llm", "generate", "one two", "--model", checkpoint, *REAL, "--ignore-eos", "--profile")
    result = sage(*run)
    assert result.code == 0
    assert result.err.index("TOKENS/S") < result.err.index("OPERATION")
    answer, last = sage(*run, "--json").json_lines
    assert "outputs" in answer
    decode, prefill = last["profile"]["steps"]
    assert (decode["kind"], decode["num_steps"], prefill["kind"]) == ("decode", 7, "prefill")
    names = [part["name"] for part in decode["parts"]]
    assert names[:3] == ["schedule", "prepare", "embed"]
    assert names[-3:] == ["sample", "advance", "rest"]
    assert last["profile"]["limits"]["read"] == {"per_s": 1e10, "source": "stated"}
