"""Reuse across requests, looked up by prefix alone."""

from __future__ import annotations

from sagellm.core.checks import require_object
from sagellm.core.namespace import DEFAULT, Namespace
from sagellm.core.protocols.prefix_cache import KVBlockDescriptor, PrefixCacheProtocol
from sagellm.core.tokens import TokenIdsLike


class CrossRequestKVCache:
    """Looks up in any prefix cache which KV blocks other requests have already computed."""

    def __init__(self, prefix_cache: PrefixCacheProtocol) -> None:
        require_object("prefix_cache", prefix_cache, PrefixCacheProtocol, "prefix_cache")
        self.prefix_cache = prefix_cache

    def try_reuse(
        self, token_ids: TokenIdsLike, min_match_length: int = 1, namespace: Namespace = DEFAULT
    ) -> list[KVBlockDescriptor] | None:
        """Return the cached blocks of a prefix, or None when fewer than `min_match_length` tokens match.

        Nothing is locked: to keep the blocks, use `match_prefix` and `lock`.
        """
        return self.prefix_cache.query_by_prefix(token_ids, min_match_length, namespace)
