"""What this package offers to an engine."""

from sagellm.core import Provider, hookimpl

_PACKAGE = "sagellm.kvmgr.eviction"


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name this package's implementations."""
    return [
        Provider(
            "eviction_policy",
            "lru",
            f"{_PACKAGE}.lru:LRUEvictionPolicy",
            "least recently used first: for chat",
        ),
        Provider("eviction_policy", "fifo", f"{_PACKAGE}.fifo:FIFOEvictionPolicy", "first in, first out"),
        Provider("eviction_policy", "lfu", f"{_PACKAGE}.lfu:LFUEvictionPolicy", "least often used first"),
        Provider(
            "eviction_policy",
            "arc",
            f"{_PACKAGE}.arc:ARCEvictionPolicy",
            "recency against frequency: for mixed loads",
        ),
        Provider("eviction_policy", "slru", f"{_PACKAGE}.slru:SLRUEvictionPolicy", "LRU in two segments"),
        Provider("eviction_policy", "s3fifo", f"{_PACKAGE}.s3fifo:S3FIFOEvictionPolicy", "two queues"),
        Provider("eviction_policy", "cost", f"{_PACKAGE}.cost:CostEvictionPolicy", "cheapest first"),
        Provider(
            "eviction_policy",
            "reuse",
            f"{_PACKAGE}.reuse:ReuseEvictionPolicy",
            "learns who comes back: for chat under pressure",
        ),
        Provider(
            "eviction_policy",
            "predictive",
            f"{_PACKAGE}.predictive:PredictiveEvictionPolicy",
            "what is not predicted to come back: for batch work",
        ),
        Provider(
            "eviction_policy",
            "qos",
            f"{_PACKAGE}.qos:QoSEvictionPolicy",
            "shares by weight: for several tenants",
        ),
        Provider("eviction_policy", "belady", f"{_PACKAGE}.belady:BeladyEvictionPolicy", "bound of replays"),
    ]
