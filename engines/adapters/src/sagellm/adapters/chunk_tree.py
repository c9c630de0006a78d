"""Another engine's chunks of KV as a prefix tree, whose leaves one of our eviction policies ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import index
from typing import Generic, NamedTuple, ParamSpec, TypeVar

from sagellm.core import CachedNode, EvictionPolicyProtocol, NodeId, get_logger
from sagellm.core.errors import AuditError, PluginError
from sagellm.core.plugins.failure import contained, described
from sagellm.core.protocols.eviction import NullEvictionPolicy
from sagellm.core.runtime import Clock, SystemClock

K = TypeVar("K", bound=Hashable)
P = ParamSpec("P")
T = TypeVar("T")

_logger = get_logger(__name__)

_Ghost = tuple[NodeId, int, int]  # the node that had a chunk, its count of hits, and its last use


@dataclass(slots=True, eq=False, kw_only=True)
class _Node(CachedNode, Generic[K]):
    """A run of chunks that follow one another; more than one may follow the last."""

    keys: list[K]
    ends: list[int]  # tokens from the start of the prompt to the end of each chunk
    parent: _Node[K] | None
    children: dict[NodeId, _Node[K]] = field(default_factory=dict)
    num_pinned: int = 0  # chunks that are being written or read
    is_candidate: bool = False

    @property
    def parent_id(self) -> NodeId | None:
        """The node that this one continues."""
        return None if self.parent is None else self.parent.node_id


@dataclass(slots=True)
class _Chunk(Generic[K]):
    node: _Node[K]
    is_pinned: bool = True  # until it has been written


class _Victim(NamedTuple, Generic[K]):
    node: _Node[K]
    num_chunks: int  # from its end


class ChunkTree(Generic[K]):
    """Tells a policy about chunks that are known by keys, and evicts the ends of the leaves that it names.

    A chunk can be evicted while it is not pinned; a new one is pinned. Where only chunks are left that others
    continue, the least recently used of these go. What was evicted is remembered for as many chunks as the
    engine has room for, so that the policy learns what comes back.

    A policy that raises, or names what it must not, is asked no more: the error is logged and kept in
    `policy_failure`, and from then on the least recently used chunks go.
    """

    def __init__(
        self, policy: EvictionPolicyProtocol, max_chunks: int, *, clock: Clock | None = None
    ) -> None:
        self._policy = policy
        self.policy_failure = ""
        self._max_ghosts = max_chunks
        self._now_ns = (clock or SystemClock()).now_ns
        self._chunks: dict[K, _Chunk[K]] = {}
        self._ghosts: OrderedDict[K, _Ghost] = OrderedDict()
        self._num_nodes = 0
        self._num_pinned = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, key: K) -> bool:
        return key in self._chunks

    def insert(self, keys: Sequence[K], ends: Sequence[int], before: K | None) -> None:
        """Add chunks that follow one another, pinned; they continue the chunk `before`, if it is here.

        `ends` are the tokens from the prompt's start to the end of each.
        """
        above = self._chunks.get(before) if before is not None else None
        parent = None if above is None else above.node
        if parent is not None and parent.keys[-1] != before:
            parent = self._split(parent, parent.keys.index(before) + 1)  # type: ignore[arg-type]
        self._num_nodes += 1
        now_ns = self._now_ns()
        node = _Node(
            node_id=NodeId(self._num_nodes),
            num_blocks=len(keys),
            depth=ends[-1],
            created_ns=now_ns,
            last_access_ns=now_ns,
            keys=list(keys),
            ends=list(ends),
            parent=parent,
            num_pinned=len(keys),
        )
        self._revive(node)
        self._chunks.update((key, _Chunk(node)) for key in keys)
        self._num_pinned += len(keys)
        if parent is not None:
            parent.children[node.node_id] = node
            self._settle(parent)
        self._tell(self._policy.on_insert, node)

    def lengthen(self, keys: Sequence[K], ends: Sequence[int], before: K) -> None:
        """Add chunks to the end of a leaf, or as `insert` does if others follow `before` already."""
        above = self._chunks.get(before)
        if above is None or above.node.keys[-1] != before or above.node.children:
            self.insert(keys, ends, before)
            return
        node = above.node
        node.keys += keys
        node.ends += ends
        node.num_blocks, node.depth = len(node.keys), ends[-1]
        node.num_pinned += len(keys)
        self._num_pinned += len(keys)
        for key in keys:
            self._ghosts.pop(key, None)
            self._chunks[key] = _Chunk(node)
        self._settle(node)
        self._tell(self._policy.on_resize, node, len(keys))

    def hit(self, keys: Sequence[K]) -> None:
        """Note a use of a prompt's first chunks, as far as they are here; the last of them ends a run."""
        here = list(takewhile(self._chunks.__contains__, keys))
        if not here:
            return
        node, now_ns = self._chunks[here[-1]].node, self._now_ns()
        if node.keys[-1] != here[-1]:
            self._split(node, node.keys.index(here[-1]) + 1)
        path = {id(node): node for node in (self._chunks[key].node for key in here)}
        for node in reversed(path.values()):
            node.access_count += 1
            node.last_access_ns = now_ns
            self._tell(self._policy.on_hit, node)

    def touch(self, keys: Iterable[K]) -> None:
        """Note that chunks were in use until now, without a hit."""
        now_ns = self._now_ns()
        nodes = {id(chunk.node): chunk.node for key in keys if (chunk := self._chunks.get(key)) is not None}
        for node in reversed(nodes.values()):
            if node.is_candidate:
                self._tell(self._policy.remove_candidate, node)
            node.last_access_ns = now_ns
            if node.is_candidate:
                self._tell(self._policy.add_candidate, node)

    def pin(self, key: K) -> None:
        """Keep a chunk: it is being read."""
        chunk = self._chunks[key]
        if not chunk.is_pinned:
            chunk.is_pinned = True
            chunk.node.num_pinned += 1
            self._num_pinned += 1
            self._settle(chunk.node)

    def unpin(self, key: K) -> None:
        """Let a chunk be evicted."""
        chunk = self._chunks[key]
        if chunk.is_pinned:
            chunk.is_pinned = False
            chunk.node.num_pinned -= 1
            self._num_pinned -= 1
            self._settle(chunk.node)

    def remove(self, key: K) -> None:
        """Forget a chunk that could not be written. What continues it stays."""
        self.unpin(key)
        self._drop(key, keep_ghosts=False)

    def evict(self, num_chunks: int, protected: Collection[K]) -> list[K] | None:
        """Remove exactly so many chunks that are neither pinned nor protected; None if there are fewer."""
        num_kept = sum(1 for key in protected if key in self._chunks and not self._chunks[key].is_pinned)
        if len(self._chunks) - self._num_pinned - num_kept < num_chunks:
            return None
        evicted: list[K] = []
        set_aside: list[_Node[K]] = []
        while len(evicted) < num_chunks:
            victim = self._tell(self._victim, num_chunks - len(evicted))
            if victim is None:
                break
            node, num = victim.node, victim.num_chunks
            free = next((i for i, key in enumerate(reversed(node.keys[-num:])) if key in protected), num)
            if free:
                evicted += self._cut(node, free, keep_ghosts=True)
            if free < num:
                node.is_candidate = False
                self._tell(self._policy.remove_candidate, node)
                set_aside.append(node)
        for node in set_aside:
            self._settle(node)
        if len(evicted) < num_chunks:
            evicted += self._evict_any(num_chunks - len(evicted), protected)
        return evicted

    def check_integrity(self) -> None:
        """Raise AuditError unless nodes, chunks and pins agree."""
        nodes = {chunk.node.node_id: chunk.node for chunk in self._chunks.values()}
        children: dict[NodeId, set[NodeId]] = {node_id: set() for node_id in nodes}
        for node in nodes.values():
            if node.parent is not None:
                children[node.parent.node_id].add(node.node_id)
        for node_id, node in nodes.items():
            num_pinned = sum(self._chunks[key].is_pinned for key in node.keys)
            is_candidate = not num_pinned and not children[node_id]
            found = (node.num_blocks, node.num_pinned, set(node.children), node.is_candidate, node.depth)
            told = (len(node.keys), num_pinned, children[node_id], is_candidate, node.ends[-1])
            if found != told or any(self._chunks[key].node is not node for key in node.keys):
                raise AuditError(f"node {node_id} has {found}, and should have {told}")
        num_pinned = sum(chunk.is_pinned for chunk in self._chunks.values())
        if self._num_pinned != num_pinned:
            raise AuditError(f"num_pinned is {self._num_pinned}; {num_pinned} chunks are pinned")

    def _victim(self, num_wanted: int) -> _Victim[K] | None:
        """Return what the policy gives up first, of at most so many chunks; None if it names nothing."""
        node = self._policy.victim()
        if node is None:
            return None
        if not isinstance(node, _Node) or not node.is_candidate:
            name = getattr(node, "node_id", node)
            raise PluginError(f"it chose node {name}, which is not a leaf, in use, or set aside")
        num_chunks = index(self._policy.num_victim_blocks(node, num_wanted))
        return _Victim(node, min(max(num_chunks, 1), num_wanted, len(node.keys)))

    def _tell(self, call: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T | None:
        """Call the policy; None if it fails, which is the end of it."""
        with contained(AuditError) as failed:
            return call(*arguments, **keywords)
        assert failed.error is not None, "the call has not returned"
        name = type(self._policy).__qualname__
        self.policy_failure = f"{name}: {described(failed.error)}"
        self._policy = NullEvictionPolicy()
        _logger.error(
            "eviction policy %s failed; the least recently used chunk goes first from now on",
            name,
            exc_info=failed.error,
        )
        return None

    def _settle(self, node: _Node[K]) -> None:
        """Tell the policy if the node became a candidate or ceased to be one."""
        is_candidate = not node.num_pinned and not node.children
        if is_candidate != node.is_candidate:
            node.is_candidate = is_candidate
            self._tell(self._policy.add_candidate if is_candidate else self._policy.remove_candidate, node)

    def _split(self, lower: _Node[K], num: int) -> _Node[K]:
        """Give the first chunks of a node to a new one before it, and return that."""
        self._num_nodes += 1
        upper = _Node(
            node_id=NodeId(self._num_nodes),
            num_blocks=num,
            depth=lower.ends[num - 1],
            created_ns=lower.created_ns,
            last_access_ns=lower.last_access_ns,
            access_count=lower.access_count,
            former_id=lower.former_id,
            former_access_ns=lower.former_access_ns,
            former_depth=lower.former_depth,
            keys=lower.keys[:num],
            ends=lower.ends[:num],
            parent=lower.parent,
            children={lower.node_id: lower},
        )
        if lower.parent is not None:
            del lower.parent.children[lower.node_id]
            lower.parent.children[upper.node_id] = upper
        for key in upper.keys:
            self._chunks[key].node = upper
            upper.num_pinned += self._chunks[key].is_pinned
        lower.keys, lower.ends, lower.parent = lower.keys[num:], lower.ends[num:], upper
        lower.num_blocks -= num
        lower.num_pinned -= upper.num_pinned
        self._tell(self._policy.on_split, upper, lower)
        self._settle(lower)
        return upper

    def _cut(self, node: _Node[K], num: int, *, keep_ghosts: bool = False) -> list[K]:
        """Remove the last chunks of a node, or all of it; return their keys, the last first."""
        gone = node.keys[-num:]
        for key in gone:
            is_pinned = self._chunks.pop(key).is_pinned
            node.num_pinned -= is_pinned
            self._num_pinned -= is_pinned
            if keep_ghosts:
                self._ghosts[key] = (node.node_id, node.access_count, node.last_access_ns)
                self._ghosts.move_to_end(key)
        while len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)
        if num < len(node.keys):
            del node.keys[-num:], node.ends[-num:]
            node.num_blocks, node.depth = len(node.keys), node.ends[-1]
            self._tell(self._policy.on_resize, node, -num)
            self._settle(node)  # the pinned ones may be gone
        else:
            if node.is_candidate:
                node.is_candidate = False
                self._tell(self._policy.remove_candidate, node)
            self._tell(self._policy.on_remove, node)
            if node.parent is not None:
                del node.parent.children[node.node_id]
                self._settle(node.parent)
        return gone[::-1]

    def _evict_any(self, num_chunks: int, protected: Collection[K]) -> list[K]:
        """Remove chunks that pinned or protected ones continue, the least recently used first."""
        nodes = {id(chunk.node): chunk.node for chunk in self._chunks.values()}
        evicted: list[K] = []
        for node in sorted(nodes.values(), key=lambda node: (node.last_access_ns, -node.depth)):
            for key in reversed(node.keys.copy()):
                if len(evicted) == num_chunks:
                    return evicted
                chunk = self._chunks[key]
                if not chunk.is_pinned and key not in protected:
                    evicted.append(key)
                    self._drop(key, keep_ghosts=True)
        return evicted

    def _drop(self, key: K, *, keep_ghosts: bool) -> None:
        """Remove a chunk from wherever it stands; what continued it has no node before it any more."""
        node = self._chunks[key].node
        num_before = node.keys.index(key)
        if num_before + 1 < len(node.keys):
            node = self._split(node, num_before + 1)
        for child in node.children.values():
            child.parent = None
        node.children.clear()
        self._cut(node, 1, keep_ghosts=keep_ghosts)

    def _revive(self, node: _Node[K]) -> None:
        """Give a new node what is remembered of the one that had its first chunks."""
        former: _Ghost | None = None
        for key, end in zip(node.keys, node.ends, strict=True):
            ghost = self._ghosts.pop(key, None)
            if ghost is None:
                break
            former = former or ghost
            node.former_depth = end
        if former is not None:
            node.former_id, node.access_count, node.former_access_ns = former[0], former[1] + 1, former[2]
