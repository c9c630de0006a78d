"""Checks of `config.json`, and reading it through transformers' own configuration classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from sagellm.core import CheckpointError, HFConfig, UnsupportedModelError
from sagellm.engines.config.shown import clipped, shown
from sagellm.engines.models.hf_allowlist import allowed_entries
from sagellm.engines.models.quantized_weights import method_in_config, refusal_of

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class ContextLimit(NamedTuple):
    """The longest sequence that can be run, in tokens, and what in the config limits it."""

    max_model_len: int
    reason: str


_MAX_LAYERS = 10_000
_MAX_REASON = 2000
_SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "vocab_size")


def architecture_of(config: HFConfig) -> str | None:
    """Return the first of the config's `architectures`, or None."""
    architectures = config.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else None


def context_limit(max_position_embeddings: int, ropes: Iterable[Mapping[str, Any]]) -> ContextLimit:
    """Read how long a sequence may be. Raises CheckpointError for an original length that is not a number.

    Beyond the original length, some kinds of RoPE scaling rotate all keys by other angles, so it is the
    limit.
    """
    limit = ContextLimit(int(max_position_embeddings), "max_position_embeddings")
    for rope in ropes:
        kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings")
        if kind not in _LENGTH_DEPENDENT_ROPE or not original:
            continue
        if isinstance(original, bool) or not isinstance(original, int | float):
            raise CheckpointError(
                f"rope_parameters.original_max_position_embeddings is {shown(original)}; it must be a number"
            )
        if original <= limit.max_model_len:
            reason = (
                f"original_max_position_embeddings: beyond it {kind} RoPE scaling would change the keys "
                f"that are already stored"
            )
            limit = ContextLimit(int(original), reason)
    return limit


def check_config(config: HFConfig) -> None:
    """Check what holds for the config of any model, nested or not, before its entries are read.

    Raises UnsupportedModelError for quantized weights, CheckpointError for a size that none can have.
    """
    nested = config.get("text_config")
    text_config = nested if isinstance(nested, Mapping) else {}
    if (method := method_in_config(config)) is not None:
        raise UnsupportedModelError(refusal_of(method))
    for each in (config, text_config):
        num_layers = each.get("num_hidden_layers")
        if isinstance(num_layers, int) and num_layers > _MAX_LAYERS:  # all layers are listed
            raise CheckpointError(
                f"config.json: num_hidden_layers is {num_layers}; at most {_MAX_LAYERS} can be"
            )
    check_sizes(config.get)


def read_hf_config(config: HFConfig) -> Any:
    """Make transformers' configuration object, which fills in defaults and unifies spellings.

    Both `rope_parameters` and the older `rope_theta` with `rope_scaling` become `rope_parameters`. Only
    entries on the allow-list reach it (`hf_allowlist`). Raises UnsupportedModelError for a model type that
    transformers does not have, CheckpointError for values that its class refuses.
    """
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"model_type is {shown(model_type)} in config.json, "
            f"which this version of transformers does not know"
        )
    check_config(config)  # transformers divides by some sizes
    try:
        config_class = CONFIG_MAPPING[model_type]
        hf = config_class.from_dict(allowed_entries(config, config_class))
    except Exception as error:  # validation errors of many types, not worth distinguishing
        reason = clipped(str(error), _MAX_REASON)
        raise CheckpointError(f"config.json is not a valid {model_type} config: {reason}") from error
    text = hf.get_text_config()
    check_sizes(lambda name: getattr(text, name, None))  # other spellings, and those of a nested config
    return hf


def check_sizes(get: Callable[[str], Any]) -> None:
    """Raise CheckpointError for a size below 1; `get` returns the entry of a name."""
    for name in _SIZES:
        value = get(name)
        if isinstance(value, int | float) and value < 1:
            raise CheckpointError(f"config.json: {name} is {value}; it must be at least 1")
