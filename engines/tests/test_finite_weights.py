"""A weight that is NaN or infinite is refused when it is read, with the name of its tensor."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sagellm.accel.weights import WeightReader
from sagellm.core import CheckpointError, TensorSpec
from sagellm.engines import LLMEngine
from sagellm.engines.loading.checkpoint import SafetensorsWeights
from sagellm.engines.loading.safetensors_header import read_header
from sagellm.engines.testing import make_checkpoint

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGE = (1 << 19) + 5  # values; more than a piece that is checked at once


def stored(path: Path, tensor: torch.Tensor) -> Path:
    save_file({"w": tensor}, path / "model.safetensors")
    return path / "model.safetensors"


def read(path: Path, dtype: torch.dtype) -> torch.Tensor:
    tensors = read_header(path)
    return WeightReader(SafetensorsWeights(tensors), dtype).load(TensorSpec("w", tensors["w"].shape))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, -1])
def test_one_value_in_half_a_million_is_found(tmp_path, dtype, bad, place):
    tensor = torch.zeros(LARGE, dtype=dtype)
    tensor[place] = bad
    path = stored(tmp_path, tensor)
    for wanted in (dtype, torch.float32):
        with pytest.raises(CheckpointError) as caught:
            read(path, wanted)
        assert str(caught.value).startswith(f"{path}: tensor 'w' has a value that is NaN or infinite")


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_and_smallest_finite_values_are_accepted(tmp_path, dtype):
    about, count = torch.finfo(dtype), 1000
    values = [about.max, about.min, about.tiny, -about.tiny, about.smallest_normal / 2, 0.0, -0.0]
    tensor = torch.tensor(values * count, dtype=dtype)
    assert read(stored(tmp_path, tensor), dtype).equal(tensor)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integers_are_not_checked(tmp_path, dtype):
    tensor = torch.tensor([-1, 0, 1]).to(dtype)
    assert read(stored(tmp_path, tensor), torch.float32).equal(tensor)


def test_a_value_that_the_wanted_type_cannot_hold_is_named(tmp_path):
    path = stored(tmp_path, torch.tensor([1.0, 70_000.0]))
    with pytest.raises(
        CheckpointError, match=r"'w' has a value beyond what torch\.float16 can hold.*--dtype"
    ):
        read(path, torch.float16)
    assert read(path, torch.bfloat16).isfinite().all()


@pytest.fixture
def spoilt(checkpoint: Path, tmp_path: Path):
    def spoil(source: Path, name: str, value: float) -> Path:
        path = Path(shutil.copytree(source, tmp_path / "spoilt"))
        tensors = load_file(path / "model.safetensors")
        tensors[name].view(-1)[-1] = value
        save_file(tensors, path / "model.safetensors")
        return path

    return spoil


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_an_engine_does_not_start_with_such_a_weight(checkpoint, spoilt, name):
    path = spoilt(checkpoint, name, float("nan"))
    with pytest.raises(
        CheckpointError, match=rf"model\.safetensors: tensor '{name}' has a value that is NaN"
    ):
        LLMEngine(model=str(path), device="cpu", num_blocks=8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_transformers_backend_refuses_such_a_weight_too(spoilt, tmp_path, dtype):
    path = make_checkpoint(tmp_path / "made", family="mixtral")
    name = next(each for each in sorted(load_file(path / "model.safetensors")) if "experts" in each)
    path = spoilt(path, name, -float("inf"))
    with pytest.raises(CheckpointError, match=rf"tensor '{name}' has a value that is NaN or infinite"):
        LLMEngine(model=str(path), device="cpu", dtype=dtype, num_blocks=8)
