"""Quantized copies of checkpoints, laid out as each format describes, and their dequantized selves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sagellm.core import ConfigError

Tensors = dict[str, torch.Tensor]
Writer = Callable[[torch.Tensor, "Layout"], tuple[Tensors, torch.Tensor]]

STATIC_SCALE = 0.02
"""Of activations, in the layouts that state one."""
_SINGLE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How weights are stored: the entries of `quantization_config`, and what writes a weight's parts."""

    config: Mapping[str, Any]
    write: Writer
    bits: int = 4
    group_size: int = 32
    is_symmetric: bool = True
    has_order: bool = False
    block: int = 0
    has_input_scale: bool = False
    describe: Callable[[torch.Tensor], dict[str, Any]] | None = None  # a weight, in the file's metadata


def quantized_copy(checkpoint: Path, into: Path, layout: str) -> tuple[Path, Path]:
    """Write a quantized copy of a checkpoint and one with what its weights stand for; return both paths.

    `layout` is one of LAYOUTS or ROUNDED_ACTIVATIONS; inputs of all linears must be multiples of 32. Linears
    of layers are quantized by rounding, other tensors are as they were.
    """
    layouts = LAYOUTS | ROUNDED_ACTIVATIONS
    if layout not in layouts:
        raise ConfigError(f"layout is {layout!r}; it must be one of {', '.join(layouts)}")
    chosen = layouts[layout]
    tensors = load_file(checkpoint / _SINGLE)
    quantized, plain = dict(tensors), dict(tensors)
    metadata = {"format": "pt"}
    for name, weight in tensors.items():
        if name.endswith("proj.weight"):
            parts, stands_for = chosen.write(weight.float(), chosen)
            plain[name] = stands_for.to(weight.dtype)
            if chosen.describe is not None:
                metadata[name] = json.dumps(chosen.describe(weight))
            del quantized[name]
            quantized |= {f"{name.removesuffix('.weight')}.{part}": each for part, each in parts.items()}
    copies = []
    for name, each in ((layout, quantized), (f"{layout}-dequantized", plain)):
        copy = Path(shutil.copytree(checkpoint, into / name))
        save_file({key: value.contiguous() for key, value in each.items()}, copy / _SINGLE, metadata)
        copies.append(copy)
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = dict(chosen.config)
    (copies[0] / "config.json").write_text(json.dumps(config))
    return copies[0], copies[1]


