"""API keys with their options: `KEY name=red weight=2 trusted max_requests=8 max_tokens=100000`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from sagellm.core import ConfigError
from sagellm.engines.requests.request_checks import MAX_WEIGHT, MIN_WEIGHT

MAX_QUOTA = 1 << 40
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKey:
    """A key and its options, as the operator wrote them. None: not given."""

    key: str = field(repr=False)
    name: str | None = None  # of the tenant, in logs and metrics
    weight: float = 1.0  # share of the engine beside others
    is_trusted: bool = False  # its priorities hold across tenants, and it reads /metrics
    max_requests: int | None = None  # live sequences
    max_tokens: int | None = None  # of live requests, prompts and the most that they may generate

    @classmethod
    def parse(cls, text: str, where: str) -> Self:
        """Read a key and its options, separated by spaces.

        Raises ConfigError that begins with `where` and repeats nothing of the text, any word of which
        might be part of a secret.
        """
        key, *words = text.split()
        if key == "trusted" or key.partition("=")[0] in _OPTIONS:
            raise ConfigError(f"{where} begins with an option; the key comes first")
        given: dict[str, Any] = {}
        for number, word in enumerate(words, 2):
            name, equals, value = word.partition("=")
            option = _OPTIONS.get(name) if equals else _TRUSTED if name == "trusted" else None
            if option is None:
                raise ConfigError(
                    f"{where}: word {number} is not an option; after the key, which has no spaces, there may "
                    f"be {', '.join(f'{each}=' for each in _OPTIONS)} and trusted"
                )
            if option.field in given:
                raise ConfigError(f"{where} has the option {name} twice; give it once")
            try:
                given[option.field] = option.read(value)
            except ValueError:
                raise ConfigError(f"{where}: {name} must be {option.possible}") from None
        return cls(key=key, **given)


class _Option(NamedTuple):
    field: str
    read: Callable[[str], Any]  # raises ValueError
    possible: str


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError
    return text


def _weight(text: str) -> float:
    weight = float(text)
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError
    return weight


def _quota(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 13 or not 1 <= int(text) <= MAX_QUOTA:
        raise ValueError
    return int(text)


_OPTIONS: Mapping[str, _Option] = {
    "name": _Option("name", _name, "1 to 64 letters, digits, '.', '_' and '-', the first a letter or digit"),
    "weight": _Option("weight", _weight, f"a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"),
    "max_requests": _Option("max_requests", _quota, f"a whole number from 1 to {MAX_QUOTA}"),
    "max_tokens": _Option("max_tokens", _quota, f"a whole number from 1 to {MAX_QUOTA}"),
}
_TRUSTED = _Option("is_trusted", lambda _: True, "")


def parse_keys(texts: Iterable[str]) -> list[ApiKey]:
    """Read the entries of `server.api_keys`; equal ones count once.

    Raises ConfigError, naming entries by position, for an invalid one, for a key with two different sets of
    options, and for a name that two keys have.
    """
    keys: dict[str, tuple[ApiKey, int]] = {}
    names: dict[str, int] = {}
    for position, text in enumerate(texts, 1):
        where = f"entry {position} of server.api_keys, with those of server.api_key_file"
        if not text.strip():
            raise ConfigError(f"{where} is empty")
        key = ApiKey.parse(text, where)
        known, first = keys.setdefault(key.key, (key, position))
        if known != key:
            raise ConfigError(f"{where} is the key of entry {first} with other options; give it once")
        if key.name is not None and names.setdefault(key.name, first) != first:
            raise ConfigError(
                f"{where} has the name of entry {names[key.name]}; give each key a name of its own"
            )
    return [key for key, _ in keys.values()]
