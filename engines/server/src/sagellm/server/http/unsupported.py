"""Parameters in OpenAI's or vLLM's documentation that have no effect here.

Parameters that would change the answer are refused by name, unless their value requests nothing: null, or one
of the values in the table. Others are ignored if their type is right, and listed in the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_TOOLS = "functions are given as tools"
_CHATS = "only POST /v1/chat/completions has tools"
_GRAMMAR = "give structured_outputs={json, json_object, regex, choice, grammar or structural_tag}"
_TEXT = "the models here read and write text"
_STORE = "nothing is stored"
_BEAMS = "the server has no beam search; LLMEngine.beam_search does it in Python"
_CODE = "no code or template comes from a request"


class Refusal(NamedTuple):
    """Why a parameter is not supported, and its values that request nothing."""

    why: str = ""
    neutral: tuple[Any, ...] = ()


IGNORED: Mapping[str, type] = {
    "metadata": dict,
    "prediction": dict,
    "prompt_cache_key": str,
    "prompt_cache_options": dict,
    "prompt_cache_retention": str,
    "safety_identifier": str,
    "service_tier": str,
    "store": bool,
    "user": str,
}
"""Ignored in a body if of this type: they say who asks, what to store or how soon to answer."""

UNUSED_IF_NONE: Mapping[str, str] = {"function_call": "functions"}
"""A choice, and the list that is ignored, too, if the choice is "none": the model calls none of it."""

IGNORED_IN_MESSAGES: Mapping[str, type] = {"annotations": list}
"""Ignored in messages: what accompanied an answer."""

UNSUPPORTED: Mapping[str, Refusal] = {
    # OpenAI
    "audio": Refusal(_TEXT),
    "modalities": Refusal(_TEXT, (["text"],)),
    "function_call": Refusal(_TOOLS, ("none",)),
    "functions": Refusal(_TOOLS, ([],)),
    "suffix": Refusal("the models here continue a text", ("",)),
    "moderation": Refusal("nothing is moderated"),
    "verbosity": Refusal(),
    "web_search_options": Refusal("the server reaches no network"),
    # vLLM
    "add_special_tokens": Refusal(),
    "bad_words_token_ids": Refusal("give bad_words"),
    "chat_template": Refusal(_CODE),
    "continue_final_message": Refusal("", (False,)),
    "documents": Refusal(),
    "early_stopping": Refusal(_BEAMS, (False,)),
    "guided_decoding_backend": Refusal("the server's --grammar-backend names it"),
    "guided_whitespace_pattern": Refusal("the server's --grammar-backend bounds white space"),
    "kv_transfer_params": Refusal(),
    "length_penalty": Refusal(_BEAMS, (1, 1.0)),
    "logits_processors": Refusal(_CODE),
    "logits_processors_args": Refusal(_CODE),
    "logprob_token_ids": Refusal(),
    "media_io_kwargs": Refusal(_TEXT),
    "mm_processor_kwargs": Refusal(_TEXT),
    "prompt_embeds": Refusal("tensors are not read"),
    "repetition_detection": Refusal(),
    "request_id": Refusal("send it as the header X-Request-Id"),
    "spaces_between_special_tokens": Refusal("", (True,)),
    "structural_tag": Refusal(_GRAMMAR),
    "thinking_token_budget": Refusal("max_tokens bounds reasoning and answer together"),
    "truncate_prompt_tokens": Refusal("shorten the prompt"),
    "use_beam_search": Refusal(_BEAMS, (False,)),
    # SGLang
    "ebnf": Refusal(_GRAMMAR),
    "json_schema": Refusal(_GRAMMAR),
    "lora_path": Refusal("adapters are not loaded"),
    "regex": Refusal(_GRAMMAR),
    "separate_reasoning": Refusal("a server with a reasoning parser always does", (True,)),
    "session_params": Refusal(_STORE),
    # one endpoint's parameters, sent to the other
    "best_of": Refusal("only POST /v1/completions ranks continuations; use n", (1,)),
    "chat_template_kwargs": Refusal("only POST /v1/chat/completions has a template", ({},)),
    "echo": Refusal("only POST /v1/completions repeats the prompt", (False,)),
    "return_token_ids": Refusal("only POST /v1/completions returns them", (False,)),
    "max_completion_tokens": Refusal("POST /v1/completions takes max_tokens"),
    "top_logprobs": Refusal("POST /v1/completions takes a number in logprobs"),
    "add_generation_prompt": Refusal("only POST /v1/chat/completions has a template"),
    "tools": Refusal(_CHATS, ([],)),
    "tool_choice": Refusal(_CHATS, ("none", "auto")),
    "parallel_tool_calls": Refusal(_CHATS, (True, False)),
    "reasoning_effort": Refusal("only POST /v1/chat/completions has a template"),
    "include_reasoning": Refusal("only POST /v1/chat/completions splits answers", (True,)),
    "messages": Refusal("POST /v1/completions takes a prompt"),
    "prompt": Refusal("POST /v1/chat/completions takes messages"),
}

UNSUPPORTED_IN_MESSAGES: Mapping[str, Refusal] = {
    "audio": Refusal(_TEXT),
    "function_call": Refusal(_TOOLS),
    "refusal": Refusal(),
}


def asks_for_nothing(refusal: Refusal, value: Any) -> bool:
    """Say whether a value means the same as omitting the parameter."""
    return value is None or any(
        type(value) is type(neutral) and value == neutral for neutral in refusal.neutral
    )
