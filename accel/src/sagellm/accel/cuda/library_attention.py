"""Attention by FlashInfer or FlashAttention, where they are installed, in place of our own kernels.

Neither was available when this was written: our side of their contract is tested against stand-ins, on a CPU,
and nothing is known about speed. Their steps run without CUDA graphs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch

from sagellm.accel.cuda.paged_kv import LayerKV
from sagellm.core import AttentionSpec, InputBatch, KVLayout, ModelSpec, UnsupportedModelError

_WORKSPACE_BYTES = 128 << 20
_FLASH_ATTENTION_BLOCK = 256


class StepAttention(ABC):
    """What all layers of a step share."""

    @abstractmethod
    def run(self, query: torch.Tensor, layer: LayerKV) -> torch.Tensor:
        """Return (rows, heads, D) for queries (rows, heads, D) whose KV is already stored."""


class LibraryAttention(ABC):
    """Plans the attention of steps with another library's kernels."""

    package: str
    """The name under which it is imported."""

    def __init__(self, spec: ModelSpec, layout: KVLayout, dtype: torch.dtype) -> None:
        """Import the library. Raises UnsupportedModelError if it cannot run the model with such KV."""
        self.require()
        if getattr(torch, layout.group.dtype) != dtype or dtype == torch.float32:
            raise UnsupportedModelError(
                f"{self.package} needs a model and KV both in bfloat16 or both in float16, not {dtype} and "
                f"{layout.group.dtype}"
            )
        self._module: Any = import_module(self.package)
        self._block_size = layout.block_size
        self._dtype = dtype
        self._specs = set(spec.attention)

    @classmethod
    def require(cls) -> None:
        """Raise UnsupportedModelError if the library is not installed."""
        if find_spec(cls.package) is None:
            raise UnsupportedModelError(
                f"attention_kernels names {cls.package}, which is not installed; install it or take triton"
            )

    @abstractmethod
    def plan(self, batch: InputBatch) -> StepAttention:
        """Prepare a step."""


class FlashInfer(LibraryAttention):
    """FlashInfer's prefill over paged KV, which also takes decodes."""

    package = "flashinfer"

    def __init__(self, spec: ModelSpec, layout: KVLayout, dtype: torch.dtype) -> None:
        super().__init__(spec, layout, dtype)
        self._wrappers: dict[AttentionSpec, Any] = {}

    def plan(self, batch: InputBatch) -> StepAttention:
        """Name the blocks of each sequence, once for each kind of layer."""
        size, device = self._block_size, batch.input_ids.device
        num_blocks = [-(-length // size) for length in batch.seq_lens]
        tables = batch.block_tables.to(torch.int32)
        is_used = (
            torch.arange(tables.shape[1], device=device) < torch.tensor(num_blocks, device=device)[:, None]
        )
        rows, blocks = (
            torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in (batch.query_lens, num_blocks)
        )
        last = torch.tensor([(length - 1) % size + 1 for length in batch.seq_lens], dtype=torch.int32)
        for spec in self._specs:
            self._wrapper(spec, device).plan(
                rows.to(device),
                blocks.to(device),
                tables[is_used],
                last.to(device),
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                size,
                causal=True,
                sm_scale=spec.scale,
                window_left=-1 if spec.sliding_window is None else spec.sliding_window - 1,
                logits_soft_cap=spec.soft_cap or 0.0,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )
        return _FlashInferStep(self._wrappers)

    def _wrapper(self, spec: AttentionSpec, device: torch.device) -> Any:
        if spec not in self._wrappers:
            workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
            self._wrappers[spec] = wrapper
        return self._wrappers[spec]


class _FlashInferStep(StepAttention):
    def __init__(self, wrappers: dict[AttentionSpec, Any]) -> None:
        self._wrappers = wrappers

    def run(self, query: torch.Tensor, layer: LayerKV) -> torch.Tensor:
        out: torch.Tensor = self._wrappers[layer.spec].run(query, layer.views)
        return out


class FlashAttention(LibraryAttention):
    """FlashAttention 2's kernel for sequences of any length over paged KV."""

    package = "flash_attn"

    def __init__(self, spec: ModelSpec, layout: KVLayout, dtype: torch.dtype) -> None:
        if layout.block_size % _FLASH_ATTENTION_BLOCK:
            raise UnsupportedModelError(
                f"flash_attn needs blocks of a multiple of {_FLASH_ATTENTION_BLOCK} tokens; kv.block_size is "
                f"{layout.block_size}"
            )
        super().__init__(spec, layout, dtype)

    def plan(self, batch: InputBatch) -> StepAttention:
        """Say where each sequence's rows and tokens begin."""
        device = batch.input_ids.device
        rows, tokens = (
            torch.tensor([0, *accumulate(each)], dtype=torch.int32).to(device)
            for each in (batch.query_lens, batch.seq_lens)
        )
        given = {
            "cu_seqlens_q": rows,
            "cu_seqlens_k": tokens,
            "max_seqlen_q": max(batch.query_lens),
            "max_seqlen_k": max(batch.seq_lens),
            "block_table": batch.block_tables.to(torch.int32),
            "causal": True,
        }
        return _FlashAttentionStep(self._module.flash_attn_varlen_func, given)


class _FlashAttentionStep(StepAttention):
    def __init__(self, attend: Callable[..., torch.Tensor], given: dict[str, Any]) -> None:
        self._attend, self._given = attend, given

    def run(self, query: torch.Tensor, layer: LayerKV) -> torch.Tensor:
        keys, values = (each.transpose(1, 2) for each in layer.views)  # (blocks, tokens, heads, D)
        spec = layer.spec
        window = -1 if spec.sliding_window is None else spec.sliding_window - 1
        return self._attend(
            query,
            keys,
            values,
            softmax_scale=spec.scale,
            window_size=(window, 0 if window >= 0 else -1),
            softcap=spec.soft_cap or 0.0,
            **self._given,
        )


LIBRARIES: dict[str, type[LibraryAttention]] = {"flashinfer": FlashInfer, "flash_attention": FlashAttention}
"""By the value of the backend's option `attention_kernels`."""
