"""The safetensors format, for writing: where each tensor of a file lies."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from sagellm.engines.loading.safetensors_header import ITEM_BYTES
from sagellm.engines.quantize.plan import PlannedTensor

_ALIGNMENT = 8


def file_layout(tensors: list[PlannedTensor]) -> tuple[bytes, dict[str, int]]:
    """Return the header, and where each tensor begins in the file; wider types first, so all are aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in sorted(tensors, key=lambda each: -ITEM_BYTES[each.dtype]):
        end = begin + tensor.num_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, dict(_starts(entries, len(header)))


def _starts(entries: Mapping[str, Any], header_bytes: int) -> Iterator[tuple[str, int]]:
    for name, entry in entries.items():
        if name != "__metadata__":
            yield name, header_bytes + entry["data_offsets"][0]


def write_floats(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors of float32 to a file."""
    header, offsets = file_layout(
        [PlannedTensor(name, "F32", tuple(each.shape)) for name, each in tensors.items()]
    )
    with open(path, "wb") as file:
        file.write(header)
        for name, each in tensors.items():
            file.seek(offsets[name])
            file.write(each.float().contiguous().numpy().data)
        file.flush()
        os.fsync(file.fileno())
