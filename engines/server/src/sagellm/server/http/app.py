"""The application: its routes, and the middleware around them."""

from __future__ import annotations

import time
from math import ceil
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from sagellm.core import get_logger
from sagellm.engines import __version__
from sagellm.engines.config.sections import ServerConfig
from sagellm.engines.text.calls import TextRunner
from sagellm.server.http.access_control import AccessControl, Keys, check_access
from sagellm.server.http.access_log import AccessLog
from sagellm.server.http.admission import Admission, Quota
from sagellm.server.http.api_key_file import with_key_file
from sagellm.server.http.body import BodyGate
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
from sagellm.server.http.tokenizing import Detokenize, Tokenize, tokenizer_info
from sagellm.server.http.wrong_paths import no_such_path, served_paths, wrong_method

logger = get_logger(__name__)

_METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"


def create_app(
    front: EngineFront,
    settings: ServerConfig,
    *,
    max_num_seqs: int = 256,
    text_runner: TextRunner | None = None,
) -> FastAPI:
    """Build the application around a loaded engine.

    `text_runner` runs the model's template and tokenizer; None runs them in this process, without a time
    limit. `max_num_seqs` plus `settings.max_queued_requests` bounds the live requests.
    `app.state.admission` drains. Raises ConfigError for an open address without a key, and where spans are
    wanted but the extra `otel` is missing.
    """
    settings = with_key_file(settings, logger.warning)
    check_access(settings)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
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
        deadline_ms=settings.deadline_ms,
        is_lenient=settings.lenient,
    )
    app.state.admission, app.state.service = service.admission, service
    start_page = StartPage(
        names[0], needs_key=bool(settings.api_keys), has_template=service.encoder.has_template
    )
    _add_probes(app, service)
    paths = _add_routes(app, service, start_page)
    app.add_exception_handler(HTTPException, _answer)
    app.add_middleware(
        BodyGate,
        paths=paths,
        timeout_s=settings.body_timeout,
        stall_timeout_s=settings.body_stall_timeout,
        is_shared=len(keys.quotas) > 1,
    )
    app.add_middleware(AccessControl, keys=keys, settings=settings)
    app.add_middleware(ResponseHeaders)
    spans = app.state.spans = Spans.open(settings)
    if spans is not None:
        app.add_middleware(SpanMiddleware, spans=spans)
    if settings.access_log:
        app.add_middleware(AccessLog)
    return app


def _add_routes(app: FastAPI, service: Service, start_page: StartPage) -> frozenset[str]:
    """Add the endpoints of users; return the paths of those that take a body."""
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

    app.add_route("/", start_page.show, methods=["GET"])
    app.add_route("/v1/models", list_models, methods=["GET"])
    app.add_route("/v1/models/{name:path}", get_model, methods=["GET"])
    app.add_route("/tokenizer_info", show_tokenizer, methods=["GET"])
    posts = {
        "/v1/completions": Completions(service),
        "/v1/chat/completions": Chats(service),
        "/tokenize": Tokenize(service),
        "/detokenize": Detokenize(service),
    }
    for path, application in posts.items():
        app.add_route(path, application, methods=["POST"])  # type: ignore[arg-type]
    return frozenset(posts)


def _add_probes(app: FastAPI, service: Service) -> None:
    """Add the endpoints that report the server's state to its operator."""
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
    for path, endpoint in pages.items():
        app.add_route(path, endpoint, methods=["GET"])


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
