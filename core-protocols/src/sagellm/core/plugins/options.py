"""Options of providers: how settings specify them, and how a factory's signature checks them."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from importlib import import_module
from inspect import Parameter, get_annotations, isclass, signature, unwrap
from math import isfinite
from numbers import Integral, Real
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from sagellm.core.errors import ConfigError, PluginError, SageLLMError, nearest
from sagellm.core.plugins.failure import plugin_failure
from sagellm.core.plugins.option_text import options_text, read_value
from sagellm.core.plugins.provider import KINDS

_MAX_SHOWN = 100  # characters of a value in a message
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_BOUNDS = {"ge": (ge, "of at least"), "gt": (gt, "above"), "le": (le, "at most"), "lt": (lt, "below")}
_PHRASES: dict[Any, str] = {
    **{Any: "any", bool: "true or false", int: "a whole number", float: "a number"},
    **{str: "a text", Path: "a path"},
}


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
    type: str  # in words: `a number above 0, or null`
    is_required: bool
    default: Any = None

    def __str__(self) -> str:
        if self.name.startswith("**"):
            return "any other name"
        default = "required" if self.is_required else f"default {self.default!r}"
        return f"{self.name} ({self.type}; {default})"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a number, which is finite then: `Annotated[float, Limits(gt=0)]` as an option's type.

    Other metadata with these names (that of `annotated_types`, pydantic's `Field`) is read alike.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None


class ChosenProvider:
    """The provider that a setting names, imported, with options that are checked before it is made."""

    def __init__(self, kind: str, spec: ProviderSpec, label: str, factory: Callable[..., Any]) -> None:
        self.label = label
        self.factory = factory
        self._kind = KINDS[kind]
        self._spec = spec
        self._subject = f"{kind} {spec.name!r}"
        parameters = _parameters(factory)
        self._parameters = parameters or {}
        self._takes_all = parameters is None or any(
            each.kind is Parameter.VAR_KEYWORD for each in parameters.values()
        )
        self._num_positional = self._kind.num_positional
        self._passed = self._kind.keywords
        self._config = _config_of(self._kind.config)
        self._default_config = self._config and getattr(factory, "default_config", self._config())
        self._hints = _hints(factory, self._parameters)
        if self._config is not None:
            self._hints |= _hints(self._config, _parameters(self._config) or {})

    def takes(self, keyword: str) -> bool:
        """Whether the factory has a parameter of this name."""
        return keyword in self._parameters

    def options(self) -> tuple[ProviderOption, ...]:
        """Return all options of the provider, given or not."""
        named = [each for each in self._parameters.values() if each.kind in _NAMED]
        ours = named[self._num_positional :]
        known = [each for each in ours if not self._is_passed(each.name)]
        if self._config is not None:
            shared = (_parameters(self._config) or {}).values()
            known[:0] = [each.replace(default=getattr(self._default_config, each.name)) for each in shared]
        rest = [each for each in self._parameters.values() if each.kind is Parameter.VAR_KEYWORD]
        known += [each for each in rest if each.name[0] != "_"]
        return tuple(_option(each, self._hints[each.name]) for each in known)

    def described(self) -> str:
        """Return all options with their values, defaults included, without secrets."""
        given = self._spec.options
        if self._kind.may_hold_secrets:
            given = dict.fromkeys(given, "…")
        optional = [each for each in self.options() if not each.is_required and each.name[0] != "*"]
        defaults = {each.name: each.default for each in optional}
        return ", ".join(f"{name}={value}" for name, value in {**defaults, **given}.items())

    def check(self) -> dict[str, Any]:
        """Return the options converted to the signature's types.

        Raises ConfigError for options that are unknown to the factory, missing, or not what their types say.
        """
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
        is_shown = not self._kind.may_hold_secrets
        try:
            return _checked(self._spec.options, self._hints, is_shown=is_shown)
        except ConfigError as error:
            raise ConfigError(f"{self._subject}: {error}") from None

    def make(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the factory with the engine's arguments and the options.

        Keywords that it does not have are left out. Raises ConfigError as `check` does, also where the
        factory refuses an option itself, and PluginError, which names the distribution, if it fails.
        """
        self._num_positional = max(self._num_positional, len(arguments))
        self._passed |= keywords.keys()
        values = self.check()
        if self._config is not None:
            names = {each.name for each in fields(self._config)}
            given = {name: values.pop(name) for name in names & values.keys()}
            arguments = (replace(self._default_config, **given) if given else None,)  # None: its default
        passed = {name: each for name, each in keywords.items() if self._takes_all or self.takes(name)}
        try:
            made = self.factory(*arguments, **passed, **values)
        except ConfigError as error:
            if str(error).partition(" ")[0] not in self._spec.options:
                raise
            raise ConfigError(f"{self._subject}: {error}") from error
        except (KeyboardInterrupt, MemoryError, SageLLMError):
            raise
        except BaseException as error:
            raise plugin_failure(self.label, "its factory", error) from error
        if made is None:
            raise PluginError(f"{self.label}: its factory returned None; it must return the provider")
        return made

    def _is_passed(self, name: str) -> bool:
        return name in self._passed or name.startswith("_")


def check_fields(checked: Any) -> None:
    """Raise ConfigError unless the fields of a dataclass are what their types and limits say, or defaults."""
    given = [
        each for each in fields(checked) if each.init and getattr(checked, each.name) is not each.default
    ]
    namespaces = _namespaces(type(checked))
    hints = {each.name: _resolved(each.type, namespaces.get(each.name, {})) for each in given}
    _checked({each.name: getattr(checked, each.name) for each in given}, hints)


