"""The native backend in an engine: the reference's tokens, however prompts are cut, cached or preempted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity import NUM_OUTPUT_TOKENS, Comparison, Reference
from transformers import AutoModelForCausalLM

from sagellm.accel.native import examine
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.testing import make_checkpoint

pytestmark = pytest.mark.skipif(
    examine().variant is None, reason="no variant of the native library runs here"
)

PROMPTS = [[3 + (7 * i * i + 5 * length) % 500 for i in range(length)] for length in (23, 40, 75)]
NUM_TOKENS = 12
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "qwen2": {},
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 20},
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: str = request.param
    return make_checkpoint(tmp_path_factory.mktemp("native") / family, family=family, **FAMILIES[family])


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("native") / "plain", family="qwen2")


def engine(path: Path, **settings: Any) -> LLMEngine:
    given = {"device": "cpu", "dtype": "float32", "num_blocks": 64, "forward_backend": "native"}
    return LLMEngine(model=str(path), **(given | settings))


def generate(made: LLMEngine, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in made.generate(prompts, params)]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """Greedy continuations by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    given = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
    with torch.inference_mode():
        outputs = [model.generate(torch.tensor([prompt]), **given)[0] for prompt in PROMPTS]
    return [output[len(prompt) :].tolist() for output, prompt in zip(outputs, PROMPTS, strict=True)]


def test_float32_tokens_are_those_of_transformers_however_prompts_are_cut(checkpoint, expected):
    for budget in (512, 24):
        assert generate(engine(checkpoint, max_num_batched_tokens=budget), PROMPTS) == expected


def test_auto_takes_native(qwen2):
    made = engine(qwen2, forward_backend="auto")
    assert made.config.forward.backend.name == "sagellm-accel:native"


def test_a_cached_prefix_and_preemption_change_no_token(qwen2):
    expected = [generate(engine(qwen2), [prompt])[0] for prompt in PROMPTS]
    made = engine(qwen2, num_blocks=11)  # too few for all at once
    assert generate(made, PROMPTS) == expected
    assert generate(made, PROMPTS[:1]) == expected[:1]  # its prefix is cached by now


def test_requests_with_one_system_prompt_have_the_tokens_of_transformers(tmp_path):
    """Blocks that the cache shares are read once for all eight."""
    reference = Reference.build(tmp_path, "qwen2")
    system = [3 + (11 * i * i + i) % 500 for i in range(300)]
    prompts = [[*system, *(7 + (i * j) % 400 for j in range(5 + 3 * i))] for i in range(8)]
    made = engine(reference.path, num_blocks=256, max_model_len=512)
    generate(made, [system])  # from now on its blocks are cached
    comparison = Comparison()
    reference.prepare(prompts)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    for prompt, output in zip(prompts, made.generate(prompts, params), strict=True):
        comparison.add(reference, prompt, list(output.outputs[0].token_ids), "shared system prompt")
        assert output.num_cached_tokens >= 256
    assert comparison.is_exact, comparison.wrong


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_log_probabilities_have_the_same_bits_alone_and_batched(qwen2, dtype, quantization):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)

    def scores(prompts: list[list[int]]) -> list[list[dict[int, float]]]:
        made = engine(qwen2, dtype=dtype, quantization=quantization, max_num_batched_tokens=32)
        outputs = [output.outputs[0] for output in made.generate(prompts, params)]
        return [
            [{token: each.logprob for token, each in top.items()} for top in out.logprobs] for out in outputs
        ]

    assert scores(PROMPTS) == [scores([prompt])[0] for prompt in PROMPTS]


def test_bfloat16_differs_from_float32_by_less_than_torch_does(qwen2):
    """Activations stay in float32 between products."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)

    def scores(**settings: Any) -> torch.Tensor:
        outputs = engine(qwen2, **settings).generate(PROMPTS, params)
        return torch.tensor(
            [
                each[token].logprob
                for output, prompt in zip(outputs, PROMPTS, strict=True)
                for each, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
            ]
        )

    exact = scores()
    native = (scores(dtype="bfloat16") - exact).abs().mean()
    torch_s = (scores(dtype="bfloat16", forward_backend="torch") - exact).abs().mean()
    assert 0 < native < torch_s
