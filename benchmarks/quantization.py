"""What quantized weights and KV cost in quality: `python benchmarks/quantization.py [MODEL]`.

The same tokens go through the engine's forward pass for each row, a configuration: `weights` or
`weights/kv`, where weights are a dtype, a quantizer, a pattern of sparsity, or the directory of a checkpoint
that `sage llm quantize` wrote, as in `bfloat16 int8 int8/int8 2:4 /tmp/my-fp8`. Printed are
KL(reference ‖ row) in nats per position, the share of positions with the same most likely token, and the
bytes of the weights; with `--speed` also, from a process of its own for each row, tokens/s of a prompt of
512 and of 64 tokens after it, one sequence, the best of three, and the peak memory of that process.

The tokens are text held out from the embedded model's training or, for another model, random ones.
`--calibration-text FILE` writes more such text, which is in neither, for `sage llm quantize --calibrate`.
A model that is not there is made, with the attention of an ordinary initialization.
"""

from __future__ import annotations

import argparse
import random
import re
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from common import report
from make_model import ensure

from sagellm.accel import kl_divergence
from sagellm.core import InputBatch, PluginRegistry, Runtime
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.assembly import load_core
from sagellm.engines.config.schema import EngineConfig

NUM_TOKENS = 512
HELD_OUT_SEED = 1 << 40  # training draws with small seeds
CALIBRATION_SEED = HELD_OUT_SEED + 12_345
CALIBRATION_CHARACTERS = 90_000
DTYPES = ("float32", "bfloat16", "float16")


def settings_of(model: str, row: str, backend: str) -> dict[str, Any]:
    """Return the engine settings of a row."""
    weights, slash, kv = row.rpartition("/")
    if not slash or Path(row).is_dir():
        weights, kv = row, "auto"
    settings = {"model": model, "dtype": "bfloat16", "forward_backend": backend, "kv_cache_dtype": kv}
    if Path(weights).is_dir():
        return settings | {"model": weights, "num_blocks": 256}
    kind = "sparsity" if re.fullmatch(r"\d+:\d+", weights) else "quantization"
    return settings | {"dtype" if weights in DTYPES else kind: weights, "num_blocks": 256}


def measure(settings: dict[str, Any], prompt: list[int]) -> dict[str, float]:
    """Time a prompt and what follows it in this process, and return its peak memory."""
    with LLMEngine(**settings, enable_prefix_caching=False) as engine:
        times = {
            num_tokens: min(_seconds(engine, prompt, num_tokens) for _ in range(3)) for num_tokens in (1, 65)
        }
    return {
        "prefill_tokens_per_s": round(len(prompt) / times[1], 1),
        "decode_tokens_per_s": round(64 / (times[65] - times[1]), 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def _seconds(engine: LLMEngine, prompt: list[int], num_tokens: int) -> float:
    started_s = time.perf_counter()
    engine.generate([prompt], SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))
    return time.perf_counter() - started_s


def compute_logits(model: str, prompts: list[list[int]], row: str, backend: str) -> tuple[torch.Tensor, int]:
    """Return the logits (tokens, vocab) of all prompts and the bytes of the weights."""
    config = EngineConfig.from_flat(**settings_of(model, row, backend))
    core = load_core(config, registry=PluginRegistry.load(), runtime=Runtime.system())
    try:
        logits = torch.cat([_prefill(core, tokens) for tokens in prompts])
        return logits, core.runner.backend.model_metrics().weight_bytes
    finally:
        core.close()


def _prefill(core: Any, tokens: list[int]) -> torch.Tensor:
    positions = torch.arange(len(tokens))
    block_size = core.info.layout.block_size
    logits: torch.Tensor = core.runner.backend.forward(
        InputBatch(
            input_ids=torch.tensor(tokens),
            position_ids=positions,
            slot_mapping=positions,
            block_tables=torch.arange(-(-len(tokens) // block_size))[None],
            query_lens=[len(tokens)],
            seq_lens=[len(tokens)],
            logits_indices=positions,
        )
    )
    return logits.clone()


def dialogues(seed: int) -> Iterator[tuple[Any, list[dict[str, str]]]]:
    """Yield the embedded model's tokenizer and dialogues drawn as its training text was, with a seed."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "engines" / "embedded_model"))
    from corpus.mixture import Mixture
    from corpus.sample import Passage

    from sagellm.engines.embedded import embedded_model
    from sagellm.engines.loading.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(embedded_model())
    for sample in Mixture(seed):
        if not isinstance(sample, Passage):
            yield tokenizer, [{"role": each.role, "content": each.content} for each in sample.messages]


def held_out_text(num_prompts: int) -> list[list[int]]:
    """Return prompts from dialogues drawn as the embedded model's training text was, with another seed."""
    tokens: list[int] = []
    for tokenizer, messages in dialogues(HELD_OUT_SEED):
        tokens += tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        if len(tokens) >= num_prompts * NUM_TOKENS:
            break
    return [tokens[begin : begin + NUM_TOKENS] for begin in range(0, num_prompts * NUM_TOKENS, NUM_TOKENS)]


def write_calibration_text(path: Path) -> None:
    """Write dialogues with a third seed, about 20,000 tokens."""
    text = ""
    for tokenizer, messages in dialogues(CALIBRATION_SEED):
        text += tokenizer.apply_chat_template(messages, tokenize=False)
        if len(text) > CALIBRATION_CHARACTERS:
            break
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--prompts", type=int, default=16, help="of 512 tokens each")
    parser.add_argument("--against", default="float32", help="the reference: a row")
    parser.add_argument("--rows", nargs="*", default=["bfloat16", "int8", "int4"])
    parser.add_argument("--backend", default="auto", help="forward backend")
    parser.add_argument("--speed", action="store_true", help="measure speed and memory, too")
    parser.add_argument("--calibration-text", type=Path, metavar="FILE", help="write this text, and end")
    options = parser.parse_args()
    if options.calibration_text is not None:
        write_calibration_text(options.calibration_text)
        return
    if options.model == "embedded":
        model, prompts = options.model, held_out_text(options.prompts)
    else:
        model = str(ensure(Path(options.model), sharpness=1 / 3))
        rng = random.Random(0)
        prompts = [[rng.randrange(3, 20_000) for _ in range(NUM_TOKENS)]]
    reference, _ = compute_logits(model, prompts, options.against, options.backend)
    figures = {}
    for row in options.rows:
        logits, weight_bytes = compute_logits(model, prompts, row, options.backend)
        agreement = (logits.argmax(-1) == reference.argmax(-1)).double().mean().item()
        figures[row] = {
            "kl_nats": kl_divergence(reference, logits),
            "same_top_token": round(agreement, 4),
            "weights_mib": round(weight_bytes / 2**20, 1),
        }
        if options.speed:
            settings = settings_of(model, row, options.backend)
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                figures[row] |= process.submit(measure, settings, prompts[0]).result()
    report("quantization", tokens=len(prompts) * NUM_TOKENS, against=options.against, **figures)


if __name__ == "__main__":
    main()
