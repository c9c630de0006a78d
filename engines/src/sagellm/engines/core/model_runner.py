"""Turns scheduled sequences into tensors and tensors into logits."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from sagellm.core import BlockId, ForwardBackendProtocol, InputBatch, KVLayout
from sagellm.engines.core.sequence import ScheduledSequence
from sagellm.engines.core.work import WorkMeter


class ModelRunner:
    """Builds the flat input of a step and runs the forward backend on it."""

    def __init__(self, backend: ForwardBackendProtocol, *, layout: KVLayout, device: torch.device) -> None:
        self.backend = backend
        self._block_size = layout.block_size
        self._layout = layout
        self._device = device
        self.work = WorkMeter()

    def initialize_kv_caches(self, num_blocks: int) -> None:
        """Allocate the KV of `num_blocks` blocks. Raises OutOfMemoryError if there is no room."""
        self.backend.initialize_kv_caches(self._layout, num_blocks)

    def copy_blocks(self, pairs: Seq[tuple[BlockId, BlockId]]) -> None:
        """Copy KV from the first block of each pair to the second, before anything of the step is written."""
        if pairs:
            self.backend.copy_blocks(pairs)

    def prepare_inputs(self, scheduled: Seq[ScheduledSequence]) -> InputBatch:
        """Lay the tokens of all sequences one after another.

        Logits are asked for where a token is sampled, in the order of the sequences, and after these
        where prompts are scored.
        """
        query_lens = [entry.num_tokens for entry in scheduled]
        ends = np.cumsum(query_lens)
        num_tokens = int(ends[-1])
        input_ids = np.empty(num_tokens, np.int64)
        positions = np.empty(num_tokens, np.int64)
        slots = np.empty(num_tokens, np.int64)
        tables = np.zeros((len(scheduled), max(len(e.sequence.block_ids) for e in scheduled)), np.int64)
        size = self._block_size
        for row, (entry, end) in enumerate(zip(scheduled, ends.tolist(), strict=True)):
            sequence, begin = entry.sequence, end - entry.num_tokens
            tables[row, : len(sequence.block_ids)] = sequence.block_ids
            if entry.num_tokens == 1:  # decode: plain ints are cheaper than arrays of one
                position = entry.start
                positions[begin] = position
                input_ids[begin] = sequence.tokens_between(position, position + 1)[0]
                slots[begin] = sequence.block_ids[position // size] * size + position % size
                continue
            span = np.arange(entry.start, entry.stop)
            positions[begin:end] = span
            input_ids[begin:end] = sequence.tokens_between(entry.start, entry.stop)
            slots[begin:end] = tables[row, span // size] * size + span % size
        wanted = [end - 1 for entry, end in zip(scheduled, ends.tolist(), strict=True) if entry.is_sampled]
        for entry, end in zip(scheduled, ends.tolist(), strict=True):
            if entry.sequence.num_to_score:
                wanted += [end - entry.stop + position for position in entry.scored]
        return InputBatch(
            input_ids=self._tensor(input_ids),
            position_ids=self._tensor(positions),
            slot_mapping=self._tensor(slots),
            block_tables=self._tensor(tables),
            query_lens=query_lens,
            seq_lens=[entry.stop for entry in scheduled],
            logits_indices=self._tensor(np.array(wanted, np.int64)),
        )

    def execute_model(self, batch: InputBatch) -> torch.Tensor:
        """Run the forward pass; returns float32 logits (sampled sequences + scored positions, vocab)."""
        logits = self.backend.forward(batch)
        self.work.add(batch)
        return logits

    def _tensor(self, values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)
