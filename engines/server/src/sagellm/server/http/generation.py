"""The two endpoints that generate: from a request, via its job, to the answer."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from sagellm.core import Namespace, Tenant, get_logger
from sagellm.engines.logging import fields
from sagellm.engines.requests.input_processor import RequestOptions
from sagellm.engines.requests.outputs import RequestOutput
from sagellm.engines.sampling.params import SamplingParams
from sagellm.server.http.answer_reading import AnswerReading
from sagellm.server.http.body_params import chat_params, check_budget, completion_params
from sagellm.server.http.body_schema import Body, ChatBody, CompletionBody, StreamOptions
from sagellm.server.http.chat_shape import ChatShape
from sagellm.server.http.completion_shape import CompletionShape
from sagellm.server.http.errors import (
    APIError,
    StructureRefusedError,
    as_api_error,
    deadline_exceeded,
    invalid,
    structure_refused,
    unsupported,
)
from sagellm.server.http.job_streams import ClientGoneError, JobStreams, running
from sagellm.server.http.metrics import RequestTimer
from sagellm.server.http.parsed_chat_shape import ParsedChatShape
from sagellm.server.http.prompt_encoder import EncodedPrompt
from sagellm.server.http.reply import EventReply, JSONReply
from sagellm.server.http.service import Service
from sagellm.server.http.shape import Job, Shape
from sagellm.server.http.structured import structure_param
from sagellm.server.http.tools import offer_of

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

B = TypeVar("B", bound=Body)

_SLICE_PARTS = 64
"""Parts of an answer that are written before others have a turn: milliseconds of seconds that it may take."""

logger = get_logger(__name__)


class Generation(ABC, Generic[B]):
    """One endpoint, an ASGI application."""

    kind: type[B]
    shape: type[Shape]
    params: Callable[[B, SamplingParams], SamplingParams]
    """Returns the sampling parameters of a body, given the model's. A static method."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def shape_of(self, job: Job) -> Shape:
        """Return what writes a job's outputs."""
        return self.shape(job)

    @abstractmethod
    async def prompts(self, body: B) -> list[EncodedPrompt]:
        """Return the prompts to continue."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; all of its errors are handled here."""
        arrived = time.perf_counter()
        reply: EventReply | JSONReply
        reply = whole = JSONReply(send)
        tenant: Tenant = scope["state"]["tenant"]
        try:
            with self.service.admission.seat(tenant.name) as seat:
                body = await self.service.read(scope, self.kind)
                async with self.service.encoding(tenant.name):
                    job = await self._job(body, request_id=scope["state"]["id"])
                seat.take(len(job.prompts) * job.params.n, job.num_tokens(self.service.front.max_model_len))
                options = RequestOptions(
                    namespace=self._namespace(scope["state"]["namespace"], body),
                    tenant=tenant,
                    priority=-(body.priority or 0),
                    deadline_ms=_left_ms(body.deadline_ms or self.service.deadline_ms, arrived),
                )
                if scope["state"]["request_id"] != job.id:
                    given = scope["state"]["request_id"]
                    told_ids = fields(request_id=job.id, client_request_id=given)
                    logger.info("%s: came as %s", job.id, given, extra=told_ids)
                timers = [
                    RequestTimer(self.service.metrics, arrived, request_id, tenant.name, limits)
                    for request_id, limits in zip(
                        job.request_ids, job.limits(self.service.front.max_model_len), strict=True
                    )
                ]
                scope["state"].update(timers=timers, job=job)  # for the access log and spans
                shape = self.shape_of(job)
                async with running(receive, timers, options["deadline_ms"]) as run:
                    seat.run(run.stop)
                    await run.open(self.service.front, job, options)
                    if job.is_streamed:
                        reply = EventReply(send)
                        await _stream(run, shape, reply)
                    else:
                        await _write(run, shape, whole)
                await reply.finish()
        except ClientGoneError:
            return
        except Exception as error:
            told = _told(error, scope["state"].get("job"))
            scope["state"]["failure"] = told.code or told.param  # for the access log
            logger.info(
                "a request is answered with %d (%s)",
                told.status,
                told.code or told.param,
                extra=fields(request_id=scope["state"]["id"], status=told.status),
            )
            await reply.fail(told)

    def _namespace(self, own: Namespace, body: B) -> Namespace:
        """Return where the prompt's KV is shared: among the caller's requests, some of them, or publicly."""
        public, name = self.service.public_namespaces, body.cache_namespace
        if name is None:
            return own._replace(salt=body.cache_salt or "")
        if body.cache_salt is not None:
            raise invalid("cache_salt", "cache_salt cannot be used with cache_namespace, which is public")
        if name not in public:
            there = ", ".join(public) or "none; the server's --public-namespaces names them"
            raise invalid("cache_namespace", f"no public namespace {name!r}; there is {there}")
        return Namespace.public(name)

    async def _job(self, body: B, *, request_id: str) -> Job:
        service = self.service
        model = service.check_model(body.model)
        params = await service.encoder.with_tokens(self.params(body, service.front.default_params))
        prompts = await self.prompts(body)
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        check_budget(
            params,
            len(prompts),
            num_tokens,
            service.front.max_model_len,
            scored_by="logprobs" if body.prompt_logprobs is None else "prompt_logprobs",  # by an echo
            times_scored=params.n if isinstance(body, CompletionBody) else 1,  # a chat has them once
        )
        options = body.stream_options or StreamOptions()
        is_ranked = isinstance(body, CompletionBody) and body.best_of is not None
        return Job(
            prompts=prompts,
            params=params,
            model=model,
            is_streamed=bool(body.stream),
            num_choices=(body.n or service.front.default_params.n) if is_ranked else params.n,
            includes_usage=bool(options.include_usage),
            has_usage_in_chunks=bool(options.include_usage and options.continuous_usage_stats),
            echoes=isinstance(body, CompletionBody) and bool(body.echo),
            returns_token_ids=isinstance(body, CompletionBody) and bool(body.return_token_ids),
            hides_output=body.max_tokens == 0,
            hides_logprobs=is_ranked and body.logprobs is None,
            shows_tokens_as_ids=bool(body.return_tokens_as_token_ids),
            structure_param=structure_param(body),
            id=request_id,
        )