def possible(hint: Any) -> str:
    """Describe what a type accepts: `a whole number from 1 to 1024, or null`."""
    hint, metadata = _bare(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        members = [possible(each) for each in _members(arguments, metadata) if each is not types.NoneType]
        return " or ".join(members) + (", or null" if types.NoneType in arguments else "")
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if isclass(hint) and issubclass(hint, Enum):
        return f"one of {', '.join(str(each.value) for each in hint)}"
    if (isclass(hint) or hint is Any) and hint in _PHRASES:
        return _PHRASES[hint] + _limits_text(_limits(metadata))
    text = hint if isinstance(hint, str) else str(getattr(hint, "__name__", hint) if isclass(hint) else hint)
    return text.replace("typing.", "").replace("collections.abc.", "")


def _limits_text(limits: Mapping[str, Any]) -> str:
    if limits.keys() == {"ge", "le"}:
        return f" from {limits['ge']} to {limits['le']}"
    parts = [f"{words} {limits[name]}" for name, (_, words) in _BOUNDS.items() if name in limits]
    return f" {' and '.join(parts)}" if parts else ""


def _checked(values: Mapping[str, Any], hints: Mapping[str, Any], *, is_shown: bool = True) -> dict[str, Any]:
    """Return the values converted to their types. Raises ConfigError for the first that is of another one."""
    converted = {}
    for name, value in values.items():
        hint = hints.get(name, Any)
        try:
            converted[name] = _converted(value, hint)
        except (TypeError, ValueError, OverflowError):
            text = _shown(value) if is_shown else f"of type {type(value).__name__}"
            raise ConfigError(f"{name} is {text}; it must be {possible(hint)}") from None
    return converted


def _parameters(factory: Callable[..., Any]) -> dict[str, Parameter] | None:
    """Return the parameters of a factory, or None if it has no signature, as C code may."""
    try:
        return dict(signature(factory).parameters)
    except (TypeError, ValueError):
        return None


def _config_of(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(f"sagellm.core.{module}"), name) if target else None


def _option(parameter: Parameter, hint: Any) -> ProviderOption:
    is_rest = parameter.kind is Parameter.VAR_KEYWORD
    has_default = parameter.default is not Parameter.empty
    default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
    return ProviderOption(
        name=f"**{parameter.name}" if is_rest else parameter.name,
        type=possible(hint),
        is_required=not has_default and not is_rest,
        default=default if has_default else None,
    )


def _hints(factory: Callable[..., Any], parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """Return the types of a factory's parameters; types that only type checkers can resolve stay text."""
    function = unwrap(factory.__init__ if isclass(factory) else factory)
    names, namespaces = getattr(function, "__globals__", {}), _namespaces(factory)
    return {
        name: _resolved(each.annotation, namespaces.get(name, {}) | names)
        for name, each in parameters.items()
    }


def _namespaces(factory: Any) -> dict[str, dict[str, Any]]:
    """Return what types of a dataclass's fields may name: what the class imports that declares the field."""
    declaring = reversed(factory.__mro__) if is_dataclass(factory) and isclass(factory) else ()
    modules = [(each, sys.modules.get(each.__module__)) for each in declaring]
    return {
        name: vars(module) for each, module in modules if module is not None for name in get_annotations(each)
    }


def _resolved(annotation: Any, names: dict[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return Any if annotation is Parameter.empty else annotation
    holder = types.SimpleNamespace(__annotations__={"it": annotation})  # so one alone cannot fail the rest
    try:
        return get_type_hints(holder, names, include_extras=True)["it"]
    except Exception:
        return annotation


def _bare(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type without its metadata, and these."""
    return (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())


def _members(arguments: Iterable[Any], metadata: tuple[Any, ...]) -> list[Any]:
    """Return the members of a union, each with the metadata of the union."""
    return [
        each if each is types.NoneType or not metadata else Annotated[each, *metadata] for each in arguments
    ]


def _limits(metadata: Iterable[Any]) -> dict[str, Any]:
    each_alone = [one for each in metadata for one in (each, *getattr(each, "metadata", ()))]
    found = [(name, getattr(each, name, None)) for each in each_alone for name in _BOUNDS]
    return {name: bound for name, bound in found if bound is not None}


def _converted(value: Any, hint: Any) -> Any:
    """Return a value converted to a type, unchecked for other types. Raises TypeError or ValueError."""
    hint, metadata = _bare(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _first_converted(value, _members(arguments, metadata))
    if origin is Literal:
        return _require(value, value in arguments)
    hint = origin or hint
    if hint is types.NoneType:
        return _require(value, value is None)
    if hint in (float, int):
        return _converted_number(value, hint, _limits(metadata))
    if hint in (bool, str):
        return _require(value, isinstance(value, hint))
    if isclass(hint) and issubclass(hint, Enum):
        return value if isinstance(value, hint) else hint(value)
    return _converted_collection(value, hint)


def _converted_number(value: Any, hint: Any, limits: Mapping[str, Any]) -> Any:
    _require(value, isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool))
    is_within = all(_BOUNDS[name][0](value, bound) for name, bound in limits.items())
    return hint(_require(value, is_within and (not limits or isfinite(hint(value)))))


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
        try:
            return {"name": name.strip(), "options": read_value(brace + rest)}
        except ConfigError as error:
            raise ConfigError(f"{error} (in the options of {_shown(name.strip())})") from None
    if brace or "}" in text:
        name = re.split("[{}]", text)[0]  # no more of it: options may be secrets
        raise ConfigError(f"the braces after {_shown(name)} do not match; write NAME{{option=value}}")
    return {"name": text}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
