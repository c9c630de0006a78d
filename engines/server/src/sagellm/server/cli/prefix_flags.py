"""Flags that name a prefix of a running engine's cache other than by a request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sagellm.core import InvalidInputError, Namespace
from sagellm.engines.cli.flags import make_flag
from sagellm.server.http.answer_ids import request_of

if TYPE_CHECKING:
    from sagellm.engines.text.calls import TokenCall
    from sagellm.engines.text.limits import TextLimits
    from sagellm.server.remote import AdminClient

_TIMEOUT_S = 5.0
"""Limit on each call of the model's template and tokenizer."""

PREFIX_FLAGS = (
    make_flag("tokens", int, typer.Option(metavar="INT", min=1, help="Only this many of its first tokens.")),
    make_flag(
        "prompt", str, typer.Option(metavar="TEXT", help="The beginning of prompts, instead of a request.")
    ),
    make_flag(
        "system", str, typer.Option(metavar="TEXT", help="The system message of chats, instead of a request.")
    ),
    make_flag(
        "tenant",
        str,
        typer.Option(metavar="NAME", help="Whose, with --prompt or --system. [default: default]"),
    ),
    make_flag("salt", str, typer.Option(metavar="TEXT", help="The cache_salt of those requests.")),
    make_flag("public", str, typer.Option(metavar="NAME", help="The cache_namespace of those requests.")),
)


def request_name(answer_id: str | None) -> str | None:
    """Return the core's name of a request, given the id that the API returned."""
    return None if answer_id is None else request_of(answer_id)


def read_prefix(client: AdminClient, request: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the core's operation. Raises InvalidInputError for a prefix named twice."""
    texts = {name: given[name] for name in ("prompt", "system") if name in given}
    if len(texts) + (request is not None) > 1:
        raise InvalidInputError("a request, --prompt and --system each name a prefix; give one of them")
    asked: dict[str, Any] = {"request": request_name(request), "num_tokens": given.get("tokens")}
    whose = {name: given[name] for name in ("tenant", "salt", "public") if name in given}
    if not texts:
        if whose:
            raise InvalidInputError(f"--{next(iter(whose))} goes with --prompt or --system")
        return asked
    if "public" in whose and len(whose) > 1:
        raise InvalidInputError("--public names a namespace by itself; leave --tenant and --salt out")
    namespace = (
        Namespace.public(whose["public"])
        if "public" in whose
        else Namespace(whose.get("tenant", "default"), whose.get("salt", ""))
    )
    ((kind, text),) = texts.items()
    return {**asked, "token_ids": _encode(client, kind, text), "namespace": tuple(namespace)}


def _encode(client: AdminClient, kind: str, text: str) -> list[int]:
    """Tokenize with the template and tokenizer of the engine's model, in a process that can be killed.

    Raises ForeignTextError if either fails or exceeds a server's limits on time and memory.
    """
    from sagellm.engines.config.schema import EngineConfig
    from sagellm.engines.loading.source import resolve_tokenizer
    from sagellm.engines.loading.tokenizer import names_tokenizer
    from sagellm.engines.text import ChatMessage
    from sagellm.engines.text.calls import Encode, Render
    from sagellm.engines.text.limits import TextLimits

    config = EngineConfig().with_values(
        {key: value for key, value in client.hello.config.items() if key.startswith("model.")}
    )
    path = resolve_tokenizer(config.model)
    if not names_tokenizer(path):
        raise InvalidInputError("the engine's model has no tokenizer; name a request instead")
    limits = TextLimits.of(client.hello.limits.max_model_len, timeout_s=_TIMEOUT_S)
    if kind == "prompt":
        return asyncio.run(_tokenize(path, limits, Encode([text], True)))[0]
    # The common prefix of two chats that differ only in the user's first word.
    system = ChatMessage("system", text)
    chats = [Render([system, ChatMessage("user", word)], True, {}) for word in ("a", "Z")]
    one, other = asyncio.run(_tokenize(path, limits, *chats))
    return [mine for mine, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


async def _tokenize(path: Path, limits: TextLimits, *calls: TokenCall) -> list[list[int]]:
    """Return the token ids that each call makes."""
    from sagellm.server.text_process import ProcessTextRunner

    texts = ProcessTextRunner(path)
    try:
        await texts.start(limits)
        return [token_ids for call in calls for token_ids in await texts.token_ids(call)]
    finally:
        await texts.close()
