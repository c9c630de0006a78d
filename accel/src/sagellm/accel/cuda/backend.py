"""The forward pass on a CUDA device: Triton kernels between products of cuBLAS, in CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from sagellm.accel.cuda.buckets import (
    DECODES,
    ROWS,
    Bucket,
    check_sizes,
    decode_buckets,
    graph_bytes,
    row_buckets,
)
from sagellm.accel.cuda.library_attention import LIBRARIES, LibraryAttention, StepAttention
from sagellm.accel.cuda.paged_kv import PagedKV
from sagellm.accel.cuda.support import (
    FEATURES,
    check_fp8,
    check_machine,
    check_quantizer,
    check_support,
    on_device,
)
from sagellm.accel.operation_timer import OperationTimer
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
    QuantizerProtocol,
    Shard,
    UnsupportedModelError,
    WeightSource,
)
from sagellm.core.protocols.forward import StepLimits, TimedOperation

if TYPE_CHECKING:
    from sagellm.accel.cuda.decoder import StepTensors
    from sagellm.accel.cuda.graphs import Capture, StepGraphs
    from sagellm.accel.cuda.transfers import BlockTransfers


@dataclass(kw_only=True)
class CudaMetrics(ForwardMetrics):
    """Counts of steps, and the memory of the device in bytes; the latter are 0 on a CPU."""

    num_graphs: int = 0
    num_graph_steps: int = 0
    num_launched_steps: int = 0  # without a graph, kernel by kernel
    weight_bytes: int = 0
    kv_bytes: int = 0
    graph_bytes: int = 0  # what the graphs read and write, and took when they were captured
    allocated_bytes: int = 0
    peak_bytes: int = 0
    free_bytes: int = 0
    total_bytes: int = 0


class CudaForwardBackend(ForwardBackendProtocol):
    """Runs decoders whose layers are alike, with attention of its own.

    With the quantizer `fp8` the weights of all linears but the head are in FP8 (E4M3), and the rows that they
    multiply are rounded to it. `attention_kernels` names another library for attention. `decode_graphs` are
    the numbers of sequences to which steps of decodes alone are padded, `prefill_graphs` the numbers of
    tokens of others; there is a graph for each, captured with the KV. Larger steps, and those of more splits
    than graphs have memory for, launch every kernel. `interpreted=True` runs kernels in Triton's interpreter,
    for tests.

    Sums of attention are those of a sequence alone, but cuBLAS chooses an algorithm by the number of rows, so
    the last bits of logits depend on the batch.
    """

    features = FEATURES
    device_types = frozenset({"cuda"})

    def __init__(  # noqa: PLR0913
        self,
        spec: ModelSpec,
        weights: WeightSource,
        *,
        device: torch.device,
        dtype: torch.dtype,
        attention: AttentionBackendProtocol | None = None,
        quantizer: QuantizerProtocol | None = None,
        shard: Shard = WHOLE,
        attention_kernels: Literal["triton", "flashinfer", "flash_attention"] = "triton",
        decode_graphs: Sequence[int] = DECODES,
        prefill_graphs: Sequence[int] = ROWS,
        interpreted: bool = False,
    ) -> None:
        del attention  # it has its own
        check_machine(device, is_interpreted=interpreted)
        check_support(spec, shard)
        if quantizer is not None:
            check_quantizer(quantizer, spec, device, dtype)
        if attention_kernels not in ("triton", *LIBRARIES):
            raise UnsupportedModelError(
                f"the option attention_kernels is {attention_kernels!r}; it is triton, {', '.join(LIBRARIES)}"
            )
        self._kernels = LIBRARIES.get(attention_kernels)
        if self._kernels is not None:
            self._kernels.require()
        self._spec, self._device, self._dtype = spec, device, dtype
        self._library: LibraryAttention | None = None
        self._sizes = (
            check_sizes("decode_graphs", decode_graphs),
            check_sizes("prefill_graphs", prefill_graphs),
        )
        geometry = spec.geometry
        self._limits = StepLimits(  # of an engine that does not say
            max_model_len=geometry.max_model_len, max_num_seqs=256, max_num_batched_tokens=2048
        )
        from sagellm.accel.cuda.decoder import CudaDecoder  # it imports triton, which is here

        with torch.inference_mode(), on_device(device):
            self._model = CudaDecoder(spec, weights, dtype, device, quantizer)
        self._kv: PagedKV | None = None
        self._transfers: BlockTransfers | None = None
        self._graphs: StepGraphs | None = None
        self._timer: OperationTimer | None = None
        self._metrics = CudaMetrics(weight_bytes=self._model.metrics.weight_bytes)

    def expect_steps(self, layouts: Sequence[KVLayout], limits: StepLimits) -> int:
        """Choose the graphs, and return the memory that they take: buffers, activations and workspaces."""
        self._limits = limits
        if not self._has_graphs:
            return 0
        decodes, others = self._buckets()
        num_blocks = -(-limits.max_model_len // layouts[0].block_size)
        return graph_bytes([*decodes, *others], num_blocks, self._spec, self._dtype)

    @torch.inference_mode()
    def initialize_kv_caches(self, layouts: Sequence[KVLayout], num_blocks: Sequence[int]) -> None:
        """Allocate KV, compile kernels and capture graphs. Raises OutOfMemoryError, UnsupportedModelError."""
        if len(layouts) != 1:
            raise UnsupportedModelError(f"the backend cuda keeps one group of KV, not {len(layouts)}")
        with on_device(self._device):
            self._allocate(layouts[0], num_blocks[0])

    def _allocate(self, layout: KVLayout, num_blocks: int) -> None:
        from sagellm.accel.cuda.transfers import BlockTransfers  # it imports triton

        self._kv = self._transfers = self._graphs = None  # a second call replaces what the first allocated
        if layout.group.dtype == "float8_e4m3fn":
            check_fp8(self._device, "KV in fp8")
        if self._kernels is not None:
            self._library = self._kernels(self._spec, layout, self._dtype)
        self._kv = kv = PagedKV(layout, num_blocks, self._device)
        self._model.use(kv)
        self._transfers = BlockTransfers(kv.bytes)
        self._metrics.kv_bytes = kv.bytes.nbytes
        if self._has_graphs:
            from sagellm.accel.cuda.graphs import GraphMemory

            free_bytes = self._free_bytes()
            self._capture(
                min(-(-self._limits.max_model_len // layout.block_size), num_blocks), GraphMemory().capture
            )
            self._metrics.graph_bytes = free_bytes - self._free_bytes()

    def _capture(self, num_blocks: int, capture: Capture) -> None:
        """Capture all graphs, for sequences of up to `num_blocks` blocks."""
        from sagellm.accel.cuda.graphs import GraphBuffers, StepGraphs

        decodes, others = self._buckets()
        num_rows = max(each.num_rows for each in (*decodes, *others))
        last = torch.empty(num_rows, self._spec.geometry.hidden_size, dtype=self._dtype, device=self._device)
        buffers = GraphBuffers([*decodes, *others], num_blocks, self._spec.attention[0], last)
        self._graphs = StepGraphs(buffers, decodes, others)
        self._graphs.capture(self._model.run_layers, capture)

    def _buckets(self) -> tuple[list[Bucket], list[Bucket]]:
        attention, (decodes, rows) = self._spec.attention[0], self._sizes
        return decode_buckets(decodes, self._limits, attention), row_buckets(rows, self._limits, attention)

    @property
    def _has_graphs(self) -> bool:
        return self._device.type == "cuda" and self._kernels is None and any(self._sizes)

    def _free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy the KV of the first block of each pair to the second, one pair after the other."""
        from sagellm.accel.cuda.block_copies import copy_blocks  # it imports triton

        with on_device(self._device):
            copy_blocks(self._ready().bytes, pairs)
            self._copier().after_change([target for _, target in pairs])

    @torch.inference_mode()
    def read_blocks(
        self, block_ids: Sequence[BlockId], into: Sequence[memoryview], *, num_in_flight: int = 0
    ) -> None:
        """Copy to host memory the KV of blocks that the last `num_in_flight` steps do not write.

        Waits for earlier steps and for what copied or wrote these blocks, and for nothing else.
        """
        with on_device(self._device):
            self._copier().read(block_ids, into, num_in_flight)

    @torch.inference_mode()
    def write_blocks(self, block_ids: Sequence[BlockId], data: Sequence[memoryview]) -> None:
        """Copy the KV of blocks from host memory."""
        with on_device(self._device):
            self._copier().write(block_ids, data)

    @torch.inference_mode()
    def forward(self, batch: InputBatch) -> torch.Tensor:
        """Return float32 logits (rows, vocab) of the wanted tokens, valid until the next step."""
        self._ready()
        started_ns = time.perf_counter_ns()
        with on_device(self._device):
            last = self._replay(batch)
            if last is None:
                logits = self._launch(batch)
            else:
                logits = self._model.logits(last, batch.logits_indices, batch.hidden)
            self._copier().after_step()
        self._metrics.num_steps += 1
        self._metrics.num_tokens += len(batch.input_ids)
        self._metrics.total_ns += time.perf_counter_ns() - started_ns
        return logits

    def _replay(self, batch: InputBatch) -> torch.Tensor | None:
        """Return what a graph makes of the layers, or None if there is none for this step."""
        hidden, num_layers = batch.hidden, self._spec.geometry.num_layers
        if self._graphs is None or self._timer is not None:
            return None
        if hidden is not None and hidden.layers != (num_layers,):
            return None
        return self._graphs.run(batch)

    def _launch(self, batch: InputBatch) -> torch.Tensor:
        self._metrics.num_launched_steps += 1
        step, timer = self._step(batch), self._timer
        if timer is None:
            return self._model.forward(step, batch.logits_indices, batch.hidden)
        timer.begin()
        logits = self._model.forward(step, batch.logits_indices, batch.hidden, timer.end_of)
        timer.finish()
        return logits

    def report_operations(self, take: Callable[[Sequence[TimedOperation]], None]) -> None:
        """Have steps take the time of each operation: without graphs, and waiting for the device."""
        self._timer = OperationTimer(self._device, take)

    def report_progress(self, beat: Callable[[], None]) -> None:
        """Have steps call `beat` twice in each layer: the first ones of a kind may compile kernels."""
        self._model.beat = beat

    def metrics(self) -> CudaMetrics:
        """Return the counts so far; `total_ns` is the time to launch, not to finish."""
        graphs = self._graphs
        metrics = replace(
            self._metrics,
            num_graphs=0 if graphs is None else len(graphs),
            num_graph_steps=0 if graphs is None else graphs.num_replays,
        )
        if self._device.type != "cuda":
            return metrics
        free, total = torch.cuda.mem_get_info(self._device)
        return replace(
            metrics,
            allocated_bytes=torch.cuda.memory_allocated(self._device),
            peak_bytes=torch.cuda.max_memory_allocated(self._device),
            free_bytes=free,
            total_bytes=total,
        )

    def model_metrics(self) -> ModelMetrics:
        """Return the size of the model."""
        return self._model.metrics

    def _ready(self) -> PagedKV:
        if self._kv is None:
            raise EngineError("the backend cuda was used before initialize_kv_caches; it has no KV")
        return self._kv

    def _copier(self) -> BlockTransfers:
        self._ready()
        assert self._transfers is not None, "made with the KV"
        return self._transfers

    def _step(self, batch: InputBatch) -> StepTensors:
        from sagellm.accel.cuda.decoder import StepTensors
        from sagellm.accel.cuda.paged_attention import plan_attention

        if self._library is not None:
            attention: StepAttention = self._library.plan(batch)
        else:
            attention = plan_attention(
                batch.block_tables,
                np.array(batch.query_lens, np.int32),
                np.array(batch.seq_lens, np.int32),
                self._spec.attention[0],
            )
        return StepTensors(
            input_ids=batch.input_ids,
            positions=batch.position_ids,
            slots=batch.slot_mapping,
            attention=attention,
        )
