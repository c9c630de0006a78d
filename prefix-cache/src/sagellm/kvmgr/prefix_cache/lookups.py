"""How often the cache was asked, and how much of it was there."""

from __future__ import annotations

from sagellm.core.namespace import Namespace
from sagellm.kvmgr.prefix_cache.ledger import Ledger


class Lookups:
    """Counts lookups, of all and by tenant."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.num_lookups = self.num_hits = self.num_tokens = 0
        self.num_hit_tokens = self.num_partial_hit_tokens = 0

    def count(
        self, num_tokens: int, num_hit_tokens: int, num_partial_hit_tokens: int, namespace: Namespace
    ) -> None:
        """Count one lookup; the partial ones are among the hit tokens."""
        self.num_lookups += 1
        self.num_tokens += num_tokens
        self.num_hits += num_hit_tokens > 0
        self.num_hit_tokens += num_hit_tokens
        self.num_partial_hit_tokens += num_partial_hit_tokens
        account = self._ledger.account(namespace)
        account.num_lookups += 1
        account.num_hits += num_hit_tokens > 0
        account.num_lookup_tokens += num_tokens
        account.num_hit_tokens += num_hit_tokens
