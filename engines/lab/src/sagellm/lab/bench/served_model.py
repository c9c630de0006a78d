"""Asks a server what it serves before the load starts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from sagellm.core import ConfigError, nearest
from sagellm.lab.bench.answer import error_message
from sagellm.lab.bench.errors import BenchmarkError
from sagellm.lab.bench.http_client import HTTPClient
from sagellm.lab.bench.records import RequestFailedError

_SHOWN_MODELS = 10
_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model that requests will name, and what the server says about itself."""

    name: str
    facts: dict[str, Any] = field(default_factory=dict)


async def find_model(client: HTTPClient, name: str | None) -> ServedModel:
    """Check that the server is there, takes the key and has the model; without a name, take its only one.

    Raises BenchmarkError if the server does not answer or refuses the key, ConfigError for a wrong name.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            response = await client.request("/models", lambda _, piece, __: body.extend(piece))
    except TimeoutError:
        raise BenchmarkError(
            f"{client.url} takes connections and does not answer within {_TIMEOUT_S:.0f} s; "
            f"is it still loading its model?"
        ) from None
    except RequestFailedError as error:
        raise BenchmarkError(
            f"no server answers at {client.url}: {error}; start one, or name another with --base-url"
        ) from error
    if response.status in (401, 403):
        raise BenchmarkError(
            f"{client.url} refuses the request ({response.status}: {error_message(bytes(body))}); "
            "give its key with --api-key or OPENAI_API_KEY"
        )
    facts = {"server": response.headers["server"]} if "server" in response.headers else {}
    served = _models(bytes(body)) if response.status == 200 else {}
    if not served:
        return _unlisted(client, name, response.status, facts)
    chosen = next(iter(served)) if name is None and len(served) == 1 else name
    shown = ", ".join(repr(one) for one in list(served)[:_SHOWN_MODELS])
    if chosen is None:
        raise ConfigError(f"{client.url} serves {shown}; choose one with --model")
    if chosen not in served:
        raise ConfigError(f"{client.url} serves {shown}, not {chosen!r}.{nearest(chosen, served)}")
    return ServedModel(name=chosen, facts=facts | served[chosen])


def _unlisted(client: HTTPClient, name: str | None, status: int, facts: dict[str, Any]) -> ServedModel:
    """Some servers list no models; then the name is taken as it is."""
    if name is None:
        raise ConfigError(f"{client.url} lists no models (status {status}); name one with --model")
    return ServedModel(name=name, facts=facts)


def _models(body: bytes) -> dict[str, dict[str, Any]]:
    try:
        rows = json.loads(body)["data"]
        kept = ("owned_by", "max_model_len")
        return {str(row["id"]): {key: row[key] for key in kept if row.get(key)} for row in rows}
    except (ValueError, LookupError, TypeError):
        return {}
