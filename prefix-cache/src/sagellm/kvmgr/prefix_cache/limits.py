"""The parameters of a prefix cache, and the checks of its arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from sagellm.core.errors import BlockError, ConfigError, InvalidInputError
from sagellm.core.ids import BlockId
from sagellm.core.kv_block import KVIdentity

_MIN_GHOSTS, _GHOSTS_A_BLOCK = 65_536, 16  # about 150 bytes each


class Limits:
    """The parameters of RadixPrefixCache, with the defaults filled in. Raises ConfigError."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        max_blocks: int,
        block_size: int,
        max_ghost_blocks: int | None,
        max_pinned_blocks: int | None,
        tenant_quotas: Mapping[str, int] | None,
        reuses_partial_blocks: bool,
        identity: KVIdentity,
    ) -> None:
        self.max_blocks = _at_least(1, "max_blocks", max_blocks)
        self.block_size = _at_least(1, "block_size", block_size)
        if max_ghost_blocks is None:
            max_ghost_blocks = max(_MIN_GHOSTS, _GHOSTS_A_BLOCK * max_blocks)
        self.max_ghost_blocks = _at_least(0, "max_ghost_blocks", max_ghost_blocks)
        if max_pinned_blocks is None:
            max_pinned_blocks = max_blocks // 2
        self.max_pinned_blocks = _at_least(0, "max_pinned_blocks", max_pinned_blocks)
        if tenant_quotas is not None and not isinstance(tenant_quotas, Mapping):
            raise ConfigError(
                f"prefix cache: tenant_quotas is {tenant_quotas!r}; give blocks by tenant, as in {{'*': 200}}"
            )
        self.quotas = {
            tenant: _at_least(0, f"tenant_quotas[{tenant!r}]", quota)
            for tenant, quota in (tenant_quotas or {}).items()
        }
        self.reuses_partial_blocks, self.identity = reuses_partial_blocks, identity


def check_number_of_blocks(block_ids: Sequence[int], num_tokens: int, block_size: int) -> None:
    """Raise BlockError for more blocks than the tokens fill, or a block given twice."""
    if len(block_ids) > -(-num_tokens // block_size):
        raise BlockError(
            f"{len(block_ids)} blocks of {block_size} tokens for a prefix of {num_tokens} tokens"
        )
    try:
        num_distinct = len(set(block_ids))
    except TypeError as error:
        raise BlockError(f"block ids are ints: {error}") from error
    if num_distinct < len(block_ids):
        repeated = [block_id for block_id, times in Counter(block_ids).items() if times > 1]
        raise BlockError(f"blocks {repeated} are given more than once for one prefix")


def check_block_ids(block_ids: Sequence[BlockId]) -> None:
    """Raise BlockError unless all of these are block ids. 0.03 µs per block."""
    if not set(map(type, block_ids)) <= {int} or min(block_ids) < 0:
        wrong = next(each for each in block_ids if type(each) is not int or each < 0)
        raise BlockError(f"{wrong!r} is not a block id; block ids are ints of at least 0")


def no_number(num_blocks: object) -> InvalidInputError:
    """Return the error for what is not a number of blocks."""
    return InvalidInputError(f"{num_blocks!r} blocks to be dropped; give an int")


def check_ttl(ttl_s: float | None) -> None:
    """Raise InvalidInputError for an invalid lifetime of a pin."""
    if ttl_s is not None and not 0 < ttl_s < 1e9:
        raise InvalidInputError(f"ttl_s is {ttl_s!r}; give seconds above 0, or None for no end")


def _at_least(least: int, name: str, value: int) -> int:
    if type(value) is not int or value < least:
        raise ConfigError(f"prefix cache: {name} is {value!r}; it must be an int of at least {least}")
    return value
