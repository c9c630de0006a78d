"""A last check of a model that transformers runs: its result must not depend on how tokens are split.

Layers that keep a state, mix neighbouring tokens or count positions themselves look harmless from outside,
but would produce wrong text without an error.
"""

from __future__ import annotations

import torch

from sagellm.core import InputBatch, ModelGeometry, UnsupportedModelError
from sagellm.engines.attention.naive import TorchNaiveBackend
from sagellm.engines.models.causal_lm import BuildContext, CausalLM
from sagellm.engines.models.refusal import refuse_on_error

_BLOCK_SIZE = 4
_NUM_TOKENS = 7
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_HALF = 0.2  # rounding, and experts that swap ranks; a missing state gives about 1


def check_consistency(model: CausalLM, geometry: ModelGeometry, context: BuildContext) -> None:
    """Run a few tokens at once, then in pieces alongside another sequence, and compare the last logits.

    Raises UnsupportedModelError if the run fails, or if they differ by more than rounding.
    """
    runner = _SmallRunner(model, geometry, context)
    ids = [1 + 7919 * i % (geometry.vocab_size - 1) for i in range(_NUM_TOKENS)]
    with refuse_on_error("a trial run over paged KV failed"):
        expected = runner.run([(0, ids, len(ids))])[0]
        runner.clear()
        runner.run([(1, ids[::-1][:3], 3), (0, ids[:4], 4)])
        runner.run([(0, ids[4:6], 6), (1, ids[:1], 4)])
        got = runner.run([(1, ids[1:3], 6), (0, ids[6:], 7)])[1]
    difference = float((got - expected).norm() / expected.norm().clamp_min(1e-6))
    if not difference <= _TOLERANCE.get(context.dtype, _TOLERANCE_HALF):
        raise UnsupportedModelError(
            f"its result changes by {difference:.0%} when tokens are computed in several steps; it keeps "
            f"something besides KV"
        )


class _SmallRunner:
    """Runs sequences in two small rows of blocks through the reference attention."""

    def __init__(self, model: CausalLM, geometry: ModelGeometry, context: BuildContext) -> None:
        self._model, self._device = model, context.device
        self._blocks = -(-_NUM_TOKENS // _BLOCK_SIZE)
        shape = (
            2 * self._blocks,
            2,
            geometry.num_kv_heads,
            _BLOCK_SIZE,
            geometry.head_dim,
        )
        self._kv = [
            torch.zeros(shape, dtype=context.dtype, device=context.device) for _ in range(geometry.num_layers)
        ]
        self._attention = TorchNaiveBackend(
            num_heads=geometry.num_heads,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            block_size=_BLOCK_SIZE,
        )

    def clear(self) -> None:
        """Forget all KV."""
        for each in self._kv:
            each.zero_()

    def run(self, parts: list[tuple[int, list[int], int]]) -> torch.Tensor:
        """Compute the last tokens of sequences, given as (row, new token ids, length so far)."""
        positions = [list(range(end - len(ids), end)) for _, ids, end in parts]
        offsets = [row * self._blocks * _BLOCK_SIZE for row, _, _ in parts]
        lengths = [len(ids) for _, ids, _ in parts]
        batch = InputBatch(
            input_ids=self._tensor([token for _, ids, _ in parts for token in ids]),
            position_ids=self._tensor([p for each in positions for p in each]),
            slot_mapping=self._tensor(
                [o + p for o, each in zip(offsets, positions, strict=True) for p in each]
            ),
            block_tables=self._tensor(
                [list(range(row * self._blocks, (row + 1) * self._blocks)) for row, _, _ in parts]
            ),
            query_lens=lengths,
            seq_lens=[end for _, _, end in parts],
            logits_indices=self._tensor([sum(lengths[: i + 1]) - 1 for i in range(len(parts))]),
        )
        plans = [self._attention.plan(batch)] * len(self._kv)
        hidden = self._model.forward(batch, self._kv, self._attention, plans)
        return self._model.compute_logits(hidden[batch.logits_indices]).float()

    def _tensor(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)
