"""What the text of an answer must match: OpenAI's `response_format`, and vLLM's names for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sagellm.core import InvalidRequestError, nearest
from sagellm.engines.sampling.structured_outputs import StructuredOutputs
from sagellm.server.http.errors import invalid

if TYPE_CHECKING:
    from sagellm.server.http.body_schema import SamplingBody

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_SCHEMA_KEYS = ("name", "description", "schema", "strict")


def structured_outputs_of(body: SamplingBody) -> StructuredOutputs | None:
    """Return what a body says that the answer must match. Raises APIError."""
    found: dict[str, Any] = {}
    if body.structured_outputs is not None:
        found["structured_outputs"] = body.structured_outputs
    for name, kind in _GUIDED.items():
        if (value := getattr(body, name)) is not None:
            found[name] = {kind: value}
    if body.response_format is not None and (asked := _of_format(body.response_format)) is not None:
        found["response_format"] = asked
    if not found:
        return None
    name, value = next(iter(found.items()))
    if len(found) > 1:
        raise invalid(name, f"{' and '.join(found)} say what the answer must match; give one of them")
    try:
        return StructuredOutputs.of(value)
    except InvalidRequestError as error:
        told = str(error)
        raise invalid(name, told if told.startswith(name) else f"{name}: {told}") from None


def structure_param(body: SamplingBody) -> str:
    """Return the parameter that says what answers must match: `tools` if no other does."""
    names = ("structured_outputs", *_GUIDED, "response_format")
    return next((name for name in names if getattr(body, name) is not None), "tools")


def _of_format(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a `response_format` as vLLM names it, None for one that allows everything."""
    kind = given.get("type")
    if kind not in _TYPES:
        told = nearest(kind, _TYPES) if isinstance(kind, str) else ""
        raise invalid(
            "response_format.type",
            f"response_format.type is {kind!r}; it must be one of {', '.join(_TYPES)}.{told}",
        )
    if kind == "structural_tag":
        return {"structural_tag": given}
    _refuse_others("response_format", given, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    named = given.get("json_schema")
    if not isinstance(named, dict) or not isinstance(named.get("schema"), dict | bool):
        raise invalid(
            "response_format.json_schema",
            "response_format.json_schema: it must be an object with a name and a schema",
        )
    _refuse_others("response_format.json_schema", named, _SCHEMA_KEYS)
    return {"json": named["schema"]}


def _refuse_others(where: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise invalid(
                f"{where}.{name[:64]}",
                f"{where} has no {name[:64]!r}; it has {', '.join(known)}.{nearest(name[:64], known)}",
                code="unknown_parameter",
            )
