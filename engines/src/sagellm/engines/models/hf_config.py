"""Reading `config.json` through transformers' own configuration classes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from sagellm.core import CheckpointError, HFConfig, UnsupportedModelError


def architecture_of(config: HFConfig) -> str | None:
    """Return the first of the config's `architectures`, or None."""
    architectures = config.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else None


def read_hf_config(config: HFConfig) -> Any:
    """Make transformers' configuration object, which fills in defaults and unifies spellings.

    Both `rope_parameters` and the older `rope_theta` with `rope_scaling` become `rope_parameters`.
    Raises UnsupportedModelError for a model type that transformers does not have, CheckpointError
    for values that its class refuses.
    """
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"model_type is {model_type!r} in config.json, which this version of transformers does not know"
        )
    if config.get("quantization_config") is not None:
        method = dict(config["quantization_config"]).get("quant_method", "unnamed")
        raise UnsupportedModelError(
            f"the checkpoint's weights are quantized ({method}); give one in bfloat16, float16 or float32"
        )
    values = deepcopy(dict(config))  # the class changes nested values in place
    try:
        return CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:  # validation errors of many types, none of them ours to tell apart
        raise CheckpointError(f"config.json is not a valid {model_type} config: {error}") from error
