"""What a replay knows but an engine cannot: when each cached block is used next."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from sagellm.core import BlockId, CachedNode, TraceRequest
from sagellm.engines.engine_core.sequence import Sequence
from sagellm.lab.simulation.contents import BlockContents
from sagellm.lab.simulation.prompts import kept_tokens

NEVER = float("inf")


class Future:
    """Follows a trace request by request; blocks are equal if all tokens up to their end are."""

    def __init__(self, requests: Seq[TraceRequest], block_size: int) -> None:
        contents = BlockContents(block_size)
        self._paths = [contents.path(kept_tokens(one), one.tenant) for one in requests]
        self._following = _following_uses(self._paths)
        self._next_use: dict[int, int] = {}  # by content, for requests so far
        self._content: dict[BlockId, int] = {}  # of the blocks that are in use or cached

    def take(self, index: int, sequence: Sequence) -> None:
        """Record that the request with this index was admitted."""
        path = self._paths[index]
        self._content.update(zip(sequence.block_ids, path, strict=False))
        self._next_use.update(zip(path, self._following[index], strict=True))

    def next_use(self, node: CachedNode) -> float:
        """Return the index of the request that next uses the last block of a node."""
        block_ids: list[BlockId] = node.block_ids  # type: ignore[attr-defined]  # a PrefixNode's
        return self._next_use[self._content[block_ids[-1]]] or NEVER


def _following_uses(paths: Seq[array[int]]) -> list[array[int]]:
    """Return, for each use of a content, the index of the request that uses it next; 0 for none."""
    last: dict[int, int] = {}
    following: list[array[int]] = []
    for index in range(len(paths) - 1, -1, -1):
        path = paths[index]
        following.append(array("q", [last.get(content, 0) for content in path]))
        last.update(dict.fromkeys(path, index))
    following.reverse()
    return following
