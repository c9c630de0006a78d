"""`cache why|pin|unpin|clear|evict`: the prefix cache of an engine that runs, over its socket."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sagellm.core import Namespace, Runtime, VirtualClock
from sagellm.engines import SamplingParams
from sagellm.engines.testing.tokenizers import CHAT_TEMPLATE
from sagellm.server.cli.names import complete_engine, complete_save
from sagellm.testing.patience import PATIENCE_S

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
SYSTEM = list(range(10, 42))


@pytest.fixture
def engine(make_engine, run_engine):
    engine = make_engine(num_blocks=64, block_size=8)
    engine.generate([*SYSTEM, 3], GREEDY)
    run_engine(engine, steps=False)
    return engine


def test_a_miss_is_explained_for_the_latest_request_and_by_id(engine, sage):
    first = engine.generate([*SYSTEM[:20], *range(70, 90)], GREEDY)[0]
    engine.generate([5, 6, 7], GREEDY, namespace=Namespace("other"))
    latest = sage("llm", "cache", "why", "--json").json
    assert (latest["tenant"], latest["cause"], latest["match_length"]) == ("other", "never_seen", 0)
    shown = sage("llm", "cache", "why", f"cmpl-{first.request_id}")
    assert f"request {first.request_id} of tenant default" in shown.out
    assert "reused 20 of the 39 tokens that could be" in shown.out
    assert "cause: never_seen" in shown.out
    assert "not cached: 20" in shown.out


def test_an_eviction_is_named_with_its_policy(engine, sage):
    sage("llm", "cache", "evict", "3")
    engine.generate([*SYSTEM, 3], GREEDY)
    found = sage("llm", "cache", "why", "--json").json
    assert (found["cause"], found["policy"], found["evicted_for"]) == ("evicted", "reuse", None)
    assert found["evicted_s_before"] > 0
    shown = sage("llm", "cache", "why").out
    assert "chosen by reuse; " in shown
    assert "blocks in a row are gone" in shown


def test_what_last_use_evicted_is_not_said_to_be_the_policys(make_engine, run_engine, sage, moon):
    engine = make_engine(num_blocks=64, block_size=8, eviction_policy=moon)
    run_engine(engine, steps=False)
    engine.generate([*SYSTEM, 3], GREEDY)
    sage("llm", "cache", "evict", "3")
    engine.generate([*SYSTEM, 3], GREEDY)
    assert sage("llm", "cache", "why", "--json").json["policy"] == "last use"


@pytest.mark.parametrize(
    ("prompt", "changes", "cause", "text"),
    [
        ([3], {}, "one_token", "the last token of a prompt is always computed"),
        (SYSTEM, {"prompt_logprobs": 1}, "scored", "its prompt is scored (prompt_logprobs)"),
    ],
)
def test_a_prompt_that_is_not_looked_up_is_no_hit(engine, sage, prompt, changes, cause, text):
    engine.generate(prompt, replace(GREEDY, **changes))
    assert sage("llm", "cache", "why", "--json").json["cause"] == cause
    shown = sage("llm", "cache", "why").out
    assert text in shown
    assert "reused 0 of the 0" not in shown


def test_the_beginning_of_an_id_is_enough(engine, sage):
    for name in ("1f3a9-0", "1f3b9-0"):
        engine.add_request([*SYSTEM, 4], GREEDY, request_id=name)
        while engine.has_unfinished_requests():
            engine.step()
    assert "request 1f3a9-0 of" in sage("llm", "cache", "why", "1f3a").out
    assert "request 1f3b9-0 of" in sage("llm", "cache", "why", "chatcmpl-1f3b9").out
    engine.add_request([*SYSTEM, 5], GREEDY, request_id="1f3b9-1")
    engine.step()
    told = sage("llm", "cache", "why", "cmpl-1f3b9")
    assert (told.code, "begins 2 ids: '1f3b9-0', '1f3b9-1'" in told.err) == (1, True)


def test_an_unknown_request_is_refused_with_the_latest(engine, sage):
    result = sage("llm", "cache", "why", "nobody")
    assert result.code == 1
    assert "no request 'nobody' among the last 1; the latest is" in result.err


def test_what_is_pinned_outlives_clear_and_evict(engine, sage):
    request_id = engine.generate([*SYSTEM, 3], GREEDY)[0].request_id
    pinned = sage("llm", "cache", "pin", request_id, "--tokens", "24", "--ttl", "60", "--json").json
    assert (pinned["num_pinned_tokens"], pinned["num_pinned_blocks"]) == (24, 3)
    assert "1 of them in use" not in sage("llm", "cache", "clear").out
    assert sage("llm", "cache", "evict", "9", "--json").json["num_dropped_blocks"] == 0
    again = engine.generate([*SYSTEM, 3], GREEDY)[0]
    assert again.num_cached_tokens == 24
    assert sage("llm", "cache", "unpin", request_id, "--json").json == {
        "num_unpinned": 1,
        "num_pins": 0,
        "num_pinned_blocks": 0,
    }
    assert sage("llm", "cache", "clear", "--json").json["num_blocks"] == 0


def test_a_pin_says_what_it_could_not_pin(engine, sage):
    shown = sage(
        "llm", "cache", "pin", "--prompt", "once upon a time there was a prompt", "--tenant", "other"
    )
    assert "pinned 0 of" in shown.out
    assert "nothing at all is cached for tenant 'other'" in shown.out
    short = sage("llm", "cache", "pin", "--tokens", "3")
    assert (short.code, "pinned 0 of 3 tokens: a block has 8 tokens" in short.out) == (1, True)


def test_pins_are_listed_and_end_together(make_engine, run_engine, sage):
    clock = VirtualClock()
    runtime = replace(Runtime.system(seed=0), clock=clock)
    engine = make_engine(num_blocks=64, block_size=8, runtime=runtime)
    run_engine(engine, steps=False)
    assert sage("llm", "cache", "pins").out.splitlines() == [
        "nothing is pinned",
        "0 of at most 32 blocks are pinned",
    ]
    engine.generate([*range(90, 120)], GREEDY, namespace=Namespace("other"))
    sage("llm", "cache", "pin", "--ttl", "90")
    engine.generate([*SYSTEM, 4], GREEDY)
    sage("llm", "cache", "pin")
    clock.advance_ns(15_000_000_000)
    lines = [line.split() for line in sage("llm", "cache", "pins").out.splitlines()]
    assert lines[0] == ["TENANT", "TOKENS", "TTL", "LEFT"]
    assert lines[1] == ["other", "24", "1", "min", "30", "s", "1", "min", "15", "s"]
    assert lines[2] == ["default", "32", "no", "end", "no", "end"]
    assert lines[3] == ["7", "of", "at", "most", "32", "blocks", "are", "pinned"]
    (one, other) = sage("llm", "cache", "pins", "--json").json["pins"]
    assert (one["ttl_s"], one["left_s"], other["left_s"]) == (90.0, 75.0, None)
    assert sage("llm", "cache", "unpin", "--all").out.splitlines() == [
        "ended 2 pins",
        "0 pins are left, of 0 blocks",
    ]
    assert sage("llm", "cache", "pins", "--json").json["num_pins"] == 0


def test_a_pinned_prompt_is_found_by_its_text(engine, sage):
    text = "once upon a time " * 8
    engine.generate(text, GREEDY)
    pinned = sage("llm", "cache", "pin", "--prompt", text, "--json").json
    assert 0 < pinned["num_tokens"] - pinned["num_pinned_tokens"] < 8
    assert sage("llm", "cache", "unpin", "--all").out.startswith("ended 1 pins")


@pytest.mark.full
def test_a_template_without_an_end_does_not_hold_the_command(
    make_engine, run_engine, sage, checkpoint, tmp_path, monkeypatch
):
    path = shutil.copytree(checkpoint, tmp_path / "model")
    loops = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    (path / "chat_template.jinja").write_text(
        f"{{% if messages[0].content == 'hang' %}}{loops}{{% endif %}}{CHAT_TEMPLATE}"
    )
    run_engine(make_engine(model=str(path), num_blocks=64, block_size=8), steps=False)
    monkeypatch.setattr("sagellm.server.cli.prefix_flags._TIMEOUT_S", PATIENCE_S)
    assert "nothing at all is cached" in sage("llm", "cache", "pin", "--system", "be brief").out
    monkeypatch.setattr("sagellm.server.cli.prefix_flags._TIMEOUT_S", 1.0)
    result = sage("llm", "cache", "pin", "--system", "hang")  # which takes hours
    assert result.code != 0
    assert "chat template and tokenizer took more than 1 s" in result.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("pin", "one", "--prompt", "two"), "give one of them"),
        (("pin", "--tenant", "a"), "--tenant goes with --prompt"),
        (("pin", "--prompt", "x", "--public", "docs", "--salt", "s"), "leave --tenant and --salt out"),
        (("evict", "0"), "give at least 1"),
        (("unpin", "one", "--all"), "without a request or a prefix"),
        (("unpin", "--prompt", "x", "--all"), "without a request or a prefix"),
    ],
)
def test_what_makes_no_sense_is_refused(engine, sage, arguments, reason):
    result = sage("llm", "cache", *arguments)
    assert result.code != 0
    assert reason in result.err


def test_a_save_is_loaded_by_the_next_engine(make_engine, run_engine, sage, tmp_path):
    options = {"num_blocks": 64, "block_size": 8, "kv_save_folder": str(tmp_path / "kv")}
    engine = make_engine(**options)
    expected = engine.generate([*SYSTEM, 3], GREEDY)[0].outputs[0].token_ids
    run_engine(engine, name="first", steps=False)
    assert sage("llm", "cache", "saves").out.strip() == "nothing is saved"
    assert "saved 4 of 4 blocks (24 KiB) of default" in sage("llm", "cache", "save", "monday").out
    assert "monday" in sage("llm", "cache", "saves").out
    assert [each["name"] for each in sage("llm", "cache", "saves", "--json").json] == ["monday"]
    other = make_engine(**options)
    run_engine(other, name="second", steps=False)
    refused = sage("llm", "cache", "load", "tuesday", "--engine", "second")
    assert (refused.code, "there is no save 'tuesday'" in refused.err) == (1, True)
    for name in ("../monday", "/etc/passwd"):
        assert "no path" in sage("llm", "cache", "load", name, "--engine", "second").err
        assert "no path" in sage("llm", "cache", "save", name, "--engine", "second").err
    refused = sage("llm", "cache", "load", "monday", "--tenant", "x", "--engine", "second")
    assert "is of another tenant: 'default' instead of 'x'" in refused.err
    loaded = sage("llm", "cache", "load", "monday", "--engine", "second", "--json").json
    assert (loaded["phase"], loaded["num_blocks"], loaded["num_left_out"]) == ("done", 4, 0)
    answer = other.generate([*SYSTEM, 3], GREEDY)[0]
    assert (answer.outputs[0].token_ids, answer.num_cached_tokens) == (expected, 32)


@pytest.fixture
def saved(make_engine, run_engine, sage, tmp_path):
    """An engine with two saves, and their folder."""
    folder = tmp_path / "kv"
    engine = make_engine(num_blocks=64, block_size=8, kv_save_folder=str(folder))
    engine.generate([*SYSTEM, 3], GREEDY)
    run_engine(engine, steps=False)
    for name in ("monday", "tuesday"):
        assert sage("llm", "cache", "save", name).code == 0
    return folder


def test_a_save_is_deleted_by_name_when_that_is_said(sage, saved):
    outside = saved.parent / "outside.kv"
    outside.write_text("precious")
    refused = sage("llm", "cache", "delete", "monday")
    assert (refused.code, "confirm it with --yes" in refused.err) == (2, True)
    for name in ("../outside", str(outside), "..", "monday.kv"):
        assert "no path" in sage("llm", "cache", "delete", name, "--yes").err
    missing = sage("llm", "cache", "delete", "wednesday", "--yes")
    assert (missing.code, "there is no save 'wednesday'" in missing.err) == (1, True)
    assert "deleted monday, 3" in sage("llm", "cache", "delete", "monday", "--yes").out
    assert sage("llm", "cache", "delete", "tuesday", "-y", "--json").json["name"] == "tuesday"
    assert (list(saved.iterdir()), outside.exists()) == ([], True)


def test_on_a_terminal_deleting_is_asked(sage, saved, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for answer, left in (("n\n", 2), ("y\n", 1)):
        keyboard = io.StringIO(answer)
        keyboard.isatty = lambda: True
        monkeypatch.setattr(sys, "stdin", keyboard)
        result = sage("llm", "cache", "delete", "monday")
        assert "for good? [y/N]" in result.out + result.err
        assert len(list(saved.iterdir())) == left


def test_a_save_that_exists_is_overwritten_only_when_that_is_said(sage, saved, monkeypatch):
    (saved / "monday.kv").write_text("precious")
    refused = sage("llm", "cache", "save", "monday")
    assert refused.code == 2
    assert "the save monday exists; name another save, or overwrite it with --overwrite" in refused.err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    keyboard = io.StringIO("n\n")
    keyboard.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", keyboard)
    asked = sage("llm", "cache", "save", "monday")
    assert (asked.code, "overwrite it? [y/N]" in asked.out + asked.err) == (1, True)
    assert (saved / "monday.kv").read_text() == "precious"
    for flag in ("--overwrite", "--yes"):
        (saved / "monday.kv").write_text("precious")
        assert sage("llm", "cache", "save", "monday", flag).code == 0
        assert (saved / "monday.kv").stat().st_size > len("precious")


def test_the_tab_key_completes_engines_and_saves(sage, saved):
    assert complete_engine("o") == ["one"]
    assert complete_engine("x") == []
    context = SimpleNamespace(params={"engine": None})
    assert complete_save(context, "") == ["monday", "tuesday"]
    assert complete_save(context, "tu") == ["tuesday"]
    context.params["engine"] = "absent"
    assert complete_save(context, "tu") == []


def test_completing_names_loads_no_torch():
    source = (
        "import sys\nfrom types import SimpleNamespace\n"
        "from sagellm.server.cli.names import complete_engine, complete_save\n"
        "complete_engine(''), complete_save(SimpleNamespace(params={}), '')\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
