"""Every causal language model of transformers either gives its tokens here, or is refused with the reason."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES

from sagellm.core import ModelFamilyProtocol, PluginRegistry, UnsupportedModelError
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.loading import installed_families, select_family
from sagellm.engines.loading.json_file import read_json
from sagellm.engines.models.hf_allowlist import allowed_entries
from sagellm.engines.testing import make_checkpoint

pytestmark = pytest.mark.full

NUM_OUTPUT_TOKENS = 12
MARGIN = 1e-4  # float32: a difference is allowed only below this top-2 margin of the reference

# Sizes by the names that configs have for them; a family gets those that it knows.
SMALL = {
    "bos_token_id": 1,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "kv_lora_rank": 16,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "pad_token_id": 0,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "shared_expert_intermediate_size": 32,
    "sliding_window": 16,
    "topk_group": 1,
    "v_head_dim": 16,
    "vocab_size": 515,
}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_TEXT = {
    name: SMALL[name]
    for name in (
        *("hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads"),
        *("num_hidden_layers", "pad_token_id", "vocab_size"),
    )
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32},
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "fuyu": {"text_config": {"model_type": "persimmon", **_TEXT}},
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", **_VISION, "image_size": 28}},
    "gemma4_assistant": {
        "text_config": {
            **{"model_type": "gemma4_text", **_TEXT, "num_kv_shared_layers": 2},
            **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
        },
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 515,
        "laurel_rank": 8,
    },
    "got_ocr2": {
        "text_config": {"model_type": "qwen2", "num_key_value_heads": 2, **_TEXT},
        "vision_config": {**_VISION, "mlp_dim": 48},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    # Its masks know no window, and transformers' cache drops what lies beyond one.
    "moshi": {"audio_vocab_size": 64, "sliding_window": 512},
    "xlnet": {"d_head": 16},
}

NAMES_THAT_RUN = """
    afmoe apertus arcee aria_text axk1 beam bitnet cohere cohere2 cohere2_moe ctrl cwm deepseek_v2
    deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo fuyu gemma gemma3
    gemma3_text gemma3n_text glm glm4 glm4_moe got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neox granite
    granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3
    iquestcoder jais2 kolibri1 laguna llama mellum minicpm3 minimax_m2 minimax_m3_vl_text ministral
    ministral3 mistral mixtral modernbert-decoder moshi nanochat olmo olmo2 olmo3 olmoe opt
    persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2
    youtu
"""
RUN = frozenset(NAMES_THAT_RUN.split())
PROMPTS = [[3 + (7 * i * i + 5 * length) % 500 for i in range(length)] for length in (23, 40)]


def small_values(config_class: Any) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    values: dict[str, Any] = {name: value for name, value in SMALL.items() if name in names}
    for name, nested in config_class.sub_configs.items():
        if nested.__name__ != "AutoConfig":
            values[name] = small_values(nested)
    return values


def small_config(model_type: str) -> tuple[Any, dict[str, Any]]:
    """Return a config and the values that were given; none for a class that does not take small ones."""
    config_class = CONFIG_MAPPING[model_type]
    values = small_values(config_class) | OF_FAMILY.get(model_type, {})
    try:
        config = config_class(**values)
    except Exception:  # each class has its own rules
        config, values = config_class(), {}
    config.architectures = [ARCHITECTURES[model_type]]
    return config, values


@pytest.fixture(scope="module")
def families() -> list[ModelFamilyProtocol]:
    return installed_families(PluginRegistry.load())


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_value_that_a_class_saves_comes_back(model_type: str, tmp_path: Path) -> None:
    config, _ = small_config(model_type)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    saved = read_json(tmp_path / "config.json")
    theirs = type(config).from_dict(copy.deepcopy(saved)).to_dict()
    found = type(config).from_dict(allowed_entries(saved, type(config))).to_dict()
    labels = ("id2label", "label2id", "output_hidden_states", "return_dict", "problem_type")
    assert {key: value for key, value in found.items() if key not in labels} == {
        key: value for key, value in theirs.items() if key not in labels
    }


def their_tokens(path: Path, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return what transformers generates, and by how much each token is ahead of the next best one."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_OUTPUT_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
    top = torch.stack([logits[0] for logits in out.logits]).float().topk(2).values
    return out.sequences[0, len(prompt) :].tolist(), (top[:, 0] - top[:, 1]).tolist()


def check_tokens(path: Path) -> None:
    """Compare two prompts that share steps, of which one is computed in pieces."""
    engine = LLMEngine(
        model=str(path), device="cpu", dtype="float32", num_blocks=32, max_num_batched_tokens=24
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
        expected, margins = their_tokens(path, prompt)
        found = list(output.outputs[0].token_ids)
        assert len(found) == len(expected)
        differing = [place for place, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
        assert not differing or margins[differing[0]] < MARGIN, (found, expected)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_family_gives_the_tokens_of_transformers_or_is_refused_with_the_reason(
    model_type: str, families: list[ModelFamilyProtocol], tmp_path: Path
) -> None:
    config, values = small_config(model_type)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    try:
        selected = select_family(read_json(tmp_path / "config.json"), families)
    except UnsupportedModelError as error:
        reason = str(error).partition(" cannot be run: ")[2]
        print(f"{model_type} is refused: {reason}")
        assert len(reason.split()) > 4
        assert model_type not in RUN
        return
    print(f"{model_type} runs through {type(selected.family).__name__}")
    assert values, "a family that runs needs small sizes in this test"
    check_tokens(make_checkpoint(tmp_path / model_type, family=model_type, **values))
