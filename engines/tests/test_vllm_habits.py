"""What people write who come from vLLM works, or the error says what to write."""

from __future__ import annotations

import asyncio
import re
import runpy
from enum import Enum
from pathlib import Path

import pytest
import torch

from sagellm.core import ConfigError, InvalidRequestError
from sagellm.engines import (
    LLM,
    AsyncLLMEngine,
    EngineConfig,
    LLMEngine,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from sagellm.engines.config.settings import ALL_NAMES
from sagellm.engines.config.vllm_names import VLLM_NAMES, without_vllm_names
from sagellm.engines.sampling.vllm_parameters import VLLM_PARAMETERS
from sagellm.engines.vllm_calls import CALL_ARGUMENTS, MISSING_METHODS

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def test_the_model_stands_first_and_settings_of_one_device_are_taken(checkpoint):
    habits = {"tensor_parallel_size": 1, "trust_remote_code": False, "enforce_eager": True, "seed": 1}
    with LLMEngine(checkpoint, dtype="float", num_blocks=32, **habits) as engine:
        assert (engine.config.model.name, engine.config.model.dtype) == (str(checkpoint), "float32")
        named = engine.generate([[5, 6]], sampling_params=GREEDY, use_tqdm=False)
        placed = engine.generate([[5, 6]], GREEDY)
        assert named[0].outputs[0].token_ids == placed[0].outputs[0].token_ids
        with pytest.raises(InvalidRequestError, match="two names of the same argument"):
            engine.generate([[5, 6]], GREEDY, sampling_params=GREEDY)


@pytest.mark.parametrize("name", ["progress", "use_tqdm"])
def test_a_bar_is_shown_or_not(checkpoint, name):
    with LLMEngine(checkpoint, num_blocks=32) as engine:
        for call, asked in ((engine.generate, [[5, 6]]), (engine.chat, [{"role": "user", "content": "Hi"}])):
            with pytest.raises(InvalidRequestError, match=f"{name} is 'x'; it must be True or False"):
                call(asked, GREEDY, **{name: "x"})


def test_the_asynchronous_engine_takes_the_same(checkpoint):
    async def use() -> list[int]:
        async with AsyncLLMEngine(str(checkpoint), num_blocks=32, pipeline_parallel_size=1) as engine:
            async for output in engine.generate([5, 6], sampling_params=GREEDY):
                tokens = output.outputs[0].token_ids
        return tokens

    assert len(asyncio.run(use())) == 4


@pytest.mark.parametrize(
    ("habit", "says"),
    [
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size is 2; it can only be 1 here: .*one device"),
        ({"trust_remote_code": True}, "never run"),
        ({"swap_space": 4}, r"kv_tiers=\{'host': '4GiB'\}"),
        ({"num_gpu_blocks_override": 100}, "set num_blocks"),
        ({"structured_outputs_config": {"backend": "xgrammar"}}, r"grammar_backend='xgrammar"),
        ({"speculative_config": {"method": "ngram"}}, r"speculation='ngram"),
        ({"gpu_memory_utilisation": 0.5}, r"Did you mean 'gpu_memory_utilization'"),
        ({"tensor_parallel_size": True}, "is True"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_other_values_are_refused_with_what_to_write(habit, says):
    with pytest.raises(ConfigError, match=says):
        LLMEngine("no/such/folder/at all", **habit)


def test_what_changes_nothing_is_left_out_and_is_no_setting_of_ours():
    accepted = {name: each.accepts[0] for name, each in VLLM_NAMES.items()}
    assert without_vllm_names(accepted | {"block_size": 8}) == {"block_size": 8}
    assert not VLLM_NAMES.keys() & ALL_NAMES.keys()


@pytest.mark.parametrize(
    ("given", "kept"), [("half", "float16"), ("float", "float32"), (torch.bfloat16, "bfloat16")], ids=str
)
def test_a_number_format_has_more_than_one_name(given, kept):
    assert EngineConfig.from_flat(dtype=given).model.dtype == kept


def test_a_misspelt_sampling_parameter_is_told_the_nearest():
    with pytest.raises(InvalidRequestError, match=r"no 'max_token'; .* Did you mean 'max_tokens'\?"):
        SamplingParams(max_token=5)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("best_of", "no 'best_of': give n and logprobs=0, and keep .* highest cumulative_logprob"),
        ("use_beam_search", "no beam search among sampling parameters; call LLMEngine.beam_search"),
        ("guided_decoding", "give structured_outputs="),
        ("structured_outputs", "is a int; it must be an object"),
        ("output_kind", "an output has all so far: for FINAL_ONLY keep the last one"),
        ("skip_reading_prefix_cache", r"namespace=Namespace\(salt=…\)"),
        ("spaces_between_special_tokens", "the tokenizer's own decoder"),
        ("logits_processors", "give their arguments as extra_args"),
    ],
)
def test_a_sampling_parameter_of_vllm_alone_says_what_to_do(name, told):
    with pytest.raises(InvalidRequestError, match=told):
        SamplingParams(**{name: 4})


def test_the_types_of_the_settings_are_those_of_the_schema():
    tool = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "engine_settings.py"))
    assert tool["TARGET"].read_text(encoding="utf-8") == tool["source"](), (
        "run engines/tools/engine_settings.py"
    )


