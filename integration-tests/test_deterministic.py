"""With `deterministic` a request has the same bits alone and beside others, down to its log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parity import make_prompts

from sagellm.accel.native import examine
from sagellm.core import UnsupportedModelError
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.testing import make_checkpoint

PROMPTS = make_prompts(512, [1, 5, 17, 33, 64, 100, 129, 130, 40, 40, 2])
needs_native = pytest.mark.skipif(examine().variant is None, reason="the native library is not built")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deterministic") / "qwen3"
    return make_checkpoint(folder, family="qwen3", head_dim=32, vocab_size=512)


def make(path: Path, **settings: Any) -> LLMEngine:
    return LLMEngine(str(path), device="cpu", block_size=8, deterministic=True, **settings)


def answers(engine: LLMEngine, prompts: list[list[int]]) -> list[Any]:
    """Tokens and log-probabilities, half of the requests greedy and half of them drawn."""
    params = [
        SamplingParams(
            temperature=0.9 * (index % 2), seed=len(prompt), max_tokens=40, ignore_eos=True, logprobs=3
        )
        for index, prompt in ((PROMPTS.index(prompt), prompt) for prompt in prompts)
    ]
    outputs = [output.outputs[0] for output in engine.generate(prompts, params)]
    return [(output.token_ids, output.logprobs) for output in outputs]


@needs_native
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
        {"dtype": "bfloat16", "quantization": "int4"},
        pytest.param({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, marks=pytest.mark.full),
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_a_request_alone_and_beside_others_has_the_same_bits(path: Path, settings: dict[str, str]) -> None:
    with make(path, num_blocks=64, enable_prefix_caching=False, **settings) as engine:
        alone = [answers(engine, [prompt])[0] for prompt in PROMPTS]
    with make(path, num_blocks=30, max_num_batched_tokens=37, **settings) as engine:
        assert answers(engine, PROMPTS) == alone, "in a batch, in chunks, preempted"
        assert engine.metrics().num_preemptions > 0
        assert answers(engine, PROMPTS[::-1]) == alone[::-1], (
            "in another order, with prefixes that are cached"
        )


def test_a_backend_whose_bits_depend_on_the_batch_is_refused(path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="lacks batch_invariant, which the configuration asks"):
        make(path, num_blocks=64, forward_backend="torch")
