"""Checkpoints that `quantize` writes are read back, here and in transformers, as what they stand for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sagellm.accel.weights import WeightReader
from sagellm.core import CheckpointError, PluginRegistry
from sagellm.core.protocols.weight_form import CodeType
from sagellm.engines import SamplingParams
from sagellm.engines.config.sections import ModelConfig
from sagellm.engines.loading.load import open_model
from sagellm.engines.quantize.formats import read_format
from sagellm.engines.quantize.run import QuantizeRequest, quantize_checkpoint
from sagellm.engines.testing import make_checkpoint

PROMPTS = [[5, 17, 300, 41, 8, 99], [7] * 3]
WEIGHT_ONLY = ("int8", "int4", "int4{group_size=8, asymmetric=true}")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("source"), dtype="float32")


def opened(path: Path):
    return open_model(ModelConfig(name=str(path)), PluginRegistry.load())


def quantized(source: Path, output: Path, text: str, head: str | None = None) -> Path:
    asked = QuantizeRequest(
        model=ModelConfig(name=str(source)),
        output=output,
        saved=read_format(text, "--format"),
        head=head and read_format(head, "--head"),
        max_shard_bytes=100_000,
    )
    quantize_checkpoint(asked, PluginRegistry.load())
    return output


def dequantized(path: Path, target: Path) -> Path:
    """Write a plain checkpoint of the numbers that a quantized one stands for."""
    model = opened(path)
    reader = WeightReader(model.weights, torch.float32)
    target.mkdir()
    tensors = {name: reader.load(tensor) for name, tensor in model.spec.tensors.items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(path / name, target / name)
    return target


@pytest.mark.parametrize(
    ("text", "code", "activations"),
    [
        ("int8", CodeType.INT8, None),
        ("w8a8", CodeType.INT8, CodeType.INT8),
        ("int4", CodeType.INT4, None),
        ("w4a8", CodeType.INT4, CodeType.INT8),
        ("fp8", CodeType.FP8_E4M3, CodeType.FP8_E4M3),
    ],
)
def test_the_reader_finds_the_form_that_was_asked_for(source, tmp_path, text, code, activations):
    model = opened(quantized(source, tmp_path / "out", text))
    stored = model.weights.tensors["model.layers.1.mlp.down_proj.weight"]
    assert stored.form.code is code
    assert (stored.form.activations and stored.form.activations.code) == activations
    assert stored.form.group_size == (8 if code is CodeType.INT4 else 0)
    assert model.weights.tensors["model.embed_tokens.weight"].form is None


@pytest.mark.parametrize("head", [None, "int8"])
@pytest.mark.parametrize("text", WEIGHT_ONLY)
def test_answers_are_those_of_the_dequantized_checkpoint(source, tmp_path, make_engine, text, head):
    path = quantized(source, tmp_path / "out", text, head)
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, ignore_eos=True)
    results = []
    for each in (path, dequantized(path, tmp_path / "plain")):
        engine = make_engine(model=str(each), forward_backend="torch")
        results.append([output.outputs[0] for output in engine.generate(PROMPTS, params)])
        engine.close()
    for got, expected in zip(*results, strict=True):
        assert got.token_ids == expected.token_ids
        assert got.logprobs == expected.logprobs


@pytest.mark.parametrize("text", ["int8", "w8a8", "int4{group_size=8}", "w4a8", "fp8"])
def test_transformers_loads_the_same_numbers(source, tmp_path, text):
    pytest.importorskip("compressed_tensors")
    path = quantized(source, tmp_path / "out", text, "int8")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    plain = load_file(dequantized(path, tmp_path / "plain") / "model.safetensors")
    model(torch.tensor([PROMPTS[0]]))  # weights are expanded when they are first used
    for name, parameter in model.named_parameters():
        if name in plain:
            torch.testing.assert_close(parameter.float(), plain[name], rtol=1e-6, atol=1e-7)


def test_a_quantized_source_is_refused(source, tmp_path):
    first = quantized(source, tmp_path / "first", "int8")
    with pytest.raises(CheckpointError, match=r"is quantized already \(model\..*made from"):
        quantized(first, tmp_path / "second", "int4")


@pytest.mark.full
def test_memory_is_bounded_by_pieces_not_by_the_model(tmp_path):
    source = make_checkpoint(
        tmp_path / "source", dtype="bfloat16", hidden_size=1024, intermediate_size=16_384, num_hidden_layers=1
    )
    total = (source / "model.safetensors").stat().st_size
    assert total > 90 << 20
    program = (
        "import resource, sys, torch\n"
        "from sagellm.engines.cli import main\n"
        "import sagellm.engines.quantize.run\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, file=sys.stderr)\n"
    )
    arguments = ["llm", "quantize", str(source), "--format", "int8", "-o", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True)
    grown = int(done.stderr.split()[-1]) << 10
    assert grown < 60 << 20, f"{grown >> 20} MiB"
