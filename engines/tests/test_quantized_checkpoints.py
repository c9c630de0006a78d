"""Quantized checkpoints of each format give what their dequantized selves give, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sagellm.accel.coded import expand
from sagellm.accel.native.library import examine
from sagellm.accel.weights import WeightReader
from sagellm.core import (
    CheckpointError,
    PluginRegistry,
    QuantizationConfig,
    Shard,
    TensorSpec,
    UnsupportedModelError,
)
from sagellm.engines import SamplingParams
from sagellm.engines.loading import installed_families, open_checkpoint
from sagellm.engines.loading.format_and_family import installed_formats
from sagellm.engines.models.causal_lm import BuildContext
from sagellm.engines.models.decoder_loading import build_decoder
from sagellm.engines.testing import make_checkpoint
from sagellm.engines.testing.quantized import (
    LAYOUTS,
    ROUNDED_ACTIVATIONS,
    STATIC_SCALE,
    Layout,
    quantized_copy,
)

PROMPTS = [[5, 17, 300, 41, 8, 99], [7] * 3]
NATIVE = pytest.param(
    "native", marks=pytest.mark.skipif(examine().variant is None, reason="no native library")
)
BACKENDS = ["torch", NATIVE]
Copies = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Copies:
    """Return what makes a quantized copy and its dequantized self, once for each layout."""
    into = tmp_path_factory.mktemp("quantized")
    original = make_checkpoint(into / "original", intermediate_size=160, head_dim=32)
    return cache(lambda layout: quantized_copy(original, into, layout))


def opened(path: Path):
    registry = PluginRegistry.load()
    return open_checkpoint(path, installed_families(registry), installed_formats(registry))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_of_the_dequantized_checkpoint(copies, layout):
    quantized, dequantized = copies(layout)
    model = opened(quantized)
    expected = load_file(dequantized / "model.safetensors")
    assert model.weights.tensors.keys() == expected.keys()
    reader = WeightReader(model.weights, torch.float32)
    num_coded = 0
    for name, tensor in model.spec.tensors.items():
        assert torch.equal(reader.load(tensor), expected[name]), name
        num_coded += model.weights.tensors[name].form is not None
    assert num_coded == 14
    assert {path.name for path in model.files} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_are_those_of_the_dequantized_checkpoint(copies, make_engine, layout, backend):
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, ignore_eos=True)
    results = []
    for path in copies(layout):
        engine = make_engine(model=str(path), forward_backend=backend)
        results.append([output.outputs[0] for output in engine.generate(PROMPTS, params)])
        engine.close()
    for got, expected in zip(*results, strict=True):
        assert got.token_ids == expected.token_ids
        if backend == "native" and LAYOUTS[layout].has_order:  # it sums in the order of the groups
            assert got.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-4)
        else:
            assert got.logprobs == expected.logprobs


@pytest.mark.parametrize(
    "layout", ["awq", "gptq-int4", "gptq-int4-order", "gptq-int8", "compressed-int8-plain"]
)
def test_int8_activations_are_those_of_the_reference(copies, make_engine, layout):
    if examine().variant is None:
        pytest.skip("no native library")
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True)
    results = []
    for settings in (("native", "int8"), ("torch", "int8"), ("torch", None)):
        backend, activations = settings
        path = str(copies(layout)[0])
        engine = make_engine(model=path, forward_backend=backend, activations=activations, dtype="float32")
        results.append([output.outputs[0] for output in engine.generate(PROMPTS, params)])
        engine.close()
    for native, reference, plain in zip(*results, strict=True):
        assert native.token_ids == reference.token_ids
        error = abs(native.cumulative_logprob - reference.cumulative_logprob)
        assert error < 2e-3
        if plain.token_ids == native.token_ids:
            assert error < abs(native.cumulative_logprob - plain.cumulative_logprob) / 2


def test_int8_activations_need_weights_stored_as_integers(copies, make_engine):
    for path in (copies("awq")[1], copies("mxfp4")[0]):
        with pytest.raises(
            UnsupportedModelError, match=r"there are none here \(it has \d+ in .*leave it out"
        ):
            make_engine(model=str(path), activations="int8")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [0, 1])
def test_halves_put_together_are_the_weight(copies, layout, axis):
    weights = opened(copies(layout)[0]).weights
    for name, shape in (("self_attn.k_proj", (64, 64)), ("self_attn.q_proj", (128, 64))):
        tensor = TensorSpec(f"model.layers.0.{name}.weight", shape, axis, 32)
        form, order = weights.tensors[tensor.name].form, weights.input_order(tensor)
        whole = expand(weights.coded_rows(TensorSpec(tensor.name, shape), slice(0, shape[0])), form)
        halves = []
        for rank in range(2):
            pieces = weights.coded_pieces(tensor, shard=Shard(rank, 2))
            halves.append(np.concatenate([expand(rows, form) for _, rows in pieces]))
        assert halves[0].shape[axis] == shape[axis] // 2
        assert np.array_equal(np.concatenate(halves, axis), whole)
        assert (order is not None) == form.has_order


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_from_anywhere_are_those_of_the_whole(copies, layout):
    weights = opened(copies(layout)[0]).weights
    tensor = TensorSpec("model.layers.1.mlp.up_proj.weight", (160, 64))
    form = weights.tensors[tensor.name].form
    whole = expand(weights.coded_rows(tensor, slice(0, 160)), form)
    for rows in (slice(0, 1), slice(3, 17), slice(31, 65), slice(159, 160)):
        got = weights.coded_rows(tensor, rows)
        assert np.array_equal(expand(got, form), whole[rows])
        assert got.scales.dtype in (np.float32, np.float16)
        assert got.codes.dtype in (np.uint8, np.int8)


def test_a_class_of_transformers_gets_the_numbers(tmp_path, make_engine):
    original = make_checkpoint(tmp_path / "original", family="olmo2", intermediate_size=160)
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, ignore_eos=True)
    quantized, dequantized = quantized_copy(original, tmp_path, "gptq-int4-order")
    results = []
    for path in (quantized, dequantized):
        engine = make_engine(model=str(path))
        results.append([output.outputs[0] for output in engine.generate(PROMPTS, params)])
        engine.close()
    assert [(each.token_ids, each.logprobs) for each in results[0]] == [
        (each.token_ids, each.logprobs) for each in results[1]
    ]
    with pytest.raises(UnsupportedModelError, match="which --quantization would round again; leave it out"):
        make_engine(model=str(quantized), quantization="int8")
    rounding, _ = quantized_copy(original, tmp_path, "fp8")
    with pytest.raises(UnsupportedModelError, match="the checkpoint wants activations rounded"):
        make_engine(model=str(rounding))


def test_quantizing_at_loading_leaves_quantized_weights_as_they_are(tmp_path):
    original = make_checkpoint(tmp_path / "original", intermediate_size=160, tie_word_embeddings=False)
    model = opened(quantized_copy(original, tmp_path, "awq")[0])
    int8 = PluginRegistry.load().make("quantizer", "int8", QuantizationConfig())
    sizes = []
    for quantizer in (None, int8):
        context = BuildContext(
            dtype=torch.float32,
            device=torch.device("cpu"),
            weights=WeightReader(model.weights, torch.float32),
            quantizer=quantizer,
        )
        with torch.inference_mode():
            sizes.append(build_decoder(model.spec, context).metrics().weight_bytes)
    assert sizes[1] == sizes[0] - 515 * 64 * 3 + 515 * 4  # the head alone, with a scale for each row


def test_a_backend_that_reads_plain_weights_alone_is_told_of_quantized_ones(copies):
    weights = opened(copies("awq")[0]).weights
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(UnsupportedModelError, match=f"'{name}' is stored quantized, as INT4, and was asked"):
        weights.get(TensorSpec(name, (160, 64)))
    with pytest.raises(CheckpointError, match="has no codes: it is stored as plain numbers"):
        weights.coded_rows(TensorSpec("model.norm.weight", (64,)), slice(0, 1))


@pytest.mark.parametrize("size", [3, 5])
def test_parts_that_would_cut_a_group_are_refused(copies, size):
    weights = opened(copies("awq")[0]).weights
    tensor = TensorSpec("model.layers.0.mlp.up_proj.weight", (160, 64), 1)
    with pytest.raises(CheckpointError, match=r"cannot be divided at inputs 0 to .*, as 32 inputs are"):
        weights.coded_rows(tensor, slice(0, 1), Shard(0, size))


def test_heads_stay_whole_where_a_model_is_divided(copies):
    tensors = opened(copies("awq")[0]).spec.tensors
    units = {name.split(".")[-2]: tensor.shard_unit for name, tensor in tensors.items()}
    assert {name for name, unit in units.items() if unit == 32} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert units["up_proj"] == units["down_proj"] == 1


def rounded(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return activations as a layout's config says that they are rounded, in float32."""
    config = layout.config
    inputs = {"type": "float"}
    if config["quant_method"] == "compressed-tensors":
        inputs = config["config_groups"]["group_0"]["input_activations"]
    elif layout.describe is not None:
        inputs = {"type": "int" if layout.describe(x[0])["_type"] == "Int8Tensor" else "float"}
    largest = 448 if inputs["type"] == "float" else 127
    grouped = x.unflatten(-1, (-1, layout.block or x.shape[-1]))
    scale = grouped.abs().amax(-1, keepdim=True) / largest
    if layout.has_input_scale:
        scale = torch.tensor(STATIC_SCALE)
    codes = (grouped / scale).clamp(-largest, largest)
    codes = codes.to(torch.float8_e4m3fn).float() if largest == 448 else codes.round()
    return (codes * scale).flatten(-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ROUNDED_ACTIVATIONS)
def test_rounded_activations_give_what_transformers_gives_with_them(copies, make_engine, layout, backend):
    quantized, dequantized = copies(layout)
    engine = make_engine(model=str(quantized), forward_backend=backend)
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, ignore_eos=True)
    answers = [output.outputs[0] for output in engine.generate(PROMPTS, params)]
    engine.close()
    model = AutoModelForCausalLM.from_pretrained(dequantized, dtype=torch.float32)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, x: (rounded(x[0], ROUNDED_ACTIVATIONS[layout]),))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer.token_ids]])
        with torch.inference_mode():
            expected = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert expected.argmax(-1).tolist() == list(answer.token_ids)
        logprob = expected.gather(1, ids[0, len(prompt) :, None]).sum()
        assert answer.cumulative_logprob == pytest.approx(float(logprob), abs=0.02)
