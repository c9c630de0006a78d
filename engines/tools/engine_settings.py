"""Writes the types of `LLMEngine(...)`'s settings, for editors and type checkers, from the schema.

python engines/tools/engine_settings.py
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any, Literal, get_args, get_origin

from sagellm.core import ProviderSpec
from sagellm.engines.config.explain import kind_of
from sagellm.engines.config.schema import field_of
from sagellm.engines.config.settings import FLAT_NAMES
from sagellm.engines.config.vllm_names import VLLM_NAMES

TARGET = Path(__file__).parents[1] / "src/sagellm/engines/config/engine_settings.py"
HEAD = '''"""What `LLMEngine(…)` takes by keyword, as engines/tools/engine_settings.py writes it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from sagellm.core import ProviderSpec


class EngineSettings(TypedDict, total=False):
    """The settings of an engine by their flat names, except `model`; docs/configuration.md lists them."""

'''
VLLM = """
    # Names of vLLM's that may say what is so here anyway.
"""
PROVIDER = "str | Mapping[str, Any] | ProviderSpec"
TYPES: dict[Any, str] = {
    ProviderSpec: PROVIDER,
    str: "str",
    bool: "bool",
    int: "int",
    float: "float",
    tuple: f"str | Sequence[{PROVIDER}]",
}
OTHERS = {
    "kv_tiers": f"Mapping[str, Any] | {TYPES[tuple]}",
    "tokenizer": "str | os.PathLike[str] | None",
    "kv_save_folder": "str | os.PathLike[str] | None",
    "kv_max_saved": "str | int",
    "trace": "str | os.PathLike[str] | None",
}
"""Settings that validators of the schema take in more forms than their type says."""


def main() -> None:
    """Write the file."""
    TARGET.write_text(source(), encoding="utf-8")


def source() -> str:
    """Return what the file has to hold."""
    rows = "".join(
        f"    {name}: {type_of(name, key)}\n{described(key)}"
        for name, key in FLAT_NAMES.items()
        if name != "model"
    )
    vllm = "".join(f"    {name}: {type_of_values(each.accepts)}\n" for name, each in VLLM_NAMES.items())
    return HEAD + rows + VLLM + vllm


def described(key: str) -> str:
    """Write what a setting means, as editors show it, in lines of the repository's length."""
    text = f'"""{field_of(key).description}"""'
    return fill(text, width=110, initial_indent="    ", subsequent_indent="    ") + "\n"


def type_of(name: str, key: str) -> str:
    """Write the type of a setting."""
    if name in OTHERS:
        return OTHERS[name]
    kind, is_optional = kind_of(field_of(key))
    origin = get_origin(kind)
    text = type_of_values(get_args(kind)) if origin is Literal else TYPES[origin or kind]
    return f"{text} | None" if is_optional else text


def type_of_values(values: tuple[object, ...]) -> str:
    """Write the type that has these values and no others."""
    if values == (None,):
        return "None"
    if set(map(type, values)) == {bool} and len(values) == 2:
        return "bool"
    return f"Literal[{', '.join(map(_quoted, values))}]"


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    main()
