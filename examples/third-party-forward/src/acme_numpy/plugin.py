"""What this package offers to sageLLM. It imports nothing but core, so listing plugins stays cheap."""

from sagellm.core import Provider, hookimpl

SAGELLM_API = 0  # the protocol version that this was written for


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name the backend."""
    target = "acme_numpy.backend:NumpyForwardBackend"
    return [Provider("forward_backend", "numpy", target, "decoders in numpy, float32")]
