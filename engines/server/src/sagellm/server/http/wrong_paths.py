"""What a request to a path that is not served is told: whose API it is, and what there is instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from starlette.routing import BaseRoute, Route

from sagellm.core import nearest
from sagellm.server.http.errors import APIError

_MAX_CHARACTERS = 100
_MIN_CHARACTERS = 6  # of a path that may be meant: shorter ones resemble too many
_CHAT = "POST /v1/chat/completions"
_COMPLETION = "POST /v1/completions"
_NOTHING = ""
_ANTHROPIC = "Anthropic's Messages API"
_OLLAMA = "Ollama's API"
_LLAMA_CPP = "llama.cpp's own API"

FOREIGN_PATHS: Mapping[str, tuple[str, str]] = {
    "/v1/messages": (_ANTHROPIC, _CHAT),
    "/v1/messages/count_tokens": (_ANTHROPIC, "POST /tokenize"),
    "/v1/complete": ("Anthropic's older API", _COMPLETION),
    "/v1/responses": ("OpenAI's Responses API", _CHAT),
    "/v1/assistants": ("OpenAI's Assistants API", _CHAT),
    "/v1/threads": ("OpenAI's Assistants API", _CHAT),
    "/v1/realtime": ("OpenAI's Realtime API", _CHAT),
    "/v1/embeddings": ("OpenAI's embeddings API", _NOTHING),
    "/v1/moderations": ("OpenAI's moderation API", _NOTHING),
    "/v1/audio": ("OpenAI's audio API", _NOTHING),
    "/v1/images": ("OpenAI's images API", _NOTHING),
    "/v1/files": ("OpenAI's files API", _NOTHING),
    "/v1/batches": ("OpenAI's batch API", _NOTHING),
    "/api/chat": (_OLLAMA, _CHAT),
    "/api/generate": (_OLLAMA, _COMPLETION),
    "/api/tags": (_OLLAMA, "GET /v1/models"),
    "/api/show": (_OLLAMA, "GET /v1/models"),
    "/api/ps": (_OLLAMA, "GET /v1/models"),
    "/api/version": (_OLLAMA, "GET /version"),
    "/api/embed": (_OLLAMA, _NOTHING),
    "/api/embeddings": (_OLLAMA, _NOTHING),
    "/api/pull": (_OLLAMA, _NOTHING),
    "/completion": (_LLAMA_CPP, _COMPLETION),
    "/apply-template": (_LLAMA_CPP, "POST /tokenize"),
    "/props": (_LLAMA_CPP, "GET /tokenizer_info"),
    "/generate": ("the API of TGI and SGLang", _COMPLETION),
    "/generate_stream": ("TGI's API", _COMPLETION),
    "/info": ("TGI's API", "GET /v1/models"),
    "/get_model_info": ("SGLang's API", "GET /v1/models"),
    "/invocations": ("SageMaker's API", _CHAT),
    "/rerank": ("the API of rerankers", _NOTHING),
    "/v1/rerank": ("the API of rerankers", _NOTHING),
    "/score": ("vLLM's API for pooling models", _NOTHING),
    "/pooling": ("vLLM's API for pooling models", _NOTHING),
}
"""A path of another API, which stands for all below it → whose it is, and what to send here instead."""


def served_paths(routes: Iterable[BaseRoute]) -> dict[str, str]:
    """Return the method of each path that is served, as in `{"/version": "GET"}`."""
    return {
        route.path.replace("{name:path}", "NAME"): min((route.methods or {"GET"}) - {"HEAD"})
        for route in routes
        if isinstance(route, Route)
    }


def no_such_path(path: str, served: Mapping[str, str]) -> APIError:
    """Return the answer to a request for a path that is not among the served ones, path → method."""
    asked = path if len(path) <= _MAX_CHARACTERS else f"{path[:_MAX_CHARACTERS]}…"
    foreign = next((FOREIGN_PATHS[each] for each in _upwards(asked) if each in FOREIGN_PATHS), None)
    if foreign is None:
        there = ", ".join(f"{method} {each}" for each, method in sorted(served.items()))
        near = nearest(asked, [each for each in served if len(each) >= _MIN_CHARACTERS])
        told = f"this server has no path {asked}.{near} It has {there}"
    else:
        owner, instead = foreign
        advice = f"use {instead}" if instead else "it generates text from text"
        told = f"this server has no path {asked}, which belongs to {owner}; {advice}"
    return APIError(404, told, code="no_such_path")


def wrong_method(path: str, method: str, allowed: str) -> APIError:
    """Return the answer to a request with a method that a served path does not take."""
    return APIError(405, f"{path} takes {allowed}, not {method}", code="wrong_method")


def _upwards(path: str) -> Iterator[str]:
    """Yield a path without its last slash, then those above it."""
    path = path.rstrip("/").lower()
    while path:
        yield path
        path = path.rpartition("/")[0]
