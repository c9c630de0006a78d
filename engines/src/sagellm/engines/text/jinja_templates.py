"""Renders chat templates in the environment that they are written for, which transformers defines.

A template comes with the checkpoint and is not trusted: it runs in Jinja's immutable sandbox, sees plain data
only, and can store no names that begin with an underscore.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def render_chat(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Return what a template makes of messages. Raises whatever the template raises.

    Entries of a message that are None are left out, since many templates would write "None".
    """
    if not messages:
        raise ValueError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    present = [{key: value for key, value in each.items() if value is not None} for each in messages]
    return _compiled(source).render(
        messages=_plain(present),
        tools=None if tools is None else _plain(list(tools)),
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **_plain(variables),
    )


def _plain(value: Any) -> Any:
    """Rebuild a value of JSON's types; anything else has methods that the sandbox does not know.

    It becomes a text that names its type.
    """
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        each_plain = [_plain(each) for each in value]
        return each_plain if isinstance(value, list) else tuple(each_plain)
    for kind in (bool, str, int, float):
        if isinstance(value, kind):
            return value if type(value) is kind else _base_value(kind, value)
    return value if value is None else f"<{type(value).__name__}>"


def _base_value(kind: type[str] | type[int] | type[float], value: Any) -> Any:
    """Return the value of a subclass, such as an enum's, without its methods."""
    if kind is str:
        return str.__str__(value)
    return int.__int__(value) if kind is int else float.__float__(value)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks for training what the model wrote; adds no text."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        """Write the block's body as it is, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Macro) -> str:
        return str(caller())


class _Dict:
    """The global `dict`: the constructor and `fromkeys`, without the class behind them."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """The global `namespace`, without names that begin with an underscore: they lead to internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that an attribute may be called `self`
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace of a chat template cannot have the attribute {name!r}; rename it")


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass them by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Write JSON as models have seen it; Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
