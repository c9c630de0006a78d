"""How well KV blocks are reused and packed.

A block holds `block_size` tokens of KV for all layers of one model. Every ratio is 0 … 1 and is 0
where its denominator is 0, unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sagellm.core.errors import InvalidInputError


def _ratio(part: float, whole: float, what: str) -> float:
    """Divide two counts. Raises InvalidInputError when the part is negative or exceeds the whole."""
    if part < 0 or part > whole:
        raise InvalidInputError(f"{what}: {part} of {whole} is not a share; it must be between 0 and {whole}")
    return part / whole if whole else 0.0


@dataclass(frozen=True, kw_only=True)
class PromptBlocks:
    """What one request's prompt used: full blocks actually reused, and blocks newly allocated."""

    num_reused: int
    num_new: int


def token_hit_rate(num_reused_tokens: int, num_prompt_tokens: int) -> float:
    """Token hit rate = prompt tokens whose KV was reused ÷ prompt tokens of all admitted requests.

    A request that runs again after preemption is not a new request.
    """
    return _ratio(num_reused_tokens, num_prompt_tokens, "token hit rate")


def token_saving(num_tokens_not_computed: int, num_prompt_tokens: int) -> float:
    """Token saving = prefill tokens not computed ÷ prompt tokens.

    Equals the token hit rate when nothing is recomputed.
    """
    return _ratio(num_tokens_not_computed, num_prompt_tokens, "token saving")


def block_sharing_fraction(prompts: Iterable[PromptBlocks]) -> float:
    """Block sharing fraction = Σ reused blocks ÷ Σ (reused + newly allocated) blocks of the prompts.

    Only full blocks that were really reused count.
    """
    pairs = [(prompt.num_reused, prompt.num_new) for prompt in prompts]
    num_reused = sum(reused for reused, _ in pairs)
    return _ratio(num_reused, num_reused + sum(new for _, new in pairs), "block sharing fraction")


def mean_block_sharing_fraction(prompts: Iterable[PromptBlocks]) -> float:
    """Block sharing fraction per request = mean of reused ÷ (reused + newly allocated) over requests."""
    fractions = [block_sharing_fraction([prompt]) for prompt in prompts]
    return sum(fractions) / len(fractions) if fractions else 0.0


def sharing_fraction_source(num_allocated_blocks: int, num_newly_cached_blocks: int) -> float:
    """Sharing fraction of the source = (allocated − newly cached) ÷ allocated blocks.

    Counts every request's partial last block as reused, because it is never cached; printed
    beside `block_sharing_fraction`, never instead of it. Allocated blocks include reused ones.
    """
    num_shared = num_allocated_blocks - num_newly_cached_blocks
    return _ratio(num_shared, num_allocated_blocks, "sharing fraction of the source")


def internal_fragmentation(num_stored_tokens: int, num_allocated_blocks: int, block_size: int) -> float:
    """Internal fragmentation = 1 − tokens stored ÷ (allocated blocks × block_size); 0 for no blocks."""
    capacity = num_allocated_blocks * block_size
    return 1 - _ratio(num_stored_tokens, capacity, "stored tokens") if capacity else 0.0


def external_fragmentation(largest_free_run: int, num_free_blocks: int) -> float:
    """External fragmentation = 1 − largest run of free blocks ÷ free blocks; 0 when nothing is free."""
    return 1 - _ratio(largest_free_run, num_free_blocks, "largest free run") if num_free_blocks else 0.0


def utilisation(num_used_blocks: Iterable[int], num_total_blocks: int) -> float:
    """Utilisation = blocks that hold live or reusable KV ÷ total blocks, mean over steps.

    Takes the used blocks of each step under memory pressure.
    """
    shares = [_ratio(used, num_total_blocks, "used blocks") for used in num_used_blocks]
    return sum(shares) / len(shares) if shares else 0.0


def gap_closed(policy_saving: float, lru_saving: float, belady_saving: float) -> float:
    """Gap closed = (policy − LRU) ÷ (Belady − LRU) in token saving, same trace and capacity.

    1 is the optimum, 0 is LRU, less is worse than LRU. Raises InvalidInputError where Belady
    saves no more than LRU: there is then no gap to close.
    """
    if not belady_saving > lru_saving:
        raise InvalidInputError(
            f"Belady saves {belady_saving} and LRU {lru_saving}; there is no gap to close"
        )
    return (policy_saving - lru_saving) / (belady_saving - lru_saving)


def re_prefill_rate(num_recomputed_tokens: int, num_computed_tokens: int) -> float:
    """Re-prefill rate = prompt and output tokens computed a second time ÷ all tokens computed.

    A second time: after preemption, or after their cached blocks were evicted and the same
    prefix came again.
    """
    return _ratio(num_recomputed_tokens, num_computed_tokens, "re-prefill rate")


def memory_use_gain(num_paged_sequences: int, num_reserved_sequences: int) -> float:
    """Memory use gain = most sequences at once, paged ÷ reserved for the maximum length.

    Both in the same KV memory. Raises InvalidInputError if not even one could be reserved.
    """
    if num_reserved_sequences < 1:
        raise InvalidInputError(
            f"{num_reserved_sequences} sequences were reserved; a gain needs at least one"
        )
    return num_paged_sequences / num_reserved_sequences
