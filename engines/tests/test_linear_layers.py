"""Linear layers on a CPU whose 16-bit products are slow: few rows as they are, many rows widened."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from sagellm.accel import widening
from sagellm.accel.linear import (
    LinearContext,
    PackedLinear,
    PlainLinear,
    Staging,
    WideRows,
    linear_methods,
)
from sagellm.accel.widening import Widening, widened_product
from sagellm.core import WHOLE, ModelMetrics, StoredTensor, TensorSpec
from sagellm.core.protocols.model_spec import FusedLinear, LinearPart
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.testing import make_checkpoint

MIN_ROWS = 4
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def widened_rows(monkeypatch):
    """A CPU that widens from four rows on; lists the rows of each product that it widens."""
    monkeypatch.setattr(widening, "_measured", lambda dtype: Widening(min_rows=MIN_ROWS))
    rows = []

    def noted(x, weight, bias=None):
        rows.append(len(x))
        return widened_product(x, weight, bias)

    monkeypatch.setattr("sagellm.accel.linear.widened_product", noted)
    return rows


def some(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


@pytest.mark.parametrize(
    ("query_lens", "wide"),
    [
        ([1], []),
        ([1] * 40, []),  # a large batch of decodes: what a sequence gets does not depend on the others
        ([MIN_ROWS - 1], []),
        ([MIN_ROWS], range(MIN_ROWS)),
        ([10, 20], range(30)),
        ([1, 10, 2, MIN_ROWS, 1], [*range(1, 11), *range(13, 13 + MIN_ROWS)]),
    ],
)
def test_rows_of_sequences_that_compute_many_tokens_are_widened(widened_rows, query_lens, wide):
    weight, bias, x = some(33, 64), some(33), some(sum(query_lens), 64)
    wide_rows = WideRows(torch.bfloat16, CPU)
    wide_rows.plan(query_lens)
    product = PlainLinear(CPU).adopt(weight, bias).apply(x, LinearContext(wide_rows))
    expected = functional.linear(x, weight, bias)
    expected[list(wide)] = widened_product(x, weight, bias)[list(wide)]
    assert widened_rows == ([len(wide)] if wide else [])
    assert torch.allclose(product.float(), expected.float(), rtol=1e-2, atol=1e-2)


def test_what_is_to_be_widened_is_not_packed(widened_rows):
    assert not PackedLinear.takes(torch.bfloat16, CPU)
    assert type(linear_methods(torch.bfloat16, CPU, None)()) is PlainLinear


def test_memory_for_reading_is_gone_once_a_weight_is_packed(monkeypatch):
    monkeypatch.setattr("sagellm.accel.linear.packed_linear", lambda weight: None)
    staging = Staging()
    linear, there = PackedLinear(CPU, staging), weakref.ref(staging)
    stored = StoredTensor(path=Path("w"), dtype="BF16", shape=(8, 64), num_bytes=1024)
    part = LinearPart(TensorSpec("w", (8, 64), 0), None, slice(0, 8), stored)
    linear.create(FusedLinear((part,)), WHOLE, torch.bfloat16)
    linear.load(0, SimpleNamespace(load=lambda tensor, out: out.fill_(1)))
    del staging
    assert there() is None
    assert linear.metrics() == ModelMetrics(num_parameters=512, weight_bytes=1024)


def test_float32_is_not_widened(widened_rows):
    wide_rows = WideRows(torch.float32, CPU)
    wide_rows.plan([50])
    PlainLinear(CPU).adopt(torch.ones(8, 64)).apply(torch.ones(50, 64), LinearContext(wide_rows))
    assert widened_rows == []


@pytest.mark.parametrize("family", ["qwen2", "olmo2"])  # a decoder of ours, and a class of transformers
def test_prefill_is_widened_in_all_layers_and_decode_in_none(tmp_path, widened_rows, family):
    path = make_checkpoint(tmp_path, family=family, dtype="bfloat16")
    prompt = list(range(5, 25))
    with LLMEngine(
        model=str(path), num_blocks=16, enable_prefix_caching=False, forward_backend="torch"
    ) as engine:
        widened_rows.clear()  # a family may be tried when it is loaded
        [output] = engine.generate([prompt], GREEDY)
    # Query, key and value, gate and up are fused in ours; the head sees one row.
    assert widened_rows == [len(prompt)] * (2 * (4 if family == "qwen2" else 7))
    assert len(output.outputs[0].token_ids) == 4


def test_a_tied_head_scores_many_rows_widened(tmp_path, widened_rows):
    path = make_checkpoint(tmp_path, dtype="bfloat16")
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with LLMEngine(model=str(path), num_blocks=16, forward_backend="torch") as engine:
        engine.generate([list(range(5, 25))], params)
    assert widened_rows == [20] * 9  # two layers of four, and the head
