"""`explain` and `scheduler passes`: an engine that runs, over its socket."""

from __future__ import annotations

import pytest

from sagellm.engines import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPT = list(range(10, 60))


@pytest.fixture
def engine(make_engine, run_engine):
    """An engine in which one request had to wait, and one lost its blocks to another."""
    engine = make_engine(
        num_blocks=16, block_size=8, max_num_seqs=2, enable_prefix_caching=False, max_num_batched_tokens=32
    )
    for number in range(3):
        engine.add_request(PROMPT, GREEDY, request_id=f"request-{number}")
    while engine.has_unfinished_requests():
        engine.step()
    run_engine(engine, steps=False)
    return engine


def lines(text):
    return [line for line in text.splitlines() if line]


def test_a_timeline_says_what_happened_in_which_step(engine, sage):
    shown = sage("llm", "explain", "request-1").out
    assert "request request-1 of tenant default, priority 0, " in shown
    assert "prompt of 50 tokens, at most 40 more" in shown
    assert "queued: 2 of 2 by priority and arrival" in shown
    assert "for the step's token budget" in shown
    assert "admitted: 1 by priority and arrival; 0 of 50 tokens cached" in shown
    assert "preempted: request-0#0 lacked blocks; KV of " in shown
    assert "preemptions: 1; tokens whose KV has to be computed again: " in shown
    assert "finished: length, 40 tokens generated" in shown
    assert "prefix: cause: disabled: prefix caching is off" in shown
    assert "preempted for it: 1: request-1#0" in sage("llm", "explain", "request-0").out


def test_the_latest_request_is_explained_without_a_name(engine, sage):
    shown = sage("llm", "explain", "--json").json
    assert (shown["request_id"], shown["num_prompt_tokens"]) == ("request-2", 50)
    (sequence,) = shown["sequences"]
    assert sequence["state"] == "finished"
    assert [event["kind"] for event in sequence["events"]][0 :: len(sequence["events"]) - 1] == [
        "queued",
        "finished",
    ]
    assert sequence["waited_ns"]["seats"] > 0
    assert sage("llm", "explain", "--json", "cmpl-request-2").json["request_id"] == "request-2"


def test_an_unknown_request_is_refused_with_what_there_is(engine, sage):
    result = sage("llm", "explain", "nobody")
    assert (result.code, "no request 'nobody' among the last 3; the latest is 'request-2'" in result.err) == (
        1,
        True,
    )
    assert "begins 3 ids" in sage("llm", "explain", "request").err


def test_passes_are_shown_and_changed_between_two_steps(engine, sage):
    rows = [line.split() for line in lines(sage("llm", "scheduler", "passes").out)]
    assert rows == [
        ["STAGE", "PASS", "OPTIONS"],
        ["order", "shortest"],
        ["share", "fair-share"],
        ["preempt", "none"],
        ["chunk", "chunked-prefill"],
    ]
    text = "order=none,share=none,chunk=chunked-prefill{min_share=0.7},null"
    changed = sage("llm", "policy", "set", "passes", text)
    assert (
        "passes: null,order=none,share=none,preempt=none,chunk=chunked-prefill{min_share=0.7}" in changed.out
    )
    shown = sage("llm", "scheduler", "passes").out
    assert [line.split(None, 2) for line in lines(shown)][1:] == [
        ["order", "none"],
        ["-", "null"],
        ["share", "none"],
        ["preempt", "none"],
        ["chunk", "chunked-prefill", "{min_share=0.7}"],
    ]
    assert [each.name for each in engine.metrics().modules["scheduler"].passes] == ["null", "chunked-prefill"]


def test_what_is_refused_changes_no_pass(engine, sage):
    before = sage("llm", "scheduler", "passes", "--json").json
    for text, problem in {
        "share=nothing-like-it": "nothing-like-it",
        "chunk=chunked-prefill{size=3}": "size",
        "order=": "order",
        "first=null": "'first'; the stages are order, share, preempt, chunk",
    }.items():
        result = sage("llm", "policy", "set", "passes", text)
        assert (result.code, problem in result.err) == (1, True)
    assert sage("llm", "scheduler", "passes", "--json").json == before


def test_scheduler_stats_have_passes_the_cost_of_a_step_and_its_target(engine, sage):
    shown = sage("llm", "scheduler", "stats", "--json").json
    assert [each["name"] for each in shown["passes"]] == ["shortest", "fair-share", "chunked-prefill"]
    assert all(0 < each["num_runs"] <= shown["num_steps"] for each in shown["passes"])  # they rest, too
    assert shown["step_target_ms"] == 250.0
    assert shown["step_cost_token_us"] >= 0
    text = sage("llm", "scheduler", "stats").out
    head = next(line for line in lines(text) if line.startswith("PASS"))
    assert head.split() == ["PASS", "RUNS", "DECISIONS", "MEAN", "US"]
    assert "step target ms" in text
