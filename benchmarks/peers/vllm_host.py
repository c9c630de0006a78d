"""vLLM's scheduler without a model, for `host_step.py`. Runs in vLLM's interpreter, written for 0.32."""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm
from rounds import answer
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

_BLOCK_SIZE = 16
_LONGEST = 1 << 17
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 151_936,
    "max_position_embeddings": _LONGEST,
}
init_none_hash(sha256)
_HASHER = get_request_block_hasher(_BLOCK_SIZE, sha256)


def make_scheduler(
    num_seqs: int,
    num_blocks: int,
    budget: int,
    cls: type[Scheduler] = Scheduler,
    additional: dict[str, Any] | None = None,
) -> Scheduler:
    """Make a scheduler with its defaults, vLLM's own or one that reads an additional configuration."""
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    model = ModelConfig(
        model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=_LONGEST
    )
    scheduler = SchedulerConfig(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=_LONGEST,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
    )
    cache = CacheConfig(block_size=_BLOCK_SIZE, enable_prefix_caching=True)
    config = VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=cache,
        additional_config=additional or {},
    )
    cache.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=_BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    kv_cache = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return cls(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=_BLOCK_SIZE,
        hash_block_size=_BLOCK_SIZE,
        log_stats=False,
    )


def step(scheduler: Scheduler) -> tuple[float, float]:
    """Plan a step, take token 5 for each request past its prompt, and return both calls' microseconds."""
    begun_ns = time.perf_counter_ns()
    planned = scheduler.schedule()
    spent_ns = time.perf_counter_ns() - begun_ns
    names = list(planned.num_scheduled_tokens)
    requests = [scheduler.requests[name] for name in names]
    output = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[5] if each.num_computed_tokens >= each.num_tokens else [] for each in requests],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    begun_ns = time.perf_counter_ns()
    scheduler.update_from_output(planned, output)
    return spent_ns / 1000, (time.perf_counter_ns() - begun_ns) / 1000


def measure(what: str, *how: int) -> object:
    """Answer a question: "steps" with its numbers, or "admission"."""
    return measure_steps(*how) if what == "steps" else measure_admission()


def measure_admission() -> tuple[list[float], list[int]]:
    """Return, for each step, the microseconds of schedule per admitted prompt, and the prompts."""
    rng = random.Random(7)
    scheduler = make_scheduler(1024, 1 << 17, 8192)
    params = SamplingParams(max_tokens=10_000, ignore_eos=True)
    for number in range(1000):
        tokens = [rng.randrange(150_000) for _ in range(512)]
        scheduler.add_request(Request(str(number), tokens, params, None, block_hasher=_HASHER))
    took, num_admitted = [], []
    while len(scheduler.waiting):
        before = len(scheduler.running)
        spent_us, _ = step(scheduler)
        if num_new := len(scheduler.running) - before:
            took.append(spent_us / num_new)
            num_admitted.append(num_new)
    return took, num_admitted


def measure_steps(
    num_running: int, context: int, num_waiting: int, num_steps: int
) -> list[tuple[float, float]]:
    """Return the microseconds of steps in which so many requests decode."""
    rng = random.Random(7)
    num_blocks = num_running * (context // _BLOCK_SIZE + 64)
    scheduler = make_scheduler(num_running, num_blocks, max(8192, num_running * context))
    params = SamplingParams(max_tokens=10_000, ignore_eos=True)
    for number in range(num_running + num_waiting):
        length = context - 64 if number < num_running else 512
        tokens = [rng.randrange(150_000) for _ in range(length)]
        scheduler.add_request(Request(str(number), tokens, params, None, block_hasher=_HASHER))
    while len(scheduler.running) < num_running or any(
        each.num_computed_tokens < context - 64 for each in scheduler.running
    ):
        step(scheduler)
    for _ in range(5):
        step(scheduler)
    return [step(scheduler) for _ in range(num_steps)]


if __name__ == "__main__":
    answer(lambda: (measure, {"version": vllm.__version__}))
