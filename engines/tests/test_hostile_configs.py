"""A checkpoint's configuration chooses no code, no kernels and no files, and fetches nothing."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedTokenizerBase
from transformers.utils import hub

from sagellm.core import CheckpointError, UnsupportedModelError
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.loading import load_tokenizer
from sagellm.engines.loading.format_and_family import select_family
from sagellm.engines.models.families import LlamaFamily
from sagellm.engines.models.hf_config import read_hf_config
from sagellm.engines.models.transformers_family import TransformersFamily
from sagellm.engines.testing import make_checkpoint

KERNELS = "kernels-community/flash-attn"
PROMPT = list(range(5, 25))
HOSTILE: dict[str, Any] = {
    **dict.fromkeys(
        ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"), KERNELS
    ),
    **dict.fromkeys(("experts_implementation", "_experts_implementation"), KERNELS),
    "auto_map": {"AutoConfig": "evil/code--config.Evil", "AutoModelForCausalLM": "evil/code--model.Evil"},
    "custom_pipelines": {"text-generation": {"impl": "evil/code--pipeline.Evil"}},
    "custom_generate": "evil/code",
    "use_kernels": True,
    "kernel_config": {"kernel_mapping": {"RMSNorm": "evil/kernels:RMSNorm"}},
    "fusion_config": {"no_such_fusion": {}},
    "transformers_weights": "../evil.bin",
    "distributed_config": {"tp_size": 8},
    "backbone": "evil/backbone",
    "use_timm_backbone": True,
    "use_pretrained_backbone": True,
    "peft_type": "LORA",
    "name_or_path": "evil/model",
    "surprise": 1,
}
TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "mixtral": {},
    "fuyu": {"text_config": {"model_type": "persimmon", "vocab_size": 515, "pad_token_id": 0, **TEXT}},
}


class Fetched(AssertionError):
    """Something was fetched, or code from elsewhere was asked for."""


@pytest.fixture(autouse=True)
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect what is fetched, which must stay empty."""
    calls: list[str] = []

    def trap(name: str) -> Callable[..., Any]:
        def call(*args: object, **_: object) -> Any:
            calls.append(f"{name}{args}")
            raise Fetched(name)

        return call

    monkeypatch.setattr(socket.socket, "connect", trap("connect"))
    monkeypatch.setattr(socket, "getaddrinfo", trap("getaddrinfo"))
    for name in ("hf_hub_download", "snapshot_download"):
        monkeypatch.setattr(huggingface_hub, name, trap(name))
    monkeypatch.setattr(hub, "hf_hub_download", trap("hf_hub_download"), raising=False)
    for module, name in (
        ("modeling_utils", "lazy_import_flash_attention"),
        ("integrations.hub_kernels", "get_kernel"),
        ("integrations.hub_kernels", "load_and_register_attn_kernel"),
        ("dynamic_module_utils", "get_cached_module_file"),
        ("models.auto.tokenization_auto", "get_class_from_dynamic_module"),
        ("models.auto.configuration_auto", "get_class_from_dynamic_module"),
    ):
        monkeypatch.setattr(f"transformers.{module}.{name}", trap(name), raising=False)
    return calls


def spoil(path: Path) -> None:
    """Put hostile entries wherever a checkpoint has a configuration."""
    config = json.loads((path / "config.json").read_text())
    nested = [value for value in config.values() if isinstance(value, dict)]
    for each in (config, *nested):
        each |= HOSTILE
    (path / "config.json").write_text(json.dumps(config))
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        values = json.loads((path / name).read_text()) if (path / name).exists() else {}
        values |= HOSTILE | {"trust_remote_code": True, "auto_map": {"AutoTokenizer": ["evil/a--b.C", None]}}
        values |= {
            "vocab_file": "/etc/passwd",
            "tokenizer_file": "/etc/passwd",
            "init_inputs": ["/etc/passwd"],
        }
        (path / name).write_text(json.dumps(values))


def tokens(path: Path) -> list[int]:
    with LLMEngine(model=str(path), device="cpu", dtype="float32", num_blocks=8) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        return list(engine.generate([PROMPT], params)[0].outputs[0].token_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_entries_fetch_nothing_and_change_nothing(family, tmp_path, fetched, monkeypatch):
    path = make_checkpoint(tmp_path, family=family, **FAMILIES[family])
    expected = tokens(path)
    spoil(path)
    made = []
    real = transformers.PreTrainedModel.__init__

    def note(self, config, *args, **kwargs):
        made.append(config)
        real(self, config, *args, **kwargs)

    monkeypatch.setattr(transformers.PreTrainedModel, "__init__", note)
    assert tokens(path) == expected
    assert fetched == []
    for config in made:
        assert config._attn_implementation in ("sagellm", "sagellm_probe")
        assert "evil" not in str(vars(config))
        assert "surprise" not in str(vars(config))
    assert bool(made) == (family != "qwen3")


def test_only_known_entries_reach_a_nested_configuration():
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "surprise": 1,
        "text_config": {
            "num_hidden_layers": 2,
            "surprise": 1,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0, "surprise": 1},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "surprise": 1,
            },
            "per_layer_config": {"1": {"sliding_window": 9, "surprise": 1, "_attn_implementation": KERNELS}},
        },
    }
    before = json.dumps(config)
    hf = read_hf_config(config)
    assert json.dumps(config) == before
    text = hf.text_config
    rope = text.rope_parameters["full_attention"]
    assert (rope["rope_theta"], rope["factor"], text.num_hidden_layers) == (5e5, 8.0, 2)
    assert text.per_layer_config[1].sliding_window == 9
    for each in (hf, text, text.per_layer_config[1]):
        assert not hasattr(each, "surprise")
        assert each._attn_implementation is None
    assert "surprise" not in str(text.rope_parameters)


