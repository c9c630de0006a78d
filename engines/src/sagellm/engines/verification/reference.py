"""A checkpoint in transformers' own code, to compare an engine with."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sagellm.core import CheckpointError, EngineError, OutOfMemoryError, PluginRegistry
from sagellm.engines.loading.device_and_dtype import dtype_name
from sagellm.engines.loading.format_and_family import installed_formats, select_format
from sagellm.engines.models.quiet import quiet_transformers
from sagellm.engines.verification.comparison import Difference


class Reference:
    """Says where transformers would have taken other tokens than an engine did.

    It reads prompt and answer in one pass, so every token is judged after the very tokens before it, also
    behind a difference, and an answer costs no more than a prompt of its length. Up to the first difference
    that is what transformers' greedy `generate` gives. No code of the checkpoint is run and nothing is
    unpickled. Raises CheckpointError where transformers cannot load it, OutOfMemoryError.
    """

    def __init__(self, path: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        self._device, self._dtype = device, dtype
        options = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
        try:
            with quiet_transformers():
                model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
                self._model: Any = model.eval().to(device)
        except Exception as error:  # of many types
            if _is_out_of_memory(error):
                raise self._out_of_memory("loading the model in transformers") from error
            raise CheckpointError(
                f"transformers cannot load {path}, so there is nothing to compare with: {error}"
            ) from error
        takes = inspect.signature(self._model.forward).parameters
        self._can_skip = "logits_to_keep" in takes  # logits of a long prompt may be larger than the model

    def differences(self, prompt: Sequence[int], answer: Sequence[int]) -> list[Difference]:
        """Return the places of an answer where the most likely token is another one, and by how much.

        Raises EngineError if the logits are not finite, OutOfMemoryError.
        """
        try:
            logprobs = self._logprobs(prompt, answer)
        except Exception as error:
            if _is_out_of_memory(error):
                raise self._out_of_memory(f"a pass over {len(prompt) + len(answer)} tokens") from error
            raise
        if not logprobs.isfinite().any(dim=-1).all() or logprobs.isnan().any():
            raise EngineError(
                f"transformers' logits are not finite in {dtype_name(self._dtype)}; use --dtype float32"
            )
        best = logprobs.max(dim=-1)
        own = logprobs.gather(1, torch.tensor(answer, device=logprobs.device)[:, None])[:, 0]
        return [
            Difference(
                place=place,
                token_id=answer[place],
                reference_token_id=int(best.indices[place]),
                logprob=float(own[place]),
                reference_logprob=float(best.values[place]),
            )
            for place in torch.nonzero(best.indices.cpu() != torch.tensor(answer)).flatten().tolist()
        ]

    def _logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Return the log-probabilities of each token of an answer, (answer, vocab) float32."""
        ids = torch.tensor([[*prompt, *answer[:-1]]], device=self._device)
        keep = {"logits_to_keep": len(answer)} if self._can_skip else {}
        with torch.inference_mode():
            output = self._model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **keep)
            logits: torch.Tensor = output.logits[0, -len(answer) :]
            return logits.float().log_softmax(dim=-1)

    def _out_of_memory(self, what: str) -> OutOfMemoryError:
        smaller = "use --dtype bfloat16, which compares less sharply, or " if self._dtype.itemsize > 2 else ""
        return OutOfMemoryError(
            f"memory ran out: {what} in {dtype_name(self._dtype)} does not fit on {self._device}; "
            f"{smaller}verify on a machine with more memory"
        )


def num_bytes_in(path: Path, dtype: torch.dtype) -> int:
    """Return how large a checkpoint's tensors are in a number format. Raises CheckpointError.

    Of quantized weights this is what they are in that format, which transformers makes of most.
    """
    formats = installed_formats(PluginRegistry.load())
    tensors = select_format(path, formats).open(path).weights.tensors.values()
    return sum(math.prod(tensor.shape) for tensor in tensors) * dtype.itemsize


def _is_out_of_memory(error: Exception) -> bool:
    """Recognise what torch raises, on a CPU a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
