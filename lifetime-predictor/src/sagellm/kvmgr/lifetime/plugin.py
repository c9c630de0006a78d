"""What this package offers to an engine."""

from sagellm.core import Provider, hookimpl


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name this package's implementations."""
    return [
        Provider(
            "lifetime_predictor",
            "statistical",
            "sagellm.kvmgr.lifetime.statistical:StatisticalLifetimePredictor",
            "median output length of similar prompts",
        )
    ]
