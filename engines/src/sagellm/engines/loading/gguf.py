"""The checkpoint format `gguf`: llama.cpp's, one file with weights, config, tokenizer and chat template.

Tensors have the names of the Hugging Face layout here. llama.cpp's converter reorders the rows of Llama's
query and key, since its rotation turns neighbours; they are read in their own order, row by row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sagellm.core import (
    WHOLE,
    Checkpoint,
    CheckpointError,
    CheckpointFormatProtocol,
    HFConfig,
    Shard,
    TensorSpec,
)
from sagellm.core.protocols.weight_form import CodedRows
from sagellm.engines.config.shown import first_few, shown
from sagellm.engines.loading.checkpoint import SafetensorsWeights
from sagellm.engines.loading.gguf_config import generation_config, hf_config
from sagellm.engines.loading.gguf_files import SUFFIX, gguf_in, parts_of
from sagellm.engines.loading.gguf_header import GGUFHeader, read_gguf_header
from sagellm.engines.loading.gguf_types import BLOCK_TYPES, BLOCKS, coded_rows
from sagellm.engines.loading.safetensors_header import PlacedTensor

_ROPE_FACTORS = "rope_freqs.weight"
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NAMES_IN_LAYER = {
    **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"},
    **{"attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm"},
    **{"attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"},
    **{"ffn_down": "mlp.down_proj"},
}
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TURNED = re.compile(r"blk\.\d+\.attn_(?P<which>[qk])\.(weight|bias)")
_WITH_TURNED_ROWS = ("llama", "mistral")
_PIECE_BYTES = 16 << 20


class GGUFWeights(SafetensorsWeights):
    """Maps GGUF files, and takes blocks of quantized weights apart."""

    def __init__(
        self, tensors: Mapping[str, PlacedTensor], row_orders: Mapping[str, npt.NDArray[np.int64]]
    ) -> None:
        super().__init__(tensors)
        self._row_orders = row_orders  # the place in the file of each row, of tensors that have another order

    def get(self, tensor: TensorSpec, shard: Shard = WHOLE) -> npt.NDArray[np.generic]:
        """Return a view of the file's bytes; of rows that lie in another order, a copy."""
        order = self._row_orders.get(tensor.name)
        if order is None:
            return super().get(tensor, shard)
        whole = super().get(TensorSpec(tensor.name, tensor.shape))[order]
        axis = tensor.shard_axis
        if axis is None:
            return whole
        return whole[(slice(None),) * axis + (shard.of(whole.shape[axis], tensor.shard_unit),)]

    def pieces(self, tensor: TensorSpec, multiple: int = 1) -> Iterator[tuple[int, npt.NDArray[np.generic]]]:
        """Yield first row and rows of pieces of about 16 MiB."""
        order = self._row_orders.get(tensor.name)
        if order is None:
            yield from super().pieces(tensor, multiple)
            return
        at_once = max(1, _PIECE_BYTES * len(order) // max(1, self.tensors[tensor.name].num_bytes * multiple))
        for begin in range(0, len(order), at_once * multiple):
            whole = super().get(TensorSpec(tensor.name, tensor.shape))
            yield begin, whole[order[begin : begin + at_once * multiple]]

    def coded_rows(self, tensor: TensorSpec, rows: slice, shard: Shard = WHOLE) -> CodedRows:
        """Return rows of a quantized weight, and their codes and scales in arrays of their own."""
        stored = self._tensors[tensor.name]
        if stored.form is None:
            return super().coded_rows(tensor, rows, shard)
        blocks = stored.parts["blocks"]
        num_rows, num_inputs = stored.shape
        if tensor.shard_axis == 0:
            first = shard.of(num_rows, tensor.shard_unit).start
            rows = slice(first + rows.start, first + rows.stop)
        whole = np.frombuffer(self._map(stored), np.uint8, stored.num_bytes, stored.offset)
        whole = whole.reshape(num_rows, -1, BLOCKS[blocks.dtype][1])
        order = self._row_orders.get(tensor.name)
        read = coded_rows(blocks.dtype, whole[rows if order is None else order[rows]])
        for values in (read.scales, read.offsets, read.factors, read.offset_factors):
            if values is not None and values.dtype.kind == "f" and not np.isfinite(values).all():
                raise CheckpointError(
                    f"{stored.path}: tensor {tensor.name!r} has a scale that is NaN or infinite; the file is "
                    f"damaged, fetch it again"
                )
        if tensor.shard_axis != 1 or shard == WHOLE:
            return read
        return _inputs_of(read, shard.of(num_inputs, tensor.shard_unit), stored, tensor.name)


def _inputs_of(rows: CodedRows, inputs: slice, stored: PlacedTensor, name: str) -> CodedRows:
    """Return the codes of some inputs. Raises CheckpointError if a group would be cut."""
    form = stored.form
    assert form is not None, "the weight is quantized"
    together = form.scale_group or form.group_size
    if inputs.start % together or inputs.stop % together:
        raise CheckpointError(
            f"{stored.path}: tensor {name!r} cannot be divided at inputs {inputs.start} and {inputs.stop}; "
            f"{together} of them share a scale"
        )

    at_once = {
        "codes": 8 // form.code.bits,
        **dict.fromkeys(("scales", "zeros", "offsets"), form.group_size),
        **dict.fromkeys(("factors", "offset_factors"), form.scale_group),
    }
    arrays = {name: getattr(rows, name) for name in at_once}
    cut = {
        name: np.ascontiguousarray(array[:, inputs.start // at_once[name] : inputs.stop // at_once[name]])
        for name, array in arrays.items()
        if array is not None
    }
    return replace(rows, **cut)


class GGUFFormat(CheckpointFormatProtocol):
    """A GGUF file of the architectures llama, qwen2 or qwen3, whole or in parts as llama.cpp splits it."""

    def accepts(self, path: Path) -> bool:
        """Accept a file by its name, and a directory whose weights are one such file, whole or in parts."""
        return gguf_in(path) is not None

    def open(self, path: Path) -> Checkpoint:
        """Read metadata and what the file says of its tensors. Raises CheckpointError."""
        file = gguf_in(path)
        assert file is not None, "the path was accepted"
        header = _read_parts(file)
        tensors = dict(header.tensors)
        factors = tensors.pop(_ROPE_FACTORS, None)
        config = hf_config(header, None if factors is None else _numbers(factors))
        named = {_hf_name(name): tensor for name, tensor in tensors.items()}
        orders = _row_orders(header, config) if config["model_type"] in _WITH_TURNED_ROWS else {}
        stored = {name: _as_coded(tensor) for name, tensor in named.items()}
        return Checkpoint(
            path=file,
            config=config,
            generation_config=generation_config(header),
            weights=GGUFWeights(stored, orders),
        )


def _read_parts(file: Path) -> GGUFHeader:
    """Read a file and the other parts that its name speaks of; the first has the metadata."""
    paths = [file.with_name(name) for name in parts_of(file.name)]
    if missing := [path.name for path in paths if not path.exists()]:
        raise CheckpointError(
            f"{file.parent} lacks {len(missing)} of the {len(paths)} parts of a model: {first_few(missing)}"
        )
    headers = [read_gguf_header(path) for path in paths]
    count = headers[0].entries.get("split.count", 1)
    if count not in (0, len(paths)):
        raise CheckpointError(
            f"{paths[0]} is one of {shown(count)} parts (split.count), and its name tells of {len(paths)}; "
            f"give the parts the names that llama.cpp gives them: NAME-00001-of-0000{len(paths)}{SUFFIX}"
        )
    tensors: dict[str, PlacedTensor] = {}
    for header in headers:
        if twice := sorted(tensors.keys() & header.tensors.keys()):
            raise CheckpointError(f"{header.path} has tensors of an earlier part: {first_few(twice)}")
        tensors |= header.tensors
    return GGUFHeader(paths[0], headers[0].entries, tensors)


def _hf_name(name: str) -> str:
    """Return what a tensor is called in the Hugging Face layout; others keep their name."""
    if match := _IN_LAYER.fullmatch(name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_NAMES_IN_LAYER[part]}.{kind}" if part in _NAMES_IN_LAYER else name
    part, _, kind = name.rpartition(".")
    return f"{_NAMES[part]}.{kind}" if part in _NAMES else name


def _row_orders(header: GGUFHeader, config: HFConfig) -> dict[str, npt.NDArray[np.int64]]:
    """Return the place of each row of queries and keys.

    Of a head's rows the file has those of the first half at even places, those of the second at odd ones.
    """
    orders: dict[str, npt.NDArray[np.int64]] = {}
    for name, tensor in header.tensors.items():
        if (match := _TURNED.fullmatch(name)) is None:
            continue
        num_heads = config["num_attention_heads" if match["which"] == "q" else "num_key_value_heads"]
        num_rows = tensor.shape[0] if tensor.shape else 0
        if num_rows % (2 * num_heads):
            raise CheckpointError(
                f"{tensor.path}: tensor {name!r} has {num_rows} rows, which {num_heads} heads cannot have"
            )
        orders[_hf_name(name)] = np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return orders


def _as_coded(tensor: PlacedTensor) -> PlacedTensor:
    """Return a tensor with the form of its type, if it is quantized."""
    if tensor.dtype not in BLOCK_TYPES:
        return tensor
    form = BLOCK_TYPES[tensor.dtype].form
    return PlacedTensor(
        path=tensor.path,
        dtype=form.code.upper(),
        shape=tensor.shape,
        num_bytes=tensor.num_bytes,
        form=form,
        parts={"blocks": tensor},
        offset=tensor.offset,
    )


def _numbers(tensor: PlacedTensor) -> Sequence[float]:
    """Read a small tensor. Raises CheckpointError unless it is a row of F32."""
    if tensor.dtype != "F32" or len(tensor.shape) != 1 or prod(tensor.shape) > 1 << 12:
        raise CheckpointError(
            f"{tensor.path}: tensor {_ROPE_FACTORS!r} is {tensor.dtype} {list(tensor.shape)}; it must be a "
            f"number of F32 for each frequency"
        )
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset)
        values: list[float] = np.frombuffer(file.read(tensor.num_bytes), "<f4").tolist()
    return values
