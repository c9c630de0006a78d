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
    first, guarded, setting = done.out.splitlines()
    assert first.startswith("eviction: s3fifo{small_share=0.2} instead of reuse (")
    assert guarded == "guarded: back to reuse unless hit_rate>=0.5 (0.5)"
    assert setting == "until a restart; for good: prefix_cache.eviction_policy in sagellm.yaml, or the flag"
    assert sage("llm", "policy", "set", "drafts", "ngram").code == 0
    assert engine.client.core.scheduler.speculation is not None
    shown = sage("llm", "policy", "show").out
    assert "guard of eviction: hit_rate>=0.5, or back to reuse" in shown
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
        (("eviction", "lru", "--guard", "hit_rate>=0.1", "--guard-requests", "0"), "at least 1"),
        (("predictor", "lstm{weights=/no/such/file}"), "/no/such/file"),
        (("passes", "order=nothing"), "nothing"),
    ],
)
def test_what_is_refused_changes_nothing(engine, sage, arguments, told):
    result = sage("llm", "policy", "set", *arguments)
    assert (result.code, told in result.err) == (1, True), result.err
    assert sage("llm", "policy", "show", "--json").json["changes"] == []


def test_shadows_run_and_end(engine, sage):
    assert sage("llm", "policy", "shadow", "lru,s3fifo").out.startswith("shadows: lru, s3fifo; ")
    engine.generate([5] * 40, GREEDY)
    shown = sage("llm", "policy", "show").out
    assert "prompt tokens saved, of 1 requests:" in shown
    rows = {line.split()[0]: line.split()[1] for line in shown.splitlines() if line.count("%") == 2}
    assert rows == {"(live)": "97.50%", "lru": "97.50%", "s3fifo": "97.50%"}
    refused = sage("llm", "policy", "shadow", "lru", "--sample", "0.1")
    assert "do not sample" in refused.err
    assert sage("llm", "policy", "shadow", "off").out == "no shadows run\n"
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
