"""Reading the config.json of the families that our own decoder runs, as transformers' classes read it.

What is missing, null or spelled in the older way means the same as there; importing transformers takes longer
than all else that opening a checkpoint does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sagellm.core import CheckpointError, HFConfig, UnsupportedModelError
from sagellm.engines.config.shown import shown
from sagellm.engines.models.hf_allowlist import REFUSED
from sagellm.engines.models.hf_config import check_config, check_sizes

_EXPECTED = {bool: "true or false", int: "an integer", float: "a floating-point number", str: "a text"}
_ROPE_KEYS = frozenset(
    {
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor"),
        *("original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "short_factor"),
        *("long_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "mrope_section"),
        "mrope_interleaved",
    }
)
_REQUIRED_BY_ROPE: dict[object, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}
"""What must be in the config, even where a formula has a default for it."""
_STRETCHED_ROPE = ("llama3", "yarn", "longrope")
"""The kinds whose original length is the longest sequence where the config has none."""
_OLDER_LAYER_TYPES = {"attention": "full_attention"}


@dataclass(frozen=True)
class Entry:
    """An entry of config.json: its type, its value where it is missing, and whether it may be null."""

    kind: type[bool] | type[int] | type[float] | type[str]
    default: bool | int | float | str | None
    is_optional: bool = False

    def read(self, config: HFConfig, name: str) -> Any:
        """Return the value. Raises CheckpointError for one of another type; True is not an integer."""
        value = config.get(name, self.default)
        if value is None and self.is_optional:
            return None
        if type(value) is not self.kind:
            expected = _EXPECTED[self.kind] + (" or null" if self.is_optional else "")
            raise CheckpointError(f"config.json: {name} is {shown(value)}; it must be {expected}")
        return value


DECODER_ENTRIES: dict[str, Entry] = {
    "vocab_size": Entry(int, 32_000),
    "hidden_size": Entry(int, 4096),
    "num_hidden_layers": Entry(int, 32),
    "num_attention_heads": Entry(int, 32),
    "head_dim": Entry(int, None, is_optional=True),
    "hidden_act": Entry(str, "silu"),
    "rms_norm_eps": Entry(float, 1e-6),
    "tie_word_embeddings": Entry(bool, default=False),
}
"""What the config of every decoder has; sizes are those of the first model of the kind."""


def read_decoder_config(config: HFConfig, entries: Mapping[str, Entry]) -> Any:
    """Return an object whose attributes are the entries, `layer_types` (or None) and `rope_parameters`.

    Raises CheckpointError for values that mean nothing, UnsupportedModelError for features that our decoder
    lacks. Entries that nothing reads are not judged.
    """
    check_config(config)
    read = SimpleNamespace(**{name: entry.read(config, name) for name, entry in entries.items()})
    if read.num_key_value_heads is None:
        read.num_key_value_heads = read.num_attention_heads
    check_sizes(lambda name: getattr(read, name))
    if not 0 <= read.rms_norm_eps < math.inf:
        raise CheckpointError(
            f"config.json: rms_norm_eps is {read.rms_norm_eps}; it must be a small number, at least 0"
        )
    read.layer_types = _layer_types(config, read.num_hidden_layers)
    read.rope_parameters = _rope_parameters(config, read.max_position_embeddings)
    per_layer = config.get("per_layer_config")
    if per_layer is not None and not isinstance(per_layer, Mapping):
        raise CheckpointError(
            f"config.json: per_layer_config is {shown(per_layer)}; it must be an object or null"
        )
    if per_layer:
        raise UnsupportedModelError("per_layer_config is set; the layers of this decoder are of equal size")
    return read


def _layer_types(config: HFConfig, num_layers: int) -> tuple[str, ...] | None:
    named = config.get("layer_types")
    if named is None:
        return None
    if not isinstance(named, list) or not all(isinstance(kind, str) for kind in named):
        raise CheckpointError(
            f"config.json: layer_types is {shown(named)}; it must be a list of texts or null"
        )
    if len(named) != num_layers:
        raise CheckpointError(
            f"config.json: layer_types names {len(named)} layers, num_hidden_layers is {num_layers}"
        )
    return tuple(_OLDER_LAYER_TYPES.get(kind, str(kind)) for kind in named)


def _rope_parameters(config: HFConfig, max_position_embeddings: int) -> dict[str, Any]:
    """Unify both spellings: `rope_parameters`, and the older `rope_theta` with `rope_scaling`, which wins."""
    newer = _known_rope_keys("rope_parameters", config.get("rope_parameters"))
    rope = _known_rope_keys("rope_scaling", config.get("rope_scaling") or None) or newer
    rope.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    if (rotated := config.get("partial_rotary_factor")) is not None:
        rope.setdefault("partial_rotary_factor", rotated)
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    if kind in _STRETCHED_ROPE:
        rope.setdefault("original_max_position_embeddings", max_position_embeddings)
    required = _REQUIRED_BY_ROPE.get(kind, ()) if isinstance(kind, str) else ()
    for name in required:
        if name not in rope or (name == "original_max_position_embeddings" and rope[name] is None):
            raise CheckpointError(
                f"config.json: rope_parameters has no {name}; rope_type {kind!r} needs {', '.join(required)}"
            )
    return rope


def _known_rope_keys(name: str, value: Any) -> dict[str, Any]:
    """Return a copy that has only keys which some kind of RoPE reads, and the objects of layer types."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {name} is {shown(value)}; it must be an object or null")
    return {
        key: each
        for key, each in value.items()
        if key in _ROPE_KEYS or (isinstance(each, Mapping) and key not in REFUSED)
    }
