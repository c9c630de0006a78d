"""Options of providers: how settings specify them, and how they are checked against a factory."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from importlib import import_module
from inspect import Parameter, isclass, signature, unwrap
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sagellm.core.errors import ConfigError, PluginError, nearest
from sagellm.core.plugins.failure import call_plugin
from sagellm.core.plugins.option_text import options_text, read_value
from sagellm.core.plugins.provider import KINDS

_MAX_SHOWN = 100  # characters of a value in a message
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class ProviderSpec:
    """The provider that a setting names, and options for its factory."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, value: object) -> ProviderSpec:
        """Read `name`, `name{option=value}` or a mapping `{name: …, options: {…}}`, also as text.

        Raises ConfigError, whose subject is "it".
        """
        if isinstance(value, ProviderSpec):
            return value
        given: Any = _read(value.strip()) if isinstance(value, str) else value
        if not isinstance(given, Mapping) or "name" not in given or not given.keys() <= {"name", "options"}:
            is_mapping = isinstance(given, Mapping)  # whose values may be secrets
            what = f"has {', '.join(map(str, given))}" if is_mapping else f"is {_shown(value)}"
            raise ConfigError(f"it {what}; it must be a name, or a mapping {{name: …, options: {{…}}}}")
        name, options = given["name"], given.get("options") or {}
        if not isinstance(name, str) or not name:
            raise ConfigError(f"its name is {_shown(name)}; it must be a text that is not empty")
        if not isinstance(options, Mapping) or not all(isinstance(each, str) for each in options):
            raise ConfigError(f"the options of {name!r} must be a mapping of names to values")
        return cls(name, dict(options))

    @property
    def text(self) -> str:
        """`name` or `name{option=value, …}`, which `of` reads."""
        return self.name + (options_text(self.options) if self.options else "")

    def plain(self) -> str | dict[str, Any]:
        """Return the shortest form that `of` reads."""
        return {"name": self.name, "options": dict(self.options)} if self.options else self.name


@dataclass(frozen=True, kw_only=True)
class ProviderOption:
    """One option of a provider. A name that begins with `**` stands for any name."""

    name: str
    type: str  # as the signature writes it
    is_required: bool
    default: Any = None

    def __str__(self) -> str:
        if self.name.startswith("**"):
            return "any other name"
        default = "required" if self.is_required else f"default {self.default!r}"
        return f"{self.name} ({self.type}, {default})"


