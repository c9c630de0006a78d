"""What changes the logits of single tokens before they are filtered: penalties, then processors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    rows: Sequence[SamplingRow],
    processors: Processors,
    labels: Sequence[str],
) -> torch.Tensor:
    """Return a copy of rows of the logits after the penalties and processors that their sequences use.

    Raises PluginError with the label of a processor that fails.
    """
    scores = select(logits, part).clone(memory_format=torch.contiguous_format)
    members = [rows[index] for index in part]
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
    return scores
