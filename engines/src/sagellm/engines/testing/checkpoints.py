"""Small checkpoints with random weights, in the layout in which real ones are published."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.core import ConfigError, nearest
from sagellm.engines.loading.device_and_dtype import DTYPES, torch_dtype
from sagellm.engines.models.quiet import quiet_transformers
from sagellm.engines.testing.tokenizers import END_OF_TEXT, END_TURN, make_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Odd on purpose: a vocabulary that is not a multiple of 8, several query heads a KV head.
_SMALL: dict[str, Any] = {
    "vocab_size": 515,
    "hidden_size": 64,
    "intermediate_size": 168,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 24, "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 256},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
}


def qwen3_0_6b_config() -> dict[str, Any]:
    """Return the sizes of Qwen3-0.6B, for `make_checkpoint(path, **qwen3_0_6b_config())`."""
    return {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    }


def make_checkpoint(
    path: str | Path,
    *,
    family: str = "qwen3",
    seed: int = 0,
    dtype: str = "float32",
    sharpness: float = 1.0,
    **config_overrides: Any,
) -> Path:
    """Write a checkpoint with random weights and a working tokenizer, and return its directory.

    `family` is a model type of transformers; `config_overrides` are fields of its config. Equal
    arguments give equal weights. They are scaled so that greedy outputs do not soon repeat
    themselves, and no norm is one and no bias zero, so that a part left out shows. Many such layers
    magnify a rounding error as no trained model does; a `sharpness` below 1 scales down the norms of
    queries and keys, where a family has them, and with them that effect. Raises ConfigError for an
    unknown family, dtype or size.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    path = Path(path)
    values = _SMALL | _OF_FAMILY.get(family, {}) | config_overrides
    tokenizer = make_tokenizer(values["vocab_size"])
    end_of_text, end_turn = tokenizer.convert_tokens_to_ids([END_OF_TEXT, END_TURN])
    config = _make_config(family, values | {"pad_token_id": end_of_text, "eos_token_id": end_turn})
    with torch.inference_mode(), quiet_transformers(), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype(dtype)).eval()
        model.tie_weights()  # part of the initialization that was left out
        _randomize(model, torch.Generator().manual_seed(seed), sharpness)
    model.generation_config.update(do_sample=False, pad_token_id=end_of_text, eos_token_id=end_turn)
    with quiet_transformers():
        model.save_pretrained(path)
    tokenizer.model_max_length = values["max_position_embeddings"]
    tokenizer.save_pretrained(path)
    return path


def _make_config(family: str, values: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    if family not in CONFIG_MAPPING:
        known = nearest(family, CONFIG_MAPPING.keys())
        raise ConfigError(f"family is {family!r}; it must be a model type of transformers.{known}")
    try:
        return CONFIG_MAPPING[family](**{"bos_token_id": None, **values})
    except Exception as error:  # validation errors of many types
        raise ConfigError(f"transformers refuses this {family} config: {error}") from error


def _randomize(model: PreTrainedModel, generator: torch.Generator, sharpness: float) -> None:
    import torch

    embedding = model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        if parameter is embedding:
            # Small, so that what the layers add, and not the last token itself, decides the next one.
            values = torch.randn(parameter.shape, generator=generator).mul_(0.03)
        elif parameter.dim() > 1:
            values = torch.randn(parameter.shape, generator=generator).mul_(
                2.4 / math.sqrt(parameter.shape[-1])
            )
        elif name.endswith("bias"):
            values = torch.randn(parameter.shape, generator=generator).mul_(0.3)
        else:
            # Norms of query and key are larger: they make attention choose, so that context counts.
            scale = 3.0 * sharpness if "q_norm" in name or "k_norm" in name else 1.0
            values = torch.rand(parameter.shape, generator=generator).add_(0.5).mul_(scale)
        parameter.copy_(values)
