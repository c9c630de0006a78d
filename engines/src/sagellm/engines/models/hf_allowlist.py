"""The allow-list of config.json entries that are passed to transformers' configuration classes.

transformers turns every other entry into an attribute of the configuration, which its model classes obey:
such attributes select kernels to fetch from the hub, code from the checkpoint, files, and fusions. Allowed
are the names that a class declares, names in its own code (older spellings, which it converts), and names
that any model class may read.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

from sagellm.engines.config.shown import shown

# What transformers' model classes and masks read from any configuration, declared or not.
_COMMON = frozenset(
    {
        *("model_type", "architectures", "dtype", "torch_dtype", "tie_word_embeddings", "is_encoder_decoder"),
        *("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_hidden_layers", "hidden_act"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "layer_norm_eps"),
        *("rms_norm_eps", "attention_bias", "attention_dropout", "hidden_dropout", "router_bias"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "layer_types", "mlp_layer_types", "is_causal"),
        *("sliding_window", "attention_chunk_size", "use_bidirectional_attention", "swiglu_limit"),
        *("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "per_layer_config"),
        *("original_max_position_embeddings", "swiglu_alpha"),
    }
)
# Never passed on, even if a class declares it.
REFUSED = frozenset(
    {
        # code, kernels and files from elsewhere
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
        *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
        *("auto_map", "custom_pipelines", "custom_generate", "trust_remote_code", "code_revision"),
        *("use_kernels", "allow_all_kernels", "kernel_config", "fusion_config", "compile_config"),
        *("quantization_config", "compression_config", "distributed_config", "transformers_weights"),
        *("backbone", "backbone_config", "backbone_kwargs", "use_timm_backbone", "use_pretrained_backbone"),
        *("pretrained_cfg", "model_args", "peft_type", "gguf_file", "configuration_files", "extra_files"),
        *("name_or_path", "_name_or_path", "_commit_hash", "revision", "cache_dir", "token"),
        # what a model returns, and classifier labels, of which transformers creates any number
        *("return_dict", "output_attentions", "output_hidden_states", "num_labels", "id2label", "label2id"),
        *("problem_type", "label_names", "num_classes"),
    }
)
_ROPE = frozenset({"rope_parameters", "rope_scaling"})
_PER_LAYER = "per_layer_config"
_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})


def allowed_entries(config: Mapping[str, Any], config_class: Any) -> dict[str, Any]:
    """Return a deep copy of the entries that a configuration class may be given, as transformers edits them.

    Raises ValueError for a nested configuration of an unknown type.
    """
    allowed = _allowed_names(config_class)
    return {
        key: _allowed_value(key, value, config_class)
        for key, value in config.items()
        if key in allowed and (key not in ("dtype", "torch_dtype") or value in _DTYPES)
    }


def _allowed_value(key: str, value: Any, config_class: Any) -> Any:
    if not isinstance(value, Mapping):
        return _copy(value)
    if key in config_class.sub_configs:
        return allowed_entries(value, _nested_class(config_class, key, value))
    if key in _ROPE:
        return _copy(value, _rope_keys() | _allowed_names(config_class) | frozenset(_layer_types(value)))
    if key == _PER_LAYER:
        allowed = _allowed_names(config_class) | {"skip"}
        return {layer: _copy(changed, allowed) for layer, changed in value.items()}
    return _copy(value)


def _copy(value: Any, allowed: frozenset[str] | None = None) -> Any:
    """Deep-copy a value, keeping the allowed keys of mappings; None allows all that are not refused."""
    if isinstance(value, Mapping):
        return {
            key: _copy(nested, allowed)
            for key, nested in value.items()
            if key not in REFUSED and (allowed is None or key in allowed)
        }
    return [_copy(nested, allowed) for nested in value] if isinstance(value, list) else value


def _layer_types(rope: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of layer types that have RoPE parameters of their own."""
    return (key for key, value in rope.items() if isinstance(value, Mapping))


def _nested_class(config_class: Any, key: str, value: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    found = config_class.sub_configs[key]
    if issubclass(found, PreTrainedConfig):
        return found
    default = getattr(config_class, "sub_configs_defaults", {}).get(key)  # transformers 5.0 has none
    model_type = value.get("model_type", getattr(default, "model_type", None))
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"{key}.model_type is {shown(model_type)}, which transformers does not know")
    return CONFIG_MAPPING[model_type]


@lru_cache
def _allowed_names(config_class: Any) -> frozenset[str]:
    from transformers import PreTrainedConfig

    own = config_class.__mro__[: config_class.__mro__.index(PreTrainedConfig)]
    declared = {name for each in own for name in inspect.signature(each.__init__).parameters}
    declared |= {field.name for field in fields(config_class)} if is_dataclass(config_class) else set()
    declared |= {*config_class.attribute_map, *config_class.attribute_map.values()}
    mentioned = {name for each in own for name in _names_in_functions(vars(each))}
    passing = (declared | mentioned | _COMMON) - REFUSED
    return frozenset(name for name in passing if not name.startswith("_"))


@lru_cache
def _rope_keys() -> frozenset[str]:
    from transformers import modeling_rope_utils

    mixin = vars(modeling_rope_utils.RotaryEmbeddingConfigMixin)
    found = {*_names_in_functions(vars(modeling_rope_utils)), *_names_in_functions(mixin)}
    return frozenset(found | {"rope_type", "type", "mrope_section", "mrope_interleaved"})


def _names_in_functions(namespace: Mapping[str, Any]) -> Iterator[str]:
    for value in namespace.values():
        function = getattr(value, "__func__", value)  # of a class or a static method
        if inspect.isfunction(function):
            yield from _names_in_code(function.__code__)


def _names_in_code(code: CodeType) -> Iterator[str]:
    """Yield the string constants in code that are names, and the attributes that it sets."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in_code(constant)
        for text in constant if isinstance(constant, tuple | frozenset) else (constant,):
            if isinstance(text, str) and text.isidentifier():
                yield text
