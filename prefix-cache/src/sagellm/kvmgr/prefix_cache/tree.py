"""The radix tree: nodes, locks, and which leaves may be evicted. Knows no threads and no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import NamedTuple

from sagellm.core.errors import BlockError
from sagellm.core.ids import BlockId, NodeId
from sagellm.core.namespace import Namespace
from sagellm.core.protocols.eviction import CachedNode
from sagellm.core.protocols.prefix_cache import InsertResult, PrefixMatch
from sagellm.kvmgr.prefix_cache.events import Events
from sagellm.kvmgr.prefix_cache.ghosts import Departure, Ghosts
from sagellm.kvmgr.prefix_cache.leaf_order import LeafLRU, LeafOrder, Leaves, wrong_victim
from sagellm.kvmgr.prefix_cache.ledger import Ledger
from sagellm.kvmgr.prefix_cache.limits import Limits, check_block_ids
from sagellm.kvmgr.prefix_cache.node import (
    NO_CHILDREN,
    NO_HEADS,
    TOKEN_BYTES,
    Answers,
    Found,
    PartialBlock,
    Partials,
    PrefixNode,
    end_key,
    find_partial,
    keys_of,
    split,
    walk,
)


class RadixTree:
    """Path-compressed, block-aligned, one root for each namespace that has blocks.

    Reports its nodes and unlocked leaves to its order of leaves, and the full blocks that come and go to
    accounts, ghosts and events. `version` rises when blocks enter or leave; a split keeps matches valid.
    """

    def __init__(self, limits: Limits, policy: LeafOrder) -> None:
        self.block_size = limits.block_size
        self.block_bytes = limits.block_size * TOKEN_BYTES
        self.reuses_partial_blocks = limits.reuses_partial_blocks
        self.ledger = Ledger(limits.quotas)
        self.ghosts = Ghosts(limits.max_ghost_blocks)
        self.events = Events(self.block_bytes, limits.identity)
        has_quota = (lambda name: self.ledger.quota_of(name) is not None) if limits.quotas else None
        self.leaves = Leaves(policy, self._unlocked_leaves, has_quota)
        self.partials = Partials()
        self.roots: dict[Namespace, PrefixNode] = {}
        self.cached: set[BlockId] = set()
        self.version = 0
        self.undelivered: list[BlockId] = []  # dropped by a call that Ctrl-C ended; they count as evictable
        self.num_nodes = 0
        self.num_evictable = 0
        self._node_ids = map(NodeId, count(1))

    def find(self, data: bytes, namespace: Namespace) -> Found:
        """Find the whole blocks of packed tokens that are cached."""
        root = self.roots.get(namespace)
        if root is None:
            return Found(namespace, None, [])
        node, _, block_ids = walk(root, data, self.block_bytes)
        return Found(namespace, node, block_ids)

    def match(self, data: bytes, namespace: Namespace) -> PrefixMatch:
        """Find the cached whole blocks of packed tokens, and a block whose beginning agrees with the rest."""
        root = self.roots.get(namespace)
        if root is None:
            return PrefixMatch(0, [], namespace, None, self.version)
        node, num_bytes, block_ids = walk(root, data, self.block_bytes)
        num_tokens = num_bytes // TOKEN_BYTES
        partial = None
        if num_bytes < len(data) and self.reuses_partial_blocks:
            partial = find_partial(node, data, num_bytes, self.block_bytes)
            if partial is not None:
                num_tokens += partial.num_tokens
        end = node if num_bytes else None
        return PrefixMatch(num_tokens, block_ids, namespace, end, self.version, partial)

    def owned(self, node: CachedNode | None) -> PrefixNode | None:
        """Return a match's node if it is in this tree now."""
        if not isinstance(node, PrefixNode):
            return None
        root = node
        while root.parent is not None:
            root = root.parent
        return node if self.roots.get(root.namespace) is root else None

    def lock(self, node: PrefixNode, depth: int, now_ns: int, *, is_hit: bool) -> PrefixNode:
        """Lock the path down to `depth`, which is in `node`; split the node if it does not end there."""
        num_blocks = (depth - node.start) // self.block_size
        if num_blocks < node.num_blocks:
            node = self._split(node, num_blocks)
        elif self._is_candidate(node):
            self.leaves.remove(node)
        for step in node.path():
            if not step.lock_count:
                self.num_evictable -= step.num_blocks
            step.lock_count += 1
            step.last_access_ns = now_ns
            if is_hit:
                step.access_count += 1
                try:
                    self.leaves.policy.on_hit(step)
                except BaseException as error:  # Ctrl-C is raised again, here and below
                    self.leaves.fail(error)
        node.num_own_locks += 1
        return node

    def unlock(self, node: PrefixNode) -> None:
        """Undo one lock that ends at the node."""
        node.num_own_locks -= 1
        for step in node.path():
            step.lock_count -= 1
            if not step.lock_count:
                self.num_evictable += step.num_blocks
        if self._is_candidate(node):
            self.leaves.add(node)

    def touch(self, node: PrefixNode, now_ns: int) -> None:
        """Record a use of the path to a node without counting a hit."""
        is_candidate = self._is_candidate(node)
        if is_candidate:
            self.leaves.remove(node)
        for step in node.path():
            step.last_access_ns = now_ns
        if is_candidate:
            self.leaves.add(node)

    def extend(
        self, found: Found, tail: bytes, new: list[BlockId], *, priority: int, now_ns: int
    ) -> list[BlockId]:
        """Append blocks to those found: to the unlocked leaf there, or as a new leaf.

        Returns the partial blocks that they replace.
        """
        self._enter(new)
        node, depth = found.node, len(found.block_ids) * self.block_size
        if node is None:
            node = self._root(found.namespace)
        elif depth < node.depth:
            node = self._split(node, (depth - node.start) // self.block_size)
        released = self._release(self.partials.supersede(node, tail[: self.block_bytes]))
        if node.parent is not None and self._is_candidate(node):
            if node.priority == priority and not node.partials:
                self._lengthen(node, tail, new)
                return released
            self.leaves.remove(node)
        leaf = PrefixNode(
            node_id=next(self._node_ids),
            num_blocks=len(new),
            depth=depth + len(new) * self.block_size,
            created_ns=now_ns,
            last_access_ns=now_ns,
            priority=priority,
            namespace=found.namespace,
            edge=tail,
            block_ids=list(new),
            parent=node,
            usage=node.usage,
        )
        self._revive(leaf, node)
        node.adopt(leaf, tail[: self.block_bytes])
        self.num_nodes += 1
        self._note_entered(leaf, len(new))
        self.leaves.on_insert(leaf)
        self.leaves.add(leaf)
        return released

    def keep_partial(
        self, node: PrefixNode | None, namespace: Namespace, tokens: bytes, block_id: BlockId
    ) -> list[BlockId] | None:
        """Keep a partial block after the end of a node, or at the beginning of a namespace.

        Returns the blocks that it replaces; None if the tree has its tokens already, so it was not kept.
        """
        parent = self._root(namespace) if node is None else node
        replaced = self.partials.add(parent, tokens, block_id)
        if replaced is None:
            return None
        self._enter([block_id])
        return self._release(replaced)

    def release_partial(self, block_id: BlockId) -> None:
        """Release a partial block; its namespace stays, as something is about to enter it."""
        partial = self.partials.get(block_id)
        assert partial is not None, f"block {block_id} is not a partial one"
        self._release(self.partials.remove([partial]))

    def record_answer(self, data: bytes, namespace: Namespace, num_tokens: int, now_ns: int) -> None:
        """Note the length of an answer on the nodes of a prompt, packed, as far as they are in the tree."""
        root = self.roots.get(namespace)
        if root is None:
            return
        node, num_bytes, _ = walk(root, data, self.block_bytes)
        if num_bytes < node.depth * TOKEN_BYTES and num_bytes + self.block_bytes <= len(data):
            assert node.parent is not None, "a root has no edge"
            node = node.parent  # the prompt goes on otherwise than the edge
        for step in node.path():
            step.answers = step.answers.and_one_of(num_tokens, now_ns)

    def answers(self, data: bytes, namespace: Namespace) -> list[tuple[int, Answers]]:
        """Return the answers to prompts that begin like packed tokens, each behind as many tokens as agree.

        The shortest prefix comes first. Evicted blocks that follow the cached ones count too.
        """
        node, num_bytes = None, 0
        found: list[tuple[int, Answers]] = []
        if (root := self.roots.get(namespace)) is not None:
            node, num_bytes, _ = walk(root, data, self.block_bytes)
            end = num_bytes // TOKEN_BYTES
            found = [(min(step.depth, end), step.answers) for step in reversed(node.path())]
        if self.ghosts.max_blocks and len(data) - num_bytes >= self.block_bytes:
            key = hash(namespace) if node is None or not num_bytes else self.key_at(node, num_bytes)
            ghosts = self.ghosts.answers(key, data, num_bytes, self.block_bytes)
            found += [(at // TOKEN_BYTES, answers) for at, answers in ghosts]
        return found

    def evict(self, num_blocks: int, departure: Departure, own: str | None = None) -> list[BlockId]:
        """Drop blocks, partial ones first and then those of unlocked leaves in order.

        With `own`, an account, only its leaves are evicted. What an interrupted call dropped comes first.
        """
        dropped, self.undelivered = self.undelivered, []
        try:
            self._drop(num_blocks, departure, own, dropped)
        except BaseException:
            self._keep_undelivered(dropped)
            raise
        self._leave(dropped)
        return dropped

    def clear(self, departure: Departure) -> list[BlockId]:
        """Drop every unlocked node and all partial blocks."""
        dropped, self.undelivered = self.undelivered, []
        dropped += self._drop_partials(len(self.partials))
        try:
            for node in reversed(self.nodes()):
                if not node.lock_count:
                    dropped += self._cut(node, node.num_blocks, departure)
        except BaseException:
            self._keep_undelivered(dropped)
            raise
        self._leave(dropped)
        if dropped and not self.cached:
            self.events.emptied()
        return dropped

    def move(self, moved: Mapping[BlockId, BlockId]) -> None:
        """Replace the blocks that are keys by their values; all keys are in the tree. O(tree)."""
        self.version += 1
        self.partials.move(moved)
        for node in self.nodes():
            if not moved.keys().isdisjoint(node.block_ids):
                node.block_ids = [moved.get(block_id, block_id) for block_id in node.block_ids]
        self.cached.difference_update(moved)
        self.cached.update(moved.values())

    def deliver_later(self, block_ids: list[BlockId]) -> None:
        """Have the next eviction return blocks that left the tree, since the caller does not get them now."""
        self.undelivered = self.undelivered + block_ids
        self.num_evictable += len(block_ids)

    def move_undelivered(self, moves: Iterable[tuple[BlockId, BlockId]]) -> None:
        """Replace the first block of each pair by the second where an interrupted call has dropped it."""
        if self.undelivered:
            moved = dict(moves)
            self.undelivered = [moved.get(block_id, block_id) for block_id in self.undelivered]

    def nodes(self) -> list[PrefixNode]:
        """Return all nodes but the roots, parents before their children."""
        nodes = [*self.roots.values()]
        for node in nodes:  # grows while it is walked
            nodes.extend(node.children.values())
        return nodes[len(self.roots) :]

    def check_integrity(self) -> None:
        """Raise AssertionError if nodes, counters and order contradict each other. O(tree)."""
        found = check_tree(self.roots, self.block_bytes, self.partials)
        assert found.block_ids == self.cached, "the set of cached blocks differs from the tree"
        assert found.num_nodes == self.num_nodes, f"{found.num_nodes} nodes, {self.num_nodes} counted"
        counted = f"{found.num_evictable} blocks are evictable, {self.num_evictable} counted"
        assert found.num_evictable + len(self.undelivered) == self.num_evictable, counted
        accounts = {
            name: (each.num_blocks, each.num_partial_blocks)
            for name, each in self.ledger.accounts.items()
            if each.has_blocks
        }
        assert found.num_blocks_of == accounts, f"{found.num_blocks_of} blocks by tenant, {accounts} counted"
        for namespace, root in self.roots.items():
            usage = self.ledger.accounts.get(namespace.account)
            assert root.usage is usage, f"the root of {namespace} has another account's usage"
        self.leaves.check_integrity(self._unlocked_leaves())
        policy = self.leaves.policy
        if isinstance(policy, LeafLRU):
            assert policy.candidates() == found.leaves, "the order of leaves differs from the tree"

    def key_at(self, node: PrefixNode, num_bytes: int) -> int:
        """Return the key of the block that ends behind so many bytes, inside or at the end of a node."""
        return keys_of(node, self.block_bytes)[(num_bytes - node.start * TOKEN_BYTES) // self.block_bytes - 1]

    def _unlocked_leaves(self) -> list[PrefixNode]:
        return [node for node in self.nodes() if self._is_candidate(node)]

    def _is_candidate(self, node: PrefixNode) -> bool:
        return not node.children and not node.lock_count

    def _root(self, namespace: Namespace) -> PrefixNode:
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = PrefixNode(
                node_id=NodeId(0),
                num_blocks=0,
                depth=0,
                created_ns=0,
                last_access_ns=0,
                namespace=namespace,
                edge=b"",
                block_ids=[],
                usage=self.ledger.account(namespace),
                keys=[hash(namespace)],
            )
        return root

    def _split(self, node: PrefixNode, num_blocks: int) -> PrefixNode:
        upper = split(node, num_blocks, next(self._node_ids), self.block_bytes)
        self.num_nodes += 1
        self.leaves.on_split(upper, node)
        return upper

    def _lengthen(self, node: PrefixNode, tail: bytes, new: list[BlockId]) -> None:
        if self.ghosts:
            self.ghosts.revive(end_key(node, self.block_bytes), tail, self.block_bytes, [])
        node.edge += tail
        node.block_ids += new
        node.num_blocks += len(new)
        node.depth += len(new) * self.block_size
        self._note_entered(node, len(new))
        self.leaves.on_resize(node, len(new))

    def _revive(self, leaf: PrefixNode, parent: PrefixNode) -> None:
        """Restore to a new leaf its state from before it was evicted."""
        if not self.ghosts.max_blocks:
            return
        keys: list[int] = []
        key = end_key(parent, self.block_bytes)
        ghost, num_bytes = self.ghosts.revive(key, leaf.edge, self.block_bytes, keys)
        leaf.keys = keys  # of its first blocks; the rest are computed on demand
        if ghost is not None:
            leaf.former_id, leaf.former_access_ns = ghost.node_id, ghost.last_access_ns
            leaf.former_depth = parent.depth + num_bytes // TOKEN_BYTES
            leaf.access_count = ghost.access_count + 1
            leaf.answers = ghost.answers

    def _note_entered(self, node: PrefixNode, num_blocks: int) -> None:
        """Record that the last blocks of a node are new."""
        node.usage.num_blocks += num_blocks
        if self.events.sinks:
            self.events.entered(node, num_blocks)

    def _cut(self, node: PrefixNode, num_blocks: int, departure: Departure) -> list[BlockId]:
        """Remove the end of a leaf, or all of it; the caller subtracts its blocks."""
        if self.events.sinks or self.events.keep is not None:
            self.events.leaving(node, num_blocks, departure)  # first: Ctrl-C may end it
        usage = node.usage
        usage.num_blocks -= num_blocks
        usage.num_evicted_blocks += num_blocks
        if self.ghosts.max_blocks:
            self.ghosts.remember(keys_of(node, self.block_bytes)[-num_blocks:], node, departure)
        dropped = node.block_ids[-num_blocks:]
        if node.partials:
            dropped += self.partials.remove(node.partials)
        if num_blocks == node.num_blocks:
            parent = node.parent
            assert parent is not None, "a root is never a victim"
            del parent.children[node.edge[: self.block_bytes]]
            node.parent = None
            self.num_nodes -= 1
            self.leaves.leave(node)
            if not parent.children:
                self._bare(parent)
            return dropped
        del node.block_ids[-num_blocks:]
        node.edge = node.edge[: -num_blocks * self.block_bytes]
        node.num_blocks -= num_blocks
        for by_block in (node.keys, node.hashes):
            if by_block is not None:
                del by_block[node.num_blocks :]
        node.depth -= num_blocks * self.block_size
        try:
            self.leaves.policy.on_resize(node, -num_blocks)
        except BaseException as error:
            self.leaves.fail(error)
        return dropped

    def _drop(self, num_blocks: int, departure: Departure, own: str | None, dropped: list[BlockId]) -> None:
        """Remove blocks in order and add them to `dropped`, until it has `num_blocks`."""
        if own is None and self.partials:
            dropped += self._drop_partials(max(0, num_blocks - len(dropped)))
        leaves = self.leaves
        if own is None and len(dropped) < num_blocks:
            self._drop_whole(num_blocks - len(dropped), departure, dropped)
        while (wanted := num_blocks - len(dropped)) > 0:
            order = leaves.policy if own is None else leaves.of_account(own)
            try:
                if (node := order.victim()) is None:
                    break
                if type(node) is not PrefixNode or not node.parent or node.children or node.lock_count:
                    raise wrong_victim(node)
                given = node.num_blocks
                if given > 1:  # a single block leaves no choice
                    if type(given := order.num_victim_blocks(node, wanted)) is not int:
                        raise TypeError(f"num_victim_blocks returned {given!r}; it must be an int")
                    given = min(max(1, given), wanted, node.num_blocks)
            except BaseException as error:
                if own is not None:  # that order is ours
                    raise
                leaves.fail(error)
                continue
            dropped += self._cut(node, given, departure)

    def _announce(self, node: PrefixNode, departure: Departure) -> None:
        """Announce that a leaf leaves which the policy has forgotten; if Ctrl-C ends that, it stays."""
        leaves = self.leaves
        try:
            self.events.leaving(node, node.num_blocks, departure)
        except BaseException:
            leaves.remove_own(node)
            leaves.on_insert(node)
            leaves.add(node)
            raise
        leaves.remove_own(node)

    def _drop_whole(self, num_blocks: int, departure: Departure, dropped: list[BlockId]) -> None:
        """Remove the whole leaves that the policy yields, often hundreds; add their blocks to `dropped`."""
        leaves, events, block_bytes = self.leaves, self.events, self.block_bytes
        remembers = self.ghosts.max_blocks > 0
        is_watched = leaves.has_quotas or events.sinks or events.keep is not None
        gone: list[PrefixNode] = []
        policy = leaves.policy
        victims = chain.from_iterable(map(policy.victims, (num_blocks,)))  # called by the first `next`
        try:
            while leaves.policy is policy:
                try:
                    if (node := next(victims, None)) is None:
                        break
                    if (
                        type(node) is not PrefixNode
                        or (parent := node.parent) is None
                        or node.children
                        or node.lock_count
                        or (given := node.num_blocks) > num_blocks
                    ):
                        raise wrong_victim(node)
                except BaseException as error:
                    leaves.fail(error)
                    break
                num_blocks -= given
                if is_watched:
                    self._announce(node, departure)
                if remembers and (given > 1 or node.keys is None):  # keys, if any, include the first
                    keys_of(node, block_bytes)
                usage = node.usage
                usage.num_blocks -= given
                usage.num_evicted_blocks += given
                gone.append(node)
                dropped += node.block_ids
                if node.partials:
                    dropped += self.partials.remove(node.partials)
                del parent.children[node.edge[:block_bytes]]
                node.parent = None
                if not parent.children:
                    self._bare(parent)
        finally:
            self.num_nodes -= len(gone)
            if gone:
                self.ghosts.remember_all(gone, departure)

    def _bare(self, node: PrefixNode) -> None:
        """Handle a node that has no children left."""
        if node.parent is None:
            self._drop_root(node)
        elif not node.lock_count:
            self.leaves.add(node)

    def _drop_partials(self, num_blocks: int) -> list[BlockId]:
        """Remove the partial blocks unused for the longest time; the caller subtracts them."""
        oldest = list(islice(self.partials.values(), num_blocks))
        dropped = self.partials.remove(oldest)
        for partial in oldest:
            if partial.node.parent is None:
                self._drop_root(partial.node)
        return dropped

    def _drop_root(self, node: PrefixNode) -> None:
        """Remove a namespace with its last block."""
        if node.parent is None and not node.children and not node.partials:
            self.roots.pop(node.namespace, None)

    def _enter(self, block_ids: list[BlockId]) -> None:
        self.version += 1
        self.cached.update(block_ids)
        self.num_evictable += len(block_ids)

    def _release(self, block_ids: list[BlockId]) -> list[BlockId]:
        if block_ids:
            self._leave(block_ids)
        return block_ids

    def _keep_undelivered(self, block_ids: list[BlockId]) -> None:
        """Keep blocks that left the tree for the next caller, who frees them."""
        self.version += 1
        self.cached.difference_update(block_ids)
        self.undelivered = block_ids

    def _leave(self, block_ids: list[BlockId]) -> None:
        self.version += 1
        self.cached.difference_update(block_ids)
        self.num_evictable -= len(block_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Packed tokens and the blocks that hold them from the beginning, no block twice."""

    data: bytes
    block_ids: list[BlockId]
    namespace: Namespace
    priority: int


def insert(tree: RadixTree, offer: Offer, max_blocks: int, now_ns: int) -> InsertResult:
    """Cache what is new in an offer, as long as the tree has at most `max_blocks`.

    Raises BlockError, and changes nothing, if an id is invalid, or a block is in the tree for other
    tokens.
    """
    offered, size = offer.block_ids, tree.block_bytes
    num_full = min(len(offered), len(offer.data) // size)
    found = tree.find(offer.data[: num_full * size], offer.namespace)
    held = found.block_ids
    grown = _grown(tree, offer, found)
    changed = [block_id for block_id, cached in zip(offered, held, strict=False) if block_id != cached]
    if others := changed + offered[len(held) :]:  # blocks equal to cached ones are left out
        check_block_ids(others)
    _check_other_blocks(tree, changed + offered[len(held) + grown :])
    if held and found.node is not None:
        tree.touch(found.node, now_ns)
    new = offered[len(held) : num_full][: _room(tree, offer.namespace, max_blocks + grown)]
    released: list[BlockId] = []
    if new:
        if grown:  # it enters again as a full block
            tree.release_partial(new[0])
        tail = offer.data[len(held) * size : (len(held) + len(new)) * size]
        released = tree.extend(found, tail, new, priority=offer.priority, now_ns=now_ns)
    kept: BlockId | None = None
    if num_full < len(offered) and len(held) + len(new) == num_full and tree.reuses_partial_blocks:
        kept = _insert_partial(tree, offer, num_full * size, max_blocks, released)
    num_new = len(new) - (grown if new else 0)
    return InsertResult(held + new, num_new, changed, kept, tuple(released))


def _grown(tree: RadixTree, offer: Offer, found: Found) -> int:
    """Return 1 if the first block after those found is in the tree as a partial block, which is now full."""
    num_held = len(found.block_ids)
    if num_held >= len(offer.block_ids):
        return 0
    partial = tree.partials.get(offer.block_ids[num_held])
    begin = num_held * tree.block_bytes
    if partial is None or partial.node.depth * TOKEN_BYTES != begin:
        return 0
    return int(partial.node is found.node and offer.data.startswith(partial.tokens, begin))


def _check_other_blocks(tree: RadixTree, block_ids: list[BlockId]) -> None:
    if not tree.cached.isdisjoint(block_ids):
        raise BlockError(f"blocks {sorted(tree.cached.intersection(block_ids))} are cached for other tokens")


def _room(tree: RadixTree, namespace: Namespace, max_blocks: int) -> int:
    """Return how many more full blocks a namespace may have."""
    room = max_blocks - len(tree.cached)
    account = tree.ledger.account(namespace)
    return room if account.max_blocks is None else max(0, min(room, account.max_blocks - account.num_blocks))


def _insert_partial(
    tree: RadixTree, offer: Offer, begin: int, max_blocks: int, released: list[BlockId]
) -> BlockId | None:
    """Keep the last block offered, which is not full; None if it is not kept, or was cached already."""
    block_id = offer.block_ids[-1]
    is_held = block_id in tree.cached
    if not is_held and len(tree.cached) >= max_blocks:
        return None
    node = tree.find(offer.data[:begin], offer.namespace).node
    if node is not None and node.depth * TOKEN_BYTES != begin:
        return None  # inside an edge; what follows there begins alike, or a node would be split for it
    if is_held:
        tree.release_partial(block_id)
    replaced = tree.keep_partial(node, offer.namespace, offer.data[begin:], block_id)
    if replaced is None:
        if is_held:
            released.append(block_id)
        return None
    released += replaced
    return None if is_held else block_id


class TreeCount(NamedTuple):
    """What a walk over all nodes found."""

    num_nodes: int
    num_evictable: int
    block_ids: set[BlockId]
    leaves: dict[NodeId, int]  # the unlocked ones, by the time of their last use
    num_blocks_of: dict[str, tuple[int, int]]  # full and partial ones, by account


def check_tree(roots: Mapping[Namespace, PrefixNode], block_bytes: int, partials: Partials) -> TreeCount:
    """Check every node against its parent and count. Raises AssertionError."""
    found = TreeCount(0, 0, set(), {}, {})
    assert not NO_CHILDREN, "what all leaves share was written to"
    assert not NO_HEADS, "what all leaves share was written to"
    full: Counter[str] = Counter()
    num_nodes = 0
    num_evictable = num_blocks = len(partials)
    node_ids: set[NodeId] = set()
    stack: list[PrefixNode] = []
    for namespace, root in roots.items():
        assert root.namespace == namespace, f"the root of {root.namespace} is filed under {namespace}"
        assert root.parent is None, f"the root of {namespace} has a parent"
        assert root.children or root.partials, f"namespace {namespace} has no blocks, yet a root"
        stack.append(root)
    while stack:
        parent = stack.pop()
        for key, node in parent.children.items():
            _check_node(node, parent, key, block_bytes)
            num_nodes += 1
            num_blocks += node.num_blocks
            node_ids.add(node.node_id)
            found.block_ids.update(node.block_ids)
            full[node.namespace.account] += node.num_blocks
            if not node.lock_count:
                num_evictable += node.num_blocks
                if not node.children:
                    found.leaves[node.node_id] = node.last_access_ns
            stack.append(node)
    for partial in partials.values():
        _check_partial(partial, roots, block_bytes)
        found.block_ids.add(partial.block_id)
    assert len(found.block_ids) == num_blocks, "a block is in the tree twice"
    assert len(node_ids) == num_nodes, "two nodes have one id"
    partial_ones = Counter(partial.node.namespace.account for partial in partials.values())
    by_account = {name: (full[name], partial_ones[name]) for name in full | partial_ones}
    return found._replace(num_nodes=num_nodes, num_evictable=num_evictable, num_blocks_of=by_account)


def _check_node(node: PrefixNode, parent: PrefixNode, key: bytes, block_bytes: int) -> None:
    name = f"node {node.node_id}"
    assert node.parent is parent, f"{name}: wrong parent"
    assert key == node.edge[:block_bytes], f"{name}: filed under another block"
    assert node.num_blocks == len(node.block_ids) > 0, f"{name}: {node.num_blocks} blocks"
    assert len(node.edge) == node.num_blocks * block_bytes, f"{name}: edge and blocks differ in length"
    assert node.depth == parent.depth + len(node.edge) // TOKEN_BYTES, f"{name}: wrong depth"
    assert node.namespace == parent.namespace, f"{name}: in the tree of another namespace"
    below = sum(child.lock_count for child in node.children.values())
    assert node.lock_count == node.num_own_locks + below, f"{name}: {node.lock_count} locks"
    assert node.num_own_locks >= 0, f"{name}: unlocked too often"
    is_top = parent.parent is None
    assert is_top or parent.last_access_ns >= node.last_access_ns, f"{name}: used later than its parent"


def _check_partial(partial: PartialBlock, roots: Mapping[Namespace, PrefixNode], block_bytes: int) -> None:
    name = f"partial block {partial.block_id}"
    assert 0 < len(partial.tokens) < block_bytes, f"{name}: {len(partial.tokens)} bytes of tokens"
    assert partial in partial.node.partials, f"{name}: unknown to its node"
    root = partial.node
    while root.parent is not None:
        root = root.parent
    assert roots.get(root.namespace) is root, f"{name}: its node has left the tree"
