"""What this package offers to sageLLM."""

from sagellm.core import Provider, hookimpl

SAGELLM_API = 0


@hookimpl
def sagellm_providers() -> list[Provider]:
    here = "acme_tiers.tiers"
    return [
        Provider("kv_tier", "open", f"{here}:Open", "finds blocks by their tokens, whoever's they are"),
        Provider("kv_tier", "stale", f"{here}:Stale", "keeps bytes of what was deleted"),
        Provider("kv_tier", "late", f"{here}:Late", "says that a get is done, then does it"),
        Provider("kv_tier", "lossy", f"{here}:Lossy", "forgets one put in seven"),
        Provider("kv_tier", "endless", f"{here}:Endless", "takes whatever it is given"),
    ]
