"""What all endpoints share: the engine, the model's names, and the limits on load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from sagellm.core import get_logger
from sagellm.engines.logging import fields
from sagellm.engines.parsers.choice import ChosenParsers
from sagellm.engines.text.limits import max_characters_of
from sagellm.server.http.admission import Admission
from sagellm.server.http.body_params import has_two_limits
from sagellm.server.http.body_schema import ChatBody, TokenizeBody
from sagellm.server.http.engine_front import EngineFront
from sagellm.server.http.errors import APIError
from sagellm.server.http.json_values import PromptLimits
from sagellm.server.http.metrics import ServerMetrics
from sagellm.server.http.parsing import parse
from sagellm.server.http.prompt_encoder import PromptEncoder

if TYPE_CHECKING:
    from starlette.types import Scope

B = TypeVar("B", bound=Struct)

logger = get_logger(__name__)

_MAX_WAIT_S = 30.0
"""For the texts of the same key."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """One served model."""

    front: EngineFront
    model_names: tuple[str, ...]
    admission: Admission
    metrics: ServerMetrics
    encoder: PromptEncoder
    public_namespaces: tuple[str, ...]
    parsers: ChosenParsers = field(default_factory=ChosenParsers)
    has_grammar: bool = False  # whether outputs can be constrained
    deadline_ms: int | None = None  # of requests that give none
    is_lenient: bool = False  # ignores unknown fields of bodies
    _encoding: dict[str, asyncio.Lock] = field(default_factory=dict, repr=False)  # by tenant, of several

    async def read(self, scope: Scope, kind: type[B]) -> B:
        """Return the checked body of a request; ignored fields are listed in the answer's headers.

        Raises APIError.
        """
        body = scope["state"]["body"]
        most = self.front.max_model_len
        limits = PromptLimits(num_characters=max_characters_of(most), num_tokens=most)
        parsed = await parse(body.data, kind, limits, is_lenient=self.is_lenient)
        body.release()
        for name in self._unused(parsed.body):
            parsed.ignored.add(name)
        if (header := parsed.ignored.header()) is not None:
            scope["state"]["headers"].append(header)
            shown = fields(request_id=scope["state"]["id"])
            logger.debug("%s: ignored %s", scope["state"]["request_id"], header[1].decode(), extra=shown)
        return parsed.body

    def _unused(self, body: Struct) -> Iterator[str]:
        """Yield the names of valid fields that have no effect: others decide, or the template."""
        if isinstance(body, ChatBody) and has_two_limits(body):
            yield "max_tokens"
        if isinstance(body, ChatBody | TokenizeBody) and body.chat_template_kwargs:
            for name in self.encoder.unread(body.chat_template_kwargs):
                yield f"chat_template_kwargs.{name}"
        if isinstance(body, ChatBody | TokenizeBody):
            yield from self.encoder.unread_of(body)

    @asynccontextmanager
    async def encoding(self, tenant: str) -> AsyncIterator[None]:
        """Use template and tokenizer; of several tenants, each does so for one request at a time.

        So the calls that wait for a worker, which is first come first served, are at most one of each tenant.
        Raises APIError after 30 s.
        """
        if len(self.admission.tenants) < 2:
            yield
            return
        lock = self._encoding.setdefault(tenant, asyncio.Lock())
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await lock.acquire()
        except TimeoutError:
            told = "the server is busy with other texts of this key; try again later"
            raise APIError(503, told, code="encoding_busy") from None
        try:
            yield
        finally:
            lock.release()

    def check_model(self, name: str | None) -> str:
        """Return the model's name for an answer. Raises APIError, 404 for one that is not served."""
        if name is not None and name not in self.model_names:
            raise APIError(
                404,
                f"the model {name[:200]!r} is not served; this server has {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )
        return name or self.model_names[0]
