"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer alone, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sagellm.core import get_logger
from sagellm.server.http.body_schema import DetokenizeBody, TokenizeBody
from sagellm.server.http.errors import APIError, as_api_error
from sagellm.server.http.reply import encode_json, send_bytes, send_error
from sagellm.server.http.service import Service

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from sagellm.engines.text.tokenizer import Tokenizer

B = TypeVar("B", TokenizeBody, DetokenizeBody)

logger = get_logger(__name__)

_MANY_TOKENS = 4096  # that are worth encoding on another thread

_TOLD_SETTINGS = frozenset(
    {
        "add_bos_token",
        "add_eos_token",
        "add_prefix_space",
        "additional_special_tokens",
        "bos_token",
        "clean_up_tokenization_spaces",
        "eos_token",
        "extra_special_tokens",
        "mask_token",
        "model_max_length",
        "pad_token",
        "padding_side",
        "sep_token",
        "split_special_tokens",
        "truncation_side",
        "unk_token",
    }
)
"""The settings of a tokenizer that are shown; others may be paths of this machine."""


class _Tokenizing(ABC, Generic[B]):
    """One endpoint, an ASGI application. A call takes a seat, like requests that generate."""

    kind: type[B]

    def __init__(self, service: Service) -> None:
        self.service = service

    @abstractmethod
    async def answer(self, body: B) -> dict[str, Any]:
        """Return the answer. Raises APIError."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        try:
            tenant = scope["state"]["tenant"].name
            with self.service.admission.seat(tenant):
                body = await self.service.read(scope, self.kind)
                self.service.check_model(body.model)
                async with self.service.encoding(tenant):
                    answer = await self.answer(body)
                is_long = len(answer.get("tokens", ())) > _MANY_TOKENS
                written = await asyncio.to_thread(encode_json, answer) if is_long else encode_json(answer)
        except Exception as error:
            told = as_api_error(error)
            scope["state"]["failure"] = told.code or told.param  # for the access log
            logger.info("a request is answered with %d (%s)", told.status, told.code or told.param)
            await send_error(send, told)
            return
        await send_bytes(send, written)


class Tokenize(_Tokenizing[TokenizeBody]):
    """POST /tokenize."""

    kind = TokenizeBody

    async def answer(self, body: TokenizeBody) -> dict[str, Any]:
        """Return the token ids of a text, or of messages as the model's template writes them."""
        encoder = self.service.encoder
        token_ids = await encoder.tokenize(body)
        texts = await encoder.texts_of(token_ids) if body.return_token_strs else None
        return {
            "count": len(token_ids),
            "max_model_len": self.service.front.max_model_len,
            "tokens": token_ids,
            "token_strs": texts,
        }


class Detokenize(_Tokenizing[DetokenizeBody]):
    """POST /detokenize."""

    kind = DetokenizeBody

    async def answer(self, body: DetokenizeBody) -> dict[str, Any]:
        """Return the text of token ids."""
        return {"prompt": await self.service.encoder.detokenize(body.tokens)}


def tokenizer_info(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Describe a tokenizer: its class, its settings, the chat template. Raises APIError if there is none."""
    if tokenizer is None:
        raise APIError(404, "the model has no tokenizer", code="no_tokenizer")
    settings: Mapping[str, Any] = getattr(tokenizer, "init_kwargs", {})
    template = getattr(tokenizer, "chat_template", None)
    return {
        "tokenizer_class": getattr(tokenizer, "class_name", type(tokenizer).__name__),
        "vocab_size": len(tokenizer),
        **{name: _plain(value) for name, value in sorted(settings.items()) if name in _TOLD_SETTINGS},
        **({} if template is None else {"chat_template": template}),
    }


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold; an added token becomes its text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return str(value)
