"""What transformers' own classes run over our KV, and what of them is refused with which reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from sagellm.core import CheckpointError, UnsupportedModelError
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.loading import select_family
from sagellm.engines.loading.json_file import read_json
from sagellm.engines.models import TransformersFamily
from sagellm.engines.models.refusal import refuse_on_error
from sagellm.engines.testing import make_checkpoint

PROMPT = list(range(5, 40))
NUM_TOKENS = 12


def tokens(path: Path) -> list[int]:
    engine = LLMEngine(model=str(path), device="cpu", dtype="float32", num_blocks=8)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return list(engine.generate(PROMPT, params)[0].outputs[0].token_ids)


@pytest.mark.parametrize("family", ["mamba2", "falcon_h1", "nemotron_h", "bamba", "granitemoehybrid"])
def test_a_recurrent_model_is_refused_for_its_state(family, tmp_path):
    config = CONFIG_MAPPING[family]()
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    (tmp_path / "config.json").write_text(config.to_json_string())
    assert '"__float__": "Infinity"' in config.to_json_string(use_diff=False)
    with pytest.raises(UnsupportedModelError, match="keeps a recurrent state besides KV"):
        select_family(read_json(tmp_path / "config.json"), [TransformersFamily()])
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    with pytest.raises(UnsupportedModelError, match="keeps a recurrent state besides KV"):
        select_family(read_json(tmp_path / "config.json"), [TransformersFamily()])


def test_layers_of_a_kind_without_kv_are_found_by_name():
    config = {"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "num_hidden_layers": 2}
    with pytest.raises(UnsupportedModelError, match="keeps a recurrent state besides KV"):
        select_family({**config, "layer_types": ["conv", "full_attention"]}, [TransformersFamily()])


def test_a_class_that_misnames_its_base_model_is_refused():
    config = CONFIG_MAPPING["mllama"](text_config={"num_hidden_layers": 1, "cross_attention_layers": []})
    config.architectures = ["MllamaForCausalLM"]
    with pytest.raises(UnsupportedModelError, match="MllamaForCausalLM has no language_model"):
        select_family(json.loads(config.to_json_string(use_diff=False)), [TransformersFamily()])


def test_gemma3n_runs_with_kv_that_layers_share_and_a_width_for_each_layer(tmp_path):
    path = make_checkpoint(
        tmp_path,
        family="gemma3n_text",
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=16,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=515,
        laurel_rank=8,
    )
    assert read_json(path / "config.json")["intermediate_size"] == [168] * 4
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS)
    assert tokens(path) == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TypeError("a\n  b"), r"^it cannot be built: a b \(TypeError\)$"),
        (AssertionError(), r"^it cannot be built: no reason given \(AssertionError\)$"),
        (ValueError("x" * 1000), r"^it cannot be built: x{300} \(ValueError\)$"),
    ],
)
def test_whatever_a_class_of_transformers_raises_becomes_a_reason(error, reason):
    with pytest.raises(UnsupportedModelError, match=reason), refuse_on_error("it cannot be built"):
        raise error


@pytest.mark.parametrize("error", [CheckpointError("damaged"), MemoryError(), torch.OutOfMemoryError()])
def test_errors_of_our_own_and_of_memory_stay_what_they_are(error):
    with pytest.raises(type(error)) as caught, refuse_on_error("it cannot be built"):
        raise error
    assert caught.value is error


def test_a_class_that_cannot_be_built_is_an_error_of_ours():
    config = {"model_type": "dots1", "architectures": ["Dots1ForCausalLM"], "num_hidden_layers": 1}
    with pytest.raises(UnsupportedModelError, match=r"cannot build Dots1ForCausalLM: .* \(TypeError\)"):
        select_family(config, [TransformersFamily()])


@pytest.mark.parametrize("family", ["olmo2", "qwen3"])
def test_a_config_cannot_choose_kernels_from_the_hub(family, tmp_path):
    path = make_checkpoint(tmp_path, family=family)
    expected = tokens(path)
    config = json.loads((path / "config.json").read_text())
    for key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
        config |= {
            key: "kernels-community/flash-attn",
            key.replace("attn", "experts"): "kernels-community/moe",
        }
    (path / "config.json").write_text(json.dumps(config))
    assert tokens(path) == expected
