"""What changes logits before they are filtered: penalties, then processors, then masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sagellm.core.plugins.failure import contained, plugin_failure
from sagellm.core.protocols.logits_processor import LogitsProcessorProtocol, LogitsRow
from sagellm.engines.sampling.penalties import apply_penalties
from sagellm.engines.sampling.rows import SamplingRow

Processors = Sequence[LogitsProcessorProtocol[Any]]


def select(logits: torch.Tensor, part: list[int]) -> torch.Tensor:
    """Return rows of the logits, as a view where they are neighbours."""
    if part[-1] - part[0] == len(part) - 1:
        return logits[part[0] : part[-1] + 1]
    return logits[part]


def changed(
    logits: torch.Tensor,
    part: list[int],
    members: Sequence[SamplingRow],
    processors: Processors,
    labels: Sequence[str],
) -> torch.Tensor:
    """Return a copy of rows of the logits after the penalties, processors and masks of their `members`.

    Raises PluginError with the label of a processor that fails.
    """
    scores = select(logits, part).clone(memory_format=torch.contiguous_format)
    apply_penalties(
        scores,
        [row.params for row in members],
        [row.prompt_token_ids for row in members],
        [row.output_token_ids for row in members],
    )
    used: dict[int, list[LogitsRow[Any]]] = {}
    for place, row in enumerate(members):
        for which, state in row.states:
            used.setdefault(which, []).append(LogitsRow(place, state, row.output_token_ids))
    for which in sorted(used):
        with contained() as failure:
            processors[which].apply(scores, used[which])
        if (error := failure.error) is not None:
            raise plugin_failure(labels[which], "apply()", error) from error
    for place, row in enumerate(members):
        if row.mask is not None:
            allowed = torch.from_numpy(allowed_tokens(row.mask, scores.shape[1])).to(scores.device)
            scores[place].masked_fill_(~allowed, -torch.inf)
    return scores


def allowed_tokens(words: npt.NDArray[np.uint32], vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return whether each token may be drawn, (vocab,), from the words of a mask."""
    little = np.ascontiguousarray(words, "<u4").view(np.uint8)
    return np.unpackbits(little, count=vocab_size, bitorder="little").view(np.bool_)
