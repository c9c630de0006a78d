"""The forward pass in torch operators, one layer after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from sagellm.accel.fusion import JOINS, check_fusions
from sagellm.accel.operation_timer import OperationTimer
from sagellm.accel.weights import WeightReader
from sagellm.core import (
    WHOLE,
    AttentionBackendProtocol,
    BlockId,
    EngineError,
    ForwardBackendProtocol,
    ForwardMetrics,
    InputBatch,
    KVLayout,
    ModelMetrics,
    ModelSpec,
    OutOfMemoryError,
    QuantizerProtocol,
    Shard,
    SparsifierProtocol,
    UnsupportedModelError,
    WeightSource,
)
from sagellm.core.protocols.forward import TimedOperation
from sagellm.core.protocols.model_spec import TRANSFORMERS_CLASS
from sagellm.engines.forward.device_memory import zeroed
from sagellm.engines.models.causal_lm import BuildContext, CausalLM
from sagellm.engines.models.decoder_loading import FEATURES, build_decoder


class TorchForwardBackend(ForwardBackendProtocol):
    """Keeps the KV of a group's blocks in one buffer and runs the model over it.

    Decoders are built from their spec; other models run as classes of transformers. `fusions` names the
    products of a decoder's layers that are computed as one: qkv, gate_up.
    """

    features = FEATURES | {TRANSFORMERS_CLASS, "attention_backends", "hidden_states", "kv_groups"}

    def __init__(  # noqa: PLR0913
        self,
        spec: ModelSpec,
        weights: WeightSource,
        *,
        device: torch.device,
        dtype: torch.dtype,
        attention: AttentionBackendProtocol,
        quantizer: QuantizerProtocol | None = None,
        sparsifier: SparsifierProtocol | None = None,
        shard: Shard = WHOLE,
        fusions: Sequence[str] = tuple(JOINS),
    ) -> None:
        check_fusions(fusions, JOINS)
        if shard != WHOLE:
            raise UnsupportedModelError(
                f"the backend torch cannot hold a part of a model, and was asked for {shard}"
            )
        context = BuildContext(
            dtype=dtype,
            device=device,
            weights=WeightReader(weights, dtype),
            quantizer=quantizer,
            sparsifier=sparsifier,
            fusions=fusions,
        )
        with torch.inference_mode():
            self._model = _build(spec, context)
        self._attention = attention
        self._device = device
        self._kv: list[torch.Tensor] = []  # of each group: (blocks, layers, 2, kv_heads, block_size, dim)
        self._layers: list[torch.Tensor] = []  # the same, for each layer
        self._group_of: list[int] = []  # of each layer
        self._bytes: torch.Tensor | None = None  # that of the first group: (blocks, bytes per block)
        self._metrics = ForwardMetrics()
        self._timer: OperationTimer | None = None

    def initialize_kv_caches(self, layouts: Sequence[KVLayout], num_blocks: Sequence[int]) -> None:
        """Allocate one zeroed buffer for all blocks of a group and view it as its layout says.

        Raises OutOfMemoryError if the device refuses it; UnsupportedModelError for layers whose KV heads are
        not alike, as there is one attention for all.
        """
        shapes = {(each.group.num_kv_heads, each.group.head_dim) for each in layouts}
        if len(shapes) != 1:
            raise UnsupportedModelError(
                f"the backend torch keeps groups of KV with one number and size of heads, not {len(shapes)}"
            )
        # A second call replaces the first buffers instead of adding to them.
        self._kv, self._layers, self._bytes = [], [], None
        for layout, number in zip(layouts, num_blocks, strict=True):
            self._kv.append(self._allocate(layout, number))
        place = {
            layer: (group, self._kv[group][:, index])
            for group, layout in enumerate(layouts)
            for index, layer in enumerate(layout.group.layer_ids)
        }
        self._group_of, self._layers = map(list, zip(*(place[layer] for layer in sorted(place)), strict=True))

    def _allocate(self, layout: KVLayout, num_blocks: int) -> torch.Tensor:
        needed = num_blocks * layout.block_bytes
        group = layout.group
        dtype = getattr(torch, group.dtype)
        try:
            flat = zeroed(needed // layout.item_bytes, dtype, self._device)
        except (RuntimeError, MemoryError, OSError) as error:
            raise OutOfMemoryError(
                f"KV of {num_blocks} blocks needs {needed} bytes, and {self._device} refused them: {error}"
            ) from error
        shape = (num_blocks, group.num_layers, 2, group.num_kv_heads, layout.block_size, group.head_dim)
        strides = (
            layout.block_stride,
            layout.layer_stride,
            layout.kv_stride,
            layout.head_stride,
            layout.token_stride,
            1,
        )
        if self._bytes is None:
            self._bytes = flat.view(torch.uint8).view(num_blocks, layout.block_bytes)
        return flat.as_strided(shape, strides)

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy the KV of the first block of each pair to the second, one pair after the other."""
        blocks = self._blocks("copy_blocks")
        for source, target in pairs:
            blocks[target].copy_(blocks[source])

    @torch.inference_mode()
    def read_blocks(
        self, block_ids: Sequence[BlockId], into: Sequence[memoryview], *, num_in_flight: int = 0
    ) -> None:
        """Copy the KV of blocks to host memory, in this thread's stream."""
        blocks = self._blocks("read_blocks")
        for block_id, target in zip(block_ids, into, strict=True):
            torch.frombuffer(target, dtype=torch.uint8).copy_(blocks[block_id])

    @torch.inference_mode()
    def write_blocks(self, block_ids: Sequence[BlockId], data: Sequence[memoryview]) -> None:
        """Copy the KV of blocks from host memory, in this thread's stream."""
        blocks = self._blocks("write_blocks")
        for block_id, source in zip(block_ids, data, strict=True):
            blocks[block_id].copy_(torch.frombuffer(source, dtype=torch.uint8))

    @torch.inference_mode()
    def forward(self, batch: InputBatch) -> torch.Tensor:
        """Return float32 logits (rows, vocab) of the wanted tokens; the head sees no others."""
        self._blocks("forward")
        started_ns = time.perf_counter_ns()
        plans = [self._attention.plan(batch.of_group(group)) for group in range(len(self._kv))]
        of_layers = [plans[group] for group in self._group_of]
        if self._timer is not None:
            self._timer.begin()
        hidden = self._model.forward(batch, self._layers, self._attention, of_layers)
        logits = self._model.compute_logits(hidden.index_select(0, batch.logits_indices)).float()
        if self._timer is not None:
            self._timer.finish()
        self._metrics.num_steps += 1
        self._metrics.num_tokens += len(batch.input_ids)
        self._metrics.total_ns += time.perf_counter_ns() - started_ns
        return logits

    def report_operations(self, take: Callable[[Sequence[TimedOperation]], None]) -> None:
        """Have steps take the time of each operation of a decoder; on a GPU they wait for it."""
        self._timer = OperationTimer(self._device, take)
        self._model.time_operations(self._timer.end_of)

    def metrics(self) -> ForwardMetrics:
        """Return the counts so far. On a GPU `total_ns` is the time to launch, not to finish."""
        return replace(self._metrics)

    def model_metrics(self) -> ModelMetrics:
        """Return the size of the model."""
        return self._model.metrics()

    def _blocks(self, what: str) -> torch.Tensor:
        if self._bytes is None:
            raise EngineError(f"{what} was called before initialize_kv_caches; there is no KV")
        return self._bytes


def _build(spec: ModelSpec, context: BuildContext) -> CausalLM:
    if spec.decoder is not None:
        return build_decoder(spec, context)
    from sagellm.engines.models.transformers_model import build_transformers

    return build_transformers(spec, context)
