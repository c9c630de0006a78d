"""One flag for each field of `SamplingParams` that a person at a terminal may want."""

from __future__ import annotations

from typing import Any

import typer

from sagellm.engines.cli.flags import command_help, make_flag, switch

DEFAULT_MAX_TOKENS = 128

# name → type, default (None: not shown), help; a list is a flag that may be repeated
_FIELDS: dict[str, tuple[Any, object, str]] = {
    "max_tokens": (int, DEFAULT_MAX_TOKENS, "most tokens to generate"),
    "min_tokens": (int, 0, "fewest tokens to generate"),
    "temperature": (float, 1.0, "randomness; 0 always takes the most likely token"),
    "top_p": (float, 1.0, "keep the most likely tokens that together have this probability"),
    "top_k": (int, 0, "keep this many of the most likely tokens; 0 keeps all"),
    "min_p": (float, 0.0, "keep tokens at least this likely in comparison with the most likely one"),
    "seed": (int, None, "seed; the same seed gives the same text"),
    "n": (int, 1, "continuations of each prompt"),
    "stop": (list[str], None, "text that ends the output; may be given more than once"),
    "stop_token_ids": (list[int], None, "token that ends the output; may be given more than once"),
    "presence_penalty": (float, 0.0, "make tokens that occur in the output less likely"),
    "frequency_penalty": (float, 0.0, "make tokens less likely the more often they occur in the output"),
    "repetition_penalty": (float, 1.0, "divide the chance of tokens that occur in prompt or output"),
    "logprobs": (int, None, "report log-probabilities of this many tokens (--json shows them)"),
    "ignore_eos": (bool, False, "go on after the end of the text"),
    "skip_special_tokens": (bool, True, "leave special tokens out of the text"),
    "include_stop_str_in_output": (bool, False, "keep the stop text in the output"),
}


_METAVARS = {int: "INT", list[int]: "INT", float: "FLOAT"}


def _option(name: str, kind: Any, help_text: str) -> Any:
    if kind is bool:
        return switch(name, help_text)
    flags = ("-n", "--n") if name == "n" else (f"--{name.replace('_', '-')}",)
    return typer.Option(*flags, help=help_text, metavar=_METAVARS.get(kind, "TEXT"), show_default=False)


SAMPLING_FLAGS = tuple(
    make_flag(name, kind, _option(name, kind, command_help(text, default)))
    for name, (kind, default, text) in _FIELDS.items()
)
SAMPLING_NAMES = frozenset(_FIELDS)
