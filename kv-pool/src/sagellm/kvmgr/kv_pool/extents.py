"""Pieces of three sizes: tokens, pages, sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from sagellm.core.errors import ConfigError

Granularity: TypeAlias = Literal["sequence", "page", "token"]

LEVELS: tuple[Granularity, ...] = ("sequence", "page", "token")


@dataclass(frozen=True, kw_only=True)
class KVPoolConfig:
    """Sizes of a pool in tokens; each one divides the next larger.

    Raises ConfigError if they do not.
    """

    total_tokens: int
    sequence_tokens: int = 1024
    page_tokens: int = 16

    def __post_init__(self) -> None:
        sizes = (self.total_tokens, self.sequence_tokens, self.page_tokens)
        if any(type(size) is not int or size < 1 for size in sizes):
            raise ConfigError(f"sizes of a pool are whole numbers of tokens, at least 1, not {sizes}")
        for name, large, small in (
            ("total_tokens", self.total_tokens, self.sequence_tokens),
            ("sequence_tokens", self.sequence_tokens, self.page_tokens),
        ):
            if large % small:
                raise ConfigError(f"{name} is {large}; it must be a multiple of {small}")

    def size_of(self, granularity: Granularity) -> int:
        """Return how many tokens a piece of this size holds."""
        sizes = {"sequence": self.sequence_tokens, "page": self.page_tokens, "token": 1}
        return sizes[granularity]


class Extent(NamedTuple):
    """A run of tokens in the pool, handed out as one piece."""

    granularity: Granularity
    start: int
