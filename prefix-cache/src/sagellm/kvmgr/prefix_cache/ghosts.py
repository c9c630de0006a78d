"""What became of evicted blocks: remembered by content, within a budget, without the blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from sagellm.core.ids import NodeId
from sagellm.core.namespace import Namespace
from sagellm.core.protocols.kv_events import RemovalReason

if TYPE_CHECKING:
    from sagellm.kvmgr.prefix_cache.node import Answers, PrefixNode

_FILTER_BITS_A_GHOST = 64
_MAX_STALE = 1024


class Departure(NamedTuple):
    """Why blocks leave."""

    now_ns: int
    reason: RemovalReason
    policy: str | None = None  # class of the policy that chose them; None if none was asked
    evicted_for: Namespace | None = None  # whose blocks take the room


class Ghost(NamedTuple):
    """The last state of an evicted node, or of the end that it gave up."""

    node_id: NodeId
    access_count: int
    last_access_ns: int
    departure: Departure
    answers: Answers


class GhostRun(NamedTuple):
    """The ghosts of consecutive blocks."""

    first: Ghost | None
    num_blocks: int
    is_forgotten: bool = False  # the first block may have been evicted and its ghost dropped


_Entry: TypeAlias = "tuple[NodeId, int, int, Departure, Answers]"


NO_GHOSTS = GhostRun(None, 0)


class Ghosts:
    """Ghosts by the key of a block's content (`block_keys`); beyond the budget the oldest are dropped.

    A key stands for all tokens up to the end of its block in one namespace. It is a 64-bit hash, good
    enough for statistics and explanations: blocks are never shared by it. A Bloom filter with two bits per
    key remembers the dropped keys: it never answers "no" wrongly, and answers "perhaps" wrongly the more
    often, the more keys were dropped.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._ghosts: dict[int, _Entry] = {}
        self._departed: deque[tuple[Sequence[int], _Entry]] = deque()  # oldest first; some came back
        self._num_departed = 0  # keys in it
        self._num_bits = _FILTER_BITS_A_GHOST * max_blocks + 8
        self._unfiled: list[tuple[list[PrefixNode], Departure]] = []
        self._forgotten: bytearray | None = None  # made when the first key is dropped

    def __len__(self) -> int:
        if self._unfiled:
            self._file()
        return len(self._ghosts)

    def remember(self, keys: Sequence[int], node: PrefixNode, departure: Departure) -> None:
        """Record what became of the blocks with these keys."""
        if self._unfiled:
            self._file()
        if len(keys) > self.max_blocks:
            keys = keys[-self.max_blocks :]
        ghosts = self._ghosts
        # A tuple costs a tenth.
        ghost = (node.node_id, node.access_count, node.last_access_ns, departure, node.answers)
        for key in keys:
            ghosts[key] = ghost
        self._departed.append((keys, ghost))
        self._num_departed += len(keys)
        if len(ghosts) > self.max_blocks or self._num_departed > 2 * len(ghosts) + _MAX_STALE:
            self._keep_to_budget()

    def remember_all(self, nodes: list[PrefixNode], departure: Departure) -> None:
        """Record what became of all blocks of some nodes, which have left the cache with their keys.

        They are filed when ghosts are next looked up, so evictions need not wait.
        """
        if self.max_blocks:
            self._unfiled.append((nodes, departure))

    def _file(self) -> None:
        """File what has left since the last call."""
        ghosts, append = self._ghosts, self._departed.append
        num_blocks = 0
        for nodes, departure in self._unfiled:
            for node in nodes:
                keys = node.keys or ()
                ghost = (node.node_id, node.access_count, node.last_access_ns, departure, node.answers)
                for key in keys:
                    ghosts[key] = ghost
                append((keys, ghost))
                num_blocks += len(keys)
        self._unfiled.clear()
        self._num_departed += num_blocks
        self._keep_to_budget()

    def find_run(self, key: int, data: bytes, position: int, block_bytes: int) -> GhostRun:
        """Find the ghosts of consecutive blocks of packed tokens from a byte position on.

        `key` is that of the block before.
        """
        if self._unfiled:
            self._file()
        first: _Entry | None = None
        num_blocks = 0
        for begin in range(position, len(data) - block_bytes + 1, block_bytes):
            key = hash((key, data[begin : begin + block_bytes]))
            ghost = self._ghosts.get(key)
            if ghost is None:
                if first is None and self._forgotten is not None:
                    return GhostRun(None, 0, self._may_have_forgotten(key, self._forgotten))
                break
            first = ghost if first is None else first
            num_blocks += 1
        return NO_GHOSTS if first is None else GhostRun(Ghost(*first), num_blocks)

    def answers(self, key: int, data: bytes, position: int, block_bytes: int) -> list[tuple[int, Answers]]:
        """Return the answers that ghosts of packed tokens remember from a byte position on.

        Each comes with the last byte position at which it holds, in their order; `key` is that of the block
        before.
        """
        if self._unfiled:
            self._file()
        found: list[tuple[int, Answers]] = []
        last: _Entry | None = None
        for begin in range(position, len(data) - block_bytes + 1, block_bytes):
            key = hash((key, data[begin : begin + block_bytes]))
            ghost = self._ghosts.get(key)
            if ghost is None:
                break
            if ghost is last:
                found[-1] = (begin + block_bytes, ghost[-1])
            else:
                found.append((begin + block_bytes, ghost[-1]))
            last = ghost
        return found

    def revive(self, key: int, edge: bytes, block_bytes: int, keys: list[int]) -> tuple[Ghost | None, int]:
        """Forget the ghosts of an edge that is back in the cache; `key` is its parent's.

        Returns the deepest of these ghosts and how many bytes of the edge they cover. Keys computed for it
        are added to `keys`.
        """
        if self._unfiled:
            self._file()
        deepest: _Entry | None = None
        for begin in range(0, len(edge), block_bytes):
            key = hash((key, edge[begin : begin + block_bytes]))
            keys.append(key)
            ghost = self._ghosts.pop(key, None)
            if ghost is None:
                return Ghost(*deepest) if deepest else None, begin
            deepest = ghost
        return Ghost(*deepest) if deepest else None, len(edge)

    def _keep_to_budget(self) -> None:
        """Drop the oldest ghosts, and the records of those that came back."""
        departed = self._departed
        while departed and len(self._ghosts) > self.max_blocks:
            keys, ghost = departed.popleft()
            self._num_departed -= len(keys)
            for key in self._left(keys, ghost):
                del self._ghosts[key]
                self._forget(key)
        if self._num_departed > 2 * len(self._ghosts) + _MAX_STALE:
            left = ((self._left(keys, ghost), ghost) for keys, ghost in departed)
            self._departed = deque((keys, ghost) for keys, ghost in left if keys)
            self._num_departed = len(self._ghosts)

    def _left(self, keys: Sequence[int], ghost: _Entry) -> list[int]:
        return [key for key in keys if self._ghosts.get(key) is ghost]

    def _forget(self, key: int) -> None:
        bits = self._forgotten
        if bits is None:
            bits = self._forgotten = bytearray((self._num_bits + 7) // 8)
        for bit in self._bits_of(key):
            bits[bit >> 3] |= 1 << (bit & 7)

    def _may_have_forgotten(self, key: int, bits: bytearray) -> bool:
        return all(bits[bit >> 3] >> (bit & 7) & 1 for bit in self._bits_of(key))

    def _bits_of(self, key: int) -> tuple[int, int]:
        return key % self._num_bits, (key >> 20) * 0x9E3779B97F4A7C15 % self._num_bits
