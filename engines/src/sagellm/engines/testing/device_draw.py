"""A kernel that draws on a device, for tests without one."""

from __future__ import annotations

import torch

from sagellm.accel.native import NativeDraw
from sagellm.engines.sampling.draws import IN_PROMPT, DeviceChanges
from sagellm.engines.sampling.inverse_cdf import padded
from sagellm.engines.sampling.token_logprobs import token_logprobs


class DeviceDrawOnCPU:
    """A `DeviceDraw` on a CPU: tokens by the native kernel, the rest by torch, changes row by row.

    Raises UnsupportedModelError if the native library does not run here.
    """

    def __init__(self) -> None:
        self._native = NativeDraw()
        self.num_draws = 0

    def __call__(self, logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
        """Return tokens (rows,)."""
        self.num_draws += 1
        return self._native(logits, settings)

    def logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, num_top: int
    ) -> torch.Tensor:
        """Return log-probabilities (scored, 2 + 2 * num_top)."""
        given = logits[rows[0]]
        scratch = given.new_empty(len(given) * padded(given.shape[1]))
        return token_logprobs(given, tokens[rows[1]].clamp(min=0), num_top, scratch)

    def count(
        self, counts: torch.Tensor, begins: torch.Tensor, sources: torch.Tensor, last: torch.Tensor
    ) -> None:
        """Count tokens in place."""
        tokens = torch.where(sources < 0, last[(-1 - sources).clamp(min=0)], sources)
        counts.view(-1).index_add_(0, begins + tokens, torch.ones_like(tokens, dtype=torch.int32))

    def change(self, logits: torch.Tensor, changes: DeviceChanges) -> None:
        """Change rows of logits (rows, vocab) in place."""
        for row, counts_row, mask_row, begin, num_drafts, *penalties in changes.plan.tolist():
            values = logits[int(row)]
            if counts_row >= 0:
                count = changes.counts[int(counts_row)].clone()
                for token in changes.drafts[int(begin) : int(begin + num_drafts)].tolist():
                    count[token] += 1
                values[:] = _penalised(values, count, *penalties)
            if mask_row >= 0:
                bits = changes.masks[int(mask_row), :, None] >> torch.arange(32, dtype=torch.int32) & 1
                values[bits.flatten()[: len(values)] == 0] = -torch.inf
        flat = logits.view(-1)
        for place, addend in zip(changes.edited.tolist(), changes.addends, strict=True):
            flat[place] = -torch.inf if addend == -torch.inf else flat[place] + addend


def _penalised(
    values: torch.Tensor, count: torch.Tensor, repetition: float, frequency: float, presence: float
) -> torch.Tensor:
    factor = torch.tensor(repetition, dtype=torch.float32)
    scaled = torch.where(values < 0, values * factor, values / factor)
    in_output = (count & (IN_PROMPT - 1)).double()
    losses = frequency * in_output + presence * (in_output > 0)
    return torch.where(count > 0, scaled, values) - losses.float()
