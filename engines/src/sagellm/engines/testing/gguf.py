"""GGUF files: a writer, and copies of checkpoints as llama.cpp's converter lays them out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from struct import pack
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from sagellm.core import ConfigError, TensorSpec
from sagellm.engines.loading.checkpoint import SafetensorsFormat
from sagellm.engines.loading.gguf_types import TYPES

ALIGNMENT = 32
_NUMBER_OF = {name: number for number, name in TYPES.items()}
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_PARTS = {
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    **{"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"},
    **{"self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm"},
    **{"self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"},
    **{"mlp.down_proj": "ffn_down"},
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
MatrixType = Literal["F32", "F16", "BF16", "Q8_0", "Q4_0"]
Tensor = tuple[str, tuple[int, ...], npt.NDArray[np.uint8]]
"""Its type, its shape (outermost dimension first) and its bytes."""


def write_gguf(path: Path, entries: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a file of version 3. Texts are str, floats f32, integers u32, in lists i32, as in llama.cpp."""
    with path.open("wb") as file:
        file.write(b"GGUF" + pack("<IQQ", 3, len(tensors), len(entries)))
        for name, value in entries.items():
            file.write(_text(name) + _value(value))
        offset = 0
        for name, (kind, shape, data) in tensors.items():
            dimensions = pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            file.write(_text(name) + dimensions + pack("<IQ", _NUMBER_OF[kind], offset))
            offset += -(-data.size // ALIGNMENT) * ALIGNMENT
        _pad(file)
        for _, _, data in tensors.values():
            file.write(data.tobytes())
            _pad(file)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def _text(text: str) -> bytes:
    return pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        if value and type(value[0]) is int:
            return pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
        kind = _value(value[0] if value else "")[:4]
        return pack("<I", 9) + kind + pack("<Q", len(value)) + b"".join(_value(each)[4:] for each in value)
    if isinstance(value, str):
        return pack("<I", 8) + _text(value)
    if isinstance(value, bool):
        return pack("<IB", 7, value)
    return pack("<II", 4, value) if isinstance(value, int) else pack("<If", 6, value)


def quantize(weights: npt.NDArray[np.float32], kind: MatrixType) -> npt.NDArray[np.uint8]:
    """Return the bytes of rows in a type, as llama.cpp rounds them."""
    if kind == "F32":
        return weights.astype("<f4").view(np.uint8).reshape(-1)
    if kind == "F16":
        return weights.astype("<f2").view(np.uint8).reshape(-1)
    if kind == "BF16":
        bits = weights.astype("<f4").view("<u4").astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return rounded.astype("<u2").view(np.uint8).reshape(-1)
    blocks = weights.reshape(-1, 32)
    if kind == "Q8_0":
        scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
        scaled = blocks * _inverse(scales)
        codes = (np.sign(scaled) * np.floor(np.abs(scaled) + np.float32(0.5))).astype(np.int8).view(np.uint8)
    else:
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
        scales = largest / np.float32(-8)
        nibbles = (blocks * _inverse(scales) + np.float32(8.5)).astype(np.uint8).clip(0, 15)
        codes = nibbles[:, :16] | nibbles[:, 16:] << 4
    return np.concatenate((scales.astype("<f2").view(np.uint8), codes), axis=1).reshape(-1)


def _inverse(scales: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    with np.errstate(divide="ignore"):
        return np.where(scales == 0, np.float32(0), 1 / scales)


def copy_as_gguf(
    model: Path, target: Path, kind: MatrixType = "Q8_0", *, pre: str = "gpt-2", add_bos_token: bool = False
) -> Path:
    """Write a checkpoint of Llama, Mistral, Qwen2 or Qwen3 as GGUF, and return the file.

    Matrices are in the type `kind`, vectors in F32. `pre` names how its byte-level tokenizer divides words,
    `add_bos_token` says whether texts begin with BOS.
    Raises ConfigError for another model.
    """
    checkpoint = SafetensorsFormat().open(model)
    config = checkpoint.config
    architecture = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    if architecture not in ("llama", "qwen2", "qwen3"):
        raise ConfigError(f"{model} is a {architecture}; GGUF is written of llama, mistral, qwen2 and qwen3")
    entries = _metadata(architecture, config) | _tokenizer(model, config["vocab_size"])
    entries |= {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": add_bos_token}
    tensors: dict[str, Tensor] = {}
    for name, stored in checkpoint.weights.tensors.items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        values = _floats(checkpoint.weights.get(TensorSpec(name, stored.shape)), stored.dtype)
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            num_heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            values = values.reshape(num_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        chosen = "F32" if len(stored.shape) == 1 else kind
        tensors[gguf_name(name)] = (chosen, stored.shape, quantize(values, chosen))
    write_gguf(target, entries, tensors)
    return target


def gguf_name(name: str) -> str:
    """Return what llama.cpp calls a tensor. Raises KeyError for one that it does not know."""
    part, _, kind = name.rpartition(".")
    if part.startswith("model.layers."):
        _, _, layer, inner = part.split(".", 3)
        return f"blk.{layer}.{_PARTS[inner]}.{kind}"
    return f"{_OUTSIDE[part]}.{kind}"


def _floats(array: npt.NDArray[np.generic], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "BF16":
        return (array.astype("<u4") << 16).view("<f4")
    return array.astype(np.float32)


def _metadata(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    rope = config.get("rope_parameters") or config
    own = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": num_heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or num_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if config.get("sliding_window"):
        own["attention.sliding_window"] = config["sliding_window"]
    named = {f"{architecture}.{key}": each for key, each in own.items()}
    return {"general.architecture": architecture} | named


def _tokenizer(model: Path, vocab_size: int) -> dict[str, Any]:
    """Return the entries of a byte-level tokenizer; rows of the embedding without a token are unused."""
    whole = json.loads((model / "tokenizer.json").read_text())
    settings = json.loads((model / "tokenizer_config.json").read_text())
    added = {each["id"]: each for each in whole["added_tokens"]}
    by_id = {index: token for token, index in whole["model"]["vocab"].items()}
    by_id |= {index: each["content"] for index, each in added.items()}
    kinds = [
        (_CONTROL if added[index]["special"] else _USER_DEFINED)
        if index in added
        else 1
        if index in by_id
        else _UNUSED
        for index in range(vocab_size)
    ]
    merges = [each if isinstance(each, str) else " ".join(each) for each in whole["model"]["merges"]]
    entries: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [by_id.get(index, f"[PAD{index}]") for index in range(vocab_size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }
    ids = {token: index for index, token in by_id.items()}
    for name, key in {"eos": "eos_token", "bos": "bos_token", "padding": "pad_token"}.items():
        token = settings.get(key)
        token = token["content"] if isinstance(token, dict) else token
        if token in ids:
            entries[f"tokenizer.ggml.{name}_token_id"] = ids[token]
    template = model / "chat_template.jinja"
    if template.exists():
        entries["tokenizer.chat_template"] = template.read_text()
    return entries
