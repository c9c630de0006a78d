"""Files that llama.cpp's own package writes are read as it reads them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sagellm.accel.coded import expand
from sagellm.core import TensorSpec
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.loading import SafetensorsFormat
from sagellm.engines.loading.gguf import GGUFFormat
from sagellm.engines.loading.gguf_header import read_gguf_header
from sagellm.engines.loading.gguf_types import BLOCK_TYPES, BLOCKS
from sagellm.engines.testing import make_checkpoint
from sagellm.engines.testing.gguf import copy_as_gguf, gguf_name, quantize

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
pytestmark = pytest.mark.full
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)


def blocks_of(kind: str) -> np.ndarray[Any, Any]:
    """Return rows of 512 weights in random blocks of a type, with scales that are finite."""
    inputs, num_bytes = BLOCKS[kind]
    blocks = np.random.default_rng(1).integers(0, 256, (9, 512 // inputs, num_bytes), np.uint8)
    for at in (208,) if kind == "Q6_K" else (0, 2) if kind[-1] in "1K" else (0,):
        blocks[..., at + 1] &= 0xBF  # an exponent below that of infinity
    return blocks


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_type_stands_for_what_the_package_dequantizes(kind: str) -> None:
    blocks = blocks_of(kind)
    expected = gguf.quants.dequantize(blocks.reshape(9, -1), gguf.GGMLQuantizationType[kind])
    ours = expand(BLOCK_TYPES[kind].unpack(blocks), BLOCK_TYPES[kind].form)
    assert np.array_equal(ours.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16", "F16"])
def test_our_copies_are_rounded_as_the_package_rounds(kind: Any) -> None:
    weights = np.random.default_rng(2).normal(size=(8, 256)).astype(np.float32)
    weights[0] = 0
    expected = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(quantize(weights, kind), expected.view(np.uint8).reshape(-1))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_file_of_the_package_is_read(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    model = make_checkpoint(tmp_path / "m", family="qwen3", dtype="float32", **sizes)
    path = written(model, tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind])
    opened, reader = GGUFFormat().open(path), gguf.GGUFReader(path)
    weights = {}
    for tensor in reader.tensors:
        name = next(each for each in opened.weights.tensors if gguf_name(each) == tensor.name)
        stored = opened.weights.tensors[name]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(stored.shape)
        weights[name] = torch.from_numpy(np.array(expected, np.float32))
        spec = TensorSpec(name, stored.shape)
        if stored.form is None:
            assert np.array_equal(opened.weights.get(spec).reshape(-1), plain(tensor))
            continue
        ours = expand(opened.weights.coded_rows(spec, slice(0, stored.shape[0])), stored.form)
        assert np.array_equal(ours.reshape(stored.shape), expected)
    shutil.copytree(model, tmp_path / "dequantized")
    save_file(weights, tmp_path / "dequantized" / "model.safetensors")
    answers = []
    for each in (path, tmp_path / "dequantized"):
        with LLMEngine(model=str(each), dtype="float32", num_blocks=8, device="cpu") as engine:
            answers.append(engine.generate("The clock", GREEDY)[0].outputs[0])
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].logprobs == answers[1].logprobs


def plain(tensor: Any) -> np.ndarray[Any, Any]:
    return (
        tensor.data.reshape(-1).view("<u2") if tensor.tensor_type.name == "BF16" else tensor.data.reshape(-1)
    )


def written(model: Path, target: Path, kind: Any) -> Path:
    """Write a checkpoint by the package: metadata as our copies have it, matrices in a type."""
    entries = read_gguf_header(
        copy_as_gguf(model, target.with_suffix(".copy"), "F32"), with_vocabulary=True
    ).entries
    writer = gguf.GGUFWriter(target, "qwen3")
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
    for name, value in entries.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif name != "general.architecture":
            add[type(value)](name, value)
    source = SafetensorsFormat().open(model).weights
    for name, stored in source.tensors.items():
        values = np.array(source.get(TensorSpec(name, stored.shape)))
        if len(stored.shape) == 1:
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
