"""What this package offers to an engine."""

from sagellm.core import Provider, hookimpl


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name this package's implementations."""
    return [
        Provider("topology", "local", "sagellm.comm.local:LocalTopology", "this machine, by /proc and /sys")
    ]
