"""Weights that are pruned while they are loaded."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sagellm.accel import MagnitudeSparsifier, SparsityConfig
from sagellm.accel.pruned_weights import PrunedWeights
from sagellm.core import (
    CheckpointError,
    ConfigError,
    PluginError,
    Shard,
    UnknownProviderError,
    UnsupportedModelError,
)
from sagellm.core.protocols.weight_form import CodeType, WeightForm
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.loading import open_checkpoint
from sagellm.engines.models import Qwen3Family
from sagellm.engines.testing import make_checkpoint

PROMPT = list(range(3, 40))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)
BACKENDS = ["torch", "native"]
CPU = torch.device("cpu")


def is_of_a_layer(name):
    return name.endswith("_proj.weight")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("sparse"), family="qwen3", seed=5, head_dim=32)


def prune_files(path, into, pattern):
    """Write the same checkpoint with the layers' linears pruned, and return where."""
    shutil.copytree(path, into)
    (file,) = into.glob("*.safetensors")
    tensors, sparsifier = load_file(file), MagnitudeSparsifier(SparsityConfig(pattern=pattern))
    for name in filter(is_of_a_layer, list(tensors)):
        tensors[name] = sparsifier.densify(sparsifier.sparsify(tensors[name]))
    save_file(tensors, file, {"format": "pt"})
    return into


def answer(path, **settings):
    with LLMEngine(model=str(path), device="cpu", num_blocks=16, **settings) as engine:
        output = engine.generate(PROMPT, GREEDY)[0].outputs[0]
        return list(output.token_ids), output.cumulative_logprob, engine.metrics().modules


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("pattern", ["2:4", "1:4"])
def test_a_backend_computes_what_it_does_of_the_pruned_checkpoint(
    checkpoint, tmp_path, monkeypatch, backend, quantization, pattern
):
    monkeypatch.setattr("sagellm.core.protocols.checkpoint_format._PIECE_BYTES", 5_000)
    expected = answer(
        prune_files(checkpoint, tmp_path / "pruned", pattern),
        forward_backend=backend, quantization=quantization,
    )  # fmt: skip
    found = answer(checkpoint, forward_backend=backend, quantization=quantization, sparsity=pattern)
    assert found[:2] == expected[:2]
    assert found[:2] != answer(checkpoint, forward_backend=backend, quantization=quantization)[:2]
    n, _, m = pattern.partition(":")
    counts = found[2]["sparsifier"]
    assert counts.num_kept * int(m) == counts.num_weights * int(n) > 0
    assert "sparsifier" not in expected[2]


def opened(path):
    return open_checkpoint(path, [Qwen3Family()])


def test_only_the_layers_linears_are_pruned_and_shards_are_parts_of_the_whole(checkpoint):
    model = opened(checkpoint)
    weights = PrunedWeights(model.weights, model.spec, MagnitudeSparsifier(), CPU)
    pruned = set()
    for tensor in model.spec.tensors.values():
        stored, given = model.weights.get(tensor), weights.get(tensor)
        pieces = np.concatenate([np.array(rows) for _, rows in weights.pieces(tensor)])
        assert np.array_equal(pieces, given)
        if tensor.shard_axis is not None:
            parts = [weights.get(tensor, Shard(rank, 2)) for rank in range(2)]
            assert np.array_equal(np.concatenate(parts, tensor.shard_axis), given)
        if not np.array_equal(stored, given):
            pruned.add(tensor.name)
    assert pruned == set(filter(is_of_a_layer, model.weights.tensors))


def test_values_that_cannot_be_pruned_name_file_tensor_and_row(checkpoint, tmp_path):
    path = tmp_path / "damaged"
    shutil.copytree(checkpoint, path)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 2] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    told = r"model\.safetensors: tensor 'model\.layers\.1\.mlp\.down_proj\.weight': row 3 .* holds NaN"
    with pytest.raises(CheckpointError, match=told):
        answer(path, sparsity="2:4")


def test_columns_that_the_pattern_does_not_divide_name_the_tensor(checkpoint):
    with pytest.raises(CheckpointError, match=r"_proj\.weight': the weight has \d+ columns.* groups of 31"):
        answer(checkpoint, sparsity="1:31")


def test_classes_of_transformers_are_refused(tmp_path):
    path = make_checkpoint(tmp_path, family="gpt_neox", seed=3)
    with pytest.raises(UnsupportedModelError, match=r"GPTNeoXForCausalLM runs as a class of transformers"):
        answer(path, sparsity="2:4")


@pytest.mark.parametrize(
    "change", [{"dtype": "I8"}, {"dtype": "F8_E4M3"}, {"form": WeightForm(code=CodeType.INT4)}]
)
def test_quantized_checkpoints_are_refused(checkpoint, change):
    model = opened(checkpoint)
    (name, *_) = filter(is_of_a_layer, model.weights.tensors)
    stored = model.weights.tensors[name]
    model.weights.tensors = {
        **model.weights.tensors,
        name: replace(stored, **change),
    }
    with pytest.raises(CheckpointError, match=r"_proj.weight' is stored as .*; unset model\.sparsity"):
        PrunedWeights(model.weights, model.spec, MagnitudeSparsifier(), CPU)


@pytest.mark.parametrize("change", [lambda weight: weight[:, :4], lambda weight: weight.double()])
def test_a_sparsifier_that_changes_shape_or_dtype_is_named(checkpoint, monkeypatch, change):
    prune = MagnitudeSparsifier.prune
    monkeypatch.setattr(MagnitudeSparsifier, "prune", lambda self, weight: change(prune(self, weight)))
    with pytest.raises(PluginError, match=r"the sparsifier MagnitudeSparsifier made .* must keep both"):
        answer(checkpoint, sparsity="2:4", forward_backend="native")


@pytest.mark.parametrize(
    "given",
    ["2:4", "magnitude", "magnitude{pattern=2:4}", {"name": "magnitude", "options": {"pattern": "2:4"}}],
)
def test_a_sparsifier_is_named_or_its_pattern_is(given):
    named = EngineConfig.from_flat(sparsity=given).model.sparsity
    assert (named.name, named.options.get("pattern", "2:4")) == ("magnitude", "2:4")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("4:2", ConfigError, r"model\.sparsity: pattern is '4:2'; it must be N:M, as in 2:4, with 1 ≤ N < M"),
        (124, ConfigError, r"model\.sparsity.* quote a pattern in YAML"),
        ("magnitud", UnknownProviderError, "no installed sparsifier is called 'magnitud'.*magnitude"),
        ("magnitude{n=2}", ConfigError, r"model\.sparsity.*pattern"),
    ],
)  # fmt: skip
def test_a_wrong_setting_says_what_is_right(checkpoint, given, error, message):
    with pytest.raises(error, match=message):
        answer(checkpoint, sparsity=given)


def test_what_sparsity_null_gives_is_dense(checkpoint):
    assert answer(checkpoint, sparsity="null")[:2] == answer(checkpoint)[:2]


def test_packed_weights_are_not_kept_of_a_pruned_model(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.packed_cache .* model\.sparsity changes them"):
        LLMEngine(model="embedded", sparsity="2:4", packed_cache=str(tmp_path))