def _rounded(weight: torch.Tensor, layout: Layout, scale_dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return codes (out, in) from 0, scales and zero points (out, groups), and what they stand for."""
    most = (1 << layout.bits) - 1
    grouped = weight.reshape(len(weight), -1, layout.group_size or weight.shape[1])
    if layout.is_symmetric:
        scales = (grouped.abs().amax(-1) * 2 / most).to(scale_dtype)
        zeros = torch.full(scales.shape, 1 << (layout.bits - 1))
    else:
        low, high = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0)
        scales = ((high - low) / most).to(scale_dtype)
        zeros = (-low / scales.float()).round().clamp(0, most).long()
    wide = scales.float()[..., None]
    codes = ((grouped / wide).round() + zeros[..., None]).clamp(0, most).long()
    stands_for = ((codes - zeros[..., None]).float() * wide).reshape(weight.shape)
    return codes.reshape(weight.shape), scales, zeros, stands_for


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes (rows, n) to int32 words (rows, n · bits ÷ 32), the first in the low bits."""
    at_once = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % at_once))
    shifts = torch.arange(at_once) * bits
    words = (padded.reshape(len(codes), -1, at_once) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _packed(weight: torch.Tensor, layout: Layout) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros, stands_for = _rounded(weight, layout, torch.bfloat16)
    parts = {
        "weight_packed": _words(codes, layout.bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not layout.is_symmetric:
        parts["weight_zero_point"] = _words(zeros.T, layout.bits).T
    return parts, stands_for


def _integers(weight: torch.Tensor, layout: Layout) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros, stands_for = _rounded(weight, layout, torch.float32)
    middle = 1 << (layout.bits - 1)
    parts = {"weight": (codes - middle).to(torch.int8), "weight_scale": scales}
    if layout.has_input_scale:
        parts["input_scale"] = torch.tensor([STATIC_SCALE])
    if not layout.is_symmetric:
        parts["weight_zero_point"] = (zeros - middle).to(torch.int8)
    return parts, stands_for


def _floats(weight: torch.Tensor, layout: Layout) -> tuple[Tensors, torch.Tensor]:
    size = layout.block
    if size:
        num_outputs, num_inputs = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -num_inputs % size, 0, -num_outputs % size))
        blocks = padded.reshape(len(padded) // size, size, -1, size)
        scales = blocks.abs().amax((1, 3)) / 448
        spread = scales.repeat_interleave(size, 0).repeat_interleave(size, 1)[:num_outputs, :num_inputs]
    else:
        scales = spread = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / spread).to(torch.float8_e4m3fn)
    parts = {"weight": values, "weight_scale": scales}
    if "weight_block_size" in layout.config:
        parts = {"weight": values, "weight_scale_inv": scales}
    if layout.has_input_scale:
        parts["input_scale"] = torch.tensor(STATIC_SCALE)
    return parts, values.float() * spread


def _gptq(weight: torch.Tensor, layout: Layout) -> tuple[Tensors, torch.Tensor]:
    order = torch.arange(weight.shape[1])
    if layout.has_order:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    codes, scales, zeros, stands_for = _rounded(weight[:, order], layout, torch.float16)
    back = order.argsort()
    offset = 0 if layout.config.get("checkpoint_format") == "gptq_v2" else 1
    parts = {
        "qweight": _words(codes[:, back], layout.bits).T,
        "qzeros": _words((zeros.T - offset) & ((1 << layout.bits) - 1), layout.bits),
        "scales": scales.T,
        "g_idx": (back // (layout.group_size or weight.shape[1])).int(),
    }
    return parts, stands_for[:, back]


def _awq(weight: torch.Tensor, layout: Layout) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros, stands_for = _rounded(weight, layout, torch.float16)
    places = [0, 2, 4, 6, 1, 3, 5, 7]

    def interleaved(rows: torch.Tensor) -> torch.Tensor:
        return _words(rows.reshape(len(rows), -1, 8)[:, :, places].reshape(len(rows), -1), 4)

    return {"qweight": interleaved(codes.T), "qzeros": interleaved(zeros.T), "scales": scales.T}, stands_for


def _mxfp4(weight: torch.Tensor, layout: Layout) -> tuple[Tensors, torch.Tensor]:
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat((sizes, -sizes))
    grouped = weight.reshape(len(weight), -1, layout.group_size)
    exponents = grouped.abs().amax(-1).log2().floor().long() - 2 + 127
    scales = torch.exp2(exponents - 127.0)[..., None]
    codes = ((grouped / scales)[..., None] - numbers).abs().argmin(-1)
    stands_for = (numbers[codes] * scales).reshape(weight.shape)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    if layout.config["quant_method"] == "mxfp4":
        return {"weight_blocks": packed, "weight_scales": exponents.to(torch.uint8)}, stands_for
    return {"weight_packed": packed.flatten(1), "weight_scale": exponents.to(torch.uint8)}, stands_for


def _int4_plain(weight: torch.Tensor, layout: Layout) -> tuple[Tensors, torch.Tensor]:
    """Write numbers n from -8 to 7 that stand for n · scale + zero point."""
    grouped = weight.reshape(len(weight), -1, layout.group_size)
    scales = (grouped.amax(-1) - grouped.amin(-1)) / 15
    zeros = (grouped.amin(-1) + scales * 8).bfloat16()
    wide, middle = scales.bfloat16().float()[..., None], zeros.float()[..., None]
    numbers = ((grouped - middle) / wide).round().clamp(-8, 7)
    nibbles = numbers.reshape(weight.shape).to(torch.int8)
    packed = (nibbles[:, 1::2] << 4) | (nibbles[:, ::2] & 15)
    parts = {"weight": packed, "weight_scale": scales.bfloat16().T, "weight_zero_point": zeros.T}
    return parts, (numbers * wide + middle).reshape(weight.shape)


def _torchao(
    kind: str, write: Writer, *, group_size: int = 0, bits: int = 4, is_symmetric: bool = True, **data: Any
) -> Layout:
    """Return the layout of one of torchao's classes, whose attributes are `data`, block_size and dtype."""

    def flattened(weight: torch.Tensor, layout: Layout) -> tuple[Tensors, torch.Tensor]:
        parts, stands_for = write(weight, layout)
        return {
            f"_{'weight_qdata' if name == 'weight' else name}": each for name, each in parts.items()
        }, stands_for

    def describe(weight: torch.Tensor) -> dict[str, Any]:
        dtype = {"_type": "torch.dtype", "_data": "float32"}
        block = [1, group_size or weight.shape[1]]
        return {"_type": kind, "_data": {"block_size": block, "dtype": dtype, **data}}

    return Layout(
        config={"quant_method": "torchao", "modules_to_not_convert": ["lm_head"]},
        write=flattened,
        bits=bits,
        group_size=group_size,
        is_symmetric=is_symmetric,
        describe=describe,
    )


def _by_token(kind: str, **data: Any) -> dict[str, Any]:
    granularity = {"_type": "PerRow", "_data": {"dim": -1}}
    return {"_type": kind, "_data": {"granularity": granularity, **data}}


def _compressed(
    layout: str, *, activations: Mapping[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _gptq_layout(bits: int, group_size: int, **settings: Any) -> Layout:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size or -1, "sym": True, **settings}
    return Layout(
        config=config,
        write=_gptq,
        bits=bits,
        group_size=group_size,
        is_symmetric=config["sym"],
        has_order=config.get("desc_act", False),
    )


_INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel"}
_STATIC_INT8 = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
_DYNAMIC_INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_DYNAMIC_FP8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
_TARGET_INT4: dict[str, Any] = {
    "target_dtype": {"_type": "torch.dtype", "_data": "int4"},
    "activation_quantization": None,
}
_TOKENS_TO_INT8 = _by_token(
    "QuantizeTensorToInt8Kwargs",
    mapping_type={"_type": "MappingType", "_data": "SYMMETRIC"},
    reduce_range=False,
)
_TOKENS_TO_FP8 = _by_token(
    "QuantizeTensorToFloat8Kwargs", float8_dtype={"_type": "torch.dtype", "_data": "float8_e4m3fn"}
)
LAYOUTS: dict[str, Layout] = {
    "compressed-int4": Layout(config=_compressed("pack-quantized", **_INT4, symmetric=True), write=_packed),
    "compressed-int4-zeros": Layout(
        config=_compressed("pack-quantized", **_INT4, symmetric=False), write=_packed, is_symmetric=False
    ),
    "compressed-int8": Layout(
        config=_compressed("pack-quantized", **_INT8, symmetric=True), write=_packed, bits=8, group_size=0
    ),
    "compressed-int8-plain": Layout(
        config=_compressed("int-quantized", **_INT8, symmetric=True), write=_integers, bits=8, group_size=0
    ),
    "compressed-int8-plain-zeros": Layout(
        config=_compressed("naive-quantized", **_INT8, symmetric=False),
        write=_integers,
        bits=8,
        group_size=0,
        is_symmetric=False,
    ),
    "compressed-int4-plain": Layout(config=_compressed("int-quantized", **_INT4), write=_integers),
    "compressed-fp8": Layout(
        config=_compressed("float-quantized", **_FP8, strategy="channel"), write=_floats
    ),
    "compressed-fp8-blocks": Layout(
        config=_compressed("float-quantized", **_FP8, strategy="block", block_structure=[32, 32]),
        write=_floats,
        block=32,
    ),
    "compressed-mxfp4": Layout(
        config=_compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        write=_mxfp4,
    ),
    "gptq-int4": _gptq_layout(4, 32),
    "gptq-int4-zeros": _gptq_layout(4, 32, sym=False),
    "gptq-int4-order": _gptq_layout(4, 32, desc_act=True, sym=False, checkpoint_format="gptq_v2"),
    "gptq-int8": _gptq_layout(8, 0),
    "gptq-int8-order": _gptq_layout(8, 32, desc_act=True, sym=False),
    "awq": Layout(
        config={"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        write=_awq,
        is_symmetric=False,
    ),
    "mxfp4": Layout(config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, write=_mxfp4),
    "torchao-int8": _torchao("Int8Tensor", _integers, bits=8, act_quant_kwargs=None),
    "torchao-int4": _torchao("IntxUnpackedToInt8Tensor", _integers, group_size=32, **_TARGET_INT4),
    "torchao-int4-zeros": _torchao(
        "IntxUnpackedToInt8Tensor", _integers, group_size=32, is_symmetric=False, **_TARGET_INT4
    ),
    "torchao-int4-plain": _torchao("Int4Tensor", _int4_plain, group_size=32),
    "torchao-fp8": _torchao("Float8Tensor", _floats, act_quant_kwargs=None),
}
"""Weight-only layouts: a test of a backend runs over all of them."""
ROUNDED_ACTIVATIONS: dict[str, Layout] = {
    "fp8": Layout(
        config={
            **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
            **{"weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"]},
        },
        write=_floats,
        block=32,
    ),
    "fp8-rows": Layout(config={"quant_method": "fp8", "activation_scheme": "dynamic"}, write=_floats),
    "fp8-static": Layout(
        config={"quant_method": "fp8", "activation_scheme": "static"}, write=_floats, has_input_scale=True
    ),
    "compressed-int8-dynamic": Layout(
        config=_compressed("int-quantized", activations=_DYNAMIC_INT8, **_INT8),
        write=_integers,
        bits=8,
        group_size=0,
    ),
    "compressed-int8-static": Layout(
        config=_compressed("int-quantized", activations=_STATIC_INT8, **_INT8),
        write=_integers,
        bits=8,
        group_size=0,
        has_input_scale=True,
    ),
    "compressed-int4-int8": Layout(
        config=_compressed("pack-quantized", activations=_DYNAMIC_INT8, **_INT4), write=_packed
    ),
    "compressed-int4-fp8": Layout(
        config=_compressed("pack-quantized", activations=_DYNAMIC_FP8, **_INT4), write=_packed
    ),
    "torchao-int8-dynamic": _torchao("Int8Tensor", _integers, bits=8, act_quant_kwargs=_TOKENS_TO_INT8),
    "torchao-fp8-dynamic": _torchao("Float8Tensor", _floats, act_quant_kwargs=_TOKENS_TO_FP8),
}
"""Layouts with activations that are rounded before each product."""
