"""Checkpoints that transformers loads although names or files are unusual give the tokens that it gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from sagellm.core import CheckpointError
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.loading import resolve_source
from sagellm.engines.models.quiet import quiet_transformers
from sagellm.engines.testing import make_checkpoint

PROMPT = list(range(5, 30))
NUM_TOKENS = 8
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"
FAMILIES = ["qwen3", "llama", "olmo2"]  # two of our own, one that transformers runs
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / request.param
    return make_checkpoint(folder, family=request.param, tie_word_embeddings=False, seed=3)


@pytest.fixture
def copy(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def ours(path: Path) -> list[int]:
    engine = LLMEngine(model=str(path), device="cpu", dtype="float32", num_blocks=8)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return list(engine.generate(PROMPT, params)[0].outputs[0].token_ids)


def theirs(path: Path) -> list[int]:
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS
        )
    return list(out[0, len(PROMPT) :].tolist())


def rewrite(path: Path, change: Callable[[Tensors], Tensors], name: str = SINGLE) -> None:
    tensors = {key: value.clone() for key, value in change(load_file(path / SINGLE)).items()}
    save_file(tensors, path / name, metadata={"format": "pt"})


def without_prefix(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def partly_without_prefix(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if "norm" in name} | {
        name.removeprefix("model."): tensor for name, tensor in tensors.items() if "norm" not in name
    }


def with_prefix_twice(tensors: Tensors) -> Tensors:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def with_frequencies(tensors: Tensors) -> Tensors:
    names = ("model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq")
    return tensors | {name: torch.ones(12) for name in names}


@pytest.mark.parametrize(
    "change", [without_prefix, partly_without_prefix, with_prefix_twice, with_frequencies]
)
def test_tensors_are_found_by_the_names_that_transformers_accepts(copy, made, change):
    rewrite(copy, change)
    assert ours(copy) == theirs(copy) == ours(made)


def test_a_base_model_whose_head_is_its_embedding_generates(made, tmp_path):
    path = make_checkpoint(tmp_path / "tied", family=made.name, tie_word_embeddings=True, seed=4)
    expected = ours(path)
    with quiet_transformers():
        AutoModel.from_pretrained(path).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"][0].endswith("Model")
    assert not any(name.startswith("model.") for name in load_file(path / SINGLE))
    assert ours(path) == theirs(path) == expected
    del config["architectures"]
    (path / "config.json").write_text(json.dumps(config))
    assert ours(path) == expected


def test_a_base_model_without_a_head_is_called_that(copy):
    """transformers makes up a random one."""
    with quiet_transformers():
        AutoModel.from_pretrained(copy).save_pretrained(copy)
    with pytest.raises(
        CheckpointError, match=r"1 missing: lm_head\.weight\. It is a base model's checkpoint"
    ):
        ours(copy)


def test_one_name_in_two_spellings_is_an_error(copy):
    rewrite(copy, lambda tensors: tensors | without_prefix(tensors))
    with pytest.raises(CheckpointError, match="not in the model: "):
        ours(copy)


def write_older_shards(path: Path) -> None:
    """Leave an index and a shard with other weights beside the whole file."""
    rewrite(path, lambda tensors: {name: tensor * 0.5 for name, tensor in tensors.items()}, SHARD)
    weight_map = dict.fromkeys(load_file(path / SHARD), SHARD)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_file_with_all_weights_comes_before_an_index(copy, made):
    write_older_shards(copy)
    assert ours(copy) == theirs(copy) == ours(made)
    (copy / SHARD).unlink()
    assert ours(copy) == theirs(copy) == ours(made)


def test_a_cached_file_with_all_weights_needs_no_shards(checkpoint, tmp_path):
    folder = tmp_path / "models--org--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    snapshot = Path(shutil.copytree(checkpoint, folder / "snapshots" / ("0" * 40)))
    write_older_shards(snapshot)
    (snapshot / SHARD).unlink()
    assert resolve_source("org/tiny", cache_dir=tmp_path, offline=True) == snapshot
