"""What the backend can run, and the reasons why it refuses."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import torch

from sagellm.core import WHOLE, ModelSpec, QuantizerProtocol, Shard, UnsupportedModelError
from sagellm.core.protocols.weight_form import CodeType, WeightForm

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on tensors of a CPU."""

FEATURES = frozenset(
    {
        "bias",
        "qk_norm",
        "sliding_window",
        "soft_cap",
        "rope_dynamic",
        "rope_linear",
        "rope_llama3",
        "rope_yarn",
        "kv_bfloat16",
        "kv_float16",
        "kv_float32",
        "kv_int8",
        "kv_float8_e4m3fn",
        "hidden_states",
    }
)
"""The entries of `ModelSpec.features`, formats of KV, and what else of a backend's features there is."""

_LEAST_CAPABILITY = (8, 0)
_LEAST_CAPABILITY_FOR_FP8 = (8, 9)
_LARGEST_HEAD = 256


_FP8_WEIGHTS = WeightForm(code=CodeType.FP8_E4M3)


def check_support(spec: ModelSpec, shard: Shard) -> None:
    """Raise UnsupportedModelError that says what of a model cannot be run."""
    spec.require(FEATURES)
    if shard != WHOLE:
        raise UnsupportedModelError(f"it cannot hold a part of a model, and was asked for {shard}")
    shapes = {(each.num_heads, each.num_kv_heads, each.head_dim) for each in spec.attention}
    if len(shapes) != 1:
        raise UnsupportedModelError(f"all its layers have the same heads; this model has {sorted(shapes)}")
    ((num_heads, num_kv_heads, head_dim),) = shapes
    if num_heads % num_kv_heads or head_dim % 2 or head_dim > _LARGEST_HEAD:
        raise UnsupportedModelError(
            f"it takes heads of an even size up to {_LARGEST_HEAD} in groups of equal size, not {num_heads} "
            f"heads of {head_dim} over {num_kv_heads}"
        )


def check_quantizer(
    quantizer: QuantizerProtocol, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise UnsupportedModelError unless a quantizer makes what is multiplied in FP8 here."""
    if quantizer.weight_form(spec.geometry.hidden_size) != _FP8_WEIGHTS:
        raise UnsupportedModelError(
            f"it cannot multiply what the quantizer {type(quantizer).__name__} makes as it is configured; "
            "it takes fp8 with a scale for each output or for all, or no model.quantization"
        )
    check_fp8(device, "the quantizer fp8")
    if device.type == "cuda" and dtype != torch.bfloat16:
        raise UnsupportedModelError(f"the quantizer fp8 needs a model in bfloat16, not {dtype}")


def check_machine(device: torch.device, *, is_interpreted: bool) -> None:
    """Raise UnsupportedModelError unless kernels run on a device, or in the interpreter if that is wanted."""
    if device.type != "cuda" and not is_interpreted:
        raise UnsupportedModelError(f"it computes on a CUDA device, not on {device}")
    if find_spec("triton") is None:
        raise UnsupportedModelError("it needs triton: pip install 'sagellm-accel[cuda]'")
    if is_interpreted != IS_INTERPRETED:
        raise UnsupportedModelError(
            "the option interpreted is for tests on a CPU, with TRITON_INTERPRET=1 in the environment"
        )
    if is_interpreted:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise UnsupportedModelError(
            f"its kernels need compute capability {'.'.join(map(str, _LEAST_CAPABILITY))}; "
            f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}"
        )


def check_fp8(device: torch.device, what: str) -> None:
    """Raise UnsupportedModelError unless a device has FP8 (E4M3); `what` is what needs it."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY_FOR_FP8:
        raise UnsupportedModelError(
            f"{what} needs compute capability {'.'.join(map(str, _LEAST_CAPABILITY_FOR_FP8))}; "
            f"{torch.cuda.get_device_name(device)} has less"
        )


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one, on which kernels are launched and streams are made."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
