"""`policy list|show|set|shadow`: an engine that runs, over its socket."""

from __future__ import annotations

import pytest

from sagellm.engines import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def engine(make_engine, run_engine):
    engine = make_engine(num_blocks=64, block_size=8)
    run_engine(engine, steps=False)
    engine.generate([5] * 40, GREEDY)
    return engine


def test_policies_are_listed_without_an_engine(sage):
    text = sage("llm", "policy", "list").out
    assert "*  reuse       learns who comes back: for chat under pressure" in text
    assert [line.split(":")[0] for line in text.splitlines() if line[:1].isalpha()][:4] == [
        "eviction",
        "passes",
        "predictor",
        "drafts",
    ]
    found = sage("llm", "policy", "list", "eviction", "--json").json
    assert list(found) == ["eviction"]
    (reuse,) = (each for each in found["eviction"] if each["name"] == "reuse")
    assert (reuse["is_default"], reuse["recommended_for"]) == (True, "chat and mixed loads")
    assert "18.2 %" in reuse["measured"]
    assert "Did you mean 'eviction'?" in sage("llm", "policy", "list", "evictio").err


def test_a_policy_is_switched_and_shown(engine, sage):
    done = sage("llm", "policy", "set", "eviction", "s3fifo{small_share=0.2}", "--guard", "hit_rate>=0.5")
    first, guarded, limit, setting = done.out.splitlines()
    assert first.startswith("eviction: s3fifo{small_share=0.2} instead of reuse (")
    assert (guarded, limit) == ("guarded: back to reuse unless", "  hit_rate>=0.5; no request yet")
    flag = "--eviction-policy 's3fifo{small_share=0.2}'"
    assert setting == f"until a restart; for good: {flag}, or prefix_cache.eviction_policy in sagellm.yaml"
    assert sage("llm", "eviction", "stats", "--json").json["provider"] == "s3fifo"
    assert sage("llm", "policy", "set", "drafts", "ngram").code == 0
    assert engine.client.core.scheduler.speculation is not None
    shown = sage("llm", "policy", "show").out
    assert "guard of eviction, back to reuse:\n  hit_rate>=0.5; no request yet" in shown
    found = sage("llm", "policy", "show", "--json").json
    assert found["policies"]["drafts"]["name"] == "ngram"
    assert [each["after"] for each in found["changes"]] == ["s3fifo{small_share=0.2}", "ngram"]
    assert engine.generate([5] * 40, GREEDY)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("evictio", "lru"), "Did you mean 'eviction'?"),
        (("eviction", "lruu"), "Did you mean 'lru'?"),
        (("eviction", "s3fifo{share=1}"), "share"),
        (("eviction", "lru", "--guard", "hit>=1"), "what can be limited is ttft_mean_s"),
        (("eviction", "lru", "--guard", "ttft_p99_s<=+5%", "--guard-window", "0"), "window is 0 s"),
        (("eviction", "lru", "--guard", "hit_rate>=0.1", "--guard-requests", "0"), "from 1 to 8,192"),
        (("eviction", "lru", "--guard", "hit_rate>=20"), "a share, which is at most 1"),
        (("eviction", "lru", "--guard-window", "10"), "are of a guard"),
        (("eviction", "reuse", "--guard", "hit_rate>=0.1"), "in force already"),
        (("predictor", "lstm{weights=/no/such/file}"), "/no/such/file"),
        (("passes", "order=nothing"), "nothing"),
    ],
)
def test_what_is_refused_changes_nothing(engine, sage, arguments, told):
    result = sage("llm", "policy", "set", *arguments)
    assert result.code in (1, 2)
    assert told in result.err
    assert sage("llm", "policy", "show", "--json").json["changes"] == []


def test_a_guarded_policy_stays_guarded_or_says_that_it_does_not(engine, sage):
    sage("llm", "policy", "set", "eviction", "lru", "--guard", "latency_mean_s<=1000")
    assert sage("llm", "policy", "set", "eviction", "lru").out.splitlines() == [
        "eviction: lru is in force already; nothing changed",
        "guarded: back to reuse unless",
        "  latency_mean_s<=1000; no request yet",
    ]
    engine.generate([5] * 40, GREEDY)
    assert "latency_mean_s<=1000; now 0." in sage("llm", "policy", "show").out
    assert "of 1 requests, judged from 20 on" in sage("llm", "policy", "show").out
    ended = sage("llm", "policy", "set", "eviction", "default").out
    assert ended.startswith("eviction: reuse instead of lru (")
    assert "the guard that would have gone back to reuse has ended" in ended


def test_the_latest_changes_are_shown_first(engine, sage):
    for number in range(6):
        sage("llm", "policy", "set", "passes", f"order={('mlfq', 'priority')[number % 2]}")
    rows = [
        line
        for line in sage("llm", "policy", "show").out.splitlines()
        if "ago" in line and "operator" in line
    ]
    assert len(rows) == 5
    assert rows[0].split()[-3:] == ["order=mlfq", "order=priority", "operator"]
    assert "and 1 before: --all" in sage("llm", "policy", "show").out
    assert sage("llm", "policy", "show", "--all").out.count("operator") == 6


def test_shadows_run_and_end(engine, sage):
    assert sage("llm", "policy", "shadow", "lru,s3fifo").out.startswith("shadows: lru, s3fifo; ")
    engine.generate([5] * 40, GREEDY)
    shown = sage("llm", "policy", "show").out
    assert "prompt tokens saved, of 1 requests:" in shown
    rows = {line.split()[0]: line.split()[1] for line in shown.splitlines() if line.count("%") == 2}
    assert rows == {"(served)": "97.50%", "lru": "97.50%", "s3fifo": "97.50%"}
    refused = sage("llm", "policy", "shadow", "lru", "--sample", "0.1")
    assert "do not sample" in refused.err
    assert sage("llm", "policy", "shadow", "off").out == "shadows: off\n"
    assert sage("llm", "policy", "show", "--json").json["shadows"] is None


def test_explain_says_which_policies_changed(engine, sage):
    engine.add_request([7] * 20, GREEDY)
    engine.step()
    sage("llm", "policy", "set", "eviction", "lru")
    while engine.has_unfinished_requests():
        engine.step()
    lines = sage("llm", "explain").out.splitlines()
    (line,) = (each for each in lines if each.startswith("eviction became"))
    assert line.startswith("eviction became lru instead of reuse after 0.")
    assert line.endswith("s, by the operator")
