"""Attention over paged KV: the reference and the default, in torch operators."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.attention.kv_cache import reshape_and_cache_kv as reshape_and_cache_kv
    from sagellm.engines.attention.naive import (
        TorchNaiveBackend as TorchNaiveBackend,
        create_causal_mask as create_causal_mask,
        naive_attention as naive_attention,
    )
    from sagellm.engines.attention.sdpa import SDPABackend as SDPABackend

_MODULE_OF = {
    "SDPABackend": ".sdpa",
    "TorchNaiveBackend": ".naive",
    "create_causal_mask": ".naive",
    "naive_attention": ".naive",
    "reshape_and_cache_kv": ".kv_cache",
}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
