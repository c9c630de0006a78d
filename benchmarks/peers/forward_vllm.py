"""vLLM for CPUs, offline, prefix caching on; kv8 is FP8.

vLLM wants tcmalloc and Intel's OpenMP preloaded: set LD_PRELOAD where they are at hand.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from forward_workload import Engine, run

_KV_GIB = "4"


class VLLM:
    """Drives `LLMEngine` in this process."""

    def __init__(self, order: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _KV_GIB)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{order['threads'] - 1}")
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import torch
        import vllm

        self._vllm = vllm
        self._llm = vllm.LLM(
            order["model"],
            dtype="bfloat16",
            kv_cache_dtype="fp8" if order["format"].endswith("-kv8") else "auto",
            max_model_len=4096,
            max_num_seqs=32,
            max_num_batched_tokens=4096,
            enable_prefix_caching=True,
            disable_log_stats=True,
            seed=0,
        )
        self._num_requests = 0
        self.about = {
            "version": vllm.__version__,
            "torch": torch.__version__,
            "preloaded": [Path(each).name for each in os.environ.get("LD_PRELOAD", "").split(":") if each],
        }

    def rest(self) -> None:
        """Nothing: what it needs is allocated as it is made."""

    def one(self, prompt: list[int], num_output: int) -> list[float]:
        """Run a request alone."""
        engine, times = self._llm.llm_engine, []
        params = self._params(num_output)
        self._num_requests += 1
        started = time.perf_counter()
        prompts = self._vllm.TokensPrompt(prompt_token_ids=prompt)
        engine.add_request(str(self._num_requests), prompts, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                now = time.perf_counter() - started
                times += [now] * (len(output.outputs[0].token_ids) - len(times))
        return times

    def many(self, prompts: list[list[int]], num_output: int) -> int:
        """Run requests at once."""
        given = [self._vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self._llm.generate(given, self._params(num_output), use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in outputs)

    def _params(self, num_output: int) -> Any:
        return self._vllm.SamplingParams(
            temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False
        )


def load(order: dict[str, Any]) -> Engine:
    """Load the engine."""
    return VLLM(order)


if __name__ == "__main__":
    run(load)
