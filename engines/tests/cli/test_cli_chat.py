"""`chat`: one conversation, token-exact, with commands; on a terminal and in a pipe."""

from __future__ import annotations

import io
import json
import re
import resource
import sys
from dataclasses import replace

import pytest

from sagellm.core import InvalidRequestError
from sagellm.engines import SamplingParams
from sagellm.engines.cli.chat.conversation import Conversation, Turn
from sagellm.engines.cli.chat.reasoning_view import ReasoningView
from sagellm.engines.cli.chat.session import ChatSession
from sagellm.engines.cli.chat.terminal import Terminal
from sagellm.engines.parsers.choice import ChosenParsers
from sagellm.engines.parsers.reasoning import DeepSeekR1Parser, ThinkParser
from sagellm.engines.text import ChatMessage

PARAMS = SamplingParams(temperature=0.0, max_tokens=12)
FLAGS = ("--device", "cpu", "--dtype", "float32", "--num-blocks", "512", "--temperature", "0")
FLAGS += ("--forward-backend", "torch")  # `auto` would say why it takes it: the heads have an odd size


class FakeTerminal:
    """Types lines and keeps what it is shown."""

    def __init__(self, *lines, is_interactive=True):
        self.lines = list(lines)
        self.is_interactive = is_interactive
        self.shown = []

    def read(self):
        return self.lines.pop(0) if self.lines else None

    def write(self, text):
        self.shown.append(("answer", text))

    def think(self, text):
        self.shown.append(("thought", text))

    def end_answer(self):
        self.shown.append(("answer", "\n"))

    def tell(self, text):
        self.shown.append(("told", text))

    def whisper(self, text):
        self.shown.append(("whispered", text))

    def texts(self, kind):
        return [text for each, text in self.shown if each == kind]


@pytest.fixture(scope="module")
def engine(make_engine):
    return make_engine(num_blocks=512, block_size=8)


def converse(engine, *lines, params=PARAMS, system=None, **options):
    terminal = FakeTerminal(*lines, **options)
    session = ChatSession(engine, params, Conversation(engine.chat_template, system), terminal)
    session.run()
    return session


def test_answers_are_those_of_the_engine(engine):
    session = converse(engine, "Hello", "How far?", system="Be brief.")
    first, second = session.conversation.turns
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    expected = engine.chat(messages, PARAMS)[0].outputs[0].text
    assert (first.answer.content, "".join(session.terminal.texts("answer"))) == (
        expected,
        f"{expected}\n{second.answer.content}\n",
    )


def test_reasoning_is_shown_apart_from_the_answer():
    terminal = FakeTerminal()
    shown = ReasoningView(ThinkParser().start("<think>\n"), terminal)
    for piece in ("I ", "look.\n</th", "ink>\n\nIt is", " far."):
        shown.write(piece)
    shown.end()
    assert "".join(terminal.texts("thought")) == "I look.\n\n"
    assert "".join(terminal.texts("answer")) == "It is far."


def test_a_model_that_only_thinks_has_no_answer_and_its_turn_is_kept(engine):
    terminal = FakeTerminal("Hello")
    conversation = Conversation(engine.chat_template)
    parsers = ChosenParsers(reasoning_parser=DeepSeekR1Parser())
    ChatSession(engine, PARAMS, conversation, terminal, parsers).run()
    (turn,) = conversation.turns
    assert "".join(terminal.texts("thought")) == turn.answer.content.strip()
    assert terminal.texts("answer") == ["\n"]


def test_reasoning_is_dimmed_on_a_terminal_and_left_out_of_a_pipe(capsys):
    terminal = Terminal()
    terminal.think("hm")
    assert capsys.readouterr().out == ""
    terminal._shows_output = True
    terminal.think("hm hm")
    assert "hm" in capsys.readouterr().out


def test_the_next_prompt_finds_the_turn_before_in_the_cache(engine):
    session = converse(engine, "Is it far to the harbour?")
    [turn] = session.conversation.turns
    before = Conversation(engine.chat_template).render("Is it far to the harbour?")
    known = [*before, *turn.answer.token_ids]
    following = session.conversation.render("And then?")
    assert following[: len(known)] == known
    [output] = engine.generate([following], PARAMS)
    assert output.num_cached_tokens >= (len(known) - 1) // 8 * 8


