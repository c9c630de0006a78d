"""Ours, in this process; formats without settings are the checkpoint's own."""

from __future__ import annotations

import time
from typing import Any

from forward_workload import Engine, run

_SETTINGS: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8"},
    "int8-kv8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"quantization": "int4"},
}
_KV_TOKENS = 32 * 400  # 32 sequences of 384 tokens, and what is cached beside them


def _settings(number_format: str) -> dict[str, Any]:
    return {"activations": "int8"} if number_format.endswith("-a8") else _SETTINGS.get(number_format, {})


class SageLLM:
    """Drives `LLMEngine` step by step."""

    def __init__(self, order: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(order["threads"])
        from sagellm.engines import LLMEngine, SamplingParams, __version__

        self._params = SamplingParams
        self._engine = LLMEngine(
            order["model"],
            dtype="bfloat16",
            num_blocks=_KV_TOKENS // 16,
            max_model_len=4096,
            max_num_batched_tokens=2048,
            **_settings(order["format"]),
        )
        self.about = {
            "version": __version__,
            "torch": torch.__version__,
            "backend": str(self._engine.config.forward.backend),
        }

    def rest(self) -> None:
        """Allocate KV, as a server does between requests."""
        while self._engine.use_idle_time():
            pass

    def one(self, prompt: list[int], num_output: int) -> list[float]:
        """Run a request alone."""
        params = self._params(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        started, times = time.perf_counter(), []
        self._engine.add_request(prompt, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                now = time.perf_counter() - started
                times += [now] * (len(output.outputs[0].token_ids) - len(times))
        return times

    def many(self, prompts: list[list[int]], num_output: int) -> int:
        """Run requests at once."""
        params = self._params(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        outputs = self._engine.generate(prompts, params)
        return sum(len(one.outputs[0].token_ids) for one in outputs)


def load(order: dict[str, Any]) -> Engine:
    """Load the engine."""
    return SageLLM(order)


if __name__ == "__main__":
    run(load)
