"""What this package offers to an engine."""

from sagellm.core import Provider, hookimpl

_PACKAGE = "sagellm.kvmgr.eviction"

# Name, target, summary, what it is recommended for, what benchmarks/results/eviction.json says (shares of the
# prompt tokens of a chat trace that it saves at 5,000 and 10,000 blocks), and more in words.
_POLICIES = (
    ("lru", "lru:LRUEvictionPolicy", "least recently used first: for chat", "", (11.4, 21.6), ""),
    ("fifo", "fifo:FIFOEvictionPolicy", "first in, first out", "", (11.4, 21.5), ""),
    (
        "lfu",
        "lfu:LFUEvictionPolicy",
        "least often used first",
        "",
        (14.2, 19.1),
        "better than lru in a small cache, worse in a large one",
    ),
    (
        "arc",
        "arc:ARCEvictionPolicy",
        "recency against frequency: for mixed loads",
        "",
        (11.9, 22.1),
        "reuse saves more on mixed loads too",
    ),
    ("slru", "slru:SLRUEvictionPolicy", "LRU in two segments", "", (9.5, 14.2), ""),
    ("s3fifo", "s3fifo:S3FIFOEvictionPolicy", "two queues", "", (15.4, 21.5), ""),
    ("cost", "cost:CostEvictionPolicy", "cheapest first", "", (13.6, 20.3), ""),
    (
        "reuse",
        "reuse:ReuseEvictionPolicy",
        "learns who comes back: for chat under pressure",
        "chat and mixed loads",
        (18.2, 24.6),
        "never below lru on eight other loads",
    ),
    (
        "predictive",
        "predictive:PredictiveEvictionPolicy",
        "what is not predicted to come back: for batch work",
        "",
        (11.5, 21.7),
        "lengths do not tell who comes back",
    ),
    (
        "qos",
        "qos:QoSEvictionPolicy",
        "shares by weight: for several tenants",
        "several tenants",
        (11.4, 21.6),
        "Jain's index of what 8 tenants save 0.9998, with lru 0.56",
    ),
    ("belady", "belady:BeladyEvictionPolicy", "bound of replays", "", (34.6, 37.4), "the optimum"),
)


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name this package's implementations."""
    return [
        Provider(
            "eviction_policy",
            name,
            f"{_PACKAGE}.{target}",
            summary,
            recommended_for=recommended_for,
            measured=f"a chat trace: {saved[0]} % saved at 5,000 blocks, {saved[1]} % at 10,000"
            + (f"; {more}" if more else ""),
        )
        for name, target, summary, recommended_for, saved, more in _POLICIES
    ]
