"""A stored head under `tie_word_embeddings: true` counts as it does for transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sagellm.core import CheckpointError
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.testing import make_checkpoint

HEAD = "lm_head.weight"
PROMPT = list(range(5, 30))
NUM_TOKENS = 12
FAMILIES = ["qwen3", "llama", "olmo2", "gemma3_text"]  # two of our own, two that transformers runs


@pytest.fixture(scope="module", params=FAMILIES)
def tied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    return make_checkpoint(folder / request.param, family=request.param, tie_word_embeddings=True, seed=5)


@pytest.fixture
def variant(tied, tmp_path):
    """Write the checkpoint with other tensors, and return it with its embedding."""
    tensors = load_file(tied / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    assert HEAD not in tensors

    def write(**changes: torch.Tensor | None) -> Path:
        changed = {
            **tensors,
            **{{"head": HEAD, "embedding": name}[key]: value for key, value in changes.items()},
        }
        path = tmp_path / "variant"
        path.mkdir()
        for file in tied.iterdir():
            (path / file.name).symlink_to(file)
        (path / "model.safetensors").unlink()
        kept = {key: value for key, value in changed.items() if value is not None}
        save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
        return path

    write.embedding = tensors[name]
    return write


def ours(path: Path, **settings: object) -> list[int]:
    engine = LLMEngine(model=str(path), device="cpu", dtype="float32", num_blocks=8, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return list(engine.generate(PROMPT, params)[0].outputs[0].token_ids)


def theirs(path: Path) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS
        )
    return list(out[0, len(PROMPT) :].tolist())


def test_a_different_head_in_the_file_is_used(tied, variant, caplog):
    head = torch.randn(variant.embedding.shape, generator=torch.Generator().manual_seed(1)) * 0.1
    path = variant(head=head)
    found = ours(path)
    assert found == theirs(path)
    assert found != ours(tied)
    if tied.name in ("qwen3", "llama"):
        assert "differs from the embedding" in caplog.text


def test_a_copy_of_the_embedding_in_the_file_changes_nothing(tied, variant):
    engines = [
        LLMEngine(model=str(path), device="cpu", dtype="float32", num_blocks=8)
        for path in (tied, variant(head=variant.embedding.clone()))
    ]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    plain, copied = (engine.generate(PROMPT, params)[0].outputs[0].token_ids for engine in engines)
    assert copied == plain
    plain_metrics, copied_metrics = (engine.metrics().modules["model_family"] for engine in engines)
    assert copied_metrics == plain_metrics  # it is in memory once


def test_a_head_in_place_of_the_embedding_is_both(tied, variant):
    path = variant(head=variant.embedding.clone(), embedding=None)
    assert ours(path) == ours(tied)


def test_neither_head_nor_embedding_is_an_error(variant):
    with pytest.raises(CheckpointError, match=r"1 missing: .*embed_tokens\.weight"):
        ours(variant(embedding=None))


def test_a_head_of_another_shape_is_an_error(variant):
    with pytest.raises(CheckpointError, match=r"of another shape: lm_head\.weight"):
        ours(variant(head=variant.embedding[1:].clone()))
