"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer alone, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
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


class Tokenizing(Generic[B]):
    """One endpoint, an ASGI application. A call takes a seat, like requests that generate."""

    def __init__(
        self, service: Service, kind: type[B], answer: Callable[[Service, B], Awaitable[dict[str, Any]]]
    ) -> None:
        self._service = service
        self._kind: type[B] = kind
        self._answer: Callable[[Service, B], Awaitable[dict[str, Any]]] = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        service = self._service
        try:
            tenant = scope["state"]["tenant"].name
            with service.admission.seat(tenant):
                body = await service.read(scope, self._kind)
                service.check_model(body.model)
                async with service.encoding(tenant):
                    answer = await self._answer(service, body)
                is_long = len(answer.get("tokens", ())) > _MANY_TOKENS
                written = await asyncio.to_thread(encode_json, answer) if is_long else encode_json(answer)
        except Exception as error:
            told = as_api_error(error)
            scope["state"]["failure"] = told.code or told.param  # for the access log
            logger.info("a request is answered with %d (%s)", told.status, told.code or told.param)
            await send_error(send, told)
            return
        await send_bytes(send, written)


async def tokenize(service: Service, body: TokenizeBody) -> dict[str, Any]:
    """Return the token ids of a text, or of messages as the model's template writes them."""
    encoder = service.encoder
    token_ids = await encoder.tokenize(body)
    return {
        "count": len(token_ids),
        "max_model_len": service.front.max_model_len,
        "tokens": token_ids,
        "token_strs": await encoder.texts_of(token_ids) if body.return_token_strs else None,
    }


async def detokenize(service: Service, body: DetokenizeBody) -> dict[str, Any]:
    """Return the text of token ids."""
    return {"prompt": await service.encoder.detokenize(body.tokens)}


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
