"""A last check of a model that transformers runs: its result must not depend on how tokens are split.

Layers that keep a state, mix neighbouring tokens or count positions themselves look harmless from outside,
but would produce wrong text without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sagellm.core import InputBatch, ModelGeometry, UnsupportedModelError
from sagellm.engines.attention.naive import TorchNaiveBackend
from sagellm.engines.models.causal_lm import BuildContext, CausalLM
from sagellm.engines.models.refusal import refuse_on_error

_BLOCK_SIZE = 4
_NUM_TOKENS = 7
_BLOCKS = 2  # of a sequence
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_HALF = 0.2  # rounding, and experts that swap ranks; a missing state gives about 1


def check_consistency(model: CausalLM, geometry: ModelGeometry, context: BuildContext) -> None:
    """Run a few tokens at once, then in pieces alongside another sequence, and compare the last logits.

    Raises UnsupportedModelError if the run fails, or if they differ by more than rounding.
    """
    heads = {name: getattr(geometry, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
    attention = TorchNaiveBackend(**heads, block_size=_BLOCK_SIZE)
    shape = (geometry.num_layers, 2 * _BLOCKS, 2, geometry.num_kv_heads, _BLOCK_SIZE, geometry.head_dim)
    kv = torch.zeros(shape, dtype=context.dtype, device=context.device)

    def run(*parts: _Part) -> torch.Tensor:
        batch = _batch(parts, context.device)
        plans = [attention.plan(batch)] * len(kv)
        hidden = model.forward(batch, list(kv), attention, plans)
        return model.compute_logits(hidden[batch.logits_indices]).float()

    ids = [1 + 7919 * i % (geometry.vocab_size - 1) for i in range(_NUM_TOKENS)]
    with refuse_on_error("a trial run over paged KV failed"):
        expected = run(_Part(0, ids, len(ids)))[0]
        kv.zero_()
        run(_Part(1, ids[::-1][:3], 3), _Part(0, ids[:4], 4))
        run(_Part(0, ids[4:6], 6), _Part(1, ids[:1], 4))
        got = run(_Part(1, ids[1:3], 6), _Part(0, ids[6:], 7))[1]
    difference = float((got - expected).norm() / expected.norm().clamp_min(1e-6))
    if not difference <= _TOLERANCE.get(context.dtype, _TOLERANCE_HALF):
        raise UnsupportedModelError(
            f"its result changes by {difference:.0%} when tokens are computed in several steps; it keeps "
            f"something besides KV"
        )


class _Part(NamedTuple):
    """The next tokens of one of two sequences, and its length with them."""

    row: int
    ids: list[int]
    length: int


def _batch(parts: Sequence[_Part], device: torch.device) -> InputBatch:
    positions = [torch.arange(part.length - len(part.ids), part.length) for part in parts]
    lengths = [len(part.ids) for part in parts]
    slots = [each + part.row * _BLOCKS * _BLOCK_SIZE for part, each in zip(parts, positions, strict=True)]
    tables = torch.arange(2 * _BLOCKS).view(2, _BLOCKS)
    return InputBatch(
        input_ids=torch.tensor([token for part in parts for token in part.ids], device=device),
        position_ids=torch.cat(positions).to(device),
        slot_mapping=torch.cat(slots).to(device),
        block_tables=tables[[part.row for part in parts]].to(device),
        query_lens=lengths,
        seq_lens=[part.length for part in parts],
        logits_indices=torch.tensor(lengths, device=device).cumsum(0) - 1,
    )
