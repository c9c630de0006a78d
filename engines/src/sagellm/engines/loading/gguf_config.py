"""What config.json and generation_config.json of a model would say, from the metadata of its GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sagellm.core import CheckpointError, UnsupportedModelError, get_logger
from sagellm.engines.config.shown import first_few, shown
from sagellm.engines.loading.gguf_header import GGUFHeader
from sagellm.engines.loading.gguf_types import BLOCK_TYPES

logger = get_logger(__name__)

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_READ = frozenset(
    {
        *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
        *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
        *("attention.key_length", "attention.value_length", "attention.sliding_window"),
        *("rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"),
        *("rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scale_linear"),
        *("rope.scaling.attn_factor", "expert_count", "expert_used_count"),
    }
)
"""Entries of an architecture that are applied here, or that say nothing more."""
_ENDS = frozenset(
    {
        *(b"<|eot_id|>", b"<|eom_id|>", b"<|end_of_text|>", b"<|im_end|>", b"<|endoftext|>", b"<|end|>"),
        *(b"</s>", b"<EOT>", b"<end_of_turn>", b"<eos>", "<｜end▁of▁sentence｜>".encode()),
    }
)
"""Control tokens that end an answer wherever they occur, as in llama.cpp: files name only one."""
_CONTROL = 3
_SAMPLING = {
    **{"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"},
    **{"penalty_repeat": "repetition_penalty"},
}


class _Entries:
    """The entries of a file's architecture, with their types checked."""

    def __init__(self, header: GGUFHeader) -> None:
        self._header = header
        name = header.entries.get("general.architecture")
        self.architecture = name if isinstance(name, str) else ""
        if self.architecture not in _CLASSES:
            raise UnsupportedModelError(
                f"{header.path} has the architecture {shown(name)} "
                f"(general.architecture); {', '.join(_CLASSES)} can be run from GGUF"
            )

    def get(self, name: str) -> Any:
        """Return an entry, None if there is none. One per layer must be the same for all."""
        key = f"{self.architecture}.{name}"
        value = self._header.entries.get(key)
        if isinstance(value, list):
            if not value or any(each != value[0] for each in value):
                raise UnsupportedModelError(
                    f"{self._header.path}: {key} differs between layers; the layers of this decoder are of "
                    f"equal size"
                )
            return value[0]
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a size. Raises CheckpointError unless it is a positive integer."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise self.wrong(name, value, "a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a positive number."""
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(name, value, "a positive number")
        return float(value)

    def wrong(self, name: str, value: Any, wanted: str) -> CheckpointError:
        given = "missing" if value is None else shown(value)
        return CheckpointError(
            f"{self._header.path}: {self.architecture}.{name} is {given}; it must be {wanted}"
        )

    def warn_of_rest(self) -> None:
        """Name the entries that nothing applies."""
        prefix = f"{self.architecture}."
        rest = [
            name
            for name in self._header.entries
            if name.startswith(prefix) and name.removeprefix(prefix) not in _READ
        ]
        if rest:
            logger.warning("%s sets %s, which this engine does not apply", self._header.path, first_few(rest))


def hf_config(header: GGUFHeader, rope_factors: Sequence[float] | None) -> dict[str, Any]:
    """Return the config; `rope_factors` are what the file divides the frequencies of its rotation by.

    Raises CheckpointError for entries that are missing or wrong, UnsupportedModelError for those of features
    that the decoder lacks.
    """
    entries = _Entries(header)
    entries.warn_of_rest()
    hidden_size, num_heads = entries.integer("embedding_length"), entries.integer("attention.head_count")
    head_dim = entries.integer("attention.key_length", max(1, hidden_size // num_heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if entries.integer(name, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{header.path}: {entries.architecture}.{name} is {entries.get(name)}, and a head has "
                f"{head_dim}; this decoder's are equal"
            )
    if entries.get("expert_count"):
        raise UnsupportedModelError(f"{header.path} has experts; models with experts are not run from GGUF")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{header.path} has no token_embd.weight, the embedding of its tokens")
    theta = entries.number("rope.freq_base", 10_000.0)
    config = {
        "architectures": [_CLASSES[entries.architecture]],
        "model_type": entries.architecture,
        "dtype": _dtype(header),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": entries.integer("feed_forward_length"),
        "num_hidden_layers": entries.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": entries.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": entries.number("attention.layer_norm_rms_epsilon", 1e-5),
        "max_position_embeddings": entries.integer("context_length"),
        "rope_theta": theta,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_output.bias" in header.tensors
        or (entries.architecture != "qwen2" and "blk.0.attn_q.bias" in header.tensors),
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
    }
    config |= _window(header, entries)
    scaling = _rope_scaling(header, entries)
    if rope_factors is not None:
        if scaling is not None:
            raise UnsupportedModelError(f"{header.path} scales its rotation twice")
        scaling = _llama3_scaling(header, rope_factors, theta, head_dim)
    return config if scaling is None else config | {"rope_scaling": scaling}


def generation_config(header: GGUFHeader) -> dict[str, Any]:
    """Return the tokens that end an answer, and sampling parameters where the file has them."""
    entries = header.entries
    ends = {entries.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    tokens, kinds = (entries.get(f"tokenizer.ggml.{name}") or [] for name in ("tokens", "token_type"))
    ends |= {
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and token in _ENDS
    }
    sampling = {
        name: value
        for key, name in _SAMPLING.items()
        if (value := entries.get(f"general.sampling.{key}")) is not None
    }
    known = sorted(end for end in ends if type(end) is int)
    return sampling | ({"eos_token_id": known} if known else {})


def _dtype(header: GGUFHeader) -> str:
    """Return the format to compute in: that of plain matrices, bfloat16 beside quantized ones."""
    types = {tensor.dtype for tensor in header.tensors.values() if len(tensor.shape) == 2}
    if types & {"BF16", *BLOCK_TYPES}:
        return "bfloat16"
    return "float16" if "F16" in types else "float32"


def _window(header: GGUFHeader, entries: _Entries) -> Mapping[str, Any]:
    """Return what a sliding window changes: of the models called llama, only Mistral's have one."""
    if not entries.get("attention.sliding_window"):
        return {}
    window = entries.integer("attention.sliding_window")
    if entries.architecture == "llama":
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    raise UnsupportedModelError(
        f"{header.path} has a sliding window of {window} tokens, which is not read from GGUF for "
        f"{entries.architecture}"
    )


