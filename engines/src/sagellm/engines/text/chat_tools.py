"""Tools and tool calls of a conversation, as callers write them and as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sagellm.core import InvalidRequestError

MAX_TOOLS = 128
MAX_DEPTH = 64
"""Nesting of a schema or of arguments; templates read them recursively."""


def read_tools(tools: Iterable[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
    """Return tools of OpenAI's form, checked. Raises InvalidRequestError."""
    from sagellm.engines.parsers.answers import function_tool

    listed = list(tools or ())
    if len(listed) > MAX_TOOLS:
        raise InvalidRequestError(f"tools: {len(listed)} tools; there may be at most {MAX_TOOLS}")
    names = [function_tool(tool).name for tool in listed]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequestError(f"tools: {name!r} is the name of two functions; rename one")
    return listed


def read_calls(calls: object, where: str) -> list[Mapping[str, Any]]:
    """Return the calls of a message in OpenAI's form, arguments as text. Raises InvalidRequestError."""
    if not isinstance(calls, Iterable) or isinstance(calls, str | bytes | Mapping):
        raise InvalidRequestError(f"{where}: tool_calls is of type {type(calls).__name__}; give a list")
    return [_read_call(call, f"{where}: tool_calls[{index}]") for index, call in enumerate(calls)]


def _read_call(call: object, where: str) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        told = '{"id": …, "type": "function", "function": {"name": …, "arguments": …}}'
        raise InvalidRequestError(f"{where} must be {told}")
    name, arguments = function.get("name"), function.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{where}: the function's name is {name!r}; it must be a text")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        raise InvalidRequestError(f"{where}: arguments must be a JSON object, or the text of one")
    written = {"name": name, "arguments": arguments}
    call_id = call.get("id")
    return {**({} if call_id is None else {"id": str(call_id)}), "type": "function", "function": written}


def calls_for_template(
    calls: Sequence[Mapping[str, Any]], where: str, *, reads_text: bool
) -> list[dict[str, Any]]:
    """Return calls as a template reads them: arguments as an object, or as the model's text if it reads that.

    Raises InvalidRequestError for arguments that are not a JSON object, where they must be.
    """
    found = []
    for index, call in enumerate(calls):
        function = dict(call["function"])
        if not reads_text:
            function["arguments"] = _object(function["arguments"], f"{where}.tool_calls[{index}].function")
        found.append({**call, "function": function})
    return found


def _object(arguments: str, where: str) -> Any:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"{where}.arguments are {arguments[:100]!r}; the model's chat template needs a JSON object; "
            f"leave the call out, or repair it"
        )
    return value


def with_texts(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """Return a value of JSON's types with each text in it changed, keys too. Raises InvalidRequestError."""
    if isinstance(value, str):
        return change(value)
    if depth > MAX_DEPTH:
        raise InvalidRequestError(f"tools or arguments are nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        return {change(str(key)): with_texts(each, change, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [with_texts(each, change, depth + 1) for each in value]
    return value
