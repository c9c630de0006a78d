"""What this package offers to sageLLM."""

from sagellm.core import Provider, hookimpl

SAGELLM_API = 0


@hookimpl
def sagellm_providers() -> list[Provider]:
    here = "acme_evict.policies"
    return [
        Provider("eviction_policy", "greedy", f"{here}:Greedy", "takes pinned sequences too"),
        Provider("eviction_policy", "careless", f"{here}:Careless", "forgets that a node was locked"),
        Provider("eviction_policy", "scan", f"{here}:Scan", "looks at all leaves for every victim"),
        Provider("eviction_policy", "gossip", f"{here}:Gossip", "counts the hits of all caches together"),
        Provider("eviction_policy", "hoarder", f"{here}:Hoarder", "keeps every node that it ever saw"),
    ]
