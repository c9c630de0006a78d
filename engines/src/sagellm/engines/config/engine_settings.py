"""What `LLMEngine(…)` takes by keyword, as engines/tools/engine_settings.py writes it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from sagellm.core import ProviderSpec


class EngineSettings(TypedDict, total=False):
    """The settings of an engine by their flat names, except `model`; docs/configuration.md lists them."""

    engine_kind: str | Mapping[str, Any] | ProviderSpec
    """engine by name: llm is the one that comes with sageLLM"""
    tokenizer: str | os.PathLike[str] | None
    """tokenizer: a directory or a hub id, if not the model's own"""
    revision: str | None
    """branch, tag or commit of a hub id"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    """number format of weights and KV: auto, float32, bfloat16 or float16"""
    device: str
    """where the model runs: auto, cpu, cuda or cuda:N"""
    quantization: str | Mapping[str, Any] | ProviderSpec | None
    """quantizer that the weights go through at loading"""
    activations: Literal["int8"] | None
    """int8: activations are rounded to 8 bits where weights are stored as integers, which is faster on CPUs;
    null: as the checkpoint says"""
    sparsity: str | Mapping[str, Any] | ProviderSpec | None
    """sparsifier that prunes the layers' weights at loading, or a pattern such as 2:4"""
    packed_cache: str | None
    """folder that keeps packed weights, so that later loads only map them; null: none"""
    max_model_len: int | None
    """longest prompt and output together, in tokens; null: the model's own"""
    seed: int | None
    """seed of requests that bring none; null: a fresh one each"""
    block_size: int
    """tokens in a KV block"""
    num_blocks: int | None
    """KV blocks; null: what memory allows, at most max_num_seqs of the longest sequences"""
    gpu_memory_utilization: float | None
    """share of the free memory for KV; null: 0.9 on a GPU, 0.5 on a CPU"""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]
    """number format of KV: auto (that of the model), float32, bfloat16, float16, int8 or fp8"""
    kv_pool: str | Mapping[str, Any] | ProviderSpec
    """KV pool by name"""
    kv_allocator: str | Mapping[str, Any] | ProviderSpec
    """allocator of KV blocks by name: free_list, buddy"""
    kv_tiers: Mapping[str, Any] | str | Sequence[str | Mapping[str, Any] | ProviderSpec]
    """tiers for evicted KV, the fastest first, as in {host: 4GiB, file: {max_bytes: 20GiB}}"""
    kv_fetch: Literal["cheaper", "always", "never"]
    """whether KV comes back from a tier: cheaper (than computing it), always or never"""
    kv_store_key: str | None
    """file with the key that seals KV in files and servers, or env:NAME of a variable; null: kv.key in the
    runtime folder"""
    kv_save_folder: str | os.PathLike[str] | None
    """folder of `cache save` and `load`; null: sagellm/kv among the user's data"""
    kv_max_saved: str | int
    """most bytes of all saves together, as in 64GiB"""
    enable_prefix_caching: bool
    """reuse the KV of prompts that begin alike"""
    prefix_cache: str | Mapping[str, Any] | ProviderSpec
    """prefix cache by name"""
    prefix_cache_max_blocks: int | None
    """most KV blocks that the cache keeps; null: all there are"""
    eviction_policy: str | Mapping[str, Any] | ProviderSpec
    """policy that chooses what is evicted, by name"""
    shadow: str | Sequence[str | Mapping[str, Any] | ProviderSpec]
    """policies that run beside it without KV, separated by commas, to see what each would have saved"""
    shadow_sample: float
    """share of the blocks that shadows simulate; below 1 they estimate"""
    scheduler: str | Mapping[str, Any] | ProviderSpec
    """scheduler by name"""
    scheduler_passes: str | Sequence[str | Mapping[str, Any] | ProviderSpec]
    """more passes by name, after order and before share, separated by commas; order=NAME, share=NAME,
    preempt=NAME and chunk=NAME name those"""
    scheduler_print: Literal["none", "changed", "ir"]
    """what passes do, on standard error: changed (each decision), ir (the whole schedule after each pass) or
    none"""
    step_target_ms: float | None
    """milliseconds that a step may take while others decode or wait; null: 250 on a CPU, 50 on a GPU, eight
    times that in Python's `generate`"""
    max_num_batched_tokens: int
    """most tokens computed in one step"""
    max_num_seqs: int
    """most sequences that run at once"""
    lifetime_predictor: str | Mapping[str, Any] | ProviderSpec
    """lifetime predictor by name"""
    speculation: str | Mapping[str, Any] | ProviderSpec | None
    """draft proposer by name: ngram, suffix; null: no drafts"""
    adaptive_speculation: bool
    """draft as many tokens as pay, by what was accepted and what steps took; false: always as many as the
    proposer has, at most 16"""
    forward_backend: str | Mapping[str, Any] | ProviderSpec
    """forward backend by name; auto: the first installed one that can run the model"""
    attention_backend: str | Mapping[str, Any] | ProviderSpec
    """attention backend by name"""
    executor: str | Mapping[str, Any] | ProviderSpec
    """where steps are computed, by name"""
    deterministic: bool
    """give each request the same bits alone and beside others; only backends that do so are taken"""
    logits_processors: str | Sequence[str | Mapping[str, Any] | ProviderSpec]
    """logits processors by name, after the built-in ones, in order, separated by commas"""
    grammar_backend: str | Mapping[str, Any] | ProviderSpec
    """who compiles what structured outputs must match, by name"""
    trace: str | os.PathLike[str] | None
    """file for a trace of steps and requests in Chrome's format; an existing one is overwritten"""
    profile: bool
    """when the engine ends, print on standard error where the time of its steps went, by operation, and how
    close each came to the machine's limits"""
    record: str | None
    """file that gets a line for each finished request: salted hashes of its blocks, lengths and times, no
    text; one that exists is kept as FILE.1"""
    record_text: bool
    """record the tokens of prompts and answers too, which are their text"""
    record_folder: str | None
    """folder of `engine record start`; null: sagellm/recordings among the user's data"""
    record_max_file_size: str
    """bytes after which the file is renamed FILE.1, as in 256MiB"""
    record_max_files: int
    """most files of one name; the oldest is removed for a new one"""
    topology: str | Mapping[str, Any] | ProviderSpec
    """topology reader by name: finds out what this machine has"""

    # Names of vLLM's that may say what is so here anyway.
    tensor_parallel_size: Literal[1]
    pipeline_parallel_size: Literal[1]
    data_parallel_size: Literal[1]
    trust_remote_code: Literal[False]
    enforce_eager: bool
    disable_log_stats: bool
    enable_chunked_prefill: Literal[True]
    swap_space: Literal[0]
    cpu_offload_gb: Literal[0]
    load_format: Literal["auto", "safetensors"]
    tokenizer_mode: Literal["auto"]
    skip_tokenizer_init: Literal[False]
    enable_lora: Literal[False]
    speculative_config: None
    structured_outputs_config: None
    guided_decoding_backend: None
    compilation_config: None
    num_gpu_blocks_override: None
    download_dir: None
    hf_token: None
