"""Where a model runs and in which number format, by name; torch is imported only to ask it for GPUs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sagellm.core import ConfigError, HFConfig

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")

_GPU_FILES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")
"""One of these is there wherever torch may find a GPU: those of NVIDIA's and AMD's drivers, and of WSL."""


def device_name(name: str | torch.device) -> str:
    """Return the name of the device that a name stands for, as `resolve_device` does: cpu or cuda:N."""
    if name == "auto" and sys.platform == "linux" and not any(Path(each).exists() for each in _GPU_FILES):
        return "cpu"
    return "cpu" if name == "cpu" else str(resolve_device(name))


def device_type(device: str | torch.device) -> str:
    """Return the type of a device, given itself or its name: cpu or cuda."""
    return str(device).partition(":")[0]


def resolve_device(name: str | torch.device) -> torch.device:
    """Return the device of a name: auto, cpu, cuda or cuda:N. Raises ConfigError if it does not exist."""
    import torch

    if isinstance(name, torch.device):
        return name
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"model.device is {name!r}; it must be auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= count:
        raise ConfigError(f"model.device is {name!r}; torch finds {count} CUDA devices here; use cpu or auto")
    return torch.device("cuda", index)


def resolve_dtype_name(name: str | torch.dtype, config: HFConfig) -> str:
    """Return the number format that a name stands for; auto is the checkpoint's own, or float32."""
    name = dtype_name(name)
    if name == "auto":
        own = dtype_name(config.get("dtype") or config.get("torch_dtype") or "float32")
        return own if own in DTYPES else "float32"
    if name not in DTYPES:
        raise ConfigError(f"model.dtype is {name!r}; it must be auto, {', '.join(DTYPES)}")
    return name


def resolve_dtype(name: str | torch.dtype, config: HFConfig) -> torch.dtype:
    """Return torch's number format of a name; auto is the checkpoint's own, float32 if it states none."""
    return torch_dtype(resolve_dtype_name(name, config))


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's number format of one of `DTYPES`."""
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), "it is one of DTYPES"
    return dtype


def dtype_name(dtype: object) -> str:
    """Return the name of a format, given itself or its name, as configurations write it."""
    return str(dtype).removeprefix("torch.")