def test_an_answer_that_was_cut_by_a_stop_string_is_kept_as_text(engine):
    text = converse(engine, "Hello").conversation.turns[0].answer.content
    stop = text[3:5]
    [turn] = converse(engine, "Hello", params=replace(PARAMS, stop=stop)).conversation.turns
    assert (turn.answer.content, turn.answer.token_ids) == (text[: text.index(stop)], [])


def test_commands_change_the_conversation(engine, tmp_path):
    path = tmp_path / "chat.json"
    lines = ["/system", "/undo", "/system Be brief.", "/system", "One", "Two", "/undo", f"/save {path}"]
    session = converse(
        engine, *lines, f"/save {path}", "/save", "/reset", "/sav x", "/help", "/exit", "Three"
    )
    told = session.terminal.texts("told")
    assert told[:5] == [
        "no system message is set",
        "there is nothing to undo",
        "the system message is set",
        "Be brief.",
        "taken back: Two",
    ]
    assert told[5] == f"3 messages are in {path}"
    assert told[6] == told[5], "a conversation may be saved again"
    assert told[7:9] == ["name a file: /save FILE", "a new conversation begins"]
    assert "Did you mean '/save'?" in told[9]
    names = ("/reset", "/system", "/set", "/undo", "/regen", "/save", "/load", "/exit", '"""')
    assert [name in told[10] for name in names] == [True] * len(names)
    saved = json.loads(path.read_text())
    assert [each["role"] for each in saved] == ["system", "user", "assistant"]
    assert engine.chat(saved[:2], PARAMS)[0].outputs[0].text == saved[2]["content"]
    assert session.conversation.turns == []
    assert session.terminal.lines == ["Three"]


def test_sampling_parameters_are_shown_and_set(engine):
    lines = [
        "/set",
        "/set temperature",
        "/set temperature=0.7",
        "/set --top-k 40",
        "/set stop ###",
        "/set tmp 1",
    ]
    lines += ["/set top_p 3", "/set stop [a, 7]", "/set max_tokens null", "/set temperature {", "/set seed 5"]
    session = converse(engine, *lines)
    every, *told = session.terminal.texts("told")
    assert "\ntemperature                 0.0\n" in every
    assert "logprobs" not in every
    assert told[:4] == ["temperature is 0.0", "temperature is 0.7", "top_k is 40", "stop is '###'"]
    assert "there is no parameter tmp; /set lists them." in told[4]
    assert "top_p stays 1.0: top_p is 3; it must be" in told[5]
    assert told[6:8] == ["stop is 'a', '7'", "max_tokens is not set"]
    assert "temperature stays 0.7: " in told[8]
    changed = SamplingParams(temperature=0.7, top_k=40, stop=("a", "7"), max_tokens=None, seed=5)
    assert session.params == changed


@pytest.mark.parametrize("word", ["exit", "quit ", "/quit"])
def test_a_word_leaves_on_a_terminal_and_is_a_question_in_a_pipe(engine, word):
    assert converse(engine, word, "One").terminal.lines == ["One"]
    if not word.startswith("/"):
        piped = converse(engine, word, is_interactive=False)
        assert len(piped.conversation.turns) == 1


def test_times_are_whispered(engine):
    [line] = converse(engine, "Hello").terminal.texts("whispered")
    assert [part in line for part in ("tokens, first after", " ms, ", "tokens/s", "cached")] == [True] * 4


def test_turns_that_no_longer_fit_go_after_it_was_said(make_engine, all_blocks_are_back):
    engine = make_engine(num_blocks=12, block_size=8)  # 97 tokens
    session = converse(engine, *(f"Question {number}" for number in range(8)))
    kinds = [kind for kind, _ in session.terminal.shown]
    told = session.terminal.texts("told")
    assert told, "eight turns do not fit"
    assert "97 that there is room for; the oldest" in told[0]
    assert kinds.index("told") < len(kinds) - 1 - kinds[::-1].index("answer")
    assert 0 < len(session.conversation.turns) < 8
    assert session.conversation.turns[-1].question.content == "Question 7"
    assert all_blocks_are_back(engine)


