"""What becomes of the order of leaves when a policy fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from sagellm.core.errors import PluginError
from sagellm.core.logging import get_logger
from sagellm.core.protocols.eviction import CachedNode
from sagellm.kvmgr.prefix_cache.leaf_order import LeafLRU, LeafOrder

_log = get_logger(__name__)


class GuardedOrder:
    """Asks a policy, and `LeafLRU` in its place from the first call on that raises or names a wrong node.

    What it raised is logged and goes no further: in the middle of a change of the tree it would
    leave blocks that are cached and free at once. That holds for an assertion of the policy and for
    SystemExit too; only Ctrl-C passes, and AuditError, which accuses the cache.
    """

    def __init__(self, policy: LeafOrder, find_leaves: Callable[[], Iterable[CachedNode]]) -> None:
        self.current = policy
        self.failure = ""  # of the policy that was replaced
        self._find_leaves = find_leaves  # the unlocked ones

    def on_insert(self, node: CachedNode) -> None:
        """Pass it on."""
        try:
            self.current.on_insert(node)
        except BaseException as error:
            self._replace(error).on_insert(node)

    def on_split(self, upper: CachedNode, lower: CachedNode) -> None:
        """Pass it on."""
        try:
            self.current.on_split(upper, lower)
        except BaseException as error:
            self._replace(error).on_split(upper, lower)

    def on_resize(self, node: CachedNode, num_more: int) -> None:
        """Pass it on."""
        try:
            self.current.on_resize(node, num_more)
        except BaseException as error:
            self._replace(error)

    def on_hit(self, node: CachedNode) -> None:
        """Pass it on."""
        try:
            self.current.on_hit(node)
        except BaseException as error:
            self._replace(error).on_hit(node)

    def leave(self, node: CachedNode) -> None:
        """Report a candidate that has left the tree."""
        try:
            self.current.remove_candidate(node)
            self.current.on_remove(node)
        except BaseException as error:
            self._replace(error)

    def add_candidate(self, node: CachedNode) -> None:
        """Pass it on."""
        try:
            self.current.add_candidate(node)
        except BaseException as error:
            self._replace(error).add_candidate(node)

    def remove_candidate(self, node: CachedNode) -> None:
        """Pass it on."""
        try:
            self.current.remove_candidate(node)
        except BaseException as error:
            self._replace(error).remove_candidate(node)

    def victim(self) -> CachedNode | None:
        """Pass it on."""
        try:
            return self.current.victim()
        except BaseException as error:
            return self._replace(error).victim()

    def victims(self, num_blocks: int) -> Iterator[CachedNode]:
        """Return what the policy yields; the caller passes errors raised by the iterator to `fail`."""
        try:
            return iter(self.current.victims(num_blocks))
        except BaseException as error:
            return self._replace(error).victims(num_blocks)

    def fail(self, error: BaseException) -> None:
        """Treat an error as a failure of the policy."""
        self._replace(error)

    def refuse(self, node: CachedNode) -> None:
        """Treat a victim that is not an unlocked leaf as a failure of the policy."""
        name = getattr(node, "node_id", node)
        self._replace(PluginError(f"it named node {name} as a victim, which is no unlocked leaf"))

    def num_victim_blocks(self, node: CachedNode, num_wanted: int) -> int:
        """Pass it on."""
        try:
            num_blocks = self.current.num_victim_blocks(node, num_wanted)
            if type(num_blocks) is not int:
                raise TypeError(f"num_victim_blocks returned {num_blocks!r}; it must be an int")
            return num_blocks
        except BaseException as error:
            return self._replace(error).num_victim_blocks(node, num_wanted)

    def _replace(self, error: BaseException) -> LeafLRU:
        from sagellm.core.testing import AuditError

        if isinstance(error, KeyboardInterrupt | AuditError):
            raise error
        assert not isinstance(self.current, LeafLRU), f"the order of leaves is wrong: {error}"
        self.failure = f"{type(self.current).__qualname__}: {type(error).__name__}: {error}"
        _log.error(
            "eviction policy %s failed; the least recently used leaf goes first from now on",
            type(self.current).__qualname__,
            exc_info=error,
        )
        self.current = order = LeafLRU()
        for leaf in self._find_leaves():
            order.add_candidate(leaf)
        return order
