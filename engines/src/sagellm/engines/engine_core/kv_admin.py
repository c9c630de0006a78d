"""What an operator asks of the prefix cache and the KV pool of a running engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sagellm.core import Clock, InvalidInputError, Namespace, TokenIdsLike, pack
from sagellm.engines.engine_core.compaction import Compactor
from sagellm.engines.engine_core.kv_cache_manager import KVCacheManager


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Names a prefix: the prompt of a request, or tokens in a namespace; `num_tokens` truncates it."""

    request: str | None = None
    token_ids: TokenIdsLike | None = None
    namespace: Namespace | None = None
    num_tokens: int | None = None


class CacheAdmin:
    """Operations by prefix or request, run between two steps. Blocks that they drop are freed."""

    def __init__(self, kv: KVCacheManager, clock: Clock) -> None:
        self._kv = kv
        self._clock = clock

    def why(self, request: str | None = None) -> dict[str, Any]:
        """Say why a request, by default the latest, did not reuse more than it did.

        Besides the cache's own causes there are two for prompts that are never looked up: `scored`, whose
        logits are wanted at every position, and `one_token`.
        """
        logged = self._kv.log.find(request)
        found = asdict(logged.explain())
        evicted_ns = found.pop("evicted_ns")
        if not found["num_tokens"] and found["cause"] != "disabled":
            found["cause"] = "scored" if logged.is_scored else "one_token"
        if found["policy"] is not None:
            found["policy"] = self._policy_name(found["policy"])
        return {
            "request_id": logged.request_id,
            "tenant": logged.namespace.account,
            "admitted_s_ago": (self._clock.now_ns() - logged.admitted_ns) / 1e9,
            **found,
            "evicted_s_before": None if evicted_ns is None else (logged.admitted_ns - evicted_ns) / 1e9,
        }

    def pin(self, *, ttl_s: float | None = None, **prefix: Any) -> dict[str, Any]:
        """Pin a prefix and report how much of it was pinned."""
        tokens, namespace = self._find(**prefix)
        self._kv.epoch += 1
        return asdict(self._kv.cache.pin(tokens, namespace, ttl_s=ttl_s))

    def unpin(self, **prefix: Any) -> dict[str, Any]:
        """End the pins within a prefix."""
        tokens, namespace = self._find(**prefix)
        self._kv.epoch += 1
        return {"num_unpinned": self._kv.cache.unpin(tokens, namespace), **self._pins()}

    def unpin_all(self) -> dict[str, Any]:
        """End every pin."""
        pins = self._kv.cache.pins()
        self._kv.epoch += 1
        num_ended = sum(self._kv.cache.unpin(pin.token_ids, pin.namespace) for pin in pins)
        return {"num_unpinned": num_ended, **self._pins()}

    def pins(self) -> dict[str, Any]:
        """Report what is pinned, for whom and for how much longer."""
        pins = [
            {
                "tenant": pin.namespace.account,
                "num_tokens": len(pin.token_ids),
                "ttl_s": pin.ttl_s,
                "left_s": pin.left_s,
            }
            for pin in self._kv.cache.pins()
        ]
        max_pinned_blocks = self._kv.cache.metrics().max_pinned_blocks
        return {"pins": pins, **self._pins(), "max_pinned_blocks": max_pinned_blocks}

    def clear(self) -> dict[str, Any]:
        """Drop every block that is neither in use nor pinned."""
        num_blocks = self._kv.clear_cache()
        return {"num_dropped_blocks": num_blocks, **self._left()}

    def evict(self, num_blocks: int) -> dict[str, Any]:
        """Drop blocks in the order of the eviction policy."""
        if num_blocks < 1:
            raise InvalidInputError(f"{num_blocks} blocks cannot be evicted; give at least 1")
        num_dropped = self._kv.evict(num_blocks)
        self._kv.tell_events()
        return {"num_dropped_blocks": num_dropped, **self._left()}

    def _policy_name(self, class_name: str) -> str:
        name = self._kv.policy_names.get(class_name)
        if name is None and self._kv.cache.metrics().policy_failure:
            return "last use"  # has taken the place of the one that failed
        return name or class_name

    def _left(self) -> dict[str, Any]:
        cache = self._kv.cache.metrics()
        return {
            "num_blocks": cache.num_blocks,
            "num_locked_blocks": cache.num_locked_blocks,
            "num_pinned_blocks": cache.num_pinned_blocks,
        }

    def _pins(self) -> dict[str, Any]:
        cache = self._kv.cache.metrics()
        return {"num_pins": cache.num_pins, "num_pinned_blocks": cache.num_pinned_blocks}

    def _find(self, **given: Any) -> tuple[TokenIdsLike, Namespace]:
        if given.get("namespace") is not None:
            given["namespace"] = named = Namespace(*given["namespace"])
            if not all(isinstance(part, str) for part in named):  # it becomes a key of the cache
                raise InvalidInputError(f"namespace is {named!r}; its parts must be strings")
        prefix = Prefix(**given)
        tokens, namespace = prefix.token_ids, prefix.namespace
        if tokens is None:
            logged = self._kv.log.find(prefix.request)
            tokens, namespace = logged.token_ids, logged.namespace
        if prefix.num_tokens is not None:
            if prefix.num_tokens < 1:
                raise InvalidInputError(f"{prefix.num_tokens} tokens are not a prefix; give at least 1")
            tokens = pack(tokens)[: prefix.num_tokens]
        return tokens, namespace or Namespace()


class PoolAdmin:
    """Operations between two steps."""

    def __init__(self, compactor: Compactor) -> None:
        self._compactor = compactor

    def compact(self) -> dict[str, Any]:
        """Move some live blocks and report how many and how long it took; repeat until none moved."""
        num_moved = self._compactor.advance()
        return {"num_moved_blocks": num_moved, "moving_s": self._compactor.slice_ns / 1e9}
