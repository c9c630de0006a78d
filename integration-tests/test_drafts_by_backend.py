"""On every backend whose rows do not depend on their company, drafts change no token, under masks too."""

from __future__ import annotations

from typing import Any

import pytest

from sagellm.accel.native import examine
from sagellm.engines import LLMEngine, SamplingParams

pytest.importorskip("xgrammar", reason="xgrammar is not installed: pip install 'sagellm-engines[grammar]'")

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 6},
        "again": {"type": "string", "maxLength": 12},
    },
    "required": ["city", "numbers", "again"],
    "additionalProperties": False,
}
PROMPTS = (
    "Repeat after me: one two three, one two three, one two three, one two",
    "def f(x):\n    return x + 1\n\ndef g(x):\n    return x + 1\n\ndef h(x):\n    return x",
)
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=40, n=2),
    SamplingParams(temperature=0.8, seed=4, max_tokens=40, repetition_penalty=1.2, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=60, structured_outputs={"json": SCHEMA}),
    SamplingParams(temperature=1.0, seed=9, max_tokens=60, n=2, structured_outputs={"json": SCHEMA}),
]
JOBS = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
BACKENDS = {
    "native, float32": {"forward_backend": "native", "dtype": "float32"},
    "native, bfloat16": {"forward_backend": "native", "dtype": "bfloat16"},
    "native, int8 KV": {"forward_backend": "native", "dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "native, fp8 KV": {"forward_backend": "native", "dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "native, int4": {"forward_backend": "native", "dtype": "bfloat16", "quantization": "int4"},
    "torch, float32": {"forward_backend": "torch", "dtype": "float32"},
}


def answers(**settings: Any) -> tuple[list[Any], Any]:
    """What is generated, and the metrics after it."""
    engine = LLMEngine("embedded", device="cpu", max_num_seqs=16, **settings)
    prompts, params = zip(*JOBS, strict=True)
    outputs = engine.generate(list(prompts), list(params))
    metrics = engine.metrics()
    engine.close()
    return [one for output in outputs for one in output.outputs], metrics


QUICK = ("native, bfloat16", "torch, float32")


@pytest.mark.parametrize(
    "backend", [each if each in QUICK else pytest.param(each, marks=pytest.mark.full) for each in BACKENDS]
)
def test_drafts_change_no_token(backend):
    """Nor a bit of a log-probability, where rows are computed as alone, as by `native`."""
    if backend.startswith("native") and examine().variant is None:
        pytest.skip("the native library is not built")
    expected, _ = answers(**BACKENDS[backend])
    for executor, num_blocks in (("inline", 20), ("overlapped", 256)):
        proposer = "suffix{max_tokens=6,min_match=1}"
        drafting = {"speculation": proposer, "adaptive_speculation": False, "executor": executor}
        found, metrics = answers(**BACKENDS[backend], **drafting, num_blocks=num_blocks)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected], executor
        if backend.startswith("native"):
            assert [one.logprobs for one in found] == [one.logprobs for one in expected]
        drafted = metrics.modules["speculation"]
        assert drafted.failure == ""
        assert 0 < drafted.num_accepted_tokens < drafted.num_draft_tokens
        assert bool(metrics.num_preemptions) == (num_blocks == 20)
