"""The forward backend `native`: a step is one call of the compiled library."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, overload

import numpy as np
import numpy.typing as npt

from sagellm.accel.fusion import FUSIONS, check_fusions
from sagellm.accel.native import structures
from sagellm.accel.native.library import best_or_named
from sagellm.accel.native.memory import AllocatedAhead, Bytes, ReusedMemory, zeroed_pages
from sagellm.accel.native.model import NativeModel
from sagellm.accel.native.weights import form_of, kind_of
from sagellm.accel.threads import num_threads
from sagellm.core import (
    WHOLE,
    AttentionBackendProtocol,
    BlockId,
    ConfigError,
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
    UnsupportedModelError,
    WeightSource,
    get_logger,
)
from sagellm.core.protocols.attention import HiddenRows, HostBatch
from sagellm.core.protocols.forward import TimedOperation

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

_KV_KINDS = {"bfloat16": 0, "float16": 1, "int8": 2, "float32": 3, "float8_e4m3fn": 4}
_HEAD_MULTIPLE, _MAX_HEAD_DIM = 16, 256


class NativeForwardBackend(ForwardBackendProtocol):
    """Runs decoders on x86-64 CPUs with AVX2, AVX-512 or AMX.

    It has its own attention. Weights are in bfloat16 or float32, or quantized to int8 or int4 by this
    package's quantizers; between products, activations are float32. Each result of a sequence has the same
    bits whatever else is in the batch. Steps use torch's number of threads, or what that would be.

    `variant` names a variant of the library (amx, avx512, avx2) instead of the fastest. `ahead_fraction` is
    the share of the KV pool, from 0 to 1, that idle time may allocate ahead of its use.
    `packed_cache` is a folder where weights are kept as they are packed, and mapped from then on. `fusions`
    names the operations that are computed as one (`accel.fusion`); no result depends on it.
    """

    device_types = frozenset({"cpu"})
    takes_arrays = True
    features = frozenset(
        {
            *(
                "bias",
                "qk_norm",
                "uneven_qk_norm",
                "sliding_window",
                "soft_cap",
                "mixed_rope",
                "partial_rope",
            ),
            "batch_invariant",
            "hidden_states",
            *("rope_dynamic", "rope_linear", "rope_llama3", "rope_yarn"),
            *(f"kv_{dtype}" for dtype in _KV_KINDS),
        }
    )

    @classmethod
    def check_model(cls, spec: ModelSpec) -> None:
        """Raise UnsupportedModelError if the heads do not fit or no variant of the library runs here."""
        _check_geometry(spec)
        best_or_named()

    def __init__(  # noqa: PLR0913
        self,
        spec: ModelSpec,
        weights: WeightSource,
        *,
        device: str | torch.device,
        dtype: str | torch.dtype,
        attention: AttentionBackendProtocol | None = None,
        quantizer: QuantizerProtocol | None = None,
        shard: Shard = WHOLE,
        packed_cache: str | None = None,
        variant: str | None = None,
        ahead_fraction: float = 1 / 16,
        fusions: Sequence[str] = FUSIONS,
    ) -> None:
        del attention  # the library has its own
        check_fusions(fusions, FUSIONS)
        if not 0 <= ahead_fraction <= 1:
            raise ConfigError(
                f"ahead_fraction of the backend native is {ahead_fraction}; it must be between 0, which "
                "allocates no KV ahead, and 1, the whole pool"
            )
        if str(device) != "cpu":
            raise UnsupportedModelError(f"it runs on CPUs, not on {device}")
        if shard != WHOLE:
            raise UnsupportedModelError(f"it cannot hold a part of a model, and was asked for {shard}")
        dtype = str(dtype).removeprefix("torch.")
        kind_of(dtype)
        if quantizer is not None:
            form_of(quantizer, spec.geometry.hidden_size)
        _check_geometry(spec)
        library = best_or_named(variant)
        self._functions = library.functions
        self._model = NativeModel(library, spec, weights, dtype, quantizer, fusions, packed_cache)
        self._vocab_size = spec.geometry.vocab_size
        self._kv: Bytes | None = None  # (blocks, bytes per block)
        self._ahead_fraction = ahead_fraction
        self._logits = ReusedMemory()
        self._metrics = ForwardMetrics()
        self._take_operations: Callable[[Sequence[TimedOperation]], None] | None = None
        self._beat = structures.Beat()
        logger.info("the native library runs as its variant %s", library.variant)

    def initialize_kv_caches(self, layouts: Sequence[KVLayout], num_blocks: Sequence[int]) -> None:
        """Reserve one zeroed mapping for all blocks. Raises OutOfMemoryError if the system refuses it."""
        if len(layouts) != 1:
            raise UnsupportedModelError(f"the backend native keeps one group of KV, not {len(layouts)}")
        layout, count = layouts[0], num_blocks[0]
        self._kv = None  # a second call replaces the first mapping instead of adding to it
        try:
            memory = zeroed_pages(count * layout.block_bytes)
        except (OSError, MemoryError) as error:
            raise OutOfMemoryError(
                f"KV of {count} blocks was refused: {error}; lower kv.num_blocks"
            ) from error
        self._kv = memory.reshape(count, layout.block_bytes)
        self._kv_ahead = AllocatedAhead(memory, int(memory.nbytes * self._ahead_fraction))
        size, group = layout.item_bytes, layout.group
        kv = structures.KV(
            kind=_KV_KINDS[group.dtype],
            base=memory.ctypes.data,
            block_size=layout.block_size,
            block=layout.block_bytes,
            layer=layout.layer_stride * size,
            kv=layout.kv_stride * size,
            head=layout.head_stride * size,
            token=layout.token_stride * size,
            scales=layout.scales_offset_bytes,
            layer_scales=2 * group.num_kv_heads * group.scale_bytes_per_head,
            kv_scales=group.num_kv_heads * group.scale_bytes_per_head,
            head_scales=group.scale_bytes_per_head,
        )
        self._functions.sage_set_kv(self._model.handle, ctypes.byref(kv))

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy the KV of the first block of each pair to the second, one pair after the other."""
        blocks = self._blocks("copy_blocks")
        for source, target in pairs:
            blocks[target] = blocks[source]

    def read_blocks(
        self, block_ids: Sequence[BlockId], into: Sequence[memoryview], *, num_in_flight: int = 0
    ) -> None:
        """Copy the KV of blocks to host memory."""
        blocks = self._blocks("read_blocks")
        for block_id, target in zip(block_ids, into, strict=True):
            np.frombuffer(target, np.uint8)[:] = blocks[block_id]

    def write_blocks(self, block_ids: Sequence[BlockId], data: Sequence[memoryview]) -> None:
        """Copy the KV of blocks from host memory."""
        blocks = self._blocks("write_blocks")
        for block_id, source in zip(block_ids, data, strict=True):
            blocks[block_id] = np.frombuffer(source, np.uint8)

    @overload
    def forward(self, batch: InputBatch) -> torch.Tensor: ...

    @overload
    def forward(self, batch: HostBatch) -> npt.NDArray[np.float32]: ...

    def forward(self, batch: InputBatch | HostBatch) -> torch.Tensor | npt.NDArray[np.float32]:
        """Return float32 logits (rows, vocab) of the wanted tokens; the head sees no others.

        They come as a tensor if the batch has tensors.
        """
        if isinstance(batch, InputBatch):
            import torch

            return torch.from_numpy(self._forward(_on_host(batch)))
        return self._forward(batch)

    def _forward(self, batch: HostBatch) -> npt.NDArray[np.float32]:
        blocks = self._blocks("forward")
        started_ns = time.perf_counter_ns()
        self._model.cover(max(batch.seq_lens))
        tables = np.ascontiguousarray(batch.block_tables)
        shape = len(batch.logits_indices), self._vocab_size
        logits = self._logits.take(4 * math.prod(shape)).view(np.float32).reshape(shape)
        lens = np.array([batch.query_lens, batch.seq_lens], np.int64)
        step = structures.Step(
            num_tokens=len(batch.input_ids),
            num_seqs=batch.num_seqs,
            num_wanted=len(batch.logits_indices),
            table_stride=tables.shape[1],
            input_ids=batch.input_ids.ctypes.data,
            positions=batch.position_ids.ctypes.data,
            slots=batch.slot_mapping.ctypes.data,
            block_tables=tables.ctypes.data,
            query_lens=lens[0].ctypes.data,
            seq_lens=lens[1].ctypes.data,
            wanted=batch.logits_indices.ctypes.data,
            logits=logits.ctypes.data,
            num_threads=num_threads(),
        )
        if (hidden := batch.hidden) is not None:
            layers = np.array(hidden.layers, np.int64)
            step.num_hidden_layers, step.num_hidden_rows = hidden.values.shape[:2]
            step.hidden_layers, step.hidden_rows = layers.ctypes.data, hidden.indices.ctypes.data
            step.hidden = hidden.values.ctypes.data
        if self._functions.sage_step(self._model.handle, ctypes.byref(step)):
            raise OutOfMemoryError(
                f"no memory for the activations of {step.num_tokens} tokens; lower "
                "scheduler.max_num_batched_tokens or kv.num_blocks"
            )
        self._kv_ahead.use((int(tables.max()) + 1) * blocks.shape[1])
        self._metrics.num_steps += 1
        self._metrics.num_tokens += len(batch.input_ids)
        self._metrics.total_ns += time.perf_counter_ns() - started_ns
        if self._take_operations is not None:
            self._take_operations(self._operations())
        return logits

    def _operations(self) -> list[TimedOperation]:
        laps = ctypes.POINTER(ctypes.c_int64)()
        count = self._functions.sage_laps(self._model.handle, ctypes.byref(laps))
        operations, ends = np.ctypeslib.as_array(laps, (count, 2)).T.tolist()
        return [
            TimedOperation(structures.OPERATIONS[operation], start_ns, end_ns)
            for operation, (start_ns, end_ns) in zip(operations[1:], pairwise(ends), strict=True)
        ]

    def report_progress(self, beat: Callable[[], None]) -> None:
        """Have steps call `beat` between layers, ten times per second."""
        self._beat = structures.Beat(beat)  # kept: the library has its address alone
        self._functions.sage_beat_with(self._model.handle, self._beat)

    def report_operations(self, take: Callable[[Sequence[TimedOperation]], None]) -> None:
        """Have steps take the time of each operation, from barrier to barrier of their threads."""
        self._take_operations = take
        self._functions.sage_time_operations(self._model.handle, 1)

    def use_idle_time(self) -> bool:
        """Allocate KV that new prompts will write."""
        return self._kv is not None and self._kv_ahead.allocate_some()

    def metrics(self) -> ForwardMetrics:
        """Return the counts so far."""
        return replace(self._metrics)

    def model_metrics(self) -> ModelMetrics:
        """Return the size of the model."""
        return self._model.metrics

    def _blocks(self, what: str) -> Bytes:
        if self._kv is None:
            raise EngineError(f"{what} was called before initialize_kv_caches; there is no KV")
        return self._kv