def test_behind_a_full_window_most_of_a_prompt_is_cached(make_engine):
    engine = make_engine(num_blocks=64, block_size=8)  # 513 tokens
    params = replace(PARAMS, max_tokens=24, ignore_eos=True)
    questions = (f"Question number {number}, and so on" for number in range(20))
    session = converse(engine, *questions, params=params)
    told = "\n".join(session.terminal.texts("whispered"))
    found = re.findall(r"(\d+) of (\d+) prompt tokens cached", told)
    cached, prompts = ([int(each[column]) for each in found] for column in (0, 1))
    assert len(cached) == 20
    num_drops = len(session.terminal.texts("told"))
    assert 1 <= num_drops <= 4, "turns go together, not one at a time"
    assert sum(cached) / sum(prompts) > 0.7
    num_poor = sum(2 * one < whole for one, whole in zip(cached, prompts, strict=True))
    assert num_poor <= 1 + num_drops, "only the first prompt and those after a gap are recomputed"


def test_the_latest_turn_stays_though_it_is_longer_than_half_of_the_window(engine):
    conversation = Conversation(engine.chat_template)
    for length in (5, 5, 40):
        conversation.turns.append(
            Turn(ChatMessage("user", "far " * length), ChatMessage("assistant", "Yes."))
        )
    whole, last = (len(conversation.render("And?", num_dropped=number)) for number in (0, 2))
    assert conversation.num_excess_turns("And?", whole - 1) == 2
    assert conversation.num_excess_turns("And?", last - 1) == 3
    assert conversation.num_excess_turns("And?", 2 * whole) == 0


def test_the_last_question_is_answered_again(engine):
    params = replace(PARAMS, temperature=1.0)
    session = converse(engine, "/regen", "Hello", "Is it far?", "/regen", params=params)
    first, second = session.conversation.turns
    assert [turn.question.content for turn in (first, second)] == ["Hello", "Is it far?"]
    assert session.terminal.texts("told") == ["nothing has been asked yet"]
    assert len(session.terminal.texts("whispered")) == 3, "three answers"
    assert "the same answer" in converse(engine, "Hello", "/regen").terminal.texts("whispered")[1]


def test_a_conversation_goes_on_where_it_was_saved(engine, tmp_path):
    path = tmp_path / "chat.json"
    saved = converse(engine, "Hello", "Is it far?", f"/save {path}", system="Be brief.").conversation
    loaded = converse(engine, "Another one", f"/load {path}").conversation
    assert loaded.messages() == [replace(each, token_ids=()) for each in saved.messages()]
    pending = tmp_path / "pending.json"
    pending.write_text(json.dumps([{"role": "user", "content": "Is it far?"}]))
    session = converse(engine, f"/load {pending}")
    assert [turn.question.content for turn in session.conversation.turns] == ["Is it far?"]


def test_a_conversation_replaces_its_own_file_and_no_other(engine, tmp_path):
    mine, other = tmp_path / "mine.json", tmp_path / "other.json"
    other.write_text("precious")
    converse(engine, "Hello", f"/save {mine}")
    session = converse(engine, f"/load {mine}", "Is it far?", f"/save {mine}", f"/save {other}")
    assert session.terminal.texts("told")[1:] == [
        f"4 messages are in {mine}",
        f"{other} exists, and this conversation is not from it; name another file",
    ]
    converse(engine, f"/load {mine}", "/reset", "Hello", f"/save {mine}")
    assert (len(json.loads(mine.read_text())), other.read_text()) == (4, "precious")


def test_a_full_disk_keeps_the_conversation_that_was_saved_before(engine, tmp_path):
    path, new = tmp_path / "chat.json", tmp_path / "new.json"
    converse(engine, "Hello", f"/save {path}")
    before = path.read_text()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        session = converse(engine, f"/load {path}", "Is it far?", f"/save {path}", f"/save {new}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [told.partition(" ")[2] for told in session.terminal.texts("told")[1:]] == [
        "cannot be written: File too large"
    ] * 2
    assert (path.read_text(), list(tmp_path.iterdir())) == (before, [path])


