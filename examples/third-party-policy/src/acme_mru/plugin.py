"""What this package offers to sageLLM. It imports nothing but core, so listing plugins stays cheap."""

from sagellm.core import Provider, hookimpl

SAGELLM_API = 0  # the protocol version that this was written for


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name the policy."""
    return [
        Provider("eviction_policy", "mru", "acme_mru.policy:MRUEvictionPolicy", "most recently used first")
    ]