def _rope_scaling(header: GGUFHeader, entries: _Entries) -> dict[str, Any] | None:
    kind = entries.get("rope.scaling.type")
    linear = entries.get("rope.scale_linear")  # of older files
    if kind is None and linear is not None:
        return _linear(entries.number("rope.scale_linear", 1.0))
    if kind in (None, "none"):
        return None
    factor = entries.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return _linear(factor)
    if kind == "yarn" and entries.number("rope.scaling.attn_factor", 1.0) == 1:
        original = entries.integer("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise UnsupportedModelError(
        f"{header.path} scales its rotation by {shown(kind)} (rope.scaling); none, linear and yarn without "
        f"attn_factor are read from GGUF"
    )


def _linear(factor: float) -> dict[str, Any] | None:
    return None if factor == 1 else {"rope_type": "linear", "factor": factor}


def _llama3_scaling(
    header: GGUFHeader, factors: Sequence[float], theta: float, head_dim: int
) -> dict[str, Any] | None:
    """Return the parameters of Llama 3's scaling that give these factors; converters write only those."""
    given = np.array(factors)
    if len(given) == head_dim // 2 and np.isfinite(given).all() and (given == 1).all():
        return None
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    factor = float(f"{given.max(initial=0):.6g}")
    for original in (1 << exponent for exponent in range(10, 21)):
        share = (original / wavelengths - 1) / 3  # between wavelengths of the original length and a quarter
        smooth = 1 / ((1 - share) / factor + share) if factor > 0 else share
        expected = np.where(share >= 1, 1.0, np.where(share <= 0, factor, smooth))
        if given.shape == expected.shape and np.allclose(given, expected, rtol=1e-3, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedModelError(
        f"{header.path}: rope_freqs.weight scales the rotation in a way that is not Llama 3's"
    )
