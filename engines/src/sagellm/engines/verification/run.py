"""Takes an engine's answers, and then, when its memory is free again, the reference's opinion of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sagellm.core import CheckpointError, EngineError
from sagellm.engines.forward.device_memory import available_memory_bytes
from sagellm.engines.loading.device_and_dtype import resolve_device, torch_dtype
from sagellm.engines.loading.source import resolve_source
from sagellm.engines.progress import progress_bar
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.sizes import format_bytes
from sagellm.engines.verification.comparison import TIE_MARGINS, ComparedPrompt, Verification
from sagellm.engines.verification.prompts import AskedPrompt
from sagellm.engines.verification.reference import Reference, num_bytes_in

if TYPE_CHECKING:
    from sagellm.engines import LLMEngine
    from sagellm.engines.config.schema import EngineConfig
    from sagellm.engines.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What an engine with this configuration answered, and what turns its tokens into text."""

    config: EngineConfig  # as assembled
    prompts: list[AskedPrompt]
    token_ids: list[list[int]]
    tokenizer: Tokenizer | None

    @property
    def is_lossy(self) -> bool:
        """Whether the engine prunes weights, or rounds them, KV or activations as the reference does not."""
        model = self.config.model
        settings = (model.quantization, model.activations, model.sparsity)
        return any(each is not None for each in settings) or self.config.kv.dtype != model.dtype


def take_answers(engine: LLMEngine, prompts: Sequence[AskedPrompt], *, max_tokens: int) -> Answers:
    """Generate greedily, all prompts together as a server would. Raises what `generate` does, EngineError."""
    # Past an end of sequence too: it is a token like any other, and short answers would show little.
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    outputs = engine.generate([list(each.token_ids) for each in prompts], params, progress=True)
    answers = [output.outputs[0] for output in outputs]
    for number, answer in enumerate(answers, 1):
        if answer.finish_reason == "error":
            raise EngineError(f"prompt {number} failed: {answer.error}")
    return Answers(
        config=engine.config,
        prompts=list(prompts),
        token_ids=[list(answer.token_ids) for answer in answers],
        tokenizer=engine.light_tokenizer,
    )


def reference_of(answers: Answers, warn: Callable[[str], None]) -> Reference:
    """Load the checkpoint in transformers, in the engine's number format and on its device.

    `warn` is told beforehand if it is larger than the free memory, since on a CPU the kernel then ends the
    process. Raises what `Reference` does.
    """
    model = answers.config.model
    device, dtype = resolve_device(model.device), torch_dtype(model.dtype)
    path = resolve_source(model.name, revision=model.revision)
    if path.is_file():
        raise CheckpointError(
            f"{path} is a GGUF file, which transformers does not load as it stands; verify the checkpoint "
            f"that it was made of"
        )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    needed, available = num_bytes_in(path, dtype), available_memory_bytes(device)
    if available is not None and needed > available:
        warn(
            f"transformers needs {format_bytes(needed)} for this model in {model.dtype}, and "
            f"{format_bytes(available)} are available on {device}; it may run out of memory"
        )
    return Reference(path, dtype=dtype, device=device)


def compare(answers: Answers, reference: Reference, *, tie_margin: float | None = None) -> Verification:
    """Have the reference read every answer. Raises what `Reference.differences` does.

    Without a margin it is that of the number format, `TIE_MARGINS`.
    """
    compared = []
    with progress_bar("comparing", total=len(answers.prompts), unit="prompts") as advance:
        for prompt, token_ids in zip(answers.prompts, answers.token_ids, strict=True):
            compared.append(
                ComparedPrompt(
                    text=prompt.text,
                    num_prompt_tokens=len(prompt.token_ids),
                    token_ids=token_ids,
                    differences=reference.differences(prompt.token_ids, token_ids),
                )
            )
            advance(1)
    if tie_margin is None:
        tie_margin = TIE_MARGINS[answers.config.model.dtype]
    return Verification(prompts=compared, tie_margin=tie_margin, is_lossy=answers.is_lossy)