class OutputKind(Enum):
    """As vLLM has it; users bring theirs."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def test_parameters_of_vllm_alone_are_accepted_with_what_changes_nothing():
    neutral = {name: each.accepts[-1] for name, each in VLLM_PARAMETERS.items()}
    assert SamplingParams(**neutral, temperature=0.5, n=2) == SamplingParams(temperature=0.5, n=2)
    assert not VLLM_PARAMETERS.keys() & SamplingParams.__dataclass_fields__.keys()
    assert SamplingParams(output_kind=OutputKind.CUMULATIVE, length_penalty=1.0) == SamplingParams()
    for kind in (OutputKind.DELTA, OutputKind.FINAL_ONLY):
        with pytest.raises(InvalidRequestError, match=r"no 'output_kind': .* for DELTA what is new"):
            SamplingParams(output_kind=kind)


@pytest.mark.parametrize("name", sorted(VLLM_PARAMETERS))
def test_other_values_of_them_are_refused_by_name(name):
    with pytest.raises(InvalidRequestError, match=f"SamplingParams has no '{name}': ."):
        SamplingParams(**{name: {"some": "thing"}})


IDS = [5, 6, 7]


def test_a_prompt_may_be_a_mapping_or_an_argument_of_its_own(make_engine):
    with make_engine() as engine:
        (expected,) = engine.generate(IDS, GREEDY)
        (text,) = engine.generate("the port", GREEDY)
        for found in (
            engine.generate({"prompt_token_ids": IDS}, GREEDY),
            engine.generate([TokensPrompt(prompt_token_ids=torch.tensor(IDS))], GREEDY),
            engine.generate({"prompt_token_ids": IDS, "multi_modal_data": None}, GREEDY),
            engine.generate(prompt_token_ids=IDS, sampling_params=GREEDY),
            engine.generate(prompt_token_ids=[IDS], sampling_params=[GREEDY]),
        ):
            assert [each.outputs[0].token_ids for each in found] == [expected.outputs[0].token_ids]
            assert found[0].prompt is None
        named, mixed, ids = engine.generate(
            [TextPrompt(prompt="the port"), {"prompt_token_ids": IDS, "prompt": "three"}, IDS], GREEDY
        )
        assert (named.prompt, named.outputs[0].token_ids) == ("the port", text.outputs[0].token_ids)
        assert (mixed.prompt, mixed.prompt_token_ids) == ("three", IDS)
        assert ids.outputs[0].token_ids == expected.outputs[0].token_ids
        engine.add_request({"prompt": "the port"}, GREEDY)
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert outputs[0].outputs[0].token_ids == text.outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({}, "a mapping has 'prompt' or 'prompt_token_ids'"),
        ({"prompt": None}, "a mapping has 'prompt' or 'prompt_token_ids'"),
        ({"prompt": [5]}, r"prompt\['prompt'\] is \[5\]; it must be a text"),
        ({"prompt_token_ids": "text"}, "prompt_token_ids is 'text'; it must be a list of token ids"),
        ({"prompt_token_ids": ["a"]}, "prompt: "),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "'multi_modal_data': the models here read text"),
        ({"prompt": "a", "cache_salt": "b"}, r"'cache_salt': give namespace=Namespace\(salt=…\)"),
        ({"text": "a"}, "has the key 'text': a prompt has 'prompt'"),
    ],
    ids=str,
)
def test_a_mapping_that_is_no_prompt_is_told_what_it_lacks(make_engine, prompt, says):
    with make_engine() as engine:
        with pytest.raises(InvalidRequestError, match=says):
            engine.generate(prompt, GREEDY)
        with pytest.raises(InvalidRequestError, match=says):
            engine.add_request(prompt, GREEDY)
        assert not engine.has_unfinished_requests()


def test_prompts_come_by_one_name(make_engine):
    with make_engine() as engine:
        with pytest.raises(InvalidRequestError, match="both of prompts and prompt_token_ids are given"):
            engine.generate([IDS], prompt_token_ids=[IDS])
        with pytest.raises(InvalidRequestError, match="neither of prompts and prompt_token_ids are given"):
            engine.generate(sampling_params=GREEDY)


def test_arguments_of_vllms_calls_are_accepted_with_their_defaults(make_engine):
    with make_engine() as engine:
        engine.generate([IDS], GREEDY, lora_request=None, priority=None, tokenization_kwargs=None)
        message = [{"role": "user", "content": "Hi"}]
        engine.chat(message, GREEDY, **{name: each.accepts[0] for name, each in CALL_ARGUMENTS.items()})
        for name, each in CALL_ARGUMENTS.items():
            with pytest.raises(
                InvalidRequestError, match=f"^{name} is 'x'; it can only be .*: {each.instead[:9]}"
            ):
                engine.chat(message, GREEDY, **{name: "x"})
        with pytest.raises(
            TypeError, match=r"generate\(\) has no argument 'progres'. Did you mean 'progress'"
        ):
            engine.generate([IDS], GREEDY, progres=True)
        with pytest.raises(TypeError, match=r"generate\(\) has no argument 'tools'"):
            engine.generate([IDS], GREEDY, tools=None)


def test_methods_by_vllms_names(make_engine):
    assert LLM is LLMEngine
    with make_engine() as engine:
        assert engine.get_default_sampling_params() == engine.default_params
        assert engine.get_tokenizer() is engine.tokenizer
        prompt = list(range(5, 45))
        engine.generate(prompt, GREEDY)
        assert engine.generate(prompt, GREEDY)[0].num_cached_tokens > 0
        assert engine.reset_prefix_cache() is True
        assert engine.generate(prompt, GREEDY)[0].num_cached_tokens == 0
        engine.add_request(prompt, GREEDY)
        engine.step()
        assert engine.reset_prefix_cache() is False, "a live request uses some of it"


def test_methods_that_are_missing_say_what_there_is(make_engine):
    with make_engine() as engine:
        for name, instead in MISSING_METHODS.items():
            assert not hasattr(engine, name)
            with pytest.raises(AttributeError, match=f"LLMEngine has no '{name}': {re.escape(instead)}"):
                getattr(engine, name)
        with pytest.raises(AttributeError, match="no attribute 'generat'"):
            engine.generat  # noqa: B018


def test_the_asynchronous_engine_has_them_too(checkpoint):
    async def use() -> None:
        async with AsyncLLMEngine(str(checkpoint), num_blocks=32) as engine:
            prompt = {"prompt_token_ids": IDS, "prompt": "three"}
            async for output in engine.generate(prompt, sampling_params=GREEDY, request_id="7"):
                assert (output.request_id, output.prompt) == ("7", "three")
            assert await engine.get_tokenizer() is engine.engine.tokenizer
            assert await engine.reset_prefix_cache() is True

    asyncio.run(use())
