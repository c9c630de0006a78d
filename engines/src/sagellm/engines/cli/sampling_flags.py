"""One flag for each field of `SamplingParams` that a person at a terminal may want."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import typer

from sagellm.core import ConfigError
from sagellm.engines.cli.flags import command_help, make_flag, switch
from sagellm.engines.sampling.params import SamplingParams

DEFAULT_MAX_TOKENS = 256

# name → type, help; a list is a flag that may be repeated
_FIELDS: dict[str, tuple[Any, str]] = {
    "max_tokens": (int, "most tokens to generate"),
    "min_tokens": (int, "fewest tokens to generate"),
    "temperature": (float, "randomness; 0 always takes the most likely token"),
    "top_p": (float, "keep the most likely tokens that together have this probability"),
    "top_k": (int, "keep this many of the most likely tokens; 0 keeps all"),
    "min_p": (float, "keep tokens at least this likely in comparison with the most likely one"),
    "seed": (int, "seed; the same seed gives the same text"),
    "n": (int, "continuations of each prompt"),
    "stop": (list[str], "text that ends the output; may be given more than once"),
    "stop_token_ids": (list[int], "token that ends the output; may be given more than once"),
    "bad_words": (list[str], "word that must not be generated; may be given more than once"),
    "allowed_token_ids": (
        list[int],
        "token that may be generated, no other may; may be given more than once",
    ),
    "presence_penalty": (float, "make tokens that occur in the output less likely"),
    "frequency_penalty": (float, "make tokens less likely the more often they occur in the output"),
    "repetition_penalty": (float, "divide the chance of tokens that occur in prompt or output"),
    "extra_args": (dict, "arguments of logits processors, as in '{no_repeat_ngram_size: 3}'"),
    "logprobs": (int, "report log-probabilities of this many tokens (--json shows them)"),
    "prompt_logprobs": (int, "the same of the tokens of the prompt (--json shows them)"),
    "ignore_eos": (bool, "go on after the end of the text"),
    "skip_special_tokens": (bool, "leave special tokens out of the text"),
    "include_stop_str_in_output": (bool, "keep the stop text in the output"),
}
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)} | {
    "max_tokens": DEFAULT_MAX_TOKENS
}

_OF_CHECKPOINT = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}

_GROUP = "Sampling"
_METAVARS = {int: "INT", list[int]: "INT", float: "FLOAT", dict: "MAPPING"}


def _option(name: str, kind: Any, help_text: str) -> Any:
    if kind is bool:
        return switch(name, help_text, group=_GROUP)
    flags = ("-n", "--n") if name == "n" else (f"--{name.replace('_', '-')}",)
    return typer.Option(
        *flags,
        help=help_text,
        metavar=_METAVARS.get(kind, "TEXT"),
        show_default=False,
        rich_help_panel=_GROUP,
    )


def _default(name: str) -> object:
    """What holds without the flag: of some fields a checkpoint says what it wants."""
    default = _DEFAULTS[name]
    return f"the checkpoint's, or {default}" if name in _OF_CHECKPOINT else default


SAMPLING_FLAGS = tuple(
    make_flag(name, str if kind is dict else kind, _option(name, kind, command_help(text, _default(name))))
    for name, (kind, text) in _FIELDS.items()
)
SAMPLING_NAMES = frozenset(_FIELDS)


def read_mapping(name: str, text: str) -> dict[str, Any]:
    """Read the text of a flag that takes a mapping, which is YAML. Raises ConfigError."""
    from sagellm.engines.config.bounded_yaml import YAMLSyntaxError, parse_yaml
    from sagellm.engines.config.shown import shown

    flag = f"--{name.replace('_', '-')}"
    try:
        value = parse_yaml(text)
    except YAMLSyntaxError:
        value = None
    except ConfigError as error:
        raise ConfigError(f"{flag} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} is {shown(text)}; it must be a mapping, as in '{{name: 3}}'")
    return value
