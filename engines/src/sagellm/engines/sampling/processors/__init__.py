"""Logits processors: how a request's parameters change its logits before a token is chosen."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.sampling.processors.allowed_token_ids import AllowedTokenIds as AllowedTokenIds
    from sagellm.engines.sampling.processors.bad_words import BadWords as BadWords
    from sagellm.engines.sampling.processors.logit_bias import LogitBias as LogitBias
    from sagellm.engines.sampling.processors.min_tokens import MinTokens as MinTokens

_MODULE_OF = {
    "AllowedTokenIds": ".allowed_token_ids",
    "BadWords": ".bad_words",
    "LogitBias": ".logit_bias",
    "MinTokens": ".min_tokens",
}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