OLDER_SPELLINGS = [
    {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 50_000},
    {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {
        "model_type": "gemma3_text",
        "rope_local_base_freq": 2e4,
        "sliding_window_pattern": 3,
        "rope_theta": 5e5,
    },
    {"model_type": "cohere2", "sliding_window_pattern": 2, "num_hidden_layers": 4},
    {"model_type": "deepseek_v3", "num_hidden_layers": 4, "first_k_dense_replace": 2},
    {"model_type": "minimax_m2", "rotary_dim": 32, "head_dim": 64},
    {"model_type": "qwen2", "head_dim": 96, "sliding_window": 9, "use_sliding_window": True},
    {"model_type": "phi", "partial_rotary_factor": 0.25},
    {"model_type": "gpt2", "n_embd": 96, "n_layer": 3, "num_attention_heads": 4, "n_positions": 99},
    {"model_type": "mixtral", "num_experts": 3, "num_hidden_layers": 1},
    {"model_type": "kolibri1", "num_local_experts": 3, "num_hidden_layers": 1},
    {"model_type": "olmoe", "sliding_window": 7, "torch_dtype": "bfloat16"},
]


@pytest.mark.parametrize("config", OLDER_SPELLINGS, ids=lambda config: str(config["model_type"]))
def test_older_spellings_reach_transformers_unchanged(config):
    theirs = CONFIG_MAPPING[config["model_type"]].from_dict(json.loads(json.dumps(config)))
    assert read_hf_config(config).to_dict() == theirs.to_dict()


@pytest.mark.full
def test_no_model_type_fetches_anything_for_its_configuration(fetched):
    backbone = {"backbone_config": {"model_type": "timm_backbone", "backbone": "evil/backbone"}}
    num_read = 0
    for model_type in CONFIG_MAPPING:
        try:
            read_hf_config({"model_type": model_type, **HOSTILE, **backbone})
            num_read += 1
        except (AttributeError, RuntimeError, ValueError):  # it is not a language model's
            pass
        assert fetched == [], model_type
    assert num_read > 700


def test_a_huge_num_labels_creates_no_labels():
    hf = read_hf_config({"model_type": "llama", "num_labels": 10**9, "num_hidden_layers": 1})
    assert hf.num_labels == 2
    with pytest.raises(CheckpointError, match="num_hidden_layers is 1000000000"):
        read_hf_config({"model_type": "fuyu", "text_config": {"num_hidden_layers": 10**9}})


def test_quantization_of_a_nested_configuration_is_refused():
    config = {"model_type": "fuyu", "text_config": {"quantization_config": {"quant_method": "gptq"}}}
    with pytest.raises(UnsupportedModelError, match=r"are quantized \(gptq\)"):
        read_hf_config(config)


def test_a_nested_configuration_of_an_unknown_type_is_named():
    with pytest.raises(
        CheckpointError, match=r"text_config\.model_type is 'evil', which transformers does not"
    ):
        read_hf_config({"model_type": "fuyu", "text_config": {"model_type": "evil"}})


@pytest.mark.parametrize(
    "entries",
    [
        {"architectures": ["SomeForCausalLM" * 10] * 10_000},
        {"architectures": "x" * 1_000_000},
        {"model_type": "y" * 1_000_000},
        {"model_type": "llama", "quantization_config": {"quant_method": "z" * 1_000_000}},
        {"model_type": "llama", "architectures": [["a"] * 100_000]},
    ],
)
def test_an_error_quotes_a_little_of_a_large_entry(entries):
    families = [TransformersFamily(), LlamaFamily()]
    with pytest.raises((CheckpointError, UnsupportedModelError)) as refused:
        select_family({"hidden_size": -1, **entries}, families)
    assert len(str(refused.value)) < 5000


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def edit_json(path: Path, **changes: object) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | changes))


@pytest.mark.parametrize(
    "name", ["Qwen3ForCausalLM", "RagTokenizer", "pipeline", "AutoModel", "AutoTokenizer"]
)
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_tokenizer_class_that_is_not_a_tokenizer_is_refused(copy, name, file, fetched):
    edit_json(copy / file, tokenizer_class=name)
    with pytest.raises(CheckpointError, match=f"tokenizer_class is '{name}', which is not a tokenizer"):
        load_tokenizer(copy)
    assert fetched == []


def test_hostile_entries_change_no_tokenizer(copy, fetched):
    text = "Hello <|im_end|> wörld 1234"
    expected = load_tokenizer(copy)
    assert isinstance(expected, PreTrainedTokenizerBase)
    spoil(copy)
    found = load_tokenizer(copy)
    assert isinstance(found, PreTrainedTokenizerBase)
    assert fetched == []
    assert found(text)["input_ids"] == expected(text)["input_ids"]
    assert (found.eos_token, found.chat_template, found.model_max_length) == (
        expected.eos_token,
        expected.chat_template,
        expected.model_max_length,
    )
    assert found.name_or_path == str(copy)
    assert "/etc/passwd" not in str(vars(found))
    assert torch.tensor(found("a")["input_ids"]).numel()
