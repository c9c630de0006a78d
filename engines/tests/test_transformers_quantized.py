"""Quantized linear layers inside classes of transformers."""

from __future__ import annotations

from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.testing import make_checkpoint


def test_linear_layers_of_a_transformers_class_are_quantized_and_weighed(tmp_path):
    path = make_checkpoint(tmp_path, family="gpt_neox", seed=3)
    engines = [
        LLMEngine(model=str(path), device="cpu", num_blocks=16, quantization=quantization)
        for quantization in (None, "int8")
    ]
    plain, quantized = (engine.metrics().modules["model_family"] for engine in engines)
    assert quantized.num_parameters == plain.num_parameters
    assert quantized.weight_bytes < 0.5 * plain.weight_bytes
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=0, ignore_eos=True)
    expected, found = (engine.generate(list(range(20)), params)[0].outputs[0] for engine in engines)
    assert len(found.token_ids) == 4
    assert found.cumulative_logprob != expected.cumulative_logprob  # it is the int8 weights that were used
