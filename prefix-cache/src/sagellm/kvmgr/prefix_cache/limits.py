"""The parameters of a prefix cache, and the checks of its arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from sagellm.core.errors import BlockError, ConfigError, InvalidInputError
from sagellm.core.ids import BlockId
from sagellm.core.kv_block import UNNAMED, KVIdentity

_MIN_GHOSTS, _GHOSTS_A_BLOCK = 65_536, 16  # about 150 bytes each


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The resolved parameters of RadixPrefixCache. Raises ConfigError."""

    max_blocks: int
    block_size: int
    max_ghost_blocks: int
    max_pinned_blocks: int
    quotas: Mapping[str, int]
    reuses_partial_blocks: bool
    identity: KVIdentity = UNNAMED

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_blocks", self.max_blocks, 1),
            ("block_size", self.block_size, 1),
            ("max_ghost_blocks", self.max_ghost_blocks, 0),
            ("max_pinned_blocks", self.max_pinned_blocks, 0),
            *((f"tenant_quotas[{tenant!r}]", quota, 0) for tenant, quota in self.quotas.items()),
        ):
            _check_int(name, value, least)

    @classmethod
    def of(  # noqa: PLR0913
        cls,
        *,
        max_blocks: int,
        block_size: int,
        max_ghost_blocks: int | None,
        max_pinned_blocks: int | None,
        tenant_quotas: Mapping[str, int] | None,
        reuses_partial_blocks: bool,
        identity: KVIdentity,
    ) -> Self:
        """Fill in the defaults."""
        _check_int("max_blocks", max_blocks, 1)
        if max_ghost_blocks is None:
            max_ghost_blocks = max(_MIN_GHOSTS, _GHOSTS_A_BLOCK * max_blocks)
        if max_pinned_blocks is None:
            max_pinned_blocks = max_blocks // 2
        if tenant_quotas is not None and not isinstance(tenant_quotas, Mapping):
            raise ConfigError(
                f"prefix cache: tenant_quotas is {tenant_quotas!r}; give blocks by tenant, as in {{'*': 200}}"
            )
        return cls(
            max_blocks=max_blocks,
            block_size=block_size,
            max_ghost_blocks=max_ghost_blocks,
            max_pinned_blocks=max_pinned_blocks,
            quotas=dict(tenant_quotas or {}),
            reuses_partial_blocks=reuses_partial_blocks,
            identity=identity,
        )


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


def _check_int(name: str, value: int, least: int) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(f"prefix cache: {name} is {value!r}; it must be an int of at least {least}")
