"""Recognises checkpoints whose weights were quantized before, which no family reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sagellm.core import HFConfig
from sagellm.engines.config.shown import clipped

_OF_TENSORS = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_inv": "FP8",
    ".weight_scale": "FP8 or compressed-tensors",
    ".weight.absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
}
"""How the name of a tensor ends that a checkpoint of a method has → the method."""


def method_in_config(config: HFConfig) -> str | None:
    """Return the method that a config, or the one nested in it, names; None if neither does."""
    for each in (config, config.get("text_config")):
        for name in ("quantization_config", "compression_config"):
            entry = each.get(name) if isinstance(each, Mapping) else None
            if entry is not None:
                named = entry if isinstance(entry, Mapping) else {}
                return clipped(str(named.get("quant_method", "unnamed")))
    return None


def method_in_tensors(names: Collection[str]) -> str | None:
    """Return the method that the names of tensors show, None for weights that are not quantized."""
    for suffix, method in _OF_TENSORS.items():
        if any(name.endswith(suffix) for name in names):
            return method
    return None


def refusal_of(method: str) -> str:
    """Say what to give instead of a checkpoint that is quantized by a method."""
    return (
        f"the checkpoint's weights are quantized ({method}), and such weights are not read; give the "
        f"unquantized checkpoint, with --quantization int8 (in Python: quantization='int8') for 8 bits per "
        f"weight"
    )
