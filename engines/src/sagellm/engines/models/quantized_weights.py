"""Recognises quantized checkpoints that no checkpoint format has read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sagellm.core import HFConfig
from sagellm.engines.config.shown import clipped

_OF_TENSORS = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    "._weight_qdata": "torchao",
    ".weight_scale_inv": "FP8",
    ".weight_scale": "FP8 or compressed-tensors",
    ".weight.absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
}
"""How the name of a tensor ends that a checkpoint of a method has → the method."""


ENTRIES = ("quantization_config", "compression_config")


def entry_in_config(config: HFConfig) -> Any:
    """Return what a config, or the one nested in it, says about quantization; None if neither does."""
    for each in (config, config.get("text_config")):
        for name in ENTRIES:
            entry = each.get(name) if isinstance(each, Mapping) else None
            if entry is not None:
                return entry
    return None


def method_in_config(config: HFConfig) -> str | None:
    """Return the method that a config names, None if it does not speak of any."""
    entry = entry_in_config(config)
    if entry is None:
        return None
    return clipped(str(entry.get("quant_method", "unnamed") if isinstance(entry, Mapping) else "unnamed"))


def method_in_tensors(names: Collection[str]) -> str | None:
    """Return the method that the names of tensors show, None for weights that are not quantized."""
    for suffix, method in _OF_TENSORS.items():
        if any(name.endswith(suffix) for name in names):
            return method
    return None


def refusal_of(method: str) -> str:
    """Say what to give instead of a checkpoint that is quantized by a method that no format reads."""
    return (
        f"the checkpoint's weights are quantized ({method}), which no installed checkpoint format reads "
        f"(`sage llm plugins` lists them); give the unquantized checkpoint, with --quantization int8 (in "
        f"Python: quantization='int8') for 8 bits per weight"
    )
