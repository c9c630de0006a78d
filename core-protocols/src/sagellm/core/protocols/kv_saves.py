"""Saves the prefix cache to a file, and loads it into an engine of the same model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from sagellm.core.errors import InvalidInputError
from sagellm.core.ids import BlockId, SequenceId
from sagellm.core.protocols.kv_tier import KVTierProtocol
from sagellm.core.protocols.prefix_cache import PrefixCacheProtocol, PrefixMatch
from sagellm.core.tokens import TokenIds

SavePhase: TypeAlias = Literal["reading the model", "copying", "writing", "done"]


class KVSpace(Protocol):
    """The prefix cache of an engine and the free blocks of its pool, between two steps."""

    cache: PrefixCacheProtocol

    def take_free(self, num_blocks: int, sequence_id: SequenceId) -> list[BlockId]:
        """Take this many blocks, or as many as are free. Evicts nothing."""

    def give_back(self, block_ids: Sequence[BlockId]) -> None:
        """Free what `take_free` returned; the cache keeps what it has adopted."""

    def adopt(
        self, tokens: TokenIds, match: PrefixMatch, block_ids: list[BlockId], *, evicts: bool = True
    ) -> None:
        """Cache blocks with KV from elsewhere after a locked match of whole blocks."""


class SaveStore(NamedTuple):
    """The folder of saves, their maximum total bytes, and a function that opens a file there by name."""

    folder: Path
    max_bytes: int
    open_tier: Callable[[int, str], KVTierProtocol]  # takes its bytes and its name


@dataclass(kw_only=True)
class SaveProgress:
    """Progress of a save or load; blocks left out were evicted meanwhile, are damaged or found no room."""

    name: str
    number: int = 0  # counts this engine's saves and loads
    phase: SavePhase = "reading the model"
    num_blocks: int = 0
    num_done: int = 0
    num_left_out: int = 0
    num_corrupt: int = 0
    block_bytes: int = 0
    tenants: list[str] = field(default_factory=list)


class KVSavesProtocol(ABC):
    """Runs one save or load at a time, about 1 ms of it between two steps, so that requests continue.

    Providers are called as `factory(memory, space, store=..., fingerprint=..., runtime=...)`: a KVMemory,
    a KVSpace, a SaveStore, and a function that reads what identifies the model's weights. One thread makes
    all calls. A name is never a path. Loaded blocks go to free blocks and evict nothing.
    """

    @abstractmethod
    def saves(self) -> list[dict[str, Any]]:
        """Return what can be loaded: `name` and `num_bytes`."""

    @abstractmethod
    def save(self, name: str, tenant: str | None = None) -> SaveProgress:
        """Start to save the cached blocks of one tenant or of all; call `go_on` until it is done.

        Raises InvalidInputError for an invalid name, and while another save or load runs; one without a
        `go_on` for 10 s is abandoned.
        """

    @abstractmethod
    def load(self, name: str, tenant: str | None = None) -> SaveProgress:
        """Start to load a save; call `go_on` until it is done.

        Raises InvalidInputError for an unknown name, and while another save or load runs.
        """

    @abstractmethod
    def go_on(self, number: int | None = None) -> SaveProgress:
        """Run the next part of the current save or load, which must have this number if one is given.

        Raises InvalidInputError if none is running, nothing is cached, there is no room, or a save is of
        another model, dtype, layout or tenant; EngineError if the device is full or fails.
        """

    @abstractmethod
    def delete(self, name: str) -> dict[str, Any]:
        """Delete a save and return its `name` and `num_bytes`.

        Raises InvalidInputError for a name that does not exist, or that is being saved or loaded.
        """

    @abstractmethod
    def close(self) -> None:
        """Abandon a running save or load."""


class NullKVSaves(KVSavesProtocol):
    """Has no saves and makes none."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def saves(self) -> list[dict[str, Any]]:
        """Return nothing."""
        return []

    def save(self, name: str, tenant: str | None = None) -> SaveProgress:
        """Raise InvalidInputError."""
        raise InvalidInputError(f"the prefix cache cannot be saved as {name!r}: this engine has no saves")

    def load(self, name: str, tenant: str | None = None) -> SaveProgress:
        """Raise InvalidInputError."""
        raise InvalidInputError(f"there is no save {name!r}: this engine has no saves")

    def go_on(self, number: int | None = None) -> SaveProgress:
        """Raise InvalidInputError."""
        raise InvalidInputError("no save or load is running; this engine has no saves")

    def delete(self, name: str) -> dict[str, Any]:
        """Raise InvalidInputError."""
        raise InvalidInputError(f"there is no save {name!r}: this engine has no saves")

    def close(self) -> None:
        """There is nothing to abandon."""
