"""Bad input is a clear error within a second, the engine goes on, and no block is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sagellm.core import (
    CheckpointError,
    ConfigError,
    InvalidRequestError,
    Namespace,
    OutOfMemoryError,
    SageLLMError,
)
from sagellm.engines import EngineConfig, LLMEngine, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(make_engine) -> LLMEngine:
    made = make_engine(num_blocks=16, block_size=16, max_model_len=512)
    made.generate([5, 6, 7], GREEDY)
    return made


BAD_PROMPTS = {
    "empty text": ("", "empty"),
    "no tokens": ([], "empty"),
    "too long": ([5] * 600, "at most 511"),
    "beyond the vocabulary": ([5, 10**7], "vocabulary"),
    "negative": ([5, -1], "negative"),
    "not ints": ([5, 1.5], "ints"),
    "bytes": (b"abc", "bytes"),
    "none": (None, "ints"),
    "a mapping": ({"text": "abc"}, "has the key 'text'"),
    "half a surrogate pair": ("abc\udcff", "Unicode"),
}


@pytest.mark.parametrize(("prompt", "words"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_prompt_is_refused(engine, all_blocks_are_back, prompt, words):
    with pytest.raises(InvalidRequestError, match=words):
        engine.add_request(prompt, GREEDY)
    assert all_blocks_are_back(engine)
    assert len(engine.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids) == 4


BAD_PARAMS = {
    "nan": {"temperature": float("nan")},
    "negative temperature": {"temperature": -1.0},
    "top_p": {"top_p": 0.0},
    "max_tokens": {"max_tokens": 0},
    "n": {"n": 0},
    "unknown stop id": {"stop_token_ids": [10**7]},
    "negative stop id": {"stop_token_ids": [-3]},
    "huge n": {"n": 10**9},
}


@pytest.mark.parametrize("options", BAD_PARAMS.values(), ids=BAD_PARAMS)
def test_bad_parameters_are_refused(engine, all_blocks_are_back, options):
    with pytest.raises(InvalidRequestError, match=next(iter(options))):
        engine.add_request([5, 6], SamplingParams(**options))
    assert all_blocks_are_back(engine)
    assert len(engine.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids) == 4


@pytest.mark.parametrize("prompts", [5, b"abc", 1.5])
def test_what_is_no_list_of_prompts_is_refused(engine, prompts):
    with pytest.raises(InvalidRequestError, match=f"type {type(prompts).__name__}"):
        engine.generate(prompts, GREEDY)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("params", {"params": {"max_tokens": 3}}),
        ("namespace", {"namespace": "tenant"}),
        ("namespace", {"namespace": Namespace([])}),
        ("request_id", {"request_id": 5}),
        ("request_id", {"request_id": ["one"]}),
        ("priority", {"priority": "high"}),
    ],
)
def test_an_argument_of_the_wrong_type_is_named(engine, name, options):
    with pytest.raises(InvalidRequestError, match=f"{name} is "):
        engine.add_request([5, 6], **options)


def test_no_params_for_a_prompt_are_refused(engine):
    with pytest.raises(InvalidRequestError, match="0 params for 1 prompts"):
        engine.generate([[5, 6]], [])


def test_a_request_that_no_pool_could_hold_names_blocks_and_setting(engine):
    params = SamplingParams(max_tokens=300)
    with pytest.raises(InvalidRequestError, match=r"need 2\d KV blocks.*there are 16.*kv\.num_blocks"):
        engine.add_request([5] * 100, params)


def test_the_error_of_one_request_leaves_the_others_alone(make_engine, all_blocks_are_back, monkeypatch):
    engine = make_engine()
    expected = engine.generate([[5, 6, 7], [8, 9]], GREEDY)
    runner = engine.client.core.runner
    forward = runner.execute_model

    def fail_for_13(batch):
        if 13 in batch.input_ids.tolist():
            raise RuntimeError("thirteen")
        return forward(batch)

    monkeypatch.setattr(runner, "execute_model", fail_for_13)
    outputs = engine.generate([[5, 6, 7], [13, 13], [8, 9]], GREEDY)
    assert outputs[1].outputs[0].finish_reason == "error"
    assert "thirteen" in outputs[1].outputs[0].error
    for ours, theirs in zip((outputs[0], outputs[2]), expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
    assert all_blocks_are_back(engine)


def test_unknown_settings_name_the_nearest(checkpoint):
    with pytest.raises(ConfigError, match="block_size"):
        LLMEngine(model=str(checkpoint), blok_size=16)


@pytest.mark.parametrize(
    "setting",
    [
        "prefix_cache",
        "eviction_policy",
        "kv_pool",
        "kv_allocator",
        "scheduler",
        "attention_backend",
        "forward_backend",
    ],
)
def test_unknown_modules_list_what_is_installed(make_engine, setting):
    with pytest.raises(SageLLMError, match="installed: "):
        make_engine(**{setting: "nonesuch"})


def test_an_engine_without_blocks_does_not_start(make_engine):
    with pytest.raises(ConfigError, match=r"kv\.pool is 'null', which has no blocks"):
        make_engine(kv_pool="null")


def test_an_option_that_the_policy_does_not_take_is_told(make_engine):
    with pytest.raises(ConfigError, match=r"'lru' has no option 'depth'; it takes no options"):
        make_engine(eviction_policy="lru{depth=3}")


def test_a_model_in_the_place_of_a_configuration_is_refused():
    with pytest.raises(ConfigError, match=r"config is 'some-model'; it must be an EngineConfig"):
        LLMEngine(config="some-model")
    with pytest.raises(ConfigError, match="two configurations"):
        LLMEngine(EngineConfig(), config=EngineConfig())


def test_an_unknown_module_is_found_before_a_model_is_looked_for():
    with pytest.raises(SageLLMError, match="Did you mean 'lru'"):
        LLMEngine(model="no/such/folder/at all", eviction_policy="lruu")


@pytest.mark.parametrize("num_blocks", [10**10, 10**15])
def test_more_blocks_than_memory_holds_are_refused_at_once(make_engine, num_blocks):
    with pytest.raises(OutOfMemoryError, match=r"lower kv\.num_blocks"):
        make_engine(num_blocks=num_blocks)


def test_a_checkpoint_that_asks_for_senseless_sampling_is_named(make_engine, checkpoint, tmp_path):
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    (copy / "generation_config.json").write_text('{"do_sample": true, "temperature": -1.0}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature is -1\.0"):
        make_engine(model=str(copy))


@pytest.mark.parametrize("priority", [1 << 31, -(1 << 31) - 1, True, 1.5, "high"])
def test_a_priority_that_is_no_32_bit_integer_is_refused(make_engine, priority):
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match=r"priority is .* from -2147483648 to 2147483647"):
        engine.add_request([5, 6], SamplingParams(max_tokens=2), priority=priority)
    assert not engine.has_unfinished_requests()
    for largest in ((1 << 31) - 1, -(1 << 31)):
        engine.add_request([5, 6], SamplingParams(max_tokens=2), priority=largest)
    while engine.has_unfinished_requests():
        engine.step()
