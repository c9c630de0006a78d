"""What people write who come from vLLM works, or the error says what to write."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

import pytest
import torch

from sagellm.core import ConfigError, InvalidRequestError
from sagellm.engines import AsyncLLMEngine, EngineConfig, LLMEngine, SamplingParams
from sagellm.engines.config.settings import ALL_NAMES
from sagellm.engines.config.vllm_names import VLLM_NAMES, without_vllm_names

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
        ("use_beam_search", "there is no beam search; leave it out"),
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