def test_what_cannot_be_saved_is_told(engine, tmp_path):
    told = converse(engine, f"/save {tmp_path / 'x'}", "Hello", f"/save {tmp_path}").terminal.texts("told")
    assert told == [
        "there is nothing to save: the conversation is empty",
        f"{tmp_path} cannot be written: it is a folder; name a file in it",
    ]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "it must be JSON as /save writes it"),
        ("[]", "messages is empty"),
        ('[{"role": "assistant", "content": "a"}]', "message 0 has the role 'assistant'; it must be 'user'"),
        (
            '[{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "user"'
            ', "content": "b"}]',
            "message 2 has the role 'user'; it must be 'assistant'",
        ),
        ('[{"role": "user"}]', "content is of type NoneType"),
    ],
)
def test_an_invalid_conversation_is_not_loaded(engine, tmp_path, content, told):
    path = tmp_path / "chat.json"
    if content is not None:
        path.write_text(content)
    session = converse(engine, "Hello", f"/load {path}", "/load")
    assert told in session.terminal.texts("told")[0]
    assert session.terminal.texts("told")[1] == "name a file: /load FILE"
    assert len(session.conversation.turns) == 1


def test_many_lines_that_begin_with_a_slash_are_a_question_unless_they_begin_with_a_command(engine):
    session = converse(engine, "/usr/bin/env fails:\nwhy?", "/system Be brief.\nBe kind.")
    assert session.conversation.turns[0].question.content == "/usr/bin/env fails:\nwhy?"
    assert session.conversation.system == "Be brief.\nBe kind."


def test_a_question_that_is_too_long_is_told_and_the_conversation_goes_on(make_engine):
    engine = make_engine(max_model_len=64)
    session = converse(engine, "Hello", "long " * 100, "Hello")
    assert "Error: the prompt has" in session.terminal.texts("told")[-1]
    assert [turn.question.content for turn in session.conversation.turns][-1] == "Hello"
    with pytest.raises(InvalidRequestError):
        converse(engine, "long " * 100, is_interactive=False)


def test_in_a_pipe_each_line_is_a_question_and_answers_alone_are_printed(
    sage, checkpoint, engine, monkeypatch
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n\n/help\n"))
    result = sage("llm", "chat", "--model", checkpoint, *FLAGS, "--max-tokens", "12", "--system", "Be brief.")
    session = converse(engine, "Hello", "/help", system="Be brief.", is_interactive=False)
    assert (result.code, result.err) == (0, "")
    assert result.out == "".join(session.terminal.texts("answer"))
    assert len(session.conversation.turns) == 2


def test_without_a_model_the_embedded_one_answers_and_says_so(sage, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is a KV cache?\n"))
    result = sage("llm", "chat", "--temperature", "0", "--num-blocks", "64", "--device", "cpu")
    assert (result.code, "keys" in result.out) == (0, True), result.err
    assert result.err.startswith("using the small embedded model")


def test_a_wrong_flag_is_told_before_anything_is_loaded(sage):
    assert "--top-p is 2" in sage("llm", "chat", "--model", "m", "--top-p", "2").err
    assert "No such option" in sage("llm", "chat", "--model", "m", "-n", "2").err


def test_a_checkpoint_without_a_chat_template_is_told(sage, checkpoint, tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in checkpoint.iterdir():
        if file.name != "chat_template.jinja":
            (plain / file.name).symlink_to(file)
    result = sage("llm", "chat", "--model", plain, *FLAGS)
    assert (result.code, "has no chat template" in result.err) == (2, True)


def test_each_answer_is_one_of_the_choices(sage, checkpoint, monkeypatch):
    pytest.importorskip("xgrammar")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nIs it far?\n"))
    result = sage("llm", "chat", "--model", checkpoint, *FLAGS, "--choice", "yes", "--choice", "no")
    assert result.code == 0, result.err
    answers = result.out.split()
    assert len(answers) == 2
    assert set(answers) <= {"yes", "no"}


def test_what_comes_after_the_reasoning_must_match(engine):
    """The session asks for a structural tag: the reasoning, and then one of the choices."""
    asked = []

    class Asked:
        def __getattr__(self, name):
            return getattr(engine, name)

        def add_request(self, prompt, params, **options):
            asked.append(params.structured_outputs)
            return engine.add_request(prompt, replace(params, structured_outputs=None), **options)

    params = replace(PARAMS, structured_outputs={"choice": ["yes"]})
    parsers = ChosenParsers(reasoning_parser=ThinkParser())
    ChatSession(Asked(), params, Conversation(engine.chat_template), FakeTerminal("Hello"), parsers).run()
    (structure,) = asked
    assert structure.kind == "structural_tag"
    assert "</think>" in structure.text
    assert '"yes"' in structure.text
