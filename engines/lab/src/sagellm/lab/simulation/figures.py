"""The figures of a replay, named and defined as in the core's metrics."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from sagellm.engines.metrics.cache import (
    PromptBlocks,
    block_sharing_fraction,
    internal_fragmentation,
    mean_block_sharing_fraction,
    re_prefill_rate,
    sharing_fraction_source,
    token_hit_rate,
    token_saving,
    utilisation,
)
from sagellm.lab.simulation.replay import ReplayedRequest


@dataclass(frozen=True, kw_only=True)
class CacheFigures:
    """One replay of a trace. Shares are 0 … 1, computed by the functions of the same names."""

    num_requests: int
    num_refused: int
    num_prompt_tokens: int
    num_saved_tokens: int
    num_blocks: int  # of all prompts: reused and new
    num_reused_blocks: int
    num_new_blocks: int
    token_hit_rate: float
    token_saving: float
    block_sharing_fraction: float
    mean_block_sharing_fraction: float
    sharing_fraction_source: float
    mean_sharing_fraction_source: float
    re_prefill_rate: float
    internal_fragmentation: float
    utilisation: float


def figures_of(
    replayed: Seq[ReplayedRequest], unlimited: Seq[ReplayedRequest], *, capacity: int, block_size: int
) -> CacheFigures:
    """Compute the figures.

    Tokens that only an unlimited cache would have saved count as recomputed; the utilisation covers the
    requests from the first one that found the pool full.
    """
    num_prompt_tokens = sum(one.num_prompt_tokens for one in replayed)
    num_saved = sum(one.num_saved_tokens for one in replayed)
    num_blocks = sum(one.num_blocks for one in replayed)
    pairs = zip(replayed, unlimited, strict=True)
    num_recomputed = sum(max(0, ideal.num_saved_tokens - one.num_saved_tokens) for one, ideal in pairs)
    served = [one for one in replayed if one.num_blocks]
    prompts = [PromptBlocks(num_reused=one.num_reused_blocks, num_new=one.num_new_blocks) for one in served]
    return CacheFigures(
        num_requests=len(replayed),
        num_refused=sum(one.is_refused for one in replayed),
        num_prompt_tokens=num_prompt_tokens,
        num_saved_tokens=num_saved,
        num_blocks=num_blocks,
        num_reused_blocks=sum(one.num_reused_blocks for one in replayed),
        num_new_blocks=sum(one.num_new_blocks for one in replayed),
        token_hit_rate=token_hit_rate(num_saved, num_prompt_tokens),
        token_saving=token_saving(num_saved, num_prompt_tokens),
        block_sharing_fraction=block_sharing_fraction(prompts),
        mean_block_sharing_fraction=mean_block_sharing_fraction(prompts),
        sharing_fraction_source=sharing_fraction_source(
            num_blocks, sum(one.num_cached_blocks for one in replayed)
        ),
        mean_sharing_fraction_source=sum(
            sharing_fraction_source(one.num_blocks, one.num_cached_blocks) for one in served
        )
        / max(1, len(served)),
        re_prefill_rate=re_prefill_rate(num_recomputed, num_prompt_tokens - num_saved),
        internal_fragmentation=internal_fragmentation(
            sum(one.num_prompt_tokens for one in served), num_blocks, block_size
        ),
        utilisation=utilisation(_held_under_pressure(replayed, capacity), capacity),
    )


def sharing_fractions(replayed: Seq[ReplayedRequest]) -> list[float]:
    """Return the block sharing fraction of each request, for its distribution."""
    return [one.num_reused_blocks / one.num_blocks for one in replayed if one.num_blocks]


def _held_under_pressure(replayed: Seq[ReplayedRequest], capacity: int) -> list[int]:
    """Return the blocks held after each request, starting with the first one that had to evict."""
    held = [one.num_held_blocks for one in replayed]
    for index, one in enumerate(replayed):
        before = held[index - 1] if index else 0
        if before + one.num_new_blocks > capacity:
            return held[index:]
    return []