def _on_host(batch: InputBatch) -> HostBatch:
    """Return views of a batch's tensors, which are on the CPU."""
    hidden = batch.hidden
    return HostBatch(
        input_ids=batch.input_ids.numpy(),
        position_ids=batch.position_ids.numpy(),
        slot_mapping=batch.slot_mapping.numpy(),
        block_tables=batch.block_tables.numpy(),
        query_lens=batch.query_lens,
        seq_lens=batch.seq_lens,
        logits_indices=batch.logits_indices.numpy(),
        hidden=None
        if hidden is None
        else HiddenRows(layers=hidden.layers, indices=hidden.indices.numpy(), values=hidden.values.numpy()),
    )


def _check_geometry(spec: ModelSpec) -> None:
    first = spec.attention[0]
    if first.head_dim % _HEAD_MULTIPLE or first.head_dim > _MAX_HEAD_DIM:
        raise UnsupportedModelError(
            f"the head size is {first.head_dim}; it takes multiples of {_HEAD_MULTIPLE} up to {_MAX_HEAD_DIM}"
        )
    if first.num_heads % first.num_kv_heads:
        raise UnsupportedModelError(
            f"{first.num_heads} heads cannot share {first.num_kv_heads} KV heads evenly"
        )
    sizes = {(each.num_heads, each.num_kv_heads, each.head_dim) for each in spec.attention}
    if len(sizes) > 1:
        raise UnsupportedModelError(
            f"its layers must be alike; their (heads, KV heads, head size) are {sizes}"
        )
