"""The backend `cuda` computes what `torch` computes; in Triton's interpreter unless TRITON_INTERPRET=0."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from sagellm.accel import (
    FP8E5M2Quantizer,
    FP8Quantizer,
    Int8Quantizer,
    QuantizationConfig,
    QuantizationGranularity,
)
from sagellm.core import InputBatch, KVGroup, KVLayout, PluginRegistry, UnsupportedModelError
from sagellm.core.protocols.attention import HiddenStates
from sagellm.core.protocols.forward import StepLimits
from sagellm.engines import EngineConfig, LLMEngine, SamplingParams
from sagellm.engines.attention.sdpa import SDPABackend
from sagellm.engines.forward.torch_backend import TorchForwardBackend
from sagellm.engines.loading.load import open_model
from sagellm.engines.testing import make_checkpoint

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="triton is not installed: pip install triton")

DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")
INTERPRETED = {"interpreted": DEVICE.type == "cpu"}
BLOCK_SIZE, NUM_BLOCKS = 8, 64
SMALL = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 515}
MODELS = {
    "qwen3": {"family": "qwen3"},
    "qwen2": {"family": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 1},
    "llama3": {
        "family": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"family": "mistral", "sliding_window": 9},
}


def backends(path, *, kv_dtype="float32", **options):
    from sagellm.accel.cuda.backend import CudaForwardBackend

    config = EngineConfig(model={"name": str(path), "device": str(DEVICE), "dtype": "float32"})
    opened = open_model(config.model, PluginRegistry.load())
    geometry = opened.spec.geometry
    attention = SDPABackend(
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        block_size=BLOCK_SIZE,
    )
    given = {"device": DEVICE, "dtype": torch.float32, "attention": attention}
    with opened.reading() as weights:
        both = (
            TorchForwardBackend(opened.spec, weights, **given),
            CudaForwardBackend(opened.spec, weights, **given, **INTERPRETED, **options),
        )
    for backend, dtype in zip(both, ("float32", kv_dtype), strict=True):
        is_scaled = dtype in ("int8", "float8_e4m3fn")
        group = KVGroup(
            layer_ids=tuple(range(geometry.num_layers)),
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            dtype=dtype,
            scale_bytes_per_head=4 * BLOCK_SIZE if is_scaled else 0,
        )
        backend.initialize_kv_caches([KVLayout(group=group, block_size=BLOCK_SIZE)], [NUM_BLOCKS])
    return both


def step(sequences, wanted=None):
    """Return a batch of the last `num_new` of `length` tokens of sequences with blocks of their own."""
    ids, positions, slots, tables, ends = [], [], [], [], []
    width = NUM_BLOCKS // len(sequences)
    for seat, (num_new, length) in enumerate(sequences):
        blocks = [(seat + 3 * place) % NUM_BLOCKS for place in range(width)] if seat < 3 else []
        places = range(length - num_new, length)
        ids += [(7 * seat + 11 * place) % 500 for place in places]
        positions += places
        slots += [blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in places]
        tables.append(blocks)
        ends.append(len(ids) - 1)

    def tensor(values):
        return torch.tensor(values, dtype=torch.int64, device=DEVICE)

    return InputBatch(
        input_ids=tensor(ids),
        position_ids=tensor(positions),
        slot_mapping=tensor(slots),
        block_tables=tensor(tables),
        query_lens=[num_new for num_new, _ in sequences],
        seq_lens=[length for _, length in sequences],
        logits_indices=tensor(ends if wanted is None else wanted),
    )


STEPS = [
    step([(30, 30), (5, 5), (40, 40)]),
    step([(1, 31), (1, 6), (1, 41)]),
    step([(4, 35), (1, 7), (20, 61)], wanted=[0, 1, 2, 3, 4, 24, 20]),
    step([(1, 36), (1, 8), (1, 62)]),
]


@pytest.fixture(
    scope="module",
    params=["qwen3", *(pytest.param(each, marks=pytest.mark.full) for each in MODELS if each != "qwen3")],
)
def checkpoint(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("cuda"), **SMALL | MODELS[request.param])


@pytest.mark.full
@pytest.mark.no_cover
def test_operations_are_those_of_torch_in_order_and_change_no_logits(checkpoint):
    taken = {}
    for backend in backends(checkpoint):
        expected = backend.forward(STEPS[0])
        backend.report_operations(lambda operations, backend=backend: taken.update({backend: operations}))
        torch.testing.assert_close(backend.forward(STEPS[0]), expected, rtol=0, atol=0)
        assert all(before.end_ns == each.start_ns < each.end_ns for before, each in pairwise(taken[backend]))
    by_torch, by_cuda = ([each.operation for each in operations] for operations in taken.values())
    assert by_torch.pop(1) == "rope"  # torch looks up all angles before the first layer
    assert by_cuda == by_torch
    assert by_cuda[1:9] == ["norm", "qkv", "rope", "attend", "output", "norm", "gate_up", "down"]


@pytest.mark.no_cover
def test_logits_of_prefills_decodes_and_drafts_are_those_of_torch(checkpoint):
    expected, found = backends(checkpoint)
    for each in STEPS:
        torch.testing.assert_close(found.forward(each), expected.forward(each), rtol=1e-4, atol=1e-4)
    assert found.model_metrics() == expected.model_metrics()


@pytest.mark.full
def test_hidden_states_of_any_layers_and_tokens_are_those_of_torch(qwen3):
    expected, found = backends(qwen3)
    num_layers, size = found._spec.geometry.num_layers, SMALL["hidden_size"]
    layers = tuple(range(num_layers + 1))
    for each in STEPS[:2]:
        rows = torch.tensor([len(each.input_ids) - 1, 0, 1], device=DEVICE)
        values = torch.full((2, len(layers), len(rows), size), torch.nan, device=DEVICE)
        theirs, ours = (
            backend.forward(replace(each, hidden=HiddenStates(layers=layers, indices=rows, values=out)))
            for backend, out in zip((expected, found), values, strict=True)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values[1], values[0], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("cuda"), **SMALL | MODELS["qwen3"])


@pytest.fixture(scope="module")
def mild(tmp_path_factory):
    """A model whose attention does not magnify rounding errors as random weights otherwise do."""
    return make_checkpoint(tmp_path_factory.mktemp("cuda"), sharpness=0.2, **SMALL | MODELS["qwen3"])


def _error(found, expected, each):
    logits, exact = found.forward(each), expected.forward(each)
    return float((logits - exact).norm() / exact.norm())


# Random layers magnify what one value of KV is off: 1/254 of its row, 1/16 or 1/256 of itself.
@pytest.mark.full
@pytest.mark.parametrize(("kv_dtype", "most"), [("int8", 0.03), ("float8_e4m3fn", 0.12), ("bfloat16", 0.01)])
def test_kv_of_fewer_bits_costs_little(mild, kv_dtype, most):
    expected, found = backends(mild, kv_dtype=kv_dtype)
    assert all(0 < _error(found, expected, each) < most for each in STEPS)


@pytest.mark.full
def test_fp8_linears_cost_little_and_are_smaller(mild):
    quantizer = FP8Quantizer()
    expected, found = backends(mild, quantizer=quantizer)
    assert 0 < _error(found, expected, STEPS[0]) < 0.4
    assert found.model_metrics().weight_bytes < expected.model_metrics().weight_bytes
    assert 0 < quantizer.metrics().quantized_bytes < quantizer.metrics().original_bytes / 3


@pytest.mark.full
def test_blocks_are_copied_read_and_written(qwen3):
    _, found = backends(qwen3, kv_dtype="int8")
    before = found.forward(STEPS[0])
    size = found.metrics().kv_bytes // NUM_BLOCKS
    used = sorted(set(STEPS[0].block_tables.flatten().tolist()))
    kept = [bytearray(size) for _ in used]
    found.read_blocks(used, [memoryview(each) for each in kept])
    assert any(any(each) for each in kept)
    found.write_blocks(used, [memoryview(bytes(size)) for _ in used])
    empty = bytearray(b"x" * size)
    found.read_blocks(used[:1], [memoryview(empty)])
    assert not any(empty)
    found.write_blocks(used, [memoryview(each) for each in kept])
    torch.testing.assert_close(found.forward(STEPS[0]), before)
    found.copy_blocks([(used[0], used[1])])
    copied = bytearray(size)
    found.read_blocks(used[1:2], [memoryview(copied)])
    assert copied == kept[0]


@pytest.mark.full
def test_an_engine_writes_what_it_writes_with_torch(qwen3):
    def texts(backend):
        options = INTERPRETED if backend == "cuda" else {}
        settings = {"backend": {"name": backend, "options": options}}
        engine = LLMEngine(
            EngineConfig(
                model={"name": str(qwen3), "device": str(DEVICE), "dtype": "float32"},
                kv={"num_blocks": 64},
                forward=settings,
            )
        )
        prompts = [[5, 6, 7, 8] * 5, [9, 10], [5, 6, 7, 8] * 5 + [1]]
        outputs = engine.generate(prompts, SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=6))
        return [output.outputs[0].token_ids for output in outputs]

    assert texts("cuda") == texts("torch")


def test_what_it_cannot_run_is_refused_with_the_reason(qwen3):
    from sagellm.core import Shard

    odd = make_checkpoint(qwen3.parent / "odd", **SMALL | {"intermediate_size": 40})
    with pytest.raises(UnsupportedModelError, match="multiples of 16"):
        backends(odd, quantizer=FP8Quantizer())
    grouped = FP8Quantizer(QuantizationConfig(granularity=QuantizationGranularity.PER_GROUP, group_size=16))
    for quantizer in (Int8Quantizer(), FP8E5M2Quantizer(), grouped):
        with pytest.raises(UnsupportedModelError, match="it takes fp8 with a scale for each output"):
            backends(qwen3, quantizer=quantizer)
    with pytest.raises(UnsupportedModelError, match="cannot hold a part of a model"):
        backends(qwen3, shard=Shard(0, 2))


def recorded(compute):
    """Stand in for a graph: run what was captured once more."""
    compute()
    return compute


@pytest.mark.full
def test_steps_padded_for_graphs_have_the_same_logits_and_store_nothing_more(qwen3):
    expected, found = backends(qwen3, decode_graphs=[4, 8], prefill_graphs=[8, 32])
    prefill, decodes, mixed, _ = STEPS
    torch.testing.assert_close(found.forward(prefill), expected.forward(prefill), rtol=1e-4, atol=1e-4)
    before = found._kv.bytes.clone()
    with torch.inference_mode():
        found._capture(NUM_BLOCKS, recorded)
    assert torch.equal(found._kv.bytes, before), "a step of padding stores nothing"
    drafts = step([(5, 36), (1, 8), (1, 62)], wanted=[0, 1, 2, 3, 4, 5, 6])
    for each in (decodes, mixed, drafts, decodes):  # a smaller step finds what a larger one left behind
        before = found._kv.bytes.clone()
        torch.testing.assert_close(found.forward(each), expected.forward(each), rtol=1e-4, atol=1e-4)
        changed = (found._kv.bytes != before).reshape(NUM_BLOCKS, -1).any(1).nonzero()[:, 0]
        assert set(changed.tolist()) <= set((each.slot_mapping // BLOCK_SIZE).tolist())
    metrics = found.metrics()
    assert (metrics.num_graphs, metrics.num_graph_steps, metrics.num_launched_steps) == (4, 4, 1)


def test_steps_that_fit_no_graph_or_are_profiled_are_launched_and_counted(qwen3, monkeypatch):
    expected, found = backends(qwen3, decode_graphs=[1, 3], prefill_graphs=[])
    found.expect_steps([], StepLimits(max_model_len=256, max_num_seqs=3, max_num_batched_tokens=64))
    with torch.inference_mode():
        found._capture(NUM_BLOCKS // 2, recorded)
    ended = []
    monkeypatch.setattr(found._transfers, "after_step", lambda: ended.append(None))
    last, first = (
        HiddenStates(layers=(layer,), indices=STEPS[1].logits_indices, values=torch.empty(1, 3, 32))
        for layer in (found._spec.geometry.num_layers, 0)
    )
    for each, num_launched in (
        (STEPS[1], 0),
        (replace(STEPS[1], hidden=last), 0),
        (replace(STEPS[1], hidden=first), 1),
        (step([(2, 5), (1, 3)]), 2),  # drafts
        (step([(1, 3)]), 3),  # tables of more blocks than the graphs have room for
    ):
        torch.testing.assert_close(found.forward(each), expected.forward(each), rtol=1e-4, atol=1e-4)
        assert found.metrics().num_launched_steps == num_launched
    profiled = []
    found.report_operations(profiled.append)
    found.forward(STEPS[1])
    assert (len(profiled), found.metrics().num_launched_steps) == (1, 4)
    assert len(ended) == found.metrics().num_steps == 6, "reads of blocks wait for the end of any step"


def test_steps_beat_in_each_layer(qwen3):
    _, found = backends(qwen3)
    beats = []
    found.report_progress(lambda: beats.append(None))
    found.forward(STEPS[3])
    assert len(beats) == 2 * found._spec.geometry.num_layers
