"""Checkpoints whose files are missing, damaged or elsewhere: each mistake is named before memory is used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sagellm.core import CheckpointError
from sagellm.engines.loading import Checkpoint, WeightReader, resolve_source

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


@pytest.fixture
def single(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "single"))


@pytest.fixture
def sharded(single: Path) -> Path:
    tensors = load_file(single / SINGLE)
    names = sorted(tensors)
    weight_map = {name: SHARDS[place % 2] for place, name in enumerate(names)}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, single / shard)
    (single / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (single / SINGLE).unlink()
    return single


def test_shards_hold_what_the_single_file_holds(checkpoint, sharded):
    one, two = Checkpoint.open(checkpoint), Checkpoint.open(sharded)
    assert {tensor.path.name for tensor in two.tensors.values()} == set(SHARDS)
    expected = load_file(checkpoint / SINGLE)
    assert one.tensors.keys() == two.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert WeightReader(two.tensors, tensor.dtype).load(name).equal(tensor)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "config.json").unlink(), r"has no config\.json"),
        (lambda path: (path / "config.json").write_text("{"), "not valid JSON"),
        (lambda path: (path / "config.json").write_text("[]"), "JSON list; it must be an object"),
        (lambda path: (path / SINGLE).unlink(), "has no weights"),
        (lambda path: (path / SINGLE).rename(path / "pytorch_model.bin"), "are pickles"),
        (lambda path: (path / SINGLE).rename(path / SHARDS[0]), f"but no {INDEX}"),
        (lambda path: cut(path / SINGLE, 4), "not a safetensors file, or cut off"),
        (lambda path: cut(path / SINGLE, 5000), "cut off"),
        (lambda path: (path / SINGLE).write_bytes(bytes([2, *bytes(7)]) + b"[]"), "no JSON object"),
    ],
)
def test_damage_of_a_single_file_is_named(single: Path, damage: Callable[[Path], object], message: str):
    damage(single)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(single)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / SHARDS[1]).unlink(), f"lacks 1 of 2 weight files: {SHARDS[1]}"),
        (lambda path: edit_json(path / INDEX, weight_map=None), "has no weight_map"),
        (lambda path: edit_json(path / INDEX, weight_map={"a": "../b"}), "outside of its directory: ../b"),
        (lambda path: edit_json(path / INDEX, weight_map={"absent": SHARDS[0]}), "do not hold: absent"),
    ],
)
def test_damage_of_shards_is_named(sharded: Path, damage: Callable[[Path], object], message: str):
    damage(sharded)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(sharded)


def test_tensors_that_contradict_the_config_are_named(single):
    checkpoint = Checkpoint.open(single)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    checkpoint.check(shapes)
    left_over, resized = list(shapes)[:2]
    changed = {**shapes, resized: (1, 2), "absent": (3,)}
    del changed[left_over]
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check(changed)
    for problem in ("1 missing: absent", f"1 not in the model: {left_over}", f"of another shape: {resized}"):
        assert problem in str(caught.value)
    checkpoint.check({name: shapes[name] for name in shapes if name != left_over}, ignored=[left_over])


def cached(files: Path, cache: Path) -> Path:
    """Lay files out as the hub's cache keeps the model `org/tiny`."""
    folder = cache / "models--org--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    return Path(shutil.copytree(files, folder / "snapshots" / ("0" * 40)))


def test_a_hub_id_is_found_in_the_cache(sharded, tmp_path):
    snapshot = cached(sharded, tmp_path / "hub")
    assert resolve_source("org/tiny", cache_dir=tmp_path / "hub", offline=True) == snapshot
    assert resolve_source(str(sharded)) == sharded


def test_an_interrupted_download_is_not_taken_for_the_model(sharded, tmp_path):
    (cached(sharded, tmp_path / "hub") / SHARDS[0]).unlink()
    with pytest.raises(CheckpointError, match=r"not in the local Hugging Face cache.*offline mode"):
        resolve_source("org/tiny", cache_dir=tmp_path / "hub", offline=True)


def test_a_damaged_index_in_the_cache_is_named(sharded, tmp_path):
    edit_json(cached(sharded, tmp_path / "hub") / INDEX, weight_map=["a"])
    with pytest.raises(CheckpointError, match="has no weight_map"):
        resolve_source("org/tiny", cache_dir=tmp_path / "hub", offline=True)


@pytest.mark.parametrize(
    ("name", "message"), [("config.json", "is a file; give the directory"), ("no/such/folder", "no hub id")]
)
def test_what_is_neither_a_directory_nor_a_hub_id_is_refused(single, monkeypatch, name, message):
    monkeypatch.chdir(single)
    with pytest.raises(CheckpointError, match=message):
        resolve_source(name, offline=True)
