"""What this package offers to sageLLM. It imports nothing but core, so listing plugins stays cheap."""

from sagellm.core import Provider, hookimpl

SAGELLM_API = 0  # the protocol version that this was written for


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name the processor."""
    target = "acme_ngrams.processor:NoRepeatNgrams"
    return [Provider("logits_processor", "no_repeat_ngram", target, "no n-gram is generated twice")]
