"""transformers' `generate`, bf16, attention by torch's fused operator."""

from __future__ import annotations

import time
from typing import Any

from forward_workload import Engine, run


class _Streamer:
    """Takes the time of each token; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._has_prompt = False
        self._started = time.perf_counter()

    def put(self, _: Any) -> None:
        """Note a token."""
        if self._has_prompt:
            self.times.append(time.perf_counter() - self._started)
        self._has_prompt = True

    def end(self) -> None:
        """Do nothing."""


class Transformers:
    """A model of transformers; a prompt that begins like the last one goes on from its KV."""

    def __init__(self, order: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(order["threads"])
        self._torch, self._transformers = torch, transformers
        self._model = transformers.AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.bfloat16)
        self._model.eval()
        self._model.generation_config.eos_token_id = None
        self._last: tuple[list[int], Any] = ([], None)
        self.about = {"version": transformers.__version__, "torch": torch.__version__}

    def rest(self) -> None:
        """Nothing: what it needs is allocated as it is made."""

    def one(self, prompt: list[int], num_output: int) -> list[float]:
        """Run a request alone, from the KV of the last prompt where both begin alike."""
        torch = self._torch
        known, cache = self._last
        num_known = next((n for n, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), 0)
        streamer = _Streamer()
        if cache is None or num_known < 16:
            cache = self._transformers.DynamicCache()
        else:
            cache.crop(num_known - cache.get_seq_length())  # tokens to remove, as a negative number
        with torch.inference_mode():
            self._model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=num_output,
                streamer=streamer,
                past_key_values=cache,
            )
        self._last = (prompt, cache)
        return streamer.times

    def many(self, prompts: list[list[int]], num_output: int) -> int:
        """Run requests of one length as one batch."""
        torch, ids = self._torch, self._torch.tensor(prompts)
        with torch.inference_mode():
            found = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_output
            )
        return int((found.shape[1] - ids.shape[1]) * found.shape[0])


def load(order: dict[str, Any]) -> Engine:
    """Load the model."""
    return Transformers(order)


if __name__ == "__main__":
    run(load)
