"""Settings of vLLM that do not exist here: values that are accepted, and what to write instead of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sagellm.core import ConfigError


class VLLMSetting(NamedTuple):
    """What vLLM alone has: the values accepted because they change nothing here, and why no others are."""

    accepts: tuple[object, ...]
    instead: str

    def accepts_value(self, value: object) -> bool:
        """Say whether a value changes nothing. True and 1 are different; 1 and 1.0 are not."""
        return any(value is accepted or _equal(value, accepted) for accepted in self.accepts)


_ONE_DEVICE = "a model runs on one device; set `device` to choose it"
_BOTH = (True, False)
_GRAMMAR = "write grammar_backend='xgrammar{max_whitespace=0}', or the name of another grammar provider"
SPECULATION = (
    "write speculation='ngram{max_tokens=8,min_match=2}' for {'method': 'ngram', "
    "'num_speculative_tokens': 8, 'prompt_lookup_min': 2}, and speculation='suffix' for "
    "{'method': 'suffix'}; no model drafts"
)

VLLM_NAMES: dict[str, VLLMSetting] = {
    "tensor_parallel_size": VLLMSetting((1,), _ONE_DEVICE),
    "pipeline_parallel_size": VLLMSetting((1,), _ONE_DEVICE),
    "data_parallel_size": VLLMSetting((1,), "start one engine per replica"),
    "trust_remote_code": VLLMSetting((False,), "code that comes with a checkpoint is never run"),
    "enforce_eager": VLLMSetting(_BOTH, ""),
    "disable_log_stats": VLLMSetting(_BOTH, ""),
    "enable_chunked_prefill": VLLMSetting(
        (True,), "long prompts are always computed in chunks, of max_num_batched_tokens at most"
    ),
    "swap_space": VLLMSetting((0,), "kv_tiers={'host': '4GiB'} keeps evicted KV in host memory"),
    "cpu_offload_gb": VLLMSetting((0,), "weights are not offloaded; quantization='int8' makes them smaller"),
    "load_format": VLLMSetting(("auto", "safetensors"), "weights are read from safetensors alone"),
    "tokenizer_mode": VLLMSetting(("auto",), "the tokenizer is the one that transformers chooses"),
    "skip_tokenizer_init": VLLMSetting((False,), "give SamplingParams(detokenize=False) to get no text"),
    "enable_lora": VLLMSetting((False,), "adapters are not supported"),
    "speculative_config": VLLMSetting((None,), SPECULATION),
    "structured_outputs_config": VLLMSetting((None,), _GRAMMAR),
    "guided_decoding_backend": VLLMSetting((None,), _GRAMMAR),
    "compilation_config": VLLMSetting((None,), "nothing is compiled"),
    "num_gpu_blocks_override": VLLMSetting((None,), "set num_blocks"),
    "download_dir": VLLMSetting((None,), "set the environment variable HF_HUB_CACHE to the folder"),
    "hf_token": VLLMSetting((None,), "set the environment variable HF_TOKEN"),
}
"""Name → the values that are accepted, and what to write instead of others."""


def without_vllm_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without vLLM's no-op ones. Raises ConfigError for other values of these."""
    for name in values.keys() & VLLM_NAMES.keys():
        setting = VLLM_NAMES[name]
        if not setting.accepts_value(values[name]):
            one_of = " or ".join(map(repr, setting.accepts))
            why = f": {setting.instead}" if setting.instead else ""
            raise ConfigError(f"{name} is {values[name]!r}; it can only be {one_of} here{why}")
    return {name: value for name, value in values.items() if name not in VLLM_NAMES}


def _equal(value: object, accepted: object) -> bool:
    return type(value) in (int, float, str, list) and not isinstance(accepted, bool) and value == accepted
