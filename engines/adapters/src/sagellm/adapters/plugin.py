"""What this package offers."""

from sagellm.core import Provider, hookimpl


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name this package's implementations."""
    return []