class Completions(Generation[CompletionBody]):
    """POST /v1/completions."""

    kind = CompletionBody
    shape = CompletionShape
    params = staticmethod(completion_params)

    async def prompts(self, body: CompletionBody) -> list[EncodedPrompt]:
        """Return one prompt or many, with their text for an echo."""
        encoder = self.service.encoder
        prompts = await encoder.encode_completion(body)
        return [await encoder.with_text(prompt) for prompt in prompts] if body.echo else prompts


class Chats(Generation[ChatBody]):
    """POST /v1/chat/completions."""

    kind = ChatBody
    shape = ChatShape
    params = staticmethod(chat_params)

    async def prompts(self, body: ChatBody) -> list[EncodedPrompt]:
        """Return the one prompt that the template makes."""
        return [await self.service.encoder.encode_chat(body)]

    def shape_of(self, job: Job) -> Shape:
        """Return what writes a job's outputs: whole, or taken apart."""
        return ChatShape(job) if job.reading is None else ParsedChatShape(job, job.reading)

    async def _job(self, body: ChatBody, *, request_id: str) -> Job:
        job = await super()._job(body, request_id=request_id)
        reading = await self._reading(body, job)
        if reading is None:
            return job
        params = reading.params(job.params, has_grammar=self.service.has_grammar)
        return replace(job, params=params, reading=reading)

    async def _reading(self, body: ChatBody, job: Job) -> AnswerReading | None:
        """Return how answers are read, None if all is content. Raises APIError for tools without a parser."""
        parsers, offer = self.service.parsers, offer_of(body)
        if offer is not None and parsers.tool_parser is None:
            raise unsupported(
                "tools",
                "no tool parser fits the model's chat template",
                remedy="serve it with --tool-call-parser NAME (`sage llm plugins list --kind tool_parser` "
                "lists them), or leave them out",
            )
        reasoning = parsers.reasoning_parser
        if offer is None and reasoning is None:
            return None
        return AnswerReading(
            parsers,
            offer,
            prompt_end=await self.service.encoder.end_of(job.prompts[0]) if reasoning is not None else "",
            shows_reasoning=body.include_reasoning is not False,
            removed=parsers.other_special if job.params.skip_special_tokens else None,
        )


def _told(error: Exception, job: Job | None) -> APIError:
    told = as_api_error(error)  # which frees what the error holds
    if job is not None and isinstance(error, StructureRefusedError):
        return structure_refused(error, job.structure_param)
    return told


def _left_ms(deadline_ms: float | None, arrived: float) -> float | None:
    """Return how much of a request's time is left. Raises APIError if nothing is."""
    if deadline_ms is None:
        return None
    left_ms = deadline_ms - 1e3 * (time.perf_counter() - arrived)
    if left_ms <= 0:
        raise deadline_exceeded()
    return left_ms


async def _write(run: JobStreams, shape: Shape, reply: JSONReply) -> None:
    """Write the complete answer, giving others their turns."""
    for number, part in enumerate(shape.parts(await _last_outputs(run)), start=1):
        await reply.write(part)
        if number % _SLICE_PARTS == 0:
            await asyncio.sleep(0)
            run.raise_if_stopped()


async def _last_outputs(run: JobStreams) -> Sequence[RequestOutput]:
    last: dict[int, RequestOutput] = {}
    async for index, output in run.outputs():
        last[index] = output
    return [output for _, output in sorted(last.items())]


async def _stream(run: JobStreams, shape: Shape, reply: EventReply) -> None:
    """Send events as outputs arrive."""
    cursors = shape.cursors()
    num = shape.job.params.n
    last: dict[int, RequestOutput] = {}
    async for index, request in run.outputs():
        events = b""
        for output in request.outputs:
            cursor = cursors[index * num + output.index]
            if not cursor.is_finished:
                events += shape.render(cursor, output)
                cursor.is_finished = output.finish_reason is not None
        last[index] = request
        if events:
            await reply.write(events)
    if shape.job.includes_usage:
        await reply.write(shape.usage_event([request for _, request in sorted(last.items())]))
