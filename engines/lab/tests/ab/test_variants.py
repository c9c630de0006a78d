"""What a variant may say, and what is said of one that cannot be read."""

from __future__ import annotations

import pytest

from sagellm.core import ConfigError, ProviderSpec
from sagellm.engines.config.schema import EngineConfig
from sagellm.lab.ab.variants import read_variant

CONFIG = EngineConfig()


def read(text: str, **settings: float):
    return read_variant("b", text, CONFIG, **settings)


@pytest.mark.parametrize("text", ["default", "", "  "])
def test_the_default_changes_nothing(text):
    assert read(text).config == CONFIG
    assert read(text).text == "default"


def test_a_variant_changes_what_it_names():
    config = read(
        "order=mlfq{quantum=8}, share=none, eviction=qos{within=reuse}, predictor=null,"
        "scheduler.max_num_seqs=64, kv.fetch=never, prefix_cache.enabled=false"
    ).config
    assert config.scheduler.order == ProviderSpec("mlfq", {"quantum": 8})
    assert config.scheduler.order.options == {"quantum": 8}
    assert (config.scheduler.share, config.scheduler.chunk) == (None, CONFIG.scheduler.chunk)
    assert config.prefix_cache.eviction_policy.text == "qos{within=reuse}"
    assert (config.predictor.name.name, config.scheduler.max_num_seqs) == ("null", 64)
    assert (config.kv.fetch, config.prefix_cache.enabled) == ("never", False)


def test_passes_take_what_their_flag_takes():
    assert read("passes=order=mlfq,share=none,eviction=lru").is_same_as(
        read("order=mlfq,share=none,eviction=lru")
    )
    assert read("passes=mlfq").config.scheduler.passes == (ProviderSpec("mlfq"),)


def test_a_variant_says_which_policies_decide():
    found = read("order=none,passes=mlfq{quantum=4}").policies(is_served=True)
    assert found == (
        "eviction=reuse,share=fair-share,chunk=chunked-prefill,passes=mlfq{quantum=4},predictor=statistical"
    )
    assert read("order=none").policies(is_served=False) == "eviction=reuse"


def test_exact_lengths_replace_the_predictor():
    assert read("predictor=exact").oracle_error == 0
    assert read("predictor=exact{error=0.5}").oracle_error == 0.5
    assert read("predictor=null", oracle_error=0.5).oracle_error is None
    assert read("order=mlfq", oracle_error=0.5).oracle_error == 0.5


def test_equal_configurations_are_recognized():
    assert read("").is_same_as(read("eviction=reuse,order=shortest"))
    assert not read("").is_same_as(read("eviction=lru"))
    assert not read("predictor=null").is_same_as(read("predictor=exact"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eviciton=lru", "Did you mean 'eviction'?"),
        ("eviction=lruu", "Did you mean 'lru'?"),
        ("order=mlfq,order=none", "order is given twice"),
        ("order=mlfq,scheduler.order=none", "scheduler.order is given twice"),
        ("drafts=ngram", "drafts are not simulated"),
        ("speculation.proposer=ngram", "sage llm policy set drafts NAME"),
        ("server.port=80", "changes nothing in a simulation"),
        ("scheduler.print=ir", "changes nothing that is compared"),
        ("mlfq", "write key=value"),
        ("order=", "write key=value"),
        ("order={", "cannot be read"),
        ("scheduler.max_num_seqs=many", "it must be a whole number"),
        ("scheduler.max_num_seqs=0", "at least 1"),
        ("predictor=exact{x=1}", "it takes error"),
        ("predictor=exact{error=-1}", "it takes error"),
        ("predictor=exact{error=1e300}", "a number from 0 to 10"),
        ("kv.block_size=[1", "its square brackets do not match"),
    ],
)
def test_what_is_wrong_is_said_with_the_flag(text, message):
    with pytest.raises(ConfigError) as raised:
        read(text)
    assert str(raised.value).startswith(f"--b is {text!r}: ")
    assert message in str(raised.value)
