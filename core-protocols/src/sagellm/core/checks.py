"""Checks of objects passed to a constructor, so that a wrong one fails there and not at its first use."""

from __future__ import annotations

from sagellm.core.errors import ConfigError


def require_object(name: str, value: object, protocol: type, kind: str) -> None:
    """Raise ConfigError unless `value` has the methods of a protocol; the error says how to make one.

    `kind` is the kind of provider: the error for a name in place of an object shows how to resolve it.
    Any object with the methods passes; a class does not. Costs a few microseconds.
    """
    abstract: frozenset[str] = getattr(protocol, "__abstractmethods__", frozenset())
    lacking = sorted(method for method in abstract if not hasattr(value, method))
    if isinstance(value, type):
        found, how = f"the class {value.__name__}", f"make one: {value.__name__}(…)"
    elif isinstance(value, str):
        found, how = repr(value), f"by name: PluginRegistry.load().resolve({kind!r}, {value!r})(…)"
    elif lacking:
        found, how = f"of type {type(value).__name__}", f"it lacks {', '.join(lacking)}"
    else:
        return
    raise ConfigError(
        f"{name} is {found}; it must be an object with the methods of {protocol.__name__}; {how}"
    )
