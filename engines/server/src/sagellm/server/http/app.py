"""The application: its routes, and the middleware around them."""

from __future__ import annotations

import time
from importlib.util import find_spec
from math import ceil
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sagellm.core import get_logger
from sagellm.engines import __version__
from sagellm.engines.config.sections import ServerConfig
from sagellm.engines.parsers.choice import ChosenParsers
from sagellm.engines.text.calls import TextRunner
from sagellm.server.http.access_control import AccessControl, Keys, check_access
from sagellm.server.http.access_log import AccessLog
from sagellm.server.http.admission import Admission, Quota
from sagellm.server.http.api_key_file import with_key_file
from sagellm.server.http.body import BodyGate
from sagellm.server.http.body_schema import DetokenizeBody, TokenizeBody
from sagellm.server.http.engine_front import EngineFront
from sagellm.server.http.errors import APIError
from sagellm.server.http.generation import Chats, Completions
from sagellm.server.http.metrics import EngineProbe, ServerMetrics
from sagellm.server.http.prompt_encoder import PromptEncoder
from sagellm.server.http.reply import encode_json
from sagellm.server.http.response_headers import ResponseHeaders
from sagellm.server.http.service import Service
from sagellm.server.http.spans import SpanMiddleware, Spans
from sagellm.server.http.start_page import StartPage
from sagellm.server.http.tokenizing import Tokenizing, detokenize, tokenize, tokenizer_info
from sagellm.server.http.wrong_paths import no_such_path, served_paths, wrong_method

logger = get_logger(__name__)

_METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"


def create_app(
    front: EngineFront,
    settings: ServerConfig,
    *,
    max_num_seqs: int = 256,
    text_runner: TextRunner | None = None,
) -> Starlette:
    """Build the application around a loaded engine.

    `text_runner` runs the model's template and tokenizer; None runs them in this process, without a time
    limit. `max_num_seqs` plus `settings.max_queued_requests` bounds the live requests.
    `app.state.admission` drains. Raises ConfigError for an open address without a key, and where spans are
    wanted but the extra `otel` is missing.
    """
    settings = with_key_file(settings, logger.warning)
    check_access(settings)
    names = settings.served_model_name or (front.model_name,)
    keys = Keys(settings.api_keys, Quota(settings.max_requests_per_key, settings.max_tokens_per_key))
    admission = Admission(max_num_seqs + settings.max_queued_requests, keys.quotas)
    service = Service(
        front=front,
        model_names=names,
        admission=admission,
        metrics=ServerMetrics(names[0], admission.tenants),
        encoder=PromptEncoder(front.tokenizer, front.max_model_len, text_runner=text_runner),
        public_namespaces=settings.public_namespaces,
        has_grammar=_has_grammar(front.config.grammar.name.name),
        parsers=ChosenParsers.choose(front.tokenizer, settings.tool_parser, settings.reasoning_parser),
        deadline_ms=settings.deadline_ms,
        is_lenient=settings.lenient,
    )
    start_page = StartPage(
        names[0], needs_key=bool(settings.api_keys), has_template=service.encoder.has_template
    )
    routes = [*_probes(service), *_endpoints(service, start_page)]
    spans = Spans.open(settings)
    gate = Middleware(
        BodyGate,
        paths=frozenset(route.path for route in routes if "POST" in (route.methods or ())),
        timeout_s=settings.body_timeout,
        stall_timeout_s=settings.body_stall_timeout,
        is_shared=len(keys.quotas) > 1,
    )
    middleware = [  # the outermost first
        *([Middleware(AccessLog)] if settings.access_log else []),
        *([] if spans is None else [Middleware(SpanMiddleware, spans=spans)]),
        Middleware(ResponseHeaders),
        Middleware(AccessControl, keys=keys, settings=settings),
        gate,
    ]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _answer})
    app.router.redirect_slashes = False
    app.state.admission, app.state.service, app.state.spans = admission, service, spans
    return app


def _endpoints(service: Service, start_page: StartPage) -> list[Route]:
    """Return the endpoints of users."""
    models = [_model(name, service.front.max_model_len) for name in service.model_names]

    async def list_models(_: Request) -> Response:
        return _json({"object": "list", "data": models})

    async def get_model(request: Request) -> Response:
        try:
            name = service.check_model(request.path_params["name"])
        except APIError as error:
            return _json(error.body, error.status)
        return _json(models[service.model_names.index(name)])

    async def show_tokenizer(_: Request) -> Response:
        return _json(tokenizer_info(service.front.tokenizer))

    return [
        Route("/", start_page.show),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", get_model),
        Route("/tokenizer_info", show_tokenizer),
        Route("/v1/completions", Completions(service), methods=["POST"]),
        Route("/v1/chat/completions", Chats(service), methods=["POST"]),
        Route("/tokenize", Tokenizing(service, TokenizeBody, tokenize), methods=["POST"]),
        Route("/detokenize", Tokenizing(service, DetokenizeBody, detokenize), methods=["POST"]),
    ]


def _has_grammar(name: str) -> bool:
    """Say whether outputs can be constrained: what is built in needs the extra `grammar`."""
    return name != "null" and (name != "xgrammar" or find_spec("xgrammar") is not None)


def _probes(service: Service) -> list[Route]:
    """Return the endpoints that report the server's state to its operator."""
    probe = EngineProbe(service.front)

    async def health(_: Request) -> Response:
        return state(is_good=service.front.is_responsive)

    async def ready(_: Request) -> Response:
        return state(is_good=service.front.is_ready and not service.admission.is_draining)

    def state(*, is_good: bool) -> Response:
        front = service.front
        status = "draining" if service.admission.is_draining else front.status
        answer = _json({"status": status}, 200 if is_good else 503)
        if front.pause_s:
            answer.headers["retry-after"] = str(ceil(front.pause_s))
        return answer

    async def version(_: Request) -> Response:
        return _json({"version": __version__})

    async def metrics(_: Request) -> Response:
        await probe.ask()
        page = service.metrics.render(
            probe.last,
            service.front.config,
            is_up=service.front.is_responsive,
            num_restarts=service.front.num_restarts,
        )
        return Response(page, headers={"content-type": _METRICS_TYPE})

    pages = {"/health": health, "/ping": health, "/ready": ready, "/version": version, "/metrics": metrics}
    return [Route(path, endpoint) for path, endpoint in pages.items()]


def _model(name: str, max_model_len: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sagellm",
        "max_model_len": max_model_len,
    }


def _json(value: Any, status: int = 200) -> Response:
    return Response(encode_json(value), status_code=status, media_type="application/json")


async def _answer(request: Request, error: Exception) -> Response:
    """Answer requests that the routing refuses, in the same form as all other errors."""
    status, headers = 500, {}
    if isinstance(error, HTTPException):
        status, headers = error.status_code, dict(error.headers or {})
    path = request.scope["path"]
    if status == 404:
        told = no_such_path(path, served_paths(request.app.routes))
    elif status == 405:
        told = wrong_method(path, request.method, headers.get("Allow", "another method"))
    else:
        told = APIError(status, "the request is refused")
    request.scope["state"].setdefault("failure", told.code)  # for the access log
    answer = _json(told.body, status)
    answer.headers.update(headers)
    return answer
