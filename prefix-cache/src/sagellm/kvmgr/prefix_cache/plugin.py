"""What this package offers to an engine."""

from sagellm.core import Provider, hookimpl


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name this package's implementations."""
    return [
        Provider(
            "prefix_cache",
            "radix",
            "sagellm.kvmgr.prefix_cache.radix:RadixPrefixCache",
            "radix tree over tokens, exact, block-aligned, one root per namespace",
        )
    ]
