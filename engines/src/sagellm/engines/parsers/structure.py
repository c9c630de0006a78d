"""Structural tags whose texts are special tokens of a vocabulary, which no text can spell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sagellm.engines.sampling.structured_outputs import StructuredOutputs


def with_tokens(structure: Mapping[str, Any], token_ids: Mapping[str, int]) -> dict[str, Any]:
    """Return a structural tag in which tags begin or end with a token instead of one of these texts."""
    return {**structure, "format": _bound(structure["format"], token_ids)}


def after(
    structure: Mapping[str, Any],
    tags: tuple[str, str],
    token_ids: Mapping[str, int],
    *,
    is_optional: bool,
) -> dict[str, Any]:
    """Return a structural tag that comes after reasoning, which stands between two tags.

    The first tag is empty if the reasoning has begun. With `is_optional`, an answer may do without.
    """
    thinking = {"type": "tag", "begin": tags[0], "content": {"type": "any_text"}, "end": tags[1]}
    space = {"type": "regex", "pattern": r"\n{0,2}"}
    form = {"type": "sequence", "elements": [_bound(thinking, token_ids), space, structure["format"]]}
    if is_optional and tags[0]:
        form = {"type": "or", "elements": [form, structure["format"]]}
    return {**structure, "format": form}


def after_reasoning(
    asked: StructuredOutputs, tags: tuple[str, str], token_ids: Mapping[str, int]
) -> StructuredOutputs:
    """Return a structural tag of what is asked for and the reasoning that may come before it.

    What describes no format stays as it is: it is refused when it is compiled.
    """
    form = _format_of(asked)
    if form is None:
        return asked
    structure = {"type": "structural_tag", "format": form}
    return StructuredOutputs(structural_tag=after(structure, tags, token_ids, is_optional=True))


def _format_of(asked: StructuredOutputs) -> dict[str, Any] | None:
    """Return what is asked for as a format of structural tags, None if it cannot be read."""
    match asked.kind:
        case "regex":
            return {"type": "regex", "pattern": asked.text}
        case "grammar":
            return {"type": "grammar", "grammar": asked.text}
        case "choice":
            texts = [{"type": "const_string", "value": each} for each in asked.choice or ()]
            return {"type": "or", "elements": texts} if all(asked.choice or ()) else None
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
    try:
        given = json.loads(asked.text)
    except (ValueError, RecursionError):
        return None
    if asked.kind == "json":
        return {"type": "json_schema", "json_schema": given} if isinstance(given, dict | bool) else None
    form = given.get("format") if isinstance(given, dict) else None
    return form if isinstance(form, dict) else None


def _bound(form: Any, token_ids: Mapping[str, int]) -> dict[str, Any]:
    """Return a format with tokens; those that have no tags are as they were."""
    if form["type"] == "tag":
        return _bound_tag(form, token_ids)
    if form["type"] == "tags_with_separator":
        return {**form, "tags": [_bound(tag, token_ids) for tag in form["tags"]]}
    if form["type"] == "triggered_tags":
        tags = [_bound(tag, token_ids) for tag in form["tags"]]
        triggers = [token_ids.get(trigger) for trigger in form["triggers"]]
        if None in triggers:
            return dict(form)
        rest = {key: value for key, value in form.items() if key not in ("type", "triggers", "tags")}
        return {"type": "token_triggered_tags", "trigger_tokens": triggers, "tags": tags, **rest}
    return dict(form)


def _bound_tag(tag: Mapping[str, Any], token_ids: Mapping[str, int]) -> dict[str, Any]:
    begin, end = tag["begin"], tag["end"]
    first = next((text for text in token_ids if begin.startswith(text)), None)
    last = next((text for text in token_ids if end.endswith(text)), None)
    content = [_bound(tag["content"], token_ids)]
    if first is not None and begin != first:
        content.insert(0, {"type": "const_string", "value": begin.removeprefix(first)})
    if last is not None and end != last:
        content.append({"type": "const_string", "value": end.removesuffix(last)})
    whole = content[0] if len(content) == 1 else {"type": "sequence", "elements": content}
    return {
        "type": "tag",
        "begin": begin if first is None else {"type": "token", "token": token_ids[first]},
        "content": whole,
        "end": end if last is None else {"type": "token", "token": token_ids[last]},
    }
