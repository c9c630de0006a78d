"""Weights come mapped from their files, in the stored format, and are in memory once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sagellm.accel.weights import WeightReader
from sagellm.core import CheckpointError, Shard, TensorSpec
from sagellm.engines.loading import SafetensorsFormat, open_checkpoint
from sagellm.engines.loading.checkpoint import SafetensorsWeights
from sagellm.engines.loading.safetensors_header import read_header
from sagellm.engines.models import Qwen3Family

SHAPE = (7, 6)


def source(path: Path, tensor: torch.Tensor) -> SafetensorsWeights:
    save_file({"other": torch.ones(5), "w": tensor}, path / "model.safetensors")
    return SafetensorsWeights(read_header(path / "model.safetensors"))


def num_maps(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def test_a_tensor_is_a_view_of_its_file_and_unmapped_with_the_view(tmp_path):
    tensor = torch.arange(42, dtype=torch.float32).reshape(SHAPE)
    weights = source(tmp_path, tensor)
    view = weights.get(TensorSpec("w", SHAPE))
    assert np.array_equal(view, tensor.numpy())
    assert not view.flags.owndata
    assert not view.flags.writeable
    assert num_maps(tmp_path) == 1
    del view
    assert num_maps(tmp_path) == 0


def test_formats_that_numpy_lacks_keep_their_bits(tmp_path):
    tensor = torch.randn(SHAPE).bfloat16()
    view = source(tmp_path, tensor).get(TensorSpec("w", SHAPE))
    assert view.dtype == np.uint16
    assert torch.equal(torch.from_numpy(view.copy()).view(torch.bfloat16), tensor)


@pytest.mark.parametrize("axis", [0, 1])
def test_shards_put_together_are_the_tensor(tmp_path, axis):
    tensor = torch.randn(SHAPE)
    weights = source(tmp_path, tensor)
    parts = [weights.get(TensorSpec("w", SHAPE, axis), Shard(rank, 3)) for rank in range(3)]
    assert np.array_equal(np.concatenate(parts, axis), tensor.numpy())
    assert all(not part.flags.owndata for part in parts)


def test_a_tensor_that_ranks_do_not_divide_is_given_whole(tmp_path):
    assert source(tmp_path, torch.randn(SHAPE)).get(TensorSpec("w", SHAPE), Shard(1, 3)).shape == SHAPE


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0)])
def test_tensors_without_rows_can_be_read(tmp_path, shape):
    weights = source(tmp_path, torch.ones(shape))
    assert weights.get(TensorSpec("w", shape, 0 if shape else None)).shape == shape
    assert WeightReader(weights, torch.float32).load(TensorSpec("w", shape)).shape == shape


def test_a_file_that_became_shorter_is_an_error_and_not_the_end_of_the_process(tmp_path):
    weights = source(tmp_path, torch.ones(4096))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        weights.get(TensorSpec("w", (4096,)))


def test_reading_a_large_tensor_maps_a_few_mebibytes_at_a_time(tmp_path, monkeypatch):
    tensor = torch.randn(3000, 4000)  # 46 MiB
    weights = source(tmp_path, tensor)
    sizes, pieces = [], weights.pieces

    def noted(*arguments):
        for begin, rows in pieces(*arguments):
            sizes.append(rows.nbytes)
            yield begin, rows
            del rows
            assert num_maps(tmp_path) == 0  # what was read is no longer there

    monkeypatch.setattr(weights, "pieces", noted)
    assert torch.equal(WeightReader(weights, torch.float32).load(TensorSpec("w", (3000, 4000))), tensor)
    assert sum(sizes) == tensor.nbytes
    assert max(sizes) <= 16 << 20


def test_many_views_of_a_file_share_one_map(tmp_path):
    weights = source(tmp_path, torch.ones(SHAPE))
    views = [weights.get(TensorSpec(name, weights.tensors[name].shape)) for name in ("w", "other") * 9]
    assert len(views) == 18
    assert num_maps(tmp_path) == 1


def test_the_torch_backend_reads_each_tensor_once(make_engine, monkeypatch, checkpoint):
    read: dict[str, int] = {}
    get = SafetensorsWeights.get

    def noted(self, tensor, *shard):
        view = get(self, tensor, *shard)
        read[tensor.name] = read.get(tensor.name, 0) + view.nbytes
        return view

    monkeypatch.setattr(SafetensorsWeights, "get", noted)
    make_engine().close()
    tensors = load_file(checkpoint / "model.safetensors")
    assert read == {name: tensor.nbytes for name, tensor in tensors.items()}


def test_a_spec_says_where_ranks_divide_each_tensor(checkpoint):
    spec = open_checkpoint(checkpoint, [Qwen3Family()], [SafetensorsFormat()]).spec
    axes = {name.split(".")[-2]: tensor.shard_axis for name, tensor in spec.tensors.items()}
    rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens")
    assert {axes[name] for name in rows} == {0}
    assert axes["o_proj"] == axes["down_proj"] == 1
    assert axes["input_layernorm"] is axes["q_norm"] is None