class ChosenProvider:
    """The provider that a setting names, imported, with options that are checked before it is made."""

    def __init__(self, kind: str, spec: ProviderSpec, label: str, factory: Callable[..., Any]) -> None:
        self.label = label
        self.factory = factory
        self._kind = KINDS[kind]
        self._spec = spec
        self._subject = f"{kind} {spec.name!r}"
        self._parameters = _parameters(factory) or {}
        self._takes_all = _parameters(factory) is None or any(
            each.kind is Parameter.VAR_KEYWORD for each in self._parameters.values()
        )
        self._num_positional = self._kind.num_positional
        self._passed = self._kind.keywords
        self._config = _config_of(self._kind.config)
        self._default_config = self._config and getattr(factory, "default_config", self._config())

    def takes(self, keyword: str) -> bool:
        """Whether the factory has a parameter of this name."""
        return keyword in self._parameters

    def options(self) -> tuple[ProviderOption, ...]:
        """Return all options of the provider, given or not."""
        named = [each for each in self._parameters.values() if each.kind in _NAMED]
        ours = named[self._num_positional :]
        known = [_option(each, self.factory) for each in ours if not self._is_passed(each.name)]
        if self._config is not None:
            shared = (_parameters(self._config) or {}).values()
            own = [each.replace(default=getattr(self._default_config, each.name)) for each in shared]
            known = [_option(each, self._config) for each in own] + known
        rest = [each for each in self._parameters.values() if each.kind is Parameter.VAR_KEYWORD]
        return tuple(known + [_option(each, self.factory) for each in rest if each.name[0] != "_"])

    def described(self) -> str:
        """Return all options with their values, defaults included, without secrets."""
        given = self._spec.options
        if self._kind.may_hold_secrets:
            given = dict.fromkeys(given, "…")
        names = [each.name for each in self.options() if not each.is_required and each.name[0] != "*"]
        defaults = {each.name: each.default for each in self.options() if each.name in names}
        return ", ".join(f"{name}={value}" for name, value in {**defaults, **given}.items())

    def check(self) -> None:
        """Raise ConfigError for options that are unknown to the factory, missing, or of the wrong type."""
        options = self.options()
        takes_any = any(each.name.startswith("**") for each in options)
        names = [each.name for each in options if not each.name.startswith("**")]
        for name in self._spec.options:
            if name not in names and (not takes_any or self._is_passed(name)):
                takes = f"it takes {', '.join(map(str, options))}" if options else "it takes no options"
                raise ConfigError(f"{self._subject} has no option {name!r}; {takes}.{nearest(name, names)}")
        missing = [each for each in options if each.is_required and each.name not in self._spec.options]
        if missing:
            raise ConfigError(f"{self._subject} needs the option {', '.join(map(str, missing))}")
        self._values()

    def make(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the factory with the engine's arguments and the options.

        Keywords that it does not have are left out. Raises ConfigError as `check` does, and PluginError,
        which names the distribution, if the factory fails.
        """
        self._num_positional = max(self._num_positional, len(arguments))
        self._passed |= keywords.keys()
        self.check()
        values = self._values()
        if self._config is not None:
            names = {each.name for each in fields(self._config)}
            given = {name: values.pop(name) for name in names & values.keys()}
            arguments = (replace(self._default_config, **given) if given else None,)  # None: its default
        passed = {name: each for name, each in keywords.items() if self._takes_all or self.takes(name)}
        made = call_plugin(self.label, "its factory", self.factory, *arguments, **passed, **values)
        if made is None:
            raise PluginError(f"{self.label}: its factory returned None; it must return the provider")
        return made

    def _is_passed(self, name: str) -> bool:
        return name in self._passed or name.startswith("_")

    def _values(self) -> dict[str, Any]:
        """Return the options converted to the signature's types."""
        config = {} if self._config is None else _hints(self._config)
        hints = _hints(self.factory) | config
        values = {}
        for name, value in self._spec.options.items():
            try:
                values[name] = _converted(value, hints.get(name, Any))
            except (TypeError, ValueError):
                text = f"of type {type(value).__name__}" if self._kind.may_hold_secrets else _shown(value)
                (option,) = (each for each in self.options() if each.name == name)
                raise ConfigError(f"{self._subject}: {name} is {text}; it must be {option.type}") from None
        return values


def _parameters(factory: Callable[..., Any]) -> dict[str, Parameter] | None:
    """Return the parameters of a factory, or None if it has no signature, as C code may."""
    try:
        return dict(signature(factory).parameters)
    except (TypeError, ValueError):
        return None


def _config_of(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(f"sagellm.core.{module}"), name) if target else None


def _option(parameter: Parameter, factory: Callable[..., Any]) -> ProviderOption:
    is_rest, hint = parameter.kind is Parameter.VAR_KEYWORD, _hints(factory).get(parameter.name, Any)
    has_default = parameter.default is not Parameter.empty
    default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
    return ProviderOption(
        name=f"**{parameter.name}" if is_rest else parameter.name,
        type=_type_name(hint),
        is_required=not has_default and not is_rest,
        default=default if has_default else None,
    )


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a factory's parameters; types that only type checkers can resolve stay text."""
    function = unwrap(factory.__init__ if isclass(factory) else factory)
    names = getattr(function, "__globals__", {})
    return {name: _resolved(each.annotation, names) for name, each in (_parameters(factory) or {}).items()}


def _resolved(annotation: Any, names: dict[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return Any if annotation is Parameter.empty else annotation
    try:
        holder = types.SimpleNamespace(
            __annotations__={"it": annotation}
        )  # so one alone cannot fail the rest
        return get_type_hints(holder, names)["it"]
    except Exception:
        return annotation


def _type_name(hint: Any) -> str:
    if hint is Any:
        return "any"
    if isclass(hint) and issubclass(hint, Enum):
        return " | ".join(repr(each.value) for each in hint)
    text = hint if isinstance(hint, str) else str(getattr(hint, "__name__", hint) if isclass(hint) else hint)
    return text.replace("typing.", "").replace("collections.abc.", "").replace("pathlib.", "")


def _converted(value: Any, hint: Any) -> Any:
    """Return a value converted to a type, unchecked for other types. Raises TypeError or ValueError."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _first_converted(value, arguments)
    if origin is Literal:
        return _require(value, value in arguments)
    hint = origin or hint
    if hint is None or hint is types.NoneType:
        return _require(value, value is None)
    if hint is float:
        return float(_require(value, isinstance(value, int | float) and not isinstance(value, bool)))
    if hint is int:
        return _require(value, isinstance(value, int) and not isinstance(value, bool))
    if hint in (bool, str):
        return _require(value, isinstance(value, hint))
    if isclass(hint) and issubclass(hint, Enum):
        return value if isinstance(value, hint) else hint(value)
    return _converted_collection(value, hint)


def _converted_collection(value: Any, hint: Any) -> Any:
    if hint is Path:
        return Path(value)
    if hint in (list, tuple, Sequence, Iterable):
        _require(value, isinstance(value, list | tuple))
        return value if hint in (Sequence, Iterable) else hint(value)
    if hint in (dict, Mapping):
        return _require(value, isinstance(value, Mapping))
    return value


def _first_converted(value: Any, hints: Iterable[Any]) -> Any:
    for hint in hints:
        try:
            return _converted(value, hint)
        except (TypeError, ValueError):
            continue
    raise TypeError


def _require(value: Any, is_right: bool) -> Any:  # noqa: FBT001
    if not is_right:
        raise TypeError
    return value


def _read(text: str) -> Any:
    if text.startswith("{"):
        return read_value(text)
    name, brace, rest = text.partition("{")
    if brace and text.endswith("}") and not set(name) & set("[]}"):
        return {"name": name.strip(), "options": read_value(brace + rest)}
    if brace or "}" in text:
        name = re.split("[{}]", text)[0]  # no more of it: options may be secrets
        raise ConfigError(f"the braces after {_shown(name)} do not match; write NAME{{option=value}}")
    return {"name": text}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
