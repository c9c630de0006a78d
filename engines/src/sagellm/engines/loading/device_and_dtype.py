"""Where a model runs and in which number format."""

from __future__ import annotations

import torch

from sagellm.core import ConfigError, HFConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str | torch.device) -> torch.device:
    """Return the device of a name: auto, cpu, cuda or cuda:N. Raises ConfigError if it does not exist."""
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


def resolve_dtype(name: str | torch.dtype, config: HFConfig) -> torch.dtype:
    """Return the number format of a name; auto is the checkpoint's own, float32 if it states none."""
    if isinstance(name, torch.dtype):
        return name
    if name == "auto":
        own = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        return DTYPES.get(own, torch.float32)
    if name not in DTYPES:
        raise ConfigError(f"model.dtype is {name!r}; it must be auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return a format's name as configurations write it."""
    return str(dtype).removeprefix("torch.")
