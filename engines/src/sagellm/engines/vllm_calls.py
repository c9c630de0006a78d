"""Arguments and methods of vLLM's LLM that do not exist here: what is accepted, and what there is instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, get_args, get_type_hints

from sagellm.core import InvalidRequestError, nearest
from sagellm.engines.config.shown import shown
from sagellm.engines.config.vllm_names import VLLMSetting


class GenerateHabits(TypedDict, total=False):
    """Arguments of vLLM's `generate`, with the values that change nothing here."""

    lora_request: Literal[None]
    priority: Literal[None]
    prompt_adapter_request: Literal[None]
    tokenization_kwargs: Literal[None]


class ChatHabits(GenerateHabits, total=False):
    """Those of vLLM's `chat`."""

    chat_template: Literal[None]
    chat_template_content_format: Literal["auto", "string"]
    continue_final_message: Literal[False]
    mm_processor_kwargs: Literal[None]


_INSTEAD = {
    "chat_template": "the model's own template is used",
    "chat_template_content_format": "content is a text, or parts of text",
    "continue_final_message": "render the messages with get_tokenizer(), and give the text to generate",
    "lora_request": "adapters are not supported",
    "mm_processor_kwargs": "the models here read text",
    "priority": "add_request(prompt, priority=…) takes one for each request",
    "prompt_adapter_request": "adapters are not supported",
    "tokenization_kwargs": "tokenize with get_tokenizer(), and give the token ids",
}
CALL_ARGUMENTS: Mapping[str, VLLMSetting] = {
    name: VLLMSetting(get_args(hint), _INSTEAD[name]) for name, hint in get_type_hints(ChatHabits).items()
}
"""Name → the values that are accepted, and what to do instead of others."""

MISSING_METHODS: Mapping[str, str] = {
    **dict.fromkeys(("classify", "embed", "encode", "reward", "score"), "the models here generate text"),
    "apply_model": "the engine's model is not for calling",
    "collective_rpc": "there are no worker processes",
    "get_metrics": "call metrics()",
    "is_sleeping": "an engine is in use until it is closed",
    "llm_engine": "the engine is this object itself",
    "reset_mm_cache": "the models here read text",
    "set_tokenizer": "give the setting tokenizer",
    "sleep": "call close(), which frees its memory",
    "start_profile": "use a profiler on the process; metrics() has counters and times",
    "stop_profile": "use a profiler on the process; metrics() has counters and times",
    "wake_up": "make a new engine",
}
"""Methods and attributes of vLLM's LLM that an engine lacks, and what to do instead."""


def check_habits(function: str, given: Mapping[str, Any], known: type[GenerateHabits]) -> None:
    """Raise InvalidRequestError for an argument with a value that asks for what is missing.

    Raises TypeError for an argument that vLLM has not either, as Python does.
    """
    names = get_type_hints(known)
    for name, value in given.items():
        if name not in names:
            raise TypeError(
                f"{function}() has no argument {name!r}.{nearest(name, [*names, 'params', 'progress'])}"
            )
        accepted = CALL_ARGUMENTS[name]
        if not accepted.accepts_value(value):
            one_of = " or ".join(map(repr, accepted.accepts))
            raise InvalidRequestError(
                f"{name} is {shown(value)}; it can only be {one_of} here: {accepted.instead}"
            )


def missing_attribute(owner: str, name: str) -> AttributeError:
    """Return the error for an attribute that vLLM's LLM has and an engine has not."""
    return AttributeError(f"{owner} has no {name!r}: {MISSING_METHODS[name]}")
