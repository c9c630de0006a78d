"""Who has how many blocks, and may have: an account for each tenant and each public namespace."""

from __future__ import annotations

from collections.abc import Mapping

from sagellm.core.namespace import Namespace
from sagellm.core.protocols.prefix_cache import TenantUsage

ANY_ACCOUNT = "*"
"""In a table of quotas, stands for every account that it does not name."""

_MAX_IDLE = 10_000


class Ledger:
    """The accounts. About 10,000 without blocks are kept, the latest ones."""

    def __init__(self, quotas: Mapping[str, int]) -> None:
        self.accounts: dict[str, TenantUsage] = {}
        self._max_accounts = _MAX_IDLE  # at this number, accounts without blocks are dropped
        self._quotas = quotas

    def quota_of(self, account: str) -> int | None:
        """Return how many full blocks an account may have; None without a quota."""
        return self._quotas.get(account, self._quotas.get(ANY_ACCOUNT))

    def account(self, namespace: Namespace) -> TenantUsage:
        """Return the account that owns the blocks of a namespace; nodes have it as their `usage`."""
        name = namespace.account
        found = self.accounts.get(name)
        if found is None:
            if len(self.accounts) >= self._max_accounts:
                self._forget_idle()
            found = self.accounts[name] = TenantUsage(max_blocks=self.quota_of(name))
        return found

    def _forget_idle(self) -> None:
        """Drop the older accounts without blocks; nothing else holds them. O(1) per account, amortised."""
        idle = [name for name, usage in self.accounts.items() if not usage.has_blocks]
        for name in idle[: -_MAX_IDLE // 2]:
            del self.accounts[name]
        self._max_accounts = len(self.accounts) + _MAX_IDLE // 2
