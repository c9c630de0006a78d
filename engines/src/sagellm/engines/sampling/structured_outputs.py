"""What the text of an output must match."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from sagellm.core.errors import InvalidRequestError, nearest
from sagellm.core.protocols.grammar import StructureKind


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What an output must match, in one of these ways; the names are vLLM's.

    `json` is a JSON schema and `structural_tag` the description of tags and what stands between them, each as
    a text or the object that it describes; kept as a text. `json_object` is any JSON object, `choice` one
    of some texts, `grammar` an EBNF grammar whose start is `root`.

    Raises InvalidRequestError unless exactly one is given, of its type.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Collection[str] | None = None  # kept as a tuple
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if isinstance(value, Mapping) or (name == "json" and isinstance(value, bool)):
                object.__setattr__(self, name, json.dumps(value, ensure_ascii=False, separators=(",", ":")))
        if self.choice is not None:
            if isinstance(self.choice, str) or not all(isinstance(each, str) for each in self.choice):
                raise InvalidRequestError(f"choice is {self.choice!r}; it must be a list of texts")
            if not self.choice:
                raise InvalidRequestError("choice has no text; give one or more")
            object.__setattr__(self, "choice", tuple(self.choice))
        for name in ("json", "regex", "grammar", "structural_tag"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidRequestError(f"{name} is a {type(value).__name__}; it must be a text")
        if not isinstance(self.json_object, bool):
            raise InvalidRequestError(f"json_object is {self.json_object!r}; it must be True or False")
        given = [each.name for each in fields(self) if getattr(self, each.name) not in (None, False, ())]
        if len(given) != 1:
            possible = ", ".join(each.name for each in fields(self))
            found = " and ".join(given) or "none"
            raise InvalidRequestError(f"structured_outputs has {found}; it must have one of {possible}")

    @classmethod
    def of(cls, value: object) -> StructuredOutputs:
        """Return it of a mapping of its fields; one passes through. Raises InvalidRequestError."""
        if isinstance(value, StructuredOutputs):
            return value
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"structured_outputs is a {type(value).__name__}; it must be an object")
        known = [each.name for each in fields(cls)]
        for name in value:
            if name not in known:
                hint = nearest(str(name), known)
                raise InvalidRequestError(
                    f"structured_outputs has no {name!r}; it has {', '.join(known)}.{hint}"
                )
        return cls(**value)

    @property
    def kind(self) -> StructureKind:
        """Which of the fields is given."""
        kinds: tuple[StructureKind, ...] = ("json", "regex", "choice", "grammar", "structural_tag")
        return next((kind for kind in kinds if getattr(self, kind)), "json_object")

    @property
    def text(self) -> str:
        """What is given, as a text; a list of texts as JSON."""
        value = getattr(self, self.kind)
        if self.kind == "choice":
            return json.dumps(value, ensure_ascii=False)
        return "" if self.kind == "json_object" else str(value)
