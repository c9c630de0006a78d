"""Counts the kit's calls of each method of a protocol, to report those that it never called."""

from __future__ import annotations

import functools
from abc import ABC
from collections.abc import Callable
from types import FunctionType
from typing import Any, Generic

_NULLS = "sagellm.core.protocols"


class Exercised:
    """Counts calls of a protocol's methods on the objects that a provider makes.

    `watch` wraps the methods where the provider's class defines them, until `stop` restores the originals.
    Inherited defaults of the protocol are not the provider's, and methods of extension types cannot
    be wrapped; neither is counted. `on_call` receives the name of each method before it runs.
    """

    def __init__(self, protocol: type, on_call: Callable[[str], None] = lambda _: None) -> None:
        self._on_call = on_call
        self.num_calls: dict[str, int] = {}
        self._names = protocol_methods(protocol)
        self._protocol = protocol
        self._wrapped: dict[tuple[type, str], Any] = {}

    def watch(self, made: object) -> None:
        """Count the calls on an object and on all others of its class."""
        for name, owner in own_methods(type(made), self._protocol).items():
            if (owner, name) in self._wrapped:
                continue
            original = vars(owner)[name]
            try:
                setattr(owner, name, self._counting(name, original))
            except TypeError:  # an extension type
                continue
            self._wrapped[owner, name] = original

    def stop(self) -> None:
        """Restore the provider's methods."""
        for (owner, name), original in self._wrapped.items():
            setattr(owner, name, original)
        self._wrapped.clear()

    def _counting(self, name: str, original: Any) -> Any:
        if isinstance(original, property):
            assert original.fget is not None, "a protocol's property can be read"
            return property(self._wrap(name, original.fget), original.fset, original.fdel, original.__doc__)
        if isinstance(original, staticmethod | classmethod):
            return type(original)(self._wrap(name, original.__func__))
        return self._wrap(name, original)

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*arguments: Any, **options: Any) -> Any:
            self.num_calls[name] = self.num_calls.get(name, 0) + 1
            self._on_call(name)
            return function(*arguments, **options)

        return counted


def protocol_methods(protocol: type) -> list[str]:
    """Return the public methods and properties of a protocol."""
    return sorted(
        {
            name
            for owner in protocol.__mro__
            if owner not in (object, ABC, Generic)
            for name, value in vars(owner).items()
            if not name.startswith("_") and isinstance(value, FunctionType | property)
        }
    )


def own_methods(provided: type, protocol: type) -> dict[str, type]:
    """Return the methods of a protocol that a class implements, each with the class that defines it.

    Defaults of the protocol and core's null implementations do not count.
    """
    found = {}
    for name in protocol_methods(protocol):
        owner = next((each for each in provided.__mro__ if name in vars(each)), protocol)
        if owner in protocol.__mro__ or owner.__module__.startswith(_NULLS):
            continue
        value = vars(owner)[name]
        if isinstance(value, FunctionType | property | staticmethod | classmethod):
            found[name] = owner
    return found
