"""Penalties for tokens that have already occurred."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.sampling.sequence_penalties import TokenArray, ids_in


def apply_penalties(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    prompt_token_ids: Sequence[Sequence[int]],
    output_token_ids: Sequence[Sequence[int]],
) -> torch.Tensor:
    """Change logits (rows, vocab) in place and return them; each argument has one entry per row.

    First the repetition penalty (Keskar et al. 2019, as in transformers): the logit of each token of
    prompt or output is divided by it where positive, else multiplied. Then, as in the OpenAI API,
    `frequency_penalty` times the count in the output and `presence_penalty` once. Ids beyond the vocabulary
    are skipped. Costs O(prompt + output) for rows with penalties, nothing for others.
    """
    _penalise_repetition(logits, params, prompt_token_ids, output_token_ids)
    _penalise_output(logits, params, output_token_ids)
    return logits


def _penalise_repetition(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    prompt_token_ids: Sequence[Sequence[int]],
    output_token_ids: Sequence[Sequence[int]],
) -> None:
    vocab_size = logits.shape[1]
    rows = [row for row, each in enumerate(params) if each.repetition_penalty != 1.0]
    seen = [
        np.concatenate((ids_in(prompt_token_ids[row], vocab_size), ids_in(output_token_ids[row], vocab_size)))
        for row in rows
    ]
    where = _cells(rows, seen, vocab_size, logits.device)
    if where is None:
        return
    penalties = np.repeat([params[row].repetition_penalty for row in rows], [len(ids) for ids in seen])
    penalty = torch.from_numpy(penalties).to(logits)
    flat = logits.view(-1)
    # A token that occurs twice is read twice before it is written, both times with the same result.
    scores = flat[where]
    flat[where] = torch.where(scores < 0, scores * penalty, scores / penalty)


def _penalise_output(
    logits: torch.Tensor, params: Sequence[SamplingParams], output_token_ids: Sequence[Sequence[int]]
) -> None:
    vocab_size = logits.shape[1]
    rows = [row for row, each in enumerate(params) if each.frequency_penalty or each.presence_penalty]
    counted = [np.unique(ids_in(output_token_ids[row], vocab_size), return_counts=True) for row in rows]
    where = _cells(rows, [ids for ids, _ in counted], vocab_size, logits.device)
    if where is None:
        return
    losses = [
        params[row].frequency_penalty * counts + params[row].presence_penalty
        for row, (_, counts) in zip(rows, counted, strict=True)
    ]
    logits.view(-1)[where] -= torch.from_numpy(np.concatenate(losses)).to(logits)


def _cells(
    rows: list[int], ids: list[TokenArray], vocab_size: int, device: torch.device
) -> torch.Tensor | None:
    """Return the flat index of each (row, id), or None where there are no ids."""
    if not any(len(each) for each in ids):
        return None
    flat = np.concatenate([row * vocab_size + each for row, each in zip(rows, ids, strict=True)])
    return torch.from_numpy(flat).to(device)
