"""What a checkpoint says about generating with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sagellm.core import CheckpointError, HFConfig
from sagellm.engines.config.shown import shown

_FILE = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """The checkpoint's own sampling settings; None where it has none. Greedy is a temperature of 0."""

    eos_token_ids: frozenset[int] = frozenset()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    @classmethod
    def read(cls, generation_config: Mapping[str, Any], config: HFConfig) -> GenerationDefaults:
        """Read generation_config.json; if it has no end-of-text tokens, they come from config.json.

        There they may be part of the text model's config, as in transformers.
        """
        text = config.get("text_config")
        sources: dict[str, Mapping[str, Any]] = {
            f"{_FILE}: eos_token_id": generation_config,
            "config.json: eos_token_id": config,
            "config.json: text_config.eos_token_id": text if isinstance(text, Mapping) else {},
        }
        found = ((key, source.get("eos_token_id")) for key, source in sources.items())
        key, eos = next((each for each in found if each[1] is not None), ("", None))
        sampled = generation_config.get("do_sample")
        return cls(
            eos_token_ids=_token_ids(key, eos),
            temperature=0.0 if sampled is False else _number(generation_config, "temperature"),
            top_k=_integer(generation_config, "top_k"),
            top_p=_number(generation_config, "top_p"),
            min_p=_number(generation_config, "min_p"),
            repetition_penalty=_number(generation_config, "repetition_penalty"),
            max_new_tokens=_integer(generation_config, "max_new_tokens"),
        )


def _token_ids(key: str, value: Any) -> frozenset[int]:
    ids = value if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    ids = [token for token in ids if token is not None]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise CheckpointError(f"{key} is {shown(value)}; it must be a token id or a list of them")
    return frozenset(ids)


def _number(values: Mapping[str, Any], name: str) -> float | None:
    value = values.get(name)
    if value is None:
        return None
    try:
        return float(_checked(value, name, "number"))
    except OverflowError:
        raise CheckpointError(f"{_FILE}: {name} is beyond any number of a computer") from None


def _integer(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    return int(_checked(value, name, "integer"))


def _checked(value: Any, name: str, kind: Literal["number", "integer"]) -> float:
    wanted = int if kind == "integer" else int | float
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise CheckpointError(f"{_FILE}: {name} is {shown(value)}; it must be a {kind}")
    return value
