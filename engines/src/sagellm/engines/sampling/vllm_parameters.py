"""Parameters of vLLM's SamplingParams that do not exist here: which values are accepted, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sagellm.core.errors import InvalidRequestError
from sagellm.engines.config.vllm_names import VLLMSetting

_GRAMMAR = "give structured_outputs={'json': …}, or regex, choice, grammar, structural_tag"
_BEAMS = "there is no beam search among sampling parameters; call LLMEngine.beam_search"
_NO_EFFECT = "leave it out"

VLLM_PARAMETERS: Mapping[str, VLLMSetting] = {
    "best_of": VLLMSetting(
        (None, 1),
        "give n and logprobs=0, and keep the outputs with the highest cumulative_logprob per token, as POST "
        "/v1/completions does for best_of",
    ),
    "early_stopping": VLLMSetting((None, False), _BEAMS),
    "flat_logprobs": VLLMSetting((False,), "log-probabilities are always kept packed; leave it out"),
    "guided_decoding": VLLMSetting((None,), _GRAMMAR),
    "length_penalty": VLLMSetting((None, 1), _BEAMS),
    "logits_processors": VLLMSetting(
        (None, []), "name them in the engine's logits_processors; give their arguments as extra_args"
    ),
    "logprob_token_ids": VLLMSetting((None,), "give logprobs, which reports the most likely tokens"),
    "output_kind": VLLMSetting(
        (None, "CUMULATIVE"),
        "an output has all so far: for FINAL_ONLY keep the last one, for DELTA what is new in each",
    ),
    "prompt_logprob_start": VLLMSetting((None, 0), "prompt_logprobs scores the whole prompt"),
    "prompt_logprob_token_ids": VLLMSetting((None,), "give prompt_logprobs"),
    "repetition_detection": VLLMSetting((None,), "give frequency_penalty or repetition_penalty"),
    "routed_experts_prompt_start": VLLMSetting((0,), "the experts of a token are not reported"),
    "skip_clone": VLLMSetting((True, False), _NO_EFFECT),
    "skip_reading_prefix_cache": VLLMSetting(
        (None, False), "give the request a namespace of its own, namespace=Namespace(salt=…)"
    ),
    "spaces_between_special_tokens": VLLMSetting(
        (None, True), "the tokenizer's own decoder decides about spaces; leave it out"
    ),
    "stream_interval": VLLMSetting((None, 1), "each step yields its tokens; leave it out"),
    "thinking_token_budget": VLLMSetting(
        (None, -1), "max_tokens bounds reasoning and answer together; leave it out"
    ),
    "trace_decode_token_ids": VLLMSetting((None,), "output cannot be dictated; leave it out"),
    "truncate_prompt_tokens": VLLMSetting((None,), "shorten the prompt"),
    "use_beam_search": VLLMSetting((None, False), _BEAMS),
}
"""Name → the values that are accepted, and what to do instead of others."""


def without_vllm_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters without vLLM's that change nothing. Raises InvalidRequestError for other values."""
    for name in given.keys() & VLLM_PARAMETERS.keys():
        setting, value = VLLM_PARAMETERS[name], given[name]
        if name == "output_kind":  # a member of vLLM's enumeration, or its name
            value = getattr(value, "name", value)
        if not setting.accepts_value(value):
            raise InvalidRequestError(f"SamplingParams has no {name!r}: {setting.instead}")
    return {name: value for name, value in given.items() if name not in VLLM_PARAMETERS}
